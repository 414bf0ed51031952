"""A checkpoint: tensor headers by the recipe's names, the bytes of its tensors, the small files beside them.

Owns opening and reading. Refuses to know what a recipe wants and what bytes mean. Reads are positional and
plain: a file system that cannot map files, or cuts one short, ends in an exception, never in a signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.source.files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    Location,
    beside,
    blob_digest,
    locate,
    read_beside,
    summarize,
)
from ninfer_convert.source.header import DTYPE_BITS, Header, parse_header, shown
from ninfer_convert.source.index_check import check_listed
from ninfer_convert.source.io import (
    OpenFiles,
    Stamp,
    advise,
    failure,
    open_regular,
    read_into,
    read_range,
    require_unchanged,
    short_read,
    stamp,
)
from ninfer_convert.source.names import nearest, rename, unmerged_adapter
from ninfer_convert.source.quantization import foreign_quantization
from ninfer_convert.strict_json import load_object

__all__ = ["DTYPE_BITS", "Checkpoint", "FileInfo", "TensorInfo", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `begin` counts from the first byte of `file`, a name inside the checkpoint's directory.

    `name` is what the recipe calls it, `stored_name` what the file does; they differ under a prefix rule.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    nbytes: int
    stored_name: str


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One weight file as it was when its header was read."""

    name: str
    path: str
    size: int
    mtime_ns: int
    device: int
    inode: int
    header_sha256: str
    sha256: str | None = None
    """Of the whole file, as the hub or its cache says; nobody has read the file for it."""

    @property
    def stamp(self) -> Stamp:
        """What the file must still be when its bytes are read."""
        return Stamp(self.size, self.mtime_ns, self.device, self.inode)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where on the hub a checkpoint's files come from.

    `location` names repository and commit, `requested` is the revision that was asked for, `identified_by` says
    who told the commit, `absence` why a file may be missing here.
    """

    location: str
    requested: str
    identified_by: str
    absence: str
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by file name, as the hub lists them."""


