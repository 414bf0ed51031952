"""An artifact's represented values as safetensors, one file or shards with an index, in bounded memory.

Owns which tensors go into which file, and their header. Refuses to know what stored words mean (`decode`) and
how a file appears whole or not at all (`writer`). On neither side: it reads artifacts and writes other files.

Source: tensor-formats.md sections 3 and 6.2; cli.md, `export`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.decode import direct_words
from ninfer_convert.artifact.pieces import Piece, piece_values, pieces, read_piece
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError, UsageError, printable
from ninfer_convert.formats import BF16, FORMATS, FP32, I32
from ninfer_convert.layout import align_up
from ninfer_convert.run.writer import PartFile, require_output
from ninfer_convert.workers import for_each

Progress = Callable[[int, int], object]
"""Called with the tensor bytes written so far and their total, by one thread at a time."""

DTYPES = {"bf16": "BF16", "fp32": "F32"}
"""Safetensors dtype of the exported values, by the name of the choice."""
WORD_BYTES = {"BF16": 2, "F32": 4, "I32": 4}
SHARD_BYTES = 5 * 10**9
SUFFIX = ".safetensors"
METADATA = "__metadata__"
HEADER_LIMIT = 100_000_000
"""The safetensors library opens no file with a longer header, in bytes."""


@dataclass(frozen=True, slots=True)
class _Entry:
    record: TensorRecord
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.record.shape) * WORD_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _File:
    """One file to write: its first bytes, and where in it each tensor begins."""

    path: Path
    head: bytes
    begins: dict[str, int]
    nbytes: int


def export_artifact(
    artifact: Artifact,
    output: Path,
    *,
    objects: Sequence[str] = (),
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    protected: Iterable[Path] = (),
    threads: int = 2,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Writes the represented values of an artifact's tensors and returns the files, the index last.

    With `fp32` every value is the reference's binary32 reconstruction; with `bf16` that value rounded to nearest
    even, and a BF16 tensor's own words. I32 tensors stay I32. Tensors of more than `shard_bytes` in all go into
    `OUT-00001-of-0000N.safetensors` and so on, in payload order, with `OUT.safetensors.index.json`.

    Args:
        output: a path that ends in `.safetensors`.
        objects: globs of tensor names (`*` crosses slashes); none takes every tensor. Resources are left out.
        dtype: `bf16` or `fp32`.
        shard_bytes: tensor bytes of one file; a larger tensor has a file of its own.
        overwrite: replace existing files.
        protected: files that must not be replaced.
        threads: how many threads read, decode and write.

    Raises:
        UsageError: a glob matches no tensor, FP32 tensors were asked for in BF16, or an output may not be written.
        ArtifactError: the artifact has no tensor, or was cut.
        OutputError: writing failed. In every case nothing is left behind.

    Source: tensor-formats.md sections 3.1, 3.3, 3.4 and 6.2; cli.md, `export`.
    """
    if output.suffix != SUFFIX:
        raise UsageError(f"{printable(str(output))} does not end in {SUFFIX}, by which it will be known")
    if shard_bytes < 1:
        raise UsageError(f"a shard of {shard_bytes} bytes holds nothing")
    entries = [_entry(record, dtype) for record in _chosen(artifact, objects)]
    _require_exportable(entries, dtype)
    files = _files(artifact, output, entries, shard_bytes)
    for file in files:
        require_output(file.path, overwrite=overwrite, protected=protected)
    with contextlib.ExitStack() as stack:
        parts = [_part(stack, file) for file in files]
        for file, part in zip(files, parts, strict=True):
            part.begin()
            part.write(0, file.head)
        _write_values(artifact, entries, list(zip(files, parts, strict=True)), threads, progress)
        for part in parts:
            part.sync()
        _publish(files, parts, overwrite)
    return tuple(file.path for file in files)


def _chosen(artifact: Artifact, patterns: Sequence[str]) -> list[TensorRecord]:
    tensors = [record for record in artifact.objects.values() if isinstance(record, TensorRecord)]
    if not tensors:
        raise ArtifactError(f"{artifact.path}: the artifact holds no tensor to export")
    unmatched = [
        pattern for pattern in patterns if not any(fnmatch.fnmatchcase(record.name, pattern) for record in tensors)
    ]
    if unmatched:
        raise UsageError(*(f"--objects {printable(pattern)} matches no tensor" for pattern in unmatched))
    return [
        record
        for record in tensors
        if not patterns or any(fnmatch.fnmatchcase(record.name, pattern) for pattern in patterns)
    ]


def _entry(record: TensorRecord, dtype: str) -> _Entry:
    return _Entry(record, "I32" if record.format == I32.name else DTYPES[dtype])


