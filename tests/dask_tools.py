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
from collections.abc import Iterator
from contextlib import contextmanager
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
            dashboard_address=None,
            worker_dashboard_address=None,
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
def odd_worker(scheduler: str, change: str) -> Iterator[subprocess.Popen[bytes]]:
    """Has a worker join in which a statement was executed after the import of the package."""
    words = [sys.executable, "-c", ODD_WORKER.format(change=change), scheduler]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# -- in a worker ----------------------------------------------------------------------------------------------------

_real_pwrite = os.pwrite


def flush_often() -> None:
    """Makes a share keep what it has done after every few blocks."""
    shares.FLUSH_BYTES = 4000


def behave() -> None:
    """Takes back what was armed."""
    os.pwrite = _real_pwrite


def die_at(call: int) -> None:
    """Lets this process be killed in the middle of its nth write."""

    def fate(fd: int, data: Any, offset: int) -> None:
        _real_pwrite(fd, data[: len(data) // 2], offset)
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


def signal_at(call: int, number: int, process: int) -> None:
    """Sends a signal to a process at the nth write, and goes on when the run has been stopped."""

    def fate(*_: Any) -> None:
        from ninfer_convert.cluster import share_task

        before = set(share_task._stopped)
        os.kill(process, number)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while share_task._stopped == before and time.monotonic() < deadline:
            time.sleep(0.01)

    _arm(call, fate)


def _arm(call: int, fate: Any) -> None:
    calls = 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == call:
            fate(fd, data, offset)
        return _real_pwrite(fd, data, offset)

    os.pwrite = pwrite
