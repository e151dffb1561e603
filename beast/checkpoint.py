"""Checkpoints that are either whole or not there: written aside, synced, renamed; read without running any code."""

from __future__ import annotations

import glob
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

FORMAT = 2  # raise it when weights or fields change their meaning; 2: images are flattened as [H, W, C]

PLAIN_TYPES = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written. The message names the file, what is wrong and what to do."""


def save(path: str | os.PathLike, state: dict[str, Any]) -> None:
    """Write `state` to `path`. Whatever happens meanwhile, `path` holds the old checkpoint or the new one, whole.

    `state` is dicts, lists and tuples of numbers, strings, None and tensors: all that `load` accepts. Raises TypeError
    for anything else, naming where it is, before a byte is written; CheckpointError if the file cannot be written.
    """
    refuse_unloadable(state, "state")
    try:
        replace_file(path, lambda file: torch.save({"beast_checkpoint": FORMAT, **state}, file))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise CheckpointError(
            f"{path}: cannot be written ({first_line(error)}); an older checkpoint there is untouched. "
            "Check the free space and the permissions of its directory"
        ) from error


def load(path: str | os.PathLike) -> dict[str, Any]:
    """The state that `save` wrote to `path`, with its tensors on the CPU.

    Raises CheckpointError if the file is missing, damaged, no checkpoint of Beast's, or of a newer format. Nothing in
    the file is executed.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself checks no checksums
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint; check --root and --name, or train first") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged or no checkpoint at all ({first_line(error)}); take best.pt or another copy, "
            "or delete it to begin anew"
        ) from error
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not a checkpoint of Beast's ({first_line(error)}); give a checkpoint.pt or best.pt of a run"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a checkpoint.pt or best.pt") from error
    if not isinstance(state, dict) or "beast_checkpoint" not in state:
        raise CheckpointError(
            f"{path}: a torch file, but not a checkpoint of Beast's (it has no field beast_checkpoint); "
            "give a checkpoint.pt or best.pt of a run"
        )
    written = state.pop("beast_checkpoint")
    if written != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {written}, and this version of Beast reads format {FORMAT}; "
            "use the version that wrote it (the run's meta.json names the commit)"
        )
    return state


def replace_file(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` in one instant by what `write(file)` writes, synced to the disk.

    The temporary file lies beside it, as a rename is atomic only within a file system. Those of writers that were
    killed are removed, so there must be only one writer of `path` at a time.
    """
    path = os.fspath(path)
    for leftover in glob.glob(f"{glob.escape(path)}.tmp*"):
        os.remove(leftover)
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)  # without this a power cut can undo the rename
    finally:
        os.close(directory)


def refuse_unloadable(value: Any, where: str) -> None:
    """Raise TypeError for what `weights_only=True` would refuse to load, while something can be done about it.

    Types are compared exactly: a numpy.float64 is a float to isinstance, and foreign to the loader.
    """
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            refuse_unloadable(key, f"a key of {where}")
            refuse_unloadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            refuse_unloadable(item, f"{where}[{index}]")
    elif type(value) not in PLAIN_TYPES:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a safe load refuses; "
            "convert it to a number, a string, a list or a tensor"
        )


def first_line(error: BaseException) -> str:
    """The part of an error's message that fits into another one's parentheses."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
