"""One artifact by many processes: byte for byte that of one, whatever order they end in and whichever is killed."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case_tools import Case, Ran, command, entry, filled, finish, interrupted_command, run_cli, spawn, start
from commands import source_arguments
from forking import ForkServer
from hub_server import Repo, client_environment, serving
from many_objects import ManyObjects, write_many_objects
from miniatures import Miniatures
from pipeline import planned
from test_hub import COMMIT, write_model, write_recipe

from ninfer_convert.plan.planner import Plan
from ninfer_convert.run import finalize as finalizing
from ninfer_convert.run.cuts import Share, cut, stored_ranges
from ninfer_convert.run.share_file import ShareFile
from ninfer_convert.run.share_journal import ShareJournal, read_share_journal
from ninfer_convert.run.shares import prepare, run_share


class Shared:
    """A conversion in shares: `plan.json` and `out` in a directory of their own."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        self.directory, self.arguments = directory, arguments
        self.plan_path, self.output = directory / "plan.json", directory / "out"
        self.part, self.journal = directory / "out.part", directory / "out.part.journal"

    def plan(self) -> Ran:
        return run_cli("plan", *self.arguments, "-o", self.plan_path, "--output", self.output)

    def prepare(self) -> Ran:
        return run_cli("prepare", "--plan", self.plan_path)

    def share(self, name: str, *extra: object) -> Ran:
        return run_cli(*self.words(name, *extra))

    def words(self, name: str, *extra: object) -> list[object]:
        return ["run", "--plan", self.plan_path, "--shard", name, "--threads", "2", *extra]

    def finalize(self, *extra: object) -> Ran:
        return run_cli("finalize", "--plan", self.plan_path, *extra)

    def begun(self) -> Shared:
        """Plans and prepares."""
        for ran in (self.plan(), self.prepare()):
            assert ran.code == 0, ran.err
        return self

    def done(self, count: int, but: int = -1) -> Shared:
        """Runs all shares, except one."""
        for index in range(count):
            if index != but:
                assert self.share(f"{index}/{count}").code == 0
        return self

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def run_journal(self, index: int, count: int) -> Path:
        return self.directory / f"out.part.journal.{index}-of-{count}"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> ManyObjects:
    return write_many_objects(tmp_path_factory.mktemp("many"), 12)


@pytest.fixture(scope="module")
def plain(many: ManyObjects, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of one process."""
    output = tmp_path_factory.mktemp("plain") / "out"
    assert run_cli(*many.arguments(output)).code == 0
    return output


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture
def shared(many: ManyObjects, tmp_path: Path) -> Shared:
    return Shared(tmp_path, many.recipe, "--source", many.source)


@pytest.fixture
def made(many: ManyObjects) -> Iterator[Plan]:
    with planned(many.recipe, {"base": many.source}) as plan:
        yield plan


def report(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.with_name(path.name + ".conversion.json").read_bytes())
    return document


def damage(path: Path, position: int) -> None:
    """Turns over the bits of one byte."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


# -- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_shares_of_separate_processes_make_the_artifact_of_one(
    count: int, shared: Shared, many: ManyObjects, plain: Path
) -> None:
    shared.begun()
    order = list(range(count))
    random.Random(count).shuffle(order)
    for pair in (order[:2], order[2:4], order[4:]):
        running = [start(command(*shared.words(f"{index}/{count}"))) for index in pair]
        for process in running:
            assert finish(process).code == 0
    ended = shared.finalize()
    assert ended.code == 0, ended.err
    assert shared.output.read_bytes() == plain.read_bytes()
    assert shared.names() == ["out", "out.conversion.json", "plan.json"]
    assert {**report(shared.output), "run": None} == {**report(plain), "run": None}
    assert ended.out == f"{report(plain)['artifact']['sha256']}  {shared.output}\n"
    assert f"{many.objects} objects, " in ended.err
    assert f" of {count} {'share' if count == 1 else 'shares'}, " in ended.err


@pytest.mark.parametrize("recipe", ["qwen3.6-27b/groupwise-int", "qwen3.8-27b/nvfp4"])
def test_shares_of_a_miniature_make_the_artifact_of_one(recipe: str, miniatures: Miniatures, tmp_path: Path) -> None:
    made = miniatures.models[recipe.partition("/")[0]]
    names = ("base", "quantized") if recipe.endswith("nvfp4") else ("base",)
    words = [miniatures.recipes / f"{recipe}.yaml", *source_arguments(made, *names), "--unpinned"]
    (tmp_path / "plain").mkdir()
    assert run_cli("run", *words, "-o", tmp_path / "plain" / "out").code == 0
    (tmp_path / "shares").mkdir()
    shared = Shared(tmp_path / "shares", *words).begun().done(4)
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == (tmp_path / "plain" / "out").read_bytes()


