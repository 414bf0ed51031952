"""A checkpoint on the hub, opened by its headers alone; its shards are brought here one at a time, when told so.

Owns which bytes come over the network, and files of our own that hold shards for a while. Refuses to know when a
shard is needed (`streaming`) and how the hub is asked (`hub`).

Source: cli.md, `WHERE` and `--stream`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.errors import ConvertError, OutputError, SourceError, printable
from ninfer_convert.source.checkpoint import Checkpoint, FileInfo, Origin, TensorInfo, name_tensors
from ninfer_convert.source.files import CONFIG, MAX_RESOURCE_BYTES, HubEntry, Location, beside, locate_listed
from ninfer_convert.source.header import Header, is_lfs_pointer, lfs_message, parse_header
from ninfer_convert.source.hub import Repository
from ninfer_convert.source.index_check import check_listed
from ninfer_convert.source.io import read_into
from ninfer_convert.strict_json import load_object

FIRST_BYTES = 96 << 10
"""Of a weight file asked for at once: nearly every header is shorter, and is there after one request."""

WINDOW_BYTES = 64 << 10
"""Fetched around a small value: scalars lie side by side, so the next ones are there already."""

WINDOWS = 64
"""Kept of one source."""

READERS = 8
"""Headers read at a time."""

LOOKED_AT_BYTES = 1 << 16
"""Of small files, those up to this size are read for a plan; of others size and listed digest do."""


class Stopped(Exception):  # noqa: N818 -- no error: the run was told to end
    """The run ended while a shard was on its way."""


class RemoteCheckpoint(Checkpoint):
    """A checkpoint whose tensor bytes are on the hub, but for the shards that `bring` has brought.

    Attributes:
        repository: the commit it is.
        has_values: whether the bytes will be brought here; False for a plan from headers alone.
    """

    is_local = False

    def __init__(
        self,
        repository: Repository,
        has_values: bool,
        name: str,
        place: Location,
        tensors: Mapping[str, TensorInfo],
        absent: Mapping[str, str],
        files: Mapping[str, FileInfo],
        config: Mapping[str, Any] | None,
        warnings: Sequence[str],
        applied_prefixes: Mapping[str, str],
    ) -> None:
        origin = Origin(str(repository), repository.requested, "hub", "the repository has no such file")
        super().__init__(
            origin.location, name, place, tensors, absent, files, config, warnings, applied_prefixes, origin
        )
        self.repository, self.has_values = repository, has_values
        self._lock = threading.Lock()
        self._brought: dict[str, tuple[int, Path]] = {}
        self._windows: dict[tuple[str, int], bytes] = {}
        self._small: dict[str, bytes] = {}

    def bring(self, file: str, directory: Path, is_stopped: Callable[[], bool]) -> None:
        """Fetches one weight file into a directory of ours, and compares its digest with the hub's.

        Raises:
            NetworkError: the hub did not answer, or not in full.
            OutputError: the file cannot be written.
            SourceError: its bytes are not those the hub lists.
            Stopped: `is_stopped` said so.
        """
        listed = self.repository.files[file]
        path, (digest, expected) = directory / file, listed.digest()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unwritable(path, listed.size, error) from error
        try:
            for piece in self.repository.pieces(file, 0, listed.size, is_stopped):
                _write(descriptor, piece, path, listed.size)
                digest.update(piece)
            if is_stopped():
                raise Stopped
            if digest.hexdigest() != expected:
                raise SourceError(
                    f"{self.files[file].path}: the bytes that came have {digest.name} {digest.hexdigest()}; the hub "
                    f"lists {expected}"
                )
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self.verified.add(file)
        with self._lock:
            self._brought[file] = descriptor, path

    def drop(self, file: str) -> None:
        """Gives up a file that was brought, and its place on the disk. Nobody may be reading it."""
        with self._lock:
            descriptor, path = self._brought.pop(file)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()

    def pending_bytes(self, names: Iterable[str]) -> int:
        """Returns the bytes of those files that the hub's cache does not hold."""
        files = self.repository.files
        return sum(files[name].size for name in names if not self.repository.is_cached(name))

    def listed_resource(self, file: str) -> tuple[int, str | None] | None:
        """Returns size and listed SHA-256 of a file too large to be read for a plan; None for any other."""
        listed = self.repository.files.get(file)
        if self.has_values or listed is None or listed.size <= LOOKED_AT_BYTES:
            return None
        return listed.size, listed.sha256

    # -- what a checkpoint does ---------------------------------------------------------------------------------

    def close(self) -> None:
        for file in list(self._brought):
            self.drop(file)

    def read_into(self, tensor: TensorInfo, begin: int, out: npt.NDArray[np.uint8]) -> None:
        if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("bytes are read into a C-contiguous, writable uint8 array")
        position = self._position(tensor, begin, begin + out.size)
        held = self._brought.get(tensor.file)
        if held is None:
            content = self._fetched(tensor.file, position, position + out.size)
            out.reshape(-1)[:] = np.frombuffer(content, np.uint8)
            return
        try:
            got = read_into(held[0], out.reshape(-1).data, position)
        except OSError as error:
            raise OutputError(f"{printable(str(held[1]))}: cannot be read: {error.strerror}") from error
        if got < out.size:
            raise OutputError(f"{printable(str(held[1]))}: was cut while it was read")

    def prefetch(self, tensor: TensorInfo, begin: int, end: int) -> None:
        """Does nothing: what was just written is still in the system's cache."""

    def release(self, tensor: TensorInfo, begin: int, end: int) -> None:
        """Does nothing: a shard goes as a whole."""

    def verify_unchanged(self) -> None:
        """Does nothing: a commit cannot change, and what came was compared with its digest."""

    def resource(self, file: str) -> bytes:
        name = self._named(file)
        if name not in self._small:
            self._small[name] = _small(self.repository, name)
        return self._small[name]

    def has_file(self, file: str) -> bool:
        return self._named(file) in self.repository.files

    def paths(self) -> tuple[str, ...]:
        """Returns nothing: no file of this machine is read but our own."""
        return ()

    # -- inside -------------------------------------------------------------------------------------------------

    def _named(self, file: str) -> str:
        beside(self._place, file)
        return file

    def _fetched(self, file: str, begin: int, end: int) -> bytes:
        """Returns bytes of a file, small ones out of windows of which the latest are kept."""
        number = begin // WINDOW_BYTES
        start = number * WINDOW_BYTES
        if end > start + WINDOW_BYTES:
            return self.repository.read(file, begin, end)
        with self._lock:
            content = self._windows.pop((file, number), None)
            if content is None:
                stop = min(start + WINDOW_BYTES, self.files[file].size)
                content = self.repository.read(file, start, stop)
            self._windows[file, number] = content
            if len(self._windows) > WINDOWS:
                del self._windows[next(iter(self._windows))]
        return content[begin - start : end - start]


