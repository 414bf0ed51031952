"""Several processes, one output: one artifact that is whole, and everybody else is told who was there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from case_tools import Case, filled, spawn
from forking import Ended, ForkServer
from many_objects import ManyObjects, write_many_objects

from ninfer_convert.artifact.verify import verify_artifact
from ninfer_convert.errors import OutputError
from ninfer_convert.run.journal import Journal, journal_path, read_journal
from ninfer_convert.run.writer import PartFile

RACERS = 16
LOSSES = re.compile(
    r"error: \S+/out (is being written by (process \d+ on \S+|another process), which holds \S+/out\.part"
    r"|exists; --overwrite replaces it when the new one is complete"
    r"|was made by another process meanwhile; it was left as it is)\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture(scope="module")
def rivals(tmp_path_factory: pytest.TempPathFactory) -> tuple[ManyObjects, ManyObjects]:
    """Two sources that differ in one word of one tensor, and one recipe."""
    one = write_many_objects(tmp_path_factory.mktemp("one"), rounds=4)
    other = ManyObjects(one.source.parent / "other", one.recipe, one.objects)
    shutil.copytree(one.source, other.source)
    shard = other.source / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    place = begin + json.loads(content[8:begin])["layers.2.d1"]["data_offsets"][0]
    content[place] ^= 1
    shard.write_bytes(content)
    return one, other


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def require_whole(directory: Path, rivals: tuple[ManyObjects, ManyObjects]) -> Path:
    """Requires an artifact that is valid and that its report describes; returns the source of both."""
    assert names(directory) == ["out", "out.conversion.json"]
    report = json.loads((directory / "out.conversion.json").read_bytes())
    assert hashlib.sha256((directory / "out").read_bytes()).hexdigest() == report["artifact"]["sha256"]
    assert verify_artifact(directory / "out").ok
    source = Path(report["sources"]["base"]["location"])
    assert source in [rival.source for rival in rivals]
    return source


@pytest.mark.parametrize("order", [1, -1])
def test_of_sixteen_racers_one_wins_and_fifteen_are_told_why_they_lost(
    order: int, rivals: tuple[ManyObjects, ManyObjects], server: ForkServer, tmp_path: Path
) -> None:
    ended = server.race([rival.arguments(tmp_path / "out") for rival in rivals[::order] * (RACERS // 2)])
    winners = [place for place, racer in enumerate(ended) if racer.code == 0]
    assert len(winners) == 1, [racer.err for racer in ended]
    for racer in ended:
        if racer.code != 0:
            require_lost(racer)
    assert require_whole(tmp_path, rivals) == rivals[::order][winners[0] % 2].source


def require_lost(racer: Ended) -> None:
    assert racer.code in (2, 74)
    assert LOSSES.fullmatch(racer.err), racer.err
    assert racer.out == ""


def test_racers_for_what_a_dead_process_has_left_complete_it_once(
    rivals: tuple[ManyObjects, ManyObjects], server: ForkServer, tmp_path: Path
) -> None:
    arguments = rivals[0].arguments(tmp_path / "out")
    killed = server.run(*arguments, fate={"at": ["pwrite", 50], "signal": 9, "settings": {"FLUSH_BYTES": 1}})
    assert (killed.code, names(tmp_path)) == (-9, ["out.part", "out.part.journal"])
    ended = server.race([arguments] * RACERS)
    assert sorted(racer.code == 0 for racer in ended) == [False] * (RACERS - 1) + [True]
    for racer in ended:
        if racer.code != 0:
            require_lost(racer)
    require_whole(tmp_path, rivals)


def test_racers_that_may_overwrite_leave_one_artifact_with_its_own_report(
    rivals: tuple[ManyObjects, ManyObjects], server: ForkServer, tmp_path: Path
) -> None:
    ended = server.race([rival.arguments(tmp_path / "out", "--overwrite") for rival in rivals * 4])
    assert any(racer.code == 0 for racer in ended)
    for racer in ended:
        if racer.code != 0:
            require_lost(racer)
    require_whole(tmp_path, rivals)


HOLD = """
import pathlib, sys
from ninfer_convert.run.journal import Journal, journal_path
from ninfer_convert.run.writer import PartFile
part = PartFile(pathlib.Path(sys.argv[1]), 10)
with Journal(journal_path(part.path), {}):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the output of the case in the same directory."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out.ninfer")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def small_case(root: Path) -> Case:
    case = Case(root)
    case.source({"a": filled("BF16", [4], 0x3F80)})
    case.recipe("{name: a, shape: [4], format: BF16, value: a}")
    return case


