"""The pipeline of a conversion by a cluster: prepare the part file, have its shares made, check and publish.

The same steps as by hand with a plan file, in one process. Source: cli.md, `run --dask`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ninfer_convert.cluster.order import make_order
from ninfer_convert.cluster.workers import WorkerError, Workers
from ninfer_convert.errors import ConvertError, OutputError, PlanError, SourceError, printable
from ninfer_convert.plan.budget import block_bytes
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.provenance import Outcome
from ninfer_convert.run.cluster_env import MAX_SHARES
from ninfer_convert.run.convert import BeforePublish
from ninfer_convert.run.cuts import Share, cut, stored_ranges
from ninfer_convert.run.finalize import finalize, remove_journals
from ninfer_convert.run.journal import journal_path
from ninfer_convert.run.own_files import OPEN_FLAGS, is_at
from ninfer_convert.run.pipeline import Progress
from ninfer_convert.run.share_file import ShareFile
from ninfer_convert.run.share_journal import share_journals
from ninfer_convert.run.shares import part_path, prepare
from ninfer_convert.run.writer import NO_LOCKS, PartFile

SHARES_PER_WORKER = 4
"""So that the last ones end at about the same time, and a death costs little."""

MIN_SHARES = 16
"""For workers that join later, as those of a batch system do."""

SHARE_BYTES = 64 << 20
"""Smaller shares are not worth the planning, unless workers would have none."""

KEPT = "what is done is kept: the same command goes on"

Show = Callable[[str], AbstractContextManager[Progress | None]]
"""Makes the progress of one step, given its name."""


def convert_by_workers(
    plan: Plan,
    recipe_name: str,
    output: Path,
    workers: Workers,
    *,
    unpinned: bool,
    threads: int | None,
    memory: int | None,
    checking_threads: int,
    stats: bool,
    resume: bool,
    overwrite: bool,
    show: Show,
    before_publish: Callable[[Outcome, int], Callable[[], None] | None],
) -> Outcome:
    """Writes the artifact of a plan by the workers of a cluster, and returns what came out.

    Args:
        plan: an accepted plan; headers are enough.
        recipe_name: as the user gave it; every worker finds it under this name.
        output: the artifact's path; already checked by `writer.require_output`.
        workers: they see the sources and the output's directory under the same paths.
        unpinned: as of `make_plan`.
        threads: of one worker process; None: as many as its slots.
        memory: of one worker process, in bytes; None: that of `workers`.
        checking_threads: how many hash at a time in this process, at the end.
        stats: measure what encoding costs each object.
        resume: go on from what an interrupted run of the same conversion left; else start over.
        overwrite: replace an existing output.
        show: the progress.
        before_publish: as of `convert.convert`, given also the threads of the workers.

    Raises:
        UsageError: a worker has another version, or too little memory.
        WorkerError: a share cannot be made. If the input is to blame nothing is left behind, else all is kept.
        PlanError: what is there belongs to another conversion.
        OutputError: workers or scheduler are gone, or a call failed; all is kept.
        KeyboardInterrupt: passed on when all shares have stopped; all is kept.
    """
    started = time.monotonic()
    slots = workers.await_any()
    workers.require_version()
    memory = workers.memory if memory is None else memory
    if memory is not None:
        block_bytes(plan, threads or max(slots.values()), memory)
    if not overwrite and os.path.lexists(output):
        raise OutputError(f"{printable(str(output))} exists; --overwrite replaces it when the new one is complete")
    try:
        prepare(plan, output, overwrite=overwrite, resume=resume)
    except PlanError as error:
        raise PlanError(*error.messages, "--resume never starts over") from error
    with _kept(), _alone(output) as held:
        shares = cut(plan, kept_count(output) or share_count(plan, len(slots)))
        order = make_order(
            plan,
            recipe_name,
            output,
            unpinned=unpinned,
            count=len(shares),
            threads=threads,
            memory=memory,
            stats=stats,
            run=f"ninfer-{uuid.uuid4().hex}",
        )
        try:
            with show("converting") as progress:
                used = workers.make_shares(order, share_bytes(plan, shares), progress)
        except WorkerError as error:
            held.close()
            if error.is_input:
                _discard(plan, output)
            raise
        held.close()

        def whole(outcome: Outcome) -> Outcome:
            return replace(outcome, seconds=time.monotonic() - started)

        def write_report(outcome: Outcome) -> Callable[[], None] | None:
            workers.interrupts.require_none()
            return before_publish(whole(outcome), used)

        return whole(_published(plan, output, checking_threads, overwrite, show, write_report))


def share_count(plan: Plan, workers: int) -> int:
    """Returns into how many shares a conversion is cut for so many workers."""
    wanted = min(max(workers * SHARES_PER_WORKER, MIN_SHARES), plan.payload_bytes // SHARE_BYTES)
    return min(MAX_SHARES, max(workers, wanted))


def kept_count(output: Path) -> int | None:
    """Returns the number of shares of an earlier run that has left the most, or None if none has left anything.

    Their cuts lie elsewhere for another number, and what is done could not be used.
    """
    found: dict[int, int] = {}
    for path, (_, count) in share_journals(part_path(output)).items():
        with contextlib.suppress(OSError):
            if 0 < count <= MAX_SHARES:
                found[count] = found.get(count, 0) + path.stat().st_size
    return max(found, key=lambda count: (found[count], count), default=None)


def share_bytes(plan: Plan, shares: tuple[Share, ...]) -> list[int]:
    """Returns the bytes of data of every share."""
    sizes = [0] * len(shares)
    for begin, end, _ in stored_ranges(plan):
        for share in shares:
            sizes[share.index] += max(0, min(end, share.end) - max(begin, share.begin))
    return sizes


def _published(
    plan: Plan, output: Path, threads: int, overwrite: bool, show: Show, before_publish: BeforePublish
) -> Outcome:
    try:
        with show("checking") as progress:
            outcome, _ = finalize(
                plan,
                output,
                None,
                threads=threads,
                overwrite=overwrite,
                progress=progress,
                before_publish=before_publish,
            )
    except PlanError as error:
        # Every share was made: the disk or a machine has lost what was written, and it is made again.
        raise OutputError(*error.messages) from error
    except SourceError:
        _discard(plan, output)
        raise
    return outcome


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Says of failures after which the same command goes on that it does."""
    try:
        yield
    except ConvertError as error:
        if error.exit_code == OutputError.exit_code and KEPT not in error.messages:
            raise OutputError(*error.messages, KEPT) from error
        raise


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[contextlib.ExitStack]:
    """Keeps others from giving out shares of the same part file, and, until what it yields is closed, from taking it.

    Raises:
        OutputError: another process does the one or the other.
    """
    part, journal = part_path(output), journal_path(part_path(output))
    with contextlib.ExitStack() as held:
        held.enter_context(ShareFile(part))
        try:
            fd = os.open(journal, os.O_RDONLY | OPEN_FLAGS)
        except OSError as error:
            raise OutputError(f"cannot open {printable(str(journal))}: {error.strerror}") from error
        try:
            _lock(fd, output)
            if not is_at(fd, journal):
                raise OutputError(f"{printable(str(journal))} was replaced by another process")
            yield held
        finally:
            os.close(fd)


def _lock(fd: int, output: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(f"{printable(str(output))} is being made by another `--dask` command") from error
    except OSError as error:
        # Where there are no locks, shares that are made twice are the same.
        if error.errno not in NO_LOCKS:
            raise OutputError(f"cannot lock the journal of {printable(str(output))}: {error.strerror}") from error


def _discard(plan: Plan, output: Path) -> None:
    """Removes a part file that can never be completed, unless somebody still writes it."""
    with contextlib.suppress(OutputError), PartFile(output, plan.file_bytes):
        remove_journals(output)
