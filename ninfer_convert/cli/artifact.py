"""`verify` and `inspect`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ninfer_convert.allowance import MAX_THREADS
from ninfer_convert.cli import candidates
from ninfer_convert.cli.options import chosen_threads, planned, print_json, progress, size_text, where_options
from ninfer_convert.cli.output import say
from ninfer_convert.errors import ArtifactError, SourceError, UsageError, printable
from ninfer_convert.recipe.counting import counted

if TYPE_CHECKING:
    # at run time these load when a command runs, so that its help does not wait for numpy
    from ninfer_convert.artifact.reader import Artifact
    from ninfer_convert.artifact.recheck import Recheck
    from ninfer_convert.artifact.verify import Problem, Verification
    from ninfer_convert.plan.planner import Plan

SHOWN_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class _Check:
    """One part of a verification, and what to say when it found nothing."""

    verdict: str
    problems: Sequence[Problem]
    else_verdict: str | None = None
    """What to say instead where another part found something: nobody should read then that a file is valid."""


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=candidates.artifacts)
@click.option("--recipe", "recipe_name", metavar="RECIPE", shell_complete=candidates.recipe_names,
              help="Also check the inventory against this recipe.")
@where_options
@click.option("--sample", type=click.IntRange(min=1), metavar="N",
              help="Recompute N row blocks of each object, the first and the last among them  [default: all]")
@click.option("--report", "report_path", metavar="PATH", type=click.Path(path_type=Path),
              shell_complete=candidates.json_files,
              help="Also compare sizes and digests with this conversion report.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), metavar="N",
              help="Reading threads  [default: the processors this process may use]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(
    artifact: Path,
    recipe_name: str | None,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    sample: int | None,
    report_path: Path | None,
    threads: int | None,
    as_json: bool,
) -> int:
    """Check every byte of ARTIFACT: framing, directory, geometry, and every value rule of its formats.

    With --recipe, the inventory must be the recipe's. With --source as well, every object is made again from the
    source by a second implementation and compared, byte by byte. Nothing is written.

    Exit code: 0 all is well; 1 something is wrong with the artifact, or it is not what the recipe and source make.

    \b
    Examples:
      ninfer-convert verify out.ninfer
      ninfer-convert verify out.ninfer --report out.ninfer.conversion.json
      ninfer-convert verify out.ninfer --recipe minilm-l6-v2 \\
          --source ./all-MiniLM-L6-v2
    """
    _require_recipe(recipe_name, sources, {"--input": inputs, "--prefix": prefixes, "--sample": sample})
    if unpinned and recipe_name is None:
        raise UsageError("--unpinned says how to read the sources of --recipe, which is not given")
    from ninfer_convert.artifact.inventory import check_recipe
    from ninfer_convert.artifact.reader import Artifact
    from ninfer_convert.artifact.verify import STRUCTURE
    from ninfer_convert.recipe.loader import load_recipe

    workers = chosen_threads(threads)
    with contextlib.ExitStack() as stack:
        # What the recipe and its sources have wrong is said before gigabytes are read.
        plan = recipe = report = None
        if recipe_name is not None and sources:
            plan = stack.enter_context(planned(recipe_name, sources, inputs, prefixes, unpinned))
        elif recipe_name is not None:
            recipe = load_recipe(recipe_name)
        if report_path is not None:
            report = load_report(report_path)
        found, checks = _values(artifact, workers, quiet=as_json)
        document = found.as_json()
        if not any(problem.check == STRUCTURE for problem in found.problems):
            opened = stack.enter_context(Artifact.open(artifact))
            if plan is not None:
                again = _recomputed(opened, plan, sample, workers, quiet=as_json)
                checks += _recheck_checks(opened, plan, again)
                document["recomputed"] = {
                    "objects": again.objects, "bytes": again.nbytes, "total_bytes": again.total_bytes
                }
            if recipe is not None:
                verdict = f"its inventory is that of recipe {recipe.id}"
                checks.append(_Check(verdict, check_recipe(opened, recipe, unpinned=unpinned)))
            if report is not None:
                checks.append(_report_check(opened, report, report_path, quiet=as_json))
    problems = [problem for check in checks for problem in check.problems]
    if as_json:
        document["ok"] = not problems
        document["problems"] = [
            {"object": problem.object, "check": problem.check, "detail": problem.detail} for problem in problems
        ]
        print_json(document)
    else:
        _print_checks(artifact, found.notes, checks, problems)
    return 1 if problems else 0


def _require_recipe(recipe_name: str | None, sources: tuple[str, ...], others: Mapping[str, object]) -> None:
    if recipe_name is None and sources:
        raise UsageError("--source needs --recipe: a recipe says what the source became")
    for option, value in others.items():
        if value and not sources:
            raise UsageError(f"{option} needs --recipe and --source")


def _values(artifact: Path, workers: int, *, quiet: bool) -> tuple[Verification, list[_Check]]:
    from ninfer_convert.artifact.verify import verify_artifact

    total = artifact.stat().st_size if artifact.exists() else 0
    with progress("verifying", quiet=quiet) as show:
        found = verify_artifact(artifact, _advancing(show, total), threads=workers)
    name = printable(os.fspath(artifact))
    checked = f"{counted(found.objects, 'object')}, {size_text(found.nbytes)} checked"
    return found, [_Check(f"{name} is valid: {checked}", found.problems, f"{name} is well formed: {checked}")]


def _recomputed(opened: Artifact, plan: Plan, sample: int | None, workers: int, *, quiet: bool) -> Recheck:
    from ninfer_convert.artifact.recheck import recheck_artifact

    with progress("recomputing", quiet=quiet) as show:
        return recheck_artifact(opened, plan, show, threads=workers, sample=sample)


def _recheck_checks(opened: Artifact, plan: Plan, found: Recheck) -> list[_Check]:
    from ninfer_convert.artifact.inventory import check_plan

    part = "" if found.nbytes == found.total_bytes else f" of {found.total_bytes:,}"
    return [
        _Check(f"its directory is that of recipe {plan.recipe.id}", check_plan(opened, plan)),
        _Check(
            f"recomputed from the source: {counted(found.objects, 'object')}, {found.nbytes:,}{part} bytes equal",
            found.problems,
        ),
    ]


def _report_check(opened: Artifact, report: Mapping[str, Any], path: Path | None, *, quiet: bool) -> _Check:
    from ninfer_convert.artifact.verify import verify_report

    with progress("hashing", quiet=quiet) as show:
        problems = verify_report(opened, report, _advancing(show, opened.file_bytes))
    return _Check(f"sizes and digests are those of {printable(str(path))}", problems)


def _advancing(show: Callable[[int, int], object] | None, total: int) -> Callable[[int], None]:
    """Returns a callback that takes what was done since its last call."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if show:
            show(min(done, total), total)

    return advance


