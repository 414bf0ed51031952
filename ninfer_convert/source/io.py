"""Regular files, read by position: opening, reading, and noticing that one changed.

Owns file descriptors and system calls. Refuses to know what a file holds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ninfer_convert.errors import WRONG_PATH, ConvertError, OutputError, SourceError, printable

MAX_READ_BYTES = 0x7FFFF000
"""What one system call moves at most. Source: read(2)."""

MAX_OPEN_FILES = 32
DIGEST_BYTES = 1 << 20

@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one state of a file from another."""

    size: int
    mtime_ns: int
    device: int
    inode: int


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    users: int = 0


class OpenFiles:
    """A bounded set of open files, shared by threads: opened when first borrowed, the oldest idle one closed."""

    def __init__(self, limit: int = MAX_OPEN_FILES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._closed = False

    @contextmanager
    def borrow(self, path: str, expected: Stamp) -> Iterator[int]:
        """Yields a descriptor that stays open inside the block.

        Raises:
            SourceError: the file is gone, or no longer what it was when `expected` was taken.
        """
        entry = self._acquire(path, expected)
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1
                if self._closed and not entry.users:
                    os.close(entry.descriptor)

    def close(self) -> None:
        """Closes every idle file now and every borrowed one when it is given back."""
        with self._lock:
            self._closed = True
            for entry in self._files.values():
                if not entry.users:
                    os.close(entry.descriptor)
            self._files.clear()

    def __len__(self) -> int:
        return len(self._files)

    def _acquire(self, path: str, expected: Stamp) -> _OpenFile:
        with self._lock:
            if self._closed:
                raise ValueError("the checkpoint is closed")
            entry = self._files.get(path)
            if entry is None:
                self._make_room()
                entry = self._files[path] = _OpenFile(_open_unchanged(path, expected))
            self._files.move_to_end(path)
            entry.users += 1
            return entry

    def _make_room(self) -> None:
        idle = [path for path, entry in self._files.items() if not entry.users]
        for path in idle[: max(0, len(self._files) + 1 - self._limit)]:
            os.close(self._files.pop(path).descriptor)


def open_regular(path: str) -> int:
    """Returns a descriptor of a regular file, opened for reading; symbolic links are followed.

    Raises:
        SourceError: no such file, a link to nothing, or not a regular file.
        OutputError: the system refused.
    """
    try:
        # A pipe or a device must not be opened at all, a pipe put there in between must not block.
        _require_regular(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise failure(path, error) from error
    try:
        _require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def stamp(descriptor: int) -> Stamp:
    """Returns the present state of an open file."""
    return _stamp(os.fstat(descriptor))


def read_into(descriptor: int, out: memoryview, position: int) -> int:
    """Fills `out` (bytes) from `position` on; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(out):
        try:
            got = os.preadv(descriptor, [out[done : done + MAX_READ_BYTES]], position + done)
        except InterruptedError:
            continue
        if got == 0:
            break
        done += got
    return done


def read_range(descriptor: int, begin: int, end: int, path: str) -> bytes:
    """Returns the bytes `[begin, end)` of a file.

    Raises:
        SourceError: the file ends before `end`.
        OutputError: the system refused.
    """
    out = bytearray(end - begin)
    try:
        got = read_into(descriptor, memoryview(out), begin)
    except OSError as error:
        raise failure(path, error) from error
    if got < len(out):
        raise SourceError(short_read(path, begin, got, len(out)))
    return bytes(out)


def read_small(path: str, limit: int) -> bytes:
    """Returns a whole file of at most `limit` bytes.

    Raises:
        SourceError: not a regular file, too large, or changed while it was read.
        OutputError: the system refused.
    """
    descriptor = open_regular(path)
    try:
        before = stamp(descriptor)
        if before.size > limit:
            raise SourceError(f"{printable(path)}: has {before.size} bytes; at most {limit} are read from such a file")
        content = read_range(descriptor, 0, before.size, path)
        _require_same(path, before, stamp(descriptor))
        return content
    finally:
        os.close(descriptor)


def file_digest(path: str) -> tuple[str, Stamp]:
    """Returns the SHA-256 of a regular file, in hexadecimal, and the state in which it was read.

    Raises:
        SourceError: not a regular file, or changed while it was read.
        OutputError: the system refused.
    """
    descriptor = open_regular(path)
    try:
        before, digest = stamp(descriptor), hashlib.sha256()
        for begin in range(0, before.size, DIGEST_BYTES):
            digest.update(read_range(descriptor, begin, min(before.size, begin + DIGEST_BYTES), path))
        _require_same(path, before, stamp(descriptor))
        return digest.hexdigest(), before
    finally:
        os.close(descriptor)


def require_unchanged(path: str, expected: Stamp) -> None:
    """Raises SourceError, naming the file, when it is no longer what it was."""
    try:
        found = _stamp(os.stat(path))
    except OSError as error:
        raise failure(path, error) from error
    _require_same(path, expected, found)


def advise(descriptor: int, begin: int, end: int, *, needed: bool) -> None:
    """Tells the system that bytes `[begin, end)` will be read soon, or not again. Only advice: never fails."""
    if end <= begin or not hasattr(os, "posix_fadvise"):
        return
    advice = os.POSIX_FADV_WILLNEED if needed else os.POSIX_FADV_DONTNEED
    try:
        os.posix_fadvise(descriptor, begin, end - begin, advice)
    except OSError:
        return


def short_read(path: str, position: int, got: int, expected: int, tensor: str = "") -> str:
    """Returns the message for a read that met the end of the file too early."""
    return (
        f"{printable(path)}: {f'tensor {tensor}: ' if tensor else ''}file changed or truncated while reading:"
        f" at byte {position} got {got} of {expected} bytes"
    )


def failure(path: str, error: OSError) -> ConvertError:
    """Returns the error for a system call on `path` that failed.

    A path that leads nowhere is an input mistake (`SourceError`); anything else, such as a medium that does
    not answer, may be gone at the next try (`OutputError`).
    """
    if error.errno not in WRONG_PATH:
        return OutputError(f"{printable(path)}: cannot be read: {error.strerror}")
    link = dangling_link(path) if error.errno == errno.ENOENT else None
    return SourceError(link or f"{printable(path)}: {(error.strerror or str(error)).lower()}")


def dangling_link(path: str) -> str | None:
    """Returns the message for a symbolic link whose target does not exist; None for anything else."""
    if not os.path.islink(path) or os.path.exists(path):
        return None
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return (
        f"{printable(path)}: is a link to {printable(target)}, which does not exist:"
        " download incomplete; fetch the file again"
    )


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a file that holds bytes"
        raise SourceError(f"{printable(path)}: is {kind}; required: a regular file")


def _open_unchanged(path: str, expected: Stamp) -> int:
    descriptor = open_regular(path)
    try:
        _require_same(path, expected, stamp(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_same(path: str, expected: Stamp, found: Stamp) -> None:
    if found.size != expected.size:
        raise SourceError(
            f"{printable(path)}: file changed or truncated while reading:"
            f" it had {expected.size} bytes and now has {found.size}"
        )
    if found.inode != expected.inode:
        raise SourceError(f"{printable(path)}: file changed while reading: another file took its place")
    if found.mtime_ns != expected.mtime_ns:
        raise SourceError(f"{printable(path)}: file changed while reading: it was written to")


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)
