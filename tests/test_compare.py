"""What was lost against a source: every figure equals an independent computation over whole arrays."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_directory
from commands import run, source_arguments
from miniatures import ROOT
from oracle import container
from oracle.encoders import GROUPED
from oracle.values import reconstruct
from pipeline import converted, planned, stand_in_places

from ninfer_convert.artifact import pieces
from ninfer_convert.artifact.compare import Comparison, ObjectLoss, compare_with_source
from ninfer_convert.artifact.compare_text import comparison_csv, comparison_text
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.stats import loss
from ninfer_convert.errors import ArtifactError, SourceError
from ninfer_convert.stand_in.checkpoints import StandIn

DEMO = ROOT / "recipes" / "demo.yaml"
MINILM = ROOT / "recipes" / "minilm-l6-v2.yaml"
ENCODERS = dict.fromkeys(("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"), "MAXABS_F16_RECIP_RNE_V1")
ENCODERS["FP8_E4M3FN_ROW_BF16S"] = "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"
SHAPE = (70, 200)
Array = np.ndarray[Any, Any]


def matrix(seed: int) -> Array:
    draw = np.random.default_rng(seed)
    wide = draw.standard_normal(SHAPE) * np.exp2(draw.integers(-6, 6, (SHAPE[0], 1)))
    wide[3] = 0
    wide[5, 64:128] = 0
    # scales of 1.4 times the least one of binary16, for each format one: they round down, and codes clip
    for row, qmax in enumerate((7, 15, 31, 127), 9):
        wide[row] = np.linspace(-1, 1, SHAPE[1]) * qmax * 1.4 * 2.0**-24
    return wide.astype(np.float32)


def words_of(dtype: str, values: Array) -> Array:
    if dtype == "F16":
        return values.astype("<f2").view("<u2")
    bits = values.astype("<f4").view("<u4")
    return bits if dtype == "F32" else (bits >> 16).astype("<u2")


def values_of(dtype: str, words: Array) -> Array:
    if dtype == "F16":
        return words.view("<f2").astype(np.float64)
    return (words if dtype == "F32" else words.astype("<u4") << 16).view("<f4").astype(np.float64)


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[str, Array]]:
    tensors = {dtype.lower(): (dtype, words_of(dtype, matrix(len(dtype)))) for dtype in ("F32", "BF16", "F16")}
    tensors["zero"] = ("F32", np.zeros(SHAPE, "<u4"))
    return tensors


@pytest.fixture(scope="module")
def checkpoint(sources: dict[str, tuple[str, Array]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("compare") / "model", {"model.safetensors": sources})


def recipe_of(directory: Path, *objects: str, ignore: str = "[]") -> Path:
    lines = ["schema: 1", "id: t", "artifact: {model_id: m, weights_id: w}", "evidence: none", "sources: {base: {}}"]
    if ignore != "[]":
        lines.append(f"ignore: {ignore}")
    path = directory / "recipe.yaml"
    path.write_text("\n".join([*lines, "objects:", *(f"  - {{{text}}}" for text in objects)]) + "\n", encoding="utf-8")
    return path


def encoded(name: str, format_name: str, value: str, shape: tuple[int, int] = SHAPE) -> str:
    return (
        f"name: {name}, shape: {list(shape)}, format: {format_name}, encoder: {ENCODERS[format_name]}, value: {value}"
    )


@pytest.fixture(scope="module")
def every_format(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe of every encoder on every dtype, and its artifact."""
    directory = tmp_path_factory.mktemp("formats")
    objects = [
        encoded(f"{name}/{dtype}", name, dtype) for name in ENCODERS for dtype in ("f32", "bf16", "f16", "zero")
    ]
    recipe = recipe_of(directory, *objects)
    converted(recipe, directory / "a.ninfer", {"base": checkpoint})
    return recipe, directory / "a.ninfer"


def compared(artifact: Path, recipe: Path, places: Any, inputs: Any = None, **options: Any) -> Comparison:
    with planned(recipe, places, inputs) as plan, Artifact.open(artifact) as opened:
        return compare_with_source(opened, plan, **options)


def stored_objects(path: Path) -> dict[str, container.Tensor]:
    return {
        stored.name: stored
        for stored in container.parse(path.read_bytes())[2]
        if isinstance(stored, container.Tensor)
    }