def test_the_loser_says_who_holds_the_output_and_a_dead_holder_does_not_block(
    held: subprocess.Popen[str], tmp_path: Path
) -> None:
    case = small_case(tmp_path)
    ran = spawn(*case.arguments("run"))
    assert (ran.code, ran.err) == (
        74,
        f"error: {tmp_path}/out.ninfer is being written by process {held.pid} on {platform.node()}, "
        f"which holds {tmp_path}/out.ninfer.part\n",
    )
    held.kill()
    held.wait()
    ran = case.run("--resume", "never")
    assert ran.code == 0, ran.err


def test_a_holder_that_went_on_with_the_work_of_another_is_the_one_that_is_named(tmp_path: Path) -> None:
    with PartFile(tmp_path / "out", 10) as part:
        path = journal_path(part.path)
        path.write_text('{"schema":1,"writer":{"pid":1,"host":"elsewhere"},"identity":{}}\n')
        with Journal(path, {}, read_journal(path, 1)):
            with pytest.raises(OutputError, match=f"by process {os.getpid()} on {platform.node()}, which holds"):
                PartFile(tmp_path / "out", 10)
        for writer in ("null", "7", '{"pid":true}', '{"pid":"\\u001b"}', "{}"):
            path.write_text(f'{{"writer":{writer}}}\n')
            with pytest.raises(OutputError, match="is being written by another process, which holds"):
                PartFile(tmp_path / "out", 10)
        path.write_text('{"writer":{"pid":5,"host":"\\u001b[31m"}}\n')
        with pytest.raises(OutputError, match=r"by process 5 on \\x1b\[31m, which holds"):
            PartFile(tmp_path / "out", 10)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_a_file_system_has_no_locks_only_the_work_of_the_dead_is_taken_over(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without the mount option for them."""

    def unsupported(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    case = small_case(tmp_path)
    assert case.run().code == 0
    case.output.unlink()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    journal, part = tmp_path / "out.ninfer.part.journal", tmp_path / "out.ninfer.part"
    header = '{{"schema":1,"writer":{{"pid":{},"host":"{}"}},"identity":{{}}}}\n'
    for pid, host in ((os.getpid(), platform.node()), (dead.pid, "elsewhere"), (-1, platform.node())):
        part.write_bytes(b"x")
        journal.write_text(header.format(pid, host))
        ran = case.run("--resume", "never")
        assert ran.code == 74
        assert f"{part} was left by process {pid} on {host}, and its file system has no locks" in ran.err
        assert part.read_bytes() == b"x"
    journal.unlink()
    assert "was left by another process" in case.run().err
    journal.write_text(header.format(dead.pid, platform.node()))
    assert case.run("--resume", "never").code == 0


def test_a_lock_that_fails_otherwise_is_an_output_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    ran = small_case(tmp_path).run()
    assert (ran.code, ran.err) == (74, f"error: cannot lock {tmp_path}/out.ninfer.part: Input/output error\n")


def test_an_output_that_appears_while_the_plan_is_made_is_left_as_it_is_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small_case(tmp_path)
    real = PartFile.__init__

    def made_meanwhile(self: PartFile, output: Path, nbytes: int) -> None:
        output.write_bytes(b"another")
        real(self, output, nbytes)

    monkeypatch.setattr(PartFile, "__init__", made_meanwhile)
    ran = case.run()
    assert (ran.code, ran.err) == (
        74, f"error: {case.output} was made by another process meanwhile; it was left as it is\n"
    )  # fmt: skip
    assert case.output.read_bytes() == b"another"
    assert names(tmp_path) == ["base", "out.ninfer", "recipe.yaml"]
