"""Programs that start at once: children of a process that has imported torch and what else a training imports.

A test of how a run ends need not wait for three seconds of imports. All else is as if the interpreter had started the
script: its arguments, environment, directory and output, its exit code, and what it prints when it fails.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

MAX_REQUEST = 1 << 20  # bytes


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        taken = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


class Program:
    """What subprocess.Popen is for a script of Python and its arguments."""

    def __init__(self, words: list[str], *, cwd: Path, env: dict[str, str], output: Path):
        """`output` is the file for stdout and stderr."""
        self.words, self.output, self.returncode = words, output, None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(_parent())
        request = json.dumps([words, str(cwd), env]).encode()
        with open(output, "w") as file:
            socket.send_fds(self._socket, [request], [file.fileno()])
        self.pid = int(self._socket.recv(100))

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None and select.select([self._socket], [], [], seconds)[0]:
            self.returncode = int(self._socket.recv(100))
            self._socket.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.words, timeout)
        return self.returncode

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_address = ""


def _parent() -> str:
    """The address of this process's parent of programs, which is started once and ends with this process."""
    global _address
    if not _address:
        command = [sys.executable, __file__, str(os.getpid())]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        atexit.register(process.kill)
        _address = "\0" + process.stdout.readline().strip()
    return _address


def serve(owner: int) -> bool:
    """Fork a child for each connection and send its number, and then its exit code. True in a child, which has the
    arguments of its program."""
    import gymnasium  # noqa: F401
    import torch._dynamo  # noqa: F401
    import tyro  # noqa: F401

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"beast-test-programs-{os.getpid()}"
    listener.bind("\0" + name)
    listener.listen()
    print(name, flush=True)
    children: dict[int, socket.socket] = {}
    while os.getppid() == owner:
        if select.select([listener], [], [], 0.02)[0]:
            connection, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 1)
            pid = os.fork()
            if pid == 0:
                for other in (listener, connection, *children.values()):
                    other.close()
                become(*json.loads(request), descriptors[0])
                return True
            os.close(descriptors[0])
            connection.send(str(pid).encode())
            children[pid] = connection
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            connection = children.pop(pid)
            with contextlib.suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()
    return False


def become(words: list[str], directory: str, environment: dict[str, str], output: int) -> None:
    """Takes on what the program was started with."""
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [str(Path(words[0]).parent), *paths]


if __name__ == "__main__":
    if serve(int(sys.argv[1])):
        __file__ = sys.argv[0]
        exec(compile(Path(__file__).read_text(), __file__, "exec", dont_inherit=True))
