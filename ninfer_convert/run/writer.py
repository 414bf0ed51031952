"""The part file: written at any offset by any thread, published under its name only when complete.

Owns the output's locking, preallocation, writing, syncing and renaming. Refuses to know what the bytes mean.

Source: cli.md, `run`; container.md, "Geometry".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ninfer_convert.errors import OutputError, UsageError, printable
from ninfer_convert.run.own_files import (
    MISSING_CALL,
    OPEN_FLAGS,
    PART_SUFFIX,
    is_at,
    is_own,
    read_lines,
    sync_directory,
)

JOURNAL_SUFFIX = ".journal"
MAX_CALL_BYTES = 1 << 30
"""One write call moves at most 0x7ffff000 bytes on Linux; shorter ones are looped anyway."""

RESERVED_BYTES = 64 << 20
"""Space that is reserved in one call; nobody can write meanwhile."""

MAX_HOLDER_LINES = 1_000_000
"""Of the journal of a process that holds the output, when all that is wanted is the name of that process."""

MAX_OPENINGS = 100
"""Of a part file that other processes publish or remove just when we have opened it."""

NO_LOCKS = (*MISSING_CALL, errno.ENOLCK)
"""What a file system without locks answers to the taking of one."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


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
        _finish_publication(output, found)
        raise UsageError(f"{name} exists; --overwrite replaces it when the new one is complete")


def _finish_publication(output: Path, found: os.stat_result) -> None:
    """Removes the second name of a complete output, which a run that died between two system calls has left."""
    part = output.with_name(output.name + PART_SUFFIX)
    with contextlib.suppress(OSError):
        other = part.lstat()
        if (other.st_dev, other.st_ino) == (found.st_dev, found.st_ino) and not output.is_symlink():
            part.unlink()


