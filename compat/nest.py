"""TorchBeast's `nest` module: functions on nests, which are tuples, lists and str-keyed dicts of nests, and leaves.

Everything else is a leaf. Lists and named tuples come back as tuples, dicts in the order of their keys; leaves are
visited in that order too.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable


def map(function: Callable, nest):
    """The nest of function(leaf)."""
    return map_many(lambda leaves: function(leaves[0]), nest)


def map_many2(function: Callable, first, second):
    """The nest of function(leaf of first, leaf of second). ValueError where their structures differ."""
    return map_many(lambda leaves: function(*leaves), first, second)


def map_many(function: Callable, *nests):
    """The nest of function([leaf of each nest]): one argument, a list. ValueError where structures differ."""
    if not nests:
        raise ValueError("map_many() got a function and no nest: give one or more")
    kinds = {_kind(nest) for nest in nests}
    if len(kinds) > 1:
        raise ValueError(f"nests differ in structure: {' against '.join(sorted(kinds))}")
    first = nests[0]
    if isinstance(first, dict):
        return {key: map_many(function, *(nest[key] for nest in nests)) for key in sorted(first)}
    if isinstance(first, (tuple, list)):
        return tuple(map_many(function, *parts) for parts in zip(*nests))
    return function(list(nests))


def flatten(nest) -> list:
    """All leaves in order."""
    leaves: list = []
    map(leaves.append, nest)
    return leaves


def pack_as(nest, leaves) -> object:
    """A nest with the structure of `nest` and these leaves, in the order of `flatten`. ValueError on a wrong number."""
    leaves = list(leaves)
    places = len(flatten(nest))
    if places != len(leaves):
        raise ValueError(f"the nest has {places} leaves, got {len(leaves)} to pack")
    remaining = iter(leaves)
    return map(lambda _: next(remaining), nest)


def front(nest):
    """The first leaf. ValueError where there is none."""
    leaves = flatten(nest)
    if not leaves:
        raise ValueError(f"{nest!r} has no leaf")
    return leaves[0]


def _kind(nest) -> str:
    if isinstance(nest, dict):
        return f"a dict with keys {', '.join(builtins.map(repr, sorted(nest)))}"
    if isinstance(nest, (tuple, list)):
        return f"a tuple or list of {len(nest)}"
    return "a leaf"
