"""Verification of whole files: what is wrong is named with its object, what is unusual is noted."""

import hashlib
import json
import os
import threading
import tracemalloc

import pytest
from artifacts import FORMATS, FP8, NVFP4, TINY, reframe, tensor, tiny_directory, write
from oracle import layouts
from oracle.container import Resource

from ninfer_convert.artifact import verify
from ninfer_convert.artifact.container import Identity, TensorRecord, encode_head
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.verify import Problem, verify_artifact, verify_report
from ninfer_convert.errors import OutputError

PAYLOAD = 4096


@pytest.fixture
def copy(tmp_path):
    """A copy of the golden artifact, with a function that overwrites some of its bytes."""
    path = tmp_path / "copy.ninfer"
    path.write_bytes(TINY.read_bytes())

    def patch(place, content):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(content)
        return path

    return patch


def place_of(name, plane, byte=0):
    """Returns the file offset of a byte of a plane of an object of the golden artifact."""
    (entry,) = (entry for entry in tiny_directory()["objects"] if entry["name"] == name)
    return PAYLOAD + entry["offset"] + layouts.planes(entry["format"], entry["shape"])[plane][0] + byte


def problems(path, **options):
    return list(verify_artifact(path, **options).problems)


def test_golden_artifact_is_right():
    result = verify_artifact(TINY)
    assert result.ok
    assert result.as_json() == {
        "ok": True,
        "checked": {"objects": 11, "bytes": 6782},
        "problems": [],
        "notes": [],
    }


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("run_bytes", [64, 1000, 2**21])
def test_every_format_is_right_however_it_is_cut(tmp_path, monkeypatch, threads, run_bytes):
    monkeypatch.setattr(verify, "RUN_BYTES", run_bytes)
    objects = [tensor(name, name, (128, 192)) for name in FORMATS] + [Resource("r", bytes(3000))]
    calls = []
    result = verify_artifact(write(tmp_path / "a.ninfer", objects), calls.append, threads=threads)
    assert result.as_json()["problems"] == []
    assert result.objects == len(objects)
    assert result.nbytes == sum(len(stored.payload) for stored in objects)


def test_progress_adds_up_to_the_stored_bytes_of_planes_and_resources():
    calls = []
    verify_artifact(TINY, calls.append)
    gaps = 0
    for entry in tiny_directory()["objects"]:
        if entry["kind"] == "tensor":
            planes = layouts.planes(entry["format"], entry["shape"]).values()
            gaps += entry["bytes"] - sum(nbytes for _, nbytes in planes)
    assert sum(calls) == 6782 - gaps


@pytest.mark.parametrize(
    ("name", "plane", "byte", "content", "check", "detail"),
    [
        ("w/0", "scale", 8, b"\0\xfc", "scale-word", "row 1, group 0: scale word 0xfc00; a finite, non-negative"),
        ("w/0", "scale", 8, b"\0\x80", "scale-word", "row 1, group 0: scale word 0x8000; a finite, non-negative"),
        ("w/1", "scale", 2, b"\0\0", "zero-scale", "row 0, group 1: the scale is zero and a code is not"),
        ("w/1", "base", 3 * 32 + 5, b"\1", "padding", "row 0, group 3: a group wholly beyond column 130 is not zero"),
        ("w/2", "high", 2 * 16 + 1, b"\1", "padding", "row 0, group 2: a lane at column 130 or beyond holds a code"),
        ("w/2", "scale", 6, b"\0\x3c", "padding", "row 0, group 3: a group wholly beyond column 130 is not zero"),
        ("w/3", "base", 256 + 40, b"\x80", "code-word", "row 1, group 1, column 40: code -128; -127 to 127"),
        ("w/4", "scale", 16, b"\xff", "scale-word", "row 1, group 0: scale word 0xff; a finite, non-negative E4M3FN"),
        ("w/4", "divisor", 0, b"\0\0\x80\x7f", "divisor", "divisor word 0x7f800000; a finite, positive binary32 word"),
        ("w/4", "divisor", 3, b"\x80", "divisor", "divisor word 0x801646a4; a finite, positive binary32 word"),
        ("w/5", "code", 37 * 2 + 5, b"\x7f", "code-word", r"row 2, column 5: code word 0x7f (NaN); a finite one"),
        ("w/5", "scale", 2, b"\x80\xff", "scale-word", "row 1: scale word 0xff80; a finite, non-negative BF16 word"),
        ("w/5", "scale", 2, b"\0\0", "zero-scale", "row 1, column 0: code word 0x"),
    ],
)
def test_broken_value_is_named_with_object_row_and_group(copy, name, plane, byte, content, check, detail):
    found = problems(copy(place_of(name, plane, byte), content))
    assert [(problem.object, problem.check) for problem in found] == [(name, check)]
    assert found[0].detail.startswith(detail)


