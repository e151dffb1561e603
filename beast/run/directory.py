"""A run's directory: its lock, its log, its files, and the flags, code, versions and hardware of its starts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from beast.errors import InputError
from beast.files import read_json, write_json
from beast.machine import cpu_model, usable_cores
from beast.run.console import tell

MAX_UNTRACKED_FILES, MAX_UNTRACKED_FILE_BYTES, MAX_UNTRACKED_BYTES = 200, 100_000, 1_000_000  # of each start
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # what flock says on some clusters' file systems


class Run:
    """The directory `<root>/<name>/`, created or resumed, and locked against other processes until `close`.

    `config.json` holds every flag of the latest start. `meta.json` holds what `describe_machine` tells of each, but no
    environment variables, which may be secret. A run with a checkpoint is resumed; a run without one begins anew.

    Raises InputError, and leaves the files as they are, if another process is training here, if a flag that is not in
    `resume_free` differs from the run's, or if the directory cannot be written.
    """

    def __init__(self, root: str | os.PathLike, name: str, config: Mapping, resume_free: Collection[str] = ()):
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise InputError(f"--name {name!r}: a run's name is that of a single directory; put others into --root")
        path = self.path = Path(root).absolute() / name  # wherever an environment goes
        if str(path) != str(path).encode(errors="replace").decode():  # bytes that are no text in the C locale
            raise InputError(f"{ascii(str(path))}: this locale cannot write that name: `export LC_ALL=C.UTF-8` before")
        self.checkpoint_path, self.best_path = path / "checkpoint.pt", path / "best.pt"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / "lock", "a+b", buffering=0)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                tell(f"warning: {path} is on a file system without locks: start no second process in this run")
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().decode().strip()
            self.close()
            raise InputError(
                f"{path}: process {holder} is training in this run's directory; stop it first, or choose another --name"
            ) from None
        except OSError as error:
            raise InputError(f"{path}: cannot be used as a run's directory ({error}); choose another --root") from error
        try:
            config = json.loads(json.dumps(dict(config)))  # as it will be read again: tuples are lists
            self.resumed = self.checkpoint_path.exists()
            starts = []
            if self.resumed:
                refuse_contradictions(path, config, resume_free)
                starts = read_json(path / "meta.json", missing={"starts": []})["starts"]
            starts.append({"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "argv": sys.argv, **describe_machine()})
            self.num_starts = len(starts)  # this one included
            self._files = {"config.json": config, "meta.json": {"starts": starts}}
        except BaseException:
            self.close()
            raise

    def record_start(self) -> None:
        """Write `config.json` and `meta.json`. Raises InputError if they cannot be written."""
        for name, content in self._files.items():
            write_json(self.path / name, content)

    def log(self, message: str) -> None:
        """Append `message` to out.log with the time, and print it on stderr. A full disk does not keep it from that."""
        with contextlib.suppress(OSError), open(self.path / "out.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
        tell(message)

    def close(self) -> None:
        """Release the lock. For a killed process the kernel does it."""
        self._lock.close()


def refuse_contradictions(path: Path, config: Mapping, resume_free: Collection[str]) -> None:
    """Raise InputError naming every flag whose value differs from that of the run at `path`."""
    old = read_json(path / "config.json", missing=None)
    if old is None:
        raise InputError(
            f"{path}: there is a checkpoint.pt but no config.json to compare the flags with; "
            "put it back, move the checkpoint away to begin anew, or choose another --name"
        )
    # A flag that the old config lacks was added to the code later, and contradicts nothing.
    differing = [flag for flag in config if flag in old and flag not in resume_free and config[flag] != old[flag]]
    if "variant" in differing:
        raise InputError(
            f"{path}: {program_of(old['variant'])} began this run; train on with that, or choose another --name for a "
            "new run"
        )
    if differing:
        lines = "".join(f"  --{flag} {config[flag]} (the run has {old[flag]})\n" for flag in differing)
        remedies = " ".join(as_argument(flag, old[flag]) for flag in differing)
        raise InputError(
            f"{path}: there is a run of this name, and it cannot be resumed with other values for\n{lines}"
            f"choose another --name for a new run, or resume this one with {remedies}"
        )


def program_of(variant: str) -> str:
    """The file beside Beast's package that trains a variant, `<variant>.py` or `<variant>beast.py`, or the variant."""
    names = (f"{variant}.py", f"{variant}beast.py")
    return next((name for name in names if (Path(__file__).parents[2] / name).is_file()), variant)


def as_argument(flag: str, value: Any) -> str:
    """The value of a flag as one types it."""
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no_{flag}"
    words = map(str, value if isinstance(value, list) else [value])
    return " ".join([f"--{flag}", *map(shlex.quote, words)])


def describe_machine() -> dict[str, Any]:
    """What a result depends on besides its flags: commit, uncommitted changes, versions and hardware."""
    import torch  # only here: plot.py and the programs that ask for a processor's name need no torch

    code = Path(__file__).resolve().parents[2]
    versions = {"python": platform.python_version()}
    for package in ("beast", "torch", "numpy", "gymnasium", "ale-py"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "commit": git(code, "rev-parse", "HEAD"),
        "diff": git(code, "diff", "--no-ext-diff", "--no-textconv", "HEAD"),
        "untracked": untracked_files(code), "versions": versions, "platform": platform.platform(),
        "cpu": cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }  # fmt: skip


def untracked_files(directory: Path) -> dict[str, str | None]:
    """Files that git neither has nor ignores, by name: the text of Python files, up to a size, and None for others.

    Only code is copied: the others may hold data, or a secret.
    """
    found: dict[str, str | None] = {}
    left = MAX_UNTRACKED_BYTES
    names = (git(directory, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    for name in list(filter(None, names))[:MAX_UNTRACKED_FILES]:
        found[name] = None
        path = directory / name
        with contextlib.suppress(OSError, UnicodeDecodeError):
            size = path.stat().st_size
            if path.suffix == ".py" and not path.is_symlink() and size <= min(left, MAX_UNTRACKED_FILE_BYTES):
                found[name] = path.read_text(encoding="utf-8")
                left -= size
    return found


def git(directory: Path, *command: str) -> str | None:
    """The output of a git command, or None where there is no git, no checkout or no commit."""
    command = ("git", "--no-optional-locks", *command)  # a training run must not block the user's own git commands
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, cwd=directory, stderr=subprocess.DEVNULL, timeout=30)
        return output.decode(errors="replace").strip()
    return None


def code_version(code: Path) -> str:
    """The commit of a checkout, followed by ` with uncommitted changes` where Python or C++ files differ from it."""
    changed = git(code, "status", "--porcelain", "--", "*.py", "csrc")
    return (git(code, "rev-parse", "HEAD") or "unknown") + (" with uncommitted changes" if changed else "")
