"""Header parsing: the safetensors library is the oracle for what is legal, literal bytes for what is not."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ninfer_convert.errors import SourceError
from ninfer_convert.source.header import DTYPE_BITS, Header, TensorEntry, is_lfs_pointer, parse_header
from ninfer_convert.strict_json import load_object

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4999802720\n"
)


def parse(raw: bytes) -> Header:
    return parse_header(lambda begin, end: raw[begin:end], len(raw), "m.safetensors")


def framed(header: str | bytes, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def shard(data: bytes = b"", /, **tensors: Any) -> bytes:
    return framed(json.dumps(tensors), data)


def library_accepts(raw: bytes, directory: Path) -> bool:
    path = directory / "oracle.safetensors"
    path.write_bytes(raw)
    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except SafetensorError:
        return False
    return True


def rejected(raw: bytes, *patterns: str) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        parse(raw)
    messages = tuple(caught.value.messages)
    assert all(message.startswith("m.safetensors") for message in messages)
    for pattern in patterns:
        assert any(re.search(pattern, message) for message in messages), messages
    return messages


def test_entries_equal_the_library_for_every_numpy_dtype(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {
        "bf16": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "f16": np.arange(4, dtype=np.float16),
        "f32": np.float32([[1.5]]),
        "u8": np.arange(5, dtype=np.uint8),
        "i64": np.int64([-1]),
        "bool": np.array([True]),
        "scalar": np.array(2.0, dtype=np.float32),
        "empty": np.empty((0, 4), dtype=np.float32),
    }
    save_file(arrays, path, metadata={"origin": "test"})
    raw = path.read_bytes()
    header = parse(raw)
    assert header.metadata == {"origin": "test"}
    with safe_open(path, framework="np") as file:
        assert {tensor.name for tensor in header.entries} == set(file.keys())
        for tensor in header.entries:
            view = file.get_slice(tensor.name)
            assert (tensor.dtype, list(tensor.shape)) == (view.get_dtype(), view.get_shape())
            stored = raw[tensor.begin : tensor.begin + tensor.nbytes]
            assert stored == file.get_tensor(tensor.name).tobytes() == arrays[tensor.name].tobytes()


def test_every_dtype_of_the_library_is_known_with_its_bits(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(shard(b"\0", a=entry("NEW", [1], [0, 1])))
    with pytest.raises(SafetensorError) as caught:
        safe_open(path, framework="np")
    known = set(re.findall(r"`(\w+)`", str(caught.value))) - {"NEW"}
    assert {"BF16", "F4", "F8_E4M3"} <= known <= set(DTYPE_BITS)
    for dtype in known:
        bits = DTYPE_BITS[dtype]
        raw = shard(bytes(bits), a=entry(dtype, [2, 4], [0, bits]))
        assert library_accepts(raw, tmp_path)
        assert parse(raw).entries == (TensorEntry("a", dtype, (2, 4), len(raw) - bits, bits),)


def test_entries_come_in_order_of_position_and_the_digest_covers_length_and_json() -> None:
    raw = shard(b"12345", late=entry("U8", [3], [2, 5]), early=entry("U8", [2], [0, 2]))
    header = parse(raw)
    assert [tensor.name for tensor in header.entries] == ["early", "late"]
    assert header.nbytes == len(raw) - 5
    assert header.sha256 == hashlib.sha256(raw[:-5]).hexdigest()


@pytest.mark.parametrize(
    "raw",
    [
        framed('   {"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        framed('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}  ', b"x"),
        framed('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\n', b"x"),
        framed('{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        framed("{}"),
        framed('{"__metadata__":{}}'),
        shard(b"1234", k_scale=entry("F32", [], [0, 4])),
        shard(b"x", marker=entry("F32", [0, 4], [1, 1]), flag=entry("BOOL", [1], [0, 1])),
        shard(b"xy", a=entry("U8", [1], [0, 1]), marker=entry("F32", [0], [1, 1]), b=entry("U8", [1], [1, 2])),
        shard(b"x", f4=entry("F4", [2], [0, 1])),
        shard(b"xyz", f6=entry("F6_E2M3", [4], [0, 3])),
    ],
    ids=[
        "leading spaces", "trailing spaces", "trailing newline", "empty name", "no tensor", "empty metadata",
        "scalar", "marker at the end of the file", "marker in between", "F4", "F6",
    ],
)  # fmt: skip
def test_odd_but_legal_headers_are_taken(raw: bytes, tmp_path: Path) -> None:
    assert library_accepts(raw, tmp_path)
    assert all(tensor.begin + tensor.nbytes <= len(raw) for tensor in parse(raw).entries)


def test_unaligned_header_is_taken() -> None:
    for spaces in range(8):
        raw = framed('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' + " " * spaces, b"x")
        assert parse(raw).entries[0].begin == len(raw) - 1


@pytest.mark.parametrize(
    ("raw", "pattern"),
    [
        (b"", r"the file is empty.*8 bytes of header length"),
        (b"\x02\0\0", r"the file has 3 bytes.*8 bytes of header length"),
        (LFS_POINTER, r"Git LFS pointer.*git lfs pull"),
        (b"\xff" * 8 + b"{}", r"header length 18446744073709551615 is above the limit of 100000000"),
        (struct.pack("<Q", 100_000_001) + b"{}", r"header length 100000001 is above the limit"),
        (struct.pack("<Q", 100_000_000) + b"{}", r"header length 100000000 does not fit the 2 bytes.*truncated"),
        (struct.pack("<Q", 3) + b"{}", r"header length 3 does not fit the 2 bytes that follow"),
        (b"PK\x03\x04" + bytes(range(1, 40)), r"looks like a zip archive, perhaps a PyTorch checkpoint"),
        (b"\x80\x02}q\x01(X\x01\x02", r"looks like a Python pickle"),
        (b"GGUF\x03\0\0\x07" + b"\1" * 8, r"looks like a GGUF file"),
        (b"<!DOCTYPE html>", r"looks like an HTML or XML page, perhaps a failed download"),
        (framed(""), r"header: not JSON"),
        (framed("{"), r"header: not JSON: .* at line 1 column 2"),
        (framed("{}\0"), r"header: not JSON: Extra data"),
        (framed("{} {}"), r"header: not JSON: Extra data"),
        (framed("[]"), r"header: is a list; required: a JSON object"),
        (framed("null"), r"header: is null"),
        (framed("\ufeff{}"), r"header: not JSON: .*BOM"),
        (framed("{}".encode("utf-16")), r"header: byte 0 is not UTF-8"),
        (framed(b'{"\xff":1}'), r"header: byte 2 is not UTF-8 text"),
        (framed('{"\\ud800":1}'), r"half of a surrogate pair"),
        (framed('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}'), r"NaN is not JSON"),
        (framed('{"a":-Infinity}'), r"-Infinity is not JSON"),
        (framed('{"a":' + "1" * 5000 + "}"), r"integer has 5000 digits; at most 400"),
        (framed('{"a":' + "[" * 70 + "]" * 70 + "}"), r"nested deeper than 64"),
        (framed('{"a":' + "[" * 200_000), r"nested deeper than 64"),
        (framed('{"a":' + '{"b":' * 100_000), r"nested deeper than 64"),
        (framed('{"a":1,"a":1}'), r'member "a" is given twice'),
        (framed('{"a":{"dtype":"U8","dtype":"U8"}}'), r'member "dtype" is given twice'),
        (framed('{"__metadata__":{"k":"1","k":"1"}}'), r'member "k" is given twice'),
        (framed('{"__metadata__":{},"__metadata__":{}}'), r'member "__metadata__" is given twice'),
        (framed('{"__metadata__":[]}'), r"__metadata__ is a list; required: an object of strings"),
        (framed('{"__metadata__":null}'), r"__metadata__ is null"),
        (framed('{"__metadata__":{"k":1}}'), r"__metadata__ member k is an integer; required: a string"),
    ],
)  # fmt: skip
def test_damaged_frame_or_json_is_rejected(raw: bytes, pattern: str) -> None:
    rejected(raw, pattern)


@pytest.mark.parametrize(
    ("member", "pattern"),
    [
        ([], r"the entry is a list; required: an object"),
        (None, r"the entry is null"),
        ({"dtype": "F32", "shape": [2]}, r"data_offsets missing"),
        ({}, r"dtype and shape and data_offsets missing"),
        ({**entry(), "layout": "x"}, r"unknown member layout"),
        (entry(dtype=1), r"dtype is an integer; required: a string"),
        (entry(dtype="F2"), r"dtype F2 is not known; safetensors has BOOL, F4,"),
        (entry(dtype="f32"), r"dtype f32 is not known"),
        (entry(shape=2), r"shape is an integer; required: a list of integers"),
        (entry(shape=[2.0]), r"shape holds a number with a fraction; required: integers"),
        (entry(shape=[True, 2]), r"shape holds a boolean; required: integers"),
        (entry(shape=["2"]), r"shape holds a string; required: integers"),
        (entry(shape=[-2]), r"shape holds -2; required: 0 to 9223372036854775807"),
        (entry(shape=[2**63, 0], offsets=[0, 0]), r"shape holds 9223372036854775808; required: 0 to"),
        (entry(shape=[2**62, 4], offsets=[0, 0]), r"shape \[4611686018427387904, 4\] of dtype F32 overflows"),
        (entry(shape=[2**62, 4, 0], offsets=[0, 0]), r"overflows 9223372036854775807 bits"),
        (entry(shape=[1] * 65), r"shape has rank 65; at most 64"),
        (entry(offsets={}), r"data_offsets is an object; required: a list of integers"),
        (entry(offsets=[0]), r"data_offsets has 1 members; required: begin and end"),
        (entry(offsets=[0, 8, 8]), r"data_offsets has 3 members"),
        (entry(offsets=[0, 8.0]), r"data_offsets holds a number with a fraction"),
        (entry(offsets=[False, 8]), r"data_offsets holds a boolean"),
        (entry(offsets=[-8, 0]), r"data_offsets holds -8; required: 0 to"),
        (entry(offsets=[8, 0]), r"data_offsets \[8, 0\] end before they begin"),
        (entry(offsets=[0, 2**64]), r"data_offsets holds 18446744073709551616"),
        (entry(offsets=[0, 4]), r"hold 4 bytes; dtype F32 and shape \[2\] need 8"),
        (entry(shape=[], offsets=[0, 8]), r"hold 8 bytes; dtype F32 and shape \[\] need 4"),
        (entry(shape=[0, 4], offsets=[0, 8]), r"hold 8 bytes; dtype F32 and shape \[0, 4\] need 0"),
        (entry("F4", [3], [0, 2]), r"3 elements of 4 bits \(F4\) are not whole bytes"),
        (entry("F6_E3M2", [6], [0, 5]), r"6 elements of 6 bits \(F6_E3M2\) are not whole bytes"),
    ],
)  # fmt: skip
def test_malformed_entry_is_rejected_by_name(member: Any, pattern: str, tmp_path: Path) -> None:
    raw = shard(bytes(8), weight=member)
    (message,) = rejected(raw, pattern)
    assert "tensor weight: " in message
    if "unknown member" not in pattern and "rank" not in pattern:
        assert not library_accepts(raw, tmp_path)


@pytest.mark.parametrize(
    ("raw", "pattern"),
    [
        (shard(bytes(12), a=entry(), b=entry(offsets=[4, 12])), r"tensor b: begins at byte 4 .*a ends at 8: overlap"),
        (shard(bytes(8), a=entry(), b=entry()), r"tensor b: begins at byte 0 .*tensor a ends at 8: overlap"),
        (shard(bytes(8), a=entry(), m=entry("F32", [0], [4, 4])), r"tensor m: begins at byte 4 .*overlap"),
        (shard(bytes(20), a=entry(), b=entry(offsets=[12, 20])), r"tensor b: begins at byte 12 .*4 bytes between"),
        (shard(bytes(12), a=entry(offsets=[4, 12])), r"tensor a: begins at byte 4 .*nothing lies before it: 4 bytes"),
        (shard(bytes(7), a=entry()), r"tensor a: ends at byte \d+ of the file, which has \d+: the file is truncated"),
        (shard(bytes(9), a=entry()), r"1 bytes after the last one, tensor a, belong to no tensor"),
        (framed("{}", b"1"), r"1 bytes in a file without tensors belong to no tensor"),
        (shard(bytes(8), a=entry(offsets=[2**62, 2**62 + 8])), r"tensor a: begins at byte 4611686018427387904"),
    ],
)  # fmt: skip
def test_wrong_position_is_rejected(raw: bytes, pattern: str, tmp_path: Path) -> None:
    rejected(raw, pattern)
    assert not library_accepts(raw, tmp_path)


def test_all_bad_entries_are_reported_at_once() -> None:
    messages = rejected(shard(bytes(8), a=entry("F2"), b=entry(), c=entry(shape=[-1])))
    assert [re.search(r"tensor (\w)", message)[1] for message in messages] == ["a", "c"]  # type: ignore[index]


def test_a_header_of_noise_is_not_described_to_its_end() -> None:
    assert len(rejected(shard(b"", **{f"t{place}": 1 for place in range(5000)}))) == 100
    overlapping = {f"t{place}": entry() for place in range(5000)}
    assert len(rejected(shard(bytes(8), **overlapping))) == 100


def test_control_characters_and_long_names_do_not_reach_the_terminal() -> None:
    (message,) = rejected(shard(**{"\x1b[2J" + "x" * 100_000: 1}))
    assert "\x1b" not in message
    assert r"\x1b[2J" in message
    assert len(message) < 400


def test_lfs_pointers_are_recognised_by_beginning_and_size() -> None:
    assert is_lfs_pointer(LFS_POINTER)
    assert not is_lfs_pointer(LFS_POINTER + bytes(1024))
    assert not is_lfs_pointer(b"version 1")


def test_lenient_json_takes_a_byte_order_mark_and_infinity() -> None:
    assert load_object(b'\xef\xbb\xbf{"limit": Infinity}', "c", lenient=True) == {"limit": float("inf")}
    with pytest.raises(SourceError, match=r"^c: Infinity is not JSON"):
        load_object(b'{"limit": Infinity}', "c")


def test_nesting_of_64_levels_is_read() -> None:
    assert load_object(b'{"a":' * 64 + b"1" + b"}" * 64, "c")
    with pytest.raises(SourceError, match="nested deeper than 64"):
        load_object(b'{"a":' * 65 + b"1" + b"}" * 65, "c")


BASE = shard(
    bytes(24), a=entry("BF16", [2, 2], [0, 8]), b=entry("F32", [], [8, 12]), c=entry("F8_E4M3", [3, 4], [12, 24]),
    __metadata__={"k": "v"},
)  # fmt: skip
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=5), child, max_size=3),
    max_leaves=6,
)
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 30), min_size=2, max_size=2) | JSON_VALUES,
    },
)


def require_sound(raw: bytes) -> None:
    """A header is refused by a SourceError or describes the data section byte for byte."""
    try:
        header = parse(raw)
    except SourceError:
        return
    end = header.nbytes
    for tensor in header.entries:
        assert tensor.begin == end
        end += tensor.nbytes
    assert end == len(raw)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(BASE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_bytes_raise_nothing_but_source_error(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(BASE)
    for place, value in changes:
        raw[place] = value
    require_sound(bytes(raw))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.dictionaries(st.text(max_size=4), MEMBERS | JSON_VALUES, max_size=4), st.binary(max_size=30))
def test_arbitrary_json_raises_nothing_but_source_error(document: dict[str, Any], data: bytes) -> None:
    require_sound(framed(json.dumps(document), data))


def test_every_cut_and_every_extension_of_a_file_is_rejected() -> None:
    parse(BASE)
    for end in range(len(BASE)):
        rejected(BASE[:end])
    rejected(BASE + b"\0", r"1 bytes after the last one, tensor c,")
