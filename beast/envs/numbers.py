"""Numbers of environments, for what two of them must not share: ports, displays, directories."""

import fcntl
import os
import tempfile
import threading
import weakref

from gymnasium.vector import VectorEnv

from beast.errors import InputError

LIMIT = 2**20  # numbers that there are
_lock = threading.Lock()
_taken: set[range] = set()  # by this process
_new = threading.local()  # `ranges`: those of this thread that belong to no vector env yet
_file = -1


def reserve_numbers(num_envs: int) -> range:
    """So many numbers from 0 on that no other environment on this machine has, whichever run or env server of this user
    it belongs to. Call it in `create_env`: they are kept as long as the vector env that it returns, or this process.

    The lowest that are free are taken: a number says nothing of the group, and the next start may give another one.
    """
    global _file
    with _lock:
        path = f"{tempfile.gettempdir()}/beast-numbers-{os.getuid()}"
        try:
            if _file < 0:
                _file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            for first in range(0, LIMIT, num_envs):
                numbers = range(first, first + num_envs)
                if any(first < other.stop and other.start < numbers.stop for other in _taken):
                    continue
                try:
                    # A byte stands for a number. Its lock is this process's, and ends with it, whatever kills it.
                    fcntl.lockf(_file, fcntl.LOCK_EX | fcntl.LOCK_NB, num_envs, first)
                except (BlockingIOError, PermissionError):  # another process has it
                    continue
                _taken.add(numbers)
                _new.ranges = [*getattr(_new, "ranges", ()), numbers]
                return numbers
        except OSError as error:
            raise InputError(f"{path} cannot be locked ({error}): set TMPDIR to a directory where it can") from error
    raise InputError(f"no {num_envs} numbers of environments below {LIMIT} are free")


def keep_numbers(env: VectorEnv) -> None:
    """Keep what this thread has reserved since it last called this until `env` is gone."""
    for numbers in getattr(_new, "ranges", ()):
        weakref.finalize(env, _release, numbers).atexit = False
    _new.ranges = []


def _release(numbers: range) -> None:
    with _lock:
        fcntl.lockf(_file, fcntl.LOCK_UN, len(numbers), numbers.start)
        _taken.discard(numbers)
