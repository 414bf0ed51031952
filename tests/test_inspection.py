"""What is shown of an artifact: complete as data, 80 columns as text, whatever the names."""

import hashlib
import json
import unicodedata

import pytest
from artifacts import FORMATS, FP8, NVFP4, TINY, payload, tensor, write
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import binary, layouts
from oracle.container import Resource, Tensor

from ninfer_convert.artifact import decode, inspection, inspection_text
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError


@pytest.fixture
def tiny():
    with Artifact.open(TINY) as artifact:
        yield artifact


def opened(tmp_path, *objects):
    return Artifact.open(write(tmp_path / "a.ninfer", objects))


def columns(line):
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line
    )


# Data


def test_summary_of_the_golden_artifact(tiny):
    found = inspection.summary(tiny)
    assert found["artifact"] == {"model_id": "tiny", "weights_id": "all-nine"}
    assert found["container"] == {"version": 2, "directory_bytes": 1360}
    assert found["totals"] == {
        "objects": 11,
        "tensors": 9,
        "resources": 2,
        "tensor_bytes": 6772,
        "resource_bytes": 10,
        "payload_bytes": 8976,
        "payload_offset": 4096,
        "file_bytes": 13072,
        "formats": dict.fromkeys(("BF16", "FP32", "I32", *FORMATS[:6]), 1),
        "elements": 4 * 260 + 8192 + 111 + 3 + 1 + 4,
        "bits_per_weight": 8 * 6772 / 9351,
    }
    assert found["objects"][0] == {
        "name": "frontend/tokenizer.json",
        "kind": "resource",
        "encoding": "raw-bytes-v1",
        "offset": 0,
        "bytes": 9,
    }
    assert found["objects"][6] == {
        "name": "w/4",
        "kind": "tensor",
        "shape": [128, 64],
        "format": "NVFP4",
        "layout": "blockscale-k16-m128x4-v1",
        "offset": 3072,
        "bytes": 4612,
        "elements": 8192,
        "bits_per_weight": 8 * 4612 / 8192,
    }
    assert found["components"] == [
        {"component": "frontend", "objects": 2, "bytes": 10, "elements": 0, "bits_per_weight": None},
        {"component": "w", "objects": 6, "bytes": 6746, "elements": 9343, "bits_per_weight": 8 * 6746 / 9343},
        {"component": "d", "objects": 3, "bytes": 26, "elements": 8, "bits_per_weight": 26.0},
    ]
    assert found["formats"][3] == {
        "format": "Q4G64_F16S",
        "objects": 1,
        "bytes": 272,
        "elements": 260,
        "bits_per_weight": 8 * 272 / 260,
    }
    assert found["notes"] == []


def test_summary_reads_nothing_of_the_payload(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "read_into", None)
    assert inspection.summary(tiny)["totals"]["objects"] == 11


def test_artifact_of_resources_has_no_bits_per_weight(tmp_path):
    with opened(tmp_path, Resource("a/b", b"xyz")) as artifact:
        found = inspection.summary(artifact)
    assert found["totals"]["bits_per_weight"] is None
    assert found["formats"] == []
    assert "bits" not in inspection_text.summary_text(found).split("\n\n")[0]


def test_detail_of_a_grouped_tensor(tiny):
    found = inspection.detail(tiny, "w/1")
    assert found["file_offset"] == 4096 + 768
    assert found["sha256"] == hashlib.sha256(TINY.read_bytes()[4864:5392]).hexdigest()
    assert (found["rows"], found["row_quantum"]) == (2, 1)
    assert found["planes"] == [
        {"name": "base", "offset": 0, "bytes": 256, "row_bytes": 128},
        {"name": "high", "offset": 256, "bytes": 64, "row_bytes": 32},
        {"name": "scale", "offset": 512, "bytes": 16, "row_bytes": 8},
    ]
    assert found["scales"]["groups"] == 6
    assert len(found["first_values"]) == 8


def test_detail_of_a_resource(tiny):
    found = inspection.detail(tiny, "frontend/empty-line.txt")
    assert found["first_bytes"] == "0a"
    assert found["sha256"] == hashlib.sha256(b"\n").hexdigest()
    assert "planes" not in found


def test_detail_of_an_unknown_object_is_refused(tiny):
    with pytest.raises(ArtifactError, match="no object is called 'w/9'"):
        inspection.detail(tiny, "w/9")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [1, 7, 8, 200])