def test_a_share_writes_its_own_bytes_and_no_others(shared: Shared, made: Plan, plain: Path) -> None:
    """Objects straddle the cuts here, whose shares make the same rows and keep other bytes of them."""
    shared.begun()
    content = plain.read_bytes()
    for share in random.Random(5).sample(cut(made, 7), 7):
        before = shared.part.read_bytes()
        assert before[share.begin : share.end] == bytes(share.end - share.begin)
        assert shared.share(share.name).code == 0
        expected = before[: share.begin] + content[share.begin : share.end] + before[share.end :]
        assert shared.part.read_bytes() == expected
    cuts = {share.begin for share in cut(made, 7)[1:]}
    straddling = [begin for begin, end, _ in stored_ranges(made) for place in cuts if begin < place < end]
    assert len(straddling) >= 2


def test_a_share_does_not_read_what_it_writes(
    monkeypatch: pytest.MonkeyPatch, shared: Shared, made: Plan, plain: Path
) -> None:
    monkeypatch.delattr(ShareFile, "read_into")
    assert prepare(made, shared.output)
    for share in cut(made, 3):
        run_share(made, shared.output, share, threads=2)
    assert shared.part.read_bytes() == plain.read_bytes()


def test_a_prepared_file_has_its_size_its_head_and_nothing_else(shared: Shared, made: Plan) -> None:
    shared.begun()
    assert shared.part.read_bytes() == made.head + bytes(made.payload_bytes)
    assert shared.names() == ["out.part", "out.part.journal", "plan.json"]


def test_more_shares_than_there_is_to_do_leave_some_empty(tmp_path: Path) -> None:
    case = Case(tmp_path / "case")
    case.root.mkdir()
    case.source({"a": filled("BF16", [5], 0x3F80)})
    case.recipe(entry("a", [5], "BF16", "a"))
    shared = Shared(tmp_path, *case.arguments("plan")[1:]).begun()
    told = [shared.share(f"{index}/3").err for index in range(3)]
    assert [": no bytes\n" in text for text in told] == [False, True, True]
    assert shared.finalize().code == 0
    assert case.run("-q").code == 0
    assert shared.output.read_bytes() == case.output.read_bytes()


def test_nodes_with_hub_caches_of_their_own_make_one_artifact(tmp_path: Path) -> None:
    """Planned and published from headers alone, by nodes that have nothing; made by two that fetch the weights."""
    model, recipe = write_model(tmp_path / "model"), write_recipe(tmp_path / "recipe.yaml")
    plan = tmp_path / "plan.json"
    assert run_cli("run", recipe, "--source", model, "-o", tmp_path / "plain").code == 0
    with serving(n=Repo(model)) as hub:

        def node(name: str, *words: object) -> Ran:
            return spawn(*words, environment=client_environment(hub, tmp_path / name))

        told = node("a", "plan", recipe, "--source", "hf://o/n", "-o", plan, "--output", tmp_path / "out")
        assert told.code == 0, told.err
        assert json.loads(plan.read_bytes())["sources"] == {"base": f"hf://o/n@{COMMIT}"}
        assert node("a", "prepare", "--plan", plan).code == 0
        for index in (1, 0):
            made = node(f"share{index}", "run", "--plan", plan, "--shard", f"{index}/2")
            assert made.code == 0, made.err
        ended = node("b", "finalize", "--plan", plan)
        assert ended.code == 0, ended.err
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
    assert report(tmp_path / "out")["sources"]["base"]["revision"] == COMMIT


# -- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_share_killed_at_a_seeded_call_and_run_again_is_the_same(
    seed: int, shared: Shared, server: ForkServer, plain: Path
) -> None:
    draw = random.Random(seed)
    shared.begun()
    count = draw.choice((1, 2, 4))
    busy = {"FLUSH_BYTES": 4000}
    for index in draw.sample(range(count), count):
        words = shared.words(f"{index}/{count}")
        for _ in range(draw.choice((1, 2))):
            fate = {"at": ["pwrite", draw.randrange(1, 150)], "signal": signal.SIGKILL, "settings": busy}
            ended = server.run(*words, fate=fate)
            assert ended.code in (0, -signal.SIGKILL), ended.err
            if ended.code:
                assert shared.finalize().code == 1
        ended = server.run(*words, *(("--max-memory", "400MiB") if draw.random() < 0.5 else ()))
        assert ended.code == 0, ended.err
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == plain.read_bytes()
    assert shared.names() == ["out", "out.conversion.json", "plan.json"]


