"""What goes wrong with outputs: full disks, dear files in the way, two writers, signals, and exit codes.

Each test is one row of the list of known troubles, told end to end: a whole artifact, or nothing and one message.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from case_tools import (
    Q4,
    Case,
    Ran,
    command,
    entry,
    filled,
    finish,
    interrupted_command,
    require_refusal,
    run_cli,
    snapshot,
    spawn,
    start,
    words_of,
)

ONE, NAN = 0x3F80, 0x7FC0
NAMES = [f"w{i}" for i in range(8)]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Eight small objects, each written by one call or more."""
    case = Case(tmp_path)
    case.source({name: filled("BF16", [64, 64], 0x3F80 + i) for i, name in enumerate(NAMES)})
    case.recipe(*(entry(name, [64, 64], Q4, name) for name in NAMES))
    return case


@pytest.fixture
def wrong(case: Case) -> Case:
    """The same with a value in the last object that cannot be stored."""
    case.source({name: filled("BF16", [64, 64], ONE, at4095=NAN if name == "w7" else ONE) for name in NAMES})
    return case


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(case: Case) -> list[str]:
    """Returns what lies beside the output under a name made of its own."""
    return sorted(path.name for path in case.root.glob("out.ninfer?*"))


def require_valid(case: Case) -> None:
    """Requires an artifact that verifies and that its report describes."""
    ran = run_cli("verify", case.output)
    assert ran.code == 0, ran.err
    assert case.report()["artifact"]["sha256"] == sha256(case.output)


