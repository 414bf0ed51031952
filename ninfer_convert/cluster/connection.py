"""From what `--dask` names to a Dask client: a scheduler that runs somewhere, or a cluster of our own on this machine.

Source: cli.md, `run --dask`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from ninfer_convert.allowance import MAX_THREADS, allowed_threads, worker_slots
from ninfer_convert.cluster.interrupts import Interrupts, for_this_process_alone
from ninfer_convert.errors import OutputError, UsageError, printable
from ninfer_convert.recipe.counting import counted

CONNECT_SECONDS = 30
LOCAL = "local:"
MAX_FILE_BYTES = 1 << 20
"""Of what a scheduler writes about itself."""

WORKER_DEATHS = 10
"""In a cluster of our own: so many may die under one share before it is given up; Dask's own 3 is soon reached when
something else ends processes."""

Tell = Callable[[str], object]


def require_dask() -> None:
    """Raises UsageError if Dask is not installed."""
    if importlib.util.find_spec("distributed") is None:
        raise UsageError("--dask needs the package distributed, which is not installed: pip install "
                         "'ninfer-convert[cluster]'")


def local_workers(place: str) -> int | None:
    """Returns the N of `local:N`; None for the address of a scheduler.

    Raises:
        UsageError: N is no number from 1 to 256.
    """
    if not place.startswith(LOCAL):
        return None
    text = place.removeprefix(LOCAL)
    if not re.fullmatch("[1-9][0-9]{0,2}", text) or int(text) > MAX_THREADS:
        raise UsageError(f"--dask {printable(place)}: write local:N with N from 1 to {MAX_THREADS}")
    return int(text)


@contextlib.contextmanager
def connected(place: str, tell: Tell) -> Iterator[tuple[Any, Interrupts]]:
    """Yields a `distributed.Client`, and the interrupts while it is connected.

    Args:
        place: `local:N`, the address of a scheduler such as `tcp://host:8786`, or the file that it has written its
            address to.
        tell: is given a line when fewer workers are started than were asked for.

    Raises:
        UsageError: Dask is not installed, or the place is none.
        OutputError: no scheduler answers.
    """
    require_dask()
    workers = local_workers(place)
    opened = _client_of(place) if workers is None else _own_cluster(_allowed(workers, tell))
    with _quiet(), Interrupts() as interrupts, contextlib.ExitStack() as stack:
        with interrupts.put_off():
            client = stack.enter_context(opened)
        try:
            interrupts.require_none()
            yield client, interrupts
        finally:
            # What is done is done: an interrupt comes too late.
            with interrupts.put_off():
                stack.close()


def _allowed(workers: int, tell: Tell) -> int:
    allowed = allowed_threads()
    if workers > allowed:
        started = f"{counted(allowed, 'worker')} {'is' if allowed == 1 else 'are'} started"
        tell(f"note: --dask local:{workers}: {started}, one for each processor that may be used")
    return min(workers, allowed)


@contextlib.contextmanager
def _client_of(place: str) -> Iterator[Any]:
    from distributed import Client

    try:
        address = _address(place)
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name="ninfer-convert")
    except OSError as error:
        raise OutputError(f"--dask {printable(place)}: no scheduler answers: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--dask {printable(place)}: this is no address of a scheduler, such as tcp://host:8786, no file that a "
            "scheduler has written, and not local:N"
        ) from error
    with client:
        yield client


def _address(place: str) -> str:
    """Returns the address of a scheduler: the place itself, or what the scheduler has written to a file there."""
    if not os.path.isfile(place):
        return place
    with open(place, "rb") as file:
        address = json.loads(file.read(MAX_FILE_BYTES))["address"]
    if not isinstance(address, str):
        raise TypeError("no text")
    return address


@contextlib.contextmanager
def _own_cluster(workers: int) -> Iterator[Any]:
    """Yields the client of a cluster of processes on this machine, which only this machine can reach."""
    import dask
    from distributed import Client, LocalCluster

    with (
        tempfile.TemporaryDirectory(prefix="ninfer-convert-", ignore_cleanup_errors=True) as directory,
        dask.config.set({"distributed.scheduler.allowed-failures": WORKER_DEATHS}),
        contextlib.ExitStack() as stack,
    ):
        with for_this_process_alone():
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=worker_slots(workers),
                processes=True,
                host="127.0.0.1",
                # No dashboard; what Dask serves all the same is only for this machine, at any port that is free.
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                # The processes keep to their --max-memory by themselves.
                memory_limit=0,
                local_directory=directory,
                silence_logs=logging.CRITICAL + 1,
            )
        stack.enter_context(cluster)
        yield stack.enter_context(Client(cluster, set_as_default=False, name="ninfer-convert"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Dask's log from standard error: what matters of it is told in our words."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
