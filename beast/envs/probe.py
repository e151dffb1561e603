"""What `create_env` makes, found out and checked by making some of it."""

import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, iterate

from beast.envs.groups import EnvGroup
from beast.envs.spaces import EnvSpaces, action_shape_dtype, env_actions, parts_by_name, spaces_by_name
from beast.errors import InputError, MissingPackage, UserError, first_line, raised

HOW = "return a vector env, as in gymnasium.vector.SyncVectorEnv([lambda: YourEnv()] * num_envs)"
HOW_TO_RENDER = (
    "Take **overrides in create_env and hand them to the environment, which has to render with render_mode='rgb_array'"
)
AGENTS = "possible_agents"  # an attribute of PettingZoo's environments
SEED = 0  # of the reset that finds out whether it works
# What wrappers call the statistics that they keep, gymnasium's and most others: the flag that does the same in the net.
STATISTICS = {"obs_rms": "--normalize_observations", "return_rms": "--normalize_returns on"}


def probe_env(create_env: Callable, flags, **overrides) -> EnvSpaces:
    """What the rows of the environments of `create_env(flags, num_envs, **overrides)` look like.

    Makes two of them (one where --group_width is 1), resets and steps them once. With the override
    `render_mode="rgb_array"` it renders them, too.

    `env_id` is --env, unless `create_env` does not look at it: then it is the environment's own name. Frames are those
    that `beast.envs.make` says; other environments have one frame a step. A wrapper with statistics of its own is
    warned of on stderr.

    Raises InputError or MissingPackage for whatever cannot be trained on. The message quotes the first line of an
    exception and says where it was raised.
    """
    num_envs = min(2, flags.group_width)
    watched, read = _watch(flags)
    try:
        env = create_env(watched, num_envs, **overrides)
    except (Exception, SystemExit) as error:
        raise _not_made(error, flags.env if "env" in read else "create_env()", overrides) from error
    _check_kind(env, num_envs)
    with closing(env):
        name = flags.env if "env" in read else name_of(env)
        try:
            spaces = EnvGroup(env).spaces
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        try:
            actions = _some_actions(env.single_action_space, num_envs)
            _check_rows(env, name, env.single_observation_space, actions, (num_envs,))
        except UserError:
            for single in getattr(env.unwrapped, "envs", [])[:1]:  # tells more where it is the one that is wrong
                actions = iterate(batch_space(single.action_space, 1), _some_actions(single.action_space, 1))
                _check_rows(single, name, single.observation_space, next(iter(actions)), ())
            raise
        if overrides.get("render_mode"):
            _check_frames(env, name)
        _warn_of_statistics(env, name)
        known = {key: x for key, x in (env.metadata or {}).items() if key in ("frames_per_step", "atari_backend")}
        return spaces._replace(env_id=name, **known)


def name_of(env: VectorEnv) -> str:
    """The id with which a vector env was made, or the class of its environments."""
    first = next(iter(getattr(env.unwrapped, "envs", [])), env)
    spec = env.spec or first.spec
    return (env.metadata or {}).get("env_id") or (spec.id if spec else type(first.unwrapped).__name__)


def _warn_of_statistics(env: VectorEnv, name: str) -> None:
    """Tell of wrappers that normalize by what they have seen themselves."""
    layers: list[Any] = [env, *getattr(env.unwrapped, "envs", [])[:1]]
    for layer in layers:  # grows while it is walked
        layers += [layer.env] if isinstance(layer, (gymnasium.Wrapper, VectorWrapper)) else []
        attributes = getattr(layer, "__dict__", {})
        for flag in (flag for statistics, flag in STATISTICS.items() if statistics in attributes):
            message = (
                f"warning: {name}: {type(layer).__name__} normalizes by statistics of its own in every actor. "
                f"Checkpoints do not have them, and an evaluation begins without them. Take it out and give {flag}"
            )
            print(message, file=sys.stderr, flush=True)


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
    if isinstance(error, UserError):
        return error
    if isinstance(error, DependencyNotInstalled):
        return MissingPackage(f"{name}: {first_line(error)}")
    if isinstance(error, ImportError):
        return MissingPackage(f"{name}: {raised(error)}")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        made = getattr(frame.f_locals.get("self"), "envs", None)  # SyncVectorEnv looks for spaces that there are not
        if isinstance(made, list) and made and hasattr(made[0], AGENTS):
            return _several_agents(made[0])
    if "render_mode" in overrides and "render_mode" in str(error):
        return InputError(f"--video: {name} takes no render_mode: {raised(error)}. {HOW_TO_RENDER}")
    return InputError(f"{name} cannot be made: {raised(error)}{_hint(error, overrides)}")


def _several_agents(env) -> InputError:
    return InputError(
        f"{type(env).__name__} has several agents; one agent per environment is supported: wrap it so that one of them "
        "acts and the others belong to the environment"
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
    if env.num_envs != num_envs:
        raise InputError(f"create_env(flags, num_envs={num_envs}) returned {env.num_envs} environments: {HOW}")


def _check_rows(env, name: str, space: Space, actions: Any, before: tuple[int, ...]) -> None:
    """Raise InputError unless `reset` and `step` give observations of the space, with dimensions `before` its own."""
    _check_shapes(name, "reset", space, _call(name, "reset", 2, env.reset, seed=SEED)[0], before)
    _check_shapes(name, "step", space, _call(name, "step", 5, env.step, actions)[0], before)


def _some_actions(space: Space, num_envs: int) -> Any:
    shape, dtype = action_shape_dtype(space)
    return env_actions(space, np.zeros((num_envs, *shape), dtype))


def _call(name: str, method: str, length: int, call: Callable, *args, **kwargs) -> tuple:
    try:
        result = call(*args, **kwargs)
    except DependencyNotInstalled as error:
        raise MissingPackage(f"{name}: {first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{name}: {method}() raised {raised(error)}") from error
    if not isinstance(result, tuple) or len(result) != length:
        expected = "(observation, info)" if method == "reset" else "(observation, reward, terminated, truncated, info)"
        found = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise InputError(f"{name}: {method}() returned {found} instead of {expected}, gymnasium's interface since 0.26")
    return result


def _check_shapes(name: str, method: str, space: Space, observation: Any, before: tuple[int, ...]) -> None:
    expected = spaces_by_name(space)
    try:
        parts = parts_by_name(space, observation)
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{name}: {method}() gave an observation that is not nested as its space {space}: {first_line(error)}"
        ) from error
    for part, found in parts.items():
        shape = (*before, *(expected[part].shape or ()))
        if np.shape(found) != shape:
            raise InputError(
                f"{name}: {method}() gave {'observations' if part == 'obs' else repr(part)} of shape "
                f"{np.shape(found)}, the observation space {expected[part]} says {shape}: make both the same"
            )


def _check_frames(env, name: str) -> None:
    """Raise InputError unless the environments render images."""
    if getattr(env, "render_mode", None) != "rgb_array":
        raise InputError(f"--video: {name} has the render_mode {getattr(env, 'render_mode', None)}. {HOW_TO_RENDER}")
    try:
        frames = env.render()
    except DependencyNotInstalled as error:
        raise MissingPackage(f"--video: {name}: {first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"--video: render() of {name} raised {raised(error)}{_hint(error, True)}") from error
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
