"""Logs of an env host and of who is called by one: no caller fills a disk."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable

REFUSALS_PER_MINUTE = 20  # that are logged


class Throttled:
    """A log of at most `count` lines in `seconds`. The first line after them tells how many were left out."""

    def __init__(self, log: Callable[[str], None], count: int, seconds: float):
        self._log, self._count, self._seconds = log, count, seconds
        self._lock, self._began, self._lines = threading.Lock(), -math.inf, 0

    def __call__(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._began > self._seconds:
                if self._lines > self._count:
                    self._log(f"{self._lines - self._count} lines like the next one were left out")
                self._began, self._lines = now, 0
            self._lines += 1
            if self._lines <= self._count:
                self._log(line)


def log_to_stderr(line: str) -> None:
    """Streams go on where nobody reads stderr any more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class RefusalLog:
    """Logs why a libbeast.EnvListener refused callers, when it is called; a number of lines in a minute at most."""

    def __init__(self, listener, log: Callable[[str], None]):
        self._listener, self._log = listener, Throttled(log, REFUSALS_PER_MINUTE, 60.0)

    def __call__(self) -> None:
        refusals, num_more = self._listener.refusals()
        for refusal in refusals:
            self._log(refusal)
        if num_more:
            self._log(f"refused {num_more} more")
