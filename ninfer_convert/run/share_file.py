"""The prepared part file as a share has it: it may write its own bytes, and holds the lock that keeps `finalize` away.

Owns the two descriptors of one process. Never makes, resizes or removes the file, and refuses to know which bytes
are whose (`shares`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ninfer_convert.errors import OutputError, printable
from ninfer_convert.run.own_files import OPEN_FLAGS, is_own
from ninfer_convert.run.writer import NO_LOCKS, read_at, write_at


class ShareFile:
    """A prepared part file as a share has it; use as a context manager.

    One descriptor only writes. The other holds the lock that keeps `finalize` away; it is read from when a share
    is resumed, before any work.
    """

    def __init__(self, path: Path) -> None:
        """Opens and locks the file.

        Raises:
            OutputError: it is being finalized, or cannot be opened.
        """
        self.path = path
        with self._failing("open"):
            self._fd = os.open(path, os.O_WRONLY | OPEN_FLAGS)
        try:
            with self._failing("open"):
                self._lock_fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        except OutputError:
            os.close(self._fd)
            raise
        try:
            if not is_own(self._fd):
                raise OutputError(f"{printable(str(path))} is not a file of ours, or has a second name")
            self._lock()
        except OutputError:
            self.__exit__()
            raise

    def __enter__(self) -> ShareFile:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fd = self._lock_fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{printable(str(self.path))} is being prepared or finalized") from error
        except OSError as error:
            # Where there are no locks, what is finalized too early fails its check and is finalized again.
            if error.errno not in NO_LOCKS:
                raise OutputError(f"cannot lock {printable(str(self.path))}: {error.strerror}") from error

    @contextlib.contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"cannot {verb} {printable(str(self.path))}: {error.strerror}") from error

    def write(self, offset: int, data: Any) -> None:
        """Writes a contiguous buffer at a file offset. Safe from any thread."""
        with self._failing("write"):
            write_at(self._fd, offset, data)

    def read_into(self, offset: int, out: Any) -> None:
        """Fills a buffer with what is at a file offset. Safe from any thread."""
        with self._failing("read back"):
            if (end := read_at(self._lock_fd, offset, out)) is not None:
                raise OutputError(f"{printable(str(self.path))} was truncated at {end} by another process")

    def sync(self) -> None:
        """Awaits the writing of everything so far to the disk."""
        with self._failing("sync"):
            os.fdatasync(self._fd)
            # A network file system tells some errors at a close; this one keeps the file open.
            os.close(os.dup(self._fd))

    def release(self, begin: int, end: int) -> None:
        """Tells the system that its cached copy of synced bytes `[begin, end)` is not needed any more."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
