"""TorchBeast's `nest` module: functions on nests, which are tuples, lists and str-keyed dicts of nests, and leaves.

Everything else is a leaf. Lists and named tuples come back as tuples, dicts in the order of their keys; leaves are
visited in that order too. Errors begin with TorchBeast's texts.
"""

from __future__ import annotations

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
        raise ValueError("Expected at least one nest. map_many() got a function alone")
    first = nests[0]
    for nest in nests[1:]:
        _check_match(first, nest)
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
        text = "Nest didn't exhaust sequence" if places < len(leaves) else "Too few elements in sequence"
        raise ValueError(f"{text}: the nest has {places} leaves, got {len(leaves)} to pack")
    remaining = iter(leaves)
    return map(lambda _: next(remaining), nest)


def front(nest):
    """The first leaf. ValueError where there is none."""
    leaves = flatten(nest)
    if not leaves:
        raise ValueError(f"{nest!r} has no leaf")
    return leaves[0]


def _check_match(first, second) -> None:
    """ValueError where two nests differ at their root."""
    kind = _kind(first)
    if kind != _kind(second):
        raise ValueError(f"nests don't match: {kind} against {_kind(second)}")
    if kind == "a leaf":
        return
    if len(first) != len(second):
        what = "maps" if kind == "a dict" else "vectors"
        raise ValueError(f"Expected {what} of same length but got {len(first)} vs {len(second)}")
    if kind == "a dict":
        for a, b in zip(sorted(first), sorted(second)):
            if a != b:
                raise ValueError(f"Expected maps to have same keys but found '{a}' vs '{b}'")


def _kind(nest) -> str:
    return "a dict" if isinstance(nest, dict) else "a tuple or list" if isinstance(nest, (tuple, list)) else "a leaf"
