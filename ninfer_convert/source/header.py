"""The header of one safetensors file: parse it, and check everything it can be wrong about.

Owns the file format: length word, JSON, entries, positions. Refuses to know paths and directories (`source`)
and what a tensor is for. Payload bytes are never read.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.strict_json import PIECES_FROM_BYTES, Walk, kind_of, load_object

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation; a longer header is damage."""

MAX_RANK = 64
MAX_INTEGER = 2**63 - 1
MAX_PROBLEMS = 100
"""Problems collected from one header; a header that is noise is not described to the last entry."""

METADATA = "__metadata__"
MEMBERS = ("dtype", "shape", "data_offsets")

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits of one element of every safetensors dtype."""

_LFS_BEGINNING = b"version https://git-lfs"
_LFS_LIMIT = 1024
_DISGUISES = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint"),
    (b"\x80\x02", "a Python pickle, perhaps a PyTorch checkpoint"),
    (b"GGUF", "a GGUF file"),
    (b"<", "an HTML or XML page, perhaps a failed download"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `begin` counts from the first byte of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file holds; `sha256` covers the length word and the JSON text."""

    entries: tuple[TensorEntry, ...]
    """In order of position."""
    metadata: Mapping[str, str]
    sha256: str
    nbytes: int


class _EntryError(ValueError):
    """One reason why an entry cannot be taken."""


def is_lfs_pointer(raw: bytes) -> bool:
    """Tells whether a whole small file is the text that Git LFS leaves in place of the real one."""
    return len(raw) < _LFS_LIMIT and raw.startswith(_LFS_BEGINNING)


def lfs_message(where: str) -> str:
    """Returns the message for a Git LFS pointer."""
    return f"{where}: is a Git LFS pointer, not the file itself; run `git lfs pull` in the checkpoint directory"


def parse_header(read: Callable[[int, int], bytes], file_bytes: int, where: str) -> Header:
    """Returns the checked header of a safetensors file.

    The entries cover the data section without overlap, hole or remainder. A header whose length is not a
    multiple of eight, leading spaces, an empty name and tensors without elements are all legal.

    Args:
        read: returns the bytes `[begin, end)` of the file.
        file_bytes: size of the file.
        where: the file's name, already printable; it begins every message.

    Raises:
        SourceError: one message per problem, at most about a hundred.
    """
    prefix = read(0, min(file_bytes, _LFS_LIMIT - 1))
    if file_bytes < _LFS_LIMIT and is_lfs_pointer(prefix):
        raise SourceError(lfs_message(where))
    if file_bytes < LENGTH_BYTES:
        raise SourceError(
            f"{where}: {'the file is empty' if not file_bytes else f'the file has {file_bytes} bytes'};"
            f" a safetensors file begins with {LENGTH_BYTES} bytes of header length"
        )
    header_bytes = _header_bytes(prefix, file_bytes, where)
    raw = read(0, LENGTH_BYTES + header_bytes)
    metadata: dict[str, str] = {}
    data_begin = LENGTH_BYTES + header_bytes
    entries = _entries(_members(raw, where), metadata, data_begin, where)
    problems = _position_problems(entries, data_begin, file_bytes)
    if problems:
        raise SourceError(*(f"{where}: {problem}" for problem in problems))
    return Header(entries, MappingProxyType(metadata), hashlib.sha256(raw).hexdigest(), len(raw))


def shown(name: str) -> str:
    """Returns a tensor name fit for a message: printable, and not without end."""
    return printable(name if len(name) <= 200 else f"{name[:200]}...")


def _header_bytes(prefix: bytes, file_bytes: int, where: str) -> int:
    header_bytes = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    rest = file_bytes - LENGTH_BYTES
    if header_bytes <= min(MAX_HEADER_BYTES, rest):
        return header_bytes
    disguise = next((f"; it looks like {what}" for magic, what in _DISGUISES if prefix.startswith(magic)), "")
    if header_bytes > MAX_HEADER_BYTES:
        raise SourceError(
            f"{where}: header length {header_bytes} is above the limit of {MAX_HEADER_BYTES} bytes:"
            f" not a safetensors file{disguise}"
        )
    raise SourceError(
        f"{where}: header length {header_bytes} does not fit the {rest} bytes that follow: the file is truncated"
    )


def _members(raw: bytes, where: str) -> Iterator[tuple[str, Any]]:
    """Yields every member of the header with its value."""
    where = f"{where}: header"
    if len(raw) <= PIECES_FROM_BYTES:
        yield from load_object(raw[LENGTH_BYTES:], where).items()
        return
    walk = Walk(raw, where, LENGTH_BYTES)
    yield from walk.pairs()
    walk.end()


def _require_metadata(value: object, where: str) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise SourceError(f"{where}: {METADATA} is {kind_of(value)}; required: an object of strings")
    for key, text in value.items():
        if not isinstance(text, str):
            raise SourceError(f"{where}: {METADATA} member {shown(key)} is {kind_of(text)}; required: a string")
    return value


