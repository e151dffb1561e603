"""Google Research Football's scenarios: `football:<scenario>`, for one player or for several agents."""

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from beast.errors import InputError, MissingPackage, raised

FOOTBALL = "football:"  # begins the ids
ENGINE_SEEDS = 2_000_000_000  # below which it takes one
MOST_PLAYERS = 11  # of a team


class _Game:
    """A game of gfootball, in the terms that both environments below share."""

    def __init__(self, scenario: str, render: bool, kwargs: dict):
        """`kwargs` are `left_players`, `right_players` and arguments of gfootball; by default it shows four stacked
        minimaps (SMM), and pays goals."""
        env_id, (left, right) = f"{FOOTBALL}{scenario}", num_players(kwargs)
        options = {"representation": "extracted", "stacked": True, "rewards": "scoring", **kwargs}
        options = {name: value for name, value in options.items() if name not in ("left_players", "right_players")}
        if not (0 <= left <= MOST_PLAYERS and 0 <= right <= MOST_PLAYERS and left + right):
            raise InputError(
                f"{env_id}: left_players {left} and right_players {right}: each is from 0 to {MOST_PLAYERS}, and "
                "together they are one or more"
            )
        try:
            football = importlib.import_module("gfootball.env")
        except ImportError as error:
            message = f"{env_id} needs Google Research Football ({raised(error)}): pip install gfootball"
            raise MissingPackage(message) from error
        try:
            self.env = football.create_environment(
                env_name=scenario, render=render, number_of_left_players_agent_controls=left,
                number_of_right_players_agent_controls=right, **options,
            )  # fmt: skip
        except SystemExit as error:  # what gfootball does about a scenario that there is not
            raise InputError(f"{env_id}: gfootball has no such scenario (its folder scenarios/ has them)") from error
        self.names = [f"left_{n}" for n in range(left)] + [f"right_{n}" for n in range(right)]
        try:
            given = self.env.observation_space
            several = len(self.names) > 1
            low, high = (np.asarray(x[0] if several else x, given.dtype) for x in (given.low, given.high))
            self.observation_space = spaces.Box(low, high, dtype=given.dtype)
            self.action_space = spaces.Discrete(
                int(self.env.action_space.nvec[0] if several else self.env.action_space.n)
            )
        except BaseException:
            self.env.close()
            raise

    def begin(self, seed: int) -> np.ndarray:
        """Observations of all players [players, …], where there is one player without the first axis."""
        seeds = {"game_engine_random_seed": seed, "reverse_team_processing": bool(seed % 2)}
        self.env.unwrapped._config.update(seeds)
        self._goals = 0.0
        return self._stored(self.env.reset())

    def step(self, action) -> tuple[np.ndarray, Any, bool, bool, dict]:
        """Observations, rewards, whether the game has ended, whether by its clock, and the infos of its end."""
        observation, reward, done, info = self.env.step(action)
        self._goals += float(info.get("score_reward", 0.0))
        is_cut = bool(done) and self.env.unwrapped.observation()[0]["steps_left"] <= 0
        told = {"metrics": {"goal_difference": self._goals}, "true_objective": self._goals} if done else {}
        return self._stored(observation), reward, bool(done), is_cut, told

    def _stored(self, observation) -> np.ndarray:
        return np.asarray(observation, self.observation_space.dtype)

    def frame(self) -> np.ndarray:
        return np.asarray(self.env.render(mode="rgb_array"))


class Football(gymnasium.Env):
    """A scenario for one player: uint8 [72, 96, 16] by default, and 19 actions. The end of its clock truncates."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, scenario: str, render_mode: str | None = None, **kwargs):
        """`kwargs` are `left_players`, `right_players` and arguments of gfootball's create_environment. Raises
        InputError for players that cannot be and unknown scenarios, MissingPackage without gfootball."""
        self.render_mode = render_mode
        self._game = _Game(scenario, bool(render_mode), kwargs)
        self.observation_space, self.action_space = self._game.observation_space, self._game.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._game.begin(int(self.np_random.integers(ENGINE_SEEDS))), {}

    def step(self, action):
        observation, reward, done, is_cut, info = self._game.step(int(action))
        return observation, float(np.asarray(reward).item()), done and not is_cut, is_cut, info

    def render(self):
        return self._game.frame()

    def close(self) -> None:
        self._game.env.close()


class FootballMatch:
    """A scenario whose players are agents, with PettingZoo's parallel interface: `left_0`, `left_1`, …, `right_0`, …"""

    def __init__(self, scenario: str, render_mode: str | None = None, **kwargs):
        """As for `Football`."""
        self._game = _Game(scenario, bool(render_mode), kwargs)
        self.metadata = {"name": f"{FOOTBALL}{scenario}", "render_modes": ["rgb_array"], "render_fps": 10}
        self.render_mode, self.possible_agents = render_mode, self._game.names
        self.agents: list[str] = []
        self._random = np.random.default_rng()

    @property
    def unwrapped(self):
        return self

    def observation_space(self, agent: str) -> spaces.Space:
        return self._game.observation_space

    def action_space(self, agent: str) -> spaces.Space:
        return self._game.action_space

    def reset(self, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        observations = self._game.begin(int(self._random.integers(ENGINE_SEEDS)))
        return dict(zip(self.agents, observations)), {agent: {} for agent in self.agents}

    def step(self, actions: dict):
        agents = self.agents
        observations, rewards, done, is_cut, info = self._game.step([int(actions[agent]) for agent in agents])
        self.agents = [] if done else agents
        infos = {
            agent: {**info, **({"true_objective": -info["true_objective"]} if info and agent[0] == "r" else {})}
            for agent in agents
        }
        return (
            dict(zip(agents, observations)), dict(zip(agents, map(float, rewards))),
            dict.fromkeys(agents, done and not is_cut), dict.fromkeys(agents, is_cut), infos,
        )  # fmt: skip

    def render(self):
        return self._game.frame()

    def close(self) -> None:
        self._game.env.close()


def num_players(kwargs: dict) -> tuple[int, int]:
    """Of the left and of the right team, by the arguments `left_players` and `right_players`."""
    right = int(kwargs.get("right_players", 0))
    return int(kwargs.get("left_players", 0 if right == 1 else 1)), right
