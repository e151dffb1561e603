"""Waiting for what other threads and processes do, on a machine that may be busy with other work."""

import contextlib
import sys
import time
from pathlib import Path

PATIENCE = 240.0  # seconds. Only a hang takes that long, and only a test that fails waits for so long.


def wait_until(condition, what="", seconds: float = PATIENCE):
    """What `condition()` returned when it was first true.

    Raises AssertionError after so many seconds; `what`, a text or a function that makes one, says what did not happen.
    """
    deadline, pause = time.monotonic() + seconds, 0.001
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds:.0f} s: {what() if callable(what) else what}"
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return result


def wait_until_asleep(*native_ids: int) -> None:
    """Until each thread of this process with one of these native ids sleeps in a call that blocks, or has ended.

    A thread that waits for a core does not sleep, and one that waits for the interpreter's lock, which is free while
    this one waits here, does not sleep for long. Only Linux tells; elsewhere this takes a third of a second.
    """
    if not sys.platform.startswith("linux"):
        time.sleep(0.3)
        return
    before: list[list[str]] = []

    def state(native_id: int) -> list[str]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/self/task/{native_id}/status").read_text().splitlines()
            return [line for line in lines if line.startswith(("State", "voluntary", "nonvoluntary"))]
        return ["has ended"]

    def are_asleep() -> bool:
        nonlocal before
        now = [state(native_id) for native_id in native_ids]
        is_same, before = now == before, now
        return is_same and not any("running" in lines[0] for lines in now)

    wait_until(are_asleep, "the threads sleep")
