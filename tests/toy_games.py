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
