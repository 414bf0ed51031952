"""What goes wrong with checkpoints: files missing, doubled, damaged or foreign, and names that are not the recipe's.

Each test is one row of the list of known troubles, told end to end: right bytes, or one clean refusal.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from case_tools import (
    FP8,
    NVFP4,
    Q4,
    Case,
    entry,
    f32,
    filled,
    fp8,
    nvfp4,
    safetensors_bytes,
    snapshot,
    words_of,
)
from checkpoints import Words, write_safetensors

ONE, TWO = 0x3F80, 0x4000
INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def vector(word: int = ONE) -> tuple[str, Words]:
    return words_of("BF16", word, word)


def take(*names: str) -> list[str]:
    return [entry(name, [2], "BF16", name) for name in names]


class TestAbsentShards:
    """C01."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        case = Case(tmp_path)
        case.source(
            {
                FIRST: {"a": vector()},
                SECOND: {"b": vector(), "c": vector(), "d": vector()},
                THIRD: {"e": vector()},
            }
        )
        (case.sources["base"] / SECOND).unlink()
        (case.sources["base"] / THIRD).unlink()
        return case

    def test_every_absent_shard_is_named_once_with_the_first_tensor_it_should_hold(self, case: Case) -> None:
        case.recipe(*take("a", "c", "d", "e"), more="ignore: [b]\n")
        first, second = case.refused(messages=2)
        assert f"{SECOND} is absent from" in first
        assert "3 tensors there, b first, and the recipe needs 2 of them, c first" in first
        assert "download incomplete" in first
        assert f"{THIRD} is absent from" in second
        assert "1 tensor there, e first" in second

    def test_absent_shards_that_nothing_needs_are_warned_of(self, case: Case) -> None:
        case.recipe(*take("a"), more="ignore: [b, c, d, e]\n")
        ran = case.converted()
        assert case.words("a") == [ONE, ONE]
        assert ran.warnings == [
            f"warning: {shard} of source base is absent; no object needs it" for shard in (SECOND, THIRD)
        ]

    def test_an_optional_component_in_an_absent_shard_is_not_left_out(self, case: Case) -> None:
        case.recipe(
            *take("a"), f"{{component: mtp, optional: true, objects: [{take('e')[0]}]}}", more="ignore: [b, c, d]\n"
        )
        case.refused(f"{THIRD} is absent from", "e first")

    def test_a_module_in_an_absent_shard_is_told_from_one_that_lacks_a_field(self, case: Case) -> None:
        case.source({FIRST: {"a": vector()}, SECOND: nvfp4("m")})
        (case.sources["base"] / SECOND).unlink()
        case.recipe(*take("a"), entry("m", [128, 64], NVFP4, "m", words=True), more="ignore: [m.input_global_scale]\n")
        case.refused(f"{SECOND} is absent from", "4 tensors there", "download incomplete")

    def test_a_condition_on_an_absent_shard_names_it_too(self, case: Case) -> None:
        case.recipe(*take("a"), more="ignore: [c, d, e]\nconditions: [{same: [a, b]}]\n")
        case.refused(f"{SECOND} is absent from", "b first")


def test_the_index_decides_which_of_several_weight_files_is_read(case: Case) -> None:
    """C11."""
    directory = case.source({FIRST: {"w": vector(ONE)}})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"w": FIRST}}))
    write_safetensors(directory / "model.safetensors", {"w": vector(TWO)})
    write_safetensors(directory / "adapter_model.safetensors", {"w": vector(TWO)})
    write_safetensors(directory / "training" / "model.safetensors", {"w": vector(TWO)})
    (directory / "x.safetensors").mkdir()
    case.recipe(*take("w"))
    ran = case.converted()
    assert case.words("w") == [ONE, ONE]
    (warning,) = ran.warnings
    assert "adapter_model.safetensors, model.safetensors" in warning
    assert "x.safetensors" not in warning
    assert [file["name"] for file in case.report()["sources"]["base"]["files"]] == [FIRST]


WANTED = "model.language_model.layers.0.mlp.down_proj.weight"
PREFIXES = {
    "model.": "model.layers.0.mlp.down_proj.weight",
    "language_model.model.": "language_model.model.layers.0.mlp.down_proj.weight",
    "_orig_mod.": f"_orig_mod.{WANTED}",
    "module.": f"module.{WANTED}",
    "_fsdp_wrapped_module.": f"_fsdp_wrapped_module.{WANTED}",
    "": "model.language_model.language_model.language_model.layers.0.mlp.down_proj.weight",
}