def test_violations_are_counted(copy):
    found = problems(copy(place_of("w/3", "base", 3), b"\x80" * 5))
    assert found == [
        Problem("w/3", "code-word", "row 0, group 0, column 3: code -128; -127 to 127 is required (the first of 5)")
    ]


def test_problems_come_in_the_order_of_the_objects(copy):
    copy(place_of("w/5", "code"), b"\xff")
    copy(place_of("w/0", "scale"), b"\xff\xff")
    copy(16 + 0x550, b"\1")
    path = copy(place_of("w/3", "base"), b"\x80")
    expected = [(None, "head-padding"), ("w/0", "scale-word"), ("w/3", "code-word"), ("w/5", "code-word")]
    for threads in (1, 3):
        assert [(problem.object, problem.check) for problem in problems(path, threads=threads)] == expected


@pytest.mark.parametrize(
    ("place", "name", "check"),
    [
        (16 + 0x550, None, "head-padding"),
        (4095, None, "head-padding"),
        (4106, "w/0", "gap"),
        (4351, "w/0", "gap"),
        (13055, "d/i32", "gap"),
        (4096 + 768 + 256 + 64, "w/1", "plane-gap"),
        (4096 + 7936 + 255, "w/5", "plane-gap"),
    ],
)
def test_byte_outside_of_planes_and_objects_is_zero(copy, place, name, check):
    detail = f"byte {place} of the file is 0x40; zero is required outside of objects and planes"
    assert problems(copy(place, b"\x40")) == [Problem(name, check, detail)]


def test_larger_gaps_and_trailing_bytes_are_notes(tmp_path):
    directory = tiny_directory()
    directory["objects"][-1]["offset"] += 256
    data = reframe(directory)
    data = data[: 4096 + 8960] + bytes(256) + data[4096 + 8960 :] + b"trailing"
    path = tmp_path / "wide.ninfer"
    path.write_bytes(data)
    result = verify_artifact(path)
    assert result.ok
    assert result.notes == (
        "object 'd/i32' begins 256 bytes behind its first permitted place, byte 13056 of the file",
        "8 bytes without meaning follow the last object, from byte 13328 of the file",
    )
    path.write_bytes(data[: 4096 + 9000] + b"\1" + data[4096 + 9001 :])
    assert [problem.check for problem in problems(path)] == ["gap"]


def test_broken_structure_is_one_problem(tmp_path):
    path = tmp_path / "cut.ninfer"
    path.write_bytes(TINY.read_bytes()[:-1])
    result = verify_artifact(path)
    assert result.as_json()["checked"] == {"objects": 0, "bytes": 0}
    (problem,) = result.problems
    assert (problem.object, problem.check) == (None, "structure")
    assert problem.detail == (
        f"{path}: object 'd/i32': its 16 bytes at offset 8960 end at byte 13072 of the file; the file ends at 13071"
    )
    json.dumps(result.as_json())


def test_missing_file_is_a_broken_structure(tmp_path):
    result = verify_artifact(tmp_path / "absent.ninfer")
    (problem,) = result.problems
    assert (result.ok, problem.check) == (False, "structure")
    assert problem.detail == f"{tmp_path}/absent.ninfer: cannot be opened: No such file or directory"


def test_file_cut_during_verification_is_a_problem(copy, monkeypatch):
    path = copy(0, b"N")
    opened = Artifact.open(path)
    os.truncate(path, 13000)
    result = verify.verify_open(opened)
    (problem,) = result.problems
    assert (problem.object, problem.check) == (None, "changed")
    assert "the file was cut while it was read" in problem.detail
    opened.close()


def test_file_changed_during_verification_is_a_problem(copy):
    path = copy(0, b"N")
    with Artifact.open(path) as artifact:
        os.utime(path, ns=(0, 0))
        assert problems_of(artifact) == [
            Problem(None, "changed", f"{path}: the file was changed while it was read"),
        ]


def problems_of(artifact):
    return list(verify.verify_open(artifact).problems)


def test_failing_read_ends_every_thread(monkeypatch):
    preadv = os.preadv

    def fail(descriptor, buffers, offset):
        if offset == place_of("w/4", "code"):
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    before = set(threading.enumerate())
    with pytest.raises(OutputError, match="reading object 'w/4' at byte 7168: Input/output error"):
        verify_artifact(TINY, threads=3)
    assert set(threading.enumerate()) <= before


def test_failing_progress_is_passed_on():
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_artifact(TINY, stop)


