"""The open artifact: what it gives, reads that stop short, files that are none."""

import errno
import hashlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from artifacts import FORMATS, TINY, frame, tensor, write
from oracle import container as oracle_container
from oracle import layouts
from oracle.container import Resource

from ninfer_convert.artifact import reader
from ninfer_convert.artifact.container import Identity
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError, OutputError


@pytest.fixture
def tiny():
    with Artifact.open(TINY) as artifact:
        yield artifact


def test_objects_are_given_by_name_in_payload_order(tiny):
    assert tiny.identity == Identity("tiny", "all-nine")
    assert list(tiny.objects)[:3] == ["frontend/tokenizer.json", "frontend/empty-line.txt", "w/0"]
    assert (tiny.payload_offset, tiny.file_bytes) == (4096, 13072)
    assert tiny.record("w/0").nbytes == 272
    assert tiny.numeric("w/4").name == "NVFP4"
    with pytest.raises(TypeError):
        tiny.objects["x"] = tiny.record("w/0")


def test_every_objects_bytes_equal_the_oracles_parse(tiny):
    for stored in oracle_container.parse(TINY.read_bytes())[2]:
        assert tiny.read(stored.name) == stored.payload
        assert tiny.digest(stored.name) == hashlib.sha256(stored.payload).hexdigest()


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (1, 9), (9, 9), (3, None)])
def test_spans_of_an_object_are_read(tiny, begin, end):
    assert tiny.read("frontend/tokenizer.json", begin, end) == '{"é":1}\n'.encode()[begin:end]


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (0, 10), (4, 3), (10, None)])
def test_spans_outside_an_object_are_refused(tiny, begin, end):
    with pytest.raises(ArtifactError, match=r"object 'frontend/tokenizer.json' has bytes 0 to 9; \["):
        tiny.read("frontend/tokenizer.json", begin, end)


@pytest.mark.parametrize("name", FORMATS)
def test_planes_of_every_run_of_rows_are_the_layouts(tmp_path, name):
    shape = (256, 64) if name == "NVFP4" else (5, 130)
    stored = tensor("t", name, shape)
    where = layouts.planes(name, shape)
    quantum = 128 if name == "NVFP4" else 1
    with Artifact.open(write(tmp_path / "a.ninfer", [Resource("r", b"x"), stored])) as artifact:
        for begin in range(0, shape[0] + 1, quantum):
            for end in range(begin, shape[0] + 1, quantum):
                planes = artifact.read_rows("t", begin, end)
                assert list(planes) == list(where)
                for plane, (offset, nbytes) in where.items():
                    if plane == "divisor":
                        expected = stored.payload[offset : offset + nbytes]
                        assert planes[plane].shape == (1, 4)
                    else:
                        row = nbytes // shape[0]
                        expected = stored.payload[offset + begin * row : offset + end * row]
                        assert planes[plane].shape == (end - begin, row)
                    assert planes[plane].tobytes() == expected


def test_scalar_and_vector_are_one_row(tmp_path):
    objects = [tensor("s", "FP32", ()), tensor("v", "BF16", (7,)), tensor("c", "I32", (2, 3, 4))]
    with Artifact.open(write(tmp_path / "a.ninfer", objects)) as artifact:
        assert artifact.read_rows("s", 0, 1)["words"].shape == (1, 4)
        assert artifact.read_rows("v", 0, 1)["words"].shape == (1, 14)
        assert artifact.read_rows("c", 1, 2)["words"].tobytes() == objects[2].payload[48:]


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (0, 3), (2, 1)])
def test_rows_outside_a_tensor_are_refused(tiny, begin, end):
    with pytest.raises(ArtifactError, match=re.escape(f"object 'w/0' has rows 0 to 2; [{begin}, {end}) was asked for")):
        tiny.read_rows("w/0", begin, end)


@pytest.mark.parametrize(("begin", "end"), [(1, 128), (0, 127)])
def test_rows_inside_a_swizzled_block_are_refused(tiny, begin, end):
    with pytest.raises(ArtifactError, match="object 'w/4' gives rows in runs of 128 only"):
        tiny.read_rows("w/4", begin, end)


def test_row_blocks_cover_all_rows_within_the_size_asked_for(tmp_path):
    objects = [tensor("q", "Q4G64_F16S", (50, 128)), tensor("n", "NVFP4", (384, 64)), tensor("s", "I32", ())]
    with Artifact.open(write(tmp_path / "a.ninfer", objects)) as artifact:
        assert list(artifact.row_blocks("q", 68 * 20)) == [(0, 20), (20, 40), (40, 50)]
        assert list(artifact.row_blocks("q", 1)) == [(row, row + 1) for row in range(50)]
        assert list(artifact.row_blocks("n", 36 * 300)) == [(0, 256), (256, 384)]
        assert list(artifact.row_blocks("n", 1)) == [(0, 128), (128, 256), (256, 384)]
        assert list(artifact.row_blocks("s")) == [(0, 1)]


