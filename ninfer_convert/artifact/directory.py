"""The directory: the closed JSON text that names every object of an artifact, in both directions.

Owns the records and the schema: members, types, names, formats, layouts, sizes. Refuses to know files and
how objects lie beside each other (`container`).

Source: container.md, "Directory".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ninfer_convert.errors import ArtifactError, SourceError, printable
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import (
    LAYOUT_OF_FORMAT,
    LAYOUTS,
    MAX_BYTES,
    MAX_RANK,
    RAW_BYTES,
    LayoutError,
    geometry,
)
from ninfer_convert.strict_json import PIECES_FROM_BYTES, Walk, load_object

ROOT_MEMBERS = ("identity", "objects")
IDENTITY_MEMBERS = ("model_id", "weights_id")
TENSOR_MEMBERS = ("name", "kind", "shape", "format", "layout", "offset", "bytes")
RESOURCE_MEMBERS = ("name", "kind", "encoding", "offset", "bytes")

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Identity:
    """What the artifact holds: which model, and which selection of weights."""

    model_id: str
    weights_id: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of the directory; `offset` is relative to the payload."""

    name: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    nbytes: int
    kind = "tensor"

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ResourceRecord:
    """One file kept byte for byte, encoding `raw-bytes-v1`; `offset` is relative to the payload."""

    name: str
    offset: int
    nbytes: int
    kind = "resource"

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


