"""`batch`: many conversions, one after another, each reported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ninfer_convert import allowance
from ninfer_convert.cli import candidates
from ninfer_convert.cli.cluster import dask_option, workers_of
from ninfer_convert.cli.options import chosen_memory, chosen_threads, planned, print_json, progress, threads_option
from ninfer_convert.cli.output import failure_of, say, say_errors
from ninfer_convert.errors import INTERRUPTED_EXIT_CODE, ConvertError, OutputError, printable
from ninfer_convert.recipe.counting import counted

if TYPE_CHECKING:
    # at run time these load when the command runs, so that its help does not wait for numpy
    from ninfer_convert.cli.conversion import How
    from ninfer_convert.run.jobs import Job

WRITTEN, COMPLETE, FAILED, INTERRUPTED, PENDING = "written", "complete", "failed", "interrupted", "pending"
TEXTS = {
    WRITTEN: "written",
    COMPLETE: "complete already",
    FAILED: "failed",
    INTERRUPTED: "interrupted",
    PENDING: "not begun",
}


@dataclass(slots=True)
class Ended:
    """What has become of a job."""

    job: Job
    status: str = PENDING
    exit_code: int | None = None
    sha256: str | None = None
    nbytes: int | None = None
    seconds: float | None = None
    errors: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """Returns its member of the JSON document."""
        return {
            "recipe": printable(self.job.recipe),
            "output": printable(os.fspath(self.job.output)),
            "report": printable(os.fspath(self.job.report_path)),
            "status": self.status,
            "exit_code": self.exit_code,
            "sha256": self.sha256,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "errors": list(self.errors),
        }


@click.command()
@click.argument("jobs_name", metavar="JOBS.yaml", shell_complete=candidates.yaml_files)
@threads_option
@dask_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document about all jobs.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, and nothing about jobs that are done.")
def batch(
    jobs_name: str, threads: int | None, max_memory: str | None, dask: str | None, as_json: bool, quiet: bool
) -> int:
    """Do many conversions, one after another.

    The whole of JOBS.yaml is checked before the first job. A job that fails does not stop the others. What is there
    already, with a report that proves it to be this very conversion, counts as done; so the same command goes on
    where an earlier one ended.

    Exit code: 0 all done; 75 interrupted; else 1 if something is wrong with a job, 74 if input/output failed.

    \b
    Examples:
      ninfer-convert batch jobs.yaml
      ninfer-convert batch jobs.yaml --dask local:4

    The file:

    \b
    schema: 1
    jobs:
      - {recipe: my.yaml, source: checkpoint, output: my.ninfer}
      - recipe: qwen3.6-27b/nvfp4
        sources: {base: Qwen3.6-27B, quantized: hf://me/quantized}
        inputs: {ranking: ranking.i64}
        output: qwen.ninfer

    Paths are relative to the file. A job may also have `report: PATH`, `prefix: {FROM: TO}`, and `overwrite`,
    `unpinned`, `stream`, `verify_source`, each true or false: the options of `run`.
    """
    from ninfer_convert.cli.conversion import How
    from ninfer_convert.run.jobs import read_jobs

    jobs = read_jobs(jobs_name, with_cluster=dask is not None)
    ended = [Ended(job) for job in jobs]
    connect = workers_of(dask, threads)
    if connect is None:
        chosen_threads(threads)
    memory = None if max_memory is None else chosen_memory(max_memory)
    try:
        with contextlib.ExitStack() as stack:
            if connect is not None:
                workers = stack.enter_context(connect())
                workers.await_any()
                workers.require_version()
                connect = lambda: contextlib.nullcontext(workers)  # noqa: E731
            how = How(threads=threads, memory=memory, resume=True, quiet=quiet, connect=connect)
            for number, entry in enumerate(ended, 1):
                _do(entry, how, f"{number}/{len(ended)}", quiet or as_json)
    finally:
        # also when it was interrupted
        if any(entry.status != PENDING for entry in ended):
            _say_totals(ended, as_json, quiet)
    return _exit_code(ended)


def _do(entry: Ended, how: How, label: str, quiet: bool) -> None:
    """Does a job and says what has become of it."""
    job = entry.job
    name = printable(os.fspath(job.output))
    try:
        told = _convert(entry, how)
    except KeyboardInterrupt:
        entry.status, entry.exit_code = INTERRUPTED, INTERRUPTED_EXIT_CODE
        raise
    except Exception as error:
        if os.environ.get("NINFER_CONVERT_DEBUG") == "1":
            raise
        entry.status = FAILED
        entry.exit_code, entry.errors = failure_of(error)
        say(f"{label} {name} failed:", err=True)
        say_errors(entry.errors)
        return
    entry.exit_code = 0
    if not how.quiet:
        say(f"{label} {told}", err=True)
    if not quiet:
        say(f"{entry.sha256}  {name}")


def _convert(entry: Ended, how: How) -> str:
    from ninfer_convert.cli.conversion import convert_job, require_paths, written_text

    job = entry.job
    asked = job.recipe, job.sources, job.inputs, job.prefixes, job.unpinned
    if os.path.lexists(job.output):
        from ninfer_convert.run.published import proven_outcome

        threads = how.threads or allowance.allowed_threads()
        with planned(*asked, "headers") as plan, progress("checking", quiet=how.quiet) as show:
            found = proven_outcome(plan, job.output, job.report_path, threads=threads, progress=show)
            if found is not None:
                entry.status, entry.sha256, entry.nbytes = COMPLETE, found.file_sha256, plan.file_bytes
                return f"{printable(os.fspath(job.output))} is complete already"
    with planned(*asked, how.access(job)) as plan:
        require_paths(plan, job)
        outcome = convert_job(job, plan, how)
        entry.status, entry.sha256, entry.nbytes = WRITTEN, outcome.file_sha256, plan.file_bytes
        entry.seconds = round(outcome.seconds, 3)
        return written_text(job, plan, outcome)


def _say_totals(ended: Sequence[Ended], as_json: bool, quiet: bool) -> None:
    counts = {status: sum(entry.status == status for entry in ended) for status in TEXTS}
    if as_json:
        is_done = counts[WRITTEN] + counts[COMPLETE] == len(ended)
        jobs = [entry.document() for entry in ended]
        print_json({"ok": is_done, "jobs": jobs, "totals": {"jobs": len(ended), **counts}})
    if not quiet:
        told = ", ".join(f"{count} {TEXTS[status]}" for status, count in counts.items() if count)
        say(f"{counted(len(ended), 'job')}: {told}", err=True)


def _exit_code(ended: Sequence[Ended]) -> int:
    """Returns the most serious exit code: what a rerun will not mend before what it may."""
    codes = {entry.exit_code for entry in ended}
    if codes - {0, OutputError.exit_code}:
        return ConvertError.exit_code
    return max(code for code in codes if code is not None)