class TestPrefixes:
    """C12, C13."""

    @pytest.mark.parametrize("stored", PREFIXES.values())
    def test_without_a_rule_the_name_and_its_neighbours_are_shown(self, case: Case, stored: str) -> None:
        case.source({stored: vector(), "model.norm.weight": vector()})
        case.recipe(*take(WANTED), more="ignore: [model.norm.weight]\n")
        (message,) = case.refused(f"tensor {WANTED} is not in source base", f"; nearest: {stored}")
        assert message.count("nearest") == 1

    @pytest.mark.parametrize(
        ("beginning", "to"),
        [
            ("model.", "model.language_model."),
            ("language_model.model.", "model.language_model."),
            ("_orig_mod.", ""),
            ("module.", ""),
            ("_fsdp_wrapped_module.", ""),
        ],
    )
    @pytest.mark.parametrize("declared", ["recipe", "command"])
    def test_a_declared_rule_resolves_and_is_reported(
        self, case: Case, beginning: str, to: str, declared: str
    ) -> None:
        case.source({PREFIXES[beginning]: vector(TWO)})
        if declared == "recipe":
            case.recipe(*take(WANTED), sources=f'{{base: {{prefix: {{{beginning}: "{to}"}}}}}}')
            case.converted()
        else:
            case.recipe(*take(WANTED))
            case.converted("--prefix", f"{beginning}={to}")
        assert case.words(WANTED) == [TWO, TWO]
        source = case.report()["sources"]["base"]
        assert source["prefixes"] == {beginning: to}
        (stored,) = case.report()["objects"][0]["sources"]
        assert stored["tensor"] == WANTED
        assert any(repr(beginning) in note for note in case.report()["notes"])

    def test_both_spellings_at_once_are_ambiguous(self, case: Case) -> None:
        stored = PREFIXES["model."]
        case.source({stored: vector(ONE), WANTED: vector(TWO)})
        case.recipe(*take(WANTED))
        for extra in ([], ["--prefix", "model.=model.language_model."]):
            case.refused(stored, WANTED, "ambiguous", extra=extra)

    def test_a_block_of_another_part_is_unused_and_not_ambiguous(self, case: Case) -> None:
        case.source({WANTED: vector(), "mtp.layers.0.mlp.down_proj.weight": vector()})
        case.recipe(*take(WANTED))
        (message,) = case.refused("1 tensor is neither used nor ignored: mtp.layers.0.mlp.down_proj.weight")
        assert "ambiguous" not in message

    def test_a_prefix_that_only_some_names_carry_is_not_stripped(self, case: Case) -> None:
        case.source({f"_orig_mod.{WANTED}": vector(), "lm_head.weight": vector()})
        case.recipe(*take(WANTED, "lm_head.weight"))
        extra = ["--prefix", "_orig_mod.="]
        case.refused(f"_orig_mod.{WANTED}", "lm_head.weight", "every name must carry", extra=extra)

    def test_a_rule_of_one_source_leaves_the_other_alone(self, case: Case) -> None:
        case.source({"model.w": vector(ONE)})
        case.source({"model.w": vector(TWO)}, "other")
        case.recipe(
            entry("a", [2], "BF16", "text.w"), entry("b", [2], "BF16", "other:model.w"), sources="{base: {}, other: {}}"
        )
        case.converted("--prefix", "base:model.=text.")
        assert (case.words("a"), case.words("b")) == ([ONE, ONE], [TWO, TWO])
        assert [case.report()["sources"][name]["prefixes"] for name in ("base", "other")] == [{"model.": "text."}, {}]


def test_the_report_identifies_every_source_file_without_reading_it_twice(case: Case) -> None:
    """C35, without the option that compares digests with the hub's."""
    directory = case.source({FIRST: {"a": vector()}, SECOND: {"b": vector()}})
    case.recipe(*take("a", "b"))
    case.converted()
    files = case.report()["sources"]["base"]["files"]
    assert [(file["name"], file["bytes"]) for file in files] == [
        (name, (directory / name).stat().st_size) for name in (FIRST, SECOND)
    ]
    assert all(len(file["header_sha256"]) == 64 for file in files)
    # Another payload under an equal header converts to other bytes.
    before = case.words("b")
    raw = bytearray((directory / SECOND).read_bytes())
    raw[-1] ^= 1
    (directory / SECOND).write_bytes(raw)
    case.converted("--overwrite")
    assert case.words("b") == [before[0], before[1] ^ 0x0100]
    assert case.report()["sources"]["base"]["files"] == files


def header(**tensors: tuple[str, list[int], list[int]]) -> dict[str, Any]:
    return {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, (dtype, shape, offsets) in tensors.items()
    }


TWO_FLOATS = header(a=("F32", [2], [0, 8]))
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
DAMAGED = {
    "git-lfs": (LFS_POINTER, "Git LFS pointer"),
    "empty": (b"", "the file is empty"),
    "three-bytes": (b"abc", "3 bytes"),
    "endless-header": (struct.pack("<Q", 2**64 - 1) + b"{}", "18446744073709551615"),
    "one-short": (safetensors_bytes(TWO_FLOATS, bytes(7)), "tensor a: ends at byte 77 of the file, which has 76"),
    "one-long": (safetensors_bytes(TWO_FLOATS, bytes(9)), "1 bytes after the last one, tensor a, belong to no tensor"),
    "overlap": (safetensors_bytes(header(a=("F32", [2], [0, 8]), b=("F32", [2], [4, 12])), bytes(12)), "tensor b"),
    "hole": (safetensors_bytes(header(a=("F32", [2], [0, 8]), b=("F32", [2], [12, 20])), bytes(20)), "tensor b"),
    "twice": (
        safetensors_bytes(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            bytes(8),
        ),
        'member "a" is given twice',
    ),
    "enormous": (safetensors_bytes(header(a=("F32", [2**62, 4], [0, 0]))), "tensor a"),
}


