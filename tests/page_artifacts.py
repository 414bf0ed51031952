"""Artifacts for the report page: the inventory of a shipped recipe at a fraction of its size, with reports."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_convert.artifact.container import (
    REPORT_SUFFIX,
    Identity,
    ResourceRecord,
    TensorRecord,
    encode_head,
    payload_offset,
)
from ninfer_convert.formats import FORMATS, DirectFormat, GroupedFormat
from ninfer_convert.layout import Geometry, geometry
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import ResourceSpec

ERROR = {"Q4G64_F16S": 0.095, "Q5G64_F16S": 0.046, "Q6G64_F16S": 0.023, "W8G32_F16S": 0.0051, "NVFP4": 0.094}


@dataclass(frozen=True, slots=True)
class Shown:
    """An artifact with its report beside it."""

    path: Path
    report: dict[str, Any]

    @property
    def report_path(self) -> Path:
        return self.path.with_name(self.path.name + REPORT_SUFFIX)

    def write_report(self) -> None:
        self.report_path.write_text(json.dumps(self.report), encoding="utf-8")


def write_shown(path: Path, recipe_name: str, *, seed: int = 0, stats: bool = True) -> Shown:
    """Writes every object of a recipe, each axis about a sixteenth as long, and a report."""
    recipe = load_recipe(recipe_name)
    draw = np.random.default_rng(seed)
    records: list[TensorRecord | ResourceRecord] = []
    contents: list[bytes] = []
    items: list[dict[str, Any]] = []
    cursor = 0
    for spec in recipe.objects:
        if isinstance(spec, ResourceSpec):
            content = f"{spec.name} {seed}".encode()
            records.append(ResourceRecord(spec.name, cursor, len(content)))
            item: dict[str, Any] = {"name": spec.name, "kind": "resource", "encoding": "raw-bytes-v1"}
            item["sources"] = [{"source": "base", "file": spec.name.rpartition("/")[2], "member": None}]
        else:
            cursor = -(-cursor // 256) * 256
            numeric = FORMATS[spec.format]
            shape = tuple(_smaller(size, numeric.name, axis) for axis, size in enumerate(spec.shape))
            where = geometry(numeric, shape)
            content = _payload(draw, numeric.name, shape, where)
            records.append(TensorRecord(spec.name, shape, numeric.name, where.layout, cursor, len(content)))
            item = {"name": spec.name, "kind": "tensor", "shape": list(shape), "format": numeric.name}
            item |= {"layout": where.layout, "encoder": spec.encoder, "word_copy": numeric.name == "NVFP4"}
            item |= {"transform": str(spec.value), "sources": list(_sources(spec.name, shape))}
            if stats:
                item["stats"] = _stats(draw, spec.name, numeric.name, shape)
        item |= {"offset": cursor, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        contents.append(content)
        items.append(item)
        cursor += len(content)
    identity = Identity(recipe.model_id, recipe.weights_id)
    _write(path, identity, records, contents)
    about = {"model_id": recipe.model_id, "weights_id": recipe.weights_id, "bytes": path.stat().st_size}
    report = _report(recipe.id, recipe.sha256, about | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}, items)
    shown = Shown(path, report)
    shown.write_report()
    return shown


def _smaller(size: int, format_name: str, axis: int) -> int:
    if isinstance(FORMATS[format_name], DirectFormat):
        return max(1, size // 16)
    if axis:
        return max(64, size // 16 // 64 * 64)
    return max(128, size // 64 // 128 * 128) if format_name == "NVFP4" else max(4, size // 64)


def _payload(draw: np.random.Generator, format_name: str, shape: tuple[int, ...], where: Geometry) -> bytes:
    """Returns zero codes under scales that are spread like those of trained weights."""
    payload = np.zeros(where.nbytes, np.uint8)
    planes = {plane.name: payload[plane.offset : plane.offset + plane.nbytes] for plane in where.planes}
    if "scale" not in planes:
        return payload.tobytes()
    numeric = FORMATS[format_name]
    center = draw.uniform(-9, -7)
    if isinstance(numeric, GroupedFormat):
        scales = planes["scale"].view("<f2")
        scales[:] = np.exp2(draw.normal(center, 0.5, len(scales)))
        if draw.random() < 0.2:
            scales[:: max(2, int(draw.integers(40, 400)))] = 0
    elif format_name == "NVFP4":
        planes["scale"][:] = np.clip(draw.normal(88, 6, len(planes["scale"])), 1, 126)
        planes["divisor"].view("<f4")[:] = 2.0 ** draw.uniform(9, 12)
    else:
        words = np.exp2(draw.normal(center, 0.5, len(planes["scale"]) // 2)).astype("<f4").view("<u4") >> 16
        planes["scale"].view("<u2")[:] = words
    return payload.tobytes()


def _sources(name: str, shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up") else ("weight",)
    for part in parts:
        tensor = f"model.language_model.{name.replace('/', '.')}.{part}"
        file = f"model-{1 + len(name) % 15:05}-of-00015.safetensors"
        yield {"source": "base", "file": file, "tensor": tensor, "dtype": "BF16", "shape": list(shape)}


def _stats(draw: np.random.Generator, name: str, format_name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if format_name not in ERROR:
        return {"relative_l2": 0.0, "sqnr_db": None, "max_error": 0.0, "max_error_at": None}
    layer = next((int(part) for part in name.split("/") if part.isdigit()), 0)
    error = ERROR[format_name] * (1 + 0.25 * math.exp(-layer / 3) + 0.1 * (layer / 64) ** 4)
    error *= math.exp(draw.normal(0.06 * math.sin(len(name)), 0.025))
    groups = shape[0] * shape[1] // 64
    return {
        "relative_l2": error,
        "sqnr_db": -20 * math.log10(error),
        "max_error": error * math.exp(draw.normal(-1, 0.3)),
        "max_error_at": [int(draw.integers(shape[0])), int(draw.integers(shape[1]))],
        "clipped_groups": int(draw.integers(1 + groups // 50)),
        "zero_groups": 0,
    }


def _write(
    path: Path, identity: Identity, records: list[TensorRecord | ResourceRecord], contents: list[bytes]
) -> None:
    head = encode_head(identity, tuple(records))
    begin = payload_offset(int.from_bytes(head[8:16], "little"))
    with path.open("wb") as file:
        file.write(head)
        for record, content in zip(records, contents, strict=True):
            file.seek(begin + record.offset)
            file.write(content)


def _report(recipe: str, digest: str, about: dict[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]:
    shards = [
        {"name": f"model-{number:05}-of-00015.safetensors", "bytes": 3_970_000_000 + number, "header_sha256": "ab" * 32}
        for number in range(1, 16)
    ]
    return {
        "schema": 1,
        "artifact": about,
        "recipe": {"id": recipe, "sha256": digest, "path": "recipes/shown.yaml"},
        "sources": {
            "base": {
                "location": "/data/checkpoints/base",
                "repo": "Qwen/Qwen3.6-27B",
                "revision": "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9",
                "revision_required": "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9",
                "identified_by": "hub cache",
                "prefixes": {"model.": "model.language_model."},
                "dtypes": {"BF16": 1187},
                "tensors": 1187,
                "tensors_used": 1104,
                "files": shards,
            }
        },
        "inputs": {"ranking": {"path": "ranking.json", "bytes": 1_234_567, "sha256": "cd" * 32}},
        "objects": items,
        "notes": ["the shortlist keeps 131,072 of 248,320 rows"],
        "warnings": [],
        "waived": [],
        "run": {
            "converter": "0.1.0",
            "python": "3.11.7",
            "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
            "packages": {"numpy": "2.4.6", "numba": "0.68.1", "safetensors": "0.8.0"},
            "host": "builder",
            "finished": "2026-11-29T22:10:04+00:00",
            "seconds": 183.402,
            "threads": 8,
            "peak_memory_bytes": 287_309_824,
            "byte_order": "little",
            "command": ["ninfer-convert", "run", recipe, "--source", "base=/data/checkpoints/base", "-o", "out.ninfer"],
        },
    }