ObjectRecord = TensorRecord | ResourceRecord


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory: identity, and the objects in payload order."""

    identity: Identity
    objects: tuple[ObjectRecord, ...]


def encode_directory(directory: Directory) -> bytes:
    """Returns the directory text: compact JSON, members in the documented order, non-ASCII as UTF-8.

    Raises:
        ArtifactError: a name or identifier is not Unicode text (it holds a lone surrogate).

    Source: container.md, "Directory".
    """
    root = {
        "identity": {
            "model_id": directory.identity.model_id,
            "weights_id": directory.identity.weights_id,
        },
        "objects": [_members(record) for record in directory.objects],
    }
    text = json.dumps(root, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        context = printable(text[max(0, error.start - 30) : error.end])
        raise ArtifactError(f"directory holds a lone surrogate at '...{context}'; UTF-8 text is required") from error


def parse_directory(text: bytes) -> Directory:
    """Returns the directory that a text describes, every rule of the schema checked.

    Raises:
        ArtifactError: one rule is broken; the message names the object, what was found and what is required.

    Source: container.md, "Directory".
    """
    try:
        parse = _parse_whole if len(text) <= PIECES_FROM_BYTES else _parse_pieces
        return parse(text)
    except SourceError as error:
        raise ArtifactError(*error.messages) from error
    except MemoryError as error:
        raise ArtifactError(f"directory of {len(text)} bytes is too large for the memory at hand") from error


def _parse_whole(text: bytes) -> Directory:
    root = _require_members("directory", load_object(text, "directory"), ROOT_MEMBERS)
    identity = _parse_identity(root["identity"])
    entries = root["objects"]
    if not isinstance(entries, list) or not entries:
        raise ArtifactError(f"directory: objects is {shown(entries)}; a non-empty array is required")
    return Directory(identity, _parse_objects(entries))


def _parse_pieces(text: bytes) -> Directory:
    walk = Walk(text, "directory")
    root: dict[str, object] = {}
    records: tuple[ObjectRecord, ...] = ()
    for name in walk.members():
        if name == "objects":
            records = _parse_objects(walk.items())
            root[name] = records
        else:
            root[name] = walk.flat()
    walk.end()
    _require_members("directory", root, ROOT_MEMBERS)
    if not records:
        raise ArtifactError("directory: objects is an array of 0; a non-empty array is required")
    return Directory(_parse_identity(root["identity"]), records)


def _parse_objects(entries: Iterable[object]) -> tuple[ObjectRecord, ...]:
    records: list[ObjectRecord] = []
    names: set[str] = set()
    for index, entry in enumerate(entries):
        record = _parse_object(index, entry)
        if record.name in names:
            raise ArtifactError(f"object {index} has the name of an earlier object, {shown(record.name)}")
        names.add(record.name)
        records.append(record)
    return tuple(records)


def _parse_identity(value: object) -> Identity:
    members = _require_members("identity", value, IDENTITY_MEMBERS)
    return Identity(
        _require_text("identity", "model_id", members["model_id"]),
        _require_text("identity", "weights_id", members["weights_id"]),
    )


def _parse_object(index: int, value: object) -> ObjectRecord:
    where = f"object {index}"
    if not isinstance(value, dict):
        raise ArtifactError(f"{where} is {shown(value)}; a JSON object is required")
    if "name" not in value:
        raise ArtifactError(f"{where} lacks the member 'name'")
    name = _require_text(where, "name", value["name"])
    where = f"object {shown(name)}"
    kind = value.get("kind")
    if kind == TensorRecord.kind:
        return _parse_tensor(where, name, _require_members(where, value, TENSOR_MEMBERS))
    if kind == ResourceRecord.kind:
        return _parse_resource(where, name, _require_members(where, value, RESOURCE_MEMBERS))
    if "kind" not in value:
        raise ArtifactError(f"{where} lacks the member 'kind'")
    raise ArtifactError(f"{where}: kind is {shown(kind)}; 'tensor' or 'resource' is required")


def _parse_tensor(where: str, name: str, members: dict[str, object]) -> TensorRecord:
    shape = _require_shape(where, members["shape"])
    format_name, layout = members["format"], members["layout"]
    if not isinstance(format_name, str) or format_name not in FORMATS:
        raise ArtifactError(f"{where}: format is {shown(format_name)}; one of {', '.join(FORMATS)} is required")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArtifactError(f"{where}: layout is {shown(layout)}; one of {', '.join(LAYOUTS)} is required")
    if LAYOUT_OF_FORMAT[format_name] != layout:
        raise ArtifactError(
            f"{where}: layout {layout} does not store {format_name}; {LAYOUT_OF_FORMAT[format_name]} is required"
        )
    offset = _require_integer(where, "offset", members["offset"], 0)
    nbytes = _require_integer(where, "bytes", members["bytes"], 1)
    try:
        encoded_bytes = geometry(FORMATS[format_name], shape).nbytes
    except LayoutError as error:
        raise ArtifactError(f"{where}: {error}") from error
    if nbytes != encoded_bytes:
        raise ArtifactError(
            f"{where}: bytes is {nbytes}; {format_name} {list(shape)} in {layout} takes {encoded_bytes}"
        )
    # One text for all records, not the one that was read for each.
    return TensorRecord(name, shape, FORMATS[format_name].name, LAYOUT_OF_FORMAT[format_name], offset, nbytes)


def _parse_resource(where: str, name: str, members: dict[str, object]) -> ResourceRecord:
    if members["encoding"] != RAW_BYTES:
        raise ArtifactError(f"{where}: encoding is {shown(members['encoding'])}; {RAW_BYTES!r} is required")
    offset = _require_integer(where, "offset", members["offset"], 0)
    return ResourceRecord(name, offset, _require_integer(where, "bytes", members["bytes"], 1))


def _require_members(where: str, value: object, required: Sequence[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ArtifactError(f"{where} is {shown(value)}; a JSON object is required")
    for name in required:
        if name not in value:
            raise ArtifactError(f"{where} lacks the member {name!r}")
    for name in value:
        if name not in required:
            raise ArtifactError(f"{where} has a member {shown(name)}; only {', '.join(required)} are permitted")
    return value


def _require_text(where: str, member: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ArtifactError(f"{where}: {member} is {shown(value)}; a non-empty string is required")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"{where}: {member} {shown(value)} holds a lone surrogate; Unicode text is required"
        ) from error
    return value


def _require_integer(where: str, member: str, value: object, minimum: int) -> int:
    # bool is a subclass of int, and true is no number
    if type(value) is not int or not minimum <= value <= MAX_BYTES:
        required = f"an integer from {minimum} to {MAX_BYTES}"
        raise ArtifactError(f"{where}: {member} is {shown(value)}; {required} is required")
    return value


def _require_shape(where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ArtifactError(f"{where}: shape is {shown(value)}; an array of positive integers is required")
    if len(value) > MAX_RANK:
        raise ArtifactError(f"{where}: shape has rank {len(value)}; rank 0 to {MAX_RANK} is required")
    return tuple(_require_integer(where, f"shape[{axis}]", dimension, 1) for axis, dimension in enumerate(value))


def _members(record: ObjectRecord) -> dict[str, object]:
    if isinstance(record, ResourceRecord):
        values: tuple[object, ...] = (record.name, record.kind, RAW_BYTES, record.offset, record.nbytes)
        return dict(zip(RESOURCE_MEMBERS, values, strict=True))
    values = (
        record.name,
        record.kind,
        list(record.shape),
        record.format,
        record.layout,
        record.offset,
        record.nbytes,
    )
    return dict(zip(TENSOR_MEMBERS, values, strict=True))


def shown(value: object) -> str:
    """Returns a JSON value as a message names it: short, printable, containers by their kind."""
    if isinstance(value, str):
        text = printable(value[:_SHOWN_CHARACTERS])
        return f"'{text}'" if len(value) <= _SHOWN_CHARACTERS else f"'{text}...'"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    return json.dumps(value)
