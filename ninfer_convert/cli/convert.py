"""`run` and `plan`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ninfer_convert.cli import candidates
from ninfer_convert.cli.cluster import dask_option, require_dask_options, workers_of
from ninfer_convert.cli.options import (
    chosen_memory,
    chosen_threads,
    planned,
    print_json,
    progress,
    size_text,
    source_options,
    threads_option,
    where_options,
)
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.recipe.counting import counted

if TYPE_CHECKING:
    # at run time these load when a command runs, so that its help does not wait for numpy
    from ninfer_convert.plan.planner import Plan
    from ninfer_convert.source.acquisition import Access


@click.command()
@click.argument("recipe_name", metavar="[RECIPE]", required=False, shell_complete=candidates.recipe_names)
@where_options
@click.option("-o", "--output", metavar="OUT.ninfer", type=click.Path(path_type=Path),
              help="Where it goes; required, like RECIPE, unless --plan is given.")
@click.option("--plan", "plan_name", metavar="PLAN.json", shell_complete=candidates.json_files,
              help="What `plan -o` wrote, in place of RECIPE and all else.")
@click.option("--shard", metavar="I/N|auto|auto/N", shell_complete=candidates.words("auto"),
              help="With --plan: the share to make, I from 0; see `prepare --help`.")
@threads_option
@dask_option
@click.option("--overwrite", is_flag=True, help="Replace an existing OUT when the new one is complete.")
@click.option("--resume", type=click.Choice(["auto", "never"]), default="auto", show_default=True,
              help="Go on from what an interrupted run left, or start over.")
@click.option("--no-stats", is_flag=True, help="Do not measure what encoding costs each tensor, for the report.")
@click.option("--report", "report_option", metavar="PATH", type=click.Path(path_type=Path),
              help="Where the conversion report goes  [default: OUT.ninfer.conversion.json]")
@click.option("--stream", is_flag=True,
              help="Fetch hf:// sources shard by shard, keep no more than two of each, and leave the hub cache alone.")
@click.option("--verify-source", is_flag=True,
              help="First hash every weight file that is used, and compare it with the hub's SHA-256.")
@click.option("--dry-run", is_flag=True, help="Stop after the plan.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary.")
@click.option("-v", "--verbose", is_flag=True, help="Also print the plan's notes and the pins that --unpinned accepts.")
@click.pass_context
def run(
    context: click.Context,
    recipe_name: str | None,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    output: Path | None,
    plan_name: str | None,
    shard: str | None,
    threads: int | None,
    max_memory: str | None,
    dask: str | None,
    overwrite: bool,
    resume: str,
    no_stats: bool,
    report_option: Path | None,
    stream: bool,
    verify_source: bool,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Convert a checkpoint by RECIPE into one .ninfer artifact.

    RECIPE is a YAML file or the name of a shipped recipe. Everything that can be checked is checked before the
    first byte. OUT.ninfer appears only when it is complete, with the conversion report OUT.ninfer.conversion.json
    beside it; its SHA-256 goes to standard output. An interrupted run leaves a part file and a journal beside
    OUT.ninfer, and the same command goes on from there.

    Exit code: 0 done; 1 recipe or source are wrong; 74 input/output failed; 75 interrupted.

    \b
    Examples:
      ninfer-convert run my.yaml --source ./my-model -o my.ninfer
      ninfer-convert run qwen3.6-27b/groupwise-int --source ./Qwen3.6-27B \\
          --input ranking=ranking.i64 -o qwen3_6_27b.ninfer
    """
    from ninfer_convert.cli.conversion import How, convert_job, require_paths, written_text
    from ninfer_convert.run.jobs import Job

    if dask is not None:
        require_dask_options(stream=stream, dry_run=dry_run, shard=plan_name is not None or shard is not None)
    if plan_name is not None or shard is not None:
        from ninfer_convert.cli.shares import run_shard

        run_shard(context)
        return
    if recipe_name is None or output is None:
        missing = "argument 'RECIPE'" if recipe_name is None else "option '-o' / '--output'"
        text = f"Missing {missing}; give it, or --plan PLAN.json --shard I/N, which stand for RECIPE, -o and all else."
        raise click.UsageError(text, context)
    if verify_source and dry_run:
        raise UsageError("--verify-source reads the whole source, and --dry-run stops before that; give one of them")
    job = Job(
        recipe=recipe_name,
        sources=sources,
        inputs=inputs,
        prefixes=prefixes,
        unpinned=unpinned,
        output=output,
        report=report_option,
        overwrite=overwrite,
        stream=stream,
        verify_source=verify_source,
    )
    connect = workers_of(dask, threads)
    if connect is None:
        chosen_threads(threads)
    memory = None if max_memory is None else chosen_memory(max_memory)
    how = How(threads=threads, memory=memory, resume=resume == "auto", stats=not no_stats, quiet=quiet, connect=connect)
    access: Access = "headers" if dry_run else how.access(job)
    with planned(recipe_name, sources, inputs, prefixes, unpinned, access, verbose=verbose) as plan:
        require_paths(plan, job)
        if verbose:
            for note in plan.notes:
                say(f"note: {note}", err=True)
        if dry_run:
            _print_summary(plan)
            return
        outcome = convert_job(job, plan, how)
        if not quiet:
            say(written_text(job, plan, outcome), err=True)
            say(f"{outcome.file_sha256}  {printable(os.fspath(output))}")