def test_first_values_are_those_of_the_first_row(tmp_path, name, k):
    shape = (128, 64 * (k % 3 + 1)) if name == NVFP4 else (2, k)
    with opened(tmp_path, tensor("t", name, shape)) as artifact:
        whole = decode.read_values(artifact, "t", 0, shape[0])
        expected = whole.reshape(-1)[:8] if name in ("BF16", "FP32", "I32") else whole[0, :8]
        assert inspection.detail(artifact, "t")["first_values"] == [inspection._number(value) for value in expected]


def test_scales_of_padding_groups_do_not_count(tmp_path):
    scales = [[0x3C00, 0], [0x0001, 0x7BFF], [0x4000, 0x3C00]]
    codes = [[0] * 65 for _ in scales]
    stored = layouts.pack_row_split("W8G32_F16S", [[*row, 0x3C00] for row in scales], codes)
    with opened(tmp_path, Tensor("t", (3, 65), "W8G32_F16S", stored)) as artifact:
        found = inspection.detail(artifact, "t")["scales"]
    assert found == {"groups": 9, "zero_groups": 1, "invalid_groups": 0, "least": 5.9604645e-08, "largest": 65504.0}


@pytest.mark.parametrize(
    ("name", "shape", "plane", "content", "expected"),
    [
        ("Q4G64_F16S", (1, 128), "scale", b"\0\x80\0\x7c", (2, 0, 2, None, None)),
        ("Q4G64_F16S", (1, 128), "scale", b"\0\0\0\x3c", (2, 1, 0, 1.0, 1.0)),
        (FP8, (3, 2), "scale", b"\1\0\0\0\x7f\x7f", (3, 1, 0, 9.1835e-41, 3.3895314e38)),
        (FP8, (3, 2), "scale", b"\x80\x7f\0\x80\xff\xff", (3, 0, 3, None, None)),
        (NVFP4, (128, 64), "scale", b"\1\x7e\x7f\xff" + bytes(508), (512, 508, 2, 2.0**-9, 448.0)),
    ],
)
def test_scale_range_zeros_and_invalid_words(tmp_path, name, shape, plane, content, expected):
    stored = bytearray(payload(name, shape))
    begin = layouts.planes(name, shape)[plane][0]
    stored[begin : begin + len(content)] = content
    with opened(tmp_path, Tensor("t", shape, name, bytes(stored))) as artifact:
        found = inspection.detail(artifact, "t")["scales"]
    assert tuple(found.values()) == expected


def test_divisor_is_shown_as_word_and_value(tiny):
    found = inspection.detail(tiny, "w/4")["divisor"]
    assert found["word"] == "0x451646a4"
    assert binary.round_f32(binary.Fraction(found["value"])) == 0x451646A4


def test_everything_is_json(tiny):
    json.dumps(inspection.summary(tiny), allow_nan=False)
    for name in tiny.objects:
        json.dumps(inspection.detail(tiny, name), allow_nan=False)
    assert inspection.detail(tiny, "d/fp32")["first_values"] == ["nan"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], 11),
        (["w/*"], 6),
        (["*/[01]"], 2),
        (["frontend*", "d/i32"], 3),
        (["W/*"], 0),
    ],
)
def test_globs_choose_objects(tiny, patterns, names):
    assert len(inspection.matching(inspection.summary(tiny)["objects"], patterns)) == names


# Text


def test_summary_text_of_the_golden_artifact(tiny):
    assert inspection_text.summary_text(inspection.summary(tiny)) == (
        "tiny / all-nine\n"
        "container version 2, directory of 1,360 bytes\n"
        "11 objects: 9 tensors, 2 resources\n"
        "13,072 bytes, 8,976 of them payload\n"
        "9,351 elements at 5.794 bits\n"
        "\n"
        "format                objects  bytes  bits/element\n"
        "BF16                        1      6        16.000\n"
        "FP32                        1      4        32.000\n"
        "I32                         1     16        32.000\n"
        "Q4G64_F16S                  1    272         8.369\n"
        "Q5G64_F16S                  1    528        16.246\n"
        "Q6G64_F16S                  1    528        16.246\n"
        "W8G32_F16S                  1    544        16.738\n"
        "NVFP4                       1  4,612         4.504\n"
        "FP8_E4M3FN_ROW_BF16S        1    262        18.883\n"
        "\n"
        "component  objects  bytes  bits/element\n"
        "frontend         2     10             -\n"
        "w                6  6,746         5.776\n"
        "d                3     26        26.000"
    )


