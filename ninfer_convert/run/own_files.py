"""Files that are nobody's but ours: made, never opened over; read back only when nobody else can have made them.

Owns what a directory that others can write to makes doubtful: links put in our files' places, files planted for
us to trust, other names and owners of a file that we are about to empty. Refuses to know what the files hold.

Source: cli.md, "`OUT` appears only when it is complete".
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ninfer_convert.errors import OutputError, printable

PART_SUFFIX = ".part"
"""What a file is called until it is complete: its name and this."""

MAX_LINE_BYTES = 1 << 20
OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A link is not followed, and a pipe does not block."""

MISSING_CALL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system answers to a call that it does not have."""


def is_own(fd: int) -> bool:
    """Tells whether an open file is a regular one that we own and that has no second name."""
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1


def is_at(fd: int, path: Path) -> bool:
    """Tells whether a path leads to an open file, symbolic links not followed."""
    mine = os.fstat(fd)
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def make_own(path: Path, flags: int = 0) -> int:
    """Returns a descriptor of a new file at a path, opened for writing; what was there loses this name.

    Raises:
        OSError: a call failed.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS | flags, 0o666)


def read_lines(path: Path, limit: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the JSON objects of a file of ours, one to a line, each with the position of its end in bytes.

    Ends after `limit` lines, and at the first that is not an object, too long, or torn, as a power cut leaves it.

    Raises:
        OSError: there is no such file, or it is not our own.
    """
    fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    with open(fd, "rb") as file:
        if not is_own(fd):
            raise PermissionError(errno.EPERM, "not a file of ours", str(path))
        for _ in range(limit):
            raw = file.readline(MAX_LINE_BYTES)
            if not raw.endswith(b"\n"):
                return
            try:
                document = json.loads(raw)
            except (ValueError, RecursionError):
                return
            if not isinstance(document, dict):
                return
            yield document, file.tell()


def sync_directory(directory: Path) -> None:
    """Makes renames in a directory durable, where its file system and its permissions let us ask for that.

    Raises:
        OSError: the disk refused.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in MISSING_CALL:
            raise
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file whole: under a temporary name beside its own, synced, renamed.

    Raises:
        OutputError: a call failed; the temporary is removed, what was at `path` is unchanged.
    """
    staged = path.with_name(path.name + PART_SUFFIX)
    try:
        with open(make_own(staged), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            staged.unlink()
        if isinstance(error, OSError):
            raise _failure("write", path, len(content), error) from error
        raise


def replace_file(path: Path, content: bytes) -> Callable[[], None]:
    """Writes a small file like `write_file`; calling what is returned puts back what was there before.

    Raises:
        OutputError: a call failed; what was at `path` is unchanged.
    """
    try:
        before = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise _failure("replace", path, len(content), error) from error

    def undo() -> None:
        if before is not None:
            write_file(path, before)
        else:
            with contextlib.suppress(OSError):
                path.unlink()

    try:
        write_file(path, content)
    except OutputError:
        # It has its name already when it is the sync of the directory that failed.
        with contextlib.suppress(OutputError):
            undo()
        raise
    return undo


def _failure(verb: str, path: Path, nbytes: int, error: OSError) -> OutputError:
    return OutputError(f"cannot {verb} {printable(str(path))} ({nbytes} bytes): {error.strerror}")
