"""Observation and action spaces as they lie in a rollout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from beast.errors import InputError


def parts_by_name(space: spaces.Space, nest: Any) -> dict[str, Any]:
    """Name -> part of `nest`, which is nested as the observation space `space`: an observation, a batch, `space` itself.

    The name is `obs`, or a Dict's own (nested ones joined by '.'). Raises InputError if two parts get one name.
    """
    if not isinstance(space, spaces.Dict):
        return {"obs": nest}
    parts: dict[str, Any] = {}
    for key, inner in space.items():
        for name, part in parts_by_name(inner, nest[key]).items():
            name = f"{key}.{name}" if isinstance(inner, spaces.Dict) else key
            if name in parts:
                raise InputError(f"two parts of the observation space are called {name!r}: rename one")
            parts[name] = part
    return parts


def observation_field(space: spaces.Space) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of one part of an observation as it is stored; InputError if it is not supported."""
    if isinstance(space, spaces.Discrete):
        return (), "int64"
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return tuple(space.shape), str(space.dtype)
    raise InputError(
        f"observation space {space} is not supported; supported are Box, Discrete, MultiDiscrete, MultiBinary and "
        "a Dict of these: wrap the environment so that its observations are one of them"
    )


def action_shape_dtype(space: spaces.Space) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of one action in the rollout; InputError for a space that is not supported."""
    if isinstance(space, spaces.Box):
        return (box_size(space),), np.dtype(np.float32)
    sizes = category_sizes(space)
    return (() if isinstance(space, spaces.Discrete) else (len(sizes),)), np.dtype(np.int64)


def category_sizes(space: spaces.Space) -> list[int]:
    """Number of choices of each categorical part, nested spaces in order."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.flatten().tolist()
    if isinstance(space, spaces.Tuple) and len(space) > 0:
        return [size for part in space for size in category_sizes(part)]
    raise _unsupported_action_space(space)


def box_size(space: spaces.Box) -> int:
    """How many numbers an action has; InputError unless they are floats."""
    if not np.issubdtype(space.dtype, np.floating):
        raise _unsupported_action_space(space)
    return math.prod(space.shape)


def policy_width(space: spaces.Space) -> int:
    """Length of the flat parameter vector; InputError for a space that is not supported."""
    return 2 * box_size(space) if isinstance(space, spaces.Box) else sum(category_sizes(space))


def encoded_action_width(space: spaces.Space) -> int:
    """Length of what `encode_action` returns; InputError for a space that is not supported."""
    return box_size(space) if isinstance(space, spaces.Box) else sum(category_sizes(space))


def _unsupported_action_space(space: spaces.Space) -> InputError:
    return InputError(
        f"action space {space} is not supported; supported are Discrete, MultiDiscrete, a Tuple of these, and a Box of "
        "floats: wrap the environment so that its actions are one of them"
    )


def env_actions(space: spaces.Space, actions: np.ndarray):
    """Actions [K, *action_shape] as a rollout stores them, in the form that a vector env of this action space takes.

    Adds a space's `start`, nests the parts of a Tuple, and takes [-1, 1] to the bounds of a Box that is bounded on
    both sides (clipped to them; a number without two bounds is only clipped). Raises ValueError for a category that the
    space does not have (ale-py would hang on it), InputError for a space that is not supported.
    """
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
        actions = actions.reshape(-1, *np.shape(sizes))
        if (actions < 0).any() or (actions >= sizes).any():
            raise ValueError(f"actions {actions.tolist()} are not all in {space} (counted from 0)")
        return (actions + space.start).astype(space.dtype)
    if isinstance(space, spaces.Tuple):
        parts, first = [], 0
        for part in space:
            width = len(category_sizes(part))
            columns = actions[:, first] if isinstance(part, spaces.Discrete) else actions[:, first : first + width]
            parts.append(env_actions(part, columns))
            first += width
        return tuple(parts)
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        actions = actions.reshape(-1, *space.shape).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):  # inf - inf where a number has no bounds
            scaled = np.where(bounded, low + (actions + 1) / 2 * (high - low), actions)
        return np.clip(scaled, low, high).astype(space.dtype)
    raise _unsupported_action_space(space)
