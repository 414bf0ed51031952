"""The part file: written at any offset by any thread, published under its name only when complete.

Owns the output's locking, preallocation, writing, syncing and renaming. Refuses to know what the bytes mean.

Source: cli.md, `run`; container.md, "Geometry".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ninfer_convert.errors import OutputError, UsageError, printable

PART_SUFFIX = ".part"
JOURNAL_SUFFIX = ".journal"
MAX_LINE_BYTES = 1 << 20
MAX_CALL_BYTES = 1 << 30
"""One write call moves at most 0x7ffff000 bytes on Linux; shorter ones are looped anyway."""


def require_output(output: Path, *, overwrite: bool, protected: Iterable[Path]) -> None:
    """Refuses an output path that must not be written.

    Args:
        output: the artifact or report path.
        overwrite: whether an existing regular file may be replaced.
        protected: files that must never be replaced, by whatever alias the output names them.

    Raises:
        UsageError: the output is a directory, or is one of the protected files.
        OutputError: it exists and `overwrite` is false, or its directory does not exist.
    """
    name = printable(str(output))
    parent = printable(str(output.parent))
    if not output.parent.is_dir():
        raise OutputError(f"{parent} is not a directory; {name} cannot be written there")
    if output.is_dir():
        raise UsageError(f"{name} is a directory; name a file")
    try:
        found = output.stat()
    except FileNotFoundError:
        if output.is_symlink():
            raise UsageError(f"{name} is a symbolic link to nothing; name a file") from None
        return
    except OSError as error:
        raise OutputError(f"{name}: {error.strerror}") from error
    for path in protected:
        with contextlib.suppress(OSError):
            other = path.stat()
            if (other.st_dev, other.st_ino) == (found.st_dev, found.st_ino):
                raise UsageError(f"{name} is the source file {printable(str(path))}; a source is never overwritten")
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{name} is not a regular file")
    if not overwrite:
        raise UsageError(f"{name} exists; --overwrite replaces it when the new one is complete")


class PartFile:
    """An artifact in the making: `<output>.part`, locked while this process lives.

    Use as a context manager: leaving it without `publish` or `keep` removes the file.
    """

    def __init__(self, output: Path, nbytes: int) -> None:
        """Opens or creates the part file and locks it; `begin` must follow.

        Raises:
            OutputError: another process holds it, or the directory cannot be written.
        """
        self.output = output
        self.path = output.with_name(output.name + PART_SUFFIX)
        self.nbytes = nbytes
        self._fd = self._open_locked()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self.discard()

    def is_full_size(self) -> bool:
        """Tells whether an earlier run left a file of exactly the size this run will write."""
        return os.fstat(self._fd).st_size == self.nbytes

    def begin(self, *, keep_content: bool = False) -> PartFile:
        """Gives the file its size, and reserves the space where the file system can.

        Raises:
            OutputError: the space is not there; the file is removed.
        """
        try:
            self._reserve(keep_content)
        except BaseException:
            self.discard()
            raise
        return self

    def _open_locked(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            with self._failing("create"):
                fd = os.open(self.path, flags, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OutputError(f"{printable(str(self.path))} is not a regular file")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise OutputError(
                        f"{printable(str(self.output))} is being written by {self._holder()}, which holds "
                        f"{printable(str(self.path))}"
                    ) from error
                # The previous holder may have renamed or removed the file between our open and our lock.
                if self._is_current(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        mine = os.fstat(fd)
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)

    def _holder(self) -> str:
        """Returns who holds the lock, as far as the journal beside the part file tells."""
        try:
            with open(self.path.with_name(self.path.name + JOURNAL_SUFFIX), "rb") as file:
                writer = json.loads(file.readline(MAX_LINE_BYTES))["writer"]
            return f"process {int(writer['pid'])} on {printable(str(writer['host']))}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "another process"

    def _reserve(self, keep_content: bool) -> None:
        with self._failing("reserve"):
            if not keep_content:
                os.ftruncate(self._fd, 0)
            usage = os.fstatvfs(self._fd)
            free = usage.f_bavail * usage.f_frsize
            if free + os.fstat(self._fd).st_blocks * 512 < self.nbytes:
                raise OutputError(
                    f"{printable(str(self.output))} needs {self.nbytes} bytes; "
                    f"{printable(str(self.output.parent))} has {free} free"
                )
            try:
                os.posix_fallocate(self._fd, 0, self.nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(self._fd, self.nbytes)

    @contextlib.contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot {verb} {printable(str(self.path))} ({self.nbytes} bytes): {error.strerror}"
            ) from error

    def write(self, offset: int, data: Any) -> None:
        """Writes a contiguous buffer at a file offset, looping over short writes. Safe from any thread."""
        view = memoryview(data).cast("B")
        with self._failing("write"):
            while view:
                try:
                    count = os.pwrite(self._fd, view[:MAX_CALL_BYTES], offset)
                except InterruptedError:
                    continue
                view, offset = view[count:], offset + count

    def read_into(self, offset: int, out: Any) -> None:
        """Fills a buffer with what was written at a file offset. Safe from any thread."""
        view = memoryview(out).cast("B")
        with self._failing("read back"):
            while view:
                try:
                    count = os.preadv(self._fd, [view[:MAX_CALL_BYTES]], offset)
                except InterruptedError:
                    continue
                if count == 0:
                    raise OutputError(f"{printable(str(self.path))} was truncated at {offset} by another process")
                view, offset = view[count:], offset + count

    def sync(self) -> None:
        """Starts and awaits the writing of everything so far to the disk."""
        with self._failing("sync"):
            os.fdatasync(self._fd)

    def release(self, begin: int, end: int) -> None:
        """Tells the system that its cached copy of synced bytes `[begin, end)` is not needed any more."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def require_free_name(self, *, overwrite: bool) -> None:
        """Raises OutputError if without `overwrite` another process has made the output meanwhile."""
        if not overwrite and os.path.lexists(self.output):
            raise self._taken()

    def _taken(self) -> OutputError:
        return OutputError(f"{printable(str(self.output))} was made by another process meanwhile; it was left as it is")

    def publish(self, *, overwrite: bool = False) -> None:
        """Syncs the complete file, gives it its name and syncs the directory.

        Raises:
            OutputError: a call failed, or without `overwrite` another process has made the output meanwhile.
        """
        with self._failing("publish"):
            os.fsync(self._fd)
            if overwrite:
                os.replace(self.path, self.output)
            else:
                self._rename_to_new_name()
            fd, self._fd = self._fd, -1
            os.close(fd)
            sync_directory(self.output.parent)

    def _rename_to_new_name(self) -> None:
        try:
            os.link(self.path, self.output)
        except FileExistsError as error:
            raise self._taken() from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            os.rename(self.path, self.output)
        else:
            os.unlink(self.path)

    def keep(self) -> None:
        """Leaves the file for a later run to resume and gives up the lock."""
        fd, self._fd = self._fd, -1
        os.close(fd)

    def discard(self) -> None:
        """Removes the part file and gives up the lock."""
        with contextlib.suppress(OSError):
            if self._is_current(self._fd):
                os.unlink(self.path)
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Makes renames in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file whole: under a temporary name beside its own, synced, renamed.

    Raises:
        OutputError: a call failed; the temporary is removed, what was at `path` is unchanged.
    """
    staged = path.with_name(path.name + PART_SUFFIX)
    try:
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink()
        name = printable(str(path))
        raise OutputError(f"cannot write {name} ({len(content)} bytes): {error.strerror}") from error
