"""One artifact by many processes: a part file is prepared, each process makes a share of it, in any order.

Owns what the processes may do to the part file. A share writes the bytes of its own range and no others, never
reads what it writes while it works, and never makes, resizes or removes the file. Refuses to know how the
shares are cut (`cuts`) and how they become an artifact (`finalize`).

Source: cli.md, `prepare` and `run --shard`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import ConvertError, PlanError, printable
from ninfer_convert.plan.block import BLOCK_BYTES
from ninfer_convert.plan.block import stored_ranges as block_ranges
from ninfer_convert.plan.planner import Plan, PlannedResource
from ninfer_convert.plan.provenance import plan_identity
from ninfer_convert.run.cuts import Share, stored_ranges
from ninfer_convert.run.intervals import Intervals
from ninfer_convert.run.journal import Journal, differences, journal_path, read_journal, remove_journal
from ninfer_convert.run.own_files import PART_SUFFIX
from ninfer_convert.run.pipeline import FLUSH_BYTES, FLUSH_SECONDS, HASH_BYTES, Progress, start_threads
from ninfer_convert.run.share_file import ShareFile
from ninfer_convert.run.share_journal import Segment, ShareJournal, share_journals
from ninfer_convert.run.tasks import Task, Tasks
from ninfer_convert.run.writer import PartFile
from ninfer_convert.workers import for_each


@dataclass(frozen=True, slots=True)
class ShareOutcome:
    """What a run of a share did: bytes of its range that it made, and that were there already."""

    made_bytes: int
    kept_bytes: int
    seconds: float


def part_path(output: Path) -> Path:
    """Returns where the part file of an output lies."""
    return output.with_name(output.name + PART_SUFFIX)


def prepare(plan: Plan, output: Path, *, overwrite: bool = False, resume: bool = True) -> bool:
    """Makes the part file of an output, with its size and head; tells whether it was not there already.

    Args:
        plan: an accepted plan.
        output: the artifact's path.
        overwrite: the output may exist.
        resume: leave a part file of this plan as it is; else begin anew, whatever is there.

    Raises:
        PlanError: what is there belongs to another conversion, or to a run that was interrupted.
        OutputError: the output exists, another process writes it, or a call failed.
    """
    identity, path = plan_identity(plan), journal_path(part_path(output))
    if resume and is_prepared(plan, output):
        return False
    with PartFile(output, plan.file_bytes) as part:
        part.require_free_name(overwrite=overwrite)
        found = None if part.is_empty() or not resume else read_journal(path, len(plan.objects))
        if found is not None and (not found.shares or found.identity != identity):
            part.keep()
            changed = ", ".join(differences(found.identity, identity))
            what = "was prepared for another plan" if found.shares else "was left by an interrupted run"
            raise PlanError(
                f"{printable(str(part.path))} {what}{f', which differs in {changed}' if changed else ''}; complete "
                f"that one, or remove {printable(str(part.path))}* to give it up"
            )
        if found is not None and part.is_full_size():
            part.keep()
            return False
        for stale in (path, *share_journals(part.path)):
            remove_journal(stale)
        part.begin()
        part.write(0, plan.head)
        part.sync()
        # The journal says that all of this has been done.
        with Journal(path, identity, shares=True):
            part.keep()
    return True


def is_prepared(plan: Plan, output: Path) -> bool:
    """Tells whether the part file of this plan is there; without the lock, which shares may be holding."""
    found = read_journal(journal_path(part_path(output)), 0)
    with contextlib.suppress(OSError):
        is_whole = part_path(output).stat(follow_symlinks=False).st_size == plan.file_bytes
        return is_whole and found is not None and found.shares and found.identity == plan_identity(plan)
    return False


def require_prepared(plan: Plan, output: Path, plan_name: str) -> None:
    """Raises PlanError unless the part file of this plan is prepared."""
    path, identity = part_path(output), plan_identity(plan)
    if is_prepared(plan, output):
        return
    found = read_journal(journal_path(path), 0)
    reason = ""
    if found is not None and found.shares and path.exists() and (changed := differences(found.identity, identity)):
        reason = f": it was prepared for another plan, which differs in {', '.join(changed)}"
    raise PlanError(
        f"{printable(str(path))} is not prepared{reason}; give `prepare --plan {printable(plan_name)}` once, before "
        "any share is run"
    )


def run_share(
    plan: Plan,
    output: Path,
    share: Share,
    *,
    threads: int,
    block_bytes: int = BLOCK_BYTES,
    stats: bool = True,
    resume: bool = True,
    progress: Progress | None = None,
) -> ShareOutcome:
    """Makes one share of a prepared part file, which is never removed, whatever happens.

    Args:
        plan: an accepted plan; its sources are open and its part file is prepared.
        share: one of `cuts.cut`.
        threads: worker threads, at least 1.
        block_bytes: about how many source bytes one block holds.
        stats: measure what encoding costs each object that begins in the share.
        resume: go on from what an earlier run of the share left, which is hashed first.
        progress: reports bytes of the share.

    Raises:
        EncodeError, SourceError: a value or word is not legal, a source changed.
        OutputError: another process writes the share or finalizes the file, or writing failed.
        KeyboardInterrupt: passed on after every worker has stopped and what they did is in the journal.
    """
    started = time.monotonic()
    path = part_path(output)
    with ShareFile(path) as part, ShareJournal(path, share, plan_identity(plan), resume=resume) as journal:
        tasks = Tasks(plan, threads, block_bytes, stats=stats)
        work = _ShareRun(plan, part, journal, share, tasks, progress)
        kept = work.prove()
        made = work.execute()
        return ShareOutcome(made, kept, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a task has written, and what encoding has cost."""

    segments: list[Segment]
    loss: Loss | None


