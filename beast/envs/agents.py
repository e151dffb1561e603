"""Environments of several agents: each agent is a column of a group.

They have PettingZoo's parallel interface: reset() and step() take and give dicts by agent, `agents` names those that
act now, `possible_agents` all. Agents with equal spaces are of one kind, and may share a policy.
"""

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from beast.envs.masks import MASK, is_observed, mask_numbers
from beast.envs.spaces import (
    ActionsByKind,
    EnvSpaces,
    action_shape_dtype,
    category_sizes,
    env_actions,
    in_a_line,
)  # fmt: skip
from beast.errors import InputError, MissingPackage, raised

PREFIX = "pettingzoo:"
ABSENT = "absent_agents"  # in infos, bool [K]: columns whose agent is not in the game now


class WidthDoesNotFit(InputError):
    """So many columns do not divide into those that belong together: `multiple` is of how many they must be one."""

    def __init__(self, message: str, multiple: int):
        super().__init__(message)
        self.multiple = multiple


class AgentColumns(VectorEnv):
    """A vector env whose environments are agents: of A agents, column e·A + a is agent a of environment e.

    An agent that has ended, or has not come yet, repeats its last observation; `info[ABSENT]` says so. The next step
    resets an environment that has no agents left (NEXT_STEP).

    Where agents are of several kinds, an observation is a Dict of one part for each kind, named after its first agent,
    and an action is one of `ActionsByKind`. An agent has blanks in the parts of other kinds, and a mask is flat.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, make: Callable[[], Any], num_columns: int):
        """`make()` makes an environment with PettingZoo's parallel interface. Raises WidthDoesNotFit unless its agents
        divide `num_columns`."""
        first = make()
        self.envs, self.names = [first], list(first.possible_agents)
        try:
            metadata = getattr(first, "metadata", None) or {}
            name, count = metadata.get("name", type(first.unwrapped).__name__), len(self.names)
            self.metadata = {**metadata, **self.metadata, "env_id": name, "agents": count}
            self.render_mode = getattr(first, "render_mode", None)
            if not count or num_columns % count:
                raise WidthDoesNotFit(f"{name}: {num_columns} columns for its {count} agents: give a multiple", count)
            self._kinds, self.single_observation_space, self.single_action_space = _joint_spaces(first, self.names)
            self.num_envs = num_columns
            self.observation_space = batch_space(self.single_observation_space, num_columns)
            self.action_space = batch_space(self.single_action_space, num_columns)
            while len(self.envs) < num_columns // count:
                self.envs.append(make())
            self._batch = create_empty_array(self.single_observation_space, num_columns)
        except BaseException:
            for env in self.envs:
                env.close()
            raise

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self._infos: dict = {}
        self._blank = _blank(self.single_observation_space)
        self._env_obs = [self._blank] * self.num_envs  # the newest of each agent
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
        actions = self._of_columns(actions)
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
            self._env_obs[column] = self._joint(column, agent, observations[agent], infos.get(agent, {}))
            self._rewards[column] = rewards.get(agent, 0)
            self._terminated[column], self._truncated[column] = terminated[agent], truncated[agent]
            self._absent[column] = False
            self._infos = self._add_info(self._infos, infos.get(agent, {}), column)

    def _joint(self, column: int, agent: str, observation, info: dict):
        """An agent's observation as one of `single_observation_space`."""
        if not self._kinds:
            return observation
        kind = self._kinds[column % len(self.names)]
        if is_observed(self.single_observation_space[kind]):
            legal = mask_numbers(self.single_action_space[kind], observation[MASK], 1)[0]
            observation = {**observation, MASK: legal != 0}
        elif MASK in info:
            raise InputError(f"{agent} has info[{MASK!r}]: where agents differ, give masks in observations")
        return {**self._blank, kind: observation}

    def _of_columns(self, actions) -> list:
        """The action of each column."""
        if not self._kinds:
            return list(iterate(self.action_space, actions))
        own: dict[int, Any] = {}
        for kind, space in self.single_action_space.items():
            columns, (shape, dtype) = self.single_action_space.columns(kind, self.num_envs), action_shape_dtype(space)
            stored = actions[columns, : math.prod(shape)].reshape(len(columns), *shape).astype(dtype)
            own |= zip(columns.tolist(), iterate(batch_space(space, len(columns)), env_actions(space, stored)))
        return [own[column] for column in range(self.num_envs)]

    def _observations(self):
        return concatenate(self.single_observation_space, self._env_obs, self._batch)

    def _all_infos(self) -> dict:
        infos = {key: x for key, x in self._infos.items() if not self._kinds or MASK not in key}
        return {**infos, ABSENT: self._absent.copy()}


