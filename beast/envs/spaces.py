"""How observations and actions of each space lie in a row."""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from beast.errors import InputError, first_line

CATEGORICAL = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class ActionsByKind(spaces.Dict):
    """Action spaces of agents that have different ones (agents.py), by the name of their kind.

    An action in a row is that of the agent's own kind, in the first numbers; the others are zeros. `agents` has the
    kind of each agent of an environment: of A agents, column e·A + a is agent a of environment e.
    """

    def __init__(self, kinds: dict[str, Space], agents: tuple[str, ...]):
        super().__init__(list(kinds.items()))
        self.agents = agents

    def __repr__(self) -> str:
        return f"{super().__repr__()} of {self.agents}"

    def columns(self, kind: str, num_columns: int) -> np.ndarray:
        """The columns of this kind, of so many."""
        return np.flatnonzero(np.tile(np.array(self.agents) == kind, num_columns // len(self.agents)))


class EnvSpaces(NamedTuple):
    """What the rows of an environment look like, and what it is called."""

    observations: dict[str, Space]  # by the name of each part of an observation
    action: Space
    final_observations: bool = False  # beside a new episode's first one lies that of a truncated episode (SAME_STEP)
    env_id: str = ""  # for people to read, where `probe_env` found it
    frames_per_step: int = 1
    atari_backend: Literal["auto", "beast", "ale", "cuda"] = "auto"  # for Atari what `probe_env` found
    whole: Space | None = None  # that of observations as environments give them, where it is known
    agents: int = 1  # columns that belong together (agents.py)
    tasks: int = 1  # of which a group has equally many environments (tasks.py)
    reward_terms: dict[str, float] = {}  # parts of the reward, and the coefficient of each in it
    on_device: bool = False  # they are of torch tensors (tensors.py)
    flags: frozenset[str] = frozenset()  # at which `create_env` has looked, where `probe_env` found it

    def comparable(self) -> dict[str, str]:
        """In words, what has to be equal where two train one net."""
        names = "env_id", "observations", "action", "final_observations", "tasks"
        return {name: str(getattr(self, name)) for name in names}


def parts_by_name(space: Space, nest: Any) -> dict[str, Any]:
    """Name -> part of `nest`, which is nested as the observation space is: an observation or a batch of them.

    The name is `obs`, or a Dict's own, or the index in a Tuple (nested ones joined by '.'). Raises InputError if two
    parts get one name.
    """
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return {"obs": nest}
    parts: dict[str, Any] = {}
    for key, inner in space.items() if isinstance(space, spaces.Dict) else enumerate(space):
        for name, part in parts_by_name(inner, nest[key]).items():
            name = f"{key}.{name}" if isinstance(inner, (spaces.Dict, spaces.Tuple)) else str(key)
            if name in parts:
                raise InputError(f"two parts of the observation space are called {name!r}: rename one")
            parts[name] = part
    return parts


def spaces_by_name(space: Space) -> dict[str, Space]:
    """Name -> space of each part of an observation."""
    return parts_by_name(space, space)


def observation_field(space: Space) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of one part of an observation as it is stored; InputError if it is not supported."""
    if isinstance(space, spaces.Discrete):
        return (), "int64"
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return tuple(space.shape), str(space.dtype)
    remedy = "wrap the environment so that its observations are one of them"
    if isinstance(space, spaces.Text):
        remedy = "beast.envs.texts.leave_out_texts wraps an environment so that the texts of a Dict are left out"
    raise InputError(
        f"observation space {space} is not supported; supported are Box, Discrete, MultiDiscrete, MultiBinary and "
        f"a Dict or Tuple of these: {remedy}"
    )


def misfit(value: Any, dtype: str, shape: tuple[int, ...], is_flat: bool = False, is_single: bool = False) -> str:
    """What a value is that cannot be written as an array of this shape and dtype without a loss; empty for one that
    can. `is_flat`: it is one number for each of `shape`, in any shape. gymnasium refuses to round what an environment
    observes that `is_single`, even where that changes nothing."""
    try:
        array = np.asarray(value)
        if is_flat and array.dtype == object and value is not None:  # a Fraction, say
            array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # ragged, or a tensor of a GPU
        array = np.empty((), object)
    if array.dtype.kind not in "biuf":
        return f"{value!r:.80}"
    with np.errstate(invalid="ignore"):
        is_fit = np.dtype(dtype).kind == "f" or bool((array.astype(dtype) == array).all())
    is_fit &= not is_single or np.can_cast(array.dtype, dtype, "same_kind")
    is_fit &= array.shape == shape or (is_flat and array.size == math.prod(shape))
    return "" if is_fit else f"{array.dtype} of shape {array.shape}"


def misfit_observation(space: Space, nest: Any, before: tuple[int, ...] = ()) -> str:
    """What is wrong with an observation, or with one of shapes that begin with `before`, and what its space says; empty
    for one that can be written."""
    try:
        parts = parts_by_name(space, nest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        found = f"it lacks {first_line(error)}" if isinstance(error, LookupError) else first_line(error)
        found = "it is None" if nest is None else found
        return f"an observation that is not nested as its space {in_a_line(space)}: {found}"
    for name, part in spaces_by_name(space).items():
        shape, dtype = observation_field(part)
        if found := misfit(parts[name], dtype, (*before, *shape), is_single=not before):
            what = "observations" if name == "obs" else repr(name)
            return f"{what} {found}, the observation space {in_a_line(part)} says {dtype} of shape {(*before, *shape)}"
    return ""


def in_a_line(space: Space) -> str:
    """What a message says of a space, whose arrays may print several lines."""
    return " ".join(str(space).split())


def action_shape_dtype(space: Space) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one action in the rollout; InputError for a space that is not supported."""
    if isinstance(space, ActionsByKind):
        shapes, dtypes = zip(*map(action_shape_dtype, space.values()))
        # Those of choices and of floats are both float64 without a loss.
        return (max(map(math.prod, shapes)),), dtypes[0] if len(set(dtypes)) == 1 else "float64"
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return (math.prod(space.shape),), "float32"
    sizes = category_sizes(space)
    return (() if isinstance(space, spaces.Discrete) else (len(sizes),)), "int64"


def is_image(space: Space, channels: str = "auto") -> bool:
    """Whether nets see images in this part of an observation: [H, W, C] or [C, H, W], stacks of those, [n, H, W, C] or
    [n, C, H, W], from 5 pixels a side, or gray images [H, W] from 28 pixels a side, whose numbers are bytes or lie in 0
    to 1 or 0 to 255."""
    shape = space.shape or ()
    if isinstance(space, spaces.MultiDiscrete):  # one-hot
        return False
    if channels == "legacy":
        return len(shape) == 3
    if len(shape) == 3 or (len(shape) == 4 and isinstance(space, spaces.Box)):
        return min(image_shape(shape, channels)[1:]) >= 5  # convolutions would leave little of smaller boards
    if len(shape) != 2 or not isinstance(space, spaces.Box):
        return False
    has_pixels = space.dtype == np.uint8 or not space.low.any() and space.high.min() == space.high.max() in (1, 255)
    return bool(has_pixels) and min(shape) >= 28  # matrices, boards and text screens have fewer rows


def image_shape(shape: tuple[int, ...], channels: str = "auto") -> tuple[int, int, int]:
    """Channels (those of all images of a stack together), height and width of an image of this shape."""
    if len(shape) == 2:
        return (1, *shape)
    *stack, first, second, third = shape
    if channels_first((first, second, third), channels):
        return (math.prod(stack) * first, second, third)
    return (math.prod(stack) * third, first, second)


def channels_first(shape: tuple[int, ...], channels: str = "auto") -> bool:
    """Whether an image of this shape is [C, H, W] rather than [H, W, C], as `channels` says: "first", "last" or "auto".

    If one end is at most half as long as the two other sides, and is 1, 3 or 4 or leaves 28 pixels a side, it is the
    channels: [3, 30, 320]. Else height and width are the two neighboring sizes that are more alike: [7, 7, 20] and
    [20, 7, 7] both have 20 channels ("legacy": always).
    """
    first, second, third = shape
    if channels in ("first", "last"):
        return channels == "first"
    for end, *sides in ((first, second, third), (third, first, second)):
        if channels == "auto" and 2 * end <= min(sides) and (end in (1, 3, 4) or min(sides) >= 28):
            return end == first
    return max(second, third) * min(first, second) < max(first, second) * min(second, third)


def leaves(space: Space) -> list[Space]:
    """The spaces that a nest of Dicts and Tuples consists of, in order; of any other space, itself."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [space]
    return [leaf for part in (space.values() if isinstance(space, spaces.Dict) else space) for leaf in leaves(part)]


def choices(space: Space) -> np.ndarray:
    """Number of choices of each number of a Discrete, MultiDiscrete or MultiBinary space, in its shape."""
    if isinstance(space, spaces.MultiBinary):
        return np.full(space.shape, 2)
    return np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def category_sizes(space: Space) -> list[int]:
    """Number of choices of each categorical part, nested spaces in order."""
    if isinstance(space, CATEGORICAL):  # the quick way, as each forward pass asks
        return choices(space).flatten().tolist()
    parts = leaves(space)
    if not parts or not all(isinstance(part, CATEGORICAL) for part in parts):
        raise InputError(
            f"action space {space} is not supported; supported are Discrete, MultiDiscrete, MultiBinary, a Dict or "
            "Tuple of these, and a Box of floats that stands alone, as choices and floats together have no policy "
            "here: wrap the environment so that its actions are one of them"
        )
    return [size for part in parts for size in category_sizes(part)]


def policy_width(space: Space) -> int:
    """Length of the flat parameter vector; InputError for a space that is not supported."""
    if isinstance(space, ActionsByKind):
        return max(map(policy_width, space.values()))
    return 2 * action_shape_dtype(space)[0][0] if isinstance(space, spaces.Box) else sum(category_sizes(space))


def env_actions(space: Space, actions: np.ndarray) -> Any:
    """Actions [K, *action_shape] as a rollout stores them, in the form that a vector env of this action space takes.

    Adds a space's `start`, nests the parts of a Dict or Tuple, and takes [-1, 1] to the bounds of a Box that is bounded
    on both sides (clipped to them; a number without two bounds is only clipped). Raises ValueError for a category that
    the space does not have: ale-py would hang on it. Actions by kind are left as they are.
    """
    if isinstance(space, ActionsByKind):
        return actions
    if isinstance(space, CATEGORICAL):
        sizes = choices(space)
        actions = actions.reshape(-1, *sizes.shape)
        if (actions < 0).any() or (actions >= sizes).any():
            raise ValueError(f"actions {actions.tolist()} are not all in {space} (counted from 0)")
        return (actions + getattr(space, "start", 0)).astype(space.dtype)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts, first = {}, 0
        for key, part in space.items() if isinstance(space, spaces.Dict) else enumerate(space):
            width = len(category_sizes(part))
            parts[key] = env_actions(part, actions[:, first : first + width])
            first += width
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    actions = actions.reshape(-1, *space.shape).astype(np.float64)
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):  # inf - inf where a number has no bounds
        scaled = np.where(bounded, low + (actions + 1) / 2 * (high - low), actions)
    return np.clip(scaled, low, high).astype(space.dtype)


def random_actions(space: Space, num_envs: int, random: np.random.Generator, allowed=None) -> np.ndarray:
    """Uniform actions [K, *action_shape] as a rollout stores them. Where `allowed` [K, …] has a number for each choice
    of each categorical part, 0 forbids it; a part whose choices are all forbidden takes any. Of actions by kind it is a
    dict of those."""
    shape, dtype = action_shape_dtype(space)
    if isinstance(space, ActionsByKind):
        actions = np.zeros((num_envs, *shape), dtype)
        for kind, part in space.items():
            columns = space.columns(kind, num_envs)
            legal = (allowed or {}).get(kind)
            own = random_actions(part, len(columns), random, legal if legal is None else legal[columns])
            own = own.reshape(len(columns), -1)
            actions[columns, : own.shape[1]] = own
        return actions
    if isinstance(space, spaces.Box):
        return random.uniform(-1, 1, (num_envs, *shape)).astype(dtype)
    sizes = category_sizes(space)
    scores = random.random((num_envs, sum(sizes)))
    if np.size(allowed) == scores.size:
        scores += np.reshape(allowed, scores.shape) != 0  # above all that are forbidden
    parts = np.split(scores, np.cumsum(sizes)[:-1], axis=1)
    return np.stack([part.argmax(1) for part in parts], axis=1).reshape(num_envs, *shape)


def categories_by_part(env_spaces: EnvSpaces) -> dict[str, str]:
    """What the shapes of a row do not say: the spaces of observations (by the names of a rollout's fields) and actions
    that are choices, for another process to compare."""
    named = {**{f"obs/{name}": space for name, space in env_spaces.observations.items()}, "action": env_spaces.action}
    return {name: str(space) for name, space in named.items() if not isinstance(space, spaces.Box)}
