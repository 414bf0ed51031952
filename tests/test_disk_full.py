"""A disk that is full, or fails, at any moment: exit code 74, the path and the bytes named, nothing left."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forking import Ended, ForkServer
from many_objects import ManyObjects, write_many_objects
from pipeline import converted

from ninfer_convert.encode.block_maker import BlockMaker
from ninfer_convert.errors import OutputError
from ninfer_convert.run import own_files, pipeline
from ninfer_convert.run.writer import PartFile

POINTS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> ManyObjects:
    return write_many_objects(tmp_path_factory.mktemp("many"), rounds=12)


@pytest.fixture(scope="module")
def plain(many: ManyObjects, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Ended]:
    """The artifact of a run that nothing happened to, and how it ended."""
    output = tmp_path_factory.mktemp("plain") / "out"
    ended = server.run(*many.arguments(output))
    assert ended.code == 0, ended.err
    return output.read_bytes(), ended


@contextlib.contextmanager
def small_disk(directory: Path, size: int) -> Iterator[bool]:
    """Mounts a file system of so many bytes at a directory; false where the system does not let us."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "ninfer-convert-test", str(directory)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(directory)], check=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def require_clean_failure(ended: Ended, directory: Path, strangers: tuple[str, ...] = ()) -> None:
    """Requires one message with a path below the directory and a number of bytes, and that nothing is left."""
    assert ended.code == 74, ended.err
    (message,) = ended.err.splitlines()
    assert message.startswith("error: ")
    assert f"{directory}/out" in message
    assert "bytes" in message
    assert ended.out == ""
    assert names(directory) == sorted(strangers)


