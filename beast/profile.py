"""Where the time of a run goes: each of its threads and processes counts its own seconds, stage by stage, and how long
a core worked for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from statistics import fmean


class Laps:
    """Seconds of one thread by stage. A stage ends with its lap, where the next one begins, so nothing is left out.

    The thread calls `begin` itself before its first lap.

    With a GPU these are the host's seconds: who waits for the device pays for all that was queued on it.

    `cpu_seconds` is how long a core has worked for the thread: what is missing to the wall time, it waited, for others
    or for a core. Other threads that compute for it (`--learner_threads`) are not counted.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.cpu_seconds = 0.0
        self.begin()

    def begin(self) -> None:
        """What was before belongs to no stage."""
        self._since, self._cpu_since = time.monotonic(), time.thread_time()

    def lap(self, stage: str) -> None:
        """All time since the last lap was spent on `stage`."""
        now, cpu = time.monotonic(), time.thread_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self.cpu_seconds += cpu - self._cpu_since
        self._since, self._cpu_since = now, cpu


class Profile:
    """The seconds of all workers of a run.

    `workers` maps the name of a thread or process to a function that gives its seconds by stage so far; those of
    "actor 0", "actor 1", … are one kind, whose mean the metrics show. `cores` maps a name to a function that gives its
    CPU seconds so far.
    """

    def __init__(self):
        self.workers: dict[str, Callable[[], dict[str, float]]] = {}
        self.cores: dict[str, Callable[[], float]] = {}
        self._begin: dict[str, dict[str, float]] = {}
        self._before: dict[str, dict[str, float]] = {}
        self._cores_begin: dict[str, float] = {}
        self._cores_before: dict[str, float] = {}

    def begin(self) -> None:
        """What was before counts no more."""
        self._begin = {name: dict(read()) for name, read in self.workers.items()}
        self._before = dict(self._begin)
        self._cores_begin = {name: read() for name, read in self.cores.items()}
        self._cores_before = dict(self._cores_begin)

    def shares(self, seconds: float) -> dict[str, float]:
        """`time/<kind>_<stage>`: its share of the last `seconds`, counted from the last call; `cores/<name>`: the cores
        that were busy with it."""
        shares: dict[str, list[float]] = {}
        for name, read in self.workers.items():
            now, before = dict(read()), self._before.get(name, {})
            for stage, total in now.items():
                kind = re.sub(r" \d+$", "", name)
                shares.setdefault(f"time/{kind}_{stage}", []).append((total - before.get(stage, 0.0)) / seconds)
            self._before[name] = now
        for name, read in self.cores.items():
            now, before = read(), self._cores_before.get(name, 0.0)
            shares[f"cores/{name}"] = [(now - before) / seconds]
            self._cores_before[name] = now
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
        if self.cores:
            busy = {name: (read() - self._cores_begin.get(name, 0.0)) / seconds for name, read in self.cores.items()}
            lines.append("cores that were busy: " + " · ".join(f"{name} {cores:.2f}" for name, cores in busy.items()))
        return "\n".join(lines)
