"""Where compiled kernels are kept between runs, and how one is kept.

Owns the choice of a directory and the integrity of what is read back from it: an entry is machine code, so it is
loaded only from a directory nobody else can write to, and only with its digest intact. A missing or damaged entry
means that the kernel is compiled again; without a directory nothing is kept. Neither is an error. What other
versions have kept is removed when it is not used any more. Refuses to know what the kernels do.

numba's own cache is not used: it settles its place when the decorator runs, unpickles damaged files, lets an
error of the file system end the caller, and keeps an index that concurrent processes overwrite.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ninfer_convert import __version__

SUFFIX = ".kernel"
UNUSED_SECONDS = 30 * 24 * 3600
"""Entries of other versions are removed when no process has looked for any for this long."""

_LEAF = re.compile(r"kernels-.+-[0-9a-f]{16}")
_DIGEST_BYTES = hashlib.sha256().digest_size


@functools.cache
def cache_directory() -> Path | None:
    """Returns the first directory that is ours alone and can be written, or None; it is created if need be.

    The candidates are below $NUMBA_CACHE_DIR, the user's cache directory ($XDG_CACHE_HOME or ~/.cache) and
    $TMPDIR (or /tmp), in this order. The last part of the path names the version of the converter and the
    digest of the kernels' source. Found once per process.
    """
    for parents in _candidates():
        if _is_usable(*parents):
            with contextlib.suppress(OSError):
                os.utime(parents[-1])  # tells other versions that it is in use
            return parents[-1]
    return None


def _candidates() -> Iterator[tuple[Path, ...]]:
    """Yields directories to look in: an existing one, then those that may have to be made below it."""
    leaf = f"kernels-{__version__}-{_source_digest()}"
    named = _absolute(os.environ.get("NUMBA_CACHE_DIR"))
    if named is not None:
        yield named, named / leaf
    user = _user_cache_directory()
    if user is not None:
        yield user, user / "ninfer-convert", user / "ninfer-convert" / leaf
    temporary = _absolute(os.environ.get("TMPDIR") or "/tmp")
    if temporary is not None:
        own = temporary / f"ninfer-convert-{os.geteuid()}"
        yield temporary, own, own / leaf


def _absolute(named: str | None) -> Path | None:
    """Returns a directory that a variable names; None if it starts at a working directory that is gone."""
    try:
        return Path(named).absolute() if named else None
    except OSError:
        return None


def _user_cache_directory() -> Path | None:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home().absolute() / ".cache"
    except (RuntimeError, OSError):  # a user id without an account, a working directory that is gone
        return None


def _source_digest() -> str:
    digest = hashlib.sha256()
    for name in ("interface.py", "kernels.py"):
        with contextlib.suppress(OSError):  # imported from an archive: the version alone has to do
            digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _is_usable(base: Path, *made: Path) -> bool:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe_parent(base):
            return False
        for directory in made:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            if not _is_private(directory):
                return False
        with tempfile.TemporaryFile(dir=made[-1]):
            return True
    except OSError:
        return False


def _is_safe_parent(directory: Path) -> bool:
    """Nobody but us and root can put another directory in the place of one we make in this one."""
    status = directory.stat()
    is_shared = bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and not is_shared


def _is_private(directory: Path) -> bool:
    """A real directory of ours that nobody else can write to."""
    status = directory.lstat()
    is_writable = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not is_writable


def load_entry(name: str) -> bytes | None:
    """Returns what was kept under a name, or None if there is nothing that can be trusted."""
    directory = cache_directory()
    return None if directory is None else _read_entry(directory / (name + SUFFIX))


def save_entry(name: str, content: bytes) -> None:
    """Keeps content under a name, if that is possible.

    It is written beside its final name and renamed, so that processes that start together, or on unlike machines
    with one home directory, cannot mix their entries.
    """
    directory = cache_directory()
    if directory is not None:
        with contextlib.suppress(OSError):  # a full disk must not end a conversion
            _write_entry(directory / (name + SUFFIX), content)
            _remove_unused(directory)


def _remove_unused(directory: Path) -> None:
    """Removes the entries of other versions that nobody has used for long, and the directories that held only them."""
    newest = directory.stat().st_mtime - UNUSED_SECONDS
    for other in directory.parent.iterdir():
        if other == directory or not _LEAF.fullmatch(other.name):
            continue
        with contextlib.suppress(OSError):  # somebody else's, or gone already
            if _is_private(other) and other.stat().st_mtime < newest:
                for entry in other.glob(f"*{SUFFIX}*"):
                    entry.unlink()
                other.rmdir()


def _read_entry(entry: Path) -> bytes | None:
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            content = file.read()
    except OSError:
        return None
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write_entry(entry: Path, payload: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=f"{entry.name}.", delete=False) as file:
        try:
            file.write(hashlib.sha256(payload).digest() + payload)
            file.close()
            os.replace(file.name, entry)
        except BaseException:
            os.unlink(file.name)
            raise
