"""The workers of a cluster as a conversion sees them: their versions, and shares given out to them.

Owns what is left to Dask (who makes a share, and who makes it again when a worker has died) and what is not: when
to give up, and to stop what still runs then. Refuses to know what a share is made of.

Source: cli.md, `run --dask`.
"""

from __future__ import annotations

import contextlib
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ninfer_convert import __version__
from ninfer_convert.cluster.connection import Tell
from ninfer_convert.cluster.interrupts import Interrupts
from ninfer_convert.cluster.order import Order, ShareEnd
from ninfer_convert.errors import ConvertError, OutputError, UsageError, printable

RETRIES = 2
"""How often a share is made again whose input/output has failed; the death of a worker is not counted."""

POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0
WAIT_SECONDS = 300.0
"""How long a cluster may be without any worker."""

STOP_SECONDS = 60.0
"""How long running shares may take to notice that they are stopped."""


class WorkerError(ConvertError):
    """What a worker has met. `is_input`: no worker can make the share."""

    def __init__(self, exit_code: int, *messages: str, is_input: bool = False) -> None:
        super().__init__(*messages)
        self.exit_code = exit_code
        self.is_input = is_input


class Workers:
    """The workers of one client.

    `memory` is what each process may have if nothing else is said, in bytes; None where a worker knows it best.
    """

    def __init__(self, client: Any, interrupts: Interrupts, tell: Tell, memory: int | None = None) -> None:
        self.client, self.interrupts, self.tell, self.memory = client, interrupts, tell, memory

    def slots(self) -> Mapping[str, int]:
        """Returns the slots of every worker there is now, by address.

        Raises:
            OutputError: the scheduler does not answer any more.
        """
        with self.answering():
            found: Mapping[str, int] = self.client.nthreads()
        return found

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Raises OutputError if the scheduler is gone while it is asked something."""
        try:
            yield
        except (OSError, TimeoutError, RuntimeError, AttributeError) as error:
            # A client that has given up fails in many ways.
            if isinstance(error, (RuntimeError, AttributeError)) and self.is_connected():
                raise
            raise OutputError(f"the scheduler of the cluster does not answer any more: {error}") from error

    def is_connected(self) -> bool:
        """Tells whether there is a scheduler, as far as the client has noticed."""
        return bool(self.client.status == "running")

    def await_any(self) -> Mapping[str, int]:
        """Returns the slots of the workers as soon as there is one.

        Raises:
            OutputError: none has come for a long time, or the scheduler is gone.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        if not (found := self.slots()):
            self.tell("the cluster has no workers yet; waiting for one")
        while not found:
            if time.monotonic() > deadline:
                raise _no_workers()
            time.sleep(POLL_SECONDS)
            self.interrupts.require_none()
            found = self.slots()
        return found

    def require_version(self) -> None:
        """Raises UsageError, naming them, if there are workers without this version of the converter."""
        # Sent by reference, and of the standard library: any worker can answer it.
        question = pkgutil.resolve_name, "ninfer_convert:__version__"
        with self.answering():
            found: Mapping[str, object] = self.client.run(*question, on_error="return")
        problems = []
        for worker, version in sorted(found.items()):
            name = printable(worker)
            if isinstance(version, ImportError):
                problems.append(f"worker {name} has no ninfer-convert ({version}); install {__version__} there")
            elif isinstance(version, BaseException):
                problems.append(f"worker {name} does not say which ninfer-convert it has: {version!r}")
            elif version != __version__:
                problems.append(_wrong_version(name, str(version)))
        if problems:
            raise UsageError(*problems)

    def make_shares(self, order: Order, sizes: Sequence[int], progress: Callable[[int, int], None] | None) -> int:
        """Has all shares of an order made; returns the most threads that one of them was made with.

        Args:
            order: what is converted; its part file is prepared.
            sizes: bytes of every share, for the progress.
            progress: reports bytes.

        Raises:
            WorkerError: a share cannot be made; no share is being made any more, unless a worker does not answer.
            OutputError: workers or scheduler are gone.
            KeyboardInterrupt: passed on when all has stopped.
        """
        return _Giving(self, order, sizes).all(progress)