def represented(stored: container.Tensor) -> Array:
    return np.array(reconstruct(stored.format, stored.shape, stored.payload), "<u4").view("<f4").astype(np.float64)


def require_independent(item: ObjectLoss, values: Array, other: Array) -> None:
    """Holds an object's figures to a computation over the whole arrays."""
    values, other = values.reshape(-1), other.reshape(-1)
    error = np.abs(other - values)
    norm, noise = np.linalg.norm(values.astype(np.longdouble)), np.linalg.norm(error.astype(np.longdouble))
    assert item.loss.elements == values.size
    assert item.loss.differing == np.count_nonzero(error)
    if norm == 0:
        assert (item.loss.relative_error, item.loss.sqnr_db) == (None, None)
    else:
        assert item.loss.relative_error == pytest.approx(float(noise / norm), rel=1e-12)
        ratio = None if noise == 0 else pytest.approx(float(-20 * np.log10(noise / norm)), abs=1e-9)
        assert item.loss.sqnr_db == ratio
    if noise == 0:
        assert (item.loss.largest, item.largest_at) == (None, None)
        return
    at = int(np.argmax(error))
    assert item.loss.largest is not None
    assert (item.loss.largest.error, item.loss.largest.index) == (error[at], at)
    assert (item.loss.largest.value, item.loss.largest.represented) == (values[at], other[at])
    assert item.largest_at == [int(index) for index in np.unravel_index(at, item.shape)]


def clipped_and_zero_groups(format_name: str, values: Array) -> tuple[int, int, int]:
    """Returns groups, zero groups and clipped groups of a canonical encoding, group by group in scalars."""
    group = GROUPED[format_name].group if format_name in GROUPED else values.shape[1]
    groups = zero = clipped = 0
    for row in values.astype(np.float32):
        for begin in range(0, len(row), group):
            part = row[begin : begin + group]
            groups += 1
            if not part.any():
                zero += 1
            elif format_name in GROUPED:
                scale = np.float16(np.abs(part).max() / np.float32(GROUPED[format_name].qmax))
                inverse = np.float32(1) / np.float32(max(scale, np.float16(2.0**-24)))
                codes = [int(np.rint(np.float32(value) * inverse)) for value in part]
                clipped += max(codes) > GROUPED[format_name].qmax or min(codes) < GROUPED[format_name].qmin
    return groups, zero, clipped


@pytest.mark.parametrize("format_name", ENCODERS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "zero"])
def test_figures_of_every_format_equal_an_independent_computation(
    every_format: tuple[Path, Path],
    checkpoint: Path,
    sources: dict[str, tuple[str, Array]],
    format_name: str,
    dtype: str,
) -> None:
    recipe, artifact = every_format
    found = compared(artifact, recipe, {"base": checkpoint})
    name = f"{format_name}/{dtype}"
    item = next(item for item in found.objects if item.name == name)
    values = values_of(*sources[dtype])
    assert (item.shape, item.format) == (SHAPE, format_name)
    require_independent(item, values, represented(stored_objects(artifact)[name]))
    counts = clipped_and_zero_groups(format_name, values)
    assert (item.loss.groups, item.loss.zero_groups, item.loss.clipped_groups) == counts
    if format_name != "FP8_E4M3FN_ROW_BF16S" and dtype == "f32":
        assert counts[2] > 0


