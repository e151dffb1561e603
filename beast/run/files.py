"""Files that hold either their old content or the new one, whatever happens while they are written."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from beast.errors import InputError, first_line


def replace_file(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` at once by what `write(file)` writes, synced to the disk. It has one writer at a time.

    Raises InputError if the file cannot be written.
    """
    path = os.fspath(path)
    temporary = f"{path}.tmp{os.getpid()}"  # beside it, as a rename is atomic only within a file system
    try:
        for leftover in glob.glob(f"{glob.escape(path)}.tmp*"):  # of killed writers
            os.remove(leftover)
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
        directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        os.fsync(directory)  # otherwise a power cut can undo the rename
        os.close(directory)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise InputError(
            f"{path}: cannot be written ({first_line(error)}); an older file there is untouched. "
            "Check the free space and the permissions of its directory"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as JSON."""
    replace_file(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


def read_json(path: Path, missing: Any) -> Any:
    """The content of a JSON file, or `missing` if there is none. Raises InputError naming a damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except ValueError as error:
        raise InputError(f"{path}: damaged ({error}); repair it, or choose another --name") from error
