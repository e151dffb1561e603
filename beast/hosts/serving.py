"""The life of an env server's process: it serves until it is told to stop, and starts again where it shall."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from beast.errors import InputError
from beast.hosts.security import allow_many_connections
from beast.hosts.throttle import log_to_stderr
from beast.hosts.wire import MAKING_SECONDS
from beast.machine import kill_family

KEPT_GIL = "was ended by SIGALRM, as an environment kept Python's GIL for longer than --gil_timeout"


def serve(server, announcement: str, parent_pid: int = 0, gil_seconds: float = MAKING_SECONDS) -> None:
    """Start an EnvServer or a Dialer, print `announcement` and serve until Ctrl-C, SIGTERM, the parent's end (exit code
    0), or a `failure` of the server (its message and exit code 1).

    The end of the parent, even by kill -9, is noticed within half a second. What environments started and did not end
    is killed at the end. A second Ctrl-C does not wait for them to close.

    SIGALRM ends the process when an environment has kept the GIL for `gil_seconds`, unless the environment has a
    handler of its own for that signal.
    """
    allow_many_connections()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, in forked environments too
        server.start()
        if announcement:
            print(announcement, flush=True)
        while not server.failure and (not parent_pid or os.getppid() == parent_pid):
            if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
                signal.setitimer(signal.ITIMER_REAL, gil_seconds)  # the kernel needs no GIL
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(KeyboardInterrupt):
        server.stop()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kill_family()
    if server.failure:
        log_to_stderr(f"error: {server.failure}")
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            output.flush()
    orphaned = bool(parent_pid) and os.getppid() != parent_pid  # nobody asks for the exit code, or else cleans up
    if server.socket_path:
        with contextlib.suppress(OSError):
            server.socket_path.unlink(missing_ok=True)  # gRPC removes it in a thread of its own, which ends here
            if orphaned:
                server.socket_path.parent.rmdir()  # with the last of its sockets
    if parent_pid and os.getpgrp() == os.getpid():
        # SIGTERM is ignored here, and the exit code is still to come.
        os.killpg(os.getpid(), signal.SIGKILL if orphaned else signal.SIGTERM)
    os._exit(1 if server.failure else 0)  # the thread of a hanging environment would hold up an ordinary exit


def keep(command: list[str], address: str, log: Callable[[str], None]) -> None:
    """Run an env server's command, and again when it has ended, until Ctrl-C or SIGTERM; exit with code 0.

    Exits with the command's own code where that ends before it has ever served: it would end so again. Raises
    InputError for port 0, as each start would take another one.
    """
    if not address.startswith("unix:") and address.endswith(":0"):
        raise InputError(f"--address {address}: a server that starts again needs a port that stays: give one")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    pause, has_served = 1.0, threading.Event()
    server: subprocess.Popen | None = None

    def pass_on(output: Iterable[str]) -> None:
        for line in output:
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(line, end="", flush=True)
            if line.startswith("serving "):  # environments print, too
                has_served.set()

    try:
        while True:
            began = time.monotonic()
            server = subprocess.Popen(
                [*command, "--parent_pid", str(os.getpid())], start_new_session=True, stdout=subprocess.PIPE, text=True
            )
            # What an environment started may outlive the server and hold its output open: the end of it says nothing.
            printer = threading.Thread(target=pass_on, args=(server.stdout,), daemon=True)
            printer.start()
            code = server.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of zombies
                os.killpg(server.pid, signal.SIGKILL)
            printer.join(1.0)
            if not has_served.is_set():
                sys.exit(code)
            pause = min(2 * pause, 60.0) if time.monotonic() - began < 60 else 1.0
            why = KEPT_GIL if code == -signal.SIGALRM else f"ended with code {code}"
            log(f"the env server {why}: it starts again in {pause:.0f} s")
            time.sleep(pause)
    except KeyboardInterrupt:
        if server:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10.0)
            server.kill()  # if an environment keeps the GIL, which the handler of SIGTERM needs
            server.wait()
        sys.exit(0)
