"""Where the time goes: the seconds of threads and processes by stage, and the cores they keep busy."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from statistics import fmean

CORES = "cores"


class Laps:
    """One thread's seconds by stage. Each lap ends a stage where the next one begins, so the stages sum to the wall
    time. The thread itself calls `begin` before its first lap.

    With a GPU a stage that waits for the device pays for all work queued on it. `cpu_seconds` is the thread's own CPU
    time, without that of other threads that compute for it (`--learner_threads`).
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.cpu_seconds = 0.0
        self.begin()

    def begin(self) -> None:
        """Restart the clock: the time since the last lap belongs to no stage."""
        self._since, self._cpu_since = time.monotonic(), time.thread_time()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to `stage`."""
        now, cpu = time.monotonic(), time.thread_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self.cpu_seconds += cpu - self._cpu_since
        self._since, self._cpu_since = now, cpu


class Profile:
    """The seconds of all workers of a run.

    `workers` maps the name of a thread or process to a function that returns its seconds by stage so far, `cores` maps
    a name to one that returns CPU seconds so far. The metrics show the mean of "actor 0", "actor 1", … as one kind.
    """

    def __init__(self):
        self.workers: dict[str, Callable[[], dict[str, float]]] = {}
        self.cores: dict[str, Callable[[], float]] = {}
        self._begin: dict[tuple[str, str], float] = {}
        self._before: dict[tuple[str, str], float] = {}

    def begin(self) -> None:
        """Restart the clock."""
        self._begin = self._before = self._read()

    def shares(self, seconds: float) -> dict[str, float]:
        """`time/<kind>_<stage>`: its share of the `seconds` since the last call; `cores/<name>`: busy cores."""
        shares: dict[str, list[float]] = {}
        before, self._before = self._before, self._read()
        for (worker, stage), total in self._before.items():
            kind = re.sub(r" \d+$", "", worker)
            name = f"cores/{stage}" if worker == CORES else f"time/{kind}_{stage}"
            shares.setdefault(name, []).append((total - before.get((worker, stage), 0.0)) / seconds)
        return {name: fmean(values) for name, values in shares.items()}

    def table(self, seconds: float) -> str:
        """Each worker's stages in percent of the `seconds` of wall time since `begin`, and the number of busy cores."""
        columns: dict[str, list[str]] = {worker: [] for worker in (*self.workers, CORES)}
        for (worker, stage), total in self._read().items():
            share = (total - self._begin.get((worker, stage), 0.0)) / seconds
            columns[worker].append(f"{stage} {share:.2f}" if worker == CORES else f"{stage} {100 * share:.1f}")
        busy = columns.pop(CORES)
        width = max(map(len, columns), default=0)
        lines = [f"where the {seconds:.1f} seconds went, in percent:"]
        lines += [f"  {worker:{width}}  {' · '.join(stages)}" for worker, stages in columns.items()]
        if busy:
            lines.append("cores that were busy: " + " · ".join(busy))
        return "\n".join(lines)

    def _read(self) -> dict[tuple[str, str], float]:
        """Seconds so far by worker and stage, and CPU seconds so far by CORES and name."""
        workers = {name: dict(read()) for name, read in self.workers.items()}  # copies: threads add stages meanwhile
        workers[CORES] = {name: read() for name, read in self.cores.items()}
        return {(worker, stage): seconds for worker, stages in workers.items() for stage, seconds in stages.items()}
