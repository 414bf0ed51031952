"""What a worker of a cluster does: plans again from its order, and makes one share.

A worker process makes one share at a time, with all threads and all memory that the process may have; the other
slots of the process wait for their turn. Refuses to know who gives out the shares, and what becomes of them.

Source: cli.md, `run --dask`.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from distributed import Reschedule, get_worker

from ninfer_convert import __version__
from ninfer_convert.allowance import MIN_MEMORY_BYTES, default_memory, worker_threads
from ninfer_convert.cluster.order import Failure, Order, ShareEnd, planned_again
from ninfer_convert.errors import ConvertError, OutputError, UsageError, printable
from ninfer_convert.plan.budget import block_bytes
from ninfer_convert.plan.planner import Plan
from ninfer_convert.run.cuts import cut
from ninfer_convert.run.share_journal import ShareHeldError
from ninfer_convert.run.shares import is_prepared, part_path, run_share

TURN_SECONDS = 1.0
"""A task that has not got its turn by then goes back to the scheduler, which may know an idle worker."""

PATIENCE_SECONDS = 120.0
"""A network file system may take so long to show a new file, or to notice that the holder of a lock is dead."""

PATIENCE_POLL_SECONDS = 0.5
TELL_SECONDS = 0.5

_turn = threading.Lock()
_stopped: set[str] = set()


class ShareError(Exception):
    """Input/output failed while a share was made; another worker, or another time, may have more luck."""

    @property
    def messages(self) -> tuple[str, ...]:
        """Complete messages."""
        return tuple(map(str, self.args))


class _StoppedError(Exception):
    pass


def stop_run(run: str) -> None:
    """Makes this process give up the shares of a run: the one in the making at its next block, the others at once."""
    _stopped.add(run)


def make_share(version: str, order: Order, index: int) -> ShareEnd:
    """Is the task: makes a share of an order in the worker process that it has been sent to.

    Args:
        version: of the converter that sends it.
        order: what is converted.
        index: the share's.

    Raises:
        ShareError: input/output failed.
        Reschedule: the process is busy with another share.
    """
    worker = get_worker()
    name = f"{printable(worker.address)} on {printable(platform.node())}"
    if version != __version__:
        return ShareEnd(index, failure=Failure(UsageError.exit_code, (wrong_version(name, __version__, version),)))
    if not _turn.acquire(timeout=TURN_SECONDS):
        raise Reschedule
    try:
        threads = order.threads or worker_threads(worker.state.nthreads)
        memory = order.memory or worker_memory(worker.memory_manager.memory_limit)

        def tell(done: int, total: int) -> None:
            worker.log_event(order.run, {"share": index, "done": done, "total": total})

        return share_end(order, index, name, threads=threads, memory=memory, tell=tell)
    finally:
        _turn.release()


def wrong_version(worker: str, found: str, required: str) -> str:
    """Returns what is told of a worker that has another converter."""
    return f"worker {worker} has ninfer-convert {found}, and {required} is required, as here; install it there"


def worker_memory(limit: int | None) -> int:
    """Returns the memory of a worker process in bytes, given the one that its cluster allows it.

    A cluster pauses a worker that comes near its limit, and then ends it.
    """
    return max(MIN_MEMORY_BYTES, min(default_memory(), limit // 2) if limit else default_memory())


def share_end(
    order: Order, index: int, worker: str, *, threads: int, memory: int, tell: Callable[[int, int], None]
) -> ShareEnd:
    """Makes a share and returns how that ended. Of what only this worker is to blame for, the messages name it.

    Raises:
        ShareError: input/output failed.
    """
    try:
        with ExitStack() as stack:
            try:
                plan = stack.enter_context(planned_again(order))
                size = block_bytes(plan, threads, memory)
                _await_part(plan, order)
            except ConvertError as error:
                messages = tuple(f"worker {worker}: {message}" for message in error.messages)
                return ShareEnd(index, failure=Failure(error.exit_code, messages))
            _run(plan, order, index, threads, size, _progress(order, tell))
    except _StoppedError:
        return ShareEnd(index, is_stopped=True)
    except OutputError as error:
        raise ShareError(*(f"{message} (worker {worker})" for message in error.messages)) from error
    except ConvertError as error:
        return ShareEnd(index, failure=Failure(error.exit_code, tuple(error.messages), is_input=True))
    return ShareEnd(index, threads)


def _await_part(plan: Plan, order: Order) -> None:
    _require_running(order)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_prepared(plan, order.file.output):
        if time.monotonic() > deadline:
            part = printable(os.fspath(part_path(order.file.output)))
            raise OutputError(f"{part} is not there; every worker must see the output's directory under the same path")
        _require_running(order)
        time.sleep(PATIENCE_POLL_SECONDS)


def _run(
    plan: Plan, order: Order, index: int, threads: int, size: int, progress: Callable[[int, int], None]
) -> None:
    share = cut(plan, order.count)[index]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            run_share(
                plan,
                order.file.output,
                share,
                threads=threads,
                block_bytes=size,
                stats=order.stats,
                progress=progress,
            )
            return
        except ShareHeldError:
            if time.monotonic() > deadline:
                raise
            _require_running(order)
            time.sleep(PATIENCE_POLL_SECONDS)


def _progress(order: Order, tell: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Returns what tells now and then how far a share is, and ends it when its run is stopped."""
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        _require_running(order)
        if (now := time.monotonic()) - told >= TELL_SECONDS:
            told = now
            tell(done, total)

    return progress


def _require_running(order: Order) -> None:
    if order.run in _stopped:
        raise _StoppedError