def _print_checks(
    artifact: Path, notes: Sequence[str], checks: Sequence[_Check], problems: Sequence[Problem]
) -> None:
    from ninfer_convert.artifact.inventory import IDENTITY, other_recipe

    for note in notes:
        say(f"note: {note}")
    is_sound = not problems
    if (why := other_recipe(problems)) is not None:
        say(f"error: {printable(os.fspath(artifact))} is the artifact of another recipe: {why}", err=True)
        problems = [problem for problem in problems if problem.check != IDENTITY]
    for problem in problems[:SHOWN_PROBLEMS]:
        name = "" if problem.object is None else f"{printable(problem.object)}: "
        say(f"error: {name}{problem.check}: {problem.detail}", err=True)
    if len(problems) > SHOWN_PROBLEMS:
        say(f"error: and {counted(len(problems) - SHOWN_PROBLEMS, 'more problem')}", err=True)
    for check in checks:
        if not check.problems:
            say(check.verdict if is_sound else check.else_verdict or check.verdict)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=candidates.artifacts)
@click.option("--objects", "listed", is_flag=True, help="List every object.")
@click.option("--filter", "patterns", multiple=True, metavar="GLOB", shell_complete=candidates.artifact_objects,
              help="List only objects whose name matches; may be repeated.")
@click.option("--object", "name", metavar="NAME", shell_complete=candidates.artifact_objects,
              help="Show one object in detail: its planes, its scales, how often each code occurs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect(artifact: Path, listed: bool, patterns: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """Show what ARTIFACT holds: identity, totals by format and component, objects.

    Totals come from the directory alone, with the digest and the source from the conversion report, if one lies
    beside ARTIFACT. Nothing is checked but the directory; `verify` does that.

    \b
    Examples:
      ninfer-convert inspect out.ninfer
      ninfer-convert inspect out.ninfer --filter 'text/layers/0/*'
      ninfer-convert inspect out.ninfer --object text/token_embedding
    """
    from ninfer_convert.artifact import inspection, inspection_text
    from ninfer_convert.artifact.reader import Artifact

    with Artifact.open(artifact) as opened:
        if name is not None:
            found = inspection.detail(opened, name)
            if as_json:
                print_json(found)
            else:
                say(inspection_text.detail_text(found))
            return
        found = inspection.summary(opened)
    if patterns:
        found["objects"] = inspection.matching(found["objects"], patterns)
    report = report_beside(artifact)
    if as_json:
        print_json(found | ({"report": report} if report else {}))
        return
    say(inspection_text.summary_text(found))
    if report:
        say(inspection_text.report_text(report))
    if listed or patterns:
        say(inspection_text.objects_text(found["objects"]))


def report_beside(artifact: Path) -> dict[str, Any] | None:
    """Returns the conversion report beside an artifact, if one is there."""
    from ninfer_convert.artifact.container import REPORT_SUFFIX

    path = artifact.with_name(artifact.name + REPORT_SUFFIX)
    return load_report(path) if path.exists() else None


def load_report(path: Path) -> dict[str, Any]:
    """Returns a conversion report; nothing of it is believed yet but that it is a JSON object."""
    from ninfer_convert.artifact.container import MAX_REPORT_BYTES
    from ninfer_convert.source.io import read_small
    from ninfer_convert.strict_json import load_object

    try:
        return load_object(read_small(os.fspath(path), MAX_REPORT_BYTES), printable(str(path)), lenient=True)
    except SourceError as error:
        raise ArtifactError(*error.messages) from error
