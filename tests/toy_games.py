"""Small games of several agents, with PettingZoo's parallel interface: `--env pettingzoo:toy_games` is the first."""

import numpy as np
from gymnasium import spaces

# What the first player of weighted rock-paper-scissors wins. In equilibrium both play (1/4, 1/2, 1/4).
PAYOFFS = np.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]], np.float32)


class RockPaperScissors:
    """One throw of each agent."""

    possible_agents = ["row", "column"]
    metadata = {"name": "weighted_rps_v0"}
    render_mode = None

    def __init__(self):
        self.agents = []

    unwrapped = property(lambda self: self)

    def observation_space(self, agent):
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return self._same(np.ones(1, np.float32)), self._same({})

    def step(self, actions):
        won = float(PAYOFFS[actions["row"], actions["column"]])
        self.agents = []
        rewards = {"row": won, "column": -won}
        return self._same(np.ones(1, np.float32)), rewards, self._same(True), self._same(False), self._same({})

    def _same(self, value):
        return dict.fromkeys(self.possible_agents, value)

    def close(self):
        pass


parallel_env = RockPaperScissors


def exploitability(strategy: np.ndarray) -> float:
    """What the best answer to a mixture of throws wins a game."""
    return float((PAYOFFS @ strategy).max())


class Trap:
    """One step of one agent: action 0 is a success, action 1 is what the reward's term pays for (by default 2)."""

    possible_agents = ["player"]
    metadata = {"name": "trap_v0"}
    render_mode = None
    reward_terms = {"temptation": 2.0}

    def __init__(self):
        self.agents = []

    unwrapped = property(lambda self: self)

    def observation_space(self, agent):
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = ["player"]
        return {"player": np.ones(1, np.float32)}, {"player": {}}

    def step(self, actions):
        self.agents, is_success = [], actions["player"] == 0
        reward = 1.0 if is_success else self.reward_terms["temptation"]
        info = {"true_objective": float(is_success), "reward_terms": np.array([not is_success], np.float32)}
        observations = {"player": np.ones(1, np.float32)}
        return observations, {"player": reward}, {"player": True}, {"player": False}, {"player": info}

    def close(self):
        pass
