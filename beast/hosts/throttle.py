"""Logs of an env host and of who is called by one: no caller fills a disk."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable

LINES_PER_MINUTE = 20


class Throttled:
    """A log of at most 20 lines in a minute. The first line after it tells how many were left out."""

    def __init__(self, log: Callable[[str], None]):
        self._log, self._lock, self._began, self._lines = log, threading.Lock(), -math.inf, 0

    def __call__(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._began > 60.0:
                if self._lines > LINES_PER_MINUTE:
                    self._log(f"{self._lines - LINES_PER_MINUTE} lines like the next one were left out")
                self._began, self._lines = now, 0
            self._lines += 1
            if self._lines <= LINES_PER_MINUTE:
                self._log(line)


def log_to_stderr(line: str) -> None:
    """Streams go on where nobody reads stderr any more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class RefusalLog:
    """Logs why a libbeast.EnvListener refused callers, when it is called; 20 lines in a minute at most."""

    def __init__(self, listener, log: Callable[[str], None]):
        self._listener, self._log = listener, Throttled(log)

    def __call__(self) -> None:
        refusals, num_more = self._listener.refusals()
        for refusal in refusals:
            self._log(refusal)
        if num_more:
            self._log(f"refused {num_more} more")