class TestDamagedFiles:
    """C36."""

    @pytest.mark.parametrize(("raw", "reason"), DAMAGED.values(), ids=DAMAGED)
    def test_the_file_and_the_plain_cause_are_named(self, case: Case, raw: bytes, reason: str) -> None:
        directory = case.source({"a": f32(1, 2)})
        (directory / "model.safetensors").write_bytes(raw)
        case.recipe(entry("a", [2], "FP32", "a"))
        case.refused(str(directory / "model.safetensors"), reason)

    def test_a_pointer_says_what_to_run(self, case: Case) -> None:
        directory = case.source({"a": f32(1, 2)})
        (directory / "model.safetensors").write_bytes(LFS_POINTER)
        case.recipe(entry("a", [2], "FP32", "a"))
        case.refused("git lfs pull")

    def test_all_damaged_files_are_named_at_once(self, case: Case) -> None:
        directory = case.source({FIRST: {"a": vector()}, SECOND: {"b": vector()}, THIRD: {"c": vector()}})
        (directory / FIRST).write_bytes(LFS_POINTER)
        (directory / THIRD).write_bytes(b"abc")
        case.recipe(*take("a", "b", "c"))
        first, second = case.refused(messages=2)
        assert FIRST in first
        assert THIRD in second

    def test_an_unaligned_header_converts(self, case: Case) -> None:
        directory = case.source({"a": f32(1, 2)})
        raw = safetensors_bytes(json.dumps(TWO_FLOATS).encode() + b" " * 2, np.array([1, 2], "<f4").tobytes())
        assert int.from_bytes(raw[:8], "little") % 8
        (directory / "model.safetensors").write_bytes(raw)
        case.recipe(entry("a", [2], "FP32", "a"))
        case.converted()
        assert case.words("a") == [0x3F800000, 0x40000000]


class TestDtypes:
    """C37."""

    ZOO = (
        ("BF16", [1], 2),
        ("F8_E4M3", [1], 1),
        ("F8_E5M2", [1], 1),
        ("F8_E8M0", [1], 1),
        ("F4", [2], 1),
        ("BOOL", [1], 1),
        ("I64", [1], 8),
        ("U16", [1], 2),
        ("F64", [1], 8),
        ("C64", [1], 8),
    )

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        case = Case(tmp_path)
        directory = case.source({"a": vector()})
        tensors, place = {}, 0
        for dtype, shape, nbytes in self.ZOO:
            tensors[dtype] = (dtype, shape, [place, place + nbytes])
            place += nbytes
        payload = b"\x80\x3f" + bytes(place - 2)
        (directory / "model.safetensors").write_bytes(safetensors_bytes(header(**tensors), payload))
        return case

    def test_dtypes_that_no_object_uses_do_not_matter(self, case: Case) -> None:
        others = ", ".join(dtype for dtype, _, _ in self.ZOO[1:])
        case.recipe(entry("w", [1], "BF16", "BF16"), more=f"ignore: [{others}]\n")
        case.converted()
        assert case.words("w") == [ONE]
        assert case.report()["sources"]["base"]["dtypes"] == {dtype: 1 for dtype, _, _ in self.ZOO}

    @pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E8M0", "BOOL", "U16", "F64", "F4", "C64"])
    def test_a_dtype_that_cannot_be_stored_is_named_with_those_that_can(self, case: Case, dtype: str) -> None:
        others = ", ".join(other for other, _, _ in self.ZOO if other != dtype)
        shape = [2] if dtype == "F4" else [1]
        case.recipe(entry("w", shape, "BF16", dtype), more=f"ignore: [{others}]\n")
        case.refused(dtype, "BF16")

    @pytest.mark.parametrize("dtype", ["F8_E5M2", "I64", "F64"])
    def test_an_encoder_names_its_source_dtypes(self, case: Case, dtype: str) -> None:
        others = ", ".join(other for other, _, _ in self.ZOO if other != dtype)
        value = f"{{reshape: {{of: {dtype}, to: [1, 1]}}}}"
        case.recipe(entry("w", [1, 1], Q4, value), more=f"ignore: [{others}]\n")
        case.refused(f"{dtype}", "not a float source", "BF16, F16, F32")


class TestIndex:
    """C38."""

    def write_index(self, case: Case, document: object) -> Path:
        directory = case.source({FIRST: {"a": vector(), "y": vector()}, SECOND: {"b": vector()}})
        (directory / INDEX).write_text(json.dumps(document))
        case.recipe(*take("a", "b"), more="ignore: [y]\n")
        return directory

    def test_a_tensor_that_its_shard_lacks_is_named_with_both_files(self, case: Case) -> None:
        weight_map = {"a": FIRST, "y": FIRST, "x": FIRST, "b": SECOND}
        directory = self.write_index(case, {"weight_map": weight_map})
        case.refused("tensor x", FIRST, str(directory / INDEX))

    def test_a_tensor_that_the_index_lacks_is_named_with_both_files(self, case: Case) -> None:
        directory = self.write_index(case, {"weight_map": {"a": FIRST, "b": SECOND}})
        case.refused("tensor y", str(directory / FIRST), str(directory / INDEX))

    @pytest.mark.parametrize("total", [0, 1.5, "12", None, True])
    def test_a_wrong_total_size_is_a_warning_at_most(self, case: Case, total: object) -> None:
        weight_map = {"a": FIRST, "y": FIRST, "b": SECOND}
        self.write_index(case, {"metadata": {"total_size": total}, "weight_map": weight_map})
        ran = case.converted()
        assert len(ran.warnings) == (total is not None)
        assert all("total_size" in warning for warning in ran.warnings)

    def test_no_metadata_is_no_matter(self, case: Case) -> None:
        self.write_index(case, {"weight_map": {"a": FIRST, "y": FIRST, "b": SECOND}})
        assert case.converted().warnings == []

    @pytest.mark.parametrize("file", ["../other/m.safetensors", "/m.safetensors", "a/m.safetensors", "..", ""])
    def test_a_shard_outside_the_directory_is_refused(self, case: Case, file: str) -> None:
        write_safetensors(case.root / "other" / "m.safetensors", {"x": vector()})
        self.write_index(case, {"weight_map": {"a": FIRST, "y": FIRST, "b": SECOND, "x": file}})
        case.refused("member x", f'"{file}"', "plain file name")

    @pytest.mark.parametrize(
        ("document", "reason"),
        [
            ({"weight_map": {}}, "weight_map is empty"),
            ([], "is a list; required: a JSON object"),
            ({}, "weight_map is missing"),
            ({"weight_map": None}, "weight_map is null"),
            ({"weight_map": {"a": 1}}, "the file is an integer"),
        ],
    )
    def test_a_malformed_index_is_named_with_the_reason(self, case: Case, document: object, reason: str) -> None:
        directory = self.write_index(case, document)
        case.refused(str(directory / INDEX), reason)


