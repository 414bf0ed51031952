"""What an artifact must hold, found a second way: whole arrays, plain numpy moves, and the oracle for every number.

Takes a recipe as data from the package and nothing else of it: nothing here binds, reads, moves, casts or
encodes with the code under test. Slow and hungry for memory where the converter must be neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from oracle import binary, casts, container, encoders, fast, layouts, shortlist

from ninfer_convert.recipe.expression import (
    BlockRows,
    Cast,
    Concat,
    Expression,
    Gather,
    Module,
    Reciprocal,
    Reshape,
    Same,
    Shortlist,
    Slice,
    Tensor,
    Tied,
    Transpose,
    leaves,
)
from ninfer_convert.recipe.model import Recipe, ResourceOrigin, ResourceSpec, TensorSpec

Words = np.ndarray[Any, np.dtype[Any]]
Leaf = Callable[[Expression], "Array"]

WORD = {
    "BF16": "<u2", "F16": "<u2", "F32": "<u4", "F64": "<u8", "U8": "<u1", "F8_E4M3": "<u1",
    "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}
"""The numpy dtype that holds the words of a safetensors dtype; integers as the numbers they are."""

JOB_WEIGHTS = 200_000
"""Weights that one process encodes at a time."""


@dataclass(frozen=True, slots=True)
class Array:
    """The words of a value under its shape, and the safetensors dtype that gives them a meaning."""

    dtype: str
    words: Words


class Source:
    """A checkpoint on disk: its index, or its one file, read by position."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        index = directory / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.exists():
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        for path in (directory / name for name in files):
            with path.open("rb") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(begin - 8))
            header.pop("__metadata__", None)
            self._entries |= {name: (path, begin, entry) for name, entry in header.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtypes(self) -> dict[str, int]:
        """Returns how many tensors there are of each dtype."""
        found = [entry["dtype"] for _, _, entry in self._entries.values()]
        return {dtype: found.count(dtype) for dtype in set(found)}

    def names(self) -> Iterator[str]:
        """Yields the names of all tensors."""
        yield from self._entries

    def read(self, name: str) -> Array:
        """Returns a whole tensor."""
        path, begin, entry = self._entries[name]
        low, high = entry["data_offsets"]
        word = np.dtype(WORD[entry["dtype"]])
        words = np.fromfile(path, word, (high - low) // word.itemsize, offset=begin + low)
        return Array(entry["dtype"], words.reshape(entry["shape"]))

    def is_tied(self) -> bool:
        """Tells whether config.json says that the output head is the embedding."""
        config = json.loads((self.directory / "config.json").read_bytes())
        said = {member["tie_word_embeddings"] for member in (config, config.get("text_config", {}))
                if "tie_word_embeddings" in member}
        return said == {True}


class Reference:
    """The objects that a recipe makes of checkpoints, as payload bytes."""

    def __init__(
        self,
        recipe: Recipe,
        directories: Mapping[str, Path],
        inputs: Mapping[str, Path] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Opens the sources; an executor shares the encoding among its processes."""
        self.recipe = recipe
        self.sources = {name: Source(directories[name]) for name in recipe.sources}
        self._inputs = inputs or {}
        self._executor = executor
        self._shortlists: dict[Shortlist, Array] = {}

    def specs(self) -> list[TensorSpec | ResourceSpec]:
        """Returns the objects in stored order, without those of optional components that are absent whole."""
        members: dict[str | None, list[bool]] = {}
        for spec in self.recipe.objects:
            if isinstance(spec, TensorSpec) and spec.component in self.recipe.optional_components:
                members.setdefault(spec.component, []).extend(self._exists(leaf) for leaf in leaves(spec.value))
        absent = {component for component, exists in members.items() if not any(exists)}
        return [spec for spec in self.recipe.objects if spec.component not in absent]

    def objects(self) -> list[container.Tensor | container.Resource]:
        """Returns every object with its payload."""
        return [
            container.Resource(spec.name, self.payload(spec).tobytes())
            if isinstance(spec, ResourceSpec)
            else container.Tensor(spec.name, spec.shape, spec.format, self.payload(spec).tobytes())
            for spec in self.specs()
        ]

    def artifact(self) -> bytes:
        """Returns the whole file."""
        return container.build(self.recipe.model_id, self.recipe.weights_id, self.objects())

    def payload(self, spec: TensorSpec | ResourceSpec) -> Words:
        """Returns the stored bytes of one object as uint8."""
        if isinstance(spec, ResourceSpec):
            found = (self._resource(origin) for origin in spec.origins)
            return np.frombuffer(next(content for content in found if content is not None), np.uint8)
        if spec.words:
            return self._copied(spec)
        array = self.value(spec.value)
        assert array.words.shape == spec.shape, spec.name
        if spec.format in layouts.WORD_BYTES:
            assert array.dtype == {"BF16": "BF16", "FP32": "F32", "I32": "I32"}[spec.format], spec.name
            return as_bytes(array.words)
        return encode(spec.format, array, self._executor)

    def holds(self) -> bool:
        """Tells whether every condition of the recipe holds; a broken one is an AssertionError."""
        for condition in self.recipe.conditions:
            self.value(condition.value)
        return True

    # -- expressions ----------------------------------------------------------------------------------------

    def value(self, node: Expression, leaf: Leaf | None = None) -> Array:
        """Returns an expression's value; `leaf` stands in for the reading of tensors."""

        def inner(operand: Expression) -> Array:
            return self.value(operand, leaf)

        match node:
            case Tensor() if leaf is None:
                return self.sources[node.source].read(node.name)
            case Shortlist():
                if node not in self._shortlists:
                    self._shortlists[node] = self._shortlist(node)
                return self._shortlists[node]
            case Slice():
                of = inner(node.of)
                index = [slice(None)] * of.words.ndim
                index[node.axis] = slice(node.begin, node.end)
                return Array(of.dtype, of.words[tuple(index)])
            case BlockRows():
                of = inner(node.of)
                keep = np.arange(len(of.words)) % node.block
                return Array(of.dtype, of.words[(keep >= node.begin) & (keep < node.end)])
            case Reshape():
                of = inner(node.of)
                return Array(of.dtype, of.words.reshape(node.to))
            case Transpose():
                of = inner(node.of)
                return Array(of.dtype, of.words.transpose(node.axes))
            case Concat():
                parts = [inner(part) for part in node.of]
                assert len({part.dtype for part in parts}) == 1
                return Array(parts[0].dtype, np.concatenate([part.words for part in parts], axis=node.axis))
            case Cast():
                return cast(inner(node.of), node.to)
            case Gather():
                return Array((of := inner(node.of)).dtype, of.words[self.value(node.ids).words])
            case Same():
                first, *others = [inner(part) for part in node.of]
                assert all(first.dtype == other.dtype for other in others)
                assert all(np.array_equal(first.words, other.words) for other in others), str(node)
                return first
            case Tied():
                return inner(node.embedding if self.sources[node.head.source].is_tied() else node.head)
            case Reciprocal():
                of = inner(node.of)
                return Array("F32", np.array(encoders.reciprocal(int(of.words)), "<u4").reshape(of.words.shape))
        assert leaf is not None
        return leaf(node)

    def _shortlist(self, node: Shortlist) -> Array:
        counts = shortlist.row_zero(self._inputs[node.counts].read_bytes(), node.candidates)
        config = json.loads((self.sources[node.source].directory / node.special).read_bytes())
        forced = shortlist.forced_ids(config, node.candidates)
        return Array("I32", np.array(shortlist.shortlist(counts, node.candidates, node.take, forced), "<i4"))

    # -- word copies ----------------------------------------------------------------------------------------

    def _field(self, module: Module, name: str) -> Array:
        return self.sources[module.source].read(f"{module.name}.{name}")

    def _copied(self, spec: TensorSpec) -> Words:
        """Moves codes and scales by the same expression, then lays them out."""
        modules = [leaf for leaf in leaves(spec.value) if isinstance(leaf, Module)]
        prefix = "weight_packed" if f"{modules[0].name}.weight_packed" in self.sources[modules[0].source] else "weight"
        codes = self.value(spec.value, lambda leaf: self._field(leaf, prefix)).words
        scales = self.value(spec.value, lambda leaf: self._field(leaf, "weight_scale")).words
        if spec.format != "NVFP4":
            assert codes.shape == spec.shape, spec.name
            return lay_out(spec.format, spec.shape, {"code": codes, "scale": scales})
        assert (codes.shape[0], codes.shape[1] * 2) == spec.shape, spec.name
        divisors = {self._divisor(module) for module in modules}
        assert len(divisors) == 1, spec.name
        n, k = spec.shape
        swizzled = np.zeros(n * k // 16, np.uint8)
        swizzled[layouts.swizzled_offset(np.arange(n)[:, None], np.arange(k // 16), k)] = scales
        divisor = np.array(divisors.pop(), "<u4")
        return lay_out(spec.format, spec.shape, {"code": codes, "scale": swizzled, "divisor": divisor})

    def _divisor(self, module: Module) -> int:
        if module.dialect == "modelopt":
            return encoders.reciprocal(int(self._field(module, "weight_scale_2").words.reshape(())))
        return int(self._field(module, "weight_global_scale").words.reshape(()))

    # -- the rest -------------------------------------------------------------------------------------------

    def _exists(self, leaf: Expression) -> bool:
        if isinstance(leaf, Module):
            return any(name.rpartition(".")[0] == leaf.name for name in self.sources[leaf.source].names())
        return not isinstance(leaf, Tensor) or leaf.name in self.sources[leaf.source]

    def _resource(self, origin: ResourceOrigin) -> bytes | None:
        if origin.input is not None:
            path = self._inputs[origin.input]
        else:
            path = self.sources[origin.source].directory / str(origin.file)
        if not path.exists():
            return None
        content = path.read_bytes()
        if origin.member is None:
            return content
        member = json.loads(content).get(origin.member)
        if isinstance(member, list):
            member = {entry["name"]: entry["template"] for entry in member}.get("default")
        return None if member is None else str(member).encode("utf-8")


def cast(of: Array, to: str) -> Array:
    """Casts word by word as the oracle does."""
    flat = of.words.reshape(-1)
    if to == "FP32":
        words: Words = np.array([casts.widen(of.dtype, word) for word in flat.tolist()], "<u4")
    elif to == "BF16":
        rule = casts.f32_to_bf16 if of.dtype == "F32" else casts.f16_to_bf16
        words = np.array([rule(word) for word in flat.tolist()], "<u2")
    else:
        decoders = {"F32": binary.decode_f32, "F16": binary.decode_f16, "BF16": binary.decode_bf16}
        decode: Callable[[int], Any] = decoders.get(of.dtype, int)
        words = np.array([casts.checked_i32(decode(word)) for word in flat.tolist()], "<u4").view("<i4")
    return Array({"FP32": "F32"}.get(to, to), words.reshape(of.words.shape))


def encode(name: str, of: Array, executor: Executor | None = None) -> Words:
    """Encodes a matrix; rows of zero words, of which sparse stand-ins are full, go to the oracle only once."""
    n, k = of.words.shape
    busy = np.flatnonzero(of.words.max(axis=1))
    if len(busy) < n:
        assert not any(_encode_rows(name, k, of.dtype, bytes(k * of.words.itemsize)))
    payload = np.zeros(layouts.payload_bytes(name, (n, k)), np.uint8)
    planes = {
        plane: payload[offset : offset + nbytes].reshape(n, -1)
        for plane, (offset, nbytes) in layouts.planes(name, (n, k)).items()
    }
    step = max(1, JOB_WEIGHTS // k)
    jobs = [busy[begin : begin + step] for begin in range(0, len(busy), step)]
    words = (of.words[rows].tobytes() for rows in jobs)
    each = executor.map if executor and len(jobs) > 1 else map
    parts: Iterable[bytes] = each(_encode_rows, repeat(name), repeat(k), repeat(of.dtype), words)
    for rows, part in zip(jobs, parts, strict=True):
        for plane, (offset, nbytes) in layouts.planes(name, (len(rows), k)).items():
            planes[plane][rows] = np.frombuffer(part, np.uint8, nbytes, offset).reshape(len(rows), -1)
    return payload


def _encode_rows(name: str, k: int, dtype: str, words: bytes) -> bytes:
    return fast.encode_matrix(name, (len(words) // k // fast.DTYPE_BYTES[dtype], k), dtype, words)


def lay_out(name: str, shape: tuple[int, ...], planes: Mapping[str, Words]) -> Words:
    """Puts whole planes in their places; bytes between them are zero."""
    payload = np.zeros(layouts.payload_bytes(name, shape), np.uint8)
    where = layouts.planes(name, shape)
    assert where.keys() == planes.keys()
    for plane, (offset, nbytes) in where.items():
        payload[offset : offset + nbytes] = as_bytes(planes[plane])
    return payload


def as_bytes(words: Words) -> Words:
    """Returns the little-endian bytes of an array in C order."""
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)


def sha256(path: Path) -> str:
    """Returns the digest of a file as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