def test_object_table_of_the_golden_artifact(tiny):
    assert inspection_text.objects_text(inspection.summary(tiny)["objects"]) == (
        "bytes  shape format               object\n"
        "    9      - resource             frontend/tokenizer.json\n"
        "    1      - resource             frontend/empty-line.txt\n"
        "  272  2x130 Q4G64_F16S           w/0\n"
        "  528  2x130 Q5G64_F16S           w/1\n"
        "  528  2x130 Q6G64_F16S           w/2\n"
        "  544  2x130 W8G32_F16S           w/3\n"
        "4,612 128x64 NVFP4                w/4\n"
        "  262   3x37 FP8_E4M3FN_ROW_BF16S w/5\n"
        "    6      3 BF16                 d/bf16\n"
        "    4 scalar FP32                 d/fp32\n"
        "   16    2x2 I32                  d/i32"
    )


def test_detail_text_of_an_nvfp4_tensor(tiny):
    assert inspection_text.detail_text(inspection.detail(tiny, "w/4")) == (
        "object        w/4\n"
        "kind          tensor\n"
        "shape         [128, 64]\n"
        "format        NVFP4 in blockscale-k16-m128x4-v1\n"
        "elements      8,192 at 4.504 bits\n"
        "bytes         4,612 at byte 7,168 of the file\n"
        "SHA-256       4fce76424aa17c6dc3e07cdf5983737d9e170a952d5a998e9ef51b68fe6c6941\n"
        "code plane    4,096 bytes at 0, 32 per row\n"
        "scale plane   512 bytes at 4,096, 4 per row\n"
        "divisor plane 4 bytes at 4,608\n"
        "scales        512, 5 zero, 0.001953125 to 448.0\n"
        "divisor       2404.415 (0x451646a4)\n"
        "values        0.0005848616 -0.0 0.00019495386 -0.0005848616 0.0002924308\n"
        "              0.0011697232 0.0005848616 0.00019495386"
    )


def test_longest_name_of_the_shipped_recipes_fits_one_line(tmp_path):
    name = "text/layers/63/gdn/query_key_value_z"
    entry = {"name": name, "kind": "tensor", "shape": [16384, 5120], "format": FP8, "bytes": 83918848}
    header, line = inspection_text.objects_text([entry]).split("\n")
    assert line == f"83,918,848 16384x5120 {FP8} {name}"
    assert header.endswith(" object")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(NAMES, min_size=1, max_size=4, unique=True), st.lists(st.integers(1, 2), max_size=16))
def test_text_is_80_printable_columns_whatever_the_names(tmp_path_factory, names, shape):
    objects = [tensor(names[0], "BF16", shape), *(Resource(name, b"\xff" * 40) for name in names[1:])]
    with opened(tmp_path_factory.mktemp("names"), *objects) as artifact:
        found = inspection.summary(artifact)
        texts = [inspection_text.summary_text(found), inspection_text.objects_text(found["objects"])]
        texts += [inspection_text.detail_text(inspection.detail(artifact, name)) for name in names]
    for text in texts:
        for line in text.split("\n"):
            assert line.isprintable()
            assert columns(line) <= 80


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=60), st.integers(5, 40))
def test_fitted_text_keeps_its_ends(text, width):
    found = inspection_text.fit(text, width)
    assert found.isprintable()
    assert columns(found) <= width
    shown = inspection_text.printable(text)
    assert found == shown or (columns(shown) > width and found.startswith(shown[:1]) and "..." in found)


def test_notes_are_wrapped(tiny):
    found = inspection.summary(tiny)
    found["notes"] = ["object 'x' begins 512 bytes behind its first permitted place, byte 13056 of the file, twice"]
    assert inspection_text.summary_text(found).endswith(
        "\n\nnote: object 'x' begins 512 bytes behind its first permitted place, byte 13056\nof the file, twice"
    )


def test_report_is_summarised():
    report = {
        "recipe": {"id": "qwen3_6_27b-v1", "sha256": "00"},
        "sources": {
            "base": {"repo": "Qwen/Qwen3.6-27B", "revision": "6a9e13bd", "location": "/x"},
            "tune": {"repo": None, "revision": None, "location": "/models/my tune\x1b"},
        },
        "run": {"converter": "0.1.0", "finished": "2026-11-30T10:00:00+00:00", "seconds": 1.5},
    }
    assert inspection_text.report_text(report) == (
        "converted by  0.1.0\n"
        "converted at  2026-11-30T10:00:00+00:00\n"
        "recipe        qwen3_6_27b-v1\n"
        "source        base: Qwen/Qwen3.6-27B 6a9e13bd\n"
        "source        tune: /models/my tune\\x1b"
    )


@pytest.mark.parametrize("report", [{}, {"recipe": 3, "sources": [1], "run": None}, {"sources": {"a": 7}}])
def test_report_of_another_shape_is_shown_as_far_as_it_goes(report):
    text = inspection_text.report_text(report)
    assert text in ("", "source        a: unknown")