class TestComponents:
    """C39; an optional part of a model is there or not, never by halves."""

    def write(self, case: Case, held: int, *, optional: bool) -> None:
        names = [f"mtp.{i}.weight" for i in range(15)]
        case.source({"a": vector(), **dict.fromkeys(names[15 - held :], vector())})
        objects = ", ".join(entry(f"mtp/{i}", [2], "BF16", name) for i, name in enumerate(names))
        case.recipe(*take("a"), f"{{component: mtp, optional: {str(optional).lower()}, objects: [{objects}]}}")

    def test_a_needed_component_that_is_absent_is_one_message(self, case: Case) -> None:
        self.write(case, 0, optional=False)
        names = ", ".join(f"base:mtp.{number}.weight" for number in range(3))
        (message,) = case.refused(f"component mtp: 15 of 15 missing: {names} and 12 more; a", "optional: true")
        assert message.endswith("or be left out with `change: [drop: mtp/*]`")

    @pytest.mark.parametrize("optional", [True, False])
    def test_a_component_that_is_there_in_part_is_one_message(self, case: Case, optional: bool) -> None:
        self.write(case, 14, optional=optional)
        nearest = "nearest: mtp.10.weight, mtp.9.weight, mtp.8.weight"
        (message,) = case.refused(f"component mtp: 1 of 15 missing: base:mtp.0.weight; {nearest}; ")
        assert message.endswith("it may be left out with `change: [drop: mtp/*]`")
        assert ("may be absent whole, not in part" in message) == optional
        assert "optional: true" not in message

    def test_a_slip_in_a_component_is_one_message_with_the_tensor_that_was_meant(self, case: Case) -> None:
        names = [f"mtp.{i}.weight" for i in range(9)]
        case.source({"a": vector(), **dict.fromkeys(names, vector())})
        slips = {4: "mtp.4.wieght", 7: "mtp.7.wieght"}
        objects = ", ".join(entry(f"mtp/{i}", [2], "BF16", slips.get(i, name)) for i, name in enumerate(names))
        case.recipe(*take("a"), f"{{component: mtp, objects: [{objects}]}}")
        missing = "component mtp: 2 of 9 missing: base:mtp.4.wieght, base:mtp.7.wieght"
        case.refused(f"{missing}; nearest: mtp.4.weight, mtp.8.weight, mtp.7.weight; it may be left out with")

    SHARED = "{component: mtp, optional: %s, objects: [%s, {name: mtp/e, shape: [2], format: BF16, value: a}]}"

    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_component_is_absent_though_it_shares_a_tensor_that_is_there(self, case: Case, is_first: bool) -> None:
        case.source({"a": vector()})
        own = entry("mtp/0", [2], "BF16", "mtp.0.weight")
        objects = [*take("a"), self.SHARED % ("true", own)]
        case.recipe(*(objects if is_first else objects[::-1]))
        case.converted()
        assert list(case.objects()) == ["a"]
        assert case.report()["notes"] == ["component mtp is absent from the source and was left out"]

    def test_what_a_component_shares_does_not_count_in_its_messages(self, case: Case) -> None:
        case.source({"a": vector()})
        case.recipe(*take("a"), self.SHARED % ("false", entry("mtp/0", [2], "BF16", "mtp.0.weight")))
        case.refused("component mtp: 1 of 1 missing: base:mtp.0.weight; a component", "may be declared optional: true")

    def test_a_shared_tensor_that_is_missing_is_told_of_those_outside(self, case: Case) -> None:
        case.source({"mtp.0.weight": vector(), "b": vector()})
        case.recipe(*take("a", "b"), self.SHARED % ("true", entry("mtp/0", [2], "BF16", "mtp.0.weight")))
        for message in case.refused("tensor a is not in source base", messages=2):
            assert "component" not in message

    def test_a_component_that_has_nothing_of_its_own_is_there_with_what_it_shares(self, case: Case) -> None:
        case.source({"a": vector(ONE)})
        case.recipe(*take("a"), self.SHARED % ("true", entry("mtp/0", [2], "BF16", "a")))
        case.converted()
        assert list(case.objects()) == ["a", "mtp/0", "mtp/e"]

    def test_an_optional_component_that_is_absent_is_left_out_and_reported(self, case: Case) -> None:
        self.write(case, 0, optional=True)
        case.converted()
        assert list(case.objects()) == ["a"]
        assert case.report()["notes"] == ["component mtp is absent from the source and was left out"]

    def test_a_complete_component_is_stored(self, case: Case) -> None:
        self.write(case, 15, optional=True)
        case.converted()
        assert len(case.objects()) == 16


