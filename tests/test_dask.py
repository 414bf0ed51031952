"""Conversions by a Dask cluster: byte for byte those of one process, whichever worker is killed, fails, or is refused.

The workers are processes; whatever happens to one happens at a chosen write of it, not at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask_tools
import pytest
from case_tools import Case, Ran, command, entry, filled, finish, run_cli, spawn, start
from commands import source_arguments
from distributed import Client, Reschedule
from hub_server import Repo, client_environment, serving
from many_objects import ManyObjects, write_many_objects
from miniatures import Miniatures
from pipeline import planned
from test_hub import COMMIT, write_model, write_recipe

from ninfer_convert import __version__, allowance
from ninfer_convert.cli.cluster import workers_of
from ninfer_convert.cluster import connection, convert, share_task, workers
from ninfer_convert.cluster.interrupts import Interrupts
from ninfer_convert.cluster.order import Order, ShareEnd, make_order
from ninfer_convert.cluster.workers import Workers
from ninfer_convert.errors import OutputError, UsageError
from ninfer_convert.plan.planner import Plan
from ninfer_convert.run.cuts import cut
from ninfer_convert.run.share_journal import ShareJournal
from ninfer_convert.run.shares import part_path, prepare, run_share

WORKERS = 2


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
def client() -> Iterator[Client]:
    with dask_tools.cluster(WORKERS) as running:
        yield running


@pytest.fixture
def unarmed(client: Client) -> Iterator[Client]:
    """The cluster, whose workers are all there and behave, before and after."""
    dask_tools.pids(client, WORKERS)
    yield client
    dask_tools.pids(client, WORKERS)
    client.run(dask_tools.behave)


@pytest.fixture(scope="module")
def empty() -> Iterator[Client]:
    """A cluster without workers."""
    with dask_tools.cluster(0) as running:
        yield running


class Given:
    """A conversion to `out` in a directory of its own, by the workers of a client."""

    def __init__(self, directory: Path, client: Client, many: ManyObjects) -> None:
        self.directory, self.client, self.many = directory, client, many
        self.output = directory / "out"
        self.part = directory / "out.part"

    def words(self, *extra: object) -> list[object]:
        words: list[object] = ["run", self.many.recipe, "--source", self.many.source, "-o", self.output]
        return [*words, "--dask", dask_tools.address(self.client), *extra]

    def run(self, *extra: object) -> Ran:
        return run_cli(*self.words(*extra))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    @property
    def once(self) -> Path:
        """A file that the worker makes whom something befalls, and which spares the others."""
        return self.directory.with_name(f"{self.directory.name}.once")


@pytest.fixture
def given(unarmed: Client, many: ManyObjects, tmp_path: Path) -> Given:
    return Given(tmp_path, unarmed, many)


@pytest.fixture
def made(many: ManyObjects) -> Iterator[Plan]:
    with planned(many.recipe, {"base": many.source}) as plan:
        yield plan


def report(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.with_name(path.name + ".conversion.json").read_bytes())
    return document


def require_same(given: Given, ended: Ran, plain: Path) -> None:
    """Requires that a run has left what a plain one leaves, and nothing else."""
    assert ended.code == 0, ended.err
    assert given.output.read_bytes() == plain.read_bytes()
    assert given.names() == ["out", "out.conversion.json"]
    assert {**report(given.output), "run": None} == {**report(plain), "run": None}
    assert ended.out == f"{report(plain)['artifact']['sha256']}  {given.output}\n"
    assert ended.err.splitlines()[-1].startswith(f"wrote {given.output}: {given.many.objects} objects, ")


@pytest.fixture
def journals(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """The lines of the journals of all shares, by name, as they were before the artifact was put together."""
    found: dict[str, list[dict[str, Any]]] = {}
    real = convert.finalize

    def finalize(plan: Plan, output: Path, *arguments: Any, **options: Any) -> Any:
        for path in output.parent.glob("*.journal.*"):
            found[path.name] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return real(plan, output, *arguments, **options)

    monkeypatch.setattr(convert, "finalize", finalize)
    return found


def writers(lines: list[dict[str, Any]]) -> list[int]:
    """Returns the processes that have written a share, in order."""
    return [line["writer"]["pid"] for line in lines if "writer" in line]


# -- the same bytes -------------------------------------------------------------------------------------------------


def test_workers_make_the_artifact_of_one_process(given: Given, plain: Path) -> None:
    ended = given.run()
    require_same(given, ended, plain)
    assert len(ended.err.splitlines()) == 1
    assert report(given.output)["run"]["threads"] == min(dask_tools.SLOTS, allowance.allowed_threads())


@pytest.mark.parametrize("recipe", ["qwen3.8-27b/nvfp4"])
def test_workers_make_a_miniature_with_several_sources_inputs_and_waived_pins(
    recipe: str, unarmed: Client, miniatures: Miniatures, tmp_path: Path
) -> None:
    made = miniatures.models[recipe.partition("/")[0]]
    words = [miniatures.recipes / f"{recipe}.yaml", *source_arguments(made, "base", "quantized"), "--unpinned"]
    assert run_cli("run", *words, "-o", tmp_path / "plain").code == 0
    ended = run_cli("run", *words, "-o", tmp_path / "out", "--dask", dask_tools.address(unarmed))
    assert ended.code == 0, ended.err
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
    assert {**report(tmp_path / "out"), "run": None} == {**report(tmp_path / "plain"), "run": None}


def test_prefixes_reach_the_workers(unarmed: Client, tmp_path: Path) -> None:
    case = Case(tmp_path / "case")
    case.root.mkdir()
    case.source({"model.a": filled("BF16", [64, 64], 0x3F80)})
    case.recipe(entry("a", [64, 64], "Q4G64_F16S", "deep.a"))
    ended = case.run("--prefix", "model.=deep.", "--dask", dask_tools.address(unarmed))
    assert ended.code == 0, ended.err
    assert case.report()["sources"]["base"]["prefixes"] == {"model.": "deep."}


def test_a_cluster_of_our_own_makes_the_artifact_from_the_hub(tmp_path: Path) -> None:
    """The client plans from headers; the workers fetch, once for both, into the cache that they share."""
    model, recipe = write_model(tmp_path / "model"), write_recipe(tmp_path / "recipe.yaml")
    assert run_cli("run", recipe, "--source", model, "-o", tmp_path / "plain").code == 0
    with serving(n=Repo(model)) as hub:
        words = ["run", recipe, "--source", "hf://o/n", "-o", tmp_path / "out", "--dask", "local:2"]
        ended = spawn(*words, environment=client_environment(hub, tmp_path / "home"))
    assert ended.code == 0, ended.err
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
    told, plainly = report(tmp_path / "out"), report(tmp_path / "plain")
    assert told["sources"]["base"]["revision"] == COMMIT
    assert [told[name] for name in ("artifact", "objects", "totals", "warnings")] == [
        plainly[name] for name in ("artifact", "objects", "totals", "warnings")
    ]
    assert not any("no value of it was read" in note for note in told["notes"])


def test_an_output_is_replaced_only_when_told(given: Given, plain: Path) -> None:
    given.output.write_bytes(b"old")
    refused = given.run()
    assert (refused.code, given.output.read_bytes()) == (2, b"old")
    assert refused.errors == [f"error: {given.output} exists; --overwrite replaces it when the new one is complete"]
    require_same(given, given.run("--overwrite"), plain)


# -- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_killed_in_the_middle_of_a_write_changes_no_byte(
    seed: int, given: Given, plain: Path, journals: dict[str, list[dict[str, Any]]]
) -> None:
    given.client.run(dask_tools.flush_often)
    before = dask_tools.pids(given.client, WORKERS)
    given.client.run(dask_tools.die_at, random.Random(seed).randrange(20, 80), given.directory, given.once)
    ended = given.run()
    require_same(given, ended, plain)
    after = set(dask_tools.pids(given.client, WORKERS).values())
    (victim,) = [worker for worker, pid in before.items() if pid not in after]
    assert ended.err.splitlines()[0] == f"note: worker {victim} is gone; others go on with what it was making"
    # The one that went on took over what the killed one had brought to the disk.
    (lines,) = [lines for lines in journals.values() if len(writers(lines)) > 1]
    assert writers(lines)[0] == before[victim]
    second = [index for index, line in enumerate(lines) if "writer" in line][1]
    assert any("begin" in line for line in lines[:second])


def test_a_share_whose_workers_die_again_and_again_is_given_up_and_kept(
    given: Given, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given.client.cluster.scheduler, "allowed_failures", 0)
    given.client.run(dask_tools.flush_often)
    given.client.run(dask_tools.die_at, 40, given.directory, given.once)
    ended = given.run()
    assert ended.code == 74
    (died, kept) = ended.errors
    assert ": its worker died 1 times, the last one was tcp://127.0.0.1:" in died
    assert "; what ended it, such as a limit of memory or time, is in the log of the cluster" in died
    assert kept == "error: what is done is kept: the same command goes on"
    assert "out.part" in given.names()
    assert "out" not in given.names()
    require_same(given, given.run(), plain)


# -- failing ---------------------------------------------------------------------------------------------------------


def test_a_share_whose_input_output_fails_is_made_again(given: Given, plain: Path) -> None:
    given.client.run(dask_tools.fail_at, 30)
    require_same(given, given.run(), plain)


def test_input_output_that_fails_always_ends_the_run_and_keeps_what_is_done(given: Given, plain: Path) -> None:
    given.client.run(dask_tools.fail_always)
    ended = given.run()
    assert ended.code == 74
    failed, kept = ended.errors
    assert failed.startswith(f"error: cannot write {given.part}: No space left on device (worker tcp://127.0.0.1:")
    assert kept == "error: what is done is kept: the same command goes on"
    given.client.run(dask_tools.behave)
    require_same(given, given.run(), plain)


def test_a_value_that_is_not_legal_is_told_as_by_a_plain_run_and_leaves_nothing(
    unarmed: Client, tmp_path: Path
) -> None:
    case = Case(tmp_path / "case")
    case.root.mkdir()
    case.source({"a": filled("BF16", [64, 64], 0x3F80, at70=0x7FC0), "b": filled("BF16", [64, 64], 0x3F80)})
    case.recipe(*(entry(name, [64, 64], "Q4G64_F16S", name) for name in "ab"))
    (plain,) = case.refused_by_values("a")
    (found,) = case._refusal("run", 1, ["--dask", dask_tools.address(unarmed)])
    assert found == plain


def test_a_worker_that_does_not_see_the_source_is_named_and_all_is_kept(
    given: Given, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = convert.make_order

    def elsewhere(*arguments: Any, **options: Any) -> Order:
        order = real(*arguments, **options)
        order.file.sources["base"] = "/nowhere"  # type: ignore[index]
        return order

    with monkeypatch.context() as patch:
        patch.setattr(convert, "make_order", elsewhere)
        ended = given.run()
    assert ended.code == 1
    assert ended.errors[0].startswith("error: worker tcp://127.0.0.1:")
    assert "/nowhere" in ended.errors[0]
    assert "out.part" in given.names()
    require_same(given, given.run(), plain)


# -- interrupted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_workers_and_the_same_command_goes_on(
    number: int, given: Given, plain: Path, journals: dict[str, list[dict[str, Any]]]
) -> None:
    given.client.run(dask_tools.flush_often)
    process = given.once.with_suffix(".pid")
    given.client.run(dask_tools.signal_at, 60, number, process, given.once)
    client = start(command(*given.words()))
    process.with_suffix(".new").write_text(str(client.pid), encoding="utf-8")
    process.with_suffix(".new").rename(process)
    ended = finish(client)
    assert (ended.code, ended.err, ended.out) == (75, "interrupted; give the same command again\n", "")
    assert {"out.part", "out.part.journal"} < set(given.names())
    before = given.part.stat().st_ino
    require_same(given, given.run(), plain)
    assert given.output.stat().st_ino == before
    assert max(len(writers(lines)) for lines in journals.values()) == 2


def test_an_interrupt_that_was_lost_ends_the_run_before_anything_is_published(
    given: Given, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what a handler raises while a finalizer runs."""
    real = convert.finalize

    def finalize(*arguments: Any, **options: Any) -> Any:
        class Finalized:
            def __del__(self) -> None:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda told: None)
            Finalized()
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "finalize", finalize)
        ended = given.run()
    assert ended.code == 75
    assert "out" not in given.names()
    require_same(given, given.run(), plain)


