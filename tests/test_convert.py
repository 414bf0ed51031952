"""The pipeline: what comes out of every expression, and what is left where something goes wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_directory, write_safetensors
from commands import COMMAND, environment, run, start
from miniatures import ROOT
from oracle import container
from pipeline import converted, planned
from reference import Reference, sha256

from ninfer_convert import cli
from ninfer_convert.encode.block_maker import BlockMaker
from ninfer_convert.errors import EncodeError, SourceError
from ninfer_convert.plan.provenance import Outcome
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.convert import convert
from ninfer_convert.run.writer import PartFile
from ninfer_convert.stand_in.checkpoints import StandIn

GROUPED = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
FP8 = "FP8_E4M3FN_ROW_BF16S"
ENCODERS = {**dict.fromkeys(GROUPED, "MAXABS_F16_RECIP_RNE_V1"), FP8: "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"}
Words = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, tuple[str, Words]]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_recipe(path: Path, *objects: str, **sections: str) -> Path:
    """Writes a recipe of one source; objects are flow mappings without their braces."""
    lines = ["schema: 1", "id: test", "artifact: {model_id: m, weights_id: w}", "evidence: none", "sources: {base: {}}"]
    lines += [f"{name}: {text}" for name, text in sections.items()]
    lines += ["objects:", *(f"  - {{{text}}}" for text in objects)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def encoded(name: str, shape: tuple[int, int], format_name: str, value: str | None = None) -> str:
    encoder = f", encoder: {ENCODERS[format_name]}"
    return f"name: {name}, shape: {list(shape)}, format: {format_name}{encoder}, value: {value or name}"


def direct(name: str, shape: tuple[int, ...], format_name: str, value: str) -> str:
    return f"name: {name}, shape: {list(shape)}, format: {format_name}, value: {value}"


def write_holes(path: Path, shapes: Mapping[str, tuple[int, int]]) -> Path:
    """Writes BF16 matrices that are nothing but holes in the file."""
    header, end = {}, 0
    for name, (n, k) in shapes.items():
        header[name] = {"dtype": "BF16", "shape": [n, k], "data_offsets": [end, end + n * k * 2]}
        end += n * k * 2
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def finite_words(draw: np.random.Generator, dtype: str, n: int, k: int) -> tuple[str, Words]:
    """Rows of very different magnitudes, zeros of both signs and whole zero rows among them."""
    values = (draw.standard_normal((n, k)) * np.exp2(draw.integers(-20, 3, (n, 1)))).astype(np.float32)
    values[draw.random((n, k)) < 0.05] = -0.0
    values[:: max(2, n // 3)] = 0.0
    if dtype == "F16":
        return dtype, values.astype(np.float16).view("<u2")
    words = values.view("<u4")
    return dtype, (words >> 16).astype("<u2") if dtype == "BF16" else words


# --- what comes out ------------------------------------------------------------------------------------------------


def test_every_source_dtype_and_group_tail_in_every_encoded_format_equals_the_reference(tmp_path: Path) -> None:
    draw = np.random.default_rng(11)
    tensors: Tensors = {}
    objects = []
    for dtype in ("BF16", "F16", "F32"):
        for k in (1, 31, 32, 33, 63, 64, 65, 127, 128, 130, 200):
            n = 1 + k % 7
            tensors[f"{dtype}-{k}"] = finite_words(draw, dtype, n, k)
            objects += [encoded(f"{dtype}-{k}/{name}", (n, k), name, f"{dtype}-{k}") for name in (*GROUPED, FP8)]
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    recipe = write_recipe(tmp_path / "recipe.yaml", *objects)
    converted(recipe, tmp_path / "out", {"base": source})
    assert (tmp_path / "out").read_bytes() == Reference(load_recipe(recipe), {"base": source}).artifact()


def test_every_expression_equals_the_reference(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    any_word = draw.integers(0, 2**16, (24, 40), np.uint16)
    tensors: Tensors = {
        "a": ("BF16", any_word),
        "a.copy": ("BF16", any_word),
        "b": ("BF16", draw.integers(0, 2**16, (8, 40), np.uint16)),
        "cube": ("BF16", draw.integers(0, 2**16, (3, 5, 7), np.uint16)),
        "bank": finite_words(draw, "BF16", 12, 96),
        "half": ("F16", draw.integers(0, 2**16, (33,), np.uint16)),
        "finite-half": finite_words(draw, "F16", 4, 9),
        "single": finite_words(draw, "F32", 5, 11),
        "any-single": ("F32", draw.integers(0, 2**32, (6, 6), np.uint32)),
        "ids": ("I64", np.array([7, 0, 1, 2, 23, 7, 11])),
        "bytes": ("U8", np.arange(256, dtype=np.uint8)),
        "whole": ("F32", np.array([-7.0, 0.0, 16777216.0, -2147483648.0], "<f4").view("<u4")),
        "extremes": ("I64", np.array([[2147483647], [-2147483648]])),
        "lm_head": ("BF16", draw.integers(0, 2**16, (4, 4), np.uint16)),
    }
    tensors["bank"] = ("BF16", tensors["bank"][1].reshape(3, 4, 96))
    head = "{tied: {head: absent, embedding: lm_head}}"
    objects = [
        "resource: own/config, file: config.json",
        "resource: own/template, any: [{file: absent.jinja}, {file: tokenizer_config.json, member: chat_template}]",
        "resource: own/ranking, input: ranking",
        direct("slice0", (5, 40), "BF16", "{slice: {of: a, span: [3, 8]}}"),
        direct("slice1", (24, 9), "BF16", "{slice: {of: a, span: [31, 40], axis: 1}}"),
        direct("blocks", (12, 40), "BF16", "{block_rows: {of: a, block: 6, span: [2, 5]}}"),
        direct("flat", (960,), "BF16", "{reshape: {of: a, to: [960]}}"),
        direct("turned", (40, 24), "BF16", "{transpose: {of: a}}"),
        direct("cube", (7, 3, 5), "BF16", "{transpose: {of: cube, axes: [2, 0, 1]}}"),
        direct("tall", (32, 40), "BF16", "{concat: [b, a]}"),
        direct("wide", (8, 80), "BF16", "{concat: {of: [b, {slice: {of: a, span: [8, 16]}}], axis: 1}}"),
        direct("rows", (7, 40), "BF16", "{gather: {of: a, ids: ids}}"),
        direct("same", (24, 40), "BF16", "{same: [a, a.copy]}"),
        direct("head", (4, 4), "BF16", head),
        direct("wider", (24, 40), "FP32", "{cast: {of: a, to: FP32, rule: exact}}"),
        direct("half", (33,), "FP32", "{cast: {of: half, to: FP32, rule: exact}}"),
        direct("half-down", (4, 9), "BF16", "{cast: {of: finite-half, to: BF16, rule: nearest-even}}"),
        direct("down", (5, 11), "BF16", "{cast: {of: single, to: BF16, rule: nearest-even}}"),
        direct("single", (6, 6), "FP32", "any-single"),
        direct("bytes", (256,), "I32", "{cast: {of: bytes, to: I32, rule: checked}}"),
        direct("whole", (4,), "I32", "{cast: {of: whole, to: I32, rule: checked}}"),
        direct("extremes", (2, 1), "I32", "{cast: {of: extremes, to: I32, rule: checked}}"),
        direct("shortlist", (9,), "I32", "$short"),
        direct("by-shortlist", (9, 40), "BF16", "{gather: {of: a, ids: $short}}"),
        # A bank of experts [E, N, K] is stored as rows.
        encoded("bank", (12, 96), "Q4G64_F16S", "$rows"),
        encoded("mixed", (96, 24), "W8G32_F16S", "{transpose: {of: {concat: [$rows, $rows]}}}"),
    ]
    short = "{shortlist: {counts: ranking, candidates: 20, take: 9, special: tokenizer_config.json}}"
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        *objects,
        inputs="{ranking: {}}",
        values=f"{{short: {short}, rows: {{reshape: {{of: bank, to: [12, 96]}}}}}}",
        conditions="[{same: [a, a.copy]}]",
    )
    added = {str(token): {"content": "x", "special": token != 4} for token in (3, 4, 19, 25)}
    files = {
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": added, "chat_template": '"é"\n🙂'}).encode(),
    }
    config = {"text_config": {"tie_word_embeddings": True}}
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors}, config=config, files=files)
    (tmp_path / "ranking").write_bytes((np.arange(60, dtype="<i8") * 7919 % 5).tobytes())
    arguments = {"base": source}, {"ranking": tmp_path / "ranking"}
    converted(recipe, tmp_path / "out", *arguments)
    reference = Reference(load_recipe(recipe), *arguments)
    found = container.parse((tmp_path / "out").read_bytes())[2]
    expected = reference.objects()
    assert [stored.name for stored in expected if stored not in found] == []
    assert (tmp_path / "out").read_bytes() == reference.artifact()


# --- when something is wrong with a value --------------------------------------------------------------------------


def nan_at(draw: np.random.Generator, dtype: str, shape: tuple[int, int], row: int, column: int) -> tuple[str, Words]:
    _, words = finite_words(draw, dtype, *shape)
    words[row, column] = {"BF16": 0x7FC0, "F16": 0xFE01, "F32": 0x7F800001}[dtype]
    return dtype, words


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("format_name", [*GROUPED, FP8])
def test_a_nan_in_the_last_tensor_is_named_and_leaves_nothing(tmp_path: Path, dtype: str, format_name: str) -> None:
    draw = np.random.default_rng(2)
    good = finite_words(draw, dtype, 30, 200)
    bad = nan_at(draw, dtype, (50, 200), 49, 131)
    source = write_directory(tmp_path / "source", {"model.safetensors": {"a.good": good, "z.bad": bad}})
    fused = encoded("fused", (80, 200), format_name, "{concat: [a.good, z.bad]}")
    recipe = write_recipe(tmp_path / "recipe.yaml", fused)
    group = f", group {131 // (32 if format_name.startswith('W8') else 64)}" if format_name != FP8 else ""
    message = rf"^object fused: tensor base:z.bad, row 49, column 131{group}: value is NaN \(object row 79\); "
    (tmp_path / "out").mkdir()
    with pytest.raises(EncodeError, match=message + f"{format_name} cannot"):
        converted(recipe, tmp_path / "out" / "x", {"base": source}, block_bytes=2000)
    assert names(tmp_path / "out") == []


def test_a_scale_that_overflows_names_the_group_and_the_largest_that_fits_is_kept(tmp_path: Path) -> None:
    words = np.zeros((3, 128), "<u2")
    words[2, 64] = 0x48E0
    source = tmp_path / "model.safetensors"
    write_safetensors(source, {"w": ("BF16", words)})
    recipe = write_recipe(tmp_path / "recipe.yaml", encoded("w", (3, 128), "Q4G64_F16S"))
    message = r"^object w: tensor base:w, row 2, column 64, group 1: scale 65536 is not finite in binary16"
    with pytest.raises(EncodeError, match=message):
        converted(recipe, tmp_path / "out", {"base": source})
    words[2, 64] = 0x48DF
    write_safetensors(source, {"w": ("BF16", words)})
    converted(recipe, tmp_path / "out", {"base": source})
    payload = container.parse((tmp_path / "out").read_bytes())[2][0].payload
    assert payload[-2:] == (0x7BF7).to_bytes(2, "little")
    assert payload[2 * 64 + 32] == 7


@pytest.mark.parametrize("word", [0x7F, 0xFF, 0x80, 0x90])
def test_an_nvfp4_scale_that_is_no_scale_names_row_and_block(tmp_path: Path, word: int) -> None:
    scales = np.full((256, 8), 0x38, np.uint8)
    scales[131, 5] = word
    tensors: Tensors = {
        "m.weight_packed": ("U8", np.zeros((256, 64), np.uint8)),
        "m.weight_scale": ("F8_E4M3", scales),
        "m.weight_global_scale": ("F32", np.array([0x3F800000], "<u4")),
    }
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    moved = "words: {concat: [{slice: {of: m, span: [128, 256]}}, {slice: {of: m, span: [0, 128]}}]}"
    recipe = write_recipe(tmp_path / "recipe.yaml", f"name: w, shape: [256, 128], format: NVFP4, {moved}")
    message = rf"^object w: tensor base:m.weight_scale, row 131, block 5: scale word 0x{word:02x}"
    with pytest.raises(EncodeError, match=message):
        converted(recipe, tmp_path / "out", {"base": source})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row_scale", "code", "message"),
    [
        (0x7F80, 0x00, r"tensor base:m.weight_scale, row 6: row scale word 0x7f80 is \+Inf"),
        (0x8000, 0x00, r"tensor base:m.weight_scale, row 6: row scale word 0x8000 is negative zero"),
        (0x7FC1, 0x00, r"tensor base:m.weight_scale, row 6: row scale word 0x7fc1 is NaN"),
        (0x3F80, 0x7F, r"tensor base:m.weight, row 6, column 3: code word 0x7f is NaN"),
        (0x0000, 0x01, r"tensor base:m.weight, row 6, column 3: code word 0x01 in a row whose scale is zero"),
    ],
)
def test_fp8_words_that_are_not_legal_are_named(tmp_path: Path, row_scale: int, code: int, message: str) -> None:
    codes, scales = np.zeros((8, 5), np.uint8), np.full((8, 1), 0x3F80, "<u2")
    codes[6, 3], scales[6, 0] = code, row_scale
    tensors: Tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale": ("BF16", scales)}
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    rows = "words: {block_rows: {of: m, block: 4, span: [2, 4]}}"
    recipe = write_recipe(tmp_path / "recipe.yaml", f"name: w, shape: [4, 5], format: {FP8}, {rows}")
    with pytest.raises(EncodeError, match=message):
        converted(recipe, tmp_path / "out", {"base": source})
    assert not (tmp_path / "out").exists()


def large(draw: np.random.Generator) -> Words:
    return draw.integers(0, 2**16, (64, 96), np.uint16)


@pytest.mark.parametrize("as_condition", [False, True])
def test_tensors_that_must_be_equal_and_are_not_name_the_first_difference(tmp_path: Path, as_condition: bool) -> None:
    words = large(np.random.default_rng(8))
    other = words.copy()
    other[40, 17] ^= 0x8000
    other[63, 95] ^= 1
    source = write_directory(tmp_path / "source", {"model.safetensors": {"a": ("BF16", words), "b": ("BF16", other)}})
    if as_condition:
        recipe = write_recipe(
            tmp_path / "recipe.yaml", direct("a", (64, 96), "BF16", "a"), conditions="[{same: [a, b]}]"
        )
    else:
        recipe = write_recipe(tmp_path / "recipe.yaml", direct("a", (64, 96), "BF16", "{same: [a, b]}"))
    message = rf"tensor base:b, row 40, column 17: word 0x{other[40, 17]:04x} differs from 0x{words[40, 17]:04x} at"
    with pytest.raises(SourceError, match=message):
        converted(recipe, tmp_path / "out", {"base": source}, threads=1)
    assert not (tmp_path / "out").exists()


def test_a_rule_of_the_recipe_that_a_late_value_breaks_names_it(tmp_path: Path) -> None:
    words = np.zeros((300, 7), "<u4")
    words[299, 6] = 0xFF800000
    source = write_directory(tmp_path / "source", {"model.safetensors": {"w": ("F32", words)}})
    text = direct("w", (300, 7), "FP32", "w") + ", require: [finite]"
    recipe = write_recipe(tmp_path / "recipe.yaml", text)
    with pytest.raises(EncodeError, match="object w: tensor base:w, row 299, column 6: value -inf is not finite"):
        converted(recipe, tmp_path / "out", {"base": source}, block_bytes=100)
    assert not (tmp_path / "out").exists()


def test_the_command_line_reports_a_bad_value_in_one_message_and_keeps_what_was_there(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    tensors = {"good": finite_words(draw, "F32", 4, 64), "z": nan_at(draw, "F32", (9, 64), 8, 63)}
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    recipe = write_recipe(
        tmp_path / "recipe.yaml", encoded("good", (4, 64), "Q4G64_F16S"), encoded("z", (9, 64), "Q6G64_F16S")
    )
    digest = sha256(source / "model.safetensors")
    output = tmp_path / "out.ninfer"
    output.write_bytes(b"old")
    done = run("run", recipe, "--source", source, "-o", output, "--overwrite")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: object z: tensor base:z, row 8, column 63, group 0: value is NaN (object row 8); "
        "Q6G64_F16S cannot store it\n"
    )
    assert output.read_bytes() == b"old"
    assert names(tmp_path) == ["out.ninfer", "recipe.yaml", "source"]
    assert sha256(source / "model.safetensors") == digest


# --- when the source or the disk fails -----------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Path]:
    """A recipe and a checkpoint of one tensor, in a directory of their own."""
    tensors = {"w": finite_words(np.random.default_rng(4), "BF16", 64, 128)}
    source = write_directory(tmp_path / "in" / "source", {"model.safetensors": tensors})
    (tmp_path / "out").mkdir()
    return write_recipe(tmp_path / "in" / "recipe.yaml", encoded("w", (64, 128), "Q5G64_F16S")), source


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, r"model\.safetensors: tensor w: file changed or truncated while reading: .* got \d+ of 1024"),
        (touch, r"model\.safetensors: file changed while reading: it was written to"),
        (replace, r"model\.safetensors: file changed while reading: another file took its place"),
        (Path.unlink, r"model\.safetensors: no such file or directory"),
    ],
)
def test_a_source_that_changes_under_the_run_ends_it_and_leaves_nothing(
    plain: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    message: str,
) -> None:
    recipe, source = plain
    make, calls = BlockMaker.make, iter(range(1000))

    def changing(maker: BlockMaker, *arguments: Any) -> Any:
        if next(calls) == 3:
            change(source / "model.safetensors")
        return make(maker, *arguments)

    monkeypatch.setattr(BlockMaker, "make", changing)
    with pytest.raises(SourceError, match=message):
        converted(recipe, tmp_path / "out" / "x", {"base": source}, threads=1, block_bytes=256 * 4)
    assert names(tmp_path / "out") == []


def test_a_file_size_limit_is_an_output_failure_and_leaves_nothing(plain: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, source = plain
    output = tmp_path / "out" / "x.ninfer"
    command = [*COMMAND, "run", str(recipe), "--source", str(source), "-o", str(output)]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert (done.returncode, done.stdout) == (74, "")
    assert done.stderr == f"error: cannot reserve {output}.part (9472 bytes): File too large\n"
    assert names(tmp_path / "out") == []


def test_an_out_of_memory_block_names_the_object(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    recipe, source = plain
    monkeypatch.setattr(BlockMaker, "make", exhausted)
    with pytest.raises(EncodeError, match=r"^object w: out of memory: rows \[0, 64\) take \d+ bytes"):
        converted(recipe, tmp_path / "out" / "x", {"base": source})
    assert names(tmp_path / "out") == []


# --- publication ---------------------------------------------------------------------------------------------------


def test_the_output_has_its_name_only_when_complete(plain: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, source = plain
    output = tmp_path / "out" / "x"
    seen = []

    def before_publish(outcome: Outcome) -> None:
        seen.append((output.exists(), outcome.file_sha256 == sha256(output.with_name("x.part"))))

    outcome = converted(recipe, output, {"base": source}, before_publish=before_publish)
    assert seen == [(False, True)]
    assert names(output.parent) == ["x"]
    assert outcome.file_sha256 == sha256(output)
    assert outcome.digests == (hashlib.sha256(output.read_bytes()[4096:]).hexdigest(),)


def test_a_publication_that_fails_leaves_nothing(plain: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, source = plain

    def before_publish(_: Outcome) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        converted(recipe, tmp_path / "out" / "x", {"base": source}, before_publish=before_publish)
    assert names(tmp_path / "out") == []


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    make = BlockMaker.make

    def slow(maker: BlockMaker, *arguments: Any) -> Any:
        time.sleep(0.02)
        return make(maker, *arguments)

    monkeypatch.setattr(BlockMaker, "make", slow)


def test_progress_grows_to_all_bytes_from_the_calling_thread(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, source = plain
    calls: list[tuple[int, int, int]] = []
    slow_down(monkeypatch)
    with planned(recipe, {"base": source}) as plan:
        convert(
            plan,
            tmp_path / "out" / "x",
            threads=2,
            block_bytes=256 * 4,
            progress=lambda done, total: calls.append((done, total, threading.get_ident())),
        )
    assert {total for _, total, _ in calls} == {plan.payload_bytes}
    assert {thread for _, _, thread in calls} == {threading.get_ident()}
    amounts = [done for done, _, _ in calls]
    assert amounts == sorted(amounts)
    assert amounts[0] < amounts[-1] == plan.payload_bytes


def test_an_exception_in_the_progress_callback_stops_the_run(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, source = plain
    slow_down(monkeypatch)

    def fail(*_: object) -> None:
        raise RuntimeError("enough")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="enough"):
        converted(recipe, tmp_path / "out" / "x", {"base": source}, block_bytes=256 * 4, progress=fail)
    assert names(tmp_path / "out") == []
    assert set(threading.enumerate()) <= before


# --- the command line ----------------------------------------------------------------------------------------------


def options(plain: tuple[Path, Path], output: Path, *more: str) -> list[str]:
    return ["run", str(plain[0]), "--source", str(plain[1]), "-o", str(output), *more]


def test_result_on_stdout_words_on_stderr_and_two_files(plain: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out" / "x.ninfer"
    done = run(*options(plain, output))
    assert done.code == 0
    assert done.out == f"{sha256(output)}  {output}\n"
    assert done.err.startswith(f"wrote {output}: 1 object, 9,472 bytes (9.2 KiB), ")
    assert done.err.count("\n") == 1
    assert not {"\r", "\x1b"} & {*done.err, *done.out}
    assert names(output.parent) == ["x.ninfer", "x.ninfer.conversion.json"]
    report = json.loads((output.parent / "x.ninfer.conversion.json").read_bytes())
    assert report["artifact"] == {"model_id": "m", "weights_id": "w", "bytes": 9472, "sha256": sha256(output)}


def test_quiet_prints_nothing_and_report_names_another_place(plain: tuple[Path, Path], tmp_path: Path) -> None:
    output, report = tmp_path / "out" / "x.ninfer", tmp_path / "report.json"
    done = run(*options(plain, output, "-q", "--report", str(report)))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert names(output.parent) == ["x.ninfer"]
    assert json.loads(report.read_bytes())["artifact"]["sha256"] == sha256(output)


def test_a_dry_run_shows_the_plan_and_writes_nothing(plain: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(*options(plain, tmp_path / "out" / "x.ninfer", "--dry-run"))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "m/w by recipe test",
        "  1 tensor, 0 resources",
        "        1 Q5G64_F16S",
        "  reads  16,384 bytes (16.0 KiB)",
        "  writes 9,472 bytes (9.2 KiB)",
    ]
    assert names(tmp_path / "out") == []


def test_an_existing_output_is_kept_without_overwrite_and_replaced_with_it(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    output = tmp_path / "out" / "x.ninfer"
    output.write_bytes(b"dear")
    refused = run(*options(plain, output))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"error: {output} exists; --overwrite replaces it when the new one is complete\n"
    assert names(output.parent) == ["x.ninfer"]
    assert output.read_bytes() == b"dear"
    done = run(*options(plain, output, "--overwrite"))
    assert done.code == 0
    assert names(output.parent) == ["x.ninfer", "x.ninfer.conversion.json"]
    assert done.out.split()[0] == sha256(output)


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_a_source_is_never_overwritten(plain: tuple[Path, Path], tmp_path: Path, option: str) -> None:
    weights = plain[1] / "model.safetensors"
    digest = sha256(weights)
    alias = tmp_path / "alias.ninfer"
    alias.symlink_to(weights)
    places = ["-o", str(alias)] if option == "-o" else ["-o", str(tmp_path / "y.ninfer"), "--report", str(alias)]
    done = run("run", plain[0], "--source", plain[1], *places, "--overwrite")
    assert (done.code, done.out) == (2, "")
    assert "a source is never overwritten" in done.err
    assert sha256(weights) == digest


def test_output_and_report_must_be_two_files(plain: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out" / "x.ninfer"
    done = run(*options(plain, output, "--report", str(output)))
    assert (done.code, done.out) == (2, "")
    assert re.match(rf"error: .*--output.*{re.escape(str(output))}.*; name two", done.err)


def test_plan_prints_exactly_one_json_document(demo: StandIn) -> None:
    places = ["--source", f"base={demo.base}", "--source", f"quantized={demo.quantized}"]
    done = run("plan", "demo", *places, "--input", f"ranking={demo.ranking}", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert len(document["objects"]) == document["totals"]["objects"] == 56
    assert document["artifact"] == {"model_id": "demo", "weights_id": "nine-formats"}
    assert {"name", "kind", "shape", "format", "layout", "encoder", "offset", "bytes", "sources"} <= {
        *document["objects"][-1]
    }
    for member in (
        *("objects", "tensors", "resources", "tensor_bytes", "resource_bytes", "payload_bytes", "payload_offset"),
        *("file_bytes", "formats", "source_bytes", "peak_memory_bytes"),
    ):
        assert member in document["totals"], member
    end = max(entry["offset"] + entry["bytes"] for entry in document["objects"])
    assert document["totals"]["payload_bytes"] == end
    assert document["totals"]["file_bytes"] == document["totals"]["payload_offset"] + end


def test_a_deep_plan_finds_what_a_run_would_and_writes_nothing(tmp_path: Path) -> None:
    tensors = {"z": nan_at(np.random.default_rng(2), "F32", (9, 64), 8, 63)}
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    recipe = write_recipe(tmp_path / "recipe.yaml", encoded("z", (9, 64), "Q6G64_F16S"))
    shallow = run("plan", recipe, "--source", source)
    assert shallow.code == 0
    deep = run("plan", recipe, "--source", source, "--deep")
    assert (deep.code, deep.out) == (1, "")
    assert deep.err.startswith("error: object z: tensor base:z, row 8, column 63, group 0: value is NaN")
    assert names(tmp_path) == ["recipe.yaml", "source"]


def test_the_reported_peak_is_of_the_run_and_not_of_what_started_it(plain: tuple[Path, Path], tmp_path: Path) -> None:
    script = "import subprocess, sys; kept = bytearray(b'x') * (600 << 20); sys.exit(subprocess.call(sys.argv[1:]))"
    command = [*COMMAND, *options(plain, tmp_path / "out" / "x.ninfer", "-q")]
    subprocess.run([sys.executable, "-c", script, *command], check=True, env=environment())
    report = json.loads((tmp_path / "out" / "x.ninfer.conversion.json").read_bytes())
    assert 50 << 20 < report["run"]["peak_memory_bytes"] < 400 << 20


def test_memory_stays_below_its_limit_whatever_the_tensors_and_with_kernels_to_compile(tmp_path: Path) -> None:
    small, width, rows = [f"t{number}" for number in range(16)], 4096, 1024
    shapes = dict.fromkeys(small, (rows, width)) | {"large": (32 * rows, width)}
    path = write_holes(tmp_path / "model.safetensors", shapes)
    objects = [encoded(name, (rows, width), "Q4G64_F16S") for name in small]
    objects.append(encoded("joined", (8 * rows, width), "W8G32_F16S", f"{{concat: [{', '.join(small[:8])}]}}"))
    objects += [encoded(f"large/{name}", shapes["large"], name, "large") for name in ("Q6G64_F16S", FP8)]
    objects.append(direct("large/copy", shapes["large"], "BF16", "large"))
    recipe = write_recipe(tmp_path / "recipe.yaml", *objects)
    done = run(
        *("run", recipe, "--source", path, "-o", tmp_path / "out.ninfer", "--max-memory", "256MiB", "--threads", "4"),
        env=environment(NUMBA_CACHE_DIR=str(tmp_path / "cache")),
    )
    assert done.code == 0, done.err
    assert done.peak_bytes <= 256 << 20
    (tmp_path / "out.ninfer").unlink()


# --- signals and other processes -----------------------------------------------------------------------------------

ROWS = 65536


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A conversion that takes a second or two: mostly holes, a few rows of words. Its undisturbed digest."""
    directory = tmp_path_factory.mktemp("long")
    path = write_holes(directory / "model.safetensors", {"w": (ROWS, 5120)})
    words = finite_words(np.random.default_rng(3), "BF16", 7, 5120)[1].tobytes()
    with path.open("r+b") as file:
        begin = path.stat().st_size - ROWS * 10240
        for row in (1, ROWS // 2, ROWS - 7):
            file.seek(begin + row * 10240)
            file.write(words)
    recipe = write_recipe(directory / "recipe.yaml", encoded("w", (ROWS, 5120), "Q4G64_F16S"))
    converted(recipe, directory / "out", {"base": path})
    digest = sha256(directory / "out")
    (directory / "out").unlink()
    # One thread, so that no machine is done before the signal comes.
    return {"arguments": ["run", str(recipe), "--source", str(path), "--threads", "1"], "digest": digest}


def started(arguments: list[str], output: Path) -> subprocess.Popen[str]:
    """Starts a run and returns when it has begun to write."""
    process = start(*arguments, "-o", output)
    part = output.with_name(output.name + ".part")
    deadline = time.monotonic() + 60
    while not part.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_says_so_and_the_same_command_gives_the_undisturbed_bytes(
    long_run: Mapping[str, Any], tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "x.ninfer"
    process = started(long_run["arguments"], output)
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, "")
    assert err.strip() == "interrupted; give the same command again"
    assert not output.exists()
    assert not (tmp_path / "x.ninfer.conversion.json").exists()
    done = run(*long_run["arguments"], "-o", output)
    assert (done.code, done.out.split()[0]) == (0, long_run["digest"])
    assert sha256(output) == long_run["digest"]
    assert names(tmp_path) == ["x.ninfer", "x.ninfer.conversion.json"]


def test_more_signals_while_the_first_is_answered_change_nothing(long_run: Mapping[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "x.ninfer"
    process = started(long_run["arguments"], output)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.03)
    assert process.returncode == 75
    assert "Traceback" not in process.communicate()[1]
    assert not output.exists()
    assert run(*long_run["arguments"], "-o", output).out.split()[0] == long_run["digest"]


@pytest.mark.parametrize("outcome", [0, 1, KeyboardInterrupt])
def test_signals_that_come_when_the_outcome_is_known_are_ignored(
    monkeypatch: pytest.MonkeyPatch, outcome: int | type[BaseException]
) -> None:
    def ended() -> int:
        if isinstance(outcome, int):
            return outcome
        raise outcome

    handlers: dict[int, Any] = {}
    monkeypatch.setattr(cli, "_run", ended)
    monkeypatch.setattr(cli, "_outcome_stands", False)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    # It ends the process that way if another test has left a thread.
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == (outcome if isinstance(outcome, int) else 75)
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)


def test_an_interrupt_inside_an_executed_text_keeps_the_exit_code(tmp_path: Path) -> None:
    # Dataclasses are made that way, so importing is full of it.
    (tmp_path / "sitecustomize.py").write_text(
        "import ninfer_convert.cli\n"
        "def interrupted():\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        return 75\n"
        "ninfer_convert.cli._run = interrupted\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([*COMMAND], env=environment(PYTHONPATH=path), check=False)
    assert done.returncode == 75


def test_a_killed_run_leaves_no_artifact_and_does_not_block_the_next(
    long_run: Mapping[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "x.ninfer"
    process = started(long_run["arguments"], output)
    time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    assert {"x.ninfer.part"} <= {*names(tmp_path)} <= {"x.ninfer.part", "x.ninfer.part.journal"}
    done = run(*long_run["arguments"], "-o", output)
    assert (done.code, done.out.split()[0]) == (0, long_run["digest"])
    assert names(tmp_path) == ["x.ninfer", "x.ninfer.conversion.json"]


def test_of_two_runs_with_one_output_one_wins_whole(long_run: Mapping[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "x.ninfer"
    both = [start(*long_run["arguments"], "-o", output) for _ in range(2)]
    ended = [(*process.communicate(timeout=60), process.returncode) for process in both]
    winner, loser = sorted(ended, key=lambda end: end[2])
    assert (winner[2], winner[0].split()[0]) == (0, long_run["digest"])
    assert loser[0] == ""
    assert loser[2] in (2, 74)
    assert re.match(rf"error: {re.escape(str(output))} (is being written by|was made by|exists)", loser[1])
    assert sha256(output) == long_run["digest"]
    assert names(tmp_path) == ["x.ninfer", "x.ninfer.conversion.json"]
    report = json.loads((tmp_path / "x.ninfer.conversion.json").read_bytes())
    assert report["artifact"]["sha256"] == long_run["digest"]


def test_an_output_held_by_a_living_process_is_an_output_failure(plain: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out" / "x.ninfer"
    with PartFile(output, 10):
        done = run(*options(plain, output))
    assert (done.code, done.out) == (74, "")
    assert re.match(rf"error: {re.escape(str(output))} is being written by .*, which holds .*\.part\n$", done.err)
    assert names(output.parent) == []


def test_a_reader_of_stdout_that_goes_away_harms_nothing(plain: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out" / "x.ninfer"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*COMMAND, *options(plain, output)], stdout=write, stderr=subprocess.PIPE, text=True, check=False,
            env=environment(),
        )
    finally:
        os.close(write)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert output.exists()