class TestHubCache:
    """C47, and C48 (a): a local place needs no network."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"
    BLOB = "a" * 64

    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: object) -> NoReturn:
            raise AssertionError("a local checkpoint reaches for the network")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        case = Case(tmp_path)
        repo = tmp_path / "hub" / "models--o--n"
        snapshot_directory = repo / "snapshots" / self.COMMIT
        snapshot_directory.mkdir(parents=True)
        write_safetensors(repo / "blobs" / self.BLOB, {"w": vector()})
        (snapshot_directory / "model.safetensors").symlink_to(f"../../blobs/{self.BLOB}")
        case.sources["base"] = snapshot_directory
        case.recipe(*take("w"), sources=f"{{base: {{repo: o/n, revision: {self.COMMIT}}}}}")
        return case

    def test_a_snapshot_is_known_by_repository_and_commit(self, case: Case) -> None:
        case.converted()
        source = case.report()["sources"]["base"]
        assert (source["repo"], source["revision"]) == ("o/n", self.COMMIT)
        assert "blobs" not in json.dumps(source)
        # The cache names the blob by the digest that the hub lists.
        assert [file["sha256"] for file in source["files"]] == [self.BLOB]
        assert case.report()["notes"] == []

    def test_an_unfinished_download_is_named_by_link_and_target(self, case: Case) -> None:
        blobs = case.sources["base"].parents[1] / "blobs"
        (blobs / self.BLOB).rename(blobs / f"{self.BLOB}.incomplete")
        (blobs / f"{self.BLOB}.incomplete").write_bytes(b"")
        case.refused("model.safetensors", f"../../blobs/{self.BLOB}", "download incomplete")

    def test_the_entry_of_a_repository_stands_for_its_main_commit(self, case: Case) -> None:
        snapshot_directory = case.sources["base"]
        case.sources["base"] = snapshot_directory.parents[1]
        case.refused("refs/main is missing", self.COMMIT)
        (case.sources["base"] / "refs").mkdir()
        (case.sources["base"] / "refs" / "main").write_text(self.COMMIT)
        ran = case.converted()
        assert f"refs/main points to snapshot {self.COMMIT}" in ran.warnings[0]
        assert case.report()["sources"]["base"]["revision"] == self.COMMIT

    def test_another_commit_is_refused_unless_unpinned(self, case: Case) -> None:
        other = "f" * 40
        case.recipe(*take("w"), sources=f"{{base: {{repo: o/n, revision: {other}}}}}")
        case.refused(f"revision {self.COMMIT} found, {other} required", "--unpinned")
        case.converted("--unpinned")
        assert any(other in waived for waived in case.report()["waived"])

    def test_a_plain_directory_has_no_revision_to_check(self, case: Case) -> None:
        case.source({"w": vector()})
        case.converted()
        (note,) = case.report()["notes"]
        assert note == f"source base: a plain directory; revision {self.COMMIT} could not be checked"


class TestScalarsAndMarkers:
    """C50."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        case = Case(tmp_path)
        directory = case.source({"w": vector()})
        tensors = header(
            w=("BF16", [2], [0, 4]),
            k_scale=("F32", [], [4, 8]),
            flag=("BOOL", [1], [8, 9]),
            marker=("F32", [0, 4], [9, 9]),
        )
        raw = safetensors_bytes(tensors, struct.pack("<HHfB", ONE, ONE, 0.5, 1))
        (directory / "model.safetensors").write_bytes(raw)
        return case

    def test_unused_ones_never_matter(self, case: Case) -> None:
        case.recipe(*take("w"), more="ignore: [k_scale, flag, marker]\n")
        case.converted()
        assert case.words("w") == [ONE, ONE]

    def test_a_scalar_is_four_bytes_of_shape_nothing(self, case: Case) -> None:
        case.recipe(*take("w"), entry("k", [], "FP32", "k_scale"), more="ignore: [flag, marker]\n")
        case.converted()
        assert case.objects()["k"].shape == ()
        assert case.payload("k") == struct.pack("<f", 0.5)

    def test_a_marker_cannot_be_stored(self, case: Case) -> None:
        case.recipe(*take("w"), entry("m", [4], "FP32", "marker"), more="ignore: [flag, k_scale]\n")
        case.refused("tensor marker has shape [0, 4]")


class TestForeignFormats:
    """C51; one message says what the checkpoint is, instead of one for every tensor that is not there."""

    @pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
    def test_the_method_of_the_config_is_named_with_what_is_accepted(self, case: Case, method: str) -> None:
        tensors = {"w.qweight": words_of("I32", 1, 2, shape=[1, 2]), "w.scales": words_of("F16", 1, 2)}
        case.source(tensors, config={"quantization_config": {"quant_method": method}})
        case.recipe(entry("w", [8, 2], Q4, "w.weight"), entry("v", [8, 2], Q4, "v.weight"))
        case.refused(f"quantization_config.quant_method is {method}", "accepted: compressed-tensors, modelopt")

    @pytest.mark.parametrize(
        ("tensors", "kind"),
        [
            (header(**{"w.qweight": ("I32", [1], [0, 4]), "w.scales": ("F16", [1], [4, 6])}), "GPTQ or AWQ"),
            (
                header(
                    **{
                        "w.weight": ("U32", [1], [0, 4]),
                        "w.scales": ("F16", [1], [4, 6]),
                        "w.biases": ("F16", [1], [6, 8]),
                    }
                ),
                "MLX",
            ),
            (header(**{"w.weight": ("U8", [4], [0, 4]), "w.weight.absmax": ("F32", [1], [4, 8])}), "4-bit"),
            (header(**{"w.weight": ("I8", [4], [0, 4]), "w.SCB": ("F32", [1], [4, 8])}), "int8"),
        ],
        ids=["gptq", "mlx", "bnb4", "bnb8"],
    )
    def test_the_tell_tale_tensor_is_named(self, case: Case, tensors: dict[str, Any], kind: str) -> None:
        directory = case.source({"w": vector()})
        size = max(entry_["data_offsets"][1] for entry_ in tensors.values())
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors, bytes(size)))
        case.recipe(entry("w", [8, 2], Q4, "w.weight"))
        case.refused(f"tensor {next(iter(tensors))} (", kind, "accepted: ")


