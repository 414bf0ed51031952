"""`--dask`: what it names, and what does not go with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import click

from ninfer_convert import allowance
from ninfer_convert.cli import candidates
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError
from ninfer_convert.recipe.counting import counted

if TYPE_CHECKING:
    # at run time it loads when a cluster is wanted
    from ninfer_convert.cluster.workers import Workers

dask_option = click.option(
    "--dask",
    "dask",
    metavar="ADDRESS|local:N",
    shell_complete=candidates.words("local:"),
    help="Convert by the workers of this Dask scheduler (its address, or the file it writes that to), or by N "
    "processes here; --threads and --max-memory are then those of each worker process.",
)


def workers_of(dask: str | None, threads: int | None) -> Callable[[], AbstractContextManager[Workers]] | None:
    """Returns what connects to the workers that --dask names, None without --dask.

    Raises:
        UsageError: Dask is not installed, or `local:N` has no good N.
    """
    if dask is None:
        return None
    from ninfer_convert.cluster.connection import local_workers, require_dask

    require_dask()
    count, allowed = local_workers(dask), allowance.allowed_threads()
    if count and threads and min(count, allowed) * threads > allowed:
        workers = f"{counted(min(count, allowed), 'worker')} with --threads {threads}"
        verb = "is" if min(count, allowed) == 1 else "are"
        say(f"note: {workers} {verb} more than the {counted(allowed, 'processor')} this process may use", err=True)
    return lambda: _connected(dask)


@contextlib.contextmanager
def _connected(dask: str) -> Iterator[Workers]:
    from ninfer_convert.cluster.connection import connected, local_workers
    from ninfer_convert.cluster.workers import Workers

    def tell(text: str) -> None:
        say(text, err=True)

    memory = None
    if count := local_workers(dask):
        memory = max(allowance.MIN_MEMORY_BYTES, allowance.default_memory(count))
    with connected(dask, tell) as (client, interrupts):
        yield Workers(client, interrupts, tell, memory)


def require_dask_options(*, stream: bool, dry_run: bool, shard: bool) -> None:
    """Raises UsageError for options that mean nothing with --dask."""
    if shard:
        raise UsageError("--dask makes the shares and gives them out; it does not go with --plan and --shard")
    if stream:
        raise UsageError(
            "--stream does not go with --dask: every worker would fetch shards of its own; without it each machine "
            "fetches what it lacks once"
        )
    if dry_run:
        raise UsageError("--dry-run stops before any worker is needed; give it without --dask")
