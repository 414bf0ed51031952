"""A real checkpoint, made by people who never heard of this converter, comes out byte for byte as specified."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import Done, run
from miniatures import ROOT
from oracle import container
from reference import Reference, sha256
from safetensors import safe_open

from ninfer_convert.recipe.loader import load_recipe


@dataclass(frozen=True)
class Converted:
    """The artifact, its report, and what the command printed."""

    path: Path
    report: dict[str, Any]
    done: Done

    @property
    def objects(self) -> dict[str, container.Tensor | container.Resource]:
        return {stored.name: stored for stored in container.parse(self.path.read_bytes())[2]}


@pytest.fixture(scope="module")
def converted(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    path = tmp_path_factory.mktemp("minilm") / "minilm.ninfer"
    done = run("run", "minilm-l6-v2", "--source", minilm, "-o", path)
    assert done.code == 0, done.err
    report = json.loads(path.with_name(path.name + ".conversion.json").read_bytes())
    return Converted(path, report, done)


def test_every_object_and_the_whole_file_equal_the_oracle(minilm: Path, converted: Converted) -> None:
    recipe = load_recipe(ROOT / "recipes" / "minilm-l6-v2.yaml")
    # Spawned, not forked: the kernels of other tests may have left threads here.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        expected = Reference(recipe, {"base": minilm}, executor=executor).objects()
    found = converted.objects
    assert list(found) == [stored.name for stored in expected]
    assert [stored.name for stored in expected if found[stored.name] != stored] == []
    assert converted.path.read_bytes() == container.build("all-minilm-l6-v2", "mixed-demo", expected)


def test_every_tensor_is_used_or_ignored_by_name(minilm: Path, converted: Converted) -> None:
    with safe_open(minilm / "model.safetensors", framework="numpy") as file:
        names = set(file.keys())
        dtypes = Counter(file.get_slice(name).get_dtype() for name in names)
    used = {source["tensor"] for stored in converted.report["objects"] if stored["kind"] == "tensor"
            for source in stored["sources"]}
    assert names - used == {"pooler.dense.weight", "pooler.dense.bias"}
    assert used < names
    source = converted.report["sources"]["base"]
    assert source["dtypes"] == dict(dtypes) == {"F32": 103, "I64": 1}
    assert (source["tensors"], source["tensors_used"]) == (104, 102)
    assert [entry["bytes"] for entry in source["files"]] == [(minilm / "model.safetensors").stat().st_size]


def test_all_grouped_formats_and_direct_words_come_out(converted: Converted) -> None:
    found = Counter(stored.format for stored in converted.objects.values() if isinstance(stored, container.Tensor))
    assert found == {
        "BF16": 2,
        "FP32": 56,
        "I32": 1,
        "Q4G64_F16S": 6,
        "Q5G64_F16S": 6,
        "Q6G64_F16S": 12,
        "W8G32_F16S": 7,
    }
    assert converted.report["totals"]["formats"] == dict(found)


def test_the_report_tells_the_truth_about_every_object(converted: Converted) -> None:
    data = converted.path.read_bytes()
    report, objects = converted.report, converted.objects
    offset = report["totals"]["payload_offset"]
    assert [entry["name"] for entry in report["objects"]] == list(objects)
    for entry in report["objects"]:
        stored = objects[entry["name"]]
        payload = data[offset + entry["offset"] :][: entry["bytes"]]
        assert payload == stored.payload, entry["name"]
        assert entry["sha256"] == hashlib.sha256(payload).hexdigest(), entry["name"]
        if isinstance(stored, container.Tensor):
            assert (tuple(entry["shape"]), entry["format"]) == (stored.shape, stored.format)
            grouped = "S" in stored.format
            assert entry["encoder"] == ("MAXABS_F16_RECIP_RNE_V1" if grouped else None)
    assert report["artifact"]["bytes"] == report["totals"]["file_bytes"] == len(data)
    assert report["artifact"]["sha256"] == hashlib.sha256(data).hexdigest()


def test_the_report_says_how_each_value_came_to_be(converted: Converted) -> None:
    entries = {entry["name"]: entry for entry in converted.report["objects"]}
    assert entries["embeddings/position_ids"]["transform"] == "cast(base:embeddings.position_ids, I32, checked)"
    assert entries["embeddings/positions"]["transform"] == (
        "cast(base:embeddings.position_embeddings.weight, BF16, nearest-even)"
    )
    query_key = entries["layers/3/attention/query_key"]
    assert query_key["sources"] == [
        {
            "source": "base",
            "file": "model.safetensors",
            "tensor": f"encoder.layer.3.attention.self.{part}.weight",
            "dtype": "F32",
            "shape": [384, 384],
        }
        for part in ("query", "key")
    ]
    assert entries["frontend/vocab.txt"]["sources"] == [{"source": "base", "file": "vocab.txt", "member": None}]


def test_the_digest_goes_to_stdout_as_sha256sum_prints_it(converted: Converted) -> None:
    assert converted.done.out == f"{sha256(converted.path)}  {converted.path}\n"
    assert converted.done.err.splitlines()[-1].startswith(f"wrote {converted.path}: 97 objects, 20,904,192 bytes")


def test_a_small_checkpoint_needs_little_memory(converted: Converted) -> None:
    # Interpreter, numpy, numba and the kernels; the checkpoint itself is 90 MB and never there at once.
    assert converted.done.peak_bytes < 320 << 20
    assert abs(converted.report["run"]["peak_memory_bytes"] - converted.done.peak_bytes) < 16 << 20
