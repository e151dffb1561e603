"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from beast.errors import InputError, first_line


@contextlib.contextmanager
def same_directory() -> Iterator[None]:
    """Come back to the working directory in the end, wherever an environment has gone. For functions, too."""
    directory = os.getcwd()
    try:
        yield
    finally:
        os.chdir(directory)


def replace_file(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` at once by what `write(file)` writes, synced to the disk. It has one writer at a time.

    Whatever happens, the file holds its old content or the new one. Raises InputError if it cannot be written.
    """
    path = Path(path)
    # Beside it, as a rename is atomic only within a file system.
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        for leftover in path.parent.glob(f"{glob.escape(path.name)}.tmp*"):  # of killed writers
            leftover.unlink(missing_ok=True)
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # otherwise a power cut can undo the rename
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that sync no directories
                raise
        finally:
            os.close(directory)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise InputError(
            f"{path}: cannot be written ({first_line(error)}); an older file there is untouched. "
            "Check the free space and the permissions of its directory"
        ) from error


def in_cache(name: str) -> Path:
    """The path of a file or directory of Beast's that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "beast", name)


def anonymous_file(name: str, size: int) -> int:
    """A descriptor of `size` bytes of zeros that have no name in a file system. Raises OSError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


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