def test_too_little_space_is_refused_before_anything_is_written(
    many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    """On a small disk where we may mount one; and always with a limit on the size of a file."""
    nbytes = len(plain[0])
    disk = tmp_path / "disk"
    with small_disk(disk, nbytes // 2) as is_mounted:
        if is_mounted:
            ended = server.run(*many.arguments(disk / "out"))
            require_clean_failure(ended, disk)
            assert f"needs {nbytes} bytes; {disk} has " in ended.err
            assert ended.log.count("pwrite") == 0
            # Without the count of free space it is the reservation that fails.
            ended = server.run(*many.arguments(disk / "out"), fate={"uncounted": True})
            require_clean_failure(ended, disk)
            assert f"cannot reserve {disk}/out.part ({nbytes} bytes): No space left on device" in ended.err
            assert ended.log.count("pwrite") == 0
    # A limit on the size of files is met in the same place, where no disk can be mounted too.
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["open", 1], "limit": nbytes // 2})
    require_clean_failure(ended, tmp_path, ("disk",))
    assert ended.err == f"error: cannot reserve {tmp_path}/out.part ({nbytes} bytes): File too large\n"
    assert ended.log.count("pwrite") == 0


def before_report(ended: Ended) -> list[object]:
    """Returns the call that makes the file whose renaming, the first of the run, gives the report its name."""
    return ["open", ended.log[: ended.log.index("replace")].count("open")]


def test_another_writer_takes_the_space_at_twenty_points_and_nothing_is_left(
    many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    """Space neither counted nor reserved, on a disk with room for artifact, journal and report until it is taken.

    Where no disk can be mounted, no file may grow any more from the chosen call on.
    """
    content, ended = plain
    writes = [ended.number(place) for place in range(ended.calls) if ended.number(place)[0] == "pwrite"]
    points = [["write", 1], writes[0], writes[-1], before_report(ended)]
    points += sorted(random.Random(6).sample(writes[1:-1], POINTS - len(points)))
    disk = tmp_path / "disk"
    with small_disk(disk, 4 << 20) as is_mounted:
        for at in points:
            fate = {"at": at, "uncounted": True, "unreserved": True, "settings": {"FLUSH_BYTES": 20_000}}
            fate |= {"fill": str(disk / "stranger")} if is_mounted else {"limit": 0}
            failed = server.run(*many.arguments(disk / "out"), fate=fate)
            strangers = ("stranger",) if is_mounted else ()
            require_clean_failure(failed, disk, strangers)
            (disk / "stranger").unlink(missing_ok=True)
        assert server.run(*many.arguments(disk / "out")).code == 0
        assert (disk / "out").read_bytes() == content


@pytest.mark.parametrize(
    ("at", "path"),
    [
        (["pwrite", 1], "out.part"),
        (["pwrite", 150], "out.part"),
        (["write", 1], "out.part.journal"),
    ],
)
def test_no_file_may_grow_any_more_and_nothing_is_left(
    at: list[object], path: str, many: ManyObjects, server: ForkServer, tmp_path: Path
) -> None:
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": at, "limit": 0})
    require_clean_failure(ended, tmp_path)
    assert f"{tmp_path}/{path}" in ended.err
    assert ended.err.endswith(": File too large\n")


@pytest.mark.parametrize(
    ("at", "path", "code"),
    [
        (["open", 1], "out.part", errno.EDQUOT),
        (["open", 2], "out.part.journal", errno.EDQUOT),
        (["ftruncate", 1], "out.part", errno.EIO),
        (["posix_fallocate", 1], "out.part", errno.EDQUOT),
        (["write", 1], "out.part.journal", errno.EIO),
        (["fsync", 1], "out.part.journal", errno.EDQUOT),
        (["fsync", 2], "out.part.journal", errno.EIO),
        (["pwrite", 1], "out.part", errno.EFBIG),
        (["pwrite", 200], "out.part", errno.EDQUOT),
        (["fdatasync", 1], "out.part", errno.EIO),
        (["fsync", 3], "out.conversion.json", errno.EDQUOT),
        (["replace", 1], "out.conversion.json", errno.EIO),
        (["fsync", 4], "out.conversion.json", errno.EIO),
        (["fsync", 5], "out.part", errno.EIO),
        (["link", 1], "out.part", errno.ENOSPC),
    ],
)
def test_every_call_that_fails_is_a_clean_failure(
    at: list[object], path: str, code: int, many: ManyObjects, server: ForkServer, tmp_path: Path
) -> None:
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": at, "errno": code})
    require_clean_failure(ended, tmp_path)
    assert f"{tmp_path}/{path}" in ended.err
    assert ended.err.endswith(f": {os.strerror(code)}\n")


def test_a_report_that_may_not_grow_leaves_nothing(
    many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": before_report(plain[1]), "limit": 0})
    require_clean_failure(ended, tmp_path)
    assert f"cannot write {tmp_path}/out.conversion.json (" in ended.err


def test_a_directory_that_cannot_be_synced_is_told_and_its_complete_artifact_stays(
    many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    last = plain[1].log.count("fsync")
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["fsync", last], "errno": errno.EIO})
    assert ended.code == 74
    assert f"{tmp_path}/out ({len(plain[0])} bytes) is complete, but a power cut may still take its name" in ended.err
    assert (tmp_path / "out").read_bytes() == plain[0]
    assert names(tmp_path) == ["out", "out.conversion.json"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_directories_is_used_all_the_same(
    code: int, many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    last = plain[1].log.count("fsync")
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["fsync", last], "errno": code})
    assert (ended.code, (tmp_path / "out").read_bytes()) == (0, plain[0])


def test_a_failure_keeps_the_older_artifact_and_its_report(
    many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    for name in ("out", "out.conversion.json"):
        (tmp_path / name).write_bytes(f"older {name}".encode())
    # The second replacement is that of the artifact; the first one is that of the report.
    for at in (["pwrite", 100], ["fsync", 3], ["replace", 1], ["fsync", 4], ["fsync", 5], ["replace", 2]):
        fate = {"at": at, "errno": errno.EIO}
        ended = server.run(*many.arguments(tmp_path / "out", "--overwrite"), fate=fate)
        assert ended.code == 74, at
        assert names(tmp_path) == ["out", "out.conversion.json"], at
        for name in names(tmp_path):
            assert (tmp_path / name).read_bytes() == f"older {name}".encode(), at


def test_short_writes_make_the_same_artifact(
    many: ManyObjects, server: ForkServer, plain: tuple[bytes, Ended], tmp_path: Path
) -> None:
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"short": 500})
    assert (ended.code, (tmp_path / "out").read_bytes()) == (0, plain[0])
    assert ended.log.count("pwrite") > plain[1].log.count("pwrite")


def test_a_file_system_that_takes_nothing_is_full_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OutputError, match=r"cannot write .*out\.part \(10 bytes\)"):
        with PartFile(tmp_path / "out", 10).begin() as part:
            part.write(0, b"x")
    assert names(tmp_path) == []


def test_an_error_that_is_told_at_the_close_is_one_of_the_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network file systems do, which send the last bytes then."""
    with pytest.raises(OutputError, match=r"cannot publish .*out\.part \(10 bytes\): Disk quota exceeded"):
        with PartFile(tmp_path / "out", 10).begin() as part, monkeypatch.context() as patched:
            real, copies = os.dup, []
            patched.setattr(os, "dup", lambda fd: copies.append(real(fd)) or copies[0])

            def close(fd: int) -> None:
                if fd in copies:
                    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

            patched.setattr(os, "close", close)
            part.publish()
    os.close(copies[0])
    assert names(tmp_path) == []


@pytest.mark.parametrize("at", [["pwrite", 200], ["replace", 1], ["link", 1]])
def test_a_directory_that_vanishes_is_a_failure(
    at: list[object], many: ManyObjects, server: ForkServer, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    ended = server.run(*many.arguments(place / "out"), fate={"at": at, "remove": str(place)})
    assert (ended.code, len(ended.err.splitlines())) == (74, 1), ended.err
    assert f"{place}/out" in ended.err
    assert names(tmp_path) == []


def test_a_part_file_that_another_process_replaced_is_not_published(
    many: ManyObjects, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match=r"out\.part was removed or replaced by another process"):
        with PartFile(tmp_path / "out", 10).begin() as part:
            (tmp_path / "out.part").unlink()
            (tmp_path / "out.part").write_bytes(b"another")
            part.publish()
    assert (tmp_path / "out.part").read_bytes() == b"another"
    assert not (tmp_path / "out").exists()


def test_a_report_that_cannot_be_written_leaves_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b"older")
    undo = own_files.replace_file(path, b"newer")
    assert path.read_bytes() == b"newer"
    undo()
    assert path.read_bytes() == b"older"
    calls = iter(range(100))

    def fail_once(_: int) -> None:
        if next(calls) == 1:
            raise OSError(errno.EIO, "no")

    # The file is synced, then its directory is not.
    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(OutputError, match=r"cannot write .*r\.json \(5 bytes\): no"):
        own_files.replace_file(path, b"newer")
    assert path.read_bytes() == b"older"
    assert names(tmp_path) == ["r.json"]


def test_a_journal_that_cannot_grow_ends_the_run_and_nothing_is_left(
    many: ManyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers wait at their twentieth block until the journal has been written to."""
    refused, blocks = threading.Event(), itertools.count()
    write, make = os.write, BlockMaker.make

    def full(fd: int, data: memoryview) -> int:
        if not bytes(data).startswith(b'{"object"'):
            return write(fd, data)
        refused.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def patient(self: BlockMaker, *arguments: Any) -> Any:
        if next(blocks) >= 20:
            refused.wait(60)
        return make(self, *arguments)

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(BlockMaker, "make", patient)
    monkeypatch.setattr(pipeline, "FLUSH_BYTES", 1)
    with pytest.raises(OutputError, match=r"cannot write .*out\.part\.journal \(\d+ bytes\): No space left on device"):
        converted(many.recipe, tmp_path / "out", {"base": many.source})
    assert names(tmp_path) == []