def test_figures_do_not_depend_on_threads_or_on_luck(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    results = [compared(artifact, recipe, {"base": checkpoint}, threads=threads).as_json() for threads in (1, 2, 5, 5)]
    assert all(result == results[0] for result in results)


def test_figures_do_not_depend_on_the_size_of_pieces(
    every_format: tuple[Path, Path], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, artifact = every_format
    whole = compared(artifact, recipe, {"base": checkpoint})
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1000)
    for item, other in zip(whole.objects, compared(artifact, recipe, {"base": checkpoint}).objects, strict=True):
        assert (item.name, item.loss.largest) == (other.name, other.loss.largest)
        assert (item.loss.differing, item.loss.clipped_groups) == (other.loss.differing, other.loss.clipped_groups)
        error = item.loss.relative_error
        assert other.loss.relative_error == (None if error is None else pytest.approx(error, rel=1e-14))


def test_formats_together_are_their_objects_together(
    every_format: tuple[Path, Path], checkpoint: Path, sources: dict[str, tuple[str, Array]]
) -> None:
    recipe, artifact = every_format
    found = compared(artifact, recipe, {"base": checkpoint})
    stored = stored_objects(artifact)
    formats = {entry.format: entry for entry in found.formats()}
    assert set(formats) == set(ENCODERS)
    for name, entry in formats.items():
        values = np.concatenate([values_of(*sources[dtype]) for dtype in ("f32", "bf16", "f16", "zero")])
        other = np.concatenate([represented(stored[f"{name}/{dtype}"]) for dtype in ("f32", "bf16", "f16", "zero")])
        require = ObjectLoss(name, values.shape, name, entry.loss)
        error = np.abs(other - values.reshape(-1))
        norm = np.linalg.norm(values.reshape(-1).astype(np.longdouble))
        noise = np.linalg.norm(error.astype(np.longdouble))
        assert require.loss.relative_error == pytest.approx(float(noise / norm), rel=1e-12)
        assert require.loss.sqnr_db == pytest.approx(float(-20 * np.log10(noise / norm)), abs=1e-9)
        assert entry.loss.largest is not None
        assert entry.loss.largest.error == error.max()
        assert entry.largest_in == f"{name}/{('f32', 'bf16', 'f16')[int(np.argmax(error)) // math.prod(SHAPE)]}"
        assert entry.loss.elements == 4 * math.prod(SHAPE)


def test_the_worst_stand_first(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    found = compared(artifact, recipe, {"base": checkpoint})
    errors = [item.loss.relative_error for item in found.worst_first()]
    known = [error for error in errors if error is not None]
    assert known == sorted(known, reverse=True)
    assert errors[len(known) :] == [None] * len(ENCODERS)
    by_format = [entry.loss.relative_error for entry in found.formats()]
    assert by_format == sorted(by_format, key=lambda error: -(error or 0))
    assert found.formats()[0].format == "Q4G64_F16S"


def test_every_tensor_of_a_real_checkpoint(minilm: Path, tmp_path: Path) -> None:
    converted(MINILM, tmp_path / "a.ninfer", {"base": minilm})
    found = compared(tmp_path / "a.ninfer", MINILM, {"base": minilm})
    assert len(found.objects) == 90
    by_format = {entry.format: entry.loss for entry in found.formats()}
    assert list(by_format)[:5] == ["Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "BF16"]
    assert (by_format["FP32"].noise, by_format["I32"].noise) == (0, 0)
    item = next(item for item in found.objects if item.name == "layers/3/attention/query_key")
    with planned(MINILM, {"base": minilm}) as plan:
        parts = []
        for part in ("query", "key"):
            info = plan.sources["base"].tensors[f"encoder.layer.3.attention.self.{part}.weight"]
            data = (minilm / "model.safetensors").read_bytes()[info.begin : info.begin + info.nbytes]
            parts.append(np.frombuffer(data, "<f4").astype(np.float64))
    require_independent(item, np.concatenate(parts), represented(stored_objects(tmp_path / "a.ninfer")[item.name]))


# Before rounding


def test_a_rounded_object_is_measured_against_what_was_rounded(
    tmp_path: Path, checkpoint: Path, sources: dict[str, tuple[str, Array]]
) -> None:
    wide, half = values_of(*sources["f32"]), values_of(*sources["f16"])
    kept = values_of(*sources["bf16"])

    def cast(value: str, to: str, rule: str) -> str:
        return f"{{cast: {{of: {value}, to: {to}, rule: {rule}}}}}"

    rounded = cast("f32", "BF16", "nearest-even")
    joined = f"{{concat: [bf16, {rounded}, {{slice: {{of: {cast('f16', 'BF16', 'nearest-even')}, span: [3, 10]}}}}]}}"
    turned = f"{{transpose: {{of: {{reshape: {{of: {rounded}, to: [200, 70]}}}}}}}}"
    recipe = recipe_of(
        tmp_path,
        f"name: rounded, shape: [70, 200], format: BF16, value: {rounded}",
        f"name: joined, shape: [147, 200], format: BF16, value: {joined}",
        f"name: turned, shape: [70, 200], format: BF16, value: {turned}",
        f"name: same, shape: [70, 200], format: BF16, value: {{same: [{rounded}, {rounded}]}}",
        f"name: widened, shape: [70, 200], format: FP32, value: {cast('bf16', 'FP32', 'exact')}",
        "name: plain, shape: [70, 200], format: BF16, value: bf16",
        encoded("twice", "Q6G64_F16S", rounded),
        ignore="[zero]",
    )
    converted(recipe, tmp_path / "a.ninfer", {"base": checkpoint})
    found = {item.name: item for item in compared(tmp_path / "a.ninfer", recipe, {"base": checkpoint}).objects}
    stored = stored_objects(tmp_path / "a.ninfer")
    expected = {
        "rounded": wide,
        "joined": np.concatenate([kept, wide, half[3:10]]),
        "turned": wide.reshape(200, 70).T,
        "same": wide,
        "widened": kept,
        "plain": kept,
        "twice": wide,
    }
    assert list(found) == list(expected)
    for name, values in expected.items():
        require_independent(found[name], values, represented(stored[name]))
    assert found["rounded"].loss.noise > 0
    assert (found["widened"].loss.noise, found["plain"].loss.noise) == (0, 0)
    assert all(found[name].loss.groups == 0 for name in expected if name != "twice")


def test_copied_words_lose_nothing(demo: StandIn, tmp_path: Path) -> None:
    converted(DEMO, tmp_path / "a.ninfer", *stand_in_places(demo))
    found = compared(tmp_path / "a.ninfer", DEMO, *stand_in_places(demo))
    copied = [item for item in found.objects if item.format in ("NVFP4", "FP8_E4M3FN_ROW_BF16S")]
    assert len(copied) == 10
    for item in copied:
        assert (item.loss.relative_error, item.loss.differing, item.loss.clipped_groups) == (0, 0, None)
        assert item.loss.groups == math.prod(item.shape) // 16 if item.format == "NVFP4" else item.shape[0]
    ids = next(item for item in found.objects if item.format == "I32")
    assert (ids.loss.noise, ids.loss.elements) == (0, 320)
    assert ids.loss.signal > 0
    assert found.notes == ()


def test_words_that_were_changed_are_measured(demo: StandIn, tmp_path: Path) -> None:
    """One NVFP4 code, one FP8 row scale: the values behind them are what the comparison sees."""
    converted(DEMO, tmp_path / "a.ninfer", *stand_in_places(demo))
    before = stored_objects(tmp_path / "a.ninfer")
    for name, plane, byte in (
        ("text/layers/1/mlp/down", "code", 3 * 160 + 5),
        ("text/layers/3/attention/output", "scale", 2 * 77),
    ):
        with Artifact.open(tmp_path / "a.ninfer") as artifact:
            start = artifact.payload_offset + artifact.record(name).offset
            start += next(part.offset for part in artifact.geometry(name).planes if part.name == plane)
        with (tmp_path / "a.ninfer").open("r+b") as file:
            file.seek(start + byte)
            (old,) = file.read(1)
            file.seek(start + byte)
            file.write(bytes([old ^ 0x03]))
    found = compared(tmp_path / "a.ninfer", DEMO, *stand_in_places(demo))
    after = stored_objects(tmp_path / "a.ninfer")
    lossy = [item.name for item in found.worst_first() if item.loss.differing and item.loss.clipped_groups is None]
    assert set(lossy) == {"text/layers/1/mlp/down", "text/layers/3/attention/output"}
    for item in found.objects:
        if item.name in lossy:
            require_independent(item, represented(before[item.name]), represented(after[item.name]))


# What cannot be compared


def test_objects_of_one_side_are_noted(every_format: tuple[Path, Path], checkpoint: Path, tmp_path: Path) -> None:
    _, artifact = every_format
    recipe = recipe_of(
        tmp_path,
        encoded("Q4G64_F16S/f32", "Q4G64_F16S", "f32"),
        encoded("other", "Q4G64_F16S", "bf16"),
        ignore="[zero, f16]",
    )
    found = compared(artifact, recipe, {"base": checkpoint})
    assert [item.name for item in found.objects] == ["Q4G64_F16S/f32"]
    assert found.notes == (
        "only the recipe has tensor 'other'; the artifact does not, so nothing was compared",
        "only the artifact has tensor 'Q4G64_F16S/bf16' and 18 more; the recipe does not, so nothing was compared",
    )


def test_another_format_than_the_recipe_says_is_measured_as_it_is(
    every_format: tuple[Path, Path], checkpoint: Path, tmp_path: Path, sources: dict[str, tuple[str, Array]]
) -> None:
    _, artifact = every_format
    recipe = recipe_of(tmp_path, encoded("Q4G64_F16S/f32", "W8G32_F16S", "f32"), ignore="[zero, f16, bf16]")
    (item,) = compared(artifact, recipe, {"base": checkpoint}).objects
    assert item.format == "Q4G64_F16S"
    require_independent(item, values_of(*sources["f32"]), represented(stored_objects(artifact)[item.name]))


def test_another_shape_is_refused(every_format: tuple[Path, Path], checkpoint: Path, tmp_path: Path) -> None:
    _, artifact = every_format
    reshaped = "{reshape: {of: f32, to: [200, 70]}}"
    recipe = recipe_of(
        tmp_path, encoded("Q4G64_F16S/f32", "Q4G64_F16S", reshaped, (200, 70)), ignore="[zero, f16, bf16]"
    )
    with pytest.raises(ArtifactError) as caught:
        compared(artifact, recipe, {"base": checkpoint})
    assert caught.value.messages == (
        f"{artifact}: object 'Q4G64_F16S/f32' has shape [70, 200]; the recipe makes [200, 70]",
    )


def test_a_recipe_of_another_artifact_is_refused(
    every_format: tuple[Path, Path], checkpoint: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, encoded("x", "Q4G64_F16S", "f32"), ignore="[zero, f16, bf16]")
    with pytest.raises(ArtifactError, match="no tensor of the recipe is in the artifact"):
        compared(every_format[1], recipe, {"base": checkpoint})


def test_files_that_change_meanwhile_are_refused(
    every_format: tuple[Path, Path], checkpoint: Path, tmp_path: Path
) -> None:
    recipe, original = every_format
    artifact = Path(shutil.copy(original, tmp_path / "copy.ninfer"))
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    with planned(recipe, {"base": source}) as plan, Artifact.open(artifact) as opened:
        os.utime(artifact, ns=(0, 0))
        with pytest.raises(ArtifactError, match="the file was changed while it was read"):
            compare_with_source(opened, plan)
    with planned(recipe, {"base": source}) as plan, Artifact.open(artifact) as opened:
        os.utime(source / "model.safetensors", ns=(0, 0))
        with pytest.raises(SourceError, match="model.safetensors"):
            compare_with_source(opened, plan)


def test_progress_counts_stored_bytes(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    recipe, artifact = every_format
    compared(artifact, recipe, {"base": checkpoint}, progress=lambda *call: calls.append(call))
    nbytes = sum(len(stored.payload) for stored in stored_objects(artifact).values())
    assert calls[-1] == (nbytes, nbytes)
    assert calls == sorted(calls)


# Text, CSV, JSON


def test_text_fits_80_columns_and_counts_what_is_exact(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    text = comparison_text(compared(artifact, recipe, {"base": checkpoint}))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "rel. error  SQNR dB  max error  clipped  zero  format (tensors)"
    assert lines[1].endswith("Q4G64_F16S (4)")
    assert lines[-1] == "5 of 20 tensors are exact"
    assert len([line for line in lines if line.endswith(("/f32", "/bf16", "/f16"))]) == 15


def test_a_name_that_is_too_long_or_not_printable_keeps_the_columns() -> None:
    name = "layers/" + "x" * 90 + "\x1b[2J"
    lossy = loss(np.ones(6, np.float32), np.full(6, 1.5, np.float32))
    found = Comparison((ObjectLoss(name, (2, 3), "BF16", lossy),), ())
    assert max(map(len, comparison_text(found).splitlines())) <= 80
    for text in (comparison_text(found), comparison_csv(found)):
        assert "\x1b" not in text
    assert found.as_json()["objects"][0]["name"] == name


def test_what_is_no_number_in_json_is_a_text() -> None:
    broken = loss(np.ones(3, np.float32), np.array([1, math.inf, math.nan], np.float32))
    found = Comparison((ObjectLoss("a", (3,), "BF16", broken),), ())
    entry = json.loads(json.dumps(found.as_json(), allow_nan=False))["objects"][0]
    assert (entry["relative_error"], entry["sqnr_db"], entry["largest_error"]) == ("inf", "-inf", "inf")
    assert (entry["largest_at"], entry["largest_value"], entry["largest_represented"]) == ([1], 1.0, "inf")
    assert "inf" in comparison_text(found)


def test_csv_reads_back_as_the_figures(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    found = compared(artifact, recipe, {"base": checkpoint})
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert [row["object"] for row in rows] == [item.name for item in found.worst_first()]
    for row, item in zip(rows, found.worst_first(), strict=True):
        assert row["shape"] == "70x200"
        assert (row["relative_error"] and float(row["relative_error"])) == (
            "" if item.loss.relative_error is None else item.loss.relative_error
        )
        assert row["largest_at"] == ("" if item.largest_at is None else " ".join(map(str, item.largest_at)))
        assert int(row["clipped_groups"]) == item.loss.clipped_groups
        assert int(row["zero_groups"]) == item.loss.zero_groups


def test_the_command_prints_one_document(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    done = run("compare", artifact, "--recipe", recipe, "--source", checkpoint, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document["artifact"] == {"model_id": "m", "weights_id": "w"}
    assert document["recipe"]["id"] == "t"
    assert (document["max_error"], document["exceeded"]) == (None, [])
    assert {entry["format"] for entry in document["formats"]} == set(ENCODERS)
    with planned(recipe, {"base": checkpoint}) as plan, Artifact.open(artifact) as opened:
        found = compare_with_source(opened, plan)
    assert document["objects"] == found.as_json()["objects"]
    worst, best = document["objects"][0], document["objects"][-1]
    assert worst["relative_error"] > 0.05
    assert (best["relative_error"], best["sqnr_db"], best["largest_at"]) == (None, None, None)


def test_a_limit_decides_the_exit_code(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    with planned(recipe, {"base": checkpoint}) as plan, Artifact.open(artifact) as opened:
        errors = {item.name: item.loss.relative_error or 0 for item in compare_with_source(opened, plan).objects}
    arguments = ["compare", artifact, "--recipe", recipe, "--source", checkpoint, "--max-error"]
    worst = max(errors, key=lambda name: errors[name])
    done = run(*arguments, repr(errors[worst]))
    assert (done.code, done.err) == (0, "")
    limit = math.nextafter(errors[worst], 0)
    done = run(*arguments, repr(limit), "--json")
    assert (done.code, done.err) == (1, f"error: {worst}: the relative error is above --max-error {limit}\n")
    assert json.loads(done.out)["exceeded"] == [worst]
    beyond = [name for name, error in errors.items() if error > 0]
    assert len(run(*arguments, "0").err.splitlines()) == len(beyond)


def test_tables_go_to_standard_output(every_format: tuple[Path, Path], checkpoint: Path) -> None:
    recipe, artifact = every_format
    done = run("compare", artifact, "--recipe", recipe, "--source", checkpoint, "--csv")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].startswith("object,format,shape,elements,relative_error,sqnr_db,largest_error")
    assert len(done.out.splitlines()) == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to compare with: a second artifact, or --recipe and --source"),
        (["b", "--recipe", "r"], "name what to compare with: a second artifact, or --recipe and --source"),
        (["b", "--json", "--csv"], "--json and --csv are two ways to print one result; name one"),
        (
            ["b", "--max-error", "1"],
            "--source, --input, --prefix, --unpinned and --max-error need --recipe, not an artifact",
        ),
        (
            ["b", "--source", "x"],
            "--source, --input, --prefix, --unpinned and --max-error need --recipe, not an artifact",
        ),
        (["--recipe", "minilm-l6-v2", "--max-error", "nan"], "--max-error nan is no limit"),
        (["--recipe", "minilm-l6-v2"], "a source is not given; add --source base=WHERE"),
    ],
)
def test_options_that_contradict_are_refused(arguments: list[str], message: str) -> None:
    done = run("compare", "a", *arguments)
    assert (done.code, done.out, done.err) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize("limit", ["-1", "x", "-inf"])
def test_a_limit_is_no_negative_number(limit: str) -> None:
    assert run("compare", "a", "--recipe", "demo", "--max-error", limit).code == 2


def test_a_demo_is_compared_by_the_command(demo: StandIn, tmp_path: Path) -> None:
    converted(DEMO, tmp_path / "a.ninfer", *stand_in_places(demo))
    done = run("compare", tmp_path / "a.ninfer", "--recipe", DEMO, *source_arguments(demo, "base", "quantized"))
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
