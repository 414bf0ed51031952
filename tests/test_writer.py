"""The part file: complete under its name, or not there at all."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from case_tools import run_cli
from checkpoints import write_directory

from ninfer_convert.errors import OutputError, UsageError
from ninfer_convert.run import own_files, writer
from ninfer_convert.run.writer import PartFile, require_output


def part_file(output: Path, nbytes: int) -> PartFile:
    return PartFile(output, nbytes).begin()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_name_appears_with_publish_and_holds_what_was_written_in_any_order(tmp_path: Path) -> None:
    output = tmp_path / "out.ninfer"
    with part_file(output, 10) as part:
        part.write(6, b"ghij")
        part.write(0, bytearray(b"abc"))
        assert names(tmp_path) == ["out.ninfer.part"]
        back = bytearray(10)
        part.read_into(0, back)
        assert bytes(back) == b"abc\0\0\0ghij"
        part.sync()
        part.publish()
    assert names(tmp_path) == ["out.ninfer"]
    assert output.read_bytes() == b"abc\0\0\0ghij"


def test_leaving_without_publish_removes_the_part_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), part_file(tmp_path / "out", 10):
        raise RuntimeError("stop")
    assert names(tmp_path) == []


def test_a_part_file_left_by_a_dead_process_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "out.part").write_bytes(b"x" * 100)
    with part_file(tmp_path / "out", 10) as part:
        part.publish()
    assert (tmp_path / "out").read_bytes() == bytes(10)


def test_a_second_process_is_told_who_holds_the_output_and_harms_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from ninfer_convert.run.writer import PartFile; PartFile(pathlib.Path(sys.argv[1]), 10)"
    )
    with part_file(tmp_path / "out", 10) as part:
        part.write(0, b"0123456789")
        second = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=False
        )
        assert "is being written by another process, which holds" in second.stderr
        assert "out.part" in second.stderr
        part.publish()
    assert (tmp_path / "out").read_bytes() == b"0123456789"


def test_short_writes_and_reads_are_looped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:5]], offset))
    content = os.urandom(100)
    with part_file(tmp_path / "out", 100) as part:
        part.write(0, content)
        back = bytearray(100)
        part.read_into(0, back)
        assert bytes(back) == content


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"out needs \d+ bytes; .* has \d+ free"):
        part_file(tmp_path / "out", 2**60)
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync", "posix_fallocate", "link"])
def test_every_failing_call_names_the_path_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match=rf"out\.part \(10 bytes\): {os.strerror(code)}") as caught:
        with part_file(tmp_path / "out", 10) as part:
            part.write(0, b"x")
            part.sync()
            part.publish()
    assert caught.value.exit_code == 74
    assert names(tmp_path) == []


def test_a_file_system_without_preallocation_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with part_file(tmp_path / "out", 10) as part:
        part.write(9, b"z")
        part.publish()
    assert (tmp_path / "out").read_bytes() == bytes(9) + b"z"


@pytest.mark.parametrize("whole", [True, False])
def test_space_is_reserved_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, begin, nbytes: ranges.append((begin, nbytes)))
    monkeypatch.setattr(writer, "RESERVED_BYTES", 100)
    with PartFile(tmp_path / "out", 250).begin(whole=whole) as part:
        assert part.path.stat().st_size == 250
        if not whole:
            assert ranges == [(0, 100)]
            assert [part.reserve_more() for _ in range(3)] == [True, False, False]
        assert ranges == [(0, 100), (100, 100), (200, 50)]


def test_space_that_is_gone_while_others_write_already_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int, begin: int, nbytes: int) -> None:
        if begin >= 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(writer, "RESERVED_BYTES", 4096)
    source = write_directory(
        tmp_path / "source", {"model.safetensors": {"w": ("BF16", np.zeros((64, 512), np.uint16))}}
    )
    (tmp_path / "recipe.yaml").write_text(
        "schema: 1\nid: r\nartifact: {model_id: m, weights_id: w}\nevidence: none\nsources: {base: {}}\nobjects:\n"
        "  - {name: w, shape: [64, 512], format: BF16, value: w}\n"
    )
    ran = run_cli("run", tmp_path / "recipe.yaml", "--source", source, "-o", tmp_path / "out")
    assert (ran.code, ran.out) == (74, "")
    assert re.fullmatch(r"error: cannot reserve \S+/out\.part \(\d+ bytes\): No space left on device\n", ran.err)
    assert names(tmp_path) == ["recipe.yaml", "source"]


def test_a_symbolic_link_in_the_place_of_the_part_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "dear").write_bytes(b"dear")
    (tmp_path / "out.part").symlink_to(tmp_path / "dear")
    with pytest.raises(OutputError, match=r"cannot create .*out\.part"):
        part_file(tmp_path / "out", 10)
    assert (tmp_path / "dear").read_bytes() == b"dear"


def test_writers_in_many_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    with part_file(tmp_path / "out", 64 * 100) as part:
        def work(number: int) -> None:
            for piece in range(100):
                part.write((piece * 64 + number), bytes([number]))

        workers = [threading.Thread(target=work, args=(number,)) for number in range(64)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        part.publish()
    assert (tmp_path / "out").read_bytes() == bytes(range(64)) * 100


def test_an_existing_output_is_refused_without_overwrite(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_bytes(b"old")
    with pytest.raises(UsageError, match="out exists; --overwrite replaces it"):
        require_output(output, overwrite=False, protected=[])
    require_output(output, overwrite=True, protected=[])
    assert output.read_bytes() == b"old"


def test_an_output_that_is_a_source_by_any_alias_is_always_refused(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    (tmp_path / "soft").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for alias in (source, tmp_path / "soft", tmp_path / "hard", tmp_path / "." / "model.safetensors"):
        with pytest.raises(UsageError, match="is the source file .*; a source is never overwritten"):
            require_output(alias, overwrite=True, protected=[source])


def test_directories_dangling_links_devices_and_vanished_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory; name a file"):
        require_output(tmp_path, overwrite=True, protected=[])
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="is a symbolic link to nothing"):
        require_output(tmp_path / "dangling", overwrite=True, protected=[])
    with pytest.raises(UsageError, match="is not a regular file"):
        require_output(Path(os.devnull), overwrite=True, protected=[])
    with pytest.raises(OutputError, match="is not a directory; .* cannot be written there"):
        require_output(tmp_path / "gone" / "out", overwrite=False, protected=[])


def test_a_small_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_files.write_file(tmp_path / "report.json", b"{}")
    assert (tmp_path / "report.json").read_bytes() == b"{}"
    assert names(tmp_path) == ["report.json"]

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            with pytest.raises(OutputError, match=r"cannot write .*report\.json \(5 bytes\): No space left"):
                own_files.write_file(tmp_path / "report.json", b"[1,2]")
    assert names(tmp_path) == ["report.json"]
    assert (tmp_path / "report.json").read_bytes() == b"{}"


def test_publishing_never_replaces_what_another_process_made_meanwhile(tmp_path: Path) -> None:
    with part_file(tmp_path / "out", 10) as part:
        (tmp_path / "out").write_bytes(b"other")
        with pytest.raises(OutputError, match="out was made by another process meanwhile; it was left as it is"):
            part.publish()
        part.publish(overwrite=True)
    assert (tmp_path / "out").read_bytes() == bytes(10)
    assert names(tmp_path) == ["out"]


def test_a_kept_part_file_is_found_again_with_its_content(tmp_path: Path) -> None:
    with part_file(tmp_path / "out", 10) as part:
        part.write(3, b"abc")
        part.keep()
    with PartFile(tmp_path / "out", 10) as part:
        assert part.is_full_size()
        part.begin(keep_content=True)
        back = bytearray(10)
        part.read_into(0, back)
        assert bytes(back) == b"\0\0\0abc\0\0\0\0"


def test_a_file_system_without_stable_file_numbers_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartFile, "_is_current", lambda *_: False)
    with pytest.raises(OutputError, match=r"out\.part was another file each of 100 times it was opened"):
        PartFile(tmp_path / "out", 10)
