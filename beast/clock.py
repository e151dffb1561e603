"""Where a thread's time goes."""

from __future__ import annotations

import time


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
