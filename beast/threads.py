"""Threads and signals of a run: the first failure, or a signal, ends it everywhere."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable


class Crew:
    """Threads that end together: the return or failure of one sets `stop` and calls `wake_all`, once for each.

    `wake_all` must make every blocking call of the others return.
    """

    def __init__(self, wake_all: Callable[[], None]):
        self.stop = threading.Event()
        self._wake_all = wake_all
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread."""
        thread = threading.Thread(target=self._run, args=(work,))
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Stop all threads and wait for their end."""
        self.stop.set()
        self._wake_all()
        for thread in self._threads:
            thread.join()

    def raise_failure(self) -> None:
        """Raise the first failure of any thread, with that thread's traceback."""
        if self._failures:
            raise self._failures[0]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # told by the thread that calls raise_failure
            self._failures.append(error)
        finally:
            self.stop.set()
            self._wake_all()


@contextlib.contextmanager
def set_on_signals(event: threading.Event):
    """Have SIGINT and SIGTERM set the event instead of what they did before. A second signal does that."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number, frame) -> None:
        event.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
