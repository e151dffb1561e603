"""What `create_env` makes, found out by making some of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

from gymnasium.vector import VectorEnv

from beast.envs.groups import EnvGroup
from beast.envs.rows import EnvSpaces


def probe_env(create_env: Callable, flags, **overrides) -> EnvSpaces:
    """What the rows of the environments of `create_env(flags, num_envs, **overrides)` look like.

    `env_id` is --env, unless `create_env` does not look at it: then it is the environment's own name. Frames are those
    that `beast.envs.make` says; other environments have one frame a step.
    """
    watched, read = _watch(flags)
    with closing(create_env(watched, 1, **overrides)) as env:
        spaces = EnvGroup(env).spaces
        env_id = flags.env if "env" in read else name_of(env)
        return spaces._replace(env_id=env_id, frames_per_step=(env.metadata or {}).get("frames_per_step", 1))


def name_of(env: VectorEnv) -> str:
    """The id with which a vector env was made, or the class of its environments."""
    first = next(iter(getattr(env.unwrapped, "envs", [])), env)
    spec = env.spec or first.spec
    return (env.metadata or {}).get("env_id") or (spec.id if spec else type(first.unwrapped).__name__)


def _watch(flags) -> tuple[Any, set[str]]:
    """A copy of the flags, and the names of those that somebody has looked at since."""
    read: set[str] = set()

    class Watched(type(flags)):  # type: ignore[misc]
        def __getattribute__(self, name: str):
            read.add(name)
            return super().__getattribute__(name)

    watched = copy.copy(flags)
    watched.__class__ = Watched
    return watched, read
