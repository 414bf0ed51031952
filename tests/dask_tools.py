"""Dask clusters for tests: workers that are processes of their own, and fates that meet them at a chosen write.

What is armed runs in a worker process, which finds this module on the path it inherits.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from ninfer_convert.run import shares

DEADLINE_SECONDS = 240
"""No wait is longer; one that reaches it fails."""

SLOTS = 2

ODD_WORKER = """
import asyncio, sys
import ninfer_convert
{change}
from distributed import Worker

async def work():
    async with Worker(sys.argv[1], nthreads=1, dashboard=False) as worker:
        await worker.finished()

asyncio.run(work())
"""


@contextmanager
def cluster(workers: int) -> Iterator[Client]:
    """Yields a client of a cluster of this machine; each worker is a process with two slots."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=SLOTS,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            memory_limit=0,
            silence_logs=logging.CRITICAL,
        ) as running,
        Client(running, set_as_default=False) as client,
    ):
        yield client


def address(client: Client) -> str:
    """Returns what `--dask` takes."""
    return str(client.scheduler.address)


def pids(client: Client, workers: int) -> dict[str, int]:
    """Returns the process of every worker, once all of them are there."""
    client.wait_for_workers(workers, timeout=DEADLINE_SECONDS)
    found: dict[str, int] = client.run(os.getpid)
    return found


@contextmanager
def started(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a scheduler that runs by itself and writes its address to a file; a worker of it is there."""
    options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    with (
        _running("scheduler", *options, "--scheduler-file", str(place)) as scheduler,
        _running("worker", "--scheduler-file", str(place), "--nthreads", "1", "--no-dashboard", "--no-nanny"),
    ):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not place.exists() or not place.read_text(encoding="utf-8").endswith("}"):
            assert time.monotonic() < deadline
            assert scheduler.poll() is None
            time.sleep(0.05)
        yield scheduler


@contextmanager
def _running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the command line of Dask, which finds this module."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def odd_worker(scheduler: str, change: str) -> Iterator[subprocess.Popen[bytes]]:
    """Has a worker join in which a statement was executed after the import of the package."""
    words = [sys.executable, "-c", ODD_WORKER.format(change=change), scheduler]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# -- in a worker ----------------------------------------------------------------------------------------------------

_real_pwrite = os.pwrite


def kill_at(call: int, process: int) -> None:
    """Kills another process at the nth write, and does nothing more."""

    def fate(*_: Any) -> None:
        os.kill(process, signal.SIGKILL)
        time.sleep(DEADLINE_SECONDS)

    _arm(call, fate)


def flush_often() -> None:
    """Makes a share keep what it has done after every few blocks."""
    shares.FLUSH_BYTES = 4000


def behave() -> None:
    """Takes back what was armed."""
    os.pwrite = _real_pwrite


def die_at(call: int, journals: Path, once: Path) -> None:
    """Lets this process be killed in the middle of its nth write, when a journal of that directory has claims.

    Of all that are armed only one dies: the first to make the file `once`.
    """

    def fate(fd: int, data: Any, offset: int) -> None:
        if not _is_first(once):
            return
        _real_pwrite(fd, data[: len(data) // 2], offset)
        _await(lambda: any(_has_claims(path) for path in journals.glob("*.journal.*")))
        os.kill(os.getpid(), signal.SIGKILL)

    _arm(call, fate)


def fail_at(call: int) -> None:
    """Lets this process's nth write fail, and no other."""

    def fate(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _arm(call, fate)


def fail_always() -> None:
    """Lets every write fail."""

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = fail


def signal_at(call: int, number: int, process: Path, once: Path) -> None:
    """Sends a signal to the process that a file names at the nth write, and goes on when the run has been stopped."""

    def fate(*_: Any) -> None:
        from ninfer_convert.cluster import share_task

        if not _is_first(once):
            return
        before = set(share_task._stopped)
        _await(process.exists)
        os.kill(int(process.read_text(encoding="utf-8")), number)
        _await(lambda: share_task._stopped != before)

    _arm(call, fate)


def _is_first(once: Path) -> bool:
    try:
        once.open("x").close()
    except FileExistsError:
        return False
    return True


def _has_claims(journal: Path) -> bool:
    """Tells whether this process has written a journal, and a range into it."""
    lines = journal.read_text(encoding="utf-8").splitlines()
    return any(f'"pid":{os.getpid()},' in line for line in lines) and any('{"begin":' in line for line in lines)


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


def _arm(call: int, fate: Any) -> None:
    calls = 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == call:
            fate(fd, data, offset)
        return _real_pwrite(fd, data, offset)

    os.pwrite = pwrite