class _ShareRun:
    def __init__(
        self,
        plan: Plan,
        part: ShareFile,
        journal: ShareJournal,
        share: Share,
        tasks: Tasks,
        progress: Progress | None,
    ) -> None:
        self.plan, self.part, self.journal, self.share, self.tasks = plan, part, journal, share, tasks
        self.progress = progress
        self.proven = Intervals()
        self.unmeasured: dict[int, int] = {}
        """Blocks still to be made of the objects that are being measured."""
        self.losses: dict[int, Loss] = {}
        self.done = 0
        self.total = sum(end - begin for begin, end in self._own((b, e) for b, e, _ in stored_ranges(plan)))

    def _own(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yields what of file ranges lies in the share."""
        for begin, end in ranges:
            low, high = max(begin, self.share.begin), min(end, self.share.end)
            if low < high:
                yield low, high

    def _advance(self, nbytes: int) -> None:
        # What is made again to be measured counts once.
        self.done = min(self.total, self.done + nbytes)
        if self.progress:
            self.progress(self.done, self.total)

    # -- what an earlier run has left ---------------------------------------------------------------------------

    def prove(self) -> int:
        """Hashes what the journal claims; what proves true is not made again. Returns how many bytes that are."""

        def make_worker() -> Callable[[Segment], bool]:
            scratch = np.empty(HASH_BYTES, np.uint8)

            def is_true(segment: Segment) -> bool:
                digest = hashlib.sha256()
                for begin in range(segment.begin, segment.end, HASH_BYTES):
                    piece = scratch.data[: min(HASH_BYTES, segment.end - begin)]
                    self.part.read_into(begin, piece)
                    digest.update(piece)
                return digest.hexdigest() == segment.sha256

            return is_true

        def take(segment: Segment, is_true: bool) -> None:
            if is_true:
                self.proven.add(segment.begin, segment.end)

        claims = list(dict.fromkeys(self.journal.claims.segments))
        for_each(claims, make_worker, take, threads=self.tasks.threads)
        if claims:
            self.part.release(self.share.begin, self.share.end)
        self._advance(self.proven.nbytes)
        return self.proven.nbytes

    # -- work ---------------------------------------------------------------------------------------------------

    def execute(self) -> int:
        """Makes what is not proven; returns how many bytes that were."""
        made = 0

        def take(task: Task, found: _Made) -> None:
            nonlocal made
            nbytes = sum(segment.end - segment.begin for segment in found.segments)
            made += nbytes
            flusher.add(found.segments, nbytes, self._complete_loss(task, found.loss))
            self._advance(nbytes)

        flusher = _Flusher(self.part, self.journal, is_releasing=self.tasks.release_behind)
        try:
            for_each(self.tasks.prefetched(self._tasks()), self._worker, take, threads=self.tasks.threads)
        except BaseException:
            with contextlib.suppress(ConvertError):
                flusher.finish()
            raise
        for checkpoint in self.plan.sources.values():
            checkpoint.verify_unchanged()
        flusher.finish()
        if made or not self.journal.claims.is_complete:
            self.journal.complete()
        return made

    def _tasks(self) -> Iterator[Task]:
        for index, item in enumerate(self.plan.objects):
            start = self.plan.payload_offset + item.offset
            if not any(self._own([(start, start + item.nbytes)])):
                continue
            if self._is_measured(index) and index not in self.journal.claims.losses:
                # Of blocks that an earlier run has made nobody knows what they cost.
                self.unmeasured[index] = sum(1 for _ in self.tasks.of_object(index))
                yield from self.tasks.of_object(index)
            else:
                yield from filter(self._is_pending, self.tasks.of_object(index))
        if not self.journal.claims.is_complete:
            for condition in self.share.conditions:
                yield from self.tasks.of_condition(condition)

    def _is_measured(self, index: int) -> bool:
        """Tells whether this share measures an object: the one that its first byte lies in makes all of its rows."""
        begin = self.plan.payload_offset + self.plan.objects[index].offset
        return self.tasks.is_measured(index) and self.share.begin <= begin < self.share.end

    def _complete_loss(self, task: Task, loss: Loss | None) -> dict[int, Loss]:
        """Adds the loss of a block; returns that of its object when this was the last one."""
        index = task.index
        if loss is None or index not in self.unmeasured:
            return {}
        self.losses[index] = self.losses.get(index, Loss()) + loss
        self.unmeasured[index] -= 1
        return {} if self.unmeasured[index] else {index: self.losses.pop(index)}

    def _is_pending(self, task: Task) -> bool:
        item = self.plan.objects[task.index]
        start = self.plan.payload_offset + item.offset
        ranges = [(0, item.nbytes)] if isinstance(item, PlannedResource) else block_ranges(item, task.block)
        return not all(
            self.proven.covers(begin, end)
            for begin, end in self._own((start + begin, start + end) for begin, end in ranges)
        )

    def _worker(self) -> Callable[[Task], _Made]:
        maker = self.tasks.maker()

        def make(task: Task) -> _Made:
            segments = []
            start = self.plan.payload_offset + self.plan.objects[task.index].offset
            pieces, loss = self.tasks.make(maker, task)
            for offset, data in pieces:
                first = start + offset
                for begin, end in self._own([(first, first + data.nbytes)]):
                    own = data[begin - first : end - first]
                    self.part.write(begin, own)
                    # Of what is in memory: the file is not read while its neighbours are being written.
                    segments.append(Segment(begin, end, hashlib.sha256(own.data).hexdigest()))
            return _Made(segments, loss)

        return make


class _Flusher:
    """Brings segments to the disk, then into the journal, while the workers work."""

    def __init__(self, part: ShareFile, journal: ShareJournal, *, is_releasing: bool) -> None:
        self.part, self.journal, self.is_releasing = part, journal, is_releasing
        self.mutex = threading.RLock()
        self.changed = threading.Condition(self.mutex)
        self.segments: list[Segment] = []
        self.losses: dict[int, Loss] = {}
        self.nbytes = 0
        self.is_ending = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        start_threads([self.thread])

    def add(self, segments: Sequence[Segment], nbytes: int, losses: Mapping[int, Loss]) -> None:
        """Takes what was written, and losses of objects that it completes.

        Raises what the flushing has raised meanwhile.
        """
        with self.changed:
            if self.error is not None:
                raise self.error
            self.segments += segments
            self.losses.update(losses)
            self.nbytes += nbytes
            if self.nbytes >= FLUSH_BYTES:
                self.changed.notify_all()

    def finish(self) -> None:
        """Returns when everything is on the disk and in the journal."""
        while self.thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                self.is_ending = True
                # Not `changed` itself: an interrupt of its Python code would keep it taken.
                with self.mutex:
                    self.changed.notify_all()
                self.thread.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            is_ending = False
            while not is_ending:
                with self.changed:
                    if not self.is_ending and self.nbytes < FLUSH_BYTES:
                        self.changed.wait(FLUSH_SECONDS)
                    is_ending = self.is_ending
                    batch, self.segments, self.nbytes = self.segments, [], 0
                    losses, self.losses = self.losses, {}
                # The last block of an object may have no byte in this share.
                if batch or losses:
                    self._flush(batch, losses)
        except BaseException as error:
            self.error = error

    def _flush(self, batch: Sequence[Segment], losses: Mapping[int, Loss]) -> None:
        self.part.sync()
        self.journal.record(batch, losses)
        if batch and self.is_releasing:
            self.part.release(min(each.begin for each in batch), max(each.end for each in batch))
