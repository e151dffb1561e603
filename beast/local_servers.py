"""Env servers on this machine, on unix sockets: started, watched, replaced when they die, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from beast.actors import FORGIVEN_AFTER, cpu_seconds_of_children

START_SECONDS = 60.0  # until a server listens: imports, and nothing else


class ServerError(ConnectionError):
    """A server ended that may not be started again. The message holds what it printed."""

    is_told = True  # by the message: the traceback of whoever raised it adds nothing


class LocalServers:
    """`count` processes of an env server's `script`, each on a socket of its own in a directory of their own.

    `arguments` are the script's; `--address` and `--parent_pid` are added. Raises ServerError when one does not start.
    """

    def __init__(self, script: str, arguments: list[str], count: int, max_restarts: int):
        self._script, self._arguments, self._max_restarts = script, arguments, max_restarts
        self._directory = tempfile.TemporaryDirectory(prefix="beast-")  # short: a socket's path has 107 bytes
        self.addresses = [f"unix:{self._directory.name}/{index}" for index in range(count)]
        self._processes: list[subprocess.Popen] = []
        self._errors = [tempfile.TemporaryFile() for _ in range(count)]
        self._restarts = [0] * count  # of each server in a row
        self._started_at = [0.0] * count  # time.monotonic()
        try:
            self._processes += [self._start(index) for index in range(count)]
            deadline = time.monotonic() + START_SECONDS
            while missing := [address for address in self.addresses if not os.path.exists(address[5:])]:
                for index, process in enumerate(self._processes):
                    if process.poll() is not None:
                        raise ServerError(f"an env server ended at its start:\n{self._printed(index)}")
                if time.monotonic() > deadline:
                    raise ServerError(f"no env server listens on {missing} after {START_SECONDS:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise

    def watch(self, stop: Callable[[], bool], log: Callable[[str], None]) -> None:
        """Until `stop()`: replace servers that end. Raises ServerError when they do so too often."""
        while not stop():
            for index, process in enumerate(self._processes):
                if process.poll() is None:
                    continue
                message = f"env server {process.pid} ended with exit code {process.returncode}:\n{self._printed(index)}"
                if time.monotonic() - self._started_at[index] > FORGIVEN_AFTER:
                    self._restarts[index] = 0
                if self._restarts[index] >= self._max_restarts:
                    raise ServerError(f"{message}\n--max_env_restarts {self._max_restarts} are used up.")
                log(f"{message}\nRestarting it.")
                self._restarts[index] += 1
                self._processes[index] = self._start(index)
            time.sleep(0.1)

    def cpu_seconds(self) -> float:
        """CPU time of all servers, those that have ended included."""
        return cpu_seconds_of_children([process.pid for process in self._processes])

    def close(self) -> None:
        """End all servers and remove their sockets."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with what its environments started
                process.wait()
        for file in self._errors:
            file.close()
        self._directory.cleanup()

    def _start(self, index: int) -> subprocess.Popen:
        self._errors[index].seek(0)  # the child writes on from there
        self._errors[index].truncate()
        self._started_at[index] = time.monotonic()
        command = [sys.executable, self._script, *self._arguments, "--address", self.addresses[index]]
        return subprocess.Popen(
            [*command, "--parent_pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors[index],
            start_new_session=True,  # Ctrl-C is for the learner, which ends them
        )

    def _printed(self, index: int) -> str:
        self._errors[index].seek(0)
        return self._errors[index].read().decode(errors="replace").strip()[-10_000:]
