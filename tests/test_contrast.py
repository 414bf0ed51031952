"""Two artifacts: equal or not, and every difference by its object."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import FORMATS, FP8, NVFP4, TINY, reframe, tensor, tiny_directory, write
from commands import run
from oracle import container, layouts
from oracle.values import reconstruct

from ninfer_convert.artifact import pieces
from ninfer_convert.artifact.compare_text import contrast_csv, contrast_text
from ninfer_convert.artifact.contrast import Contrast, Difference, compare_artifacts
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError

Objects = list[container.Tensor | container.Resource]
SHAPE = (128, 192)


def compared(first: Path, second: Path, **options: Any) -> Contrast:
    with Artifact.open(first) as one, Artifact.open(second) as other:
        return compare_artifacts(one, other, **options)


def tame(stored: container.Tensor) -> container.Tensor:
    """Returns a tensor whose values are finite in binary32, whatever was drawn."""
    words = np.frombuffer(stored.payload, "<u2").copy()
    if stored.format == FP8:
        words[layouts.planes(FP8, stored.shape)["scale"][0] // 2 :] &= 0x3FFF
    elif stored.format == "BF16":
        words &= 0xBFFF
    else:
        return stored
    return dataclasses.replace(stored, payload=words.tobytes())


def every_format() -> Objects:
    return [*(tame(tensor(name, name, SHAPE)) for name in FORMATS), container.Resource("r", b"resource")]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write(tmp_path / "first.ninfer", every_format())


def other(tmp_path: Path, objects: Sequence[container.Tensor | container.Resource], *identity: str) -> Path:
    path = tmp_path / "second.ninfer"
    path.write_bytes(container.build(*(identity or ("test-model", "test-weights")), objects))
    return path


def edited(stored: container.Tensor | container.Resource, place: int, mask: int = 0xFF) -> Any:
    payload = bytearray(stored.payload)
    payload[place] ^= mask
    return dataclasses.replace(stored, payload=bytes(payload))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_an_artifact_equals_itself(first: Path, threads: int) -> None:
    found = compared(first, first, threads=threads)
    assert found.is_equal
    assert (found.equal, found.differences, found.values.objects) == (10, (), ())
    assert found.nbytes == sum(len(stored.payload) for stored in every_format())


def test_spelling_of_the_directory_and_gaps_have_no_meaning(tmp_path: Path) -> None:
    directory = tiny_directory()
    directory["objects"][-1]["offset"] += 256
    data = reframe(directory)
    path = tmp_path / "wide.ninfer"
    path.write_bytes(data[: 4096 + 8960] + bytes(256) + data[4096 + 8960 :])
    found = compared(TINY, path)
    assert (found.is_equal, found.equal) == (True, 11)
    assert found.values.notes == (
        f"{path}: object 'd/i32' begins 256 bytes behind its first permitted place, byte 13056 of the file",
    )
    assert contrast_text(found).endswith(f"\nthe artifacts are equal\nnote: {found.values.notes[0]}")


@pytest.mark.parametrize(
    ("edit", "differences"),
    [
        (lambda objects: objects.pop(3), [("W8G32_F16S", "inventory", "W8G32_F16S [128, 192]", None)]),
        (lambda objects: objects.pop(), [("r", "inventory", "resource of 8 bytes", None)]),
        (
            lambda objects: objects.append(container.Resource("s\x1b", b"1")),
            [("s\x1b", "inventory", None, "resource of 1 bytes")],
        ),
        (lambda objects: objects.insert(0, objects.pop(3)), [(None, "order", "Q4G64_F16S", "W8G32_F16S")]),
        (
            lambda objects: objects.append(container.Resource("r", objects.pop().payload + b"+")),
            [("r", "bytes", "8", "9")],
        ),
        (
            lambda objects: objects.append(container.Tensor("r", (4,), "BF16", objects.pop().payload)),
            [("r", "kind", "resource", "tensor")],
        ),
        (
            lambda objects: objects.append(dataclasses.replace(objects.pop(FORMATS.index("BF16")), shape=(192, 128))),
            [(None, "order", "BF16", "FP32"), ("BF16", "shape", "[128, 192]", "[192, 128]")],
        ),
    ],
)
def test_differences_of_the_directory_are_told(
    tmp_path: Path, first: Path, edit: Callable[[Objects], Any], differences: list[tuple[Any, ...]]
) -> None:
    objects = every_format()
    edit(objects)
    found = compared(first, other(tmp_path, objects))
    assert not found.is_equal
    assert found.differences == tuple(Difference(*entry) for entry in differences)
    assert found.values.objects == ()
    told = contrast_text(found)
    assert max(map(len, told.splitlines())) <= 80
    assert "\x1b" not in told + contrast_csv(found)
    assert "the artifacts are equal" not in told


def test_identity_is_compared(tmp_path: Path, first: Path) -> None:
    found = compared(first, other(tmp_path, every_format(), "test-model", "other"))
    assert found.differences == (Difference(None, "weights_id", "test-weights", "other"),)
    assert found.equal == 10


def test_a_resource_that_differs_has_two_digests(tmp_path: Path, first: Path) -> None:
    objects = every_format()
    objects[-1] = edited(objects[-1], 3)
    found = compared(first, other(tmp_path, objects))
    digests = [hashlib.sha256(stored.payload).hexdigest() for stored in (every_format()[-1], objects[-1])]
    assert found.differences == (Difference("r", "sha256", *digests),)
    assert (found.equal, found.values.objects) == (9, ())


def values_of(stored: container.Tensor) -> np.ndarray[Any, Any]:
    if stored.format == "I32":
        return np.array(layouts.unpack_contiguous("I32", stored.payload), np.uint32).view(np.int32).astype(np.float64)
    words = reconstruct(stored.format, stored.shape, stored.payload)
    return np.array(words, "<u4").view("<f4").astype(np.float64)


@pytest.mark.parametrize("name", ["Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", NVFP4, FP8, "I32"])
def test_values_that_differ_are_measured_against_the_first(tmp_path: Path, first: Path, name: str) -> None:
    objects = every_format()
    at = FORMATS.index(name)
    before = objects[at]
    objects[at] = edited(objects[at], 70, 0x04)
    found = compared(first, other(tmp_path, objects))
    assert [(entry.object, entry.what) for entry in found.differences] == [(name, "sha256")]
    (item,) = found.values.objects
    values, changed = values_of(before), values_of(objects[at])
    error = np.abs(changed - values)
    assert item.loss.differing == np.count_nonzero(error) == 1
    assert item.loss.relative_error == pytest.approx(np.linalg.norm(error) / np.linalg.norm(values), rel=1e-12)
    assert item.loss.largest is not None
    assert (item.loss.largest.value, item.loss.largest.represented) == (values[error.argmax()], changed[error.argmax()])
    assert item.largest_at == [int(index) for index in np.unravel_index(int(error.argmax()), SHAPE)]


def test_bytes_that_differ_in_the_sign_of_zero_differ_in_no_value(tmp_path: Path) -> None:
    words = np.zeros(4, "<u2")
    one = write(tmp_path / "one.ninfer", [container.Tensor("a", (4,), "BF16", words.tobytes())])
    words[2] = 0x8000
    found = compared(one, other(tmp_path, [container.Tensor("a", (4,), "BF16", words.tobytes())]))
    assert [(entry.object, entry.what) for entry in found.differences] == [("a", "sha256")]
    (item,) = found.values.objects
    assert (item.loss.differing, item.loss.noise) == (0, 0)


@pytest.mark.parametrize("pair", [("Q4G64_F16S", NVFP4), (NVFP4, "W8G32_F16S"), ("BF16", NVFP4), (FP8, "BF16")])
@pytest.mark.parametrize("elements", [1000, 2**18])
def test_formats_of_one_shape_are_measured_against_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], elements: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", elements)
    shape = (256, 192)
    made = [tame(tensor("a", name, shape)) for name in pair]
    found = compared(write(tmp_path / "one.ninfer", made[:1]), other(tmp_path, made[1:]), threads=2)
    assert found.differences == (Difference("a", "format", *pair),)
    (item,) = found.values.objects
    values, represented = values_of(made[0]), values_of(made[1])
    error = np.linalg.norm((values - represented).astype(np.longdouble)) / np.linalg.norm(values.astype(np.longdouble))
    assert item.loss.relative_error == pytest.approx(float(error), rel=1e-12)
    assert item.format == pair[1]


def test_changed_files_are_refused(tmp_path: Path, first: Path) -> None:
    second = other(tmp_path, every_format())
    with Artifact.open(first) as one, Artifact.open(second) as two:
        os.utime(second, ns=(0, 0))
        with pytest.raises(ArtifactError, match="second.ninfer: the file was changed while it was read"):
            compare_artifacts(one, two)


# The command


def test_exit_code_tells_equal_from_different(tmp_path: Path, first: Path) -> None:
    done = run("compare", first, other(tmp_path, every_format()))
    total = sum(len(stored.payload) for stored in every_format())
    assert (done.code, done.err) == (0, "")
    assert done.out == f"10 objects are equal, {total:,} bytes\nthe artifacts are equal\n"
    done = run("compare", first, other(tmp_path, every_format()[:-1]))
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines()[-1] == "r: only in the first: resource of 8 bytes"


def test_the_document_holds_every_difference(tmp_path: Path, first: Path) -> None:
    objects = every_format()
    objects[3] = edited(objects[3], 70, 0x04)
    done = run("compare", first, other(tmp_path, objects), "--json")
    document = json.loads(done.out)
    assert (done.code, document["equal"], document["equal_objects"]) == (1, False, 9)
    assert [(entry["object"], entry["what"]) for entry in document["differences"]] == [("W8G32_F16S", "sha256")]
    assert document["objects"][0]["differing"] == 1
    done = run("compare", first, tmp_path / "second.ninfer", "--csv")
    (row,) = csv.DictReader(io.StringIO(done.out))
    assert (row["object"], row["what"], len(row["first"])) == ("W8G32_F16S", "sha256", 64)


def test_many_differences_are_cut_short_in_text(tmp_path: Path) -> None:
    names = [f"object/{index}" for index in range(60)]
    one = write(tmp_path / "one.ninfer", [container.Resource(name, b"1") for name in names])
    two = other(tmp_path, [container.Resource(name, b"2") for name in names])
    text = run("compare", one, two).out
    assert "and 10 more differences" in text.splitlines()
    assert len(text.splitlines()) == 1 + 50 * 1 + 1


@pytest.mark.parametrize("broken", [0, 1])
def test_a_file_that_is_no_artifact_is_refused(tmp_path: Path, first: Path, broken: int) -> None:
    paths = [first, first]
    paths[broken] = tmp_path / "text"
    paths[broken].write_text("not an artifact", encoding="utf-8")
    done = run("compare", *paths)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {paths[broken]}: file begins with ")