def test_interrupts_are_remembered_and_the_handlers_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interrupts() as interrupts:
        interrupts.require_none()
        with interrupts.put_off():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.require_none()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


# -- going on -------------------------------------------------------------------------------------------------------


def test_another_number_of_workers_goes_on_with_the_shares_that_are_there(
    given: Given, made: Plan, plain: Path, journals: dict[str, list[dict[str, Any]]]
) -> None:
    assert prepare(made, given.output)
    run_share(made, given.output, cut(made, 3)[1], threads=1)
    require_same(given, given.run(), plain)
    assert sorted(journals) == [f"out.part.journal.{index}-of-3" for index in range(3)]
    assert writers(journals["out.part.journal.1-of-3"])[0] == os.getpid()


def test_resume_never_begins_anew(
    given: Given, made: Plan, plain: Path, journals: dict[str, list[dict[str, Any]]]
) -> None:
    assert prepare(made, given.output)
    run_share(made, given.output, cut(made, 3)[1], threads=1)
    require_same(given, given.run("--resume", "never"), plain)
    assert sorted(journals) == ["out.part.journal.0-of-2", "out.part.journal.1-of-2"]


def test_what_another_conversion_has_left_is_told_and_replaced_only_when_told(
    given: Given, plain: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_many_objects(tmp_path_factory.mktemp("other"), 2)
    with planned(other.recipe, {"base": other.source}) as plan:
        assert prepare(plan, given.output)
    ended = given.run()
    assert ended.code == 1
    assert "was prepared for another plan, which differs in recipe" in ended.errors[0]
    assert ended.errors[1] == "error: --resume never starts over"
    require_same(given, given.run("--resume", "never"), plain)


def test_one_command_at_a_time_gives_out_the_shares(given: Given, made: Plan, plain: Path) -> None:
    assert prepare(made, given.output)
    with convert._alone(given.output):
        for extra, told in (
            ((), f"{given.output} is being made by another `--dask` command"),
            (("--resume", "never"), f"{given.output} is being written by another process, which holds {given.part}"),
        ):
            ended = given.run(*extra)
            assert (ended.code, ended.errors[0]) == (74, f"error: {told}")
    require_same(given, given.run(), plain)


# -- how many, and how far ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "count", "shares"),
    [(0, 2, 2), (64 << 20, 2, 2), (400 << 20, 2, 6), (4 << 30, 2, 16), (4 << 30, 10, 40), (1 << 40, 4000, 9999)],
)
def test_shares_are_a_few_for_each_worker_and_not_too_small(
    payload: int, count: int, shares: int, made: Plan
) -> None:
    class Sized:
        payload_bytes = payload

    assert convert.share_count(Sized(), count) == shares  # type: ignore[arg-type]


