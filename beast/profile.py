"""Where the time of a run goes: each of its threads and processes counts its own seconds, stage by stage."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from statistics import fmean


class Laps:
    """Seconds of one thread by stage. A stage ends with its lap, where the next one begins, so nothing is left out.

    With a GPU these are the host's seconds: who waits for the device pays for all that was queued on it.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """What was before belongs to no stage."""
        self._since = time.monotonic()

    def lap(self, stage: str) -> None:
        """All time since the last lap was spent on `stage`."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


class Profile:
    """The seconds of all workers of a run.

    `workers` maps the name of a thread or process to a function that gives its seconds by stage so far; those of
    "actor 0", "actor 1", … are one kind, whose mean the metrics show.
    """

    def __init__(self):
        self.workers: dict[str, Callable[[], dict[str, float]]] = {}
        self._begin: dict[str, dict[str, float]] = {}
        self._before: dict[str, dict[str, float]] = {}

    def begin(self) -> None:
        """What was before counts no more."""
        self._begin = {name: dict(read()) for name, read in self.workers.items()}
        self._before = dict(self._begin)

    def shares(self, seconds: float) -> dict[str, float]:
        """`time/<kind>_<stage>`: its share of the last `seconds`, counted from the last call."""
        shares: dict[str, list[float]] = {}
        for name, read in self.workers.items():
            now, before = dict(read()), self._before.get(name, {})
            for stage, total in now.items():
                kind = re.sub(r" \d+$", "", name)
                shares.setdefault(f"time/{kind}_{stage}", []).append((total - before.get(stage, 0.0)) / seconds)
            self._before[name] = now
        return {name: fmean(values) for name, values in shares.items()}

    def table(self, seconds: float) -> str:
        """A line for each worker: what every stage was of these `seconds` of wall time, in percent."""
        lines = [f"where the {seconds:.1f} seconds went, in percent:"]
        width = max(map(len, self.workers), default=0)
        for name, read in self.workers.items():
            before = self._begin.get(name, {})
            spent = {stage: total - before.get(stage, 0.0) for stage, total in dict(read()).items()}
            stages = " · ".join(f"{stage} {100 * share / seconds:.1f}" for stage, share in spent.items())
            lines.append(f"  {name:{width}}  {stages}")
        return "\n".join(lines)
