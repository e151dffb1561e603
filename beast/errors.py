"""Errors for the user to mend, and failures of workers."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


class UserError(Exception):
    """An error that the user can mend. Its message is all that is printed: what is wrong, the value, the limit and the
    remedy."""


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


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to be quoted in another one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


@contextlib.contextmanager
def exit_with_message() -> Iterator[None]:
    """End the program with the message of a `UserError` or `WorkerFailure` instead of a traceback, and exit code 1.

    Ctrl-C ends it quietly by the signal itself, so that a shell's loop ends, too.
    """
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except (UserError, WorkerFailure) as error:
        sys.exit(f"error: {error}")
