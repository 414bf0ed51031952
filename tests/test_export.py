"""Exported values: the library opens them, they equal the oracle bit for bit, and a failure leaves nothing."""

from __future__ import annotations

import errno
import itertools
import json
import os
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from artifacts import FORMATS, TINY, tensor, write
from commands import run
from oracle import binary, container, layouts
from oracle.values import reconstruct
from safetensors import safe_open

from ninfer_convert.artifact import export, pieces
from ninfer_convert.artifact.export import export_artifact
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError, ConvertError, OutputError, UsageError
from ninfer_convert.run import writer
from ninfer_convert.source.checkpoint import open_checkpoint

Stored = container.Tensor | container.Resource
Array = np.ndarray[Any, Any]


def exported(path: Path, output: Path, **options: Any) -> tuple[Path, ...]:
    with Artifact.open(path) as artifact:
        return export_artifact(artifact, output, **options)


def words_in(path: Path) -> dict[str, Array]:
    """Returns every tensor of a file as the safetensors library reads it, as unsigned words."""
    assert ml_dtypes.bfloat16 is not None
    with safe_open(path, framework="numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 the handle is no mapping
    return {name: values.view(f"<u{values.dtype.itemsize}") for name, values in found.items()}


def dtypes_in(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def expected_words(stored: container.Tensor, dtype: str) -> Array:
    """Returns what a tensor must come out as, by the oracle."""
    if stored.format == "I32":
        return np.array(layouts.unpack_contiguous("I32", stored.payload), "<u4").reshape(stored.shape)
    if dtype == "bf16" and stored.format == "BF16":
        return np.array(layouts.unpack_contiguous("BF16", stored.payload), "<u2").reshape(stored.shape)
    words = reconstruct(stored.format, stored.shape, stored.payload)
    if dtype == "fp32":
        return np.array(words, "<u4").reshape(stored.shape)
    return np.array([rounded_to_bf16(word) for word in words], "<u2").reshape(stored.shape)


def rounded_to_bf16(word: int) -> int:
    value = binary.decode_f32(word)
    if not binary.is_finite(value):
        return word >> 16 if word & 0x7FFFFF == 0 else word >> 16 | 0x40
    return binary.round_bf16(value, negative_zero=word >> 31 == 1)


def every_format(shape: tuple[int, int], *leave_out: str) -> list[Stored]:
    return [tensor(f"w/{name}", name, shape) for name in FORMATS if name not in leave_out]


@pytest.mark.parametrize("shape", [(128, 64), (128, 192), (256, 320)])
@pytest.mark.parametrize("threads", [1, 3])
def test_fp32_is_the_reconstruction_bit_for_bit(tmp_path: Path, shape: tuple[int, int], threads: int) -> None:
    objects = every_format(shape)
    artifact = write(tmp_path / "a.ninfer", [*objects, container.Resource("r", b"text")])
    assert exported(artifact, tmp_path / "o.safetensors", threads=threads) == (tmp_path / "o.safetensors",)
    found = words_in(tmp_path / "o.safetensors")
    assert set(found) == {stored.name for stored in objects}
    for stored in objects:
        assert isinstance(stored, container.Tensor)
        assert np.array_equal(found[stored.name], expected_words(stored, "fp32")), stored.name
    dtypes = dtypes_in(tmp_path / "o.safetensors")
    assert dtypes == {stored.name: "I32" if stored.name == "w/I32" else "F32" for stored in objects}


def test_bf16_is_that_value_rounded_to_nearest_even(tmp_path: Path) -> None:
    objects = every_format((128, 192), "FP32")
    exported(write(tmp_path / "a.ninfer", objects), tmp_path / "o.safetensors", dtype="bf16")
    found = words_in(tmp_path / "o.safetensors")
    for stored in objects:
        assert isinstance(stored, container.Tensor)
        assert np.array_equal(found[stored.name], expected_words(stored, "bf16")), stored.name
    dtypes = dtypes_in(tmp_path / "o.safetensors")
    assert dtypes == {stored.name: "I32" if stored.name == "w/I32" else "BF16" for stored in objects}


def test_every_tensor_of_the_golden_artifact(tmp_path: Path) -> None:
    exported(TINY, tmp_path / "o.safetensors")
    found = words_in(tmp_path / "o.safetensors")
    tensors = [stored for stored in container.parse(TINY.read_bytes())[2] if isinstance(stored, container.Tensor)]
    assert set(found) == {stored.name for stored in tensors}
    for stored in tensors:
        assert found[stored.name].shape == stored.shape
        assert np.array_equal(found[stored.name], expected_words(stored, "fp32")), stored.name


def test_every_bf16_word_survives_both_ways(tmp_path: Path) -> None:
    words = np.arange(65536, dtype="<u2")
    artifact = write(tmp_path / "a.ninfer", [container.Tensor("w", (256, 256), "BF16", words.tobytes())])
    exported(artifact, tmp_path / "o.safetensors", dtype="bf16")
    assert words_in(tmp_path / "o.safetensors")["w"].tobytes() == words.tobytes()
    exported(artifact, tmp_path / "o.safetensors", dtype="fp32", overwrite=True)
    assert np.array_equal(words_in(tmp_path / "o.safetensors")["w"].reshape(-1), words.astype("<u4") << 16)


def test_rounding_of_every_kind_of_binary32_word() -> None:
    tops = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF]
    lows = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    words = [sign << 31 | top << 16 | low for sign in (0, 1) for top in tops for low in lows]
    found = export._rounded_to_bf16(np.array(words, np.uint32))
    assert [int(word) for word in found] == [rounded_to_bf16(word) for word in words]


def test_fp32_words_are_kept_whatever_they_are(tmp_path: Path) -> None:
    words = [0x7F800001, 0xFFFFFFFF, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x7FC00000]
    payload = struct.pack("<7I", *words)
    artifact = write(
        tmp_path / "a.ninfer",
        [container.Tensor("f", (7,), "FP32", payload), container.Tensor("i", (7, 1), "I32", payload)],
    )
    exported(artifact, tmp_path / "o.safetensors")
    found = words_in(tmp_path / "o.safetensors")
    assert found["f"].tolist() == found["i"].reshape(-1).tolist() == words


def test_scalars_and_high_ranks_keep_their_shapes(tmp_path: Path) -> None:
    shapes = [(), (1,), (3, 1, 2, 1, 5), (1,) * 16]
    objects = [tensor(str(rank), "FP32", shape) for rank, shape in enumerate(shapes)]
    exported(write(tmp_path / "a.ninfer", objects), tmp_path / "o.safetensors")
    found = words_in(tmp_path / "o.safetensors")
    assert [found[stored.name].shape for stored in objects] == shapes
    assert [found[stored.name].tobytes() for stored in objects] == [stored.payload for stored in objects]


@pytest.mark.parametrize("elements", [1, 1000, 2**18])
def test_bytes_do_not_depend_on_pieces_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    artifact = write(tmp_path / "a.ninfer", every_format((128, 192)))
    exported(artifact, tmp_path / "one.safetensors", threads=1)
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", elements)
    exported(artifact, tmp_path / "other.safetensors", threads=4)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_every_tensor_begins_at_a_multiple_of_its_word(tmp_path: Path) -> None:
    objects = [tensor("b", "BF16", (3,)), tensor("i", "I32", (2,)), tensor("c", "BF16", (1,)), tensor("q", "I32", ())]
    exported(write(tmp_path / "a.ninfer", objects), tmp_path / "o.safetensors", dtype="bf16")
    data = (tmp_path / "o.safetensors").read_bytes()
    head = int.from_bytes(data[:8], "little")
    assert (8 + head) % 8 == 0
    header = json.loads(data[8 : 8 + head])
    assert header.pop("__metadata__") == {"format": "pt", "model_id": "test-model", "weights_id": "test-weights"}
    assert {name: entry["data_offsets"] for name, entry in header.items()} == {
        "i": [0, 8],
        "q": [8, 12],
        "b": [12, 18],
        "c": [18, 20],
    }


def test_names_of_any_script_are_kept(tmp_path: Path) -> None:
    names = ["层/0", "é", 'a"b\\', "\x1b[2J", "🙂", " "]
    objects = [tensor(name, "BF16", (2,)) for name in names]
    exported(write(tmp_path / "a.ninfer", objects), tmp_path / "o.safetensors")
    assert set(words_in(tmp_path / "o.safetensors")) == set(names)


# What is chosen


def test_globs_choose_tensors(tmp_path: Path) -> None:
    names = ["a/0/x", "a/1/x", "a/1/y", "b"]
    artifact = write(tmp_path / "a.ninfer", [tensor(name, "BF16", (2,)) for name in names])
    for patterns, expected in (
        (["a/*"], names[:3]),
        (["a/?/x", "b"], ["a/0/x", "a/1/x", "b"]),
        (["*x", "a/1/*"], names[:3]),
    ):
        exported(artifact, tmp_path / "o.safetensors", objects=patterns, overwrite=True)
        assert sorted(words_in(tmp_path / "o.safetensors")) == sorted(expected)


@pytest.mark.parametrize("pattern", ["x", "A/*", "text", "r\x1b"])
def test_a_glob_that_matches_no_tensor_is_refused(tmp_path: Path, pattern: str) -> None:
    artifact = write(tmp_path / "a.ninfer", [tensor("a/0", "BF16", (2,)), container.Resource("text", b"1")])
    with pytest.raises(UsageError) as caught:
        exported(artifact, tmp_path / "o.safetensors", objects=["a/*", pattern])
    assert caught.value.messages == (f"--objects {pattern.replace(chr(27), chr(92) + 'x1b')} matches no tensor",)
    assert names_in(tmp_path) == ["a.ninfer"]


def test_fp32_tensors_are_refused_by_name_in_bf16(tmp_path: Path) -> None:
    objects = [tensor("a", "FP32", (2,)), tensor("b", "BF16", (2,)), tensor("c", "FP32", ())]
    artifact = write(tmp_path / "a.ninfer", objects)
    with pytest.raises(UsageError) as caught:
        exported(artifact, tmp_path / "o.safetensors", dtype="bf16")
    assert caught.value.messages == (
        "object 'a' is FP32, which BF16 cannot hold; --dtype fp32 exports them, --objects chooses others",
        "object 'c' is FP32 as well",
    )
    assert names_in(tmp_path) == ["a.ninfer"]
    exported(artifact, tmp_path / "o.safetensors", dtype="bf16", objects=["b"])
    assert list(words_in(tmp_path / "o.safetensors")) == ["b"]


def test_an_artifact_without_tensors_is_refused(tmp_path: Path) -> None:
    artifact = write(tmp_path / "a.ninfer", [container.Resource("text", b"1")])
    with pytest.raises(ArtifactError, match="the artifact holds no tensor to export"):
        exported(artifact, tmp_path / "o.safetensors")


def test_the_name_that_safetensors_keeps_is_refused(tmp_path: Path) -> None:
    artifact = write(tmp_path / "a.ninfer", [tensor("__metadata__", "BF16", (2,)), tensor("b", "BF16", (2,))])
    with pytest.raises(UsageError, match="object '__metadata__' cannot be exported: safetensors keeps that name"):
        exported(artifact, tmp_path / "o.safetensors")
    assert exported(artifact, tmp_path / "o.safetensors", objects=["b"])


def test_a_header_longer_than_the_library_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "HEADER_LIMIT", 200)
    artifact = write(tmp_path / "a.ninfer", [tensor("x" * 100, "BF16", (2,))])
    with pytest.raises(UsageError, match="would have a header of 240 bytes; at most 200 fit"):
        exported(artifact, tmp_path / "o.safetensors")


