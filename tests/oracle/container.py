"""Whole `.ninfer` files: objects to bytes, bytes to objects.

Source: container.md.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .binary import OracleError
from .layouts import LAYOUTS, align_up, payload_bytes

MAGIC = bytes.fromhex("4e494e4645520002")
TENSOR_MEMBERS = ["name", "kind", "shape", "format", "layout", "offset", "bytes"]
RESOURCE_MEMBERS = ["name", "kind", "encoding", "offset", "bytes"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor object with its stored bytes."""

    name: str
    shape: tuple[int, ...]
    format: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource object with its stored bytes."""

    name: str
    payload: bytes


def build(model_id: str, weights_id: str, objects: Sequence[Tensor | Resource]) -> bytes:
    """Returns the whole artifact; each object takes the first permitted offset."""
    entries: list[dict[str, object]] = []
    body = bytearray()
    for stored in objects:
        if isinstance(stored, Tensor):
            body += bytes(align_up(len(body), 256) - len(body))
            entry: dict[str, object] = {"name": stored.name, "kind": "tensor", "shape": list(stored.shape)}
            entry |= {"format": stored.format, "layout": LAYOUTS[stored.format]}
        else:
            entry = {"name": stored.name, "kind": "resource", "encoding": "raw-bytes-v1"}
        entries.append(entry | {"offset": len(body), "bytes": len(stored.payload)})
        body += stored.payload
    directory = {"identity": {"model_id": model_id, "weights_id": weights_id}, "objects": entries}
    text = json.dumps(directory, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + bytes(align_up(len(head), 4096) - len(head)) + bytes(body)


def parse(data: bytes) -> tuple[str, str, list[Tensor | Resource]]:
    """Returns (model_id, weights_id, objects) of an artifact.

    Raises:
        OracleError: the framing, a member set, a size, an offset or an alignment is wrong. JSON types are
            taken on trust.
    """
    if data[:8] != MAGIC:
        raise OracleError("magic")
    json_bytes = int.from_bytes(data[8:16], "little")
    if json_bytes == 0 or 16 + json_bytes > len(data):
        raise OracleError("json_bytes")
    directory = json.loads(data[16 : 16 + json_bytes].decode("utf-8"))
    if sorted(directory) != ["identity", "objects"] or sorted(directory["identity"]) != ["model_id", "weights_id"]:
        raise OracleError("members")
    start = align_up(16 + json_bytes, 4096)
    cursor = 0
    objects = []
    for entry in directory["objects"]:
        objects.append(_object(entry, cursor, data, start))
        cursor = entry["offset"] + entry["bytes"]
    names = [stored.name for stored in objects]
    if not names or len(set(names)) != len(names):
        raise OracleError("names")
    return directory["identity"]["model_id"], directory["identity"]["weights_id"], objects


def _object(entry: dict, cursor: int, data: bytes, start: int) -> Tensor | Resource:
    tensor = entry["kind"] == "tensor"
    if sorted(entry) != sorted(TENSOR_MEMBERS if tensor else RESOURCE_MEMBERS):
        raise OracleError(f"members of {entry['name']}")
    begin, nbytes = entry["offset"], entry["bytes"]
    if begin < cursor or nbytes < 1 or start + begin + nbytes > len(data):
        raise OracleError(f"extent of {entry['name']}")
    payload = data[start + begin : start + begin + nbytes]
    if not tensor:
        if entry["kind"] != "resource" or entry["encoding"] != "raw-bytes-v1":
            raise OracleError(f"kind of {entry['name']}")
        return Resource(entry["name"], payload)
    if begin % 256:
        raise OracleError(f"alignment of {entry['name']}")
    shape = tuple(entry["shape"])
    if LAYOUTS.get(entry["format"]) != entry["layout"] or nbytes != payload_bytes(entry["format"], shape):
        raise OracleError(f"layout of {entry['name']}")
    return Tensor(entry["name"], shape, entry["format"], payload)
