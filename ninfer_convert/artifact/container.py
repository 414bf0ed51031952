"""The bytes around the objects: magic, directory length, padding, and where each object may lie.

Owns the framing and the geometry of the objects, and passes on the records of `directory`, whose text it
frames. Refuses to know what an object's bytes mean (`decode`, `verify`) and how they get to or from a disk
(`writer`, `reader`).

Source: container.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ninfer_convert.artifact.directory import (
    Directory,
    Identity,
    ObjectRecord,
    ResourceRecord,
    TensorRecord,
    encode_directory,
    parse_directory,
    shown,
)
from ninfer_convert.errors import ArtifactError
from ninfer_convert.layout import RESOURCE_ALIGNMENT, TENSOR_ALIGNMENT, align_up

__all__ = [
    "DIRECTORY_LIMIT",
    "MAGIC",
    "MAX_REPORT_BYTES",
    "PAYLOAD_ALIGNMENT",
    "PREFIX_BYTES",
    "REPORT_SUFFIX",
    "VERSION",
    "Directory",
    "Gap",
    "Head",
    "Identity",
    "ObjectRecord",
    "ResourceRecord",
    "TensorRecord",
    "encode_head",
    "next_offset",
    "parse_head",
    "payload_offset",
]

MAGIC_STEM = b"NINFER\x00"
VERSION = 2
MAGIC = MAGIC_STEM + bytes([VERSION])
PREFIX_BYTES = 16
"""Magic and directory length; the directory follows."""
PAYLOAD_ALIGNMENT = 4096
DIRECTORY_LIMIT = 64 * 2**20
"""No directory text of more bytes than this is written or read."""
REPORT_SUFFIX = ".conversion.json"
"""An artifact's conversion report lies beside it, under the artifact's name and this suffix."""
MAX_REPORT_BYTES = 256 << 20
"""No conversion report of more bytes is read or replaced."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes `[begin, end)` of the file, counted from its start, that belong to no object.

    `needed` is where the gap would end if the next object began at its first permitted offset.
    """

    before: str | None
    """The object after the gap; None for bytes behind the last object."""
    begin: int
    end: int
    needed: int


@dataclass(frozen=True, slots=True)
class Head:
    """A validated directory with the two numbers that place it in its file."""

    directory: Directory
    json_bytes: int
    file_bytes: int

    @property
    def payload_offset(self) -> int:
        return payload_offset(self.json_bytes)

    def gaps(self) -> Iterator[Gap]:
        """Yields every run of bytes between and behind the objects, in file order."""
        base, cursor = self.payload_offset, 0
        for record in self.directory.objects:
            if record.offset > cursor:
                needed = base + next_offset(cursor, record.kind)
                yield Gap(record.name, base + cursor, base + record.offset, needed)
            cursor = record.end
        if base + cursor < self.file_bytes:
            yield Gap(None, base + cursor, self.file_bytes, base + cursor)

    def notes(self) -> list[str]:
        """Returns a sentence for each gap that alignment does not need, and for trailing bytes."""
        return [_gap_note(gap) for gap in self.gaps() if gap.end > gap.needed]


def payload_offset(json_bytes: int) -> int:
    """Returns the file offset of the payload behind a directory text of json_bytes bytes."""
    return align_up(PREFIX_BYTES + json_bytes, PAYLOAD_ALIGNMENT)


def next_offset(cursor: int, kind: str) -> int:
    """Returns the first permitted offset, in bytes, for an object of this kind at or behind cursor."""
    return align_up(cursor, TENSOR_ALIGNMENT if kind == TensorRecord.kind else RESOURCE_ALIGNMENT)


def encode_head(identity: Identity, objects: Sequence[ObjectRecord]) -> bytes:
    """Returns every byte of the file before the payload: magic, length, directory, zero padding.

    The bytes are read back before they are returned, so that nothing is written that `parse_head` refuses,
    and no object lies behind its first permitted offset.

    Raises:
        ArtifactError: the directory breaks a rule of the container.

    Source: container.md, "Framing", "Directory" and "Geometry".
    """
    text = encode_directory(Directory(identity, tuple(objects)))
    if len(text) > DIRECTORY_LIMIT:
        raise ArtifactError(f"directory has {len(text)} bytes; at most {DIRECTORY_LIMIT} are permitted")
    unpadded = MAGIC + len(text).to_bytes(8, "little") + text
    encoded = unpadded.ljust(payload_offset(len(text)), b"\0")
    end_of_payload = objects[-1].end if objects else 0
    head = parse_head(lambda begin, end: encoded[begin:end], len(encoded) + end_of_payload)
    if notes := head.notes():
        raise ArtifactError(*notes)
    return encoded


def parse_head(read: Callable[[int, int], bytes], file_bytes: int) -> Head:
    """Returns the validated directory of a file.

    Every count is checked against the file's own size before it is used to read or to allocate. Padding,
    gaps and trailing bytes are not read.

    Args:
        read: returns bytes `[begin, end)` of the file, all of them.
        file_bytes: the file's size.

    Raises:
        ArtifactError: one rule is broken; the message names the object, what was found and what is required.

    Source: container.md, "Framing", "Directory" and "Geometry".
    """
    json_bytes = _parse_prefix(read(0, min(PREFIX_BYTES, file_bytes)), file_bytes)
    directory = parse_directory(read(PREFIX_BYTES, PREFIX_BYTES + json_bytes))
    head = Head(directory, json_bytes, file_bytes)
    _require_geometry(head)
    return head


def _parse_prefix(prefix: bytes, file_bytes: int) -> int:
    magic = prefix[: len(MAGIC)]
    if not MAGIC.startswith(magic):
        raise ArtifactError(_foreign_magic(magic))
    if len(prefix) < PREFIX_BYTES:
        raise ArtifactError(f"file has {file_bytes} bytes; magic and directory length alone take {PREFIX_BYTES}")
    json_bytes = int.from_bytes(prefix[len(MAGIC) :], "little")
    if json_bytes == 0:
        raise ArtifactError("directory length is 0; a directory of at least one byte is required")
    if json_bytes > DIRECTORY_LIMIT:
        raise ArtifactError(f"directory length is {json_bytes}; at most {DIRECTORY_LIMIT} bytes are permitted")
    if PREFIX_BYTES + json_bytes > file_bytes:
        raise ArtifactError(
            f"directory length is {json_bytes}, so the directory ends at byte {PREFIX_BYTES + json_bytes}; "
            f"the file ends at {file_bytes}"
        )
    return json_bytes


def _foreign_magic(magic: bytes) -> str:
    if len(magic) == len(MAGIC) and magic.startswith(MAGIC_STEM):
        return f"container version {magic[-1]} is not supported; version {VERSION} is required"
    return f"file begins with {magic.hex(' ')}; a .ninfer file begins with {MAGIC.hex(' ')}"


def _require_geometry(head: Head) -> None:
    base, cursor, previous = head.payload_offset, 0, ""
    for record in head.directory.objects:
        where = f"object {shown(record.name)}"
        if record.offset < cursor:
            raise ArtifactError(
                f"{where}: offset {record.offset} lies before {cursor}, where object {shown(previous)} ends"
            )
        if next_offset(record.offset, record.kind) != record.offset:
            raise ArtifactError(
                f"{where}: offset {record.offset} is not a multiple of {TENSOR_ALIGNMENT}, as tensors require"
            )
        if base + record.end > head.file_bytes:
            raise ArtifactError(
                f"{where}: its {record.nbytes} bytes at offset {record.offset} end at byte {base + record.end} "
                f"of the file; the file ends at {head.file_bytes}"
            )
        cursor, previous = record.end, record.name


def _gap_note(gap: Gap) -> str:
    if gap.before is None:
        return f"{gap.end - gap.begin} bytes without meaning follow the last object, from byte {gap.begin} of the file"
    return (
        f"object {shown(gap.before)} begins {gap.end - gap.needed} bytes behind its first permitted place, "
        f"byte {gap.needed} of the file"
    )
