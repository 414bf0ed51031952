"""One artifact by many processes: `prepare`, `run --shard` and `finalize`, each by a plan file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ninfer_convert.cli import candidates
from ninfer_convert.cli.options import (
    chosen_memory,
    chosen_threads,
    planned,
    progress,
    size_text,
    threads_option,
)
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.recipe.counting import counted
from ninfer_convert.run.cluster_env import choose_share
from ninfer_convert.run.own_files import replace_file
from ninfer_convert.run.writer import require_output

if TYPE_CHECKING:
    # at run time these load when a command runs, so that its help does not wait for numpy
    from ninfer_convert.plan.planner import Plan
    from ninfer_convert.plan.provenance import Outcome
    from ninfer_convert.run.plan_file import PlanFile
    from ninfer_convert.source.acquisition import Access

WITH_PLAN = ("plan_name", "shard", "threads", "max_memory", "resume", "no_stats", "quiet", "verbose")
"""The parameters of `run` that a plan file leaves open."""

plan_option = click.option("--plan", "plan_name", required=True, metavar="PLAN.json", help="What `plan -o` wrote.",
                           shell_complete=candidates.json_files)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress and no summary.")


def save_plan(
    made: Plan, path: Path, output: Path, recipe_name: str, prefixes: tuple[str, ...], *, unpinned: bool
) -> None:
    """Writes the plan file of an accepted plan."""
    from ninfer_convert.run.plan_file import plan_file, write_plan_file

    file = plan_file(path, made, recipe_name, prefixes, output, unpinned=unpinned)
    if os.path.realpath(path) in map(os.path.realpath, (file.output, file.report)):
        raise UsageError(f"-o {printable(os.fspath(path))} is the plan; name another --output for the artifact")
    protected = _protected(made)
    require_output(file.output, overwrite=False, protected=protected)
    require_output(path, overwrite=True, protected=protected)
    write_plan_file(file, made)
    say(f"wrote {printable(file.path)}; next: ninfer-convert prepare --plan {printable(file.path)}", err=True)


def _protected(made: Plan) -> list[Path]:
    read = [Path(path) for checkpoint in made.sources.values() for path in checkpoint.paths()]
    return [*read, *made.inputs.values(), Path(made.recipe.path)]


@contextlib.contextmanager
def planned_again(
    plan_name: str, access: Access = "headers", *, verbose: bool = False
) -> Iterator[tuple[Plan, PlanFile]]:
    """Plans what a plan file says, and requires that it is the same conversion still."""
    from ninfer_convert.run.plan_file import read_plan_file

    file = read_plan_file(plan_name)
    sources = tuple(f"{name}={place}" for name, place in file.sources.items())
    inputs = tuple(f"{name}={place}" for name, place in file.inputs.items())
    with planned(file.recipe, sources, inputs, file.prefixes, file.unpinned, access, verbose=verbose) as made:
        file.require_same(made)
        yield made, file


@click.command()
@plan_option
@quiet_option
def prepare(plan_name: str, quiet: bool) -> None:
    """Make the part file that the shares of a plan are written into.

    Do this once, before any share is run, on a file system that all machines see. To do it again changes nothing.
    --shard auto takes I and N from Slurm, LSF or SGE, --shard auto/N takes I from Kubernetes or PBS.

    \b
    Examples:
      ninfer-convert plan my.yaml --source ./my-model -o plan.json \\
          --output my.ninfer
      ninfer-convert prepare --plan plan.json
      ninfer-convert run --plan plan.json --shard 0/2    # on one machine
      ninfer-convert run --plan plan.json --shard 1/2    # on another one
      ninfer-convert finalize --plan plan.json
    """
    from ninfer_convert.run import shares
    from ninfer_convert.run.finalize import is_published

    with planned_again(plan_name) as (made, file):
        if os.path.lexists(file.output) and is_published(made, file.output):
            _say(f"{_name(file)} is complete already", quiet)
            return
        require_output(file.output, overwrite=False, protected=_protected(made))
        part = printable(os.fspath(shares.part_path(file.output)))
        if shares.prepare(made, file.output):
            _say(f"prepared {part}: {size_text(made.file_bytes)}", quiet)
        else:
            _say(f"{part} is prepared already", quiet)


def run_shard(context: click.Context) -> None:
    """Is `run --plan --shard`."""
    given = context.params
    plan_name, shard, quiet = given["plan_name"], given["shard"], given["quiet"]
    if plan_name is None or shard is None:
        raise UsageError("--plan and --shard go together; --shard 0/1 is all of a plan")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in WITH_PLAN and source == ParameterSource.COMMANDLINE:
            name = parameter.opts[0] if parameter.param_type_name == "option" else "RECIPE"
            raise UsageError(f"{name} does not go with --plan, which says already what is converted, and where to")
    choice = choose_share(shard, os.environ)
    workers, memory = chosen_threads(given["threads"]), chosen_memory(given["max_memory"])

    from ninfer_convert.plan.budget import block_bytes
    from ninfer_convert.run.cuts import cut
    from ninfer_convert.run.finalize import is_published
    from ninfer_convert.run.shares import require_prepared, run_share

    with planned_again(plan_name, "values", verbose=given["verbose"]) as (made, file):
        share = cut(made, choice.count)[choice.index]
        where = f"file bytes [{share.begin}, {share.end})" if share.begin < share.end else "no bytes"
        _say(f"share {share.name} ({choice.origin}): {where}", quiet)
        if os.path.lexists(file.output) and is_published(made, file.output):
            _say(f"{_name(file)} is complete already", quiet)
            return
        if given["verbose"]:
            for note in made.notes:
                say(f"note: {note}", err=True)
        require_prepared(made, file.output, plan_name)
        with progress(f"share {share.name}", quiet=quiet) as show:
            outcome = run_share(
                made,
                file.output,
                share,
                threads=workers,
                block_bytes=block_bytes(made, workers, memory),
                stats=not given["no_stats"],
                resume=given["resume"] == "auto",
                progress=show,
            )
        kept = f", {size_text(outcome.kept_bytes)} were there" if outcome.kept_bytes else ""
        _say(f"share {share.name}: wrote {size_text(outcome.made_bytes)}{kept}, {outcome.seconds:.1f} s", quiet)


@click.command()
@plan_option
@threads_option
@quiet_option
def finalize(plan_name: str, threads: int | None, max_memory: str | None, quiet: bool) -> None:
    """Check what the shares of a plan have written, and publish it.

    Every byte is read and compared with what the share that made it says. What is missing or wrong is named, with
    the share to run again. To do it again when all is published changes nothing. The artifact appears with its
    conversion report beside it, and its SHA-256 goes to standard output.

    \b
    Examples:
      ninfer-convert finalize --plan plan.json
    """
    from ninfer_convert.run import finalize as finalizing

    workers = chosen_threads(threads)
    chosen_memory(max_memory)
    with planned_again(plan_name) as (made, file), progress("checking", quiet=quiet) as show:
        if os.path.lexists(file.output):
            outcome = finalizing.published_digests(made, file.output, threads=workers, progress=show)
            _require_report(made, file, outcome)
            with contextlib.suppress(UsageError):
                # Takes away the second name of the output, which a process that died while publishing has left.
                require_output(file.output, overwrite=False, protected=())
            finalizing.remove_journals(file.output)
            _say(f"{_name(file)} is complete already", quiet)
        else:
            require_output(file.report, overwrite=True, protected=_protected(made))

            def write_report(outcome: Outcome) -> Callable[[], None]:
                document = _report(made, outcome, workers)
                return replace_file(file.report, (json.dumps(document, ensure_ascii=True, indent=1) + "\n").encode())

            outcome, count = finalizing.finalize(
                made, file.output, plan_name, threads=workers, progress=show, before_publish=write_report
            )
            _say(
                f"wrote {_name(file)}: {counted(len(made.objects), 'object')}, {size_text(made.file_bytes)}, "
                f"of {counted(count, 'share')}, "
                f"{outcome.seconds:.1f} s",
                quiet,
            )
    if not quiet:
        say(f"{outcome.file_sha256}  {_name(file)}")


def _report(made: Plan, outcome: Outcome, workers: int) -> dict[str, Any]:
    from ninfer_convert.plan.provenance import report_json

    return report_json(made, outcome, threads=workers, command=sys.argv)


def _require_report(made: Plan, file: PlanFile, outcome: Outcome) -> None:
    """Raises UsageError unless the report beside an output says of it what is true."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(file.report.read_bytes())
        wanted = json.loads(json.dumps(_report(made, outcome, 1)))
        if isinstance(found, dict) and _decided(found) == _decided(wanted):
            return
    raise UsageError(
        f"{_name(file)} exists, and {printable(os.fspath(file.report))} does not say that it was made by this plan"
    )


def _decided(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what the plan and the bytes decide: not what the run was, and not what it has measured."""
    objects = [{key: value for key, value in item.items() if key != "stats"} for item in report["objects"]]
    return {**report, "objects": objects, "run": None}


def _name(file: PlanFile) -> str:
    return printable(os.fspath(file.output))


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        say(text, err=True)
