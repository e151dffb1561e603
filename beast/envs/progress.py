"""How far training is, for environments that become harder with it."""

import json
import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from beast.files import anonymous_file

HEAD = struct.Struct("<II")  # of a page: CRC-32 and length of the text
MAX_BYTES, PAGE_BYTES = 2000, 4096  # of the text; of the page
VARIABLE = "BEAST_PROGRESS"  # environment variable: a path of the page, for processes that an environment starts
_of_thread = threading.local()  # `page`: that of the stream which an env server serves in this thread
_newest: "Page | None" = None  # of this process
_shared = -1  # a descriptor of the newest page, always of the same number: a forkserver tells no news of VARIABLE


class Progress(NamedTuple):
    """How far training was a moment ago."""

    steps: int = 0  # of the agent, of all environments together
    total_steps: int = 1  # --total_steps; 1 where nobody trains, as in the step before a run that tries environments
    told: Mapping[str, float] = {}  # what the agent has told with `training.tell(name=…)`


class Page:
    """A text in memory that one process writes, and that all who have its file descriptor read."""

    def __init__(self, fd: int | None = None):
        """Raises OSError where there is no memory for it."""
        self.fd = anonymous_file("beast-progress", PAGE_BYTES) if fd is None else fd
        weakref.finalize(self, os.close, self.fd)

    def write(self, text: bytes) -> None:
        os.pwrite(self.fd, HEAD.pack(zlib.crc32(text), len(text)) + text, 0)

    def read(self) -> bytes:
        for _ in range(1000):  # until no writer came in between
            page = os.pread(self.fd, PAGE_BYTES, 0)
            crc, length = HEAD.unpack_from(page)
            if zlib.crc32(text := page[HEAD.size : HEAD.size + length]) == crc:
                return text
        return b""


def follow(page: Page) -> None:
    """Have environments of this thread, or else of this process and of what it starts, read this page from now on."""
    global _newest, _shared
    _newest = _of_thread.page = page
    if sys.platform == "linux":  # by which a process finds it that was not forked
        _shared = os.dup(page.fd) if _shared < 0 else os.dup2(page.fd, _shared, inheritable=False)
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{_shared}"


def page_of_thread() -> Page:
    """That which environments of this thread read, for an env server: its streams may be of several learners."""
    if not hasattr(_of_thread, "page"):
        follow(Page())
    return _of_thread.page


def training_progress() -> Progress:
    """How far training is. Environments call it in `reset`, say; no steps of 1 where nobody trains."""
    try:
        page = getattr(_of_thread, "page", _newest) or Page(os.open(os.environ.get(VARIABLE, ""), os.O_RDONLY))
        steps, total_steps, told = json.loads(page.read())
        return Progress(int(steps), int(total_steps), {str(name): float(x) for name, x in told.items()})
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # of another host's text
        return Progress()


def encode(progress: Progress) -> bytes:
    return json.dumps(progress).encode()
