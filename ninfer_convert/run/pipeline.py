"""The pipeline: workers take blocks, make their bytes and write them; digests follow behind.

Every worker reads, encodes and writes its own block, so at most one block per worker is in flight, whatever
the tensors are. A chaser reads the part file back in order and takes the digests of file and objects at once;
when it falls behind, workers take the digest of an object off it. A flusher keeps the disk busy. The bytes
depend on nothing of this. Refuses to know how the part file came to be and what becomes of it (`convert`).

Source: cli.md, `run`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.encode.block_maker import BlockMaker
from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import OutputError
from ninfer_convert.plan.planner import Plan, PlannedTensor
from ninfer_convert.plan.provenance import Outcome
from ninfer_convert.run.journal import Journal, Kept
from ninfer_convert.run.tasks import Task, Tasks, is_loss_of
from ninfer_convert.run.writer import PartFile
from ninfer_convert.source.remote import RemoteCheckpoint
from ninfer_convert.source.streaming import SHARDS_SUFFIX, Supply, shard_directory

HASH_BYTES = 1 << 20
BEHIND_BYTES = 256 << 20
"""Of finished objects without a digest: when there are more, workers take digests before they make more."""
FLUSH_BYTES = 128 << 20
FLUSH_SECONDS = 5.0
POLL_SECONDS = 0.05
QUIESCE_SECONDS = 0.005
NICENESS = 5
"""Of a worker, added to that of the process."""

Progress = Callable[[int, int], None]
"""Called from the main thread now and then with the payload bytes written and their total."""


@dataclass(slots=True)
class _Shared:
    """State of one run; everything mutable is guarded by `lock`."""

    tasks: Iterator[Task]
    pending: list[int]
    """Blocks of each object not written yet."""
    next_task: Task | None = None
    """Drawn, and not begun because its shards are still on their way."""
    lock: threading.Condition = field(init=False)
    mutex: Any = field(default_factory=threading.RLock)
    """Of `lock`. No interrupt can come between its being taken or given back and the `with` statement."""
    to_hash: deque[int] = field(default_factory=deque)
    """Finished objects whose digest nobody takes yet."""
    to_hash_bytes: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    losses: dict[int, Loss] = field(default_factory=dict)
    hashing: int = 0
    writing: int = 0
    """Workers that are in the middle of a write."""
    recorded: set[int] = field(default_factory=set)
    """Objects the journal holds."""
    chased: int = 0
    """File bytes the whole-file digest has taken in."""
    written: int = 0
    """Payload bytes written."""
    running: int = 0
    """Workers that have not returned."""
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.lock = threading.Condition(self.mutex)


class Pipeline:
    """One run of the tasks of a plan; with a part file and a journal, or without either to look at values only."""

    def __init__(self, plan: Plan, part: PartFile | None, tasks: Tasks, journal: Journal | None) -> None:
        if not plan.is_complete:
            raise ValueError("a plan from headers alone cannot be carried out")
        self.plan, self.part, self.tasks, self.threads = plan, part, tasks, tasks.threads
        self.journal = journal
        self.stop = threading.Event()
        counts = [sum(1 for _ in self.tasks.of_object(index)) for index in range(len(plan.objects))]
        self.shared = _Shared(self.tasks.prefetched(self._pending_tasks()), counts)
        self.file_digest = hashlib.sha256()
        self.supply: Supply | None = None

    def outcome(self, started: float) -> Outcome:
        """Returns the digests of a finished run."""
        digests = tuple(self.shared.digests[index] for index in range(len(self.plan.objects)))
        losses = dict(sorted(self.shared.losses.items()))
        return Outcome(digests, self.file_digest.hexdigest(), time.monotonic() - started, losses)

    def resume(self, kept: Kept) -> None:
        """Hashes what an earlier run claims to have written; what proves true is not made again.

        An object whose loss is wanted and was not measured is made again.
        """
        scratch = np.empty(HASH_BYTES, np.uint8)
        for index, digest in kept.claims.items():
            loss = kept.losses.get(index)
            if loss is not None and not is_loss_of(self.plan, index, loss):
                loss = None
            if loss is None and self.tasks.is_measured(index):
                continue
            if self._digest(index, scratch) == digest:
                if loss is not None and self.tasks.is_measured(index):
                    self.shared.losses[index] = loss
                self.shared.digests[index] = digest
                self.shared.pending[index] = 0
                self.shared.recorded.add(index)
                self.shared.written += self.plan.objects[index].nbytes
        self._clear_gaps()

    def _clear_gaps(self) -> None:
        """Zeroes what no block writes: between objects, and between the planes of those to be made again."""
        begin = self.plan.payload_offset
        for index, item in enumerate(self.plan.objects):
            start = self.plan.payload_offset + item.offset
            spans = [(begin, start)]
            if isinstance(item, PlannedTensor) and index not in self.shared.digests:
                ends = [start, *(start + plane.offset + plane.nbytes for plane in item.geometry.planes)]
                starts = [*(start + plane.offset for plane in item.geometry.planes), start + item.nbytes]
                spans += zip(ends, starts, strict=True)
            for gap, end in spans:
                if gap < end and self.part is not None:
                    self.part.write(gap, bytes(end - gap))
            begin = start + item.nbytes

    def record_done(self) -> None:
        """Brings every finished object to the disk, then says so in the journal."""
        part, journal, shared = self.part, self.journal, self.shared
        if part is None or journal is None:
            return
        with shared.mutex:
            new = shared.digests.keys() - shared.recorded
            done = [(index, shared.digests[index], shared.losses.get(index)) for index in sorted(new)]
        part.sync()
        if done:
            journal.record(done)
            shared.recorded.update(new)

    def _pending_tasks(self) -> Iterator[Task]:
        pending, conditions = self.shared.pending, range(len(self.plan.conditions))
        units = [*(index for index, count in enumerate(pending) if count), *(-1 - number for number in conditions)]
        for unit in self.supply.order if self.supply else units:
            yield from self.tasks.of_object(unit) if unit >= 0 else self.tasks.of_condition(-1 - unit)

    def execute(self, progress: Progress | None) -> _Shared:
        jobs = [self._work] * self.threads
        if self.part is not None:
            jobs += [self._chase, self._flush, self._reserve]
        self.shared.running = self.threads
        with contextlib.ExitStack() as stack:
            if any(isinstance(source, RemoteCheckpoint) for source in self.plan.sources.values()):
                jobs.append(self._bring(stack))
            workers = [threading.Thread(target=self._guard, args=(job,), daemon=True) for job in jobs]
            try:
                start_threads(workers)
                self._await(workers, progress)
            except KeyboardInterrupt:
                self._quiesce(workers[self.threads :])
                raise
            except BaseException:
                self._quiesce(workers)
                raise
        if self.shared.error is not None:
            raise self.shared.error
        return self.shared

    def _bring(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        """Returns the job that fetches shards; their directory goes when the stack ends."""
        conditions = range(len(self.plan.conditions))
        counts = {-1 - number: sum(1 for _ in self.tasks.of_condition(number)) for number in conditions}
        supply = self.supply = Supply(self.plan, dict(enumerate(self.shared.pending)) | counts)
        place = self.part.path if self.part else Path(tempfile.gettempdir(), f"ninfer-convert-{os.getpid()}")
        directory = stack.enter_context(shard_directory(place.with_name(place.name + SHARDS_SUFFIX)))
        stack.callback(supply.drop_all)

        def notify() -> None:
            with self.shared.lock:
                self.shared.lock.notify_all()

        return lambda: supply.bring(directory, self._stopped, notify)

    def _quiesce(self, awaited: Sequence[threading.Thread]) -> None:
        """Waits until nobody writes any more and these threads have ended, however often it is interrupted meanwhile.

        A worker that computes, be it that it compiles a kernel for seconds, is left to find out that all is over.
        """
        self.stop.set()
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                with self.shared.mutex:
                    is_busy = self.shared.writing or self.shared.hashing
                if not is_busy and not any(thread.is_alive() for thread in awaited):
                    return
                time.sleep(QUIESCE_SECONDS)

    def _await(self, workers: Sequence[threading.Thread], progress: Progress | None) -> None:
        for worker in workers:
            while worker.is_alive():
                worker.join(POLL_SECONDS)
                if progress:
                    progress(self.shared.written, self.plan.payload_bytes)

    def _guard(self, job: Callable[[], None]) -> None:
        """Runs one job; the first error of any job stops all of them."""
        try:
            job()
        except BaseException as error:
            with self.shared.lock:
                if self.shared.error is None:
                    self.shared.error = error
        finally:
            with self.shared.lock:
                if job == self._work:
                    self.shared.running -= 1
                self.shared.lock.notify_all()

    def _stopped(self) -> bool:
        return self.stop.is_set() or self.shared.error is not None

    # -- workers --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        _step_back()
        maker, scratch = self.tasks.maker(), np.empty(HASH_BYTES, np.uint8)
        while (job := self._next_job()) is not None:
            if isinstance(job, Task):
                self._make(maker, job)
            else:
                self._hash_object(job, scratch)

    def _next_job(self) -> Task | int | None:
        """Returns a block to make, the index of an object to hash, or None when all is done or stopped."""
        shared = self.shared
        with shared.lock:
            while not self._stopped():
                if shared.to_hash_bytes > BEHIND_BYTES:
                    return self._claim(shared.to_hash[-1])
                if task := self._next_task():
                    return task
                if shared.to_hash:
                    # The one that the chaser would come to last.
                    return self._claim(shared.to_hash[-1])
                is_hashed = self.part is None or len(shared.digests) + shared.hashing == len(self.plan.objects)
                if is_hashed and shared.next_task is None:
                    return None
                shared.lock.wait(POLL_SECONDS)
        return None

    def _claim(self, index: int) -> int:
        """Takes an object from those without a digest; the lock is held."""
        shared = self.shared
        shared.to_hash.remove(index)
        shared.to_hash_bytes -= self.plan.objects[index].nbytes
        shared.hashing += 1
        return index

    def _next_task(self) -> Task | None:
        """Returns the next block whose shards are here, if there is one now."""
        shared = self.shared
        task = shared.next_task or next(shared.tasks, None)
        shared.next_task = None
        if task and self.supply and not self.supply.is_there(task.index):
            shared.next_task, task = task, None
        return task

    def _make(self, maker: BlockMaker, task: Task) -> None:
        pieces, loss = self.tasks.make(maker, task)
        if self.supply:
            self.supply.made(task.index)
        if task.condition is not None:
            return
        shared = self.shared
        if self.part is not None:
            with shared.lock:
                if self._stopped():
                    return
                shared.writing += 1
            try:
                begin = self.plan.payload_offset + self.plan.objects[task.index].offset
                for offset, data in pieces:
                    self.part.write(begin + offset, data)
            finally:
                with shared.lock:
                    shared.writing -= 1
        with shared.lock:
            shared.written += sum(data.nbytes for _, data in pieces)
            if loss is not None:
                shared.losses[task.index] = shared.losses.get(task.index, Loss()) + loss
            shared.pending[task.index] -= 1
            if shared.pending[task.index] == 0 and self.part is not None:
                shared.to_hash.append(task.index)
                shared.to_hash_bytes += self.plan.objects[task.index].nbytes
                shared.lock.notify_all()

    # -- behind the workers -----------------------------------------------------------------------------------

    def _read_back(self, begin: int, end: int, scratch: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
        """Yields file bytes `[begin, end)` in pieces; ends early when the run stops."""
        part = self.part
        while part is not None and begin < end and not self._stopped():
            piece = scratch.data[: min(len(scratch), end - begin)]
            part.read_into(begin, piece)
            yield piece
            begin += len(piece)

    def _digest(self, index: int, scratch: npt.NDArray[np.uint8]) -> str:
        item, digest = self.plan.objects[index], hashlib.sha256()
        begin = self.plan.payload_offset + item.offset
        for piece in self._read_back(begin, begin + item.nbytes, scratch):
            digest.update(piece)
        return digest.hexdigest()

    def _hash_object(self, index: int, scratch: npt.NDArray[np.uint8]) -> None:
        digest = None
        try:
            digest = self._digest(index, scratch)
        finally:
            self._hashed(index, digest)

    def _hashed(self, index: int, digest: str | None) -> None:
        """Notes the digest of an object that was claimed."""
        shared = self.shared
        with shared.lock:
            shared.hashing -= 1
            # A digest taken while the run stopped is one of a part of the object.
            if digest is not None and not self._stopped():
                shared.digests[index] = digest
            shared.lock.notify_all()

    def _chase(self) -> None:
        """Hashes the whole file in order, object by object as they become complete, and them if no worker does."""
        scratch, shared = np.empty(HASH_BYTES, np.uint8), self.shared
        for index, item in enumerate(self.plan.objects):
            begin = self.plan.payload_offset + item.offset
            # Nobody else waits for what is in front of an object.
            for piece in self._read_back(shared.chased, begin, scratch):
                self._chased(piece)
            with shared.lock:
                while shared.pending[index] and not self._stopped():
                    shared.lock.wait(POLL_SECONDS)
                is_mine = index in shared.to_hash and not self._stopped()
                if is_mine:
                    self._claim(index)
            digest, taken = hashlib.sha256(), None
            try:
                for piece in self._read_back(begin, begin + item.nbytes, scratch):
                    self._chased(piece)
                    if is_mine:
                        digest.update(piece)
                taken = digest.hexdigest()
            finally:
                if is_mine:
                    self._hashed(index, taken)

    def _chased(self, piece: memoryview) -> None:
        self.file_digest.update(piece)
        self.shared.chased += len(piece)

    def _flush(self) -> None:
        """Keeps the disk writing while the workers encode, so that the last sync has little left to do."""
        part, shared = self.part, self.shared
        synced, last = shared.written, time.monotonic()
        while part is not None and not self._stopped():
            with shared.lock:
                if shared.running == 0:
                    return
                if shared.written - synced < FLUSH_BYTES and time.monotonic() - last < FLUSH_SECONDS:
                    shared.lock.wait(POLL_SECONDS)
                    continue
                synced, chased = shared.written, shared.chased
            self.record_done()
            last = time.monotonic()
            if self.tasks.release_behind:
                part.release(0, chased)

    def _reserve(self) -> None:
        """Reserves the space ahead of the workers."""
        while self.part is not None and not self._stopped() and self.part.reserve_more():
            pass


def start_threads(threads: Sequence[threading.Thread]) -> None:
    """Starts threads.

    Raises:
        OutputError: the system refuses one.
        KeyboardInterrupt: also where waiting for the beginning of a thread was interrupted and failed for that.
    """
    for thread in threads:
        try:
            thread.start()
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            count = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
            raise OutputError(f"{count} cannot be started: {error}; use fewer --threads") from error


def _step_back() -> None:
    """Lets the chaser, whose work cannot be divided, go before this thread where processors are few.

    Only Linux has a priority for each thread; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + NICENESS)
