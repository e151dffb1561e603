"""What a process tells those that it starts of its environments: an id that a script has registered, a function."""

import dataclasses
import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Callable

import gymnasium
from gymnasium.envs.registration import EnvSpec

from beast.errors import InputError, first_line

SPEC = "BEAST_ENV_SPEC"  # environment variable: the specifications of registered environments, as a list in JSON
_handed = os.environ.get(SPEC, "")  # by the parent of this process


def importable(thing: Callable) -> str:
    """`module:name` by which another process finds a function or class; empty where it does not."""
    name = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    try:
        module = name.partition(":")[0]
        is_found = module != "__main__" and importlib.util.find_spec(module) and pkgutil.resolve_name(name) is thing
    except (ImportError, AttributeError, ValueError):
        return ""
    return name if is_found else ""


def hand_over(env: str, script: str) -> None:
    """Have processes that are started from now on, and run `script`, know the ids with commas between them that this
    one has registered. Raises InputError where only this one can make such an environment."""
    os.environ.pop(SPEC, None)
    if specs := [spec for env_id in env.split(",") if (spec := _spec_of(env_id, script))]:
        os.environ[SPEC] = json.dumps(specs)


def _spec_of(env_id: str, script: str) -> str:
    """The specification of this id as JSON, empty where other processes know it themselves."""
    module, _, name = env_id.rpartition(":")
    spec = gymnasium.registry.get(name)
    if module or spec is None or str(spec.entry_point).startswith(("gymnasium.", "ale_py")):
        return ""
    entry = spec.entry_point
    module = getattr(entry, "__module__", "") if callable(entry) else str(entry).partition(":")[0]
    try:
        if module == "__main__":
            if os.path.abspath(getattr(sys.modules["__main__"], "__file__", "")) == script:
                return ""  # it is registered there, too
            raise ValueError(f"{entry} is in __main__")
        entry = importable(entry) if callable(entry) else entry
        return dataclasses.replace(spec, entry_point=entry or spec.entry_point).to_json()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"--env {env_id}: environments are made in processes of their own, which cannot make what this script has "
            f"registered ({first_line(error)}). Put class and registration into a module, a file beside your script, "
            f"and give --env module:{name}"
        ) from error


def handed_over(name: str) -> EnvSpec | None:
    """The specification that the parent of this process has handed over, if it is of this name."""
    specs = map(EnvSpec.from_json, json.loads(_handed or "[]"))
    return next((spec for spec in specs if spec.id == name), None)
