"""Starts, watches, restarts and stops env servers on this machine, on unix sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from beast.errors import WorkerFailure
from beast.feeds.processes import Child, cpu_seconds_of_children

START_SECONDS = 60.0  # until a server listens: imports, and nothing else


class LocalServers:
    """`count` processes of an env server's `script`, each on a unix socket in one temporary directory.

    `arguments` are the script's; `--address` and `--parent_pid` are added. Raises WorkerFailure when one does not
    start.
    """

    def __init__(self, script: str, arguments: list[str], count: int, max_restarts: int):
        self._command = [sys.executable, script, *arguments, "--parent_pid", str(os.getpid()), "--address"]
        self._directory = tempfile.TemporaryDirectory(prefix="beast-")  # short: a socket's path has 107 bytes
        self.addresses = [f"unix:{self._directory.name}/{index}" for index in range(count)]
        self._servers = [Child(f"env server {index}", max_restarts) for index in range(count)]
        try:
            for server, address in zip(self._servers, self.addresses):
                self._start(server, address)
            deadline = time.monotonic() + START_SECONDS
            while missing := [address for address in self.addresses if not os.path.exists(address[5:])]:
                for server in self._servers:
                    if server.popen.poll() is not None:
                        raise WorkerFailure(f"{server.end(0)}\nIt ended at its start, so it is not restarted.")
                if time.monotonic() > deadline:
                    raise WorkerFailure(f"no env server listens on {missing} after {START_SECONDS:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise

    def watch(self, stop: Callable[[], bool], log: Callable[[str], None]) -> None:
        """Until `stop()`: restart servers that end. Raises WorkerFailure when one has been restarted too often."""
        while not stop():
            for server, address in zip(self._servers, self.addresses):
                if server.popen.poll() is not None:
                    log(server.count_restart(server.end(0)))
                    self._start(server, address)
            time.sleep(0.1)

    def cpu_seconds(self) -> float:
        """CPU time of all servers, those that have ended included."""
        return cpu_seconds_of_children([popen.pid for server in self._servers if (popen := server.popen)])

    def close(self) -> None:
        """End all servers and remove their sockets."""
        running = [server for server in self._servers if server.popen]
        for server in running:
            server.popen.terminate()
        for server in running:
            server.end(2)
        self._directory.cleanup()

    def _start(self, server: Child, address: str) -> None:
        server.start([*self._command, address], stdout=subprocess.DEVNULL)
