"""One conversion as `run` and `batch` are asked for it, by this process or by the workers of a cluster."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer_convert import allowance
from ninfer_convert.artifact.container import MAX_REPORT_BYTES
from ninfer_convert.cli.options import progress, size_text
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.provenance import Outcome, report_json
from ninfer_convert.recipe.counting import counted
from ninfer_convert.run.jobs import Job
from ninfer_convert.run.own_files import replace_file
from ninfer_convert.run.writer import require_output
from ninfer_convert.source.acquisition import Access, verify_digests

if TYPE_CHECKING:
    # at run time it loads when a cluster is wanted
    from ninfer_convert.cluster.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a conversion is made, which changes nothing about the artifact.

    `threads` and `memory` (bytes) are None where they were not given; with `connect`, which gives the workers of a
    cluster, they are those of each worker process.
    """

    threads: int | None
    memory: int | None
    resume: bool
    quiet: bool
    stats: bool = True
    connect: Callable[[], AbstractContextManager[Workers]] | None = None

    def access(self, job: Job) -> Access:
        """Returns what this process needs of the sources."""
        return "stream" if job.stream else "values" if self.connect is None else "headers"


def convert_job(job: Job, plan: Plan, how: How) -> Outcome:
    """Converts what has been planned, to paths that may be written.

    Raises:
        ConvertError: like `verify_digests`, `convert` and `convert_by_workers`.
    """
    if job.verify_source:
        if how.connect is not None:
            _require_common_sources(plan)
        verify_digests(plan, how.threads or allowance.allowed_threads())
    if how.connect is None:
        return _convert_here(job, plan, how)
    with how.connect() as workers:
        return _convert_there(job, plan, how, workers)


def written_text(job: Job, plan: Plan, outcome: Outcome) -> str:
    """Returns what is said of a finished conversion."""
    name, size = printable(os.fspath(job.output)), size_text(plan.file_bytes)
    return f"wrote {name}: {counted(len(plan.objects), 'object')}, {size}, {outcome.seconds:.1f} s"


def require_paths(plan: Plan, job: Job) -> None:
    """Raises UsageError if the output or the report must not be written."""
    output, report = job.output, job.report_path
    if len(set(map(os.path.realpath, job.written()))) < len(job.written()):
        names = f"{printable(os.fspath(output))} and --report {printable(os.fspath(report))}"
        raise UsageError(f"--output {names} are written to the same file; name two")
    read = [Path(path) for checkpoint in plan.sources.values() for path in checkpoint.paths()]
    protected = [*read, *plan.inputs.values(), Path(plan.recipe.path)]
    require_output(output, overwrite=job.overwrite, protected=protected)
    # A report whose artifact is gone says nothing about anything; the next one takes its place.
    require_output(report, overwrite=job.overwrite or job.report is None, protected=protected)
    # It is kept in memory until the artifact has its name, to be put back should that fail.
    if report.exists() and report.stat().st_size > MAX_REPORT_BYTES:
        name = printable(os.fspath(report))
        raise UsageError(f"--report {name} has more bytes than any report has; it is not replaced")


def _require_common_sources(plan: Plan) -> None:
    for name, checkpoint in plan.sources.items():
        if checkpoint.origin is not None:
            raise UsageError(
                f"--verify-source with --dask: source {name} is on the hub, and every machine has files of its own; "
                "give a directory that all of them see"
            )


def _report_writer(job: Job, plan: Plan) -> Callable[[Outcome, int], Callable[[], None]]:
    """Returns what writes the report, given the outcome and the threads, and returns what takes it back."""

    def write(outcome: Outcome, threads: int) -> Callable[[], None]:
        document = report_json(plan, outcome, threads=threads, command=sys.argv)
        return replace_file(job.report_path, (json.dumps(document, ensure_ascii=True, indent=1) + "\n").encode())

    return write


def _convert_here(job: Job, plan: Plan, how: How) -> Outcome:
    # The kernels and their compiler load here, when the plan has been accepted.
    from ninfer_convert.encode.compiled import announce
    from ninfer_convert.plan.budget import block_bytes
    from ninfer_convert.run.convert import convert

    if sys.stderr.isatty() and not how.quiet:
        announce(lambda: say("note: compiling kernels, some seconds; they are kept for the next time", err=True))
    threads = how.threads or allowance.allowed_threads()
    write_report = _report_writer(job, plan)
    size = block_bytes(plan, threads, how.memory or max(allowance.MIN_MEMORY_BYTES, allowance.default_memory()))
    with progress("converting", quiet=how.quiet) as show:
        return convert(
            plan,
            job.output,
            threads=threads,
            block_bytes=size,
            stats=how.stats,
            resume=how.resume,
            overwrite=job.overwrite,
            progress=show,
            before_publish=lambda outcome: write_report(outcome, threads),
        )


def _convert_there(job: Job, plan: Plan, how: How, workers: Workers) -> Outcome:
    from ninfer_convert.cluster.convert import convert_by_workers

    return convert_by_workers(
        plan,
        job.recipe,
        job.output,
        workers,
        unpinned=job.unpinned,
        threads=how.threads,
        memory=how.memory,
        checking_threads=allowance.allowed_threads(),
        stats=how.stats,
        resume=how.resume,
        overwrite=job.overwrite,
        show=lambda verb: progress(verb, quiet=how.quiet),
        before_publish=_report_writer(job, plan),
    )