# Shards


def shards(tmp_path: Path, sizes: Sequence[int], limit: int, **options: Any) -> tuple[Path, ...]:
    """Exports tensors of so many bytes in BF16."""
    objects = [tensor(str(index), "BF16", (size // 2,)) for index, size in enumerate(sizes)]
    artifact = write(tmp_path / "a.ninfer", objects)
    return exported(artifact, tmp_path / "o.safetensors", dtype="bf16", shard_bytes=limit, **options)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([10, 20, 30], 60, None),
        ([10, 20, 30], 59, [["0", "1"], ["2"]]),
        ([10, 20, 30], 30, [["0", "1"], ["2"]]),
        ([10, 20, 30], 29, [["0"], ["1"], ["2"]]),
        ([10, 20, 30], 1, [["0"], ["1"], ["2"]]),
        ([100, 2, 100], 50, [["0"], ["1"], ["2"]]),
        ([100], 50, None),
    ],
)
def test_tensors_beyond_the_limit_go_into_the_next_file(
    tmp_path: Path, sizes: list[int], limit: int, expected: list[list[str]] | None
) -> None:
    written = shards(tmp_path, sizes, limit)
    if expected is None:
        assert [path.name for path in written] == ["o.safetensors"]
        return
    count = len(expected)
    assert [path.name for path in written] == [
        *(f"o-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)),
        "o.safetensors.index.json",
    ]
    assert [sorted(words_in(path)) for path in written[:-1]] == expected
    index = json.loads(written[-1].read_bytes())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert index["weight_map"] == {
        name: path.name for path, names in zip(written, expected, strict=False) for name in names
    }
    assert not (tmp_path / "o.safetensors").exists()


def test_shards_hold_what_one_file_would(tmp_path: Path) -> None:
    artifact = write(tmp_path / "a.ninfer", every_format((128, 192)))
    exported(artifact, tmp_path / "whole.safetensors")
    written = exported(artifact, tmp_path / "o.safetensors", shard_bytes=200_000, threads=3)
    assert len(written) == 6
    together = {name: words for path in written[:-1] for name, words in words_in(path).items()}
    whole = words_in(tmp_path / "whole.safetensors")
    assert together.keys() == whole.keys()
    assert all(np.array_equal(together[name], whole[name]) for name in whole)


def test_shards_are_a_checkpoint_that_can_be_converted_again(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    artifact = write(tmp_path / "a.ninfer", every_format((128, 192)))
    exported(artifact, directory / "model.safetensors", shard_bytes=200_000)
    with open_checkpoint(directory) as checkpoint:
        assert set(checkpoint.tensors) == {f"w/{name}" for name in FORMATS}
        assert checkpoint.warnings == ()


@pytest.mark.parametrize("limit", [0, -5])
def test_a_shard_has_room(tmp_path: Path, limit: int) -> None:
    with pytest.raises(UsageError, match=f"a shard of {limit} bytes holds nothing"):
        shards(tmp_path, [10], limit)


# Files


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_output_is_known_by_its_suffix(tmp_path: Path) -> None:
    for name in ("o", "o.bin", "o.safetensors.gz", "\x1b"):
        with pytest.raises(UsageError, match="does not end in .safetensors, by which it will be known"):
            exported(TINY, tmp_path / name)


@pytest.mark.parametrize("existing", ["o-00002-of-00003.safetensors", "o.safetensors.index.json"])
def test_existing_files_are_replaced_only_when_asked(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_bytes(b"dear")
    with pytest.raises(UsageError, match=f"{existing} exists; --overwrite replaces it"):
        shards(tmp_path, [10, 10, 10], 10)
    assert names_in(tmp_path) == sorted(["a.ninfer", existing])
    assert (tmp_path / existing).read_bytes() == b"dear"
    assert len(shards(tmp_path, [10, 10, 10], 10, overwrite=True)) == 4
    assert (tmp_path / existing).read_bytes() != b"dear"


def test_the_artifact_is_never_replaced(tmp_path: Path) -> None:
    artifact = write(tmp_path / "a.ninfer", [tensor("a", "BF16", (2,))])
    before = artifact.read_bytes()
    os.link(artifact, tmp_path / "o.safetensors")
    done = run("export", artifact, "-o", tmp_path / "o.safetensors", "--overwrite")
    assert (done.code, done.out) == (2, "")
    assert "a source is never overwritten" in done.err
    assert artifact.read_bytes() == before


def test_a_missing_directory_is_an_input_output_failure(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is not a directory"):
        exported(TINY, tmp_path / "absent" / "o.safetensors")


@pytest.mark.parametrize("failing", ["pwrite", "fdatasync", "fsync", "posix_fallocate", "link"])
@pytest.mark.parametrize("call", [0, 2])
def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, call: int
) -> None:
    right, calls = getattr(os, failing), itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(*arguments)

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OutputError, match="No space left on device"):
        shards(tmp_path, [10, 10, 10], 10, threads=1)
    assert names_in(tmp_path) == ["a.ninfer"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shards(tmp_path, [10, 10, 10], 10, progress=stop)
    assert names_in(tmp_path) == ["a.ninfer"]


def test_an_artifact_that_is_cut_or_changed_leaves_nothing(tmp_path: Path) -> None:
    artifact = write(tmp_path / "a.ninfer", [tensor("a", "BF16", (5000,))])
    with Artifact.open(artifact) as opened:
        os.utime(artifact, ns=(0, 0))
        with pytest.raises(ArtifactError, match="the file was changed while it was read"):
            export_artifact(opened, tmp_path / "o.safetensors")
        os.truncate(artifact, 5000)
        with pytest.raises(ArtifactError, match="the file was cut while it was read"):
            export_artifact(opened, tmp_path / "o.safetensors")
    assert names_in(tmp_path) == ["a.ninfer"]


def test_another_process_that_writes_the_same_output_is_named(tmp_path: Path) -> None:
    with writer.PartFile(tmp_path / "o-00001-of-00003.safetensors", 1):
        with pytest.raises(ConvertError, match="o-00001-of-00003.safetensors is being written by another process"):
            shards(tmp_path, [10, 10, 10], 10)


def test_what_a_dead_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "o.safetensors.part").write_bytes(b"half of something else, longer than the new one" * 99)
    shards(tmp_path, [10], 10)
    assert names_in(tmp_path) == ["a.ninfer", "o.safetensors"]
    assert words_in(tmp_path / "o.safetensors")["0"].nbytes == 10


def test_progress_counts_written_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    exported(TINY, tmp_path / "o.safetensors", progress=lambda *call: calls.append(call))
    tensors = [stored for stored in container.parse(TINY.read_bytes())[2] if isinstance(stored, container.Tensor)]
    total = sum(4 * int(np.prod(stored.shape)) for stored in tensors)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_memory_is_bounded_by_pieces(tmp_path: Path) -> None:
    rows, k = 4096, 4096
    stored = layouts.payload_bytes("W8G32_F16S", (rows, k))
    artifact = write(tmp_path / "a.ninfer", [container.Tensor("w", (rows, k), "W8G32_F16S", bytes(stored))])
    tracemalloc.start()
    try:
        (path,) = exported(artifact, tmp_path / "o.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4 * rows * k
    assert peak < 16 << 20


# The command


def test_the_command_names_its_files(tmp_path: Path) -> None:
    done = run("export", TINY, "-o", tmp_path / "o.safetensors")
    size = (tmp_path / "o.safetensors").stat().st_size
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"wrote {tmp_path / 'o.safetensors'}: {size:,} bytes")
    done = run("export", TINY, "-o", tmp_path / "s.safetensors", "--max-shard-size", "4KB", "-q")
    assert len(done.out.splitlines()) == len(list(tmp_path.glob("s*")))
    done = run("export", TINY, "-o", tmp_path / "o.safetensors")
    assert (done.code, done.out) == (2, "")
    assert "--overwrite" in done.err
    assert run("export", TINY, "-o", tmp_path / "o.safetensors", "--overwrite", "--objects", "w/*").code == 0
    assert set(words_in(tmp_path / "o.safetensors")) == {f"w/{index}" for index in range(6)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "bf16"], "error: object 'd/fp32' is FP32, which BF16 cannot hold; --dtype fp32 exports them"),
        (["--objects", "nothing"], "error: --objects nothing matches no tensor"),
        (["--max-shard-size", "big"], "error: 'big' is not a size"),
        (["--max-shard-size", "0"], "error: a shard of 0 bytes holds nothing"),
        (["--dtype", "fp16"], "Invalid value for '--dtype'"),
        (["--threads", "0"], "Invalid value for '--threads'"),
    ],
)
def test_the_command_refuses_what_cannot_be_meant(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run("export", TINY, "-o", tmp_path / "o.safetensors", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert names_in(tmp_path) == []


def test_an_output_is_asked_for() -> None:
    done = run("export", TINY)
    assert done.code == 2
    assert "Missing option '-o'" in done.err
