"""What `create_env` makes, found out and checked by making some of it."""

import contextlib
import math
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper

from beast.envs import progress
from beast.envs.agents import at_least, refuse_kinds
from beast.envs.groups import EnvGroup, close, name_of
from beast.envs.masks import MASK, check_mask, is_observed, masks_in
from beast.envs.rows import nest_observations
from beast.envs.spaces import (
    CATEGORICAL,
    ActionsByKind,
    EnvSpaces,
    leaves,
    misfit,
    misfit_observation,
    random_actions,
)  # fmt: skip
from beast.envs.tensors import in_arrays, is_of_tensors
from beast.errors import InputError, MissingPackage, UserError, first_line, raised
from beast.files import same_directory

HOW = "return a vector env, as in gymnasium.vector.SyncVectorEnv([lambda: YourEnv()] * num_envs)"
HOW_TO_RENDER = (
    "Take **overrides in create_env and hand them to the environment, which has to render with render_mode='rgb_array'"
)
AGENTS = "possible_agents"  # an attribute of PettingZoo's environments
SEED = 2**30  # of the reset that finds out whether it works: as large as a run's
HINT_OF_SEED = (
    ". Its seed was {}; those of a run are any numbers below 2**31. Where seeds number 100 scenarios, say, let reset() "
    "of a wrapper return self.env.reset(seed=None if seed is None else seed % 100, options=options)"
)
HINT_OF_INSTANCES = (
    ". Two are made in a process: where that takes one only, or each needs a port of its own, let create_env() return "
    "an AsyncVectorEnv (docs/environments.md: One environment a process)"
)
# Words of such errors.
OF_INSTANCES = ("already", "in use", "instance", "only one", "locked", "temporarily unavailable")
STEPS, SECONDS = 200, 1.0  # of trying, unless an episode ends before
# What wrappers call the statistics that they keep, gymnasium's and most others: the flag that does the same in the net.
STATISTICS = {"obs_rms": "--normalize_observations", "return_rms": "--normalize_returns on"}