def _require_exportable(entries: Sequence[_Entry], dtype: str) -> None:
    names = [printable(entry.record.name) for entry in entries if entry.record.format == FP32.name]
    if names and dtype == "bf16":
        advice = "--dtype fp32 exports them, --objects chooses others"
        raise UsageError(
            *(f"object '{name}' is FP32, which BF16 cannot hold; {advice}" for name in names[:1]),
            *(f"object '{name}' is FP32 as well" for name in names[1:]),
        )
    if any(entry.record.name == METADATA for entry in entries):
        raise UsageError(f"object '{METADATA}' cannot be exported: safetensors keeps that name for itself")


def _files(artifact: Artifact, output: Path, entries: Sequence[_Entry], shard_bytes: int) -> list[_File]:
    """Returns the files in order; more than one are followed by their index."""
    shards: list[list[_Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    if len(shards) == 1:
        return [_file(artifact, output, shards[0])]
    stem, count = output.name.removesuffix(SUFFIX), len(shards)
    paths = [output.with_name(f"{stem}-{index:05}-of-{count:05}{SUFFIX}") for index in range(1, count + 1)]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {
            entry.record.name: path.name for path, shard in zip(paths, shards, strict=True) for entry in shard
        },
    }
    text = (json.dumps(index, ensure_ascii=False, indent=1) + "\n").encode()
    files = [_file(artifact, path, shard) for path, shard in zip(paths, shards, strict=True)]
    return [*files, _File(output.with_name(output.name + ".index.json"), text, {}, len(text))]


def _file(artifact: Artifact, path: Path, entries: Sequence[_Entry]) -> _File:
    # words of four bytes first, so that every tensor begins at a multiple of its word
    ordered = sorted(entries, key=lambda entry: -WORD_BYTES[entry.dtype])
    identity = artifact.identity
    header: dict[str, object] = {
        # "pt" is what readers of model files look for; it names no contents
        METADATA: {"format": "pt", "model_id": identity.model_id, "weights_id": identity.weights_id}
    }
    begins, cursor = {}, 0
    for entry in ordered:
        begins[entry.record.name] = cursor
        end = cursor + entry.nbytes
        shape = list(entry.record.shape)
        header[entry.record.name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(align_up(len(text), 8))
    if len(text) > HEADER_LIMIT:
        raise UsageError(f"{printable(str(path))} would have a header of {len(text)} bytes; at most {HEADER_LIMIT} fit")
    head = len(text).to_bytes(8, "little") + text
    begins = {name: len(head) + begin for name, begin in begins.items()}
    return _File(path, head, begins, len(head) + cursor)


def _part(stack: contextlib.ExitStack, file: _File) -> PartFile:
    part = PartFile(file.path, file.nbytes)
    # an interrupted export is not resumed, so it leaves as little as one that failed
    stack.callback(part.__exit__, None, None, None)
    return part


def _write_values(
    artifact: Artifact,
    entries: Sequence[_Entry],
    files: Sequence[tuple[_File, PartFile]],
    threads: int,
    progress: Progress | None,
) -> None:
    places = {name: (part, begin) for file, part in files for name, begin in file.begins.items()}
    dtypes = {entry.record.name: entry.dtype for entry in entries}
    done, total = 0, sum(entry.nbytes for entry in entries)

    def write(piece: Piece) -> int:
        part, begin = places[piece.record.name]
        words = _words(artifact, piece, dtypes[piece.record.name])
        part.write(begin + piece.begin * words.dtype.itemsize, words)
        return words.nbytes

    def take(_: Piece, nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    every = (piece for entry in entries for piece in pieces(entry.record))
    for_each(every, lambda: write, take, threads=threads)
    if not artifact.is_unchanged():
        raise ArtifactError(f"{artifact.path}: the file was changed while it was read")


def _words(artifact: Artifact, piece: Piece, dtype: str) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Returns the little-endian words of a piece under a safetensors dtype."""
    numeric, planes = FORMATS[piece.record.format], read_piece(artifact, piece)
    if numeric in (I32, FP32) or (numeric == BF16 and dtype == "BF16"):
        return direct_words(numeric, planes).reshape(-1)
    words = piece_values(piece, planes).view(np.uint32)
    if dtype == "BF16":
        return _rounded_to_bf16(words).astype("<u2", copy=False)
    return words.astype("<u4", copy=False)


def _rounded_to_bf16(words: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Rounds binary32 words to nearest, ties to even; beyond the largest finite value lies infinity, NaN stays NaN."""
    odd = words >> np.uint32(16)
    odd &= np.uint32(1)
    odd += words
    odd += np.uint32(0x7FFF)
    odd >>= np.uint32(16)
    rounded = odd.astype(np.uint16)
    nan = (words & np.uint32(0x7FFFFFFF)) > 0x7F800000
    if nan.any():
        rounded[nan] = (words[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return rounded


def _publish(files: Sequence[_File], parts: Sequence[PartFile], overwrite: bool) -> None:
    """Gives all files their names; when one fails, those that had none before lose theirs again."""
    fresh: list[Path] = []
    try:
        for file, part in zip(files, parts, strict=True):
            is_fresh = not file.path.exists()
            part.publish(overwrite=overwrite)
            if is_fresh:
                fresh.append(file.path)
    except BaseException:
        for path in fresh:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
