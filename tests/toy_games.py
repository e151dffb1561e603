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


class Signal:
    """A speaker sees one of four cues and says one of four words; then a listener, who has heard it, names the cue."""

    possible_agents = ["speaker", "listener"]
    metadata = {"name": "signal_v0"}
    render_mode = None
    is_deaf = False

    def __init__(self):
        self.agents, self._random = [], np.random.default_rng()

    unwrapped = property(lambda self: self)

    def observation_space(self, agent):
        return spaces.Discrete(4) if agent == "speaker" else spaces.Discrete(5)

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents, self._word = list(self.possible_agents), 4
        self._cue = int(self._random.integers(4))
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        is_over = self._word < 4
        reward = float(is_over and actions["listener"] == self._cue)
        self._word = int(actions["speaker"])
        everybody = self.possible_agents
        self.agents = [] if is_over else list(everybody)
        told = (dict.fromkeys(everybody, x) for x in (reward, is_over, False, {}))
        return self._seen(), *told

    def _seen(self):
        return {"speaker": self._cue, "listener": 4 if self.is_deaf else self._word}

    def close(self):
        pass


class Deaf(Signal):
    """The listener hears nothing."""

    is_deaf = True


class Zoo:
    """Agents of three kinds, with everything that an observation and an action may be.

    A fox has a mask, counts from 1 and leaves after three steps. Two hens move by floats; the second one comes after
    two steps. An owl takes two choices. Games last five steps. `given` are the actions of each step.
    """

    possible_agents = ["fox", "hen_0", "hen_1", "owl"]
    metadata = {"name": "zoo_v0"}
    render_mode = None

    def __init__(self):
        self.agents, self.given = [], []

    unwrapped = property(lambda self: self)

    def observation_space(self, agent):
        if agent == "fox":
            return spaces.Dict(observation=spaces.Discrete(3, start=7), action_mask=spaces.Box(0, 1, (1, 3), np.int8))
        return spaces.Box(-1, 1, (2,), np.float32) if agent == "owl" else spaces.Box(0, 9, (3, 2), np.float64)

    def action_space(self, agent):
        if agent == "fox":
            return spaces.Discrete(3, start=1)
        return spaces.MultiDiscrete([2, 4]) if agent == "owl" else spaces.Box(0, 10, (2,), np.float32)

    def reset(self, seed=None, options=None):
        self.agents, self._time, self.given = ["fox", "hen_0", "owl"], 0, []
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
        self.given.append(actions)
        self._time += 1
        there = [*self.agents, *(["hen_1"] if self._time == 2 else [])]
        over = {agent: self._time == 5 or (agent == "fox" and self._time == 3) for agent in there}
        self.agents = [agent for agent in there if not over[agent]]
        rewards = {agent: float(self.possible_agents.index(agent) + 1) for agent in there}
        return self._seen(there), rewards, over, dict.fromkeys(there, False), {agent: {} for agent in there}

    def _seen(self, agents):
        mask = np.array([[1, 0, self._time % 2]], np.int8)
        of_all = {
            "fox": {"observation": 7 + self._time % 3, "action_mask": mask},
            "hen_0": np.full((3, 2), self._time, np.float64),
            "hen_1": np.full((3, 2), self._time + 0.5, np.float64),
            "owl": np.full(2, self._time / 10, np.float32),
        }
        return {agent: of_all[agent] for agent in agents}

    def close(self):
        pass
