"""The threads of a run: errors and interrupts at bad moments leave nobody waiting, and no digest is of a part."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tools import Q4, Case, entry, filled
from pipeline import planned

from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import OutputError
from ninfer_convert.plan.planner import Plan
from ninfer_convert.run import pipeline, shares
from ninfer_convert.run.journal import Kept
from ninfer_convert.run.pipeline import Pipeline
from ninfer_convert.run.share_journal import Segment
from ninfer_convert.run.shares import _Flusher
from ninfer_convert.run.tasks import Tasks
from ninfer_convert.run.writer import PartFile


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Three objects with bytes between them that belong to none."""
    made = Case(tmp_path)
    made.source({name: filled("BF16", (3,), 0x3F80 + place) for place, name in enumerate("abc")})
    made.recipe(*(entry(name, (3,), "BF16", name) for name in "abc"))
    return made


@pytest.fixture
def plan(case: Case) -> Iterator[Plan]:
    with planned(case.recipe_path, case.sources) as made:
        yield made


@pytest.fixture
def part(case: Case, plan: Plan) -> Iterator[PartFile]:
    with PartFile(case.output, plan.file_bytes) as made:
        made.begin()
        made.write(0, plan.head)
        yield made


def begun(plan: Plan, part: PartFile) -> Pipeline:
    """Returns a run whose workers have made every block, and whose digests nobody has taken."""
    run = Pipeline(plan, part, Tasks(plan, 1, 1 << 20), None)
    maker = run.tasks.maker()
    while (task := run._next_task()) is not None:
        run._make(maker, task)
    assert list(run.shared.to_hash) == [0, 1, 2]
    return run


@pytest.mark.parametrize("failing", range(6))
def test_a_failed_reading_leaves_no_object_with_a_claim_on_it(
    plan: Plan, part: PartFile, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Else an interrupt would wait forever for the digest of that object."""
    run, reads, read = begun(plan, part), iter(range(10)), part.read_into

    def fail(offset: int, out: Any) -> None:
        if next(reads) == failing:
            raise OutputError("gone")
        read(offset, out)

    monkeypatch.setattr(part, "read_into", fail)
    run._guard(run._chase)
    assert str(run.shared.error) == "gone"
    assert (run.shared.hashing, sorted(run.shared.digests)) == (0, list(range(failing // 2)))
    run._quiesce([])


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("stopping", range(3))
def test_a_run_that_stops_keeps_the_digests_of_whole_objects_only(
    plan: Plan, part: PartFile, monkeypatch: pytest.MonkeyPatch, stopping: int, place: int
) -> None:
    run, read = begun(plan, part), part.read_into
    begins = [plan.payload_offset + item.offset for item in plan.objects]
    monkeypatch.setattr(pipeline, "HASH_BYTES", 4)

    def stop(offset: int, out: Any) -> None:
        if offset == begins[stopping] + place:
            run.stop.set()
        read(offset, out)

    monkeypatch.setattr(part, "read_into", stop)
    run._chase()
    assert (run.shared.hashing, run.stop.is_set()) == (0, True)
    contents = [np.array([0x3F80 + index] * 3, "<u2").tobytes() for index in range(stopping)]
    assert run.shared.digests == {index: hashlib.sha256(data).hexdigest() for index, data in enumerate(contents)}


@pytest.mark.parametrize("moment", ["__enter__", "__exit__"])
def test_an_interrupt_as_the_lock_is_taken_or_given_back_does_not_keep_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A method of Python's own is interrupted at its beginning or end; a worker in a write would wait forever."""
    run, interrupts = Pipeline(plan, None, Tasks(plan, 1, 1 << 20), None), iter([True])
    real = getattr(threading.Condition, moment)

    def interrupted(lock: threading.Condition, *arguments: Any) -> Any:
        if lock is run.shared.lock and moment == "__exit__" and next(interrupts, False):
            raise KeyboardInterrupt
        result = real(lock, *arguments)
        if lock is run.shared.lock and moment == "__enter__" and next(interrupts, False):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(threading.Condition, moment, interrupted)
    run._quiesce([])
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(run.shared.lock.acquire(blocking=False)))
    other.start()
    other.join()
    assert found == [True]


@pytest.mark.parametrize(("elements", "pending"), [(256, 0), (255, 1), (0, 1)])
def test_a_claim_with_the_loss_of_a_part_is_made_again(tmp_path: Path, elements: int, pending: int) -> None:
    case = Case(tmp_path)
    case.source({"w": filled("BF16", (4, 64), 0x3F80)})
    case.recipe(entry("w", (4, 64), Q4, "w"))
    with planned(case.recipe_path, case.sources) as plan, PartFile(case.output, plan.file_bytes) as part:
        part.begin()
        run = Pipeline(plan, part, Tasks(plan, 1, 1 << 20, stats=True), None)
        digest = run._digest(0, np.empty(4096, np.uint8))
        run.resume(Kept({}, {0: digest}, {0: Loss(elements, 0, 1)}, 0))
        assert run.shared.pending == [pending]


def test_an_interrupt_while_a_thread_begins_is_an_interrupt(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a failure, which would throw away what is done; the waiting fails when it has not taken its lock again."""
    run = Pipeline(plan, None, Tasks(plan, 2, 1 << 20), None)

    def interrupted(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.RLock().release()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.execute(None)
    with pytest.raises(KeyboardInterrupt):
        flusher(Recorder())


# -- shares ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A share's part file and journal that remember what they were told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.recorded = threading.Event()

    def sync(self) -> None:
        self.calls.append("sync")

    def record(self, segments: Any, losses: Any) -> None:
        self.calls.append((list(segments), dict(losses)))
        self.recorded.set()

    def release(self, begin: int, end: int) -> None:
        self.calls.append(("release", begin, end))


def flusher(told: Any) -> _Flusher:
    return _Flusher(told, told, is_releasing=True)


def test_a_loss_is_kept_though_the_last_block_of_its_object_has_no_byte_in_the_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "FLUSH_BYTES", 1)
    told, segment, loss = Recorder(), Segment(4096, 8192, "0" * 64), Loss(640, 3, 5)
    flushing = flusher(told)
    flushing.add([segment], 4096, {})
    assert told.recorded.wait(60)
    flushing.add([], 0, {7: loss})
    flushing.finish()
    assert told.calls == ["sync", ([segment], {}), ("release", 4096, 8192), "sync", ([], {7: loss})]


@pytest.mark.parametrize("moment", ["__enter__", "__exit__", "notify_all"])
def test_what_a_share_has_made_is_recorded_though_an_interrupt_comes_at_its_end(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    told, segment, interrupts = Recorder(), Segment(4096, 8192, "0" * 64), iter([True])
    flushing, real = flusher(told), getattr(threading.Condition, moment)
    flushing.add([segment], 4096, {})

    def interrupted(lock: threading.Condition, *arguments: Any) -> Any:
        is_due = lock is flushing.changed and threading.current_thread() is threading.main_thread()
        if is_due and next(interrupts, False):
            raise KeyboardInterrupt
        return real(lock, *arguments)

    monkeypatch.setattr(threading.Condition, moment, interrupted)
    flushing.finish()
    assert told.calls[:2] == ["sync", ([segment], {})]


def test_workers_step_back_and_nobody_else_does() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def work() -> None:
        pipeline._step_back()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, before + pipeline.NICENESS) if sys.platform == "linux" else before]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