class TestQuantizationConfig:
    """C52; the tensors decide, the config confirms."""

    @pytest.mark.parametrize(
        "config",
        [
            None,
            {},
            {"quantization_config": {}},
            {"quantization_config": None},
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"FP8_DYNAMIC": {}}}},
            {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:.*", "other.w"]}},
            {"compression_config": {"quant_method": "compressed_tensors", "config_groups": None}},
            {"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
        ],
    )
    def test_spellings_of_the_config_do_not_matter(self, case: Case, config: dict[str, Any] | None) -> None:
        case.source({**nvfp4("n"), **fp8("f")}, config=config)
        case.recipe(
            entry("n", [128, 64], NVFP4, "n", words=True),
            entry("f", [4, 8], FP8, "f", words=True),
            more="ignore: [n.input_global_scale]\n",
        )
        case.converted()
        assert case.payload("f")[:32] == fp8("f")["f.weight"][1].tobytes()

    def test_a_config_of_another_method_contradicts_the_tensors(self, case: Case) -> None:
        case.source(nvfp4("n"), config={"text_config": {"quantization_config": {"quant_method": "modelopt"}}})
        case.recipe(entry("n", [128, 64], NVFP4, "n", words=True), more="ignore: [n.input_global_scale]\n")
        case.refused("tensor n.weight_packed", "text_config.quantization_config.quant_method: modelopt")


class TestVocabulary:
    """C53."""

    def test_every_size_that_does_not_fit_is_named(self, case: Case) -> None:
        case.source(
            {"embed_tokens": filled("BF16", [70, 64], ONE), "lm_head": filled("BF16", [72, 64], ONE)},
            config={"vocab_size": 72},
        )
        case.recipe(
            entry("embedding", [72, 64], Q4, "embed_tokens"),
            entry("head", [72, 64], Q4, "lm_head"),
            sources="{base: {config: {vocab_size: 71}}}",
        )
        config, embedding = case.refused(messages=2)
        assert "config.json vocab_size: 72 found, 71 required" in config
        assert "object embedding: base:embed_tokens has shape [70, 64], expected [72, 64]" in embedding

    def test_an_id_beyond_the_rows_is_named_with_their_number(self, case: Case) -> None:
        case.source({"lm_head": filled("BF16", [70, 64], ONE), "ids": words_of("I32", 3, 71, 1)})
        case.recipe(entry("draft", [3, 64], Q4, "{gather: {of: lm_head, ids: ids}}"))
        case.refused("id 71 at index 1 is out of range", "lm_head has 70 rows")

    def test_a_negative_id_is_not_counted_from_the_end(self, case: Case) -> None:
        case.source({"lm_head": filled("BF16", [70, 64], ONE), "ids": words_of("I64", -1)})
        case.recipe(entry("draft", [1, 64], Q4, "{gather: {of: lm_head, ids: ids}}"))
        case.refused("id -1 at index 0 is out of range")


TEMPLATE = '"{{ x }}"\n\'quoted\' \\ 🦙'
PLACES = (
    "[{file: chat_template.jinja}, {file: chat_template.json, member: chat_template}, "
    "{file: tokenizer_config.json, member: chat_template}]"
)


class TestChatTemplate:
    """C58."""

    def write(self, case: Case, files: dict[str, bytes]) -> None:
        case.source({"w": vector()}, files=files)
        case.recipe(
            "{resource: tokenizer, file: tokenizer.json}", f"{{resource: template, any: {PLACES}}}", *take("w")
        )

    def config(self, template: object) -> bytes:
        return json.dumps({"chat_template": template}).encode()

    def test_a_member_is_stored_as_its_decoded_text(self, case: Case) -> None:
        self.write(case, {"tokenizer.json": b"{}", "tokenizer_config.json": self.config(TEMPLATE)})
        case.converted()
        assert case.payload("template") == TEMPLATE.encode()
        origin = case.report()["objects"][1]["sources"]
        assert origin == [{"source": "base", "file": "tokenizer_config.json", "member": "chat_template"}]

    def test_the_file_wins_and_a_note_says_so(self, case: Case) -> None:
        files = {"chat_template.jinja": b"\xef\xbb\xbffile\r\n", "tokenizer_config.json": self.config("member")}
        self.write(case, {"tokenizer.json": b"{}", **files})
        case.converted()
        assert case.payload("template") == files["chat_template.jinja"]
        (note,) = case.report()["notes"]
        assert "base:chat_template.jinja wins over base:tokenizer_config.json, member chat_template" in note

    def test_of_a_list_the_default_is_taken_and_the_others_are_named(self, case: Case) -> None:
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        self.write(case, {"tokenizer.json": b"{}", "tokenizer_config.json": self.config(named)})
        case.converted()
        assert case.payload("template") == b"d"
        assert "default taken, tool_use left out" in case.report()["notes"][0]

    @pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": "t"}], 7])
    def test_without_a_template_every_place_is_named(self, case: Case, template: object) -> None:
        self.write(case, {"tokenizer.json": b"{}", "tokenizer_config.json": self.config(template)})
        case.refused(
            "resource template was not found",
            "chat_template.jinja, base:chat_template.json, member chat_template, base:tokenizer_config.json, member",
            "file: or input:",
        )

    @pytest.mark.parametrize(
        ("template", "found"),
        [
            (7, "an integer"),
            (True, "a boolean"),
            ({"default": "t"}, "an object"),
            ([], "a list without a default (it names nothing)"),
            ([{"name": "tool_use", "template": "t"}, 7, {"name": "rag"}], "a list without a default (tool_use, rag)"),
            ([{"name": "default", "template": 7}], "a list whose default has an integer as its template"),
            ([{"name": "default"}, {"name": "rag"}], "a list whose default has null as its template"),
        ],
    )
    def test_a_member_that_is_no_template_is_told_as_what_it_is(
        self, case: Case, template: object, found: str
    ) -> None:
        files = {"tokenizer.json": b"{}", "tokenizer_config.json": self.config(template)}
        told = (
            f"base:tokenizer_config.json, member chat_template is {found}; required is a text, or a list of "
            "{name, template} with one called default"
        )
        self.write(case, files)
        case.refused("resource template was not found", f"; {told}. Name another place")
        self.write(case, {**files, "chat_template.jinja": b"x"})
        case.converted()
        assert case.payload("template") == b"x"
        assert case.report()["notes"] == [f"resource template: {told}"]

    @pytest.mark.parametrize("content", [b"{}", b'{"chat_template": null}'])
    def test_a_member_that_is_absent_or_null_is_only_a_place_that_has_nothing(self, case: Case, content: bytes) -> None:
        self.write(case, {"tokenizer.json": b"{}", "tokenizer_config.json": content})
        (message,) = case.refused("resource template was not found")
        assert "required" not in message

    def test_every_absent_resource_is_named(self, case: Case) -> None:
        self.write(case, {})
        first, second = case.refused(messages=2)
        assert "resource tokenizer was not found; looked at: base:tokenizer.json" in first
        assert "resource template was not found" in second

    def test_an_empty_resource_cannot_be_stored(self, case: Case) -> None:
        self.write(case, {"tokenizer.json": b"", "chat_template.jinja": b"x"})
        case.refused("base:tokenizer.json is empty")

    def test_a_pinned_resource_names_both_digests(self, case: Case) -> None:
        case.source({"w": vector()}, files={"tokenizer.json": b"{}"})
        wanted, found = "0" * 64, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        case.recipe(f"{{resource: tokenizer, file: tokenizer.json, sha256: '{wanted}'}}", *take("w"))
        case.refused(f"SHA-256 {found} found in base:tokenizer.json, {wanted} required", "--unpinned")
        case.converted("--unpinned")
        assert case.report()["waived"][0].endswith(f"{wanted} required")


