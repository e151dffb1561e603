"""Presets: flags that suit a kind of task, to begin with. `--preset NAME`, or `Flags(**PRESETS[NAME])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beast.errors import InputError


def take(arguments: list[str], known: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The flags of `--preset NAME` among the arguments, and the arguments without it. Raises InputError for a name
    that is not `known`."""
    flags: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != "--preset":
            rest.append(word)
            continue
        name = name if equals else next(words, "")
        if name not in known:
            raise InputError(f"--preset {name}: an unknown name; there are {', '.join(known)}")
        flags |= known[name]
    return flags, rest


def describe(about: Mapping[str, str]) -> str:
    """What --help says of them."""
    lines = [f"    {name:<10}  {what}" for name, what in about.items()]
    return "\n".join(["--preset NAME takes other defaults, for tasks of a kind:", *lines])
