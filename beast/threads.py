"""Threads and signals of a run: the first failure, or a signal, ends it everywhere."""

from __future__ import annotations

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

    @property
    def failure(self) -> BaseException | None:
        """The first failure of any thread, with that thread's traceback."""
        return self._failures[0] if self._failures else None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # told by the thread that asks for `failure`
            self._failures.append(error)
        finally:
            self.stop.set()
            self._wake_all()


class Interrupts:
    """Notes SIGINT and SIGTERM in `received` instead of what they did before; a second signal does that again.

    A handler may run inside any call of the main thread, so it takes no lock: it sets an attribute, to be polled.
    """

    def __init__(self):
        self.received = False
        self._before: dict = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers, or gets signals
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            for number in self._before:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        self.received = True
        self.__exit__()