@same_directory()
def probe_env(create_env: Callable, flags, several_kinds: bool = False, **overrides) -> EnvSpaces:
    """What the rows of the environments of `create_env(flags, num_envs, **overrides)` look like.

    Makes two of them (one where --group_width is 1, or where they render, as not all can do so twice) and steps them by
    random actions, which a mask may limit, until an episode ends, for 200 steps or a second at most. All that they give
    is checked. With the override `render_mode="rgb_array"` it renders them, too.

    `env_id` is --env, unless `create_env` does not look at it: then it is the environment's own name. Frames are those
    that `beast.envs.make` says; other environments have one frame a step. Wrappers with statistics of their own, and
    parts of observations that the space does not have, are warned of on stderr.

    Raises InputError or MissingPackage for whatever cannot be trained on, and for agents of several kinds unless these
    are taken. The message quotes the first line of an exception and says where it was raised.
    """
    is_filmed = bool(overrides.get("render_mode"))
    num_envs = 1 if is_filmed else min(2, flags.group_width)
    watched, read = _watch(flags)
    progress.page_of_thread()  # before a forkserver starts, which keeps the environment variables of now
    try:
        env = at_least(partial(create_env, watched, **overrides), num_envs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust's and a cancelled task are no Exceptions
        raise _not_made(error, flags.env if "env" in read else "create_env()", overrides) from error
    on_device = is_of_tensors(env)
    env = in_arrays(env)
    _check_kind(env, num_envs)
    num_envs, agents = env.num_envs, (env.metadata or {}).get("agents", 1)
    has_all_tasks = getattr(flags, "balance", "samples") == "samples" and not getattr(flags, "task", "")
    tasks = len((env.metadata or {}).get("tasks", "1")) if has_all_tasks else 1
    with contextlib.ExitStack() as to_close:
        to_close.callback(close, env)
        name = flags.env if "env" in read else name_of(env)
        for count, what in (
            (agents, f"{name} has {agents} agents, and each is an environment of the group"),
            (tasks, f"a group has equally many environments of each of the {tasks} tasks"),
        ):
            if flags.group_width % count:
                fits = math.lcm(count, getattr(flags, "batch_width", 1))
                raise InputError(
                    f"--group_width {flags.group_width}: {what}: give a multiple of {count}, such as {fits}"
                )
        try:
            group = EnvGroup(env)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        if not several_kinds:
            refuse_kinds(env.single_observation_space, env.single_action_space, name)
        _warn_of_statistics(env, name)
        inner = [part for part in group.spaces.observations if part.endswith(f".{MASK}")]
        if inner and not isinstance(env.single_action_space, ActionsByKind):
            _warn(f"{name}: {inner[0]} forbids nothing: a mask is the part {MASK} of the outermost Dict")
        unseen: set[str] = set()
        vector: Any = env.unwrapped
        if isinstance(vector, SyncVectorEnv):  # tells more than the vector env can where one of them is wrong
            vector.envs = [_Checked(single, name, single.observation_space, (), unseen) for single in vector.envs]
        checked = _Checked(env, name, env.single_observation_space, (num_envs,), unseen)
        group = EnvGroup(env, MASK in (checked.reset(seed=SEED)[1] or {}))
        group.env = checked
        _try(group, name)
        if group.loses_final_obs:
            what = 'infos have no "final_obs", an episode\'s last observation'
            _warn(f"{name}: {what}: where it is truncated, nothing is expected of the time after")
        if is_filmed:
            _check_frames(env, name)
        if unseen:
            what = ", ".join(sorted(unseen))
            _warn(f"{name}: the agent will not see {what}, which the observation space lacks: add it there or drop it")
        known = {key: x for key, x in (env.metadata or {}).items() if key in ("frames_per_step", "atari_backend")}
        terms = _reward_terms(env, name)
        own = {"env_id": name, "agents": agents, "tasks": tasks, "reward_terms": terms, "on_device": on_device, **known}
        return group.spaces._replace(flags=frozenset(read), **own)


def _reward_terms(env: VectorEnv, name: str) -> dict[str, float]:
    """The parts of the reward that an environment names, with their coefficients. Raises InputError for others than
    finite numbers."""
    first: Any = next(iter(getattr(env.unwrapped, "envs", [])), env)
    terms = (
        getattr(env, "reward_terms", None) or getattr(getattr(first, "unwrapped", first), "reward_terms", None) or {}
    )
    try:
        found = {str(key): float(value) for key, value in dict(terms).items()}
    except (TypeError, ValueError):
        found = {"": math.nan}
    if not all(map(math.isfinite, found.values())):
        raise InputError(f"{name}: reward_terms {str(terms)[:200]}: give a dict of finite numbers, its coefficients")
    return found


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _warn_of_statistics(env: VectorEnv, name: str) -> None:
    """Tell of wrappers that normalize by what they have seen themselves."""
    layers: list[Any] = [env, *getattr(env.unwrapped, "envs", [])[:1]]
    for layer in layers:  # grows while it is walked
        layers += [layer.env] if isinstance(layer, (gymnasium.Wrapper, VectorWrapper)) else []
        attributes = getattr(layer, "__dict__", {})
        for flag in (flag for statistics, flag in STATISTICS.items() if statistics in attributes):
            _warn(
                f"{name}: {type(layer).__name__} normalizes by statistics of its own in every actor. "
                f"Checkpoints do not have them, and an evaluation begins without them. Take it out and give {flag}"
            )


def _watch(flags) -> tuple[Any, set[str]]:
    """A copy of the flags, and the names of those that somebody has looked at since."""
    read: set[str] = set()

    class Watched(type(flags)):  # type: ignore[misc]
        def __getattribute__(self, name: str):
            read.add(name)
            return super().__getattribute__(name)

    watched: Any = Watched.__new__(Watched)
    watched.__dict__.update(vars(flags))
    return watched, read


def _not_made(error: BaseException, name: str, overrides: dict) -> UserError:
    """What to tell of an exception that `create_env` raised."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, ImportError) and not isinstance(error, UserError):
        return MissingPackage(f"{name}: {raised(error)}")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        made = getattr(frame.f_locals.get("self"), "envs", None)  # SyncVectorEnv looks for spaces that there are not
        made = [
            frame.f_locals.get("env"),
            *(made if isinstance(made, list) else []),
        ]  # gymnasium.make for gymnasium.Env
        for env in made:
            if hasattr(env, AGENTS):
                return _several_agents(env)
    if "render_mode" in overrides and "render_mode" in str(error):
        return InputError(f"--video: {name} takes no render_mode: {raised(error)}. {HOW_TO_RENDER}")
    of_instances = any(word in str(error).lower() for word in OF_INSTANCES)
    return _failure(name, "making it", error, HINT_OF_INSTANCES if of_instances else _hint(error, overrides))


def _failure(name: str, what: str, error: BaseException, hint: str = "") -> UserError:
    """What to tell of an exception that an environment raised."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, DependencyNotInstalled):
        return MissingPackage(f"{name}: {first_line(error)}")
    return InputError(f"{name}: {what} raised {raised(error)}{hint}")


def _several_agents(env) -> InputError:
    return InputError(
        f"{type(env).__name__} has several agents: give --env pettingzoo:<its module>, or return beast.envs.agents."
        "AgentColumns(make, num_envs), whose environments are the agents and share a policy (docs/environments.md)"
    )


def _check_kind(env, num_envs: int) -> None:
    """Raise InputError unless this is a vector env of so many environments."""
    if env is None:
        raise InputError(f"create_env() returned None: {HOW}")
    if hasattr(env, AGENTS):
        raise _several_agents(env)
    if not isinstance(env, VectorEnv):
        raise InputError(f"create_env() returned {type(env).__name__}, which is no vector env: {HOW}")
    for method in ("reset", "step"):
        if getattr(type(env), method, None) is getattr(VectorEnv, method):
            raise InputError(f"create_env() returned {type(env).__name__}, which has no {method}() of its own: {HOW}")
    if env.num_envs != num_envs and not {"agents", "tasks"} & (env.metadata or {}).keys():
        raise InputError(f"create_env(flags, num_envs={num_envs}) returned {env.num_envs} environments: {HOW}")


def _try(group: EnvGroup, name: str) -> None:
    """Step environments until an episode ends and the next one begins. Raises InputError if they or their rows fail."""
    arrays = {field: np.zeros((group.num_envs, *shape), dtype) for field, (shape, dtype) in group.fields.items()}
    row, random = nest_observations(arrays), np.random.default_rng(SEED)
    try:
        group.reset(None, row)  # some take one seed only
        ended, deadline = False, time.monotonic() + SECONDS
        for _ in range(STEPS):
            was_ended, allowed = ended, masks_in(row["obs"], group.spaces.action)
            group.step(random_actions(group.spaces.action, group.num_envs, random, allowed), row)
            ended = bool((row["terminated"] | row["truncated"]).any())
            if was_ended or time.monotonic() > deadline:
                break
    except Exception as error:
        raise _failure(name, "making a row of what it gives", error) from error


class _Checked:
    """An environment, or a vector env, that checks what it gives. All shapes begin with `before`. Names of what it
    shows beside its space go into `unseen`."""

    def __init__(self, env, name: str, space: Space, before: tuple[int, ...], unseen: set[str]):
        self._env, self._name, self._space, self._before, self._unseen = env, name, space, before, unseen

    def __getattr__(self, name: str):
        return getattr(self._env, name)

    def reset(self, **arguments):
        return self._call("reset", "observation, info", **arguments)

    def step(self, action):
        result = self._call("step", "observation, reward, terminated, truncated, info", action)
        # A reward of shape (1,) is a number, but AsyncVectorEnv cannot join it with the 0 of a reset.
        is_async = isinstance(getattr(self._env, "unwrapped", None), AsyncVectorEnv)
        for field, value in zip(("reward", "terminated", "truncated"), result[1:]):
            dtype = "float64" if field == "reward" else "bool"
            if found := misfit(value, dtype, self._before, is_flat=not is_async):
                needed = f"needed is {dtype} of shape {self._before}: make both the same"
                if is_async or not self._before:
                    needed = f"needed is one {dtype}: return {'float' if field == 'reward' else 'bool'}({field})"
                raise InputError(f"{self._name}: step() gave {field!r} {found}, {needed}")
        return result

    def _call(self, method: str, expected: str, *args, **kwargs) -> tuple:
        does = f"{self._name}: {method}()"
        try:
            result = getattr(self._env, method)(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _failure(self._name, f"{method}()", error, self._remedy(error, **kwargs)) from error
        if not isinstance(result, tuple) or len(result) != len(expected.split()):
            found = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise InputError(f"{does} returned {found} instead of ({expected}), gymnasium's interface since 0.26")
        if found := misfit_observation(self._space, result[0], self._before):
            raise InputError(f"{does} gave {found}: make both the same")
        self._unseen.update(_unseen(self._space, result[0]))
        if self._before:
            self._check_mask(method, *result)
        return result

    def _check_mask(self, method: str, observation, *others) -> None:
        """Raise InputError unless the mask of a vector env, if it has one, is there from its reset on and is right."""
        action, info = self._env.single_action_space, others[-1] if isinstance(others[-1], dict) else {}
        if not all(isinstance(part, CATEGORICAL) for part in leaves(action)):
            return
        if method == "reset":
            self._has_mask = MASK in info
        if is_observed(self._space):
            mask = observation[MASK]
        elif (mask := info.get(MASK)) is not None and not self._has_mask:
            raise InputError(
                f"{self._name}: step() gave info[{MASK!r}], which reset() did not: let each of them give it"
            )
        try:
            check_mask(action, mask, self._before[0])
        except InputError as error:
            raise InputError(f"{self._name}: {error}") from error

    def _remedy(self, error: BaseException, seed: int | None = None, **others) -> str:
        """What to change where a call with these arguments raised."""
        if isinstance(error, (EOFError, ConnectionError)):
            return ": one of its processes has ended, which may have printed why"
        if "reset() got an unexpected keyword argument" in str(error):
            return ": its signature is reset(self, *, seed=None, options=None) in gymnasium since 0.26"
        if seed is None:
            return ""
        try:
            self._env.reset(seed=0, **others)
        except KeyboardInterrupt:
            raise
        except BaseException as other:  # AsyncVectorEnv's processes have ended: its errors differ
            seeds = range(seed, seed + math.prod(self._before))
            if type(other) is type(error) and not any(str(number) in str(error) for number in seeds):
                return ""
        return HINT_OF_SEED.format(seed)


def _unseen(space: Space, nest: Any) -> list[str]:
    """Names of what a nest has beside the parts of its space."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return []
    keys, found = (list(x.keys() if isinstance(space, spaces.Dict) else range(len(x))) for x in (space, nest))
    inner = [f"{key}.{name}" for key in keys for name in _unseen(space[key], nest[key])]
    return [str(key) for key in found if key not in keys] + inner


def _check_frames(env, name: str) -> None:
    """Raise InputError unless the environments render images."""
    if getattr(env, "render_mode", None) != "rgb_array":
        raise InputError(f"--video: {name} has the render_mode {getattr(env, 'render_mode', None)}. {HOW_TO_RENDER}")
    try:
        frames = env.render()
    except (Exception, SystemExit) as error:
        raise _failure(f"--video: {name}", "render()", error, _hint(error, True)) from error
    frame: Any = None if frames is None or not len(frames) else frames[0]
    if np.ndim(frame) != 3:
        what = f"an array of shape {np.shape(frame)}" if isinstance(frame, np.ndarray) else f"a {type(frame).__name__}"
        raise InputError(f"--video: render() of {name} gave {what} for a frame instead of an image [H, W, 3]")


def _hint(error: BaseException, is_rendering) -> str:
    text = "".join(traceback.format_exception(error)).lower()
    if is_rendering and any(word in text for word in ("mujoco", "opengl", "glfw", "gladload")):
        return (
            ". Without a display MuJoCo renders with MUJOCO_GL=egl (libegl1) or MUJOCO_GL=osmesa (libosmesa6) in the "
            "environment variables"
        )
    return ""
