"""How rows of observations reach the agent, and rollouts the learner."""