def test_memory_does_not_grow_with_the_file_or_a_row(tmp_path):
    path = tmp_path / "long.ninfer"
    shapes = {"W8G32_F16S": (1, 2**26), FP8: (1, 2**26), NVFP4: (128, 2**20), "BF16": (2**25,)}
    records, cursor = [], 0
    for name, shape in shapes.items():
        nbytes = layouts.payload_bytes(name, shape)
        records.append(TensorRecord(name, shape, name, layouts.LAYOUTS[name], cursor, nbytes))
        cursor = layouts.align_up(cursor + nbytes, 256)
    with path.open("wb") as file:
        file.write(encode_head(Identity("m", "w"), records))
        os.truncate(path, 4096 + records[-1].end)
    tracemalloc.start()
    found = problems(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    detail = "divisor word 0x00000000; a finite, positive binary32 word is required"
    assert found == [Problem(NVFP4, "divisor", detail)]
    assert peak < 16 * 2**20


# Against a report


def report_of(path):
    data = path.read_bytes()
    start = 16 + int.from_bytes(data[8:16], "little")
    entries = json.loads(data[16:start])["objects"]
    payload = layouts.align_up(start, 4096)
    return {
        "artifact": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "objects": [
            {
                "name": entry["name"],
                "bytes": entry["bytes"],
                "sha256": hashlib.sha256(
                    data[payload + entry["offset"] : payload + entry["offset"] + entry["bytes"]]
                ).hexdigest(),
            }
            for entry in entries
        ],
    }


def compared(path, report):
    with Artifact.open(path) as artifact:
        return list(verify_report(artifact, report))


def test_report_of_the_artifact_agrees(monkeypatch):
    assert compared(TINY, report_of(TINY)) == []
    calls = []
    with Artifact.open(TINY) as artifact:
        verify_report(artifact, report_of(TINY), calls.append)
    assert sum(calls) == 13072


def test_changed_bytes_are_found_in_their_object_and_in_the_file(copy):
    path = copy(place_of("w/2", "base", 9), b"\x11")
    found = compared(path, report_of(TINY))
    assert [(problem.object, problem.check) for problem in found] == [(None, "digest"), ("w/2", "digest")]
    stated, digest = report_of(TINY)["objects"][4]["sha256"], report_of(path)["objects"][4]["sha256"]
    assert found[1].detail == f"SHA-256 is {digest}; the report states {stated}"


def test_changed_gap_is_found_in_the_file_alone(copy):
    found = compared(copy(4200, b"\1"), report_of(TINY))
    assert [(problem.object, problem.check) for problem in found] == [(None, "digest")]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda report: report["objects"].pop(4), [("w/2", "report", "the report does not list this object")]),
        (
            lambda report: report["objects"].append({"name": "x\x1b", "bytes": 1}),
            [("x\x1b", "report", "the report lists this object; the artifact does not hold it")],
        ),
        (
            lambda report: report["objects"][4].update(bytes=529),
            [("w/2", "size", "528 bytes; the report states 529")],
        ),
        (lambda report: report["objects"][4].pop("bytes"), [("w/2", "size", "528 bytes; the report states None")]),
        (
            lambda report: report["artifact"].update(bytes="\x1b" * 999),
            [(None, "size", "13072 bytes; the report states " + "\\x1b" * 20)],
        ),
        (
            lambda report: report["objects"].insert(0, ["w/0"]),
            [(None, "report", "the report's object 0 has no name of its own")],
        ),
        (
            lambda report: report["objects"].append(dict(report["objects"][0])),
            [(None, "report", "the report's object 11 has no name of its own")],
        ),
    ],
)
def test_report_that_disagrees_is_a_problem(edit, expected):
    report = report_of(TINY)
    edit(report)
    assert compared(TINY, report) == [Problem(*problem) for problem in expected]


def test_empty_report_is_a_problem():
    found = compared(TINY, {})
    assert [problem.detail for problem in found][:2] == [
        "the report's artifact is no object with sha256 and bytes",
        "the report's objects is no array",
    ]
    assert sum(problem.detail == "the report does not list this object" for problem in found) == 11


# Rate


def large_artifact(path, rows):
    """Writes an artifact whose planes are legal and not all zero, without packing it word by word."""
    records, cursor = [], 0
    for name in ("Q4G64_F16S", "Q6G64_F16S", "W8G32_F16S", NVFP4, FP8, "BF16"):
        nbytes = layouts.payload_bytes(name, (rows, 5120))
        records.append(TensorRecord(name, (rows, 5120), name, layouts.LAYOUTS[name], cursor, nbytes))
        cursor = layouts.align_up(cursor + nbytes, 256)
    with path.open("wb") as file:
        file.write(encode_head(Identity("m", "w"), records))
        for record in records:
            file.seek(4096 + record.offset)
            for offset, nbytes in layouts.planes(record.format, record.shape).values():
                file.seek(4096 + record.offset + offset)
                file.write(b"\x11" * nbytes)
    return path


def test_every_byte_is_read_once(tmp_path, monkeypatch):
    path = large_artifact(tmp_path / "large.ninfer", 1024)
    preadv, total = os.preadv, []

    def counted(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        total.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    assert problems(path) == []
    assert path.stat().st_size - 4096 <= sum(total) <= path.stat().st_size + 4096
