"""Tasks in threads: every task once, results one at a time, failures to the caller and no thread left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ninfer_convert.workers import for_each


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_task_is_done_once(threads: int, count: int) -> None:
    results: list[tuple[int, int]] = []
    for_each(range(count), lambda: lambda task: task * task, lambda *pair: results.append(pair), threads=threads)
    assert sorted(results) == [(task, task * task) for task in range(count)]


def test_one_thread_works_in_order_and_tasks_are_drawn_when_they_are_needed() -> None:
    log: list[str] = []

    def tasks() -> Iterator[int]:
        for task in range(3):
            log.append(f"drawn {task}")
            yield task

    for_each(tasks(), lambda: lambda task: task, lambda task, _: log.append(f"taken {task}"), threads=1)
    assert log == ["drawn 0", "taken 0", "drawn 1", "taken 1", "drawn 2", "taken 2"]


def test_every_thread_has_a_worker_of_its_own() -> None:
    made: list[int] = []

    def make() -> Callable[[int], int]:
        made.append(threading.get_ident())
        mine = made[-1]

        def work(task: int) -> int:
            assert threading.get_ident() == mine
            time.sleep(0.002)
            return task

        return work

    for_each(range(20), make, lambda *_: None, threads=3)
    assert len(set(made)) == len(made) == 3


def test_results_are_taken_one_at_a_time() -> None:
    inside = 0

    def take(*_: int) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        time.sleep(0.001)
        inside -= 1

    for_each(range(50), lambda: lambda task: task, take, threads=4)


def fail(task: int) -> int:
    if task == 3:
        raise ValueError("the third")
    return task


def fail_to_take(task: int, _: int) -> None:
    fail(task)


def failing_tasks() -> Iterator[int]:
    yield from range(3)
    raise ValueError("the third")


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "run",
    [
        lambda threads: for_each(range(100), lambda: fail, lambda *_: None, threads=threads),
        lambda threads: for_each(range(100), lambda: lambda task: task, fail_to_take, threads=threads),
        lambda threads: for_each(failing_tasks(), lambda: lambda task: task, lambda *_: None, threads=threads),
        lambda threads: for_each(range(9), lambda: fail(3), lambda *_: None, threads=threads),
    ],
)
def test_a_failure_stops_all_and_is_passed_on(threads: int, run: Callable[[int], None]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="the third"):
        run(threads)
    assert set(threading.enumerate()) <= before


def test_nothing_is_begun_after_a_failure() -> None:
    begun: list[int] = []

    def work(task: int) -> int:
        begun.append(task)
        return fail(task)

    with pytest.raises(ValueError):
        for_each(range(100), lambda: work, lambda *_: None, threads=1)
    assert begun == [0, 1, 2, 3]
