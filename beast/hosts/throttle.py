"""Logs of an env host and of who is called by one: no caller fills a disk."""

import contextlib
import ipaddress
import math
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable

LINES_PER_MINUTE = 20
FREE_GUESSES, MAX_SOURCES = 20, 4096  # wrong tokens of one source; sources that are remembered


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


class Guesses:
    """Slows who guesses: a peer's host (of IPv6, a network of 64 bits) has 20 wrong tokens, and one more a second."""

    def __init__(self):
        self._lock, self._all_paid = threading.Lock(), dict[str, float]()  # when a source has all its tries again

    def may_try(self, peer: str) -> bool:
        return self._all_paid.get(_source_of(peer), 0.0) <= time.monotonic() + FREE_GUESSES - 1

    def was_wrong(self, peer: str) -> None:
        source, now = _source_of(peer), time.monotonic()
        with self._lock:
            if len(self._all_paid) >= MAX_SOURCES:
                self._all_paid.clear()
            self._all_paid[source] = max(self._all_paid.get(source, now), now) + 1.0


def _source_of(peer: str) -> str:
    host = urllib.parse.unquote(peer).rpartition(":")[0]  # ipv6:%5B::1%5D:53080
    with contextlib.suppress(ValueError):
        return str(ipaddress.IPv6Network((host.removeprefix("ipv6:").strip("[]").partition("%")[0], 64), strict=False))
    return host


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