@click.command()
@source_options
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print the whole plan as one JSON document.")
@click.option("--objects", "with_objects", is_flag=True, help="List every object.")
@click.option("--deep", is_flag=True, help="Also read and check every value.")
@click.option("-v", "--verbose", is_flag=True, help="Also list the pins that --unpinned accepts.")
@click.option("-o", "plan_path", metavar="PLAN.json", type=click.Path(path_type=Path),
              help="Also write the plan to a file, for `prepare`; with --output.")
@click.option("--output", metavar="OUT.ninfer", type=click.Path(path_type=Path),
              help="Where the artifact of PLAN.json goes.")
@click.option("--set", "settings", multiple=True, metavar="GLOB=FORMAT", shell_complete=candidates.settings,
              help="Plan as if the recipe ended with this change, and tell the difference.")
@click.option("--report", "report_path", metavar="PATH", type=click.Path(path_type=Path),
              shell_complete=candidates.json_files,
              help="With --set: the report of an earlier conversion of the checkpoint, to estimate the errors from.")
def plan(
    recipe_name: str,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    threads: int | None,
    max_memory: str | None,
    as_json: bool,
    with_objects: bool,
    deep: bool,
    verbose: bool,
    plan_path: Path | None,
    output: Path | None,
    settings: tuple[str, ...],
    report_path: Path | None,
) -> None:
    """Check a conversion and show what it would write, without writing it.

    RECIPE is a YAML file or the name of a shipped recipe. What headers, configs and small values can tell is checked;
    all problems are told at once. With -o and --output the plan becomes a file for many processes (`prepare --help`).

    Exit code: 0 it can be converted; 1 recipe or source are wrong.

    \b
    Examples:
      ninfer-convert plan my.yaml --source ./my-model --objects
      ninfer-convert plan my.yaml --source ./my-model \\
          --set 'layers/*/mlp/*=Q6G64_F16S' --report my.ninfer.conversion.json
      ninfer-convert plan my.yaml --source hf://me/my-model
    """
    from ninfer_convert.cli.what_if import print_what_if, require_what_if

    if (plan_path is None) != (output is None):
        given, missing = ("-o", "--output OUT.ninfer") if output is None else ("--output", "-o PLAN.json")
        raise UsageError(
            f"{given} without {missing}: -o is where the plan is written, --output where its artifact will go, and "
            "they go together; to convert at once: `run RECIPE -o OUT.ninfer`"
        )
    what_if = require_what_if(settings, report_path, plan_path)
    change = None if what_if is None else what_if.change
    workers, memory = chosen_threads(threads), chosen_memory(max_memory)
    access: Access = "values" if deep else "headers"
    with planned(recipe_name, sources, inputs, prefixes, unpinned, access, change=change, verbose=verbose) as made:
        answer = None if what_if is None else what_if.document(made)
        if deep:
            from ninfer_convert.plan.budget import block_bytes
            from ninfer_convert.run.convert import scan

            with progress("scanning", quiet=as_json) as show:
                scan(made, threads=workers, block_bytes=block_bytes(made, workers, memory), progress=show)
        if plan_path is not None and output is not None:
            from ninfer_convert.cli.shares import save_plan

            save_plan(made, plan_path, output, recipe_name, prefixes, unpinned=unpinned)
        if as_json:
            document = _document(made, workers, memory)
            if answer is not None:
                document["recipe"]["set"] = list(settings)
                document["what_if"] = answer
            print_json(document)
            return
        if with_objects:
            _print_objects(made)
        _print_summary(made)
        if answer is not None:
            print_what_if(answer, settings)
        for note in made.notes:
            say(f"note: {note}")


def _document(made: Plan, workers: int, memory: int) -> dict[str, Any]:
    from ninfer_convert.plan import budget
    from ninfer_convert.plan.provenance import plan_json

    document = plan_json(made)
    size = budget.block_bytes(made, workers, memory)
    document["totals"]["peak_memory_bytes"] = budget.peak_memory(made, workers, size)
    return document


def _print_objects(made: Plan) -> None:
    from ninfer_convert.plan.planner import PlannedResource

    for item in made.objects:
        if isinstance(item, PlannedResource):
            kind, shape = "raw-bytes-v1", ""
        else:
            kind, shape = item.numeric.name, "x".join(map(str, item.shape)) or "scalar"
        say(f"{item.offset:>14} {item.nbytes:>14} {kind:<21} {shape:<16} {item.name}")


def _print_summary(made: Plan) -> None:
    from ninfer_convert.plan.provenance import plan_json

    document = plan_json(made)
    totals = document["totals"]
    recipe = made.recipe
    say(f"{recipe.model_id}/{recipe.weights_id} by recipe {recipe.id}")
    say(f"  {counted(totals['tensors'], 'tensor')}, {counted(totals['resources'], 'resource')}")
    for name, count in totals["formats"].items():
        say(f"    {count:>5} {name}")
    say(f"  reads  {size_text(totals['source_bytes'])}")
    say(f"  writes {size_text(totals['file_bytes'])}")
    if "download_bytes" in totals:
        download, disk, stream = (size_text(totals[f"{key}_bytes"]) for key in ("download", "disk", "stream_disk"))
        say(f"  downloads {download}; takes {disk} of disk, with --stream {stream}")