class _Giving:
    """Shares that are being made."""

    def __init__(self, workers: Workers, order: Order, sizes: Sequence[int]) -> None:
        self.workers, self.order, self.sizes = workers, order, sizes
        self.client = workers.client
        self.done = [0] * len(sizes)
        self.threads = 0
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.ended: SimpleQueue[Any] = SimpleQueue()
        self.futures: dict[str, Any] = {}

    def all(self, progress: Callable[[int, int], None] | None) -> int:
        topics = {self.order.run: self._hear_progress, "all": self._hear_loss}
        for topic, hear in topics.items():
            self.client.subscribe_topic(topic, hear)
        try:
            with self.workers.interrupts.put_off():
                self._submit()
                self._collect(progress)
            self.workers.interrupts.require_none()
        except BaseException:
            self._stop()
            raise
        finally:
            for topic in topics:
                with contextlib.suppress(Exception):
                    self.client.unsubscribe_topic(topic)
        return self.threads

    def _submit(self) -> None:
        from ninfer_convert.cluster.share_task import make_share

        for index in range(len(self.sizes)):
            key = f"ninfer-share-{self.order.run}-{index}"
            task = make_share, __version__, self.order, index
            future = self.client.submit(*task, key=key, pure=False, retries=RETRIES)
            self.futures[key] = future
            future.add_done_callback(self.ended.put)

    def _collect(self, progress: Callable[[int, int], None] | None) -> None:
        looked = seen = time.monotonic()
        is_told = False
        while self.futures:
            self.workers.interrupts.require_none()
            with contextlib.suppress(Empty):
                self._take(self.ended.get(timeout=POLL_SECONDS))
            with contextlib.suppress(Empty):
                worker = printable(self.lost.get_nowait())
                self.workers.tell(f"note: worker {worker} is gone; others go on with what it was making")
            if progress:
                progress(sum(self.done), sum(self.sizes))
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS:
                looked = now
                if self.workers.slots():
                    seen, is_told = now, False
                elif not is_told:
                    is_told = True
                    self.workers.tell("the cluster has no workers any more; waiting for one")
                if now - seen > WAIT_SECONDS:
                    raise _no_workers()

    def _take(self, future: Any) -> None:
        """Takes in what has become of a share."""
        if future.status not in ("finished", "error"):
            raise OutputError("the scheduler of the cluster is gone, or has dropped a share; its log may say why")
        if future.status == "error":
            self._fail(future.exception())
        end: ShareEnd = future.result()
        if end.failure is not None:
            failure = end.failure
            raise WorkerError(failure.exit_code, *failure.messages, is_input=failure.is_input)
        if end.is_stopped:
            raise OutputError(f"share {end.index}/{self.order.count} was stopped by another process")
        self.done[end.index] = self.sizes[end.index]
        self.threads = max(self.threads, end.threads)
        # What is known need not be kept by a worker, nor made again when that dies.
        del self.futures[future.key]

    def _fail(self, error: BaseException) -> None:
        from distributed import KilledWorker

        from ninfer_convert.cluster.share_task import ShareError

        if isinstance(error, ShareError):
            raise WorkerError(OutputError.exit_code, *error.messages)
        if isinstance(error, KilledWorker):
            index = str(error.task).rpartition("-")[2]
            raise OutputError(
                f"share {index}/{self.order.count}: its worker died {error.allowed_failures + 1} times, the last one "
                f"was {printable(error.last_worker.address)}; what ended it, such as a limit of memory or time, is in "
                "the log of the cluster"
            )
        if isinstance(error, ImportError):
            # A worker that has joined meanwhile; asked again, it is named.
            self.workers.require_version()
        raise error

    def _stop(self) -> None:
        """Ends what still runs, so that nobody writes any more; gives up on workers that do not answer."""
        from ninfer_convert.cluster.share_task import stop_run

        if not self.workers.is_connected():
            return
        futures = list(self.futures.values())
        with contextlib.suppress(OutputError), self.workers.answering():
            self.client.run(stop_run, self.order.run, on_error="ignore")
            deadline = time.monotonic() + STOP_SECONDS
            # Those that nobody has begun end at once, if there is a worker to begin them.
            while not all(future.done() for future in futures) and self.workers.slots() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            self.client.cancel(futures)

    # -- in the thread of the client ------------------------------------------------------------------------------

    def _hear_progress(self, event: tuple[float, Mapping[str, Any]]) -> None:
        told = event[1]
        self.done[told["share"]] = max(self.done[told["share"]], told["done"])

    def _hear_loss(self, event: tuple[float, Mapping[str, Any]]) -> None:
        told = event[1]
        mine = any(key in self.futures for key in told.get("processing-tasks", ()))
        if told.get("action") == "remove-worker" and mine:
            self.lost.put(str(told.get("worker")))


def _wrong_version(worker: str, found: str) -> str:
    from ninfer_convert.cluster.share_task import wrong_version

    return wrong_version(worker, found, __version__)


def _no_workers() -> OutputError:
    return OutputError(f"the cluster has had no workers for {WAIT_SECONDS:.0f} seconds; start some")
