"""`recipe check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ninfer_convert.cli.options import opened_sources, print_json, source_options
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.files import locate

if TYPE_CHECKING:
    from ninfer_convert.plan.check import Checked, Problem


@click.command("check")
@source_options
@click.option("--strict", is_flag=True, help="Fail on warnings, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check_recipe(
    recipe_name: str,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """Check RECIPE, a file or a shipped recipe; every error and warning is told with its place.

    Without --source all that can be told without a checkpoint; with it also shapes, dtypes and coverage, from the
    headers alone. Warnings are about what is right and has no effect, such as a name that nothing uses. Nothing is
    written.

    Exit code: 0 no errors; 1 errors, or warnings with --strict.

    \b
    Examples:
      ninfer-convert recipe check my-tune.yaml
      ninfer-convert recipe check my-tune.yaml --source ./my-tune --json
    """
    # numpy loads with it
    from ninfer_convert.plan.check import check, check_with_sources

    path = locate(recipe_name)
    checked = check(path)
    has_sources = bool(sources)
    if not has_sources and (inputs or prefixes or unpinned):
        raise UsageError("--input, --prefix and --unpinned say how a source is read; add --source")
    if has_sources and checked.reading is not None:
        recipe = checked.reading.recipe
        with opened_sources(recipe, sources, inputs, prefixes, "headers", unpinned=unpinned) as (opened, files):
            checked = check_with_sources(checked, opened, files, unpinned=unpinned)
    ok = not checked.count("error") and not (strict and checked.count("warning"))
    if as_json:
        print_json(_document(printable(path), checked, ok=ok))
    else:
        _print(printable(path), checked, has_sources=has_sources)
    return 0 if ok else 1


def _document(file: str, checked: Checked, *, ok: bool) -> dict[str, Any]:
    reading = checked.reading
    return {
        "ok": ok,
        "recipe": file,
        "objects": None if reading is None else len(reading.recipe.objects),
        "problems": [_entry(problem) for problem in checked.problems],
    }


def _entry(problem: Problem) -> dict[str, Any]:
    mark = problem.mark
    entry = {"severity": problem.severity, "file": mark.file, "line": mark.line, "column": mark.column}
    if mark.end_column is not None:
        entry["end_column"] = mark.end_column
    entry["message"] = problem.text
    if problem.suggestion is not None:
        entry["suggestion"] = problem.suggestion
    return entry


def _print(file: str, checked: Checked, *, has_sources: bool) -> None:
    from ninfer_convert.cli.carets import Excerpts

    excerpts = Excerpts(checked.files)
    for problem in checked.problems:
        say(f"{problem.mark}: {problem.severity}: {problem.text}")
        for line in excerpts.at(problem.mark):
            say(line)
    said = [counted(n, what) for what in ("error", "warning", "note") if (n := checked.count(what))]
    verdict = ", ".join(said) or "no problems"
    if checked.reading is None:
        say(f"{file}: {verdict}")
        return
    recipe = checked.reading.recipe
    facts = [counted(len(recipe.objects), "object"), counted(len(recipe.sources), "source")]
    if checked.lossy and not recipe.evidence:
        facts.append(f"evidence: none for {counted(checked.lossy, 'lossy object')}")
    looked = "" if not has_sources or checked.count("error") else ", with the headers of its sources"
    say(f"{file}: {', '.join(facts)}: {verdict}{looked}")
