"""Many small tasks in several threads: whoever is free takes the next one, and the first failure stops all.

Owns the threads and the one lock. Refuses to know what is done.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def for_each(
    tasks: Iterable[Task],
    make_worker: Callable[[], Callable[[Task], Result]],
    take: Callable[[Task, Result], object],
    *,
    threads: int,
) -> None:
    """Works on every task, and returns when all are done.

    Args:
        tasks: drawn one at a time, in order, when a thread is free.
        make_worker: called once in every thread; what it returns may own buffers.
        take: is given every task with its result, by one thread at a time, in the order in which they finish.
        threads: at least 1.

    Raises:
        Whatever a task or `take` raised; no thread is left running.
    """
    pending, lock, stop = iter(tasks), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            worker = make_worker()
            while not stop.is_set():
                with lock:
                    drawn = list(itertools.islice(pending, 1))
                if not drawn:
                    return
                result = worker(drawn[0])
                with lock:
                    take(drawn[0], result)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        finally:
            # also when this thread was interrupted, and however often: the others finish their task and no more
            stop.set()
            for future in futures:
                while not future.done():
                    with contextlib.suppress(KeyboardInterrupt):
                        wait([future])
