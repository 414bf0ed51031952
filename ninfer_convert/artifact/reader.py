"""A positional-read view of a validated artifact: objects by name, their bytes, plane rows and digests.

Owns the open file. Refuses to know what the bytes mean (`decode`), and never maps the file: a file that
shrinks while it is read is an error here, not a signal.

Source: container.md; for reads that stop short, cases.md C44 and C46.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.container import (
    Gap,
    Head,
    Identity,
    ObjectRecord,
    TensorRecord,
    parse_head,
)
from ninfer_convert.errors import WRONG_PATH, ArtifactError, ConvertError, OutputError, printable
from ninfer_convert.formats import FORMATS, NumericFormat
from ninfer_convert.layout import Geometry, geometry

Bytes = NDArray[np.uint8]

READ_BYTES = 2**20
"""Bytes of one block when an object is read from end to end; small enough to stay in a core's cache."""


class Artifact:
    """An open, validated artifact. Every method may be called from several threads at once.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: str, descriptor: int, status: os.stat_result) -> None:
        self.path = path
        """The path as given, safe to print."""
        self._descriptor = descriptor
        self._status = status
        self._head = parse_head(self._read_head, status.st_size)
        self._objects = {record.name: record for record in self._head.directory.objects}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens an artifact and checks its framing, its directory and its geometry.

        Raises:
            ArtifactError: there is no such file, or it is no valid artifact; the message begins with the path.
            OutputError: the file cannot be opened or read.

        Source: container.md.
        """
        shown_path = printable(os.fspath(path))
        try:
            # without O_NONBLOCK, opening a pipe would wait for its writer
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            kind = ArtifactError if error.errno in WRONG_PATH else OutputError
            raise kind(f"{shown_path}: cannot be opened: {error.strerror}") from error
        except ValueError as error:
            raise ArtifactError(f"{shown_path}: cannot be opened: {error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError("not a regular file; an artifact is one file")
            return cls(shown_path, descriptor, status)
        except ConvertError as error:
            os.close(descriptor)
            raise type(error)(*(f"{shown_path}: {message}" for message in error.messages)) from error
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def identity(self) -> Identity:
        return self._head.directory.identity

    @property
    def head(self) -> Head:
        """The directory with the numbers that place it: its length, the payload's offset, the file's size."""
        return self._head

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Every object by name, in payload order."""
        return MappingProxyType(self._objects)

    @property
    def payload_offset(self) -> int:
        return self._head.payload_offset

    @property
    def file_bytes(self) -> int:
        return self._head.file_bytes

    def gaps(self) -> Iterator[Gap]:
        """Yields every run of bytes between and behind the objects, in file order."""
        return self._head.gaps()

    def record(self, name: str) -> ObjectRecord:
        """Returns an object by its exact name.

        Raises:
            ArtifactError: there is none; the message gives the nearest names.
        """
        if name in self._objects:
            return self._objects[name]
        near = ", ".join(printable(match) for match in difflib.get_close_matches(name, self._objects, 3))
        nearest = f"; the nearest names are {near}" if near else ""
        raise ArtifactError(f"{self.path}: no object is called '{printable(name)}'{nearest}")

    def tensor(self, name: str) -> TensorRecord:
        """Returns a tensor by its exact name.

        Raises:
            ArtifactError: there is no such object, or it is a resource.
        """
        record = self.record(name)
        if not isinstance(record, TensorRecord):
            raise ArtifactError(f"{self.path}: object '{printable(name)}' is a resource; a tensor is required")
        return record

    def read_into(self, begin: int, out: Bytes, what: str = "the file") -> None:
        """Fills out with the file's bytes from begin on, counted from the file's start.

        Args:
            out: [count] C-contiguous bytes.
            what: names what is read in a message.

        Raises:
            ArtifactError: the file ends early, so it changed after it was opened.
            OutputError: a read fails.
        """
        try:
            _read_exactly(self._descriptor, begin, out, what)
        except ConvertError as error:
            raise type(error)(f"{self.path}: {error}") from error

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Returns bytes `[begin, end)` of an object; without end, up to the object's last byte.

        Raises:
            ArtifactError: there is no such object, the span lies outside it, or the file was cut.
            OutputError: a read fails.
        """
        record = self.record(name)
        end = record.nbytes if end is None else end
        if not 0 <= begin <= end <= record.nbytes:
            raise ArtifactError(
                f"{self.path}: object '{printable(name)}' has bytes 0 to {record.nbytes}; "
                f"[{begin}, {end}) was asked for"
            )
        out = np.empty(end - begin, np.uint8)
        self.read_into(self.payload_offset + record.offset + begin, out, f"object '{printable(name)}'")
        return out.tobytes()

    def read_rows(self, name: str, begin: int, end: int) -> dict[str, Bytes]:
        """Returns rows `[begin, end)` of a tensor as plane bytes, in plane order.

        Rows are those of `layout.geometry`: the first axis of a matrix; a tensor of rank 0 or 1 has one row.

        Returns:
            name of the plane -> [rows, row_bytes] uint8; a plane of the whole matrix, such as the NVFP4
            divisor, is [1, nbytes].

        Raises:
            ArtifactError: no such tensor, or rows that lie outside it or do not begin and end at multiples of
                the layout's row quantum.
            OutputError: a read fails.

        Source: layouts.md, "A run of rows".
        """
        shape = self.geometry(name)
        self.require_rows(name, begin, end)
        if begin % shape.row_quantum or end % shape.row_quantum:
            raise ArtifactError(
                f"{self.path}: object '{printable(name)}' gives rows in runs of {shape.row_quantum} only; "
                f"[{begin}, {end}) was asked for"
            )
        start = self.payload_offset + self._objects[name].offset
        planes: dict[str, Bytes] = {}
        for plane in shape.planes:
            rows = end - begin if plane.row_bytes else 1
            planes[plane.name] = np.empty((rows, plane.row_bytes or plane.nbytes), np.uint8)
            self.read_into(
                start + plane.offset + begin * plane.row_bytes,
                planes[plane.name].reshape(-1),
                f"object '{printable(name)}', plane {plane.name}",
            )
        return planes

    def geometry(self, name: str) -> Geometry:
        """Returns where the planes of a tensor lie, relative to its first byte."""
        record = self.tensor(name)
        return geometry(FORMATS[record.format], record.shape)

    def numeric(self, name: str) -> NumericFormat:
        """Returns the format of a tensor, a row of `FORMATS`."""
        return FORMATS[self.tensor(name).format]

    def require_rows(self, name: str, begin: int, end: int) -> None:
        """Raises ArtifactError unless `[begin, end)` are rows of a tensor."""
        rows = self.geometry(name).rows
        if not 0 <= begin <= end <= rows:
            raise ArtifactError(
                f"{self.path}: object '{printable(name)}' has rows 0 to {rows}; [{begin}, {end}) was asked for"
            )

    def row_blocks(self, name: str, block_bytes: int = READ_BYTES) -> Iterator[tuple[int, int]]:
        """Yields `(begin, end)` over all rows of a tensor, in order, for `read_rows`.

        A block holds at most block_bytes bytes of all planes together, but at least one row quantum.
        """
        shape = self.geometry(name)
        row_bytes = sum(plane.row_bytes for plane in shape.planes)
        step = max(1, block_bytes // (row_bytes * shape.row_quantum)) * shape.row_quantum
        for begin in range(0, shape.rows, step):
            yield begin, min(begin + step, shape.rows)

    def blocks(self, begin: int, end: int, what: str = "the file") -> Iterator[Bytes]:
        """Yields the file's bytes `[begin, end)` in order; each block overwrites the one before."""
        buffer = np.empty(min(READ_BYTES, end - begin), np.uint8)
        for position in range(begin, end, READ_BYTES):
            block = buffer[: min(READ_BYTES, end - position)]
            self.read_into(position, block, what)
            yield block

    def digest(self, name: str) -> str:
        """Returns the SHA-256 of an object's bytes, in hexadecimal."""
        record = self.record(name)
        begin = self.payload_offset + record.offset
        total = hashlib.sha256()
        for block in self.blocks(begin, begin + record.nbytes, f"object '{printable(name)}'"):
            total.update(block.data)
        return total.hexdigest()

    def is_unchanged(self) -> bool:
        """Tells whether the open file still has the size and the modification time it was opened with."""
        status = os.fstat(self._descriptor)
        return (status.st_size, status.st_mtime_ns) == (self._status.st_size, self._status.st_mtime_ns)

    def _read_head(self, begin: int, end: int) -> bytes:
        out = np.empty(end - begin, np.uint8)
        _read_exactly(self._descriptor, begin, out, "the directory")
        return out.tobytes()


def _read_exactly(descriptor: int, begin: int, out: Bytes, what: str) -> None:
    view, done = out.data, 0
    if descriptor < 0:
        raise ArtifactError(f"closed before {what} was read")
    while done < len(view):
        try:
            got = os.preadv(descriptor, [view[done:]], begin + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise OutputError(f"reading {what} at byte {begin + done}: {error.strerror}") from error
        if got == 0:
            raise ArtifactError(
                f"the file was cut while it was read: it ends at byte {begin + done}, "
                f"and {what} lacks {len(view) - done} bytes"
            )
        done += got