def test_the_progress_never_goes_back_and_ends_at_the_total(given: Given, made: Plan, plain: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def show(verb: str) -> Iterator[Callable[[int, int], None]]:
        steps = told.setdefault(verb, [])
        yield lambda done, total: steps.append((done, total))

    with Interrupts() as interrupts:
        outcome = convert.convert_by_workers(
            made,
            str(given.many.recipe),
            given.output,
            Workers(given.client, interrupts, print),
            unpinned=True,
            threads=1,
            memory=512 << 20,
            checking_threads=1,
            stats=True,
            resume=True,
            overwrite=False,
            show=show,
            before_publish=lambda outcome, threads: None,
        )
    assert outcome.file_sha256 == report(plain)["artifact"]["sha256"]
    steps = told["converting"]
    total = sum(convert.share_bytes(made, cut(made, 3)))
    assert steps == sorted(steps)
    assert steps[-1] == (total, total)
    assert told["checking"][-1] == (made.file_bytes, made.file_bytes)


def test_threads_and_memory_are_those_of_a_worker_process(given: Given, plain: Path) -> None:
    require_same(given, given.run("--threads", "3", "--max-memory", "512MiB"), plain)
    assert report(given.output)["run"]["threads"] == 3


def test_what_encoding_costs_is_measured_unless_told_otherwise(given: Given, plain: Path) -> None:
    assert any("stats" in item for item in report(plain)["objects"])
    assert given.run("--no-stats").code == 0
    assert not any("stats" in item for item in report(given.output)["objects"])


def test_memory_that_is_too_small_is_told_before_anything_is_written(given: Given) -> None:
    ended = given.run("--threads", "256", "--max-memory", "256MiB")
    assert ended.code == 2
    assert "--max-memory 268435456 is too small for 256 threads" in ended.errors[0]
    assert given.names() == []


@pytest.mark.parametrize(
    ("limit", "memory"), [(None, 1024), (0, 1024), (4096 << 20, 1024), (1200 << 20, 600), (300 << 20, 256)]
)
def test_a_worker_takes_half_of_what_its_cluster_allows_it(
    limit: int | None, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_task, "default_memory", lambda: 1 << 30)
    assert share_task.worker_memory(limit) == memory << 20


def test_a_cluster_of_our_own_takes_what_is_allowed_and_no_others_can_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allowance, "_cgroup_memory", lambda: 2000 << 20)
    connect = workers_of("local:2", None)
    assert connect is not None
    with connect() as running:
        client = running.client
        assert running.memory == 800 << 20
        found = client.nthreads()
        allowed = allowance.allowed_threads()
        assert len(found) == min(2, allowed)
        assert sum(found.values()) <= allowed
        assert all(worker.startswith("tcp://127.0.0.1:") for worker in [*found, client.scheduler.address])
        blocked = client.run(signal.pthread_sigmask, signal.SIG_BLOCK, [])
        assert all({signal.SIGINT, signal.SIGHUP} <= set(mask) for mask in blocked.values())