def test_blocks_of_the_file_come_in_order(tiny, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    blocks = [block.tobytes() for block in tiny.blocks(100, 13072)]
    assert [len(block) for block in blocks] == [1000] * 12 + [972]
    assert b"".join(blocks) == TINY.read_bytes()[100:]
    assert list(tiny.blocks(5, 5)) == []


def test_unknown_object_is_named_with_its_nearest(tiny):
    with pytest.raises(ArtifactError, match=r"tiny\.ninfer: no object is called 'w/12'; the nearest names are w/"):
        tiny.record("w/12")
    with pytest.raises(ArtifactError, match=r"no object is called 'zzz\\x1b'$"):
        tiny.read("zzz\x1b")


def test_resource_has_no_rows(tiny):
    with pytest.raises(ArtifactError, match=r"object 'frontend/empty-line\.txt' is a resource; a tensor is required"):
        tiny.read_rows("frontend/empty-line.txt", 0, 1)


def test_reads_of_seven_bytes_and_interruptions_give_the_same(tiny, monkeypatch):
    expected = {name: tiny.read(name) for name in tiny.objects}
    preadv, calls = os.preadv, []

    def stingy(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise InterruptedError
        return preadv(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    with Artifact.open(TINY) as artifact:
        assert {name: artifact.read(name) for name in artifact.objects} == expected
    assert len(calls) > 13072 // 14


def test_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "cut.ninfer"
    path.write_bytes(TINY.read_bytes())
    with Artifact.open(path) as artifact:
        assert artifact.is_unchanged()
        os.truncate(path, 13060)
        assert not artifact.is_unchanged()
        with pytest.raises(ArtifactError) as caught:
            artifact.read("d/i32")
    assert str(caught.value) == (
        f"{path}: the file was cut while it was read: it ends at byte 13060, and object 'd/i32' lacks 12 bytes"
    )


def test_failing_read_is_an_input_output_failure(tiny, monkeypatch):
    def fail(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OutputError, match="reading object 'w/0' at byte 4352: Input/output error") as caught:
        tiny.read("w/0")
    assert caught.value.exit_code == 74
    with pytest.raises(OutputError, match=r"tiny.ninfer: reading the directory at byte 0: Input/output error"):
        Artifact.open(TINY)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda path: None, ArtifactError, "cannot be opened: No such file or directory"),
    (lambda path: path.mkdir(), ArtifactError, "not a regular file; an artifact is one file"),
    (os.mkfifo, ArtifactError, "not a regular file; an artifact is one file"),
    (lambda path: path.write_bytes(b""), ArtifactError, "file has 0 bytes; magic and directory length alone take 16"),
    (lambda path: path.write_bytes(frame(b"{}")), ArtifactError, "directory lacks the member 'identity'"),
])  # fmt: skip
def test_what_is_no_artifact_is_refused_with_its_path(tmp_path, make, error, message):
    path = tmp_path / "thing"
    make(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error) as caught:
        Artifact.open(path)
    assert str(caught.value) == f"{path}: {message}"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("number", "error"), [
    (errno.ENOENT, ArtifactError),
    (errno.ENOTDIR, ArtifactError),
    (errno.ENAMETOOLONG, ArtifactError),
    (errno.ELOOP, ArtifactError),
    (errno.EACCES, OutputError),
    (errno.EIO, OutputError),
    (errno.EMFILE, OutputError),
])  # fmt: skip
def test_a_path_that_leads_nowhere_is_wrong_input_and_any_other_failure_input_output(monkeypatch, number, error):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(error, match=f"x.ninfer: cannot be opened: {os.strerror(number)}") as caught:
        Artifact.open("x.ninfer")
    assert caught.value.exit_code == (1 if error is ArtifactError else 74)


def test_path_with_a_nul_is_refused():
    with pytest.raises(ArtifactError, match=r"a\\x00b: cannot be opened: embedded null byte"):
        Artifact.open("a\0b")


def test_path_that_is_not_utf_8_is_shown_escaped(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.ninfer")
    with pytest.raises(ArtifactError, match=r"\\udcff\\n\.ninfer: cannot be opened"):
        Artifact.open(path)
    with open(path, "wb") as file:
        file.write(TINY.read_bytes())
    with Artifact.open(path) as artifact:
        assert artifact.path.isprintable()
        assert artifact.read("frontend/empty-line.txt") == b"\n"


def test_closed_artifact_says_so():
    artifact = Artifact.open(TINY)
    artifact.close()
    artifact.close()
    with pytest.raises(ArtifactError, match="closed before object 'w/0' was read"):
        artifact.read("w/0")


def test_threads_may_read_at_once(tiny):
    expected = {name: tiny.read(name) for name in tiny.objects}
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        return all(tiny.read(name) == expected[name] for name in tiny.objects for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8


def test_reads_into_a_buffer_of_the_caller(tiny):
    out = np.zeros(8, np.uint8)
    tiny.read_into(0, out)
    assert out.tobytes() == b"NINFER\0\2"