class PartFile:
    """An artifact in the making: `<output>.part`, locked while this process lives.

    Use as a context manager: leaving it without `publish` or `keep` removes the file, unless it is left by an
    interrupt, whenever that comes.
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
        # One write at a time, because the system lets no two into a file, and makes a processor spin meanwhile.
        self._turn = threading.Lock()
        self._reserved = 0

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._fd >= 0 and kind is not None and issubclass(kind, KeyboardInterrupt):
            self.keep()
        elif self._fd >= 0:
            self.discard()

    def is_empty(self) -> bool:
        """Tells whether no earlier run has left anything in the file."""
        return os.fstat(self._fd).st_size == 0

    def is_full_size(self) -> bool:
        """Tells whether an earlier run left a file of exactly the size this run will write."""
        return os.fstat(self._fd).st_size == self.nbytes

    def begin(self, *, keep_content: bool = False, whole: bool = True) -> PartFile:
        """Gives the file its size, and reserves the space where the file system can.

        Args:
            keep_content: of an interrupted run.
            whole: reserve all of it; else `reserve_more` is called until it returns False, while others write.

        Raises:
            OutputError: the space is not there; the file is removed.
        """
        try:
            self._make_room(keep_content)
            while self.reserve_more() and whole:
                pass
        except Exception:
            self.discard()
            raise
        return self

    def reserve_more(self) -> bool:
        """Reserves the next part of the space; tells whether more is left.

        A file system in memory takes as long for that as for writing the bytes.

        Raises:
            OutputError: the space is not there.
        """
        if self._reserved >= self.nbytes:
            return False
        with self._turn, self._failing("reserve"):
            begin, self._reserved = self._reserved, min(self.nbytes, self._reserved + RESERVED_BYTES)
            try:
                os.posix_fallocate(self._fd, begin, self._reserved - begin)
            except OSError as error:
                if error.errno not in MISSING_CALL:
                    raise
                self._reserved = self.nbytes
        return self._reserved < self.nbytes

    def _open_locked(self) -> int:
        for _ in range(MAX_OPENINGS):
            fd, is_made = self._open()
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OutputError(f"{printable(str(self.path))} is not a regular file")
                self._lock(fd, is_made)
                # The previous holder may have renamed or removed the file between our open and our lock.
                if self._is_current(fd):
                    if is_made or is_own(fd):
                        return fd
                    # Its other names are somebody's data, and its other owner may write to it at any time.
                    with self._failing("remove"):
                        os.unlink(self.path)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise OutputError(
            f"{printable(str(self.path))} was another file each of {MAX_OPENINGS} times it was opened: its file system "
            "numbers files anew all the time, or other processes replace it; write to another directory"
        )

    def _open(self) -> tuple[int, bool]:
        """Returns a descriptor of the part file, and whether it was made by this call."""
        flags = os.O_RDWR | OPEN_FLAGS
        while True:
            with self._failing("create"):
                with contextlib.suppress(FileExistsError):
                    return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
                with contextlib.suppress(FileNotFoundError):
                    return os.open(self.path, flags), False

    def _lock(self, fd: int, is_made: bool) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{printable(str(self.output))} is being written by {named_writer(self._holder())}, which holds "
                f"{printable(str(self.path))}"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise OutputError(f"cannot lock {printable(str(self.path))}: {error.strerror}") from error
            # Without locks the file itself is the lock; only its making is exclusive then.
            if not is_made and not _is_over(holder := self._holder()):
                raise OutputError(
                    f"{printable(str(self.path))} was left by {named_writer(holder)}, and its file system has no locks "
                    "to tell whether that still runs; remove the file if it does not"
                ) from error

    def _is_current(self, fd: int) -> bool:
        return is_at(fd, self.path)

    def _holder(self) -> Mapping[str, Any] | None:
        """Returns who began or resumed the writing last, as far as the journal beside the part file tells."""
        found: Mapping[str, Any] | None = None
        with contextlib.suppress(OSError):
            for line, _ in read_lines(self.path.with_name(self.path.name + JOURNAL_SUFFIX), MAX_HOLDER_LINES):
                # Who prepared a file for shares does not write them.
                found = None if "shares" in line else line.get("writer", found)
        return found if isinstance(found, Mapping) else None

    def _make_room(self, keep_content: bool) -> None:
        with self._failing("reserve"):
            if not keep_content:
                os.ftruncate(self._fd, 0)
            usage = os.fstatvfs(self._fd)
            free = usage.f_bavail * usage.f_frsize
            # A file system that counts no blocks at all cannot say how many are free.
            if usage.f_blocks and free + os.fstat(self._fd).st_blocks * 512 < self.nbytes:
                raise OutputError(
                    f"{printable(str(self.output))} needs {self.nbytes} bytes; "
                    f"{printable(str(self.output.parent))} has {free} free"
                )
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
        with self._turn, self._failing("write"):
            write_at(self._fd, offset, data)

    def read_into(self, offset: int, out: Any) -> None:
        """Fills a buffer with what was written at a file offset. Safe from any thread."""
        with self._failing("read back"):
            if (end := read_at(self._fd, offset, out)) is not None:
                raise OutputError(f"{printable(str(self.path))} was truncated at {end} by another process")

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
            # A network file system tells some errors at a close; this one keeps the lock.
            os.close(os.dup(self._fd))
            if not self._is_current(self._fd):
                raise OutputError(f"{printable(str(self.path))} was removed or replaced by another process")
            if overwrite:
                os.replace(self.path, self.output)
            else:
                self._rename_to_new_name()
        try:
            sync_directory(self.output.parent)
        except OSError as error:
            name = printable(str(self.output))
            raise OutputError(
                f"{name} ({self.nbytes} bytes) is complete, but a power cut may still take its name away: "
                f"its directory cannot be synced: {error.strerror}"
            ) from error
        self.keep()

    def is_published(self) -> bool:
        """Tells whether the output's name leads to this file."""
        return self._fd < 0 or is_at(self._fd, self.output)

    def _rename_to_new_name(self) -> None:
        try:
            os.link(self.path, self.output)
        except FileExistsError as error:
            raise self._taken() from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.require_free_name(overwrite=False)
            os.rename(self.path, self.output)
        else:
            # Another run may have tidied it away already: the output has its name.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def keep(self) -> None:
        """Leaves the file as it is and gives up the lock."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)

    def discard(self) -> None:
        """Removes the part file and gives up the lock."""
        with contextlib.suppress(OSError):
            if self._is_current(self._fd):
                os.unlink(self.path)
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


def write_at(fd: int, offset: int, data: Any) -> None:
    """Writes a contiguous buffer at a file offset, looping over short writes.

    Raises:
        OSError: a call failed.
    """
    view = memoryview(data).cast("B")
    while view:
        try:
            count = os.pwrite(fd, view[:MAX_CALL_BYTES], offset)
        except InterruptedError:
            continue
        if count == 0:
            raise OSError(errno.ENOSPC, "nothing more is taken")
        view, offset = view[count:], offset + count


def read_at(fd: int, offset: int, out: Any) -> int | None:
    """Fills a buffer from a file offset; returns where the file ends if that is before the buffer does.

    Raises:
        OSError: a call failed.
    """
    view = memoryview(out).cast("B")
    while view:
        try:
            count = os.preadv(fd, [view[:MAX_CALL_BYTES]], offset)
        except InterruptedError:
            continue
        if count == 0:
            return offset
        view, offset = view[count:], offset + count
    return None


def writer_identity() -> dict[str, Any]:
    """Returns what a journal says of the process that writes it."""
    return {"pid": os.getpid(), "host": platform.node()}


def named_writer(holder: Mapping[str, Any] | None) -> str:
    """Returns what a message calls the process that a journal names."""
    if holder is None or type(holder.get("pid")) is not int:
        return "another process"
    return f"process {holder['pid']} on {printable(str(holder.get('host'))[:80])}"


def _is_over(holder: Mapping[str, Any] | None) -> bool:
    """Tells whether a writer is known to have ended: a process of this host that is not there."""
    if holder is None or type(holder.get("pid")) is not int or holder.get("host") != platform.node():
        return False
    try:
        os.kill(max(1, holder["pid"]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
