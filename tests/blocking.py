"""For tests of calls that block: functions in threads, and libbeast's five blocking calls about to block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from waiting import PATIENCE

libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: python setup.py build_ext --inplace")


@pytest.fixture(autouse=True)
def ended_if_it_hangs():
    """A test whose main thread is stuck in libbeast fails, because libbeast lets signal handlers raise."""

    def give_up(number, frame):
        raise AssertionError(f"the test still hung after {2 * PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(2 * PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class InThread:
    """`function(*args)` in a daemon thread; `result()` waits for it, and returns or raises what it did."""

    def __init__(self, function, *args):
        self._outcome = None
        self.thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self.thread.start()

    def _run(self, function, args):
        try:
            self._outcome = function(*args), None
        except BaseException as error:
            self._outcome = None, error

    def is_done(self) -> bool:
        return not self.thread.is_alive()

    def result(self):
        self.thread.join(PATIENCE)
        assert self.is_done(), f"still blocked after {PATIENCE} s"
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def stays_blocked(call: InThread, seconds: float = 0.3) -> bool:
    """Whether the call does not return within so many seconds; it can only be wrong in the direction of a pass."""
    call.thread.join(seconds)
    return not call.is_done()


# Each defines `block()`, which blocks, and `release()`, after which it returns or raises.
BLOCKING_CALLS = {
    "enqueue": """
        queue = libbeast.BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
        queue.enqueue(np.zeros((1, 2)))
        block, release = lambda: queue.enqueue(np.ones((1, 2))), lambda: next(queue)
    """,
    "next(queue)": """
        queue = libbeast.BatchingQueue(batch_dim=0)
        block, release = lambda: next(queue), lambda: queue.enqueue(np.ones((1, 2)))
    """,
    "queue.get": """
        queue = libbeast.BatchingQueue(batch_dim=0)
        block, release = lambda: queue.get(timeout=1e6), lambda: queue.enqueue(np.ones((1, 2)))
    """,
    "compute": """
        queue = libbeast.DynamicBatcher(batch_dim=0)
        block, release = lambda: queue.compute(np.ones((1, 2))), lambda: next(queue).set_outputs(np.ones((1, 2)))
    """,
    "next(batcher)": """
        queue = libbeast.DynamicBatcher(batch_dim=0)
        def release():
            threading.Thread(target=lambda: queue.compute(np.ones((1, 2))), daemon=True).start()
        block = lambda: next(queue).set_outputs(np.ones((1, 2)))
    """,
}


INTERRUPT = """
def interrupt():
    wait_until_asleep(os.getpid())  # the main thread has the number of its process
    os.kill(os.getpid(), signal.SIGINT)
"""


def run_script(call: str, script: str) -> str:
    """The output of a Python process that defines `block` and `release` of this blocking call, then runs `script`.

    A process of its own, for what would hang the tests' own interpreter when it fails, or end it.
    """
    preamble = "import atexit, os, signal, sys, threading, time\nimport numpy as np\nimport libbeast\n"
    preamble += "sys.modules['torch'] = None  # batches are numpy arrays: to import torch would take most of the time\n"
    preamble += "from waiting import wait_until_asleep\n" + INTERRUPT
    source = preamble + textwrap.dedent(BLOCKING_CALLS[call]) + textwrap.dedent(script)
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=Path(libbeast.__file__).parent,  # so that it imports the same one
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        raise AssertionError(f"the process still hung after {PATIENCE} s in {call}") from None
    assert process.returncode == 0 and not errors, f"exit code {process.returncode}\n{output}{errors}"
    return output
