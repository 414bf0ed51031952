"""Where compiled kernels are kept between runs, and how one is kept.

Owns the choice of a directory and the integrity of what is read back from it: an entry is a pickle of machine
code, so it is loaded only from a directory nobody else can write to, and only with its digest intact. A missing,
damaged or unusable entry means that the kernel is compiled again; without a directory nothing is kept. Neither
is an error. Refuses to know what the kernels do.

numba's own cache is not used: it settles its place when the decorator runs, unpickles damaged files, lets an
error of the file system end the caller, and keeps an index that concurrent processes overwrite.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ninfer_convert import __version__

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
            return parents[-1]
    return None


def _candidates() -> Iterator[tuple[Path, ...]]:
    """Yields directories to look in: an existing one, then those that may have to be made below it."""
    leaf = f"kernels-{__version__}-{_source_digest()}"
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        yield Path(named).absolute(), Path(named).absolute() / leaf
    user = _user_cache_directory()
    if user is not None:
        yield user, user / "ninfer-convert", user / "ninfer-convert" / leaf
    temporary = Path(os.environ.get("TMPDIR") or "/tmp").absolute()
    own = temporary / f"ninfer-convert-{os.geteuid()}"
    yield temporary, own, own / leaf


def _user_cache_directory() -> Path | None:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home().absolute() / ".cache"
    except RuntimeError:  # a user id without an account
        return None


def _source_digest() -> str:
    try:
        source = Path(__file__).with_name("kernels.py").read_bytes()
    except OSError:  # imported from an archive: the version alone has to do
        source = b""
    return hashlib.sha256(source).hexdigest()[:16]


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


class KernelCache:
    """Keeps the compiled forms of one kernel; stands in a numba dispatcher in the place of numba's own cache.

    One file per signature, processor and version, written beside its final name and renamed, so that processes
    that start together, or on unlike machines with one home directory, cannot mix their entries.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__

    @property
    def cache_path(self) -> str | None:
        """The directory, under the name by which numba reports it."""
        directory = cache_directory()
        return None if directory is None else str(directory)

    def _entry(self, signature: Any, codegen: Any) -> Path | None:
        directory = cache_directory()
        if directory is None:
            return None
        versions = (numba.__version__, sys.implementation.cache_tag, sys.abiflags)
        key = repr((versions, str(signature), codegen.magic_tuple()))
        return directory / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.nbc"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Returns the kept compile result, or None if there is none that can be trusted."""
        target_context.refresh()
        entry = self._entry(signature, target_context.codegen())
        payload = None if entry is None else _read_entry(entry)
        if payload is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(payload))  # type: ignore[no-untyped-call]
        except Exception:  # whatever another build of numba left here, compiling anew is the answer
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keeps a compile result, if that is possible."""
        entry = self._entry(signature, result.codegen)
        if entry is None or result.lifted or result.library.has_dynamic_globals:
            return
        payload = dumps(result._reduce())  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError):  # a full disk must not end a conversion
            _write_entry(entry, payload)


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
