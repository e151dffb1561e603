"""A program that ends, or forks, while a pool's streams go on: streams that it dials, or that are dialed to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from env_hosts import ROOT
from waiting import PATIENCE

# Its arguments: "dials" or "listens", an address, and how it ends.
START = """
import atexit, faulthandler, os, sys, threading, time, numpy as np
sys.modules["torch"] = None  # batches are numpy arrays: to import torch would take most of the time
faulthandler.enable()
# Registered before libbeast, so that it is called after what libbeast does at the end.
atexit.register(lambda: "pool" in globals() and print("connected:", pool.counters()["streams_connected"]))
import libbeast

way, address, how = sys.argv[1:]
listener, addresses, log = None, [address] * 2, print
if way == "listens":
    listener, addresses, log = libbeast.EnvListener(address), [], lambda line: None
    print("listening", flush=True)
    if how == "nothing":
        sys.exit(0)
    if how == "a thread in first_hello":
        threading.Thread(target=listener.first_hello, daemon=True).start()
        sys.exit(0)
    if how != "a pool that runs":
        listener.first_hello()
queue, batcher = libbeast.BatchingQueue(), libbeast.DynamicBatcher()
pool = libbeast.ActorPool(3, queue, batcher, addresses, (), listener=listener, log=log)

def infer():
    for batch in batcher:
        if how == "unanswered":
            raise SystemExit
        (_, reward, *_), state = batch.get_inputs()
        batch.set_outputs(((np.zeros(tuple(reward.shape), np.int64),), state))

threading.Thread(target=infer, daemon=True).start()
runner = threading.Thread(target=pool.run, daemon=True)
"""
# Not for FORKS: the end of a forked interpreter would wait for faulthandler's thread, which is not there.
TIME_LIMIT = "import faulthandler; faulthandler.dump_traceback_later(100, exit=True)"
ENDS = f"""{TIME_LIMIT}{START}
if how == "ctrl-c":
    threading.Thread(target=lambda: (next(queue), print("running", flush=True), list(queue)), daemon=True).start()
    pool.run()
runner.start()
if how == "a pool that runs":
    sys.exit(0)
if how == "unanswered":
    runner.join()
else:
    next(queue)
    print("running", flush=True)
if how == "raise":
    raise ValueError("the learner breaks here")
if how == "closed":
    queue.close(), batcher.close(), runner.join()
if how == "dropped":
    del pool, runner
if how == "exit":
    sys.exit(3)
"""
FORKS = f"""{START}
runner.start()
next(queue)
child = os.fork()
if child == 0:
    if how == "dropped":
        del pool, queue, batcher, runner, listener
    if how == "stop":
        pool.stop()
    if how == "close":
        listener.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
before, until = pool.count(), time.monotonic() + 1
while time.monotonic() < until:
    next(queue)
counters = pool.counters()
assert pool.count() > before and (counters["streams_come"] == 1 if listener else counters["restarts"] == 0)
print("went on")
"""

in_every_way_of_ending = pytest.mark.parametrize(
    "how, code",
    [("closed", 0), ("forgotten", 0), ("dropped", 0), ("exit", 3), ("raise", 1), ("unanswered", 0), ("ctrl-c", -2)],
)


def start(program: str, way: str, address: str, how: str, prefix=()) -> subprocess.Popen:
    """One of these programs; where it listens it does so when this returns. `prefix` runs the command."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", program, way, address, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert way == "dials" or process.stdout.readline() == "listening\n", process.stderr.read()
    return process


def check_end(process: subprocess.Popen, how: str, code: int) -> None:
    """ENDS has ended that way with this code, and told why and no more."""
    if how != "unanswered":
        assert process.stdout.readline() == "running\n"
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    process.wait(timeout=PATIENCE)
    # communicate() would lose what came together with "running".
    output, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == code, errors
    assert how == "dropped" or output.endswith("connected: 0\n"), "threads of the pool outlived the interpreter"
    expected = {"raise": "the learner breaks here", "ctrl-c": "KeyboardInterrupt", "unanswered": "AsyncError"}
    assert expected.get(how, "") in errors
    assert "Fatal" not in errors and "terminate called" not in errors, errors


def check_fork(process: subprocess.Popen) -> None:
    """FORKS has seen its child end and its own streams go on."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "went on" in output, errors