class TestAdapters:
    """An adapter that was not merged is no model."""

    @pytest.mark.parametrize(
        "name",
        [
            "base_model.model.model.layers.0.q_proj.lora_A.weight",
            "model.layers.0.q_proj.lora_B.default.weight",
            "model.layers.0.q_proj.base_layer.weight",
            "model.embed_tokens.lora_embedding_A",
            "model.layers.0.q_proj.lora_magnitude_vector",
        ],
    )
    def test_the_message_says_what_to_do(self, case: Case, name: str) -> None:
        case.source({"w": vector(), name: vector()})
        case.recipe(*take("w"), more=f"ignore: ['{name}']\n")
        case.refused(f"tensor {name}", "LoRA adapter", "merge the adapter into its base model first")

    def test_names_that_only_sound_alike_are_ordinary(self, case: Case) -> None:
        names = ["base_model.w", "w_lora.lora.0.weight", "flora_A.weight"]
        case.source({name: vector() for name in names})
        case.recipe(*take(*names))
        case.converted()

    def test_a_directory_with_an_adapter_alone_is_no_checkpoint(self, case: Case) -> None:
        case.source({"w": vector()})
        directory = case.sources["base"]
        (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
        case.recipe(*take("w"))
        case.refused("adapter_model.safetensors", "merge it into its base model first")


class TestRanking:
    """The file of token counts, and the shortlist made of it."""

    COUNTS = np.array([5, 9, 1, 9, 0, 7, 3, 2], "<i8")
    SPECIAL = json.dumps({"added_tokens_decoder": {"4": {"special": True}, "2": {"special": False}}}).encode()

    def write(self, case: Case, counts: bytes, inputs: str = "{ranking: {}}", special: bytes = SPECIAL) -> None:
        case.source({"head": filled("BF16", [8, 64], ONE)}, files={"tokenizer_config.json": special})
        case.input("ranking", counts)
        shortlist = "{shortlist: {counts: ranking, candidates: 8, take: 4, special: tokenizer_config.json}}"
        case.recipe(
            entry("ids", [4], "I32", "$ids"),
            entry("draft", [4, 64], "BF16", "{gather: {of: head, ids: $ids}}"),
            more=f"inputs: {inputs}\nvalues: {{ids: {shortlist}}}\n",
        )

    def test_the_most_frequent_and_every_special_token_are_taken(self, case: Case) -> None:
        self.write(case, self.COUNTS.tobytes())
        case.converted()
        assert case.words("ids") == [1, 3, 5, 4]

    def test_a_file_that_is_too_short_is_named_with_both_sizes(self, case: Case) -> None:
        self.write(case, self.COUNTS.tobytes()[:-1])
        case.refused("input ranking", "holds 63 bytes; 8 I64 counts need 64")

    def test_another_file_than_the_pinned_one_is_refused_unless_unpinned(self, case: Case) -> None:
        wanted = "1" * 64
        self.write(case, self.COUNTS.tobytes(), f"{{ranking: {{sha256: '{wanted}'}}}}")
        case.refused("input ranking", "SHA-256 ", f" found, {wanted} required", "--unpinned")
        case.converted("--unpinned")
        assert case.report()["waived"]
        assert case.words("ids") == [1, 3, 5, 4]

    def test_a_file_that_is_not_there_is_named(self, case: Case) -> None:
        self.write(case, self.COUNTS.tobytes())
        case.inputs["ranking"].unlink()
        messages = case.refused(messages=3)
        assert all(str(case.inputs["ranking"]) in message for message in messages)

    def test_an_input_that_is_not_given_is_asked_for(self, case: Case) -> None:
        self.write(case, self.COUNTS.tobytes())
        case.inputs.clear()
        case.refused("input ranking is not given; add --input ranking=PATH")

    def test_an_input_that_is_not_given_is_not_a_resource_that_was_not_found_too(self, case: Case) -> None:
        case.source({WANTED: vector()})
        case.recipe(*take(WANTED), "{resource: r, input: text}", more="inputs: {text: {}}\n")
        case.refused("input text is not given; add --input text=PATH")

    @pytest.mark.parametrize(
        "special", [b"[]", b"{}", b"not json", b'{"added_tokens_decoder": {"x": {"special": true}}}']
    )
    def test_a_tokenizer_config_without_the_special_tokens_is_named(self, case: Case, special: bytes) -> None:
        self.write(case, self.COUNTS.tobytes(), special=special)
        case.refused("tokenizer_config.json of source base has no usable added_tokens_decoder")


class TestCoverage:
    """Every tensor is used or ignored by name."""

    def test_tensors_that_are_neither_are_named(self, case: Case) -> None:
        case.source({name: vector() for name in "abcdefgh"})
        case.recipe(*take("a"))
        case.refused("7 tensors are neither used nor ignored: b, c, d, e, f and 2 more")

    def test_they_are_named_beside_other_problems(self, case: Case) -> None:
        case.source({"a": vector(), "b": vector()}, config={"model_type": "x"})
        case.recipe(*take("a"), sources="{base: {config: {model_type: y}}}")
        assert len(case.refused("1 tensor is neither used nor ignored: b", messages=2)) == 2

    def test_they_are_named_beside_objects_that_cannot_be_made(self, case: Case) -> None:
        case.source({"layer.weight": vector(), "layer.bias": vector(), "other.scale": vector(), "unlike": vector()})
        case.recipe(
            *take("layer.wieght"),
            "{name: wrong, shape: [9], format: BF16, value: {same: [layer.bias, layer.bias]}}",
            "{name: third, shape: [4], format: FP32, value: other.scale}",
        )
        found = case.refused("nearest: layer.weight", "1 tensor is neither used nor ignored: unlike", messages=4)
        assert sum("neither used" in message for message in found) == 1

    def test_they_are_not_named_where_no_name_fits(self, case: Case) -> None:
        case.source({f"there.{i}.x": vector() for i in range(60)} | {"unlike": vector()})
        case.recipe(*(taken for i in range(52) for taken in take(f"gone_{i}_y")))
        assert case.refused(messages=51)[-1] == "error: and 2 more problems"

    def test_an_ignored_tensor_that_is_used_and_a_glob_without_effect_are_named(self, case: Case) -> None:
        case.source({"a": vector(), "b": vector()})
        case.recipe(*take("a"), more="ignore: [a, b, 'mtp.*']\n")
        used, useless = case.refused(messages=2)
        assert "recipe.yaml:6:10: ignore a matches a, which an object uses" in used
        assert "recipe.yaml:6:16: ignore mtp.* matches no tensor of source base" in useless

    def test_a_dtype_that_the_recipe_does_not_state_is_named(self, case: Case) -> None:
        case.source({"a": vector(), "b": f32(1)})
        case.recipe(*take("a"), entry("b", [1], "FP32", "b"), sources="{base: {dtype: BF16}}")
        case.refused("tensor b is F32; the recipe states BF16")

    def test_config_members_are_compared_by_value_and_type(self, case: Case) -> None:
        config = {"a": 1, "b": "1", "c": {"d": 1e-6, "e": True}, "f": [1, 2]}
        case.source({"w": vector()}, config=config)
        case.recipe(*take("w"), sources="{base: {config: {a: '1', b: 1, c: {d: 1e-5, e: 1, g: null}, f: [1]}}}")
        messages = case.refused(messages=6)
        assert [message.partition("config.json ")[2] for message in messages] == [
            'a: 1 found, "1" required',
            'b: "1" found, 1 required',
            "c.d: 1e-06 found, 1e-05 required",
            "c.e: true found, 1 required",
            "c.g: nothing found, null required",
            "f: [1, 2] found, [1] required",
        ]

    def test_a_config_that_is_needed_and_absent_is_named(self, case: Case) -> None:
        case.source({"w": vector()})
        case.recipe(*take("w"), sources="{base: {config: {a: 1}}}")
        case.refused("no config.json in")


class TestPlaces:
    def test_a_source_that_does_not_exist_is_named(self, case: Case) -> None:
        case.source({"w": vector()})
        case.recipe(*take("w"))
        case.sources["base"] = case.root / "nowhere"
        case.refused(str(case.root / "nowhere"), "no such file or directory")

    def test_a_source_must_be_given_for_each_name(self, case: Case) -> None:
        case.source({"w": vector()})
        case.recipe(*take("w"), sources="{base: {}, other: {repo: o/n}}")
        case.sources = {}
        case.refused("--source base=WHERE and --source other=WHERE (o/n)", code=2)

    def test_one_file_is_a_checkpoint(self, case: Case) -> None:
        case.sources["base"] = write_safetensors(case.root / "weights" / "any.safetensors", {"w": vector()})
        case.recipe(*take("w"))
        case.converted()
        assert case.words("w") == [ONE, ONE]

    def test_a_source_that_cannot_be_written_to_is_enough(self, case: Case) -> None:
        """C60; root may write anywhere, so the modes are checked instead."""
        directory = case.source({"w": vector()})
        os.chmod(directory / "model.safetensors", 0o444)
        os.chmod(directory, 0o555)
        case.recipe(*take("w"))
        before = snapshot(directory)
        case.converted()
        assert snapshot(directory) == before
        os.chmod(directory, 0o755)