def test_more_workers_than_processors_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "allowed_threads", lambda: 4)
    told: list[str] = []
    assert [connection._allowed(count, told.append) for count in (3, 4, 9)] == [3, 4, 4]
    assert told == ["note: --dask local:9: 4 workers are started, one for each processor that may be used"]


# -- one share ------------------------------------------------------------------------------------------------------


@pytest.fixture
def order(made: Plan, many: ManyObjects, tmp_path: Path) -> Order:
    assert prepare(made, tmp_path / "out")
    return make_order(
        made,
        str(many.recipe),
        tmp_path / "out",
        unpinned=False,
        count=2,
        threads=None,
        memory=None,
        stats=True,
        run="a run",
    )


def ended_share(order: Order) -> ShareEnd:
    return share_task.share_end(order, 0, "W", threads=1, memory=1 << 30, tell=lambda done, total: None)


def test_a_process_makes_one_share_at_a_time_and_gives_back_what_it_cannot_begin(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        address = "tcp://w"
        state = SimpleNamespace(nthreads=1)
        memory_manager = SimpleNamespace(memory_limit=None)

        def log_event(self, topic: str, told: object) -> None:
            assert topic == "a run"

    monkeypatch.setattr(share_task, "get_worker", Worker)
    monkeypatch.setattr(share_task, "TURN_SECONDS", 0.01)
    with share_task._turn:
        with pytest.raises(Reschedule):
            share_task.make_share(__version__, order, 1)
    assert share_task.make_share(__version__, order, 1) == ShareEnd(1, 1)
    failure = share_task.make_share("9.9", order, 1).failure
    assert failure is not None
    told = f"worker tcp://w on {platform.node()} has ninfer-convert {__version__}, and 9.9 is required"
    assert failure.messages[0].startswith(told)


def test_a_share_waits_for_a_holder_that_is_dying(
    order: Order, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_path(order.file.output)
    holder = ShareJournal(part, cut(made, 2)[0], dict(order.file.identity))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            holder.__exit__()

    monkeypatch.setattr(share_task.time, "sleep", wait)
    assert ended_share(order) == ShareEnd(0, 1)
    assert len(waits) == 3


def test_a_share_that_stays_held_is_an_input_output_failure(
    order: Order, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_task, "PATIENCE_SECONDS", -1.0)
    with ShareJournal(part_path(order.file.output), cut(made, 2)[0], dict(order.file.identity)):
        told = f"share 0/2 is being written by process {os.getpid()}.*worker W"
        with pytest.raises(share_task.ShareError, match=told):
            ended_share(order)


def test_a_worker_that_does_not_see_the_output_says_so(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_path(order.file.output)
    part.unlink()
    monkeypatch.setattr(share_task, "PATIENCE_SECONDS", -1.0)
    failure = ended_share(order).failure
    assert failure is not None
    told = f"worker W: {part} is not there; every worker must see the output's directory under the same path"
    assert (failure.exit_code, failure.messages, failure.is_input) == (74, (told,), False)


def test_a_recipe_that_has_changed_since_is_told(order: Order, many: ManyObjects, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(many.recipe.read_text(encoding="utf-8") + "# more\n", encoding="utf-8")
    file = order.file
    object.__setattr__(file, "recipe", str(other))
    failure = ended_share(order).failure
    assert failure is not None
    assert failure.messages == (f"worker W: {other}: the recipe has changed since the conversion was planned",)


def test_a_stopped_run_makes_no_share(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_task, "_stopped", set())
    share_task.stop_run("another run")
    assert ended_share(order) == ShareEnd(0, 1)
    share_task.stop_run("a run")
    assert ended_share(order) == ShareEnd(0, is_stopped=True)


# -- refused --------------------------------------------------------------------------------------------------------


def test_a_worker_of_another_version_is_refused_before_anything_is_written(
    empty: Client, many: ManyObjects, tmp_path: Path
) -> None:
    given = Given(tmp_path, empty, many)
    with dask_tools.odd_worker(dask_tools.address(empty), "ninfer_convert.__version__ = '9.9'"):
        empty.wait_for_workers(1, timeout=dask_tools.DEADLINE_SECONDS)
        (worker,) = empty.nthreads()
        ended = given.run()
    told = f"error: worker {worker} has ninfer-convert 9.9, and {__version__} is required, as here; install it there"
    assert (ended.code, ended.errors) == (2, [told])
    assert given.names() == []


def test_a_worker_of_another_version_that_joins_later_refuses_itself(
    empty: Client, many: ManyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workers, "require_version", lambda self: None)
    given = Given(tmp_path, empty, many)
    with dask_tools.odd_worker(dask_tools.address(empty), "ninfer_convert.__version__ = '9.9'"):
        empty.wait_for_workers(1, timeout=dask_tools.DEADLINE_SECONDS)
        (worker,) = empty.nthreads()
        ended = given.run()
    assert ended.code == 2
    assert ended.errors[0].startswith(f"error: worker {worker} on ")
    assert f" has ninfer-convert 9.9, and {__version__} is required, as here; install it there" in ended.errors[0]


def test_a_worker_without_the_package_is_refused(empty: Client, many: ManyObjects, tmp_path: Path) -> None:
    given = Given(tmp_path, empty, many)
    with dask_tools.odd_worker(dask_tools.address(empty), "sys.modules['ninfer_convert'] = None"):
        empty.wait_for_workers(1, timeout=dask_tools.DEADLINE_SECONDS)
        (worker,) = empty.nthreads()
        ended = given.run()
    assert ended.code == 2
    assert ended.errors[0].startswith(f"error: worker {worker} has no ninfer-convert (")
    assert ended.errors[0].endswith(f"); install {__version__} there")
    assert given.names() == []


def test_a_cluster_without_workers_is_waited_for_and_told(
    empty: Client, many: ManyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WAIT_SECONDS", 0.3)
    # The workers of other tests are gone when the scheduler has noticed.
    deadline = time.monotonic() + dask_tools.DEADLINE_SECONDS
    while empty.nthreads():
        assert time.monotonic() < deadline
    ended = Given(tmp_path, empty, many).run()
    assert ended.code == 74
    assert ended.err.splitlines()[0] == "the cluster has no workers yet; waiting for one"
    assert ended.errors == ["error: the cluster has had no workers for 0 seconds; start some"]


def test_a_cluster_that_has_lost_its_last_worker_is_waited_for_and_told(
    empty: Client, many: ManyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(workers, "LOOK_SECONDS", 0.1)
    given = Given(tmp_path, empty, many)
    with dask_tools.odd_worker(dask_tools.address(empty), "pass"):
        empty.wait_for_workers(1, timeout=dask_tools.DEADLINE_SECONDS)
        empty.run(dask_tools.flush_often)
        empty.run(dask_tools.die_at, 40, tmp_path, given.once)
        ended = given.run()
    assert ended.code == 74
    assert "the cluster has no workers any more; waiting for one" in ended.err.splitlines()
    assert ended.errors == [
        "error: the cluster has had no workers for 0 seconds; start some",
        "error: what is done is kept: the same command goes on",
    ]
    assert "out.part" in given.names()


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        ("local:0", 2, "--dask local:0: write local:N with N from 1 to 256"),
        ("local:257", 2, "--dask local:257: write local:N with N from 1 to 256"),
        ("local:two", 2, "--dask local:two: write local:N with N from 1 to 256"),
        ("nonsense://x", 2, "--dask nonsense://x: this is no address of a scheduler, such as tcp://host:8786, no file"),
        ("tcp://127.0.0.1:1", 74, "--dask tcp://127.0.0.1:1: no scheduler answers: "),
    ],
)
def test_what_is_no_cluster_is_refused(
    place: str, code: int, told: str, many: ManyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 1)
    ended = run_cli(*many.arguments(tmp_path / "out"), "--dask", place)
    assert ended.code == code
    assert ended.errors[0].startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"address": 7}', "[]"])
def test_a_file_that_no_scheduler_has_written_is_refused(text: str, many: ManyObjects, tmp_path: Path) -> None:
    place = tmp_path / "scheduler.json"
    place.write_text(text, encoding="utf-8")
    ended = run_cli(*many.arguments(tmp_path / "out"), "--dask", place)
    assert ended.code == 2
    assert ended.errors[0].startswith(f"error: --dask {place}: this is no address of a scheduler")


def test_without_dask_the_message_says_how_to_install_it(
    many: ManyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = run_cli(*many.arguments(tmp_path / "out"), "--dask", "local:2")
    told = "--dask needs the package distributed, which is not installed: pip install 'ninfer-convert[cluster]'"
    assert (ended.code, ended.errors) == (2, [f"error: {told}"])


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (("--stream",), "--stream does not go with --dask: every worker would fetch shards of its own"),
        (("--dry-run",), "--dry-run stops before any worker is needed; give it without --dask"),
        (("--plan", "p.json", "--shard", "0/2"), "--dask makes the shares and gives them out; it does not go with"),
        (("--shard", "0/2"), "--dask makes the shares and gives them out; it does not go with --plan and --shard"),
    ],
)
def test_options_that_mean_nothing_with_a_cluster_are_refused(
    extra: tuple[str, ...], told: str, many: ManyObjects, tmp_path: Path
) -> None:
    ended = run_cli(*many.arguments(tmp_path / "out"), "--dask", "local:2", *extra)
    assert ended.code == 2
    assert ended.errors[0].startswith(f"error: {told}")


def test_the_source_is_verified_where_all_read_the_same_files(given: Given, tmp_path: Path) -> None:
    ended = given.run("--verify-source")
    assert ended.code == 1
    assert "no SHA-256 of the hub is known, so nothing can be verified" in ended.errors[0]
    model, recipe = write_model(tmp_path / "model"), write_recipe(tmp_path / "recipe.yaml")
    with serving(n=Repo(model)) as hub:
        words = ["run", recipe, "--source", "hf://o/n", "-o", tmp_path / "o", "--dask", "local:2", "--verify-source"]
        refused = spawn(*words, environment=client_environment(hub, tmp_path / "home"))
    assert refused.code == 2
    assert "--verify-source with --dask: source base is on the hub, and every machine has files of" in refused.err


def test_a_scheduler_that_is_gone_is_told() -> None:
    with dask_tools.cluster(0) as client:
        running = Workers(client, Interrupts(), print)
        client.close()
        with pytest.raises(OutputError, match="the scheduler of the cluster does not answer any more"):
            running.slots()


def test_a_scheduler_killed_in_the_middle_ends_the_run_and_all_is_kept(
    many: ManyObjects, plain: Path, tmp_path: Path
) -> None:
    place, output = tmp_path / "scheduler.json", tmp_path / "out"
    words = ["run", many.recipe, "--source", many.source, "-o", output]
    with dask_tools.started(place) as scheduler:
        with Client(scheduler_file=str(place), set_as_default=False) as arming:
            arming.wait_for_workers(1, timeout=dask_tools.DEADLINE_SECONDS)
            arming.run(dask_tools.kill_at, 40, scheduler.pid)
        ended = run_cli(*words, "--dask", place)
    assert ended.code == 74
    assert ended.errors == [
        "error: the scheduler of the cluster is gone, or has dropped a share; its log may say why",
        "error: what is done is kept: the same command goes on",
    ]
    place.unlink()
    with dask_tools.started(place):
        again = run_cli(*words, "--dask", place)
    assert again.code == 0, again.err
    assert output.read_bytes() == plain.read_bytes()


def test_a_missing_package_is_asked_for_again_when_a_task_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Workers) -> None:
        raise UsageError("worker W has no ninfer-convert")

    monkeypatch.setattr(Workers, "require_version", refuse)
    giving = workers._Giving.__new__(workers._Giving)
    giving.workers = Workers(None, Interrupts(), print)
    with pytest.raises(UsageError, match="worker W has no ninfer-convert"):
        giving._fail(ModuleNotFoundError("No module named 'ninfer_convert'"))
