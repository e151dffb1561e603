"""Env servers that a learner starts on its own machine."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from beast.errors import WorkerFailure
from beast.feeds.processes import Child, end_all
from beast.hosts.serving import KEPT_GIL
from beast.machine import CLOSING_SECONDS

START_SECONDS = 300.0  # until a server listens: imports, and one environment


class LocalServers:
    """`count` processes of an env server's `script`, each on a unix socket in one temporary directory. `arguments` are
    the script's, but for `--address` and `--parent_pid`. Raises WorkerFailure when one does not start."""

    def __init__(self, script: str, arguments: list[str], count: int, max_restarts: int, log: Callable):
        self._command = [sys.executable, script, *arguments, "--parent_pid", str(os.getpid()), "--address"]
        self._log, self._patience = log, CLOSING_SECONDS
        parent = "/tmp" if len(tempfile.gettempdir()) > 80 else None  # a socket's path has at most 107 bytes
        self._directory = tempfile.TemporaryDirectory(prefix="beast-", dir=parent)
        self.addresses = [f"unix:{self._directory.name}/{index}" for index in range(count)]
        self.processes = [Child(f"env server {index}", max_restarts) for index in range(count)]
        try:
            for server, address in zip(self.processes, self.addresses):
                server.start([*self._command, address], stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + START_SECONDS
            while missing := [address for address in self.addresses if not os.path.exists(address[5:])]:
                for server in self.processes:
                    if server.popen.poll() is not None:
                        raise WorkerFailure(f"{server.end(0)}\nIt ended at its start, so it is not restarted.")
                if time.monotonic() > deadline:
                    raise WorkerFailure(f"no env server listens on {missing} after {START_SECONDS:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise

    def watch(self, stop: Callable[[], bool], log: Callable[[str], None]) -> None:
        """Until `stop()`: restart servers that end. Then end all: a stream whose server reads nothing ends no earlier.
        Raises WorkerFailure when one has been restarted too often."""
        while not stop():
            for server, address in zip(self.processes, self.addresses):
                if (code := server.popen.poll()) is not None:
                    log(server.count_restart(server.end(0, KEPT_GIL if code == -signal.SIGALRM else "")))
                    server.start([*self._command, address], stdout=subprocess.DEVNULL)
                server.bound_output()
            time.sleep(0.1)
        self.close()

    def close(self) -> None:
        """End all servers, which close their environments, for 10 seconds at most, and remove their sockets. A second
        call, by who was told not to wait for the first, kills them."""
        patience, self._patience = self._patience, 0.0
        for server in self.processes:
            if popen := server.popen:
                popen.terminate()
        end_all(self.processes, self._log, patience)
        self._directory.cleanup()