class TestFailingWrites:
    """C27 (b): whatever fails, the name does not appear and the temporary is gone."""

    def test_a_file_size_limit_names_path_and_bytes(self, case: Case) -> None:
        case.source({"w": filled("BF16", [2048, 2048], ONE)})
        case.recipe(entry("w", [2048, 2048], "BF16", "w"))
        before = snapshot(case.root)

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        ran = spawn(*case.arguments("run"), preexec_fn=limit)
        require_refusal(ran, 74)
        assert str(case.output) in ran.err
        assert str(2048 * 2048 * 2 + 4096) in ran.err
        assert snapshot(case.root) == before

    @pytest.mark.parametrize("call", ["pwrite", "fsync", "fdatasync"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_a_medium_that_fails_names_the_output(
        self, case: Case, monkeypatch: pytest.MonkeyPatch, call: str, number: int
    ) -> None:
        real, calls = getattr(os, call), []

        def failing(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) > (4 if call == "pwrite" else 0):
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        monkeypatch.setattr(os, call, failing)
        case.refused(str(case.output), os.strerror(number), code=74, planned=False)

    def test_space_is_checked_before_any_work(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.fstatvfs

        def full(descriptor: int) -> os.statvfs_result:
            found = list(real(descriptor))
            found[4] = 0
            return os.statvfs_result(found)

        def refuse(*arguments: object) -> NoReturn:
            raise AssertionError("a value was read")

        monkeypatch.setattr(os, "fstatvfs", full)
        monkeypatch.setattr("ninfer_convert.encode.block_maker.BlockMaker.make", refuse)
        nbytes = run_cli(*case.arguments("plan", "--json")).out.partition('"file_bytes": ')[2].partition(",")[0]
        case.refused(str(case.output), nbytes, " 0 free", code=74, planned=False)

    def test_a_rename_that_fails_leaves_no_report(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any, **options: Any) -> NoReturn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "link", refuse)
        case.refused(str(case.output), code=74, planned=False)

    def test_a_report_that_cannot_be_written_leaves_no_artifact(self, case: Case) -> None:
        case.refused("nowhere", code=74, planned=False, extra=["--report", case.root / "nowhere" / "report.json"])

    @pytest.mark.parametrize("output", ["nowhere/out.ninfer", "recipe.yaml/out.ninfer"])
    def test_a_directory_that_is_not_there_is_named(self, case: Case, output: str) -> None:
        case.output = case.root / output
        case.refused(str(case.output.parent), code=74, planned=False)


class TestDearFiles:
    """C28."""

    def refuse(self, case: Case, output: Path, *fragments: str, extra: tuple[object, ...] = ()) -> None:
        """Refused as usage, with and without the wish to overwrite."""
        case.output = output
        for overwrite in ((), ("--overwrite",)):
            case.refused(*fragments, code=2, planned=False, extra=[*extra, *overwrite])

    def test_an_existing_file_is_kept_without_the_wish_to_overwrite(self, case: Case) -> None:
        case.output.write_bytes(b"dear")
        case.refused(f"{case.output} exists", "--overwrite", code=2, planned=False)
        case.converted("--overwrite")
        require_valid(case)

    def test_the_file_of_a_source_is_never_overwritten(self, case: Case) -> None:
        model = case.sources["base"] / "model.safetensors"
        symbolic, hard = case.root / "symbolic.ninfer", case.root / "hard.ninfer"
        symbolic.symlink_to(model)
        hard.hardlink_to(model)
        roundabout = case.root / "base" / ".." / "base" / "model.safetensors"
        for alias in (model, symbolic, hard, roundabout):
            self.refuse(case, alias, str(alias), "a source is never overwritten")

    def test_nor_is_anything_else_that_is_read(self, case: Case) -> None:
        case.source(
            {"a-00001-of-00002.safetensors": {"w": words_of("BF16", 1)}, "a-00002-of-00002.safetensors": {}},
            config={"a": 1},
            files={"tokenizer.json": b"{}"},
        )
        case.input("ranking", b"bytes")
        case.recipe(
            "{resource: t, file: tokenizer.json}",
            "{resource: r, input: ranking}",
            entry("w", [1], "BF16", "w"),
            more="inputs: {ranking: {}}\n",
        )
        directory = case.sources["base"]
        names = ["a-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
        for path in [*(directory / name for name in names), case.inputs["ranking"], case.recipe_path]:
            self.refuse(case, path, "a source is never overwritten")
            case.output = case.root / "out.ninfer"
            case.refused("never overwritten", code=2, planned=False, extra=["--overwrite", "--report", path])

    def test_a_directory_is_no_output(self, case: Case) -> None:
        self.refuse(case, case.sources["base"], "is a directory")

    def test_a_pipe_and_a_link_to_nothing_are_no_output(self, case: Case) -> None:
        os.mkfifo(case.root / "pipe")
        (case.root / "dangling").symlink_to(case.root / "nothing")
        self.refuse(case, case.root / "pipe", "not a regular file")
        self.refuse(case, case.root / "dangling", "symbolic link to nothing")

    @pytest.mark.parametrize(
        "report", ["out.ninfer", "base/../out.ninfer", "out.ninfer.part", "out.ninfer.part.journal"]
    )
    def test_the_report_does_not_get_in_the_way_of_the_artifact(self, case: Case, report: str) -> None:
        extra = ("--report", case.root / report)
        self.refuse(case, case.output, "written to the same file", extra=extra)

    def test_nor_through_a_link(self, case: Case) -> None:
        (case.root / "link").symlink_to(case.root)
        self.refuse(case, case.output, "same file", extra=("--report", case.root / "link" / "out.ninfer"))

    def test_a_forced_run_that_fails_changes_nothing(self, wrong: Case) -> None:
        wrong.output.write_bytes(b"dear")
        wrong.report_path.write_bytes(b"dear too")
        wrong.refused("base:w7, row 63, column 63", planned=False, extra=["--overwrite"])
        assert wrong.output.read_bytes() == b"dear"

    def test_a_forced_run_whose_rename_fails_changes_nothing(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case.output.write_bytes(b"dear")
        case.report_path.write_bytes(b"dear too")
        real = os.replace

        def replace(source: Any, target: Any, **options: Any) -> None:
            if os.fspath(target) == os.fspath(case.output):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(source, target, **options)

        monkeypatch.setattr(os, "replace", replace)
        before = {name: entry[:2] for name, entry in snapshot(case.root).items()}
        ran = case.run("--overwrite")
        require_refusal(ran, 74)
        assert {name: entry[:2] for name, entry in snapshot(case.root).items()} == before
        assert (case.output.read_bytes(), case.report_path.read_bytes()) == (b"dear", b"dear too")

    def test_a_report_whose_artifact_is_gone_blocks_nothing(self, case: Case) -> None:
        case.converted()
        case.output.unlink()
        case.converted()
        require_valid(case)

    def test_a_report_of_its_own_name_is_dear(self, case: Case) -> None:
        dear = case.root / "dear.json"
        dear.write_bytes(b"dear")
        case.refused("dear.json exists", code=2, planned=False, extra=["--report", dear])

    def test_a_dry_run_writes_nothing(self, case: Case) -> None:
        before = snapshot(case.root)
        ran = case.run("--dry-run")
        assert (ran.code, ran.err) == (0, "")
        assert "case-model/case-weights by recipe case" in ran.out
        assert snapshot(case.root) == before


class TestTwoWriters:
    """C29."""

    def test_the_second_is_told_who_writes_and_harms_nothing(self, case: Case) -> None:
        reached, go = case.root / "reached", case.root / "go"
        waiting = f"while not Path({str(go)!r}).exists(): time.sleep(0.01)"
        wait = f"Path({str(reached)!r}).touch(); exec({waiting!r})"
        first = start(interrupted_command(wait, 4, *case.arguments("run", "--threads", 1)))
        try:
            while not reached.exists():
                assert first.poll() is None
                time.sleep(0.01)
            held = snapshot(case.root)
            second = case.run()
            require_refusal(second, 74)
            assert f"{case.output} is being written by process {first.pid}" in second.err
            assert snapshot(case.root) == held
        finally:
            go.touch()
            ran = finish(first)
        assert ran.code == 0, ran.err
        assert leftovers(case) == [case.report_path.name]
        require_valid(case)

    def test_of_two_that_start_together_one_wins_whole(self, case: Case, tmp_path: Path) -> None:
        other = Case(tmp_path / "other")
        other.root.mkdir()
        other.source({name: filled("BF16", [64, 64], 0x4000 + i) for i, name in enumerate(NAMES)})
        other.recipe(*(entry(name, [64, 64], Q4, name) for name in NAMES))
        other.output = case.output
        rans = [finish(process) for process in [start(command(*each.arguments("run"))) for each in (case, other)]]
        assert 0 in [ran.code for ran in rans]
        for ran in rans:
            if ran.code:
                require_refusal(ran, ran.code)
                assert ran.code in (2, 74)
                assert str(case.output) in ran.err
        assert leftovers(case) == [case.report_path.name]
        require_valid(case)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class TestInterruptions:
    """C27 (a), C60."""

    @pytest.fixture
    def undisturbed(self, case: Case, tmp_path: Path) -> str:
        output = tmp_path / "elsewhere.ninfer"
        ran = run_cli(*case.arguments("run", "-o", output, "--report", tmp_path / "elsewhere.json"))
        assert ran.code == 0
        return sha256(output)

    def interrupt(self, case: Case, action: str) -> Ran:
        # One thread writes the head and one object after the other; the pause lets the signal be seen.
        words = interrupted_command(f"{action}; time.sleep(1)", 6, *case.arguments("run", "--threads", 1))
        return finish(start(words))

    @pytest.mark.parametrize("number", SIGNALS)
    def test_a_signal_keeps_the_state_and_the_same_command_goes_on(
        self, case: Case, undisturbed: str, number: signal.Signals
    ) -> None:
        before = snapshot(case.root)
        ran = self.interrupt(case, f"os.kill(os.getpid(), {int(number)})")
        assert ran.code == 75, ran.err
        assert ran.out == ""
        assert ran.err == "interrupted; give the same command again\n"
        assert leftovers(case) == ["out.ninfer.part", "out.ninfer.part.journal"]
        after = snapshot(case.root)
        assert {name: entry for name, entry in after.items() if not name.startswith("out.ninfer.part")} == before
        case.run()
        assert sha256(case.output) == undisturbed
        assert leftovers(case) == [case.report_path.name]
        require_valid(case)

    def test_a_killed_run_leaves_no_artifact_and_blocks_nothing(self, case: Case, undisturbed: str) -> None:
        before = snapshot(case.root)
        ran = self.interrupt(case, "os.kill(os.getpid(), signal.SIGKILL)")
        assert ran.code == -signal.SIGKILL
        assert not case.output.exists()
        assert not case.report_path.exists()
        assert set(leftovers(case)) <= {"out.ninfer.part", "out.ninfer.part.journal"}
        after = snapshot(case.root)
        assert {name: entry for name, entry in after.items() if not name.startswith("out.ninfer.part")} == before
        assert case.run().code == 0
        assert sha256(case.output) == undisturbed
        assert leftovers(case) == [case.report_path.name]
        require_valid(case)

    def test_a_run_that_never_resumes_starts_over(self, case: Case, undisturbed: str) -> None:
        self.interrupt(case, "os.kill(os.getpid(), signal.SIGTERM)")
        part = case.root / "out.ninfer.part"
        part.write_bytes(b"\xff" * part.stat().st_size)
        assert case.run("--resume", "never").code == 0
        assert sha256(case.output) == undisturbed

    def test_what_is_left_is_checked_and_not_trusted(self, case: Case, undisturbed: str) -> None:
        self.interrupt(case, "os.kill(os.getpid(), signal.SIGTERM)")
        part = case.root / "out.ninfer.part"
        part.write_bytes(b"\xff" * part.stat().st_size)
        assert case.run().code == 0
        assert sha256(case.output) == undisturbed

    def test_what_is_left_of_another_conversion_is_not_continued(self, case: Case) -> None:
        self.interrupt(case, "os.kill(os.getpid(), signal.SIGTERM)")
        case.source({name: filled("BF16", [64, 64], 0x4000) for name in NAMES})
        before = snapshot(case.root)
        ran = case.run()
        require_refusal(ran, 1)
        assert "out.ninfer.part" in ran.err
        assert "--resume never" in ran.err
        assert snapshot(case.root) == before


class TestExitCodes:
    """C60: what scripts decide by."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ["run"],
            ["run", "recipe.yaml"],
            ["plan", "recipe.yaml", "--sources", "x"],
            ["plan", "recipe.yaml", "--threads", "0"],
            ["plan", "recipe.yaml", "--max-memory", "255MiB"],
            ["plan", "recipe.yaml", "--max-memory", "lots"],
            ["nothing"],
        ],
    )
    def test_a_command_that_cannot_be_meant_is_2(self, arguments: list[str]) -> None:
        ran = run_cli(*arguments)
        assert ran.code == 2
        assert ran.out == ""
        assert "Traceback" not in ran.err

    @pytest.mark.parametrize(
        ("extra", "fragment"),
        [
            (["--source", "again"], "--source base is given twice"),
            (["--prefix", "model."], "write FROM=TO"),
            (["--prefix", "=x"], "write FROM=TO"),
            (["--input", "ranking"], "write NAME=PATH"),
            (["--source", "base=hf://owner/name"], "given twice"),
        ],
    )
    def test_so_is_an_option_that_says_nothing(self, case: Case, extra: list[str], fragment: str) -> None:
        case.refused(fragment, code=2, extra=extra)

    def test_so_is_an_input_that_the_recipe_does_not_know(self, case: Case) -> None:
        extra = ["--input", "other=x", "--input", "more=y"]
        first, second = case.refused("--input other=x: the recipe has no input other; it has none",
                                     code=2, messages=2, extra=extra)
        assert "--input more=y" in second
        assert "other" in first

    def test_the_nearest_input_is_named(self, case: Case) -> None:
        text = case.recipe_path.read_text()
        case.recipe_path.write_text(text.replace("sources:", "inputs: {ranking: {}, counts: {}}\nsources:", 1))
        case.refused(
            "--input rankings=x: the recipe has no input rankings; nearest: ranking; it has ranking, counts",
            code=2,
            extra=["--input", "rankings=x"],
        )

    def test_so_is_a_source_that_the_recipe_calls_otherwise(self, case: Case) -> None:
        place = case.sources.pop("base")
        case.refused(
            f"--source foo={place}: the recipe's source is called base, and no path is called foo={place}; "
            f"write --source base={place} or --source {place}",
            code=2,
            extra=["--source", f"foo={place}"],
        )

    def test_the_nearest_of_several_sources_is_named(self, case: Case) -> None:
        text = case.recipe_path.read_text()
        case.recipe_path.write_text(text.replace("{base: {}}", "{base: {}, quantized: {}}", 1))
        place = case.sources.pop("base")
        case.refused(
            "--source quantised=x: the recipe has no source quantised; nearest: quantized; it has base, quantized",
            code=2,
            extra=["--source", f"base={place}", "--source", "quantised=x"],
        )
        case.refused(
            "--source ./x=y: write NAME=WHERE; the recipe's sources are base, quantized",
            code=2,
            extra=["--source", "./x=y"],
        )

    def test_a_path_with_an_equals_sign_is_a_path_when_it_is_there(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(case.root)
        case.sources["base"].rename(case.root / "foo=base")
        case.sources["base"] = Path("foo=base")
        case.converted()
        case.sources["base"] = Path("none/foo=base")
        case.refused("none/foo=base: no such file or directory", extra=["--overwrite"], planned=False)

    @pytest.mark.parametrize(
        "words",
        [
            ["verify", "none"],
            ["inspect", "none"],
            ["compare", "none", "{artifact}"],
            ["compare", "{artifact}", "none"],
            ["compare", "none", "--recipe", "{recipe}", "--source", "{source}"],
            ["export", "none", "-o", "x.safetensors"],
            ["report", "none", "--html", "x.html"],
            ["report", "{artifact}", "--html", "x.html", "--against", "none"],
            ["report", "{artifact}", "--html", "x.html", "--report", "none"],
            ["verify", "{artifact}", "--report", "none"],
            ["verify", "{artifact}", "--recipe", "none"],
            ["plan", "none.yaml"],
            ["plan", "none"],
            ["plan", "{recipe}", "--source", "none"],
            ["prepare", "--plan", "none"],
        ],
    )
    def test_a_named_file_that_is_not_there_is_wrong_input_whatever_reads_it(
        self, case: Case, words: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case.converted()
        monkeypatch.chdir(case.root)
        before = snapshot(case.root)
        places = {"artifact": case.output, "recipe": case.recipe_path, "source": case.sources["base"]}
        ran = run_cli(*(word.format(**places) for word in words))
        require_refusal(ran, 1)
        assert len(ran.errors) == 1
        assert "none" in ran.err
        assert snapshot(case.root) == before

    def test_success_prints_the_digest_and_nothing_else(self, case: Case) -> None:
        ran = case.converted()
        assert ran.out == f"{sha256(case.output)}  {case.output}\n"
        assert ran.err.startswith(f"wrote {case.output}: 8 objects, ")

    def test_quiet_prints_nothing_at_all(self, case: Case) -> None:
        ran = case.converted("-q")
        assert (ran.out, ran.err) == ("", "")


UNPRIVILEGED = """
import os, sys
from ninfer_convert import cli

sys.argv[1:] = {warm}
assert cli._run() == 0
{change}
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.argv[1:] = {arguments}
cli.main()
"""


class TestUnprivileged:
    """C60: places where the user may not write, or not even read."""

    @pytest.fixture
    def case(self) -> Iterator[Case]:
        # Every user can reach this directory, not only the one that runs the tests.
        root = Path(tempfile.mkdtemp(prefix="ninfer-convert-"))
        os.chmod(root, 0o777)
        case = Case(root)
        os.chmod(case.source({"w": filled("BF16", [64, 64], ONE)}) / "model.safetensors", 0o644)
        case.recipe(entry("w", [64, 64], Q4, "w"))
        yield case
        for path in [root, *root.rglob("*")]:
            if path.is_dir():
                os.chmod(path, 0o755)
        shutil.rmtree(root)

    def run(self, case: Case, change: str) -> Ran:
        """Runs once to load everything there is to load, then changes something, then runs as another user."""
        output = case.output
        case.output = case.root / "warm.ninfer"
        warm = list(map(str, case.arguments("run", "-q")))
        case.output = output
        arguments = list(map(str, case.arguments("run")))
        script = UNPRIVILEGED.format(warm=warm, change=change, arguments=arguments)
        ran = finish(start([sys.executable, "-c", script]))
        for name in ("warm.ninfer", "warm.ninfer.conversion.json"):
            (case.root / name).unlink()
        return ran

    def test_a_read_only_source_converts(self, case: Case) -> None:
        os.chmod(case.sources["base"] / "model.safetensors", 0o444)
        os.chmod(case.sources["base"], 0o555)
        before = snapshot(case.root)
        ran = self.run(case, "")
        assert ran.code == 0, ran.err
        case.require_complete(before)

    def test_a_directory_that_may_not_be_written_is_an_output_failure(self, case: Case) -> None:
        (case.root / "locked").mkdir(mode=0o555)
        case.output = case.root / "locked" / "out.ninfer"
        before = snapshot(case.root)
        ran = self.run(case, "")
        require_refusal(ran, 74)
        assert str(case.output) in ran.err
        assert "Permission denied" in ran.err
        assert snapshot(case.root) == before

    def test_a_source_that_may_not_be_read_is_named(self, case: Case) -> None:
        model = case.sources["base"] / "model.safetensors"
        before = snapshot(case.root)
        ran = self.run(case, f"os.chmod({str(model)!r}, 0)")
        require_refusal(ran, 74)
        assert f"{model}: cannot be read: Permission denied" in ran.err
        os.chmod(model, 0o644)
        assert snapshot(case.root) == before
