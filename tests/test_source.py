"""Opening and reading checkpoints, against the safetensors library where it can read them."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from ninfer_convert.errors import OutputError, SourceError
from ninfer_convert.source import files as source_files
from ninfer_convert.source import io as source_io
from ninfer_convert.source.checkpoint import Checkpoint, open_checkpoint

INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=5), child, max_size=3),
    max_leaves=6,
)
FILES = st.sampled_from([FIRST, SECOND, "gone.safetensors", "/", "..", "x/y.safetensors", "\0.safetensors"])
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def write(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> Path:
    """Writes a file by hand, in the given order: name -> dtype, shape, bytes."""
    entries, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(entries).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def u8(*values: int) -> tuple[str, list[int], bytes]:
    return "U8", [len(values)], bytes(values)


def write_index(directory: Path, weight_map: Any, **metadata: Any) -> Path:
    document = {"weight_map": weight_map} | ({"metadata": metadata} if metadata else {})
    (directory / INDEX).write_text(json.dumps(document), encoding="utf-8")
    return directory


def sharded(directory: Path) -> Path:
    """Two shards: a and b in the first, c in the second."""
    write(directory / FIRST, {"a": u8(1, 2), "b": u8(3)})
    write(directory / SECOND, {"c": u8(4, 5, 6)})
    return write_index(directory, {"a": FIRST, "b": FIRST, "c": SECOND}, total_size=6)


def read(checkpoint: Checkpoint, name: str) -> bytes:
    info = checkpoint.tensors[name]
    out = np.full(info.nbytes, 0xAA, np.uint8)
    checkpoint.read_into(info, 0, out)
    return out.tobytes()


def refused(location: Path | str, *patterns: str, **options: Any) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        open_checkpoint(location, **options)
    messages = tuple(caught.value.messages)
    for pattern in patterns:
        assert any(re.search(pattern, message) for message in messages), messages
    return messages


class TestLocation:
    def test_index_and_shards(self, tmp_path: Path) -> None:
        with open_checkpoint(sharded(tmp_path), name="base") as checkpoint:
            assert {name: read(checkpoint, name) for name in checkpoint.tensors} == {
                "a": b"\1\2",
                "b": b"\3",
                "c": b"\4\5\6",
            }
            assert [info.file for info in checkpoint.tensors.values()] == [FIRST, FIRST, SECOND]
            assert (checkpoint.name, checkpoint.location, list(checkpoint.files)) == (
                "base", str(tmp_path), [FIRST, SECOND],
            )  # fmt: skip
            assert checkpoint.warnings == ()
            assert checkpoint.absent == {}
            assert (checkpoint.repo, checkpoint.revision, checkpoint.config) == (None, None, None)

    @pytest.mark.parametrize("name", ["model.safetensors", "anything.safetensors"])
    def test_directory_with_one_file_and_the_file_itself(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, {"w": u8(7)})
        (tmp_path / "config.json").write_text('{"model_type": "m"}')
        (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf{}\r\n")
        for location in (tmp_path, path, f"{tmp_path}/", os.fsencode(path).decode()):
            with open_checkpoint(location) as checkpoint:
                assert read(checkpoint, "w") == b"\7"
                assert checkpoint.config == {"model_type": "m"}
                assert checkpoint.resource("tokenizer.json") == b"\xef\xbb\xbf{}\r\n"

    def test_file_named_without_a_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "m.safetensors", {"w": u8(7)})
        (tmp_path / "config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        with open_checkpoint("m.safetensors") as checkpoint:
            assert read(checkpoint, "w") == b"\7"
            assert checkpoint.config == {}

    def test_the_index_decides_and_one_warning_names_the_other_files(self, tmp_path: Path) -> None:
        shard = "model-00001-of-00001.safetensors"
        write(tmp_path / shard, {"w": ("F32", [], struct.pack("<f", 1.0))})
        write(tmp_path / "model.safetensors", {"w": ("F32", [], struct.pack("<f", 2.0))})
        write(tmp_path / "adapter_model.safetensors", {"lora": u8(1)})
        (tmp_path / "x.safetensors").mkdir()
        (tmp_path / "._model.safetensors").write_bytes(b"")
        write_index(tmp_path, {"w": shard})
        with open_checkpoint(tmp_path) as checkpoint:
            assert read(checkpoint, "w") == struct.pack("<f", 1.0)
            (warning,) = checkpoint.warnings
        assert warning == (
            f"{tmp_path}: not read, because {INDEX} decides: adapter_model.safetensors, model.safetensors"
        )

    def test_model_safetensors_decides_without_an_index(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", {"w": u8(1)})
        write(tmp_path / "consolidated.safetensors", {"w": u8(2)})
        with open_checkpoint(tmp_path) as checkpoint:
            assert read(checkpoint, "w") == b"\1"
            assert [w.partition(": ")[2] for w in checkpoint.warnings] == [
                "not read, because model.safetensors decides: consolidated.safetensors"
            ]

    def test_a_file_beside_an_index_is_read_alone_with_a_warning(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        with open_checkpoint(tmp_path / SECOND) as checkpoint:
            assert list(checkpoint.tensors) == ["c"]
            assert re.search(f"only this file is read, although {INDEX} lies beside", checkpoint.warnings[0])

    def test_a_directory_called_like_a_file_is_a_directory(self, tmp_path: Path) -> None:
        write(tmp_path / "x.safetensors" / "model.safetensors", {"w": u8(9)})
        with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
            assert read(checkpoint, "w") == b"\x09"
        refused(tmp_path, r"no \.safetensors file in this directory$")

    def test_locations_that_are_nothing(self, tmp_path: Path) -> None:
        refused(tmp_path / "gone", r"gone: no such file or directory")
        refused("", r"a source location is empty; required: a path")
        refused("a\0b", r"a\\x00b: no path is spelled like this")
        refused("a\ud800", r"a\\ud800: no path is spelled like this")
        refused("x" * 5000, r"name too long")
        (tmp_path / "weights.pt").write_bytes(b"")
        refused(tmp_path / "weights.pt", r"weights\.pt: is neither a directory nor a \.safetensors file")
        refused(tmp_path, r"no \.safetensors file in this directory; found weights\.pt, which are other kinds")

    def test_several_files_without_an_index(self, tmp_path: Path) -> None:
        for name in "ab":
            write(tmp_path / f"{name}.safetensors", {"w": u8(1)})
        refused(tmp_path, rf"2 \.safetensors files \(a\.safetensors, b\.safetensors\) and neither {INDEX} nor")

    def test_one_shard_without_its_index(self, tmp_path: Path) -> None:
        write(tmp_path / FIRST, {"w": u8(1)})
        refused(tmp_path, rf"{FIRST} is one shard of 2 and {INDEX} is missing: download incomplete")

    def test_an_adapter_alone_is_no_model(self, tmp_path: Path) -> None:
        write(tmp_path / "adapter_model.safetensors", {"w": u8(1)})
        refused(tmp_path, r"holds only adapter_model\.safetensors, which is no model")

    @pytest.mark.parametrize("kind", ["pipe", "directory"])
    def test_weights_must_be_a_regular_file(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / FIRST
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
        write_index(tmp_path, {"w": FIRST})
        refused(tmp_path, rf"{FIRST}: is .*; required: a regular file")

    @pytest.mark.parametrize("target", ["/dev/zero", "../disk/big.safetensors"])
    def test_a_link_to_weights_elsewhere_is_refused_unless_the_file_itself_is_given(
        self, tmp_path: Path, target: str
    ) -> None:
        write(tmp_path / "disk" / "big.safetensors", {"w": u8(5)})
        model = tmp_path / "model"
        model.mkdir()
        (model / "model.safetensors").symlink_to(target)
        refused(model, r"model\.safetensors: is a link to .*, outside the checkpoint's directory; put the file itself")
        (model / "model.safetensors").rename(model / FIRST)
        write_index(model, {"w": FIRST})
        refused(model, rf"{FIRST}: is a link to .*, outside the checkpoint's directory")
        if target != "/dev/zero":
            with open_checkpoint(model / FIRST) as checkpoint:
                assert read(checkpoint, "w") == b"\5"

    def test_an_index_elsewhere_is_refused(self, tmp_path: Path) -> None:
        model = sharded(tmp_path / "model")
        (model / INDEX).rename(tmp_path / "index.json")
        (model / INDEX).symlink_to("../index.json")
        refused(model, r"index\.json: is a link to .*index\.json, outside the checkpoint's directory")

    def test_links_inside_the_directory_are_followed(self, tmp_path: Path) -> None:
        model = sharded(tmp_path / "model")
        (model / "parts").mkdir()
        (model / FIRST).rename(model / "parts" / "one")
        (model / FIRST).symlink_to("parts/one")
        (tmp_path / "alias").symlink_to(model)
        for location in (model, tmp_path / "alias"):
            with open_checkpoint(location) as checkpoint:
                assert read(checkpoint, "a") == b"\1\2"

    def test_links_of_a_download_directory_to_blobs_of_the_cache_are_followed(self, tmp_path: Path) -> None:
        blobs = tmp_path / "cache" / "models--o--n" / "blobs"
        blobs.mkdir(parents=True)
        write(blobs / ("a" * 64), {"w": u8(5)})
        (blobs / ("b" * 40)).write_text("{}")
        model = tmp_path / "download"
        model.mkdir()
        (model / "model.safetensors").symlink_to(blobs / ("a" * 64))
        (model / "config.json").symlink_to(blobs / ("b" * 40))
        with open_checkpoint(model) as checkpoint:
            assert (read(checkpoint, "w"), checkpoint.config) == (b"\5", {})


class TestIndex:
    @pytest.mark.parametrize(
        ("text", "pattern"),
        [
            ("[]", r"is a list; required: a JSON object"),
            ("{", r"not JSON"),
            ("{}", r"member weight_map is missing"),
            ('{"weight_map": []}', r"weight_map is a list; required: an object"),
            ('{"weight_map": null}', r"weight_map is null"),
            ('{"weight_map": {}}', r"weight_map is empty"),
            ('{"weight_map": {"x": 1}}', r"weight_map member x: the file is an integer; required: a string"),
            ('{"weight_map": {"x": null}}', r"weight_map member x: the file is null"),
            ('{"weight_map": {"x": "../other/m.safetensors"}}', r"x: file \"\.\./other/m\.safetensors\" is not"),
            ('{"weight_map": {"x": "/m.safetensors"}}', r"member x: .*is not a plain file name"),
            ('{"weight_map": {"x": "d/m.safetensors"}}', r"member x: .*is not a plain file name"),
            ('{"weight_map": {"x": "d\\\\m.safetensors"}}', r"member x: .*is not a plain file name"),
            ('{"weight_map": {"x": "m\\u0000.safetensors"}}', r"member x: .*is not a plain file name"),
            ('{"weight_map": {"x": ".."}}', r"member x: .*is not a plain file name"),
            ('{"weight_map": {"x": ""}}', r"member x: .*is not a plain file name"),
            ('{"weight_map": {"x": "m.bin"}}', r"member x: file m\.bin does not end with \.safetensors"),
            ('{"weight_map": {"x": "m.safetensors", "x": "n.safetensors"}}', r'member "x" is given twice'),
            ("version https://git-lfs.github.com/spec/v1\n", r"Git LFS pointer.*git lfs pull"),
        ],
    )  # fmt: skip
    def test_malformed_index_is_rejected_by_path(self, tmp_path: Path, text: str, pattern: str) -> None:
        (tmp_path / INDEX).write_text(text)
        (message,) = refused(tmp_path, pattern)
        assert message.startswith(str(tmp_path / INDEX))

    def test_an_index_above_the_limit_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source_files, "MAX_INDEX_BYTES", 50)
        sharded(tmp_path)
        refused(tmp_path, r"has \d+ bytes; at most 50 are read")

    def test_many_bad_members_are_counted(self, tmp_path: Path) -> None:
        write_index(tmp_path, {f"t{place}": "" for place in range(50)})
        messages = refused(tmp_path)
        assert len(messages) == 21
        assert messages[-1] == "and 30 more problems"

    def test_listed_but_not_in_the_shard(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND, "x": SECOND})
        (message,) = refused(tmp_path)
        assert message == f"{tmp_path / INDEX}: lists tensor x in shard {SECOND}, whose header lacks it"

    def test_in_the_shard_but_not_listed(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        write_index(tmp_path, {"a": FIRST, "c": SECOND})
        (message,) = refused(tmp_path)
        assert message == f"{tmp_path / FIRST}: shard holds tensor b, which {tmp_path / INDEX} does not list for it"

    def test_listed_for_the_wrong_shard(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        write_index(tmp_path, {"a": FIRST, "b": SECOND, "c": SECOND})
        refused(
            tmp_path,
            rf"lists tensor b in shard {SECOND}, whose header lacks it; it is in {FIRST}",
            rf"{FIRST}: shard holds tensor b, which .* does not list for it",
        )

    def test_all_problems_of_all_files_are_reported_at_once(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        (tmp_path / FIRST).write_bytes(LFS_POINTER)
        raw = (tmp_path / SECOND).read_bytes()
        (tmp_path / SECOND).write_bytes(raw[:-1])
        (tmp_path / "config.json").write_text("[")
        messages = refused(
            tmp_path, rf"{FIRST}: is a Git LFS pointer", rf"{SECOND}: tensor c: .*truncated", r"config\.json: not JSON"
        )
        assert len(messages) == 3

    def test_a_file_with_many_problems_does_not_silence_another(self, tmp_path: Path) -> None:
        write(tmp_path / FIRST, {f"t{place}": ("F2", [1], b"") for place in range(90)})
        (tmp_path / SECOND).write_bytes(b"")
        write_index(tmp_path, {"a": FIRST, "b": SECOND})
        messages = refused(tmp_path, rf"{SECOND}: the file is empty")
        assert len(messages) == 21
        assert messages[-1] == "and 71 more problems"

    @pytest.mark.parametrize(
        ("total_size", "warns"),
        [(6, None), (6.0, None), (None, None), (0, "total_size is 0"), (6.5, "total_size is 6.5"),
         ("6", "total_size is a string"), (True, "total_size is a boolean")],
    )  # fmt: skip
    def test_a_wrong_total_size_is_a_warning(self, tmp_path: Path, total_size: Any, warns: str | None) -> None:
        sharded(tmp_path)
        write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND}, total_size=total_size)
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.warnings == (
                (f"{tmp_path / INDEX}: {warns}; the shards hold 6 bytes",) if warns else ()
            )

    def test_metadata_of_another_kind_is_passed_over(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        (tmp_path / INDEX).write_text(
            json.dumps({"metadata": [], "weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}, "more": 1})
        )
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.warnings == ()

    @settings(max_examples=150, derandomize=True, deadline=None)
    @given(
        st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), JSON_VALUES)
        | st.fixed_dictionaries({"weight_map": st.dictionaries(st.sampled_from("abcx"), FILES | JSON_VALUES)})
        | JSON_VALUES
    )
    def test_arbitrary_indexes_raise_nothing_but_source_error(self, document: Any) -> None:
        with tempfile.TemporaryDirectory() as name:
            sharded(Path(name))
            (Path(name) / INDEX).write_text(json.dumps(document))
            try:
                checkpoint = open_checkpoint(name)
            except SourceError:
                return
            checkpoint.close()
            assert {*checkpoint.tensors, *checkpoint.absent} == set(document["weight_map"])

    def test_an_absent_shard_opens_and_is_told(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        (tmp_path / SECOND).unlink()
        with open_checkpoint(tmp_path, prefixes={"": "m."}) as checkpoint:
            assert list(checkpoint.tensors) == ["m.a", "m.b"]
            assert checkpoint.absent == {"m.c": SECOND}
            assert list(checkpoint.files) == [FIRST]
            assert checkpoint.warnings == ()


class TestHubCache:
    def cache(self, root: Path, *, shared: bool = False) -> Path:
        """Returns models--o--n, with config, tokenizer and weights linked into its blobs."""
        entry = root / "models--o--n"
        snapshot, blobs = entry / "snapshots" / COMMIT, entry / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        write(blobs / "w1", {"w": u8(3)})
        if shared:
            (root / "blobs" / "ab").mkdir(parents=True)
            (blobs / "w1").rename(root / "blobs" / "ab" / "abcd")
            (blobs / "w1").symlink_to("../../blobs/ab/abcd")
        (blobs / "c1").write_text('{"model_type": "m"}')
        (snapshot / "model.safetensors").symlink_to("../../blobs/w1")
        (snapshot / "config.json").symlink_to("../../blobs/c1")
        (entry / "refs").mkdir()
        (entry / "refs" / "main").write_text(COMMIT)
        return entry

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_snapshot_tells_repository_and_commit(self, tmp_path: Path, shared: bool) -> None:
        snapshot = self.cache(tmp_path, shared=shared) / "snapshots" / COMMIT
        (tmp_path / "link").symlink_to(snapshot)
        for location in (snapshot, snapshot / "model.safetensors", tmp_path / "link"):
            with open_checkpoint(location) as checkpoint:
                assert read(checkpoint, "w") == b"\3"
                assert (checkpoint.repo, checkpoint.revision) == ("o/n", COMMIT)
                assert checkpoint.config == {"model_type": "m"}
                assert checkpoint.tensors["w"].file == "model.safetensors"
                assert checkpoint.warnings == ()

    def test_repository_without_an_owner_and_a_subdirectory(self, tmp_path: Path) -> None:
        write(tmp_path / "models--gpt2" / "snapshots" / COMMIT / "fp8" / "model.safetensors", {"w": u8(1)})
        with open_checkpoint(tmp_path / "models--gpt2" / "snapshots" / COMMIT / "fp8") as checkpoint:
            assert (checkpoint.repo, checkpoint.revision) == ("gpt2", COMMIT)

    def test_a_name_that_is_no_commit_is_not_taken_for_one(self, tmp_path: Path) -> None:
        write(tmp_path / "models--o--n" / "snapshots" / "latest" / "model.safetensors", {"w": u8(1)})
        with open_checkpoint(tmp_path / "models--o--n" / "snapshots" / "latest") as checkpoint:
            assert (checkpoint.repo, checkpoint.revision) == (None, None)

    @pytest.mark.parametrize("tail", ["", "snapshots"])
    def test_the_cache_entry_itself_is_resolved_by_its_main_reference(self, tmp_path: Path, tail: str) -> None:
        entry = self.cache(tmp_path)
        with open_checkpoint(entry / tail) as checkpoint:
            assert read(checkpoint, "w") == b"\3"
            assert checkpoint.revision == COMMIT
            assert re.search(f"refs/main points to snapshot {COMMIT}, which is read", checkpoint.warnings[0])

    def test_a_cache_entry_that_cannot_be_resolved_names_its_snapshots(self, tmp_path: Path) -> None:
        entry = self.cache(tmp_path)
        (entry / "refs" / "main").write_text(OTHER_COMMIT)
        refused(entry, rf"refs/main names {OTHER_COMMIT}, which is not there.*one of its snapshots: {COMMIT}")
        (entry / "refs" / "main").write_text("main")
        refused(entry, r"refs/main: holds main; required: a commit of 40 hexadecimal digits")
        (entry / "refs" / "main").unlink()
        refused(entry, rf"refs/main is missing: download incomplete; give one of its snapshots: {COMMIT}")
        (entry / "snapshots" / COMMIT).rename(tmp_path / "moved")
        refused(entry, r"refs/main is missing: download incomplete; it has no snapshot")

    def test_a_link_to_nothing_is_an_incomplete_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = self.cache(tmp_path)
        (entry / "blobs" / "w1").rename(entry / "blobs" / "w1.incomplete")
        opened: list[str] = []
        real = os.open

        def watched(path: Any, *rest: Any, **more: Any) -> int:
            opened.append(os.fspath(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(os, "open", watched)
        link = entry / "snapshots" / COMMIT / "model.safetensors"
        refused(link.parent, rf"{link}: is a link to \.\./\.\./blobs/w1, which does not exist: download incomplete")
        refused(link, rf"{link}: is a link to \.\./\.\./blobs/w1, which does not exist: download incomplete")
        assert not [path for path in opened if path.endswith(".incomplete")]

    @pytest.mark.parametrize("file", [FIRST, INDEX, "config.json"])
    def test_any_link_to_nothing_is_refused(self, tmp_path: Path, file: str) -> None:
        sharded(tmp_path)
        (tmp_path / file).unlink(missing_ok=True)
        (tmp_path / file).symlink_to("../blobs/gone")
        refused(tmp_path, rf"{file}: is a link to \.\./blobs/gone, which does not exist: download incomplete")


class TestConfigAndResources:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        write(tmp_path / "m" / "model.safetensors", {"w": u8(1)})
        return tmp_path / "m"

    def test_config_is_utf8_in_every_locale(self, directory: Path) -> None:
        (directory / "config.json").write_bytes('\ufeff{"name": "é空", "limit": Infinity}'.encode())
        script = (
            "import sys; from ninfer_convert.source.checkpoint import open_checkpoint;"
            "print(ascii(open_checkpoint(sys.argv[1]).config['name']))"
        )
        environment = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        command = [sys.executable, "-c", script, str(directory)]
        run = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        assert run.stdout.strip() == r"'\xe9\u7a7a'"

    @pytest.mark.parametrize(
        ("raw", "pattern"),
        [
            (b"[]", r"config\.json: is a list; required: a JSON object"),
            (b"\xff", r"config\.json: byte 0 is not UTF-8 text"),
            (b'{"a": 1, "a": 2}', r'config\.json: member "a" is given twice'),
            (b'{"a":' * 65 + b"1" + b"}" * 65, r"config\.json: JSON nested deeper than 64 levels"),
            (LFS_POINTER, r"config\.json: is a Git LFS pointer.*git lfs pull"),
            (b" " * (1 << 24) + b"{}", r"config\.json: has 16777218 bytes; at most 16777216 are read"),
        ],
    )  # fmt: skip
    def test_malformed_config_is_rejected(self, directory: Path, raw: bytes, pattern: str) -> None:
        (directory / "config.json").write_bytes(raw)
        refused(directory, pattern)

    def test_resources_are_byte_for_byte(self, directory: Path) -> None:
        raw = '\ufeff{"空": "é"}\r\n'.encode() + bytes(range(256))
        (directory / "sub").mkdir()
        (directory / "sub" / "空.json").write_bytes(raw)
        with open_checkpoint(directory) as checkpoint:
            assert checkpoint.has_file("sub/空.json")
            assert checkpoint.resource("sub/空.json") == raw
            assert not checkpoint.has_file("sub/other.json")

    def test_resources_that_cannot_be_taken(self, directory: Path) -> None:
        (directory / "pointer").write_bytes(LFS_POINTER)
        (directory / "dangling").symlink_to("gone")
        (directory / "sub").mkdir()
        os.mkfifo(directory / "pipe")
        with open_checkpoint(directory) as checkpoint:
            for file, pattern in {
                "gone.json": r"gone\.json: no such file or directory",
                "pointer": r"pointer: is a Git LFS pointer",
                "dangling": r"dangling: is a link to gone, which does not exist: download incomplete",
                "sub": r"sub: is a directory; required: a regular file",
                "pipe": r"pipe: is not a file that holds bytes; required: a regular file",
                "model.safetensors/x": r"not a directory",
            }.items():
                with pytest.raises(SourceError, match=pattern):
                    checkpoint.resource(file)
            assert checkpoint.has_file("dangling")

    @pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a//b", "./a", "a/../b", "", "a\0b", "..", "\ud800"])
    def test_resource_paths_stay_inside_the_directory(self, directory: Path, file: str) -> None:
        with open_checkpoint(directory) as checkpoint:
            for call in (checkpoint.resource, checkpoint.has_file):
                with pytest.raises(SourceError, match="required: a relative path inside"):
                    call(file)

    def test_resource_links_stay_inside_the_directory(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("key")
        (directory / "tokenizer.json").symlink_to(tmp_path / "secret")
        (directory / "real.json").write_text("{}")
        (directory / "alias.json").symlink_to("real.json")
        (directory / "out").symlink_to(tmp_path)
        with open_checkpoint(directory) as checkpoint:
            assert checkpoint.resource("alias.json") == b"{}"
            for file in ("tokenizer.json", "out/secret"):
                with pytest.raises(SourceError, match=r"is a link to .*secret, outside the checkpoint's directory"):
                    checkpoint.resource(file)

    def test_config_link_stays_inside_the_directory(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere.json").write_text("{}")
        (directory / "config.json").symlink_to(tmp_path / "elsewhere.json")
        refused(directory, r"config\.json: is a link to .*elsewhere\.json, outside the checkpoint's directory")

    def test_resource_size_has_a_limit(self, directory: Path) -> None:
        with (directory / "huge.json").open("wb") as file:
            file.truncate(source_files.MAX_RESOURCE_BYTES + 1)
        with (
            open_checkpoint(directory) as checkpoint,
            pytest.raises(SourceError, match=r"huge\.json: has 268435457 bytes; at most 268435456 are read"),
        ):
            checkpoint.resource("huge.json")


class TestReading:
    def test_every_byte_equals_the_library(self, tmp_path: Path) -> None:
        values = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
        arrays = {
            "bf16": values.astype(ml_dtypes.bfloat16),
            "f16": values.astype(np.float16),
            "f32": values,
            "u8": np.arange(200, dtype=np.uint8),
            "scalar": np.array(0.5, np.float32),
            "marker": np.empty((0, 4), np.float32),
        }
        path = tmp_path / "model.safetensors"
        save_file(arrays, path)
        with open_checkpoint(tmp_path) as checkpoint, safe_open(path, framework="np") as oracle:
            assert set(checkpoint.tensors) == set(oracle.keys())
            for name, info in checkpoint.tensors.items():
                whole = oracle.get_tensor(name).tobytes()
                assert read(checkpoint, name) == whole
                for begin in range(0, info.nbytes, 3):
                    out = np.empty(min(5, info.nbytes - begin), np.uint8)
                    checkpoint.read_into(info, begin, out)
                    assert out.tobytes() == whole[begin : begin + 5]

    def test_dtypes_numpy_does_not_know_are_listed_and_read(self, tmp_path: Path) -> None:
        stored = {
            "e4m3": ("F8_E4M3", [1], b"\x7e"), "e5m2": ("F8_E5M2", [1], b"\x7b"), "e8m0": ("F8_E8M0", [1], b"\x7f"),
            "f4": ("F4", [2], b"\x21"), "bool": ("BOOL", [1], b"\1"), "i64": ("I64", [1], b"\xff" * 8),
            "u16": ("U16", [1], b"\1\2"), "f64": ("F64", [1], bytes(8)), "c64": ("C64", [1], bytes(8)),
        }  # fmt: skip
        write(tmp_path / "model.safetensors", stored)
        with open_checkpoint(tmp_path) as checkpoint:
            for name, (dtype, shape, data) in stored.items():
                info = checkpoint.tensors[name]
                assert (info.dtype, list(info.shape), read(checkpoint, name)) == (dtype, shape, data)

    def test_files_are_never_mapped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def unmappable(*_: Any, **__: Any) -> None:
            raise OSError(19, "No such device")

        write(tmp_path / "model.safetensors", {"w": u8(1, 2)})
        monkeypatch.setattr(mmap, "mmap", unmappable)
        with open_checkpoint(tmp_path) as checkpoint:
            assert read(checkpoint, "w") == b"\1\2"

    def test_short_and_interrupted_reads_are_continued(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = bytes(range(256)) * 4
        write(tmp_path / "model.safetensors", {"w": ("U8", [1024], data)})
        (tmp_path / "tokenizer.json").write_bytes(data)
        calls: list[int] = []

        def halting(descriptor: int, buffers: list[memoryview], position: int) -> int:
            calls.append(position)
            if len(calls) == 3:
                raise InterruptedError
            chunk = os.pread(descriptor, min(7, len(buffers[0])), position)
            buffers[0][: len(chunk)] = chunk
            return len(chunk)

        monkeypatch.setattr(os, "preadv", halting)
        with open_checkpoint(tmp_path) as checkpoint:
            assert read(checkpoint, "w") == data
            assert checkpoint.resource("tokenizer.json") == data
        assert len(calls) > 2 * len(data) // 7

    def test_one_call_asks_for_no_more_than_the_system_moves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(source_io, "MAX_READ_BYTES", 10)
        asked: list[int] = []
        real = os.preadv

        def watched(descriptor: int, buffers: list[memoryview], position: int) -> int:
            asked.append(len(buffers[0]))
            return real(descriptor, buffers, position)

        write(tmp_path / "model.safetensors", {"w": u8(*range(25))})
        with open_checkpoint(tmp_path) as checkpoint:
            monkeypatch.setattr(os, "preadv", watched)
            assert read(checkpoint, "w") == bytes(range(25))
        assert asked == [10, 10, 5]

    def test_positions_above_two_gibibytes_are_read(self, tmp_path: Path) -> None:
        nbytes = 0x7FFFF000 + 0x2000
        text = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + nbytes)
            file.seek(8 + len(text) + nbytes - 3)
            file.write(b"end")
        with open_checkpoint(tmp_path) as checkpoint:
            out = np.empty(3, np.uint8)
            checkpoint.read_into(checkpoint.tensors["w"], nbytes - 3, out)
        assert out.tobytes() == b"end"

    def test_a_file_cut_while_it_is_open_is_an_error_and_not_a_signal(self, tmp_path: Path) -> None:
        path = write(tmp_path / "model.safetensors", {"v": u8(*range(8)), "w": u8(*range(32))})
        with open_checkpoint(tmp_path, prefixes={"": "m."}) as checkpoint:
            info = checkpoint.tensors["m.w"]
            read(checkpoint, "m.v")
            os.truncate(path, info.begin + 10)
            expected = (
                rf"^{path}: tensor w: file changed or truncated while reading:"
                rf" at byte {info.begin + 4} got 6 of 20 bytes$"
            )
            with pytest.raises(SourceError, match=expected):
                checkpoint.read_into(info, 4, np.empty(20, np.uint8))

    @pytest.mark.parametrize(
        ("change", "pattern"),
        [
            (lambda path: os.truncate(path, 9), r"truncated while reading: it had \d+ bytes and now has 9"),
            (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"changed or truncated .* it had"),
            (lambda path: os.utime(path, ns=(1, 1)), r"file changed while reading: it was written to"),
            (lambda path: (path.rename(f"{path}.old"), path.write_bytes(Path(f"{path}.old").read_bytes())),
             r"another file took its place"),
            (lambda path: path.unlink(), r"no such file or directory"),
        ],
    )  # fmt: skip
    def test_a_changed_file_is_noticed(
        self, tmp_path: Path, change: Callable[[Path], object], pattern: str
    ) -> None:
        path = write(tmp_path / "model.safetensors", {"w": u8(1, 2, 3)})
        with open_checkpoint(tmp_path) as checkpoint:
            checkpoint.verify_unchanged()
            change(path)
            with pytest.raises(SourceError, match=pattern) as caught:
                checkpoint.verify_unchanged()
            assert str(path) in str(caught.value)
            with pytest.raises(SourceError, match=pattern):
                checkpoint.read_into(checkpoint.tensors["w"], 0, np.empty(3, np.uint8))

    def test_every_changed_file_is_named(self, tmp_path: Path) -> None:
        with open_checkpoint(sharded(tmp_path)) as checkpoint:
            for file in (FIRST, SECOND):
                os.utime(tmp_path / file, ns=(1, 1))
            with pytest.raises(SourceError) as caught:
                checkpoint.verify_unchanged()
        assert len(caught.value.messages) == 2

    def test_a_medium_that_does_not_answer_may_be_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        write(tmp_path / "model.safetensors", {"w": u8(1)})
        with open_checkpoint(tmp_path) as checkpoint:
            monkeypatch.setattr(os, "preadv", broken)
            with pytest.raises(OutputError, match=r"model\.safetensors: cannot be read: Input/output error"):
                read(checkpoint, "w")
            with pytest.raises(OutputError, match="cannot be read"):
                open_checkpoint(tmp_path)

    def test_ranges_and_arrays_that_cannot_be_meant(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", {"v": u8(9), "w": u8(1, 2, 3, 4), "z": u8(9)})
        with open_checkpoint(tmp_path) as checkpoint:
            info = checkpoint.tensors["w"]
            for begin, size in ((-1, 1), (0, 5), (4, 1), (5, 0)):
                with pytest.raises(ValueError, match=r"are not inside w, which has 4"):
                    checkpoint.read_into(info, begin, np.empty(size, np.uint8))
            constant = np.zeros(4, np.uint8)
            constant.flags.writeable = False
            for out in (np.empty(8, np.uint8)[::2], np.empty(2, np.uint16), constant):
                with pytest.raises(ValueError, match="C-contiguous, writable uint8"):
                    checkpoint.read_into(info, 0, out)  # type: ignore[arg-type]
            matrix = np.empty((2, 2), np.uint8)
            checkpoint.read_into(info, 0, matrix)
            assert matrix.tolist() == [[1, 2], [3, 4]]
            checkpoint.read_into(info, 4, np.empty(0, np.uint8))
        with pytest.raises(ValueError, match="the checkpoint is closed"):
            checkpoint.read_into(info, 0, np.empty(1, np.uint8))

    def test_advice_covers_exactly_the_range(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "model.safetensors", {"v": u8(9), "w": u8(1, 2, 3, 4)})
        given: list[tuple[int, int, int]] = []

        def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
            given.append((offset, length, advice))
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "posix_fadvise", advise)
        with open_checkpoint(tmp_path) as checkpoint:
            info = checkpoint.tensors["w"]
            checkpoint.prefetch(info, 1, 3)
            checkpoint.release(info, 0, 4)
            checkpoint.release(info, 2, 2)
            with pytest.raises(ValueError, match="are not inside w"):
                checkpoint.prefetch(info, 0, 5)
        assert given == [
            (info.begin + 1, 2, os.POSIX_FADV_WILLNEED),
            (info.begin, 4, os.POSIX_FADV_DONTNEED),
        ]

    def test_threads_share_a_bounded_number_of_open_files(self, tmp_path: Path) -> None:
        weight_map, expected = {}, {}
        for place in range(80):
            name, file = f"t{place}", f"s{place:02}.safetensors"
            expected[name] = bytes([place, 255 - place])
            weight_map[name] = file
            write(tmp_path / file, {name: u8(*expected[name])})
        write_index(tmp_path, weight_map)
        before = len(os.listdir("/proc/self/fd"))
        wrong: list[str] = []
        with open_checkpoint(tmp_path) as checkpoint:

            def work(seed: int) -> None:
                for place in np.random.default_rng(seed).permutation(80).tolist() * 3:
                    if read(checkpoint, f"t{place}") != expected[f"t{place}"]:
                        wrong.append(f"t{place}")

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(os.listdir("/proc/self/fd")) - before <= source_io.MAX_OPEN_FILES
        assert not wrong
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_borrowed_file_outlives_the_closing(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", {"w": u8(1)})
        with open_checkpoint(tmp_path) as checkpoint:
            info = checkpoint.files["model.safetensors"]
        files = source_io.OpenFiles()
        with files.borrow(info.path, info.stamp) as descriptor:
            files.close()
            assert os.fstat(descriptor).st_size == info.size
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    def test_descriptors_are_not_inherited(self, tmp_path: Path) -> None:
        descriptor = source_io.open_regular(str(write(tmp_path / "m.safetensors", {"w": u8(1)})))
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


class TestPaths:
    @pytest.mark.parametrize("name", ["é 空/mo del".encode(), b"\xff-model", b"line\nfeed\x1b[2J"])
    def test_any_path_opens_and_its_messages_are_printable(self, tmp_path: Path, name: bytes) -> None:
        directory = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(directory)
        path = Path(os.fsdecode(directory))
        sharded(path)
        with open_checkpoint(path) as checkpoint:
            assert read(checkpoint, "c") == b"\4\5\6"
        write(path / "other.safetensors", {"w": u8(1)})
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.warnings[0].isprintable()
            assert checkpoint.warnings[0].encode()
        (path / FIRST).write_bytes(b"")
        (message,) = refused(path)
        assert message.isprintable()
        assert message.encode()

    def test_file_names_of_the_index_are_utf8_on_disk_in_every_locale(self, tmp_path: Path) -> None:
        write(tmp_path / "é空.safetensors", {"w": u8(1)})
        write_index(tmp_path, {"w": "é空.safetensors"})
        script = (
            "import sys, numpy; from ninfer_convert.source.checkpoint import open_checkpoint;"
            "c = open_checkpoint(sys.argv[1]); out = numpy.empty(1, 'u1');"
            "c.read_into(c.tensors['w'], 0, out); print(out[0], len(c.warnings), ascii(c.tensors['w'].file))"
        )
        environment = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        command = [sys.executable, "-c", script, str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        assert run.stdout.startswith("1 0 '")

    def test_file_identity_is_recorded(self, tmp_path: Path) -> None:
        path = write(tmp_path / "model.safetensors", {"w": u8(1)})
        with open_checkpoint(path) as checkpoint:
            info = checkpoint.files["model.safetensors"]
        status = path.stat()
        assert (info.name, info.path, info.size) == ("model.safetensors", str(path), status.st_size)
        assert (info.mtime_ns, info.device, info.inode) == (status.st_mtime_ns, status.st_dev, status.st_ino)
        assert re.fullmatch("[0-9a-f]{64}", info.header_sha256)


class TestNames:
    def test_prefix_rules_change_names_and_are_recorded(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", {"model.layers.0.w": u8(1), "lm_head.weight": u8(2)})
        rules = {"model.": "model.language_model.", "lm_head.": "lm_head."}
        with open_checkpoint(tmp_path, prefixes=rules) as checkpoint:
            assert list(checkpoint.tensors) == ["model.language_model.layers.0.w", "lm_head.weight"]
            info = checkpoint.tensors["model.language_model.layers.0.w"]
            assert (info.name, info.stored_name) == ("model.language_model.layers.0.w", "model.layers.0.w")
            assert read(checkpoint, info.name) == b"\1"
            assert checkpoint.applied_prefixes == {"model.": "model.language_model."}

    def test_problems_of_prefix_rules_are_reported_and_counted(self, tmp_path: Path) -> None:
        tensors = {f"{beginning}{place}": u8(1) for beginning in ("a.", "b.") for place in range(30)}
        write(tmp_path / "model.safetensors", tensors)
        messages = refused(tmp_path, r"tensors a\.0 and b\.0 are ambiguous", prefixes={"a.": "b."})
        assert len(messages) == 21

    def test_nearest_names_are_names_that_exist(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", {"model.norm.weight": u8(1), "lm_head.weight": u8(2)})
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.nearest("lm_haed.weight") == ("lm_head.weight",)

    def test_foreign_quantization_is_told_by_config_or_tensors(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", {"m.qweight": u8(1), "m.scales": u8(2)})
        with open_checkpoint(tmp_path) as checkpoint:
            assert re.search("m.qweight .*GPTQ or AWQ; accepted: ", checkpoint.foreign_quantization() or "")
        (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
        with open_checkpoint(tmp_path) as checkpoint:
            assert re.search("quant_method is gptq; accepted: ", checkpoint.foreign_quantization() or "")
