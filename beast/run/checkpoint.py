"""Checkpoints: saved whole or not at all, and loaded without running any code from the file."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from beast.errors import InputError, MissingFile, first_line
from beast.run.directory import replace_file

FORMAT = 2  # raise it when weights or fields change their meaning; 2: images are flattened as [H, W, C]
PLAIN_TYPES = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)


def save(path: str | os.PathLike, state: dict[str, Any]) -> None:
    """Write `state`: dicts, lists and tuples of numbers, strings, None and tensors, which is all that `load` accepts.

    Raises TypeError for anything else before a byte is written, and InputError if the file cannot be written.
    """
    refuse_unloadable(state, "state")
    replace_file(path, lambda file: torch.save({"beast_checkpoint": FORMAT, **state}, file))


def load(path: str | os.PathLike) -> dict[str, Any]:
    """The state that `save` wrote to `path`, with its tensors on the CPU. Raises MissingFile or InputError."""
    which = "give a checkpoint.pt or best.pt of a run"
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch itself checks no checksums
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MissingFile(f"{path}: there is no such checkpoint; check --root and --name, or train first") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise InputError(
            f"{path}: truncated, damaged or no checkpoint at all ({first_line(error)}); take best.pt or another copy, "
            "or delete it to begin anew"
        ) from error
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise InputError(f"{path}: not a checkpoint of Beast's ({first_line(error)}); {which}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {which}") from error
    written = state.pop("beast_checkpoint", None) if isinstance(state, dict) else None
    if written is None:
        raise InputError(f"{path}: not a checkpoint of Beast's (it has no field beast_checkpoint); {which}")
    if written != FORMAT:
        raise InputError(
            f"{path}: checkpoint format {written}, and this version of Beast reads format {FORMAT}; "
            "use the version that wrote it (the run's meta.json names the commit)"
        )
    return state


def refuse_unloadable(value: Any, where: str) -> None:
    """Raise TypeError for a value that `load` would refuse. The message tells where in the state it is."""
    kind = type(value)  # exactly: a numpy.float64 is a float to isinstance, but not to the loader
    if kind in (dict, OrderedDict, list, tuple):
        for key, item in value.items() if kind in (dict, OrderedDict) else enumerate(value):
            refuse_unloadable(key, f"a key of {where}")
            refuse_unloadable(item, f"{where}[{key!r}]")
    elif kind not in PLAIN_TYPES:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a safe load refuses; "
            "convert it to a number, a string, a list or a tensor"
        )