class Checkpoint:
    """An opened checkpoint; made by `open_checkpoint`, usable from several threads, closed by `close` or `with`.

    Attributes:
        location: the path it was opened by.
        name: what the recipe calls this source.
        tensors: every tensor that is there, by recipe-side name, in order of file and position.
        absent: recipe-side name -> file, for tensors that the index places in a file that does not exist.
        files: every weight file that was opened, by its name in the directory.
        config: the parsed `config.json`; None where there is none.
        warnings: what the user should know, complete messages.
        applied_prefixes: the prefix rules that changed at least one name.
        repo, revision: repository and commit, where the hub or the path inside its cache tells them; else None.
        origin: what is known of a checkpoint that was opened by its place on the hub; else None.
        verified: names of the files whose bytes were all hashed and found to be the hub's.
    """

    has_values: bool = True
    """Whether tensor bytes can be read; False for a plan from headers alone."""
    is_local: bool = True
    """Whether they are on this machine; planning reads few of them where they are not."""

    def __init__(
        self,
        location: str,
        name: str,
        place: Location,
        tensors: Mapping[str, TensorInfo],
        absent: Mapping[str, str],
        files: Mapping[str, FileInfo],
        config: Mapping[str, Any] | None,
        warnings: Sequence[str],
        applied_prefixes: Mapping[str, str],
        origin: Origin | None = None,
    ) -> None:
        self.location = origin.location if origin else location
        self.origin = origin
        self.verified: set[str] = set()
        self.name = name
        self.tensors = MappingProxyType(tensors)
        self.absent = MappingProxyType(absent)
        self.files = MappingProxyType(files)
        self.config = config
        self.warnings = tuple(warnings)
        self.applied_prefixes = MappingProxyType(applied_prefixes)
        self.repo = place.hub.repo if place.hub else None
        self.revision = place.hub.revision if place.hub else None
        self._place = place
        self._open = OpenFiles()
        self._resources: set[str] = set()

    @property
    def absence(self) -> str:
        """Why a file that the index names may not be there."""
        return self.origin.absence if self.origin else "download incomplete"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every open file; reading afterwards is a mistake of the caller."""
        self._open.close()

    def read_into(self, tensor: TensorInfo, begin: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills `out` with the bytes `[begin, begin + out.size)` of a tensor.

        Args:
            tensor: a member of `tensors`.
            begin: bytes from the beginning of the tensor.
            out: uint8, C-contiguous, writable.

        Raises:
            SourceError: the file ended early, or is another one than at the beginning.
            OutputError: the medium did not answer.
            ValueError: the range is not inside the tensor, or `out` is not such an array.
        """
        if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("bytes are read into a C-contiguous, writable uint8 array")
        position = self._position(tensor, begin, begin + out.size)
        if not out.size:
            return
        info = self.files[tensor.file]
        with self._borrowed(tensor) as descriptor:
            try:
                got = read_into(descriptor, out.reshape(-1).data, position)
            except OSError as error:
                raise failure(info.path, error) from error
        if got < out.size:
            raise SourceError(short_read(info.path, position, got, out.size, shown(tensor.stored_name)))

    def prefetch(self, tensor: TensorInfo, begin: int, end: int) -> None:
        """Asks the system to fetch the bytes `[begin, end)` of a tensor ahead of their use."""
        self._advise(tensor, begin, end, needed=True)

    def release(self, tensor: TensorInfo, begin: int, end: int) -> None:
        """Tells the system that the bytes `[begin, end)` of a tensor need not stay in its cache."""
        self._advise(tensor, begin, end, needed=False)

    def verify_unchanged(self) -> None:
        """Raises SourceError, one message per file, when a weight file is no longer what it was at the opening."""
        problems: list[str] = []
        for info in self.files.values():
            try:
                require_unchanged(info.path, info.stamp)
            except SourceError as error:
                problems.extend(error.messages)
        if problems:
            raise SourceError(*summarize([problems]))

    def resource(self, file: str) -> bytes:
        """Returns a small file of the directory, byte for byte; `file` is a relative path as a recipe spells it.

        Raises:
            SourceError: absent, too large, a Git LFS pointer, or not inside the directory.
        """
        content = read_beside(self._place, file)
        self._resources.add(beside(self._place, file))
        return content

    def listed_resource(self, file: str) -> tuple[int, str | None] | None:
        """Returns size and perhaps SHA-256 of a file that planning does without reading; None for any other."""
        return None

    def has_file(self, file: str) -> bool:
        """Tells whether the directory has an entry of that name, a link to nothing included."""
        return os.path.lexists(beside(self._place, file))

    def paths(self) -> tuple[str, ...]:
        """Returns every file that was read, or may be: weights, index, config, and the resources asked for."""
        index = (self._place.index.path,) if self._place.index else ()
        weights = (file.path for file in self.files.values())
        return (*weights, *index, self._place.path(CONFIG), *sorted(self._resources))

    def nearest(self, name: str) -> tuple[str, ...]:
        """Returns up to three existing tensor names most like `name`."""
        return nearest(name, self.tensors)

    def foreign_quantization(self) -> str | None:
        """Returns why the checkpoint is quantized in a way no recipe can read; None when nothing says so."""
        return foreign_quantization(self.config, self.tensors)

    def unmerged_adapter(self) -> str | None:
        """Returns why the weights are those of a model whose adapter is not merged; None when nothing says so."""
        return unmerged_adapter((*(info.stored_name for info in self.tensors.values()), *self.absent))

    def _advise(self, tensor: TensorInfo, begin: int, end: int, *, needed: bool) -> None:
        position = self._position(tensor, begin, end)
        with self._borrowed(tensor) as descriptor:
            advise(descriptor, position, position + end - begin, needed=needed)

    @contextmanager
    def _borrowed(self, tensor: TensorInfo) -> Iterator[int]:
        info = self.files[tensor.file]
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self._open.borrow(info.path, info.stamp))
            except SourceError as error:
                name = shown(tensor.stored_name)
                raise SourceError(*(f"tensor {name}: {message}" for message in error.messages)) from error
            yield descriptor

    def _position(self, tensor: TensorInfo, begin: int, end: int) -> int:
        if not 0 <= begin <= end <= tensor.nbytes:
            raise ValueError(f"bytes [{begin}, {end}) are not inside {tensor.name}, which has {tensor.nbytes}")
        return tensor.begin + begin