def _entries(
    members: Iterable[tuple[str, Any]], metadata: dict[str, str], data_begin: int, where: str
) -> tuple[TensorEntry, ...]:
    entries: list[TensorEntry] = []
    problems: list[str] = []
    for name, value in members:
        try:
            if name == METADATA:
                metadata.update(_require_metadata(value, where))
            else:
                entries.append(_entry(name, value, data_begin))
        except _EntryError as problem:
            problems.append(f"{where}: tensor {shown(name)}: {problem}")
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise SourceError(*problems)
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.nbytes)))


def _entry(name: str, members: object, data_begin: int) -> TensorEntry:
    if not isinstance(members, dict):
        raise _EntryError(f"the entry is {kind_of(members)}; required: an object with {', '.join(MEMBERS)}")
    if missing := [member for member in MEMBERS if member not in members]:
        raise _EntryError(f"{' and '.join(missing)} missing")
    if unknown := [member for member in members if member not in MEMBERS]:
        raise _EntryError(f"unknown member {shown(unknown[0])}; an entry has {', '.join(MEMBERS)} and nothing else")
    dtype = members["dtype"]
    if not isinstance(dtype, str):
        raise _EntryError(f"dtype is {kind_of(dtype)}; required: a string")
    if dtype not in DTYPE_BITS:
        raise _EntryError(f"dtype {shown(dtype)} is not known; safetensors has {', '.join(DTYPE_BITS)}")
    shape = _integers(members["shape"], "shape")
    if len(shape) > MAX_RANK:
        raise _EntryError(f"shape has rank {len(shape)}; at most {MAX_RANK} is read")
    begin, end = _offsets(members["data_offsets"])
    required = _required_bytes(dtype, shape)
    if end - begin != required:
        raise _EntryError(
            f"data_offsets [{begin}, {end}] hold {end - begin} bytes;"
            f" dtype {dtype} and shape {list(shape)} need {required}"
        )
    # One text for all entries, not the one that was read for each.
    return TensorEntry(name, sys.intern(dtype), shape, data_begin + begin, required)


def _offsets(value: object) -> tuple[int, int]:
    offsets = _integers(value, "data_offsets")
    if len(offsets) != 2:
        raise _EntryError(f"data_offsets has {len(offsets)} members; required: begin and end")
    begin, end = offsets
    if begin > end:
        raise _EntryError(f"data_offsets [{begin}, {end}] end before they begin")
    return begin, end


def _integers(value: object, member: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _EntryError(f"{member} is {kind_of(value)}; required: a list of integers")
    for item in value:
        # type(), because True is an int to isinstance.
        if type(item) is not int:
            raise _EntryError(f"{member} holds {kind_of(item)}; required: integers")
        if not 0 <= item <= MAX_INTEGER:
            raise _EntryError(f"{member} holds {item}; required: 0 to {MAX_INTEGER}")
    return tuple(value)


def _required_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    # The bound holds for the dimensions above zero too, so that [2**62, 4, 0] is not a shape anywhere.
    elements = 1
    for dimension in shape:
        elements *= max(dimension, 1)
        if elements * DTYPE_BITS[dtype] > MAX_INTEGER:
            raise _EntryError(f"shape {list(shape)} of dtype {dtype} overflows {MAX_INTEGER} bits")
    if 0 in shape:
        elements = 0
    whole, rest = divmod(elements * DTYPE_BITS[dtype], 8)
    if rest:
        raise _EntryError(f"{elements} elements of {DTYPE_BITS[dtype]} bits ({dtype}) are not whole bytes")
    return whole


def _position_problems(entries: tuple[TensorEntry, ...], data_begin: int, file_bytes: int) -> list[str]:
    problems: list[str] = []
    end, last = data_begin, None
    for entry in entries:
        entry_end = entry.begin + entry.nbytes
        if entry.begin != end:
            problems.append(_position_problem(entry, last, end, data_begin))
        if end <= file_bytes < entry_end:
            problems.append(
                f"tensor {shown(entry.name)}: ends at byte {entry_end} of the file, which has {file_bytes}:"
                " the file is truncated"
            )
        if entry_end >= end:
            end, last = entry_end, entry
        if len(problems) >= MAX_PROBLEMS:
            return problems
    if end < file_bytes:
        after = f"after the last one, tensor {shown(entries[-1].name)}," if entries else "in a file without tensors"
        problems.append(f"{file_bytes - end} bytes {after} belong to no tensor")
    return problems


def _position_problem(entry: TensorEntry, last: TensorEntry | None, end: int, data_begin: int) -> str:
    before = "nothing lies before it"
    if last is not None:
        before = f"tensor {shown(last.name)} ends at {end - data_begin}"
    gap = f"{entry.begin - end} bytes between belong to no tensor" if entry.begin > end else "overlap"
    return f"tensor {shown(entry.name)}: begins at byte {entry.begin - data_begin} of the data, but {before}: {gap}"