def test_an_interrupted_share_keeps_what_it_did(shared: Shared, made: Plan, plain: Path) -> None:
    shared.begun()
    action = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)"
    ended = finish(start(interrupted_command(action, 90, *shared.words("0/2"))))
    assert (ended.code, ended.err.splitlines()[-1]) == (75, "interrupted; give the same command again")
    found = read_share_journal(shared.run_journal(0, 2), cut(made, 2)[0], json.loads(json.dumps(identity(shared))))
    assert found is not None
    content = plain.read_bytes()
    kept = sum(segment.end - segment.begin for segment in found.segments)
    assert kept > 0
    assert not found.is_complete
    assert all(shared.part.read_bytes()[s.begin : s.end] == content[s.begin : s.end] for s in found.segments)
    again = shared.share("0/2")
    assert again.code == 0
    assert f", {kept:,} bytes" in again.err
    assert shared.share("1/2").code == 0
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == content


def identity(shared: Shared) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shared.plan_path.read_bytes())["identity"]
    return found


@pytest.mark.parametrize("call", ["open", "posix_fallocate", "pwrite", "fdatasync", "write", "fsync"])
def test_prepare_killed_at_any_step_is_done_again(
    call: str, shared: Shared, server: ForkServer, made: Plan
) -> None:
    assert shared.plan().code == 0
    ended = server.run("prepare", "--plan", shared.plan_path, fate={"at": [call, 1], "signal": signal.SIGKILL})
    assert ended.code == -signal.SIGKILL
    early = shared.share("0/2")
    assert (early.code, "is not prepared" in early.err) in ((1, True), (0, False))
    assert shared.prepare().code == 0
    assert shared.done(2).finalize().code == 0


@pytest.mark.parametrize("at", [["replace", 1], ["link", 1], ["unlink", 1], ["unlink", 2], ["unlink", 3]])
def test_finalize_killed_at_any_step_is_done_again(
    at: list[object], shared: Shared, server: ForkServer, plain: Path
) -> None:
    """The report's name, the output's, the part file's second name, the journals."""
    shared.begun().done(2)
    ended = server.run("finalize", "--plan", shared.plan_path, fate={"at": at, "signal": signal.SIGKILL})
    assert ended.code == -signal.SIGKILL
    assert not shared.output.exists() or shared.output.read_bytes() == plain.read_bytes()
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == plain.read_bytes()
    assert shared.names() == ["out", "out.conversion.json", "plan.json"]


# -- each step again, and in any order -------------------------------------------------------------------------------


def test_every_step_may_be_done_again_before_and_after_publication(shared: Shared, plain: Path) -> None:
    assert shared.plan().code == 0
    assert shared.plan().code == 0
    assert "prepared " in shared.prepare().err
    assert shared.prepare().err == f"{shared.part} is prepared already\n"
    for _ in range(2):
        shared.done(2)
    again = shared.share("1/2")
    assert "wrote 0 bytes, " in again.err
    assert shared.prepare().err == f"{shared.part} is prepared already\n"
    assert shared.finalize().code == 0
    before = {path: path.stat().st_mtime_ns for path in shared.directory.iterdir()}
    done = f"{shared.output} is complete already\n"
    assert (shared.prepare().code, shared.prepare().err) == (0, done)
    late = shared.share("0/2")
    assert (late.code, late.err.splitlines(keepends=True)[-1]) == (0, done)
    twice = shared.finalize()
    assert (twice.code, twice.err) == (0, done)
    assert twice.out == f"{report(plain)['artifact']['sha256']}  {shared.output}\n"
    assert {path: path.stat().st_mtime_ns for path in shared.directory.iterdir()} == before


def test_prepare_does_not_disturb_a_running_share(shared: Shared) -> None:
    shared.begun()
    with ShareFile(shared.part):
        assert shared.prepare().err == f"{shared.part} is prepared already\n"