def open_remote(
    repository: Repository,
    *,
    name: str = "source",
    prefixes: Mapping[str, str] = MappingProxyType({}),
    has_values: bool = False,
) -> RemoteCheckpoint:
    """Opens a commit of a repository by its index, `config.json` and headers, checked like files on a disk.

    Raises:
        SourceError: everything that is wrong with all the files, one message each.
        NetworkError: the hub did not answer.
    """
    where = str(repository)
    entry = HubEntry(repository.repo, repository.commit, ())
    place = locate_listed(where, list(repository.files), lambda file: _small(repository, file), entry)
    present = [file for file in place.weights if file in repository.files]
    groups: list[Sequence[str]] = []
    files: dict[str, FileInfo] = {}
    headers: dict[str, Header] = {}
    with ThreadPoolExecutor(READERS) as pool:
        jobs = {file: pool.submit(_read_header, repository, file, place.path(file)) for file in present}
    for file, job in jobs.items():
        try:
            files[file], headers[file] = job.result()
        except SourceError as error:
            groups.append(error.messages)
    config = None
    try:
        if CONFIG in repository.files:
            config = load_object(_small(repository, CONFIG), place.path(CONFIG), lenient=True)
    except SourceError as error:
        groups.append(error.messages)
    warnings = check_listed(place, headers, groups)
    tensors, absent, applied = name_tensors(place, headers, prefixes)
    return RemoteCheckpoint(
        repository, has_values, name, place, tensors, absent, files, config, warnings, applied
    )


def _read_header(repository: Repository, file: str, path: str) -> tuple[FileInfo, Header]:
    listed = repository.files[file]
    held = repository.read(file, 0, min(FIRST_BYTES, listed.size))

    def read(begin: int, end: int) -> bytes:
        nonlocal held
        if end > len(held):
            held += repository.read(file, len(held), end)
        return held[begin:end]

    header = parse_header(read, listed.size, printable(path))
    return FileInfo(file, path, listed.size, 0, 0, 0, header.sha256, listed.sha256), header


def _small(repository: Repository, file: str) -> bytes:
    """Returns a small file whole, compared with its listed digest."""
    where = f"{repository}/{printable(file)}"
    listed = repository.files.get(file)
    if listed is None:
        raise SourceError(f"{where}: the repository has no such file")
    if listed.size > MAX_RESOURCE_BYTES:
        raise SourceError(f"{where}: has {listed.size} bytes; at most {MAX_RESOURCE_BYTES} are read from such a file")
    content = repository.read(file, 0, listed.size)
    digest, expected = listed.digest()
    digest.update(content)
    if digest.hexdigest() != expected:
        found = f"{digest.name} {digest.hexdigest()}"
        raise SourceError(f"{where}: the bytes that came have {found}; the hub lists {expected}")
    if is_lfs_pointer(content):
        raise SourceError(lfs_message(where))
    return content


def _write(descriptor: int, piece: bytes, path: Path, nbytes: int) -> None:
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        raise _unwritable(path, nbytes, error) from error


def _unwritable(path: Path, nbytes: int, error: OSError) -> ConvertError:
    return OutputError(f"cannot write {printable(str(path))} ({nbytes} bytes): {error.strerror}")