def _joint_spaces(env, agents: list[str]) -> tuple[tuple[str, ...], Space, Space]:
    """Observation and action space of all agents, and the kind of each: nothing where all have equal spaces."""
    found = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
    names = [str(agent).replace(".", "_") for agent in agents]
    kinds = tuple(names[found.index(each)] for each in found)
    if len(set(kinds)) == 1:
        return (), *found[0]
    return kinds, *join({kind: found[names.index(kind)] for kind in kinds}, kinds)


def join(kinds: dict[str, tuple[Space, Space]], agents: tuple[str, ...]) -> tuple[spaces.Dict, ActionsByKind]:
    """Observation and action space of agents of several kinds, by those of each kind and the kind of each agent."""
    observations = spaces.Dict([(kind, _with_flat_mask(*each)) for kind, each in kinds.items()])
    return observations, ActionsByKind({kind: action for kind, (_, action) in kinds.items()}, agents)


def _with_flat_mask(observation: Space, action: Space) -> Space:
    if not is_observed(observation):
        return observation
    flat = spaces.MultiBinary(sum(category_sizes(action)))
    return spaces.Dict([(key, flat if key == MASK else part) for key, part in observation.items()])


def _blank(space: Space):
    """An observation of zeros, or of the first choices."""
    if isinstance(space, spaces.Dict):
        return {key: _blank(part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_blank, space))
    return np.zeros(space.shape or (), space.dtype) + getattr(space, "start", 0)


def kinds_of(env_spaces: EnvSpaces) -> dict[str, EnvSpaces]:
    """The spaces of each kind of agents by its name, in the order of their first agents. Where all have equal spaces,
    the one kind has no name."""
    if not isinstance(env_spaces.action, ActionsByKind):
        return {"": env_spaces}
    found = {}
    for kind, action in env_spaces.action.items():
        observations = {own: env_spaces.observations[name] for own, name in parts_of(kind, env_spaces).items()}
        whole = env_spaces.whole[kind] if isinstance(env_spaces.whole, spaces.Dict) else None
        found[kind] = env_spaces._replace(observations=observations, action=action, whole=whole)
    return found


def parts_of(kind: str, env_spaces: EnvSpaces) -> dict[str, str]:
    """The names that the parts of a kind's observations have for its net, and those that they have in rows."""
    names = [name for name in env_spaces.observations if f"{name}.".startswith(f"{kind}.")]
    return {"obs" if name == kind else name.removeprefix(f"{kind}."): name for name in names}


def refuse_kinds(observation: Space, action: Space, name: str) -> None:
    """Raise InputError where agents are of several kinds, which one policy cannot play."""
    if isinstance(action, ActionsByKind):
        first, other = list(action)[:2]
        there, here = (f"{in_a_line(observation[kind])} and {in_a_line(action[kind])}" for kind in (first, other))
        raise InputError(
            f"{name}: {other} has {here}, {first} has {there}: agents that share a policy need equal spaces. Train a "
            "policy for each kind with multibeast.py, or wrap the environment so that they are equal (supersuit pads "
            "observations and actions)"
        )


def at_least(make: Callable[[int], VectorEnv], num_envs: int) -> VectorEnv:
    """`make(num_envs)`, or where agents or tasks belong together, of the next width that fits."""
    try:
        return make(num_envs)
    except WidthDoesNotFit as error:
        return make(-(-num_envs // error.multiple) * error.multiple)


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
