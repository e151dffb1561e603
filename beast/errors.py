"""Errors for the user to mend, and failures of workers."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from beast.machine import end_with_family

SHOW_TRACEBACKS = "BEAST_TRACEBACK"  # the environment variable with which a UserError shows its traceback, too


class UserError(Exception):
    """An error that the user can mend. Only its message is printed: what is wrong, the value, limit and remedy."""


class InputError(UserError, ValueError):
    """A flag, a file or an environment that Beast cannot work with."""


class MissingPackage(UserError, ImportError):
    """An optional package that is not installed."""


class MissingFile(UserError, FileNotFoundError):
    """A file that does not exist."""


class OutOfMemory(UserError, MemoryError):
    """Less memory than the flags need."""


class Unreachable(UserError, ConnectionError):
    """A server that does not answer or refuses the connection."""


class WorkerFailure(Exception):
    """A worker failed. The message holds the worker's own traceback, so the traceback of the raise adds nothing."""


def of_this_rank(text: str) -> str:
    """The text as one of several learners prints it: with its number before each line, unless that is 0."""
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    return text if rank == "0" else "\n".join(f"rank {rank}: {line}" for line in text.splitlines())


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to be quoted in another one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def full_text(error: BaseException) -> str:
    """What a log says of an error that ends the run: its message if it has all that helps, else the traceback."""
    has_message = isinstance(error, (WorkerFailure, UserError))
    return str(error) if has_message else "".join(traceback.format_exception(error))


def raised(error: BaseException) -> str:
    """Type, first line and place of an error of a user's code: the innermost line outside of the calling libraries, and
    the innermost of all where that is a package's. An error without a message is told by its line of code."""
    lines = traceback.extract_tb(error.__traceback__)
    message = first_line(error) if str(error).strip() else lines[-1].line if lines else ""
    found = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if not lines:
        return found
    rank, last = max((_is_users(line.filename), index) for index, line in enumerate(lines))
    places = [lines[last], *(x for x in lines[-1:] if x.filename != lines[last].filename and _is_users(x.filename))]
    return f"{found} ({', from '.join(f'{x.filename}:{x.lineno}, in {x.name}' for x in places)})"


def _is_users(filename: str) -> int:
    """2 for a file outside of all libraries, 1 for an installed package, 0 for Python, gymnasium and Beast."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(Path(__file__).parent) or "gymnasium" in path.parts:
        return 0
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return 1
    return 0 if path.is_relative_to(sysconfig.get_paths()["stdlib"]) else 2


@contextlib.contextmanager
def exit_with_message() -> Iterator[None]:
    """End the program with the message of a `UserError` or `WorkerFailure` instead of a traceback, and exit code 1.

    Ctrl-C ends it quietly by the signal itself, so that a shell's loop ends, too. What stdout cannot write, as ± in the
    C locale, becomes a question mark from here on. What the environments of this process have started ends with it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    status = end_with_family()
    try:
        yield
        status[0] = 0
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except (UserError, WorkerFailure) as error:
        if os.environ.get(SHOW_TRACEBACKS):
            traceback.print_exc()
        sys.exit(of_this_rank(f"error: {error}"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        what = f"error: {limit} open files are the limit of this process, and too few: give `ulimit -n 1024` before"
        sys.exit(of_this_rank(what))
