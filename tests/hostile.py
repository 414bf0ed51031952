"""What is done with each kind of hostile input, and what must not happen: anything but a `ConvertError` and a message.

Shared by the tests, with a small budget, and by `scripts/fuzz.py`, with a large one.
"""

from __future__ import annotations

import gc
import json
import signal
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import strategies
from case_tools import fp8, nvfp4
from checkpoints import bf16, write_directory
from hypothesis import strategies as st

from ninfer_convert.artifact import inspection, inspection_text
from ninfer_convert.artifact.container import REPORT_SUFFIX
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.verify import verify_artifact, verify_report
from ninfer_convert.cli import artifact as artifact_commands
from ninfer_convert.errors import ConvertError
from ninfer_convert.plan.planner import Plan, make_plan
from ninfer_convert.plan.provenance import plan_json
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.convert import convert
from ninfer_convert.run.cuts import Share
from ninfer_convert.run.journal import differences, read_journal
from ninfer_convert.run.plan_file import read_plan_file
from ninfer_convert.run.share_journal import read_share_journal
from ninfer_convert.source.checkpoint import open_checkpoint
from ninfer_convert.source.header import parse_header

SECONDS = 2
"""Of processor time, for one input; the slowest small one takes a tenth of a second."""

SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of input: how it is made, and what is done with it in a directory prepared for it."""

    inputs: st.SearchStrategy[bytes]
    use: Callable[[bytes, Path], object]


class HangError(BaseException):
    """An input took too long; no part of the package may catch it."""


def require_contained(kind: Kind, data: bytes, directory: Path, seconds: float = SECONDS) -> str:
    """Uses one input and requires that nothing bad comes of it; returns `taken` or `refused`.

    Counting its memory makes it several times slower, so a large input needs more seconds.

    Raises:
        AssertionError: another exception, a message that is not printable, too much time or memory.
    """
    gc.collect(0)
    tracemalloc.start()
    try:
        with limited(seconds):
            kind.use(data, directory)
        outcome = "taken"
    except ConvertError as error:
        outcome = "refused"
        for message in error.messages:
            assert message, "an empty message"
            assert message.isprintable(), f"a message that is not printable: {message!r}"
            assert len(message) < 20_000, f"a message of {len(message)} characters: {message[:200]!r}"
    except HangError:
        raise AssertionError(f"more than {seconds} s") from None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= 4 * len(data) + SPARE_BYTES, f"{peak} bytes for an input of {len(data)}"
    return outcome


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises HangError when what is done inside takes so much processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def prepare(directory: Path) -> None:
    """Writes what the inputs meet: a checkpoint of two shards with an index, one that fits a recipe, an artifact."""
    shards = {
        "model-00001-of-00002.safetensors": {"one.a": bf16([[1.0, 2.0]]), "one.b": bf16([3.0])},
        "model-00002-of-00002.safetensors": {"two.a": bf16(np.ones((3, 3)))},
    }
    write_directory(directory / "indexed", shards)
    write_directory(directory / "configured", {"model.safetensors": {"a": bf16([1.0])}})
    draw = np.random.default_rng(3)
    tensors: dict[str, Any] = {"ids": ("I64", np.array([5, 2]))}
    for layer in range(4):
        tensors[f"m.{layer}.w"] = bf16(draw.standard_normal((8, 130)))
        tensors[f"m.{layer}.v"] = ("F32", np.linspace(0, 1, 5, dtype="<f4").view("<u4"))
    tensors |= nvfp4("n") | fp8("f", 5, 33)
    files = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps(strategies.TOKENIZER_CONFIG).encode(),
    }
    for name in ("fitting", "resourceful", "damaged"):
        write_directory(directory / name, {"model.safetensors": tensors}, config={"model_type": "many"}, files=files)
    (directory / "counts").write_bytes(np.arange(8, dtype="<i8").tobytes())
    (directory / "tiny.ninfer").write_bytes(strategies.TINY.read_bytes())


def use_header(data: bytes, directory: Path) -> None:
    header = parse_header(lambda begin, end: data[begin:end], len(data), "file")
    end = header.nbytes
    for entry in header.entries:
        assert entry.begin == end
        end += entry.nbytes
    assert end == len(data)


def use_index(data: bytes, directory: Path) -> None:
    (directory / "indexed" / "model.safetensors.index.json").write_bytes(data)
    _use_checkpoint(directory / "indexed")


def use_config(data: bytes, directory: Path) -> None:
    (directory / "configured" / "config.json").write_bytes(data)
    _use_checkpoint(directory / "configured")


def _use_checkpoint(directory: Path) -> None:
    with open_checkpoint(directory) as checkpoint:
        checkpoint.foreign_quantization()
        checkpoint.unmerged_adapter()
        checkpoint.nearest("one.c")
        for tensor in checkpoint.tensors.values():
            checkpoint.read_into(tensor, 0, np.empty(min(8, tensor.nbytes), np.uint8))
        for warning in checkpoint.warnings:
            assert warning.isprintable(), warning


def use_artifact(data: bytes, directory: Path) -> None:
    path = directory / "out.ninfer"
    path.write_bytes(data)
    found = verify_artifact(path, threads=1)
    for text in (*found.notes, *(problem.detail for problem in found.problems)):
        assert text.isprintable(), text
        assert len(text) < 2_000, text
    with Artifact.open(path) as artifact:
        summary = inspection.summary(artifact)
        shown = [inspection_text.summary_text(summary), inspection_text.objects_text(summary["objects"])]
        shown += [inspection_text.detail_text(inspection.detail(artifact, name)) for name in list(artifact.objects)[:2]]
    for text in shown:
        assert text.replace("\n", "").isprintable(), text


def use_report(data: bytes, directory: Path) -> None:
    path = directory / f"tiny.ninfer{REPORT_SUFFIX}"
    path.write_bytes(data)
    report = artifact_commands.report_beside(directory / "tiny.ninfer")
    assert report is not None
    assert inspection_text.report_text(report).replace("\n", "").isprintable()
    with Artifact.open(directory / "tiny.ninfer") as artifact:
        for problem in verify_report(artifact, report):
            assert problem.detail.isprintable(), problem


def use_journal(data: bytes, directory: Path) -> None:
    path = directory / "journal"
    path.write_bytes(data)
    found = read_journal(path, 4)
    if found is not None:
        assert found.claims.keys() <= set(range(4))
        assert 0 < found.nbytes <= len(data)
        assert all(text.isprintable() for text in differences(found.identity, strategies.IDENTITY))


def use_recipe_text(data: bytes, directory: Path) -> None:
    (directory / "recipe.yaml").write_bytes(data)
    load_recipe(directory / "recipe.yaml")


def use_recipe(data: bytes, directory: Path) -> None:
    (directory / "recipe.yaml").write_bytes(data)
    with _planned(directory, "fitting") as plan:
        json.dumps(plan_json(plan))


def use_resource(data: bytes, directory: Path) -> None:
    (directory / "recipe.yaml").write_text(strategies.written(strategies.RECIPE), encoding="utf-8")
    (directory / "resourceful" / "tokenizer_config.json").write_bytes(data)
    with _planned(directory, "resourceful") as plan:
        for note in plan.notes:
            assert len(note) < 3_000, note


def use_weights(data: bytes, directory: Path) -> None:
    """Converts damaged weights; what comes out is valid, or nothing does."""
    (directory / "recipe.yaml").write_text(strategies.written(strategies.RECIPE), encoding="utf-8")
    (directory / "damaged" / "model.safetensors").write_bytes(data)
    output = directory / "converted" / "out.ninfer"
    output.parent.mkdir(exist_ok=True)
    try:
        with _planned(directory, "damaged") as plan:
            convert(plan, output, threads=1)
        assert verify_artifact(output, threads=1).ok
    finally:
        assert [path.name for path in output.parent.iterdir()] in ([], [output.name])
        output.unlink(missing_ok=True)


@contextmanager
def _planned(directory: Path, source: str) -> Iterator[Plan]:
    recipe = load_recipe(directory / "recipe.yaml")
    with open_checkpoint(directory / source, name="base") as base:
        sources = dict.fromkeys(recipe.sources, base)
        inputs = dict.fromkeys(recipe.inputs, directory / "counts")
        yield make_plan(recipe, sources, inputs, unpinned=True)


def use_share_journal(data: bytes, directory: Path) -> None:
    path = directory / "journal"
    path.write_bytes(data)
    found = read_share_journal(path, Share(1, 2, 4096, 8192), strategies.IDENTITY)
    if found is not None:
        assert all(4096 <= segment.begin < segment.end <= 8192 for segment in found.segments)
        assert 0 < found.nbytes <= len(data)


def use_plan_file(data: bytes, directory: Path) -> None:
    path = directory / "plan.json"
    path.write_bytes(data)
    found = read_plan_file(str(path))
    assert all(text.isprintable() for text in differences(found.identity, strategies.IDENTITY))


def _weights() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        return Path(directory, "fitting", "model.safetensors").read_bytes()


WEIGHTS = _weights()
KINDS: Mapping[str, Kind] = {
    "header": Kind(strategies.headers(), use_header),
    "index": Kind(strategies.spliced(strategies.edited(strategies.INDEXES)), use_index),
    "config": Kind(strategies.spliced(strategies.edited(strategies.CONFIGS)), use_config),
    "artifact": Kind(strategies.artifacts(), use_artifact),
    "report": Kind(strategies.reports(), use_report),
    "journal": Kind(strategies.journals(), use_journal),
    "share-journal": Kind(strategies.journals(strategies.SHARE_JOURNAL), use_share_journal),
    "plan-file": Kind(strategies.spliced(strategies.edited((strategies.PLAN_FILE,))), use_plan_file),
    "resource": Kind(strategies.spliced(strategies.edited((strategies.TOKENIZER_CONFIG,))), use_resource),
    "weights": Kind(strategies.weights(WEIGHTS), use_weights),
    "recipe-text": Kind(strategies.recipe_texts(), use_recipe_text),
    "recipe": Kind(strategies.recipes(), use_recipe),
}
