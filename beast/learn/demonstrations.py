"""Demonstrations: what somebody observed and did, read for behaviour cloning. docs/demonstrations.md has the format."""

from __future__ import annotations

import itertools
import math
import os
import zipfile
from collections.abc import Iterator

import numpy as np
import torch
from gymnasium import Space, spaces

from beast.envs.masks import MASK
from beast.envs.spaces import CATEGORICAL, EnvSpaces, action_shape_dtype, category_sizes, choices, leaves, parts_by_name
from beast.errors import InputError, MissingFile, first_line
from beast.learn.nests import map_tensors

NUMBERS = {"rewards": spaces.Box(-np.inf, np.inf, (), np.float32), "episode_ends": spaces.Discrete(2)}


class Demonstrations:
    """Decisions of whole episodes in order: `rows` has the net's inputs [N, …], and the actions as `target`."""

    def __init__(self, path: str, arrays: dict[str, np.ndarray], env_spaces: EnvSpaces):
        """Of the arrays of the file at `path`. Raises InputError for those that do not fit the spaces."""
        names = {part: array_name("observations", part) for part in env_spaces.observations}
        observed = {names[part]: space for part, space in env_spaces.observations.items()}
        of_actions = parts_by_name(env_spaces.action, env_spaces.action)
        chosen = {array_name("actions", part): space for part, space in of_actions.items()}
        expected = observed | chosen | NUMBERS
        if arrays.keys() != expected.keys():
            raise InputError(f"{path}: has the arrays {sorted(arrays)}, expected {sorted(expected)}: name them so")
        if not (count := arrays["rewards"].size):
            raise InputError(f"{path}: rewards is empty: give a row for each decision")
        checked = {name: _checked(path, name, arrays[name], x, count) for name, x in expected.items()}
        target = _stored_actions(env_spaces.action, [checked[name] for name in chosen])
        if MASK in names:
            _check_legal(path, env_spaces.action, checked[names[MASK]], target)
        begins = np.append(True, checked["episode_ends"][:-1] != 0)
        mean_return = checked["rewards"].sum(dtype=float) / begins.sum()
        self.description = f"{path}: {count:,} decisions of {begins.sum():,} episodes, mean return {mean_return:.2f}"
        # The net also sees the last action and its reward. In an episode's first row it looks at neither.
        last = {"action": np.roll(target, 1, 0), "reward": np.roll(checked["rewards"], 1)}
        rows = {"obs": {part: checked[name] for part, name in names.items()}, "done": begins, **last, "target": target}
        self.rows = map_tensors(torch.from_numpy, rows)

    def rollouts(self, num_rows: int, num_columns: int, passes: float, whole_episodes: bool, seed: int) -> Iterator:
        """Batches [num_rows, num_columns, …] until there were as many decisions as in so many passes.

        With `whole_episodes` every column goes through one episode after the other, so a core's state after a batch is
        that before the next one. Otherwise each place has a decision of its own, in random order.
        """
        random, total = np.random.default_rng(seed), len(self.rows["done"])
        firsts = np.flatnonzero(self.rows["done"]) if whole_episodes else np.arange(total)
        pieces = [range(*bounds) for bounds in itertools.pairwise([*firsts.tolist(), total])]
        deck = (pieces[i] for _ in itertools.count() for i in random.permutation(len(pieces)))  # that all draw from
        columns = [itertools.chain.from_iterable(deck) for _ in range(num_columns)]
        for _ in range(math.ceil(passes * total / (num_rows * num_columns))):
            places = torch.tensor([list(itertools.islice(column, num_rows)) for column in columns]).T
            yield map_tensors(lambda x, at=places: x[at], self.rows)


def array_name(kind: str, part: str) -> str:
    """A file's name for a part of observations or actions: `actions` if there is one alone, else `actions/left`."""
    return kind if part == "obs" else f"{kind}/{part}"


def read(path: str, env_spaces: EnvSpaces) -> Demonstrations:
    """Those of an .npz file. Raises MissingFile, and InputError with array, row and value that do not fit."""
    if not os.path.exists(path):
        raise MissingFile(f"{path}: there is no such file; docs/demonstrations.md says how to make one")
    try:
        if not zipfile.is_zipfile(path):  # numpy would advise to load it unsafely
            raise zipfile.BadZipFile("no whole .npz file")
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        why = "it holds Python objects" if "pickle" in str(error) else first_line(error)
        raise InputError(f"{path}: cannot be read ({why}): write arrays of numbers by np.savez_compressed") from None
    return Demonstrations(path, arrays, env_spaces)


def _checked(path: str, name: str, x: np.ndarray, space: Space, count: int) -> np.ndarray:
    """The array in its space's dtype. Raises InputError for a row outside; of observations a Box has no bounds."""
    where = f"{path}: {name}"
    if x.shape != (count, *space.shape):
        raise InputError(f"{where} has the shape {x.shape}, expected {(count, *space.shape)}: a row for each decision")
    if x.dtype.kind not in "biuf":
        raise InputError(f"{where} has the type {x.dtype}, expected numbers of {space}: give those")
    with np.errstate(invalid="ignore"):
        cast = x.astype(space.dtype)
    is_right = np.isfinite(cast) if np.issubdtype(space.dtype, np.floating) else x == cast
    if isinstance(space, CATEGORICAL):
        low = np.asarray(getattr(space, "start", 0))
        is_right &= (cast >= low) & (cast < low + choices(space))
    elif not name.startswith("observations"):
        is_right &= (cast >= space.low) & (cast <= space.high)
    if not is_right.all():
        place = tuple(np.argwhere(~is_right)[0])
        raise InputError(f"{where} has {x[place]} in row {place[0]}, which is not in {space}: mend or drop its episode")
    return cast


def _stored_actions(space: Space, parts: list[np.ndarray]) -> np.ndarray:
    """Actions as a rollout stores them, of those that an environment takes: the inverse of `env_actions`."""
    count, (shape, dtype) = len(parts[0]), action_shape_dtype(space)
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(float), space.high.astype(float)
        with np.errstate(invalid="ignore"):  # inf / inf where a number has no bounds
            scaled = np.where(np.isfinite(low) & np.isfinite(high), (parts[0] - low) / (high - low) * 2 - 1, parts[0])
        return scaled.reshape(count, *shape).astype(dtype)
    counted = [(x - getattr(part, "start", 0)).reshape(count, -1) for x, part in zip(parts, leaves(space))]
    return np.concatenate(counted, axis=1).reshape(count, *shape).astype(dtype)


def _check_legal(path: str, space: Space, legal: np.ndarray, actions: np.ndarray) -> None:
    """Raises InputError for an action that its mask [N, choices] forbids, unless that forbids all."""
    parts = np.split(legal != 0, np.cumsum(category_sizes(space))[:-1], axis=1)
    for part, chosen in zip(parts, actions.reshape(len(actions), -1).T):
        if (bad := part.any(1) & ~np.take_along_axis(part, chosen[:, None], 1)[:, 0]).any():
            row = bad.argmax()
            raise InputError(f"{path}: actions has {actions[row]} in row {row}, which {MASK} forbids: drop its episode")