def test_quiet_steps_say_nothing(shared: Shared) -> None:
    assert shared.plan().code == 0
    for words in (["prepare", "--plan", shared.plan_path, "-q"], shared.words("0/1", "-q")):
        ran = run_cli(*words)
        assert (ran.code, ran.out, ran.err) == (0, "", "")
    ran = shared.finalize("-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_the_share_is_chosen_by_a_scheduler(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.begun()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert shared.share("auto/2").err.startswith("share 1/2 (JOB_COMPLETION_INDEX=1): file bytes [")
    assert shared.run_journal(1, 2).exists()


# -- what finalize refuses --------------------------------------------------------------------------------------------


def test_a_missing_share_is_named(shared: Shared, made: Plan, plain: Path) -> None:
    shared.begun().done(4, but=2)
    share = cut(made, 4)[2]
    before = shared.part.read_bytes()
    ran = shared.finalize()
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"error: share 2/4 (file bytes [{share.begin}, {share.end})) is missing; give `run --plan {shared.plan_path} "
        "--shard 2/4`\n"
    )
    assert shared.part.read_bytes() == before
    assert shared.share("2/4").code == 0
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == plain.read_bytes()


def test_a_share_that_is_not_complete_is_named_with_what_is_missing(shared: Shared, made: Plan) -> None:
    shared.begun().done(2)
    path = shared.run_journal(1, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    ran = shared.finalize()
    assert (ran.code, "share 1/2 (file bytes [" in ran.err) == (1, True)
    assert ")) is not complete, 0 bytes are missing; give `run --plan " in ran.err
    place = max(number for number, line in enumerate(lines) if b"sha256" in line)
    lacking = json.loads(lines[place])
    path.write_bytes(b"".join([*lines[:place], *lines[place + 1 :]]))
    assert f"is not complete, {lacking['end'] - lacking['begin']} bytes are missing" in shared.finalize().err
    # As a power cut leaves it.
    path.write_bytes(b"".join([*lines[:place], lines[place][:20]]))
    assert "is not complete" in shared.finalize().err
    assert shared.share("1/2").code == 0
    assert shared.finalize().code == 0


def test_nothing_run_yet_is_told(shared: Shared) -> None:
    ran = shared.begun().finalize()
    assert (ran.code, ran.err) == (
        1,
        f"error: no share of {shared.part} has been run; give `run --plan {shared.plan_path} --shard I/N`\n",
    )


def test_shares_of_two_numbers_are_told_and_one_whole_number_is_enough(shared: Shared, plain: Path) -> None:
    shared.begun().done(3, but=1).done(2, but=0)
    ran = shared.finalize()
    assert (ran.code, len(ran.errors)) == (1, 3)
    assert "share 0/2 (file bytes [" in ran.errors[0]
    assert "share 1/3 (file bytes [" in ran.errors[1]
    assert ran.errors[2] == "error: shares of 2 and of 3 are there; those of one number are enough"
    assert shared.share("1/3").code == 0
    assert " of 3 shares, " in shared.finalize().err
    assert shared.output.read_bytes() == plain.read_bytes()
    assert shared.names() == ["out", "out.conversion.json", "plan.json"]


def test_a_changed_byte_is_named_with_object_and_share_which_mends_it(shared: Shared, made: Plan, plain: Path) -> None:
    shared.begun().done(3)
    share = cut(made, 3)[1]
    index = next(i for begin, _, i in stored_ranges(made) if begin >= share.begin + 8192)
    place = made.payload_offset + made.objects[index].offset
    damage(shared.part, place)
    ran = shared.finalize()
    assert (ran.code, len(ran.errors)) == (1, 1)
    assert ran.err.startswith(f"error: object {made.objects[index].name}: bytes [{place}, ")
    assert f"of {shared.part} have SHA-256 " in ran.err
    assert ran.err.endswith(f"; give `run --plan {shared.plan_path} --shard 1/3` again\n")
    assert not shared.output.exists()
    assert shared.share("0/3").err.count("wrote 0 bytes") == 1
    mended = shared.share("1/3")
    assert "wrote 0 bytes" not in mended.err
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == plain.read_bytes()


def test_what_belongs_to_no_share_is_written_again(shared: Shared, made: Plan, plain: Path) -> None:
    """The head, and the zeros between planes and objects."""
    shared.begun().done(2)
    ranges = list(stored_ranges(made))
    gap = next(end for (_, end, _), (begin, _, _) in itertools.pairwise(ranges) if end < begin)
    damage(shared.part, gap)
    damage(shared.part, 20)
    assert shared.finalize().code == 0
    assert shared.output.read_bytes() == plain.read_bytes()


def test_many_changed_bytes_are_counted(shared: Shared, made: Plan) -> None:
    shared.begun().done(1)
    for begin, _, _ in stored_ranges(made):
        damage(shared.part, begin)
    ran = shared.finalize()
    assert (ran.code, len(ran.errors)) == (1, finalizing.SHOWN_PROBLEMS + 1)
    total = len(list(stored_ranges(made)))
    assert ran.errors[-1] == f"error: and {total - finalizing.SHOWN_PROBLEMS} more ranges"


def test_two_runs_of_a_share_that_made_different_bytes_are_told(shared: Shared) -> None:
    shared.begun().done(1)
    path = shared.run_journal(0, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    first = json.loads(lines[1])
    other = json.dumps({**first, "sha256": "0" * 64}).encode() + b"\n"
    path.write_bytes(b"".join([*lines, other]))
    ran = shared.finalize()
    assert (ran.code, len(ran.errors)) == (1, 1)
    assert f"two runs of share 0/1 made different bytes of [{first['begin']}, {first['end']}): SHA-256 " in ran.err
    assert shared.share("0/1", "--resume", "never").code == 0
    assert shared.finalize().code == 0


def test_an_output_that_is_something_else_is_left_alone(shared: Shared) -> None:
    shared.begun().done(1)
    shared.output.write_bytes(b"dear")
    for ran in (shared.prepare(), shared.finalize(), shared.plan()):
        assert ran.code == 2
        assert f"{shared.output} exists" in ran.err
    assert shared.output.read_bytes() == b"dear"


@pytest.mark.parametrize("change", ["artifact", "report", "no report"])
def test_a_published_output_that_has_changed_is_not_called_complete(change: str, shared: Shared) -> None:
    shared.begun().done(1)
    assert shared.finalize().code == 0
    path = shared.directory / "out.conversion.json"
    if change == "artifact":
        damage(shared.output, shared.output.stat().st_size - 1)
    elif change == "report":
        path.write_bytes(path.read_bytes().replace(b'"case"', b'"base"'))
    else:
        path.unlink()
    ran = shared.finalize()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: {shared.output} exists, and {path} does not say that it was made by this plan\n"


# -- several writers -------------------------------------------------------------------------------------------------


def test_finalize_waits_for_no_running_share_and_names_it(shared: Shared, made: Plan) -> None:
    shared.begun().done(2)
    share = cut(made, 2)[1]
    with ShareFile(shared.part), ShareJournal(shared.part, share, identity(shared)):
        ran = shared.finalize()
    assert ran.code == 74
    assert ran.err.startswith(f"error: {shared.output} is still being written: share 1/2 by process {os.getpid()} on ")
    assert shared.finalize().code == 0


def test_one_process_makes_a_share_at_a_time(shared: Shared, made: Plan) -> None:
    shared.begun()
    with ShareJournal(shared.part, cut(made, 2)[1], identity(shared)):
        ran = shared.share("1/2")
        assert ran.code == 74
        assert f"error: share 1/2 is being written by process {os.getpid()} on " in ran.err
        assert shared.share("0/2").code == 0


def test_no_share_is_made_while_the_file_is_finalized(shared: Shared) -> None:
    shared.begun()
    with shared.part.open("rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        ran = shared.share("1/2")
    assert ran.code == 74
    assert ran.err.splitlines()[-1] == f"error: {shared.part} is being prepared or finalized"


def test_a_plain_run_leaves_a_prepared_file_alone(shared: Shared, many: ManyObjects) -> None:
    shared.begun().done(2, but=1)
    before = {path.name: path.read_bytes() for path in shared.directory.iterdir()}
    for extra in ([], ["--resume", "never"], ["--overwrite"]):
        ran = run_cli(*many.arguments(shared.output, *extra))
        assert (ran.code, ran.err) == (
            1,
            f"error: {shared.part} is prepared for a conversion in shares, which `run --plan` and `finalize` "
            f"or `run --dask` complete; remove {shared.part}* to give it up\n",
        )
    assert {path.name: path.read_bytes() for path in shared.directory.iterdir()} == before
    with ShareFile(shared.part):
        ran = run_cli(*many.arguments(shared.output))
    assert ran.code == 74
    assert f"{shared.output} is being written by another process, which holds {shared.part}" in ran.err


def test_prepare_leaves_an_interrupted_plain_run_alone(
    shared: Shared, many: ManyObjects, server: ForkServer, plain: Path
) -> None:
    assert shared.plan().code == 0
    fate = {"at": ["pwrite", 200], "signal": signal.SIGKILL}
    assert server.run(*many.arguments(shared.output), fate=fate).code == -signal.SIGKILL
    ran = shared.prepare()
    assert (ran.code, ran.err) == (
        1,
        f"error: {shared.part} was left by an interrupted run; complete that one, or remove {shared.part}* to give it "
        "up\n",
    )
    ran = shared.share("0/1")
    assert (ran.code, "is not prepared; give `prepare --plan " in ran.err) == (1, True)
    assert server.run(*many.arguments(shared.output)).code == 0
    assert shared.output.read_bytes() == plain.read_bytes()


def test_after_giving_up_shares_a_plain_run_is_as_ever(shared: Shared, many: ManyObjects, plain: Path) -> None:
    shared.begun().done(2, but=1)
    shared.part.unlink()
    assert run_cli(*many.arguments(shared.output)).code == 0
    assert shared.output.read_bytes() == plain.read_bytes()


def test_preparing_anew_forgets_what_was_claimed_before(shared: Shared) -> None:
    shared.begun().done(2)
    shared.part.unlink()
    assert shared.prepare().code == 0
    assert shared.names() == ["out.part", "out.part.journal", "plan.json"]


# -- unprepared, changed, misused -------------------------------------------------------------------------------------


def test_a_share_and_finalize_need_a_prepared_file(shared: Shared) -> None:
    assert shared.plan().code == 0
    for ran in (shared.share("0/2"), shared.finalize()):
        assert ran.code == 1
        assert ran.err.splitlines()[-1] == (
            f"error: {shared.part} is not prepared; give `prepare --plan {shared.plan_path}` once, before any share is "
            "run"
        )
    assert shared.names() == ["plan.json"]


def test_a_changed_source_is_named_at_every_step(tmp_path: Path) -> None:
    case = Case(tmp_path / "case")
    case.root.mkdir()
    case.source({"a": filled("BF16", [5], 0x3F80)})
    case.recipe(entry("a", [5], "BF16", "a"))
    shared = Shared(tmp_path, *case.arguments("plan")[1:]).begun().done(1)
    os.utime(case.sources["base"] / "model.safetensors", (1, 1))
    for ran in (shared.prepare(), shared.share("0/1"), shared.finalize()):
        assert (ran.code, ran.err.splitlines()[-1]) == (
            1,
            f"error: {shared.plan_path}: the conversion has changed since it was planned, in sources (base: "
            "model.safetensors)",
        )
    # Planned again it is another conversion than the one that is prepared.
    assert shared.plan().code == 0
    ran = shared.prepare()
    assert (ran.code, ran.err) == (
        1,
        f"error: {shared.part} was prepared for another plan, which differs in sources (base: model.safetensors); "
        f"complete that one, or remove {shared.part}* to give it up\n",
    )
    ran = shared.share("0/1")
    assert (ran.code, "it was prepared for another plan, which differs in sources (base: " in ran.err) == (1, True)


def test_a_condition_is_checked_by_the_share_that_it_is_dealt_to(tmp_path: Path) -> None:
    case = Case(tmp_path / "case")
    case.root.mkdir()
    big = {name: filled("BF16", [64, 256], 0x3F80) for name in "abcd"}
    case.source(big | {"e": filled("BF16", [64, 256], 0x3F80, at16000=0)})
    more = "conditions: [{same: [d, e]}]\n"
    case.recipe(*(entry(name, [64, 256], "BF16", name) for name in "abc"), more=more)
    shared = Shared(tmp_path, *case.arguments("plan")[1:]).begun()
    with planned(case.recipe_path, case.sources) as made:
        dealt = [share.conditions for share in cut(made, 4)]
    assert sorted(dealt) == [(), (), (), (0,)]
    for index, conditions in enumerate(dealt):
        ran = shared.share(f"{index}/4")
        assert ran.code == len(conditions), ran.err
        assert ("tensor base:e, row 62, column 128: word 0x0000 differs from 0x3f80" in ran.err) == bool(conditions)
    refused = shared.finalize()
    index = dealt.index((0,))
    assert (refused.code, len(refused.errors)) == (1, 1)
    assert f"share {index}/4 (file bytes [" in refused.err
    assert "is not complete, 0 bytes are missing" in refused.err


def test_a_bad_value_stops_its_share_and_keeps_the_file(tmp_path: Path) -> None:
    case = Case(tmp_path / "case")
    case.root.mkdir()
    case.source({"a": filled("BF16", [8, 256], 0x3F80, at300=0x7F80), "b": filled("BF16", [8, 4096], 0x3F80)})
    case.recipe(entry("b", [8, 4096], "BF16", "b"), entry("a", [8, 256], "W8G32_F16S", "a"))
    shared = Shared(tmp_path, *case.arguments("plan")[1:]).begun()
    assert shared.share("0/2").code == 0
    ran = shared.share("1/2")
    assert (ran.code, "object a: tensor base:a, row 1, " in ran.err) == (1, True)
    assert shared.part.exists()
    assert "share 1/2 (file bytes [" in shared.finalize().err


def test_a_full_disk_stops_a_share_and_the_same_command_goes_on(
    shared: Shared, server: ForkServer, plain: Path
) -> None:
    shared.begun()
    for name, call in (("0/2", "pwrite"), ("0/2", "write"), ("1/2", "fdatasync"), ("1/2", "fsync")):
        ran = server.run(*shared.words(name), fate={"at": [call, 1], "errno": 28})
        assert (ran.code, "No space left on device" in ran.err) == (74, True), (call, ran.err)
    assert shared.done(2).finalize().code == 0
    assert shared.output.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "0/2"], "--plan and --shard go together; --shard 0/1 is all of a plan"),
        (["--plan", "{plan}"], "--plan and --shard go together; --shard 0/1 is all of a plan"),
        (["recipe.yaml", "--plan", "{plan}", "--shard", "0/2"], "RECIPE does not go with --plan, which says already "),
        (["--plan", "{plan}", "--shard", "0/2", "-o", "x"], "-o does not go with --plan, which says already what "),
        (["--plan", "{plan}", "--shard", "0/2", "--overwrite"], "--overwrite does not go with --plan"),
        (["--plan", "{plan}", "--shard", "0/2", "--source", "x"], "--source does not go with --plan"),
        (["--plan", "{plan}", "--shard", "2/2"], "--shard 2/2: share 2 of 2; shares are counted from 0 to 1"),
        (["--plan", "{plan}", "--shard", "0/2", "--max-memory", "1MiB"], "--max-memory 1MiB is below the minimum"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(words: list[str], message: str, shared: Shared) -> None:
    shared.begun()
    ran = run_cli("run", *(word.format(plan=shared.plan_path, root=shared.directory) for word in words))
    assert (ran.code, len(ran.errors)) == (2, 1)
    assert message in ran.err


@pytest.mark.parametrize("words", [["prepare"], ["run", "--shard", "0/2"], ["finalize"]])
def test_a_plan_file_that_is_not_there_is_wrong_input(words: list[str], tmp_path: Path) -> None:
    ran = run_cli(*words, "--plan", tmp_path / "none.json")
    message = f"{tmp_path}/none.json: No such file or directory; make it with `plan RECIPE -o PLAN.json --output OUT`"
    assert (ran.code, ran.err) == (1, f"error: {message}\n")


def test_a_plan_file_that_cannot_be_read_is_an_input_output_failure(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.begun()
    opened = open

    def fail(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == str(shared.plan_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", fail)
    ran = run_cli("prepare", "--plan", shared.plan_path)
    assert (ran.code, ran.err) == (74, f"error: {shared.plan_path}: cannot be read: Permission denied\n")


def test_a_run_without_plan_still_needs_recipe_and_output(many: ManyObjects) -> None:
    instead = "; give it, or --plan PLAN.json --shard I/N, which stand for RECIPE, -o and all else."
    for words, missing in ((["-o", "x"], "argument 'RECIPE'"), ([many.recipe], "option '-o' / '--output'")):
        ran = run_cli("run", *words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.endswith(f"Error: Missing {missing}{instead}\n")


def test_the_help_of_run_says_that_a_plan_takes_the_place_of_the_recipe() -> None:
    shown = " ".join(run_cli("run", "--help").out.split())
    assert shown.startswith("Usage: ninfer-convert run [OPTIONS] [RECIPE] ")
    assert "Where it goes; required, like RECIPE, unless --plan is given." in shown


# -- the plan file ----------------------------------------------------------------------------------------------------


def test_a_plan_file_holds_absolute_places_and_the_plan_still_prints(
    shared: Shared, many: ManyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(many.recipe.parent)
    words = ["plan", many.recipe.name, "--source", many.source.name, "-o", shared.plan_path, "--output"]
    ran = run_cli(*words, os.path.relpath(shared.output), "--json")
    assert (ran.code, json.loads(ran.out)["totals"]["objects"]) == (0, many.objects)
    document = json.loads(shared.plan_path.read_bytes())
    assert document["recipe"] == str(many.recipe)
    assert document["sources"] == {"base": str(many.source)}
    assert document["output"] == str(shared.output)
    assert document["report"] == f"{shared.output}.conversion.json"
    assert document["totals"]["objects"] == many.objects
    monkeypatch.chdir("/")
    assert shared.prepare().code == 0


def test_a_shipped_recipe_is_named_by_its_name(demo: Any, tmp_path: Path) -> None:
    shared = Shared(tmp_path, "demo", *source_arguments(demo, "base", "quantized"))
    assert shared.plan().code == 0
    document = json.loads(shared.plan_path.read_bytes())
    assert (document["recipe"], document["inputs"]) == ("demo", {"ranking": str(demo.ranking)})
    assert shared.prepare().code == 0
    assert shared.done(2).finalize().code == 0


@pytest.mark.parametrize(
    "damaged",
    [b"", b"[]", b"{}", b'{"kind": "ninfer-convert plan", "schema": 2, "unpinned": false}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_plan_file_is_told(damaged: bytes, shared: Shared) -> None:
    shared.plan_path.write_bytes(damaged)
    for ran in (shared.prepare(), shared.share("0/1"), shared.finalize()):
        assert ran.code == 1
        assert ran.err.splitlines()[-1] == (
            f"error: {shared.plan_path} is no plan of schema 1; make it with `plan RECIPE -o PLAN.json --output OUT`"
        )
    ran = shared.plan()
    assert (ran.code, ran.err) == (2, f"error: {shared.plan_path} exists and is no plan; it is not replaced\n")
    assert shared.plan_path.read_bytes() == damaged


@pytest.mark.parametrize("member", ["recipe", "sources", "inputs", "prefixes", "output", "report", "identity"])
def test_a_plan_file_with_a_member_of_another_kind_is_none(member: str, shared: Shared) -> None:
    assert shared.plan().code == 0
    document = json.loads(shared.plan_path.read_bytes())
    for value in (5, None, {"a": 1} if member != "identity" else [1]):
        shared.plan_path.write_text(json.dumps({**document, member: value}), encoding="utf-8")
        assert "is no plan of schema 1" in shared.prepare().err


def test_plan_file_and_output_are_given_together_and_are_two(shared: Shared, many: ManyObjects) -> None:
    both = "-o is where the plan is written, --output where its artifact will go, and they go together"
    for option, path, missing in (
        ("-o", shared.plan_path, "--output OUT.ninfer"),
        ("--output", shared.output, "-o PLAN.json"),
    ):
        ran = run_cli("plan", *shared.arguments, option, path)
        told = f"{option} without {missing}: {both}; to convert at once: `run RECIPE -o OUT.ninfer`"
        assert (ran.code, ran.err) == (2, f"error: {told}\n")
        assert not path.exists()
    for output in (shared.output, shared.directory / "out.conversion.json"):
        ran = run_cli("plan", *shared.arguments, "-o", output, "--output", shared.output)
        assert (ran.code, "is the plan; name another --output for the artifact" in ran.err) == (2, True)
    source = many.source / "model-00001-of-00003.safetensors"
    for words in (["-o", source, "--output", shared.output], ["-o", shared.plan_path, "--output", source]):
        ran = run_cli("plan", *shared.arguments, *words)
        assert (ran.code, "a source is never overwritten" in ran.err) == (2, True)
    assert shared.names() == []


# -- journals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b'{"begin": 0, "end": 5, "sha256": "%s"}' % (b"0" * 64),
        b'{"begin": 4096, "end": 4096, "sha256": "%s"}' % (b"0" * 64),
        b'{"begin": 4096, "end": 9000, "sha256": "%s"}' % (b"0" * 64),
        b'{"begin": true, "end": 4100, "sha256": "%s"}' % (b"0" * 64),
        b'{"begin": 4096, "end": 4100, "sha256": "%s"}' % (b"0" * 63),
        b'{"begin": 4096, "end": 4100}',
        b"[]",
        b"{",
    ],
)
def test_a_share_journal_ends_at_a_line_that_is_no_claim(line: bytes, tmp_path: Path) -> None:
    share = Share(1, 2, 4096, 8192)
    with ShareJournal(tmp_path / "out.part", share, {"a": 1}) as journal:
        journal.complete()
        size = journal.path.stat().st_size
        with journal.path.open("ab") as file:
            file.write(line + b'\n{"begin": 4096, "end": 4100, "sha256": "' + b"0" * 64 + b'"}\n')
        found = read_share_journal(journal.path, share, {"a": 1})
        assert found is not None
        assert (found.segments, found.is_complete, found.nbytes) == ((), True, size)


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (Share(1, 2, 4096, 8192), {"a": 2}),
        (Share(0, 2, 4096, 8192), {"a": 1}),
        (Share(1, 2, 0, 8192), {"a": 1}),
        (Share(1, 2, 4096, 12288), {"a": 1}),
    ],
)
def test_a_share_journal_of_something_else_says_nothing(share: Share, wanted: dict[str, int], tmp_path: Path) -> None:
    with ShareJournal(tmp_path / "out.part", Share(1, 2, 4096, 8192), {"a": 1}) as journal:
        assert read_share_journal(journal.path, Share(1, 2, 4096, 8192), {"a": 1}) is not None
        assert read_share_journal(journal.path, share, wanted) is None


def test_a_share_journal_with_a_second_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dear").write_bytes(b"dear")
    os.link(tmp_path / "dear", tmp_path / "out.part.journal.1-of-2")
    with pytest.raises(Exception, match="out.part.journal.1-of-2 is not a file of ours; remove it"):
        ShareJournal(tmp_path / "out.part", Share(1, 2, 4096, 8192), {"a": 1})
    assert (tmp_path / "dear").read_bytes() == b"dear"
