"""Action masks: which choices are legal, in whatever form environments say it, as one flat array for every agent.

A mask is the part `action_mask` of Dict observations, or `info["action_mask"]` of reset and step. It has a 1 for each
choice that is legal and a 0 for the others: in the order of the policy's parameters, or nested as the action space is.
"""

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from beast.envs.spaces import ActionsByKind, category_sizes, spaces_by_name
from beast.errors import InputError

MASK = "action_mask"


def spaces_with_mask(observation: Space, action: Space, is_in_infos: bool) -> dict[str, Space]:
    """The parts of observations by name. If these or the infos have a mask, the last part is a flat `action_mask`."""
    parts = spaces_by_name(observation)
    others = {name: space for name, space in parts.items() if name.split(".")[0] != MASK}
    is_told = is_in_infos and not isinstance(action, spaces.Box)
    return {**others, MASK: spaces.MultiBinary(_size(action))} if is_told or len(others) < len(parts) else parts


def legal_choices(space: Space, action: Space, observations: Any, infos: dict | None, num_envs: int) -> np.ndarray:
    """The masks of `num_envs` environments, bool [num_envs, choices], from their observations (an array of dicts, too)
    or else infos. Where an environment says nothing, all is legal. InputError for a mask of another size."""
    if is_observed(space):
        if not isinstance(observations, dict):
            observations = {MASK: np.fromiter((x and x[MASK] for x in observations), object, num_envs)}
        return mask_numbers(action, observations[MASK], num_envs) != 0
    if infos is None:
        raise InputError(f'masks are in info["{MASK}"]: give the `info` that came with the observations, too')
    legal = mask_numbers(action, infos.get(MASK), num_envs) != 0
    legal[~infos.get(f"_{MASK}", np.True_)] = True  # gymnasium fills up with zeros
    return legal


def is_observed(space: Space) -> bool:
    """Whether observations have a mask."""
    return isinstance(space, spaces.Dict) and MASK in space.spaces  # not `in space`, which asks for an observation


def masks_in(row_obs: dict, action: Space) -> Any:
    """The masks [K, choices] among the observations of a row, None without; those of actions by kind by their names."""
    if isinstance(action, ActionsByKind):
        return {kind: row_obs.get(f"{kind}.{MASK}") for kind in action}
    return row_obs.get(MASK)


def mask_numbers(action: Space, mask: Any, num_envs: int) -> np.ndarray:
    """A mask as numbers [num_envs, choices], ones for None. Raises InputError for a mask of another size."""
    numbers, size = _flat(action, mask, num_envs), _size(action)
    if numbers.shape[1] != size:
        raise InputError(f"{MASK} has {numbers.shape[1]} numbers: give one for each of the {size} choices of {action}")
    return numbers


def check_mask(action: Space, mask: Any, num_envs: int) -> None:
    """Raise InputError for a mask of another size, or of other numbers than 0 and 1, as some have -inf for what is
    illegal."""
    numbers = mask_numbers(action, mask, num_envs)
    if (other := numbers[(numbers != 0) & (numbers != 1)]).size:
        raise InputError(f"{MASK} has {other[0]}: give a 1 for each legal choice and a 0 for each other one")


def _flat(action: Space, mask: Any, num_envs: int) -> np.ndarray:
    if mask is None:
        return np.ones((num_envs, _size(action)), bool)
    if isinstance(mask, (dict, tuple, list)):
        keys = action.keys() if isinstance(action, spaces.Dict) else range(len(mask))
        parts = action if isinstance(action, (spaces.Dict, spaces.Tuple)) else dict.fromkeys(keys, action)
        return np.concatenate([_flat(parts[key], mask[key], num_envs) for key in keys], axis=1)
    mask = np.asarray(mask)
    if mask.dtype == object:  # a nest of each environment
        return np.concatenate([_flat(action, single, 1) for single in mask])
    return mask.reshape(num_envs, -1)


def _size(action: Space) -> int:
    if isinstance(action, spaces.Box):
        raise InputError(f"{MASK} beside the action space {action}: a mask is for choices; give this part another name")
    return sum(category_sizes(action))