def open_checkpoint(
    location: str | os.PathLike[str],
    *,
    name: str = "source",
    prefixes: Mapping[str, str] = MappingProxyType({}),
    origin: Origin | None = None,
) -> Checkpoint:
    """Opens a checkpoint: reads every header, the index and `config.json`, and checks them against each other.

    Args:
        location: a directory, a `.safetensors` file, or an entry of the hub's cache.
        name: what the recipe calls this source.
        prefixes: beginning of a name in the file -> what the recipe calls it.
        origin: where on the hub the directory comes from, when that is how it was found.

    Raises:
        SourceError: everything that is wrong with all the files, one message each; a file that the index
            names and that does not exist is not an error here (see `Checkpoint.absent`).
        OutputError: a medium did not answer.
    """
    text = os.fsdecode(location)
    place = locate(text)
    groups: list[Sequence[str]] = []
    files: dict[str, FileInfo] = {}
    headers: dict[str, Header] = {}
    for file in place.weights:
        if place.index and not os.path.lexists(place.path(file)):
            continue
        try:
            files[file], headers[file] = _read_header(file, place, origin)
        except SourceError as error:
            groups.append(error.messages)
    config = None
    try:
        config = _load_config(place)
    except SourceError as error:
        groups.append(error.messages)
    listed = check_listed(place, headers, groups)
    tensors, absent, applied = name_tensors(place, headers, prefixes)
    return Checkpoint(text, name, place, tensors, absent, files, config, listed, applied, origin)


def _read_header(file: str, place: Location, origin: Origin | None) -> tuple[FileInfo, Header]:
    path = place.path(file)
    sha256 = origin.digests.get(file) if origin else None
    if sha256 is None and place.hub:
        sha256 = blob_digest(path)
    descriptor = open_regular(path)
    try:
        state = stamp(descriptor)
        header = parse_header(
            lambda begin, end: read_range(descriptor, begin, end, path), state.size, printable(path)
        )
    finally:
        os.close(descriptor)
    info = FileInfo(file, path, state.size, state.mtime_ns, state.device, state.inode, header.sha256, sha256)
    return info, header


def _load_config(place: Location) -> Mapping[str, Any] | None:
    path = place.path(CONFIG)
    if not os.path.lexists(path):
        return None
    return load_object(read_beside(place, CONFIG, MAX_CONFIG_BYTES), printable(path), lenient=True)


def name_tensors(
    place: Location, headers: Mapping[str, Header], prefixes: Mapping[str, str]
) -> tuple[dict[str, TensorInfo], dict[str, str], Mapping[str, str]]:
    """Returns tensors and absent tensors by their names in the recipe, and the prefix rules that were applied.

    Raises:
        SourceError: two tensors come to one name, or a rule leaves some names behind.
    """
    held = [(entry, file) for file, header in headers.items() for entry in header.entries]
    missing = [
        (stored, file)
        for file, names in (place.index.shards.items() if place.index else ())
        if file not in headers
        for stored in names
    ]
    stored_names = [entry.name for entry, _ in held] + [stored for stored, _ in missing]
    try:
        renaming = rename(stored_names, prefixes, printable(place.directory))
    except SourceError as error:
        raise SourceError(*summarize([error.messages])) from error
    tensors = {}
    for entry, file in held:
        name = renaming.names[entry.name]
        tensors[name] = TensorInfo(name, entry.dtype, entry.shape, file, entry.begin, entry.nbytes, entry.name)
    absent = {renaming.names[stored]: file for stored, file in missing}
    return tensors, absent, renaming.applied
