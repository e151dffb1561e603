"""Flags that cannot be, and how a user is told."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback


def check_limits(flags, limits: dict[str, tuple[float, float]]) -> None:
    """Raise ValueError for the first flag that is not within its limits (lowest, highest); NaN never is."""
    for name, (lowest, highest) in limits.items():
        value = getattr(flags, name)
        if not lowest <= value <= highest:
            raise ValueError(f"--{name} {value}: it must lie between {lowest} and {highest}")


@contextlib.contextmanager
def exit_with_message(*own_functions: str):
    """End the program with one line instead of a traceback where the user's input is at fault.

    That is where a ValueError, MemoryError, ImportError or FileNotFoundError was raised by a module of `beast` or in
    one of `own_functions`: their messages say what to change. A fault in other code keeps its traceback.
    """
    try:
        yield
    except (ValueError, MemoryError, ImportError, FileNotFoundError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1]
        ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
        if not raised_in.filename.startswith(ours) and raised_in.name not in own_functions:
            raise
        sys.exit(f"error: {error}")
