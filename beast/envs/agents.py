"""Environments of several agents that share one policy: each agent is a column of a group.

They have PettingZoo's parallel interface: reset() and step() take and give dicts by agent, `agents` names those that
act now, `possible_agents` all.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from beast.errors import InputError, MissingPackage, raised

PREFIX = "pettingzoo:"
ABSENT = "absent_agents"  # in infos, bool [K]: columns whose agent is not in the game now


class AgentsDoNotFit(InputError):
    """So many columns are no whole number of environments with `agents` agents each."""

    def __init__(self, message: str, agents: int):
        super().__init__(message)
        self.agents = agents


class AgentColumns(VectorEnv):
    """A vector env whose environments are agents: of A agents, column e·A + a is agent a of environment e.

    An agent that has ended, or has not come yet, repeats its last observation; `info[ABSENT]` says so. The next step
    resets an environment that has no agents left (NEXT_STEP).
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, make: Callable[[], Any], num_columns: int):
        """`make()` makes an environment with PettingZoo's parallel interface. Raises AgentsDoNotFit unless its agents
        divide `num_columns`, and InputError unless they have equal spaces."""
        first = make()
        self.envs, self.names = [first], list(first.possible_agents)
        metadata = getattr(first, "metadata", None) or {}
        name, count = metadata.get("name", type(first.unwrapped).__name__), len(self.names)
        self.metadata = {**metadata, **self.metadata, "env_id": name, "agents": count}
        self.render_mode = getattr(first, "render_mode", None)
        if not count or num_columns % count:
            first.close()
            raise AgentsDoNotFit(f"{name}: {num_columns} columns for its {count} agents: give a multiple", count)
        self.single_observation_space, self.single_action_space = _shared_spaces(first, self.names, name)
        self.num_envs = num_columns
        self.observation_space = batch_space(self.single_observation_space, num_columns)
        self.action_space = batch_space(self.single_action_space, num_columns)
        self.envs += [make() for _ in range(num_columns // count - 1)]
        self._batch = create_empty_array(self.single_observation_space, num_columns)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self._infos: dict = {}
        nothing = create_empty_array(self.single_observation_space, self.num_envs)
        self._env_obs = list(iterate(self.observation_space, nothing))  # the newest of each agent
        self._rewards = np.zeros(self.num_envs)
        self._terminated, self._truncated = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)
        self._absent = np.ones(self.num_envs, bool)
        for index in range(len(self.envs)):
            self._reset(index, None if seed is None else seed + index * len(self.names), options)
        return self._observations(), self._all_infos()

    def step(self, actions):
        self._infos = {}
        self._rewards[:] = 0
        self._absent[:] = True
        actions = list(iterate(self.action_space, actions))
        for index, env in enumerate(self.envs):
            if not env.agents:
                self._reset(index)
                continue
            begin = index * len(self.names)
            chosen = {agent: actions[begin + self.names.index(agent)] for agent in env.agents}
            self._take(index, *env.step(chosen))
            for column, agent in enumerate(self.names, begin):
                if agent in chosen and agent not in env.agents and not self._terminated[column]:
                    self._truncated[column], self._absent[column] = True, False  # it has gone without a word
        terminated, truncated = self._terminated.copy(), self._truncated.copy()
        return self._observations(), self._rewards.copy(), terminated, truncated, self._all_infos()

    def render(self):
        return tuple(frame for env in self.envs for frame in [env.render()] * len(self.names))

    def close_extras(self, **kwargs) -> None:
        for env in self.envs:
            env.close()

    def _reset(self, index: int, seed: int | None = None, options: dict | None = None) -> None:
        observations, infos = self.envs[index].reset(seed=seed, options=options)
        nothing = dict.fromkeys(observations, 0)
        self._take(index, observations, nothing, nothing, nothing, infos)

    def _take(self, index: int, observations: dict, rewards: dict, terminated: dict, truncated: dict, infos: dict):
        """Note what those agents of environment `index` were given that are in its `observations`."""
        for column, agent in enumerate(self.names, index * len(self.names)):
            if agent not in observations:
                continue
            self._env_obs[column] = observations[agent]
            self._rewards[column] = rewards.get(agent, 0)
            self._terminated[column], self._truncated[column] = terminated[agent], truncated[agent]
            self._absent[column] = False
            self._infos = self._add_info(self._infos, infos.get(agent, {}), column)

    def _observations(self):
        return concatenate(self.single_observation_space, self._env_obs, self._batch)

    def _all_infos(self) -> dict:
        return {**self._infos, ABSENT: self._absent.copy()}


def _shared_spaces(env, agents: list[str], name: str) -> tuple[Space, Space]:
    """Observation and action space of all agents. Raises InputError where they differ."""
    found = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
    for agent, spaces in zip(agents, found):
        if spaces != found[0]:
            here, first = (" and ".join(" ".join(str(space).split()) for space in each) for each in (spaces, found[0]))
            raise InputError(
                f"{name}: {agent} has {here}, {agents[0]} has {first}: agents that share a policy need equal spaces; "
                "wrap the environment so that they are (supersuit pads observations and actions)"
            )
    return found[0]


def at_least(make: Callable[[int], VectorEnv], num_envs: int) -> VectorEnv:
    """`make(num_envs)`, or where the agents of an environment belong together, of the next width that fits."""
    try:
        return make(num_envs)
    except AgentsDoNotFit as error:
        return make(-(-num_envs // error.agents) * error.agents)


def by_id(env_id: str, num_columns: int, kwargs: dict[str, Any]) -> AgentColumns:
    """The agents of `pettingzoo:<module>`: of its `parallel_env`, or of its `env`, whose agents may move in turn.

    Raises MissingPackage without PettingZoo or the module, InputError for one that has neither.
    """
    name = env_id.removeprefix(PREFIX)
    try:
        conversions = importlib.import_module("pettingzoo.utils.conversions")
        module = importlib.import_module(name)
    except ImportError as error:
        message = f"{env_id}: {raised(error)}: pip install pettingzoo, or with a family's name, as pettingzoo[classic]"
        raise MissingPackage(message) from error
    if hasattr(module, "parallel_env"):
        return AgentColumns(lambda: module.parallel_env(**kwargs), num_columns)
    if hasattr(module, "env"):
        return AgentColumns(lambda: conversions.turn_based_aec_to_parallel(module.env(**kwargs)), num_columns)
    raise InputError(f"{env_id}: the module {name} has neither parallel_env() nor env(), as PettingZoo's have")
