"""`compare`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ninfer_convert.allowance import MAX_THREADS
from ninfer_convert.cli import candidates
from ninfer_convert.cli.options import chosen_threads, planned, print_json, progress, where_options
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.recipe.counting import counted

if TYPE_CHECKING:
    # at run time these load when the command runs, so that its help does not wait for numpy
    from ninfer_convert.artifact.compare import Comparison
    from ninfer_convert.artifact.contrast import Contrast

SHOWN_TENSORS = 20


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=candidates.artifacts)
@click.argument("other", metavar="[OTHER]", required=False, type=click.Path(path_type=Path),
                shell_complete=candidates.artifacts)
@click.option("--recipe", "recipe_name", metavar="RECIPE", shell_complete=candidates.recipe_names,
              help="Compare with the source that this recipe reads.")
@where_options
@click.option("--max-error", type=click.FloatRange(min=0), metavar="X",
              help="Exit with 1 when a tensor's relative error is above X.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), metavar="N",
              help="Worker threads  [default: the processors this process may use]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated lines.")
def compare(
    artifact: Path,
    other: Path | None,
    recipe_name: str | None,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    max_error: float | None,
    threads: int | None,
    as_json: bool,
    as_csv: bool,
) -> int:
    """Compare ARTIFACT with OTHER, or with the source that --recipe made it from.

    Two artifacts: identity, objects, formats, digests, and how far differing values lie apart. Against a source:
    what was lost, per tensor and per format, worst first. Relative error is ||x - y|| / ||x|| of a tensor, SQNR the
    same in decibels.

    Exit code: 0 two artifacts are equal, or every tensor of a source within --max-error; 1 they are not.

    \b
    Examples:
      ninfer-convert compare out.ninfer other.ninfer
      ninfer-convert compare my.ninfer --recipe my.yaml --source ./my-model \\
          --max-error 0.05
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv are two ways to print one result; name one")
    if (other is None) == (recipe_name is None):
        raise UsageError("name what to compare with: a second artifact, or --recipe and --source")
    workers = chosen_threads(threads)
    if other is not None:
        if sources or inputs or prefixes or unpinned or max_error is not None:
            raise UsageError("--source, --input, --prefix, --unpinned and --max-error need --recipe, not an artifact")
        return _artifacts(artifact, other, workers, as_json=as_json, as_csv=as_csv)
    if max_error is not None and math.isnan(max_error):
        raise UsageError("--max-error nan is no limit")
    from ninfer_convert.artifact.compare import compare_with_source
    from ninfer_convert.artifact.reader import Artifact

    with (
        planned(recipe_name or "", sources, inputs, prefixes, unpinned) as plan,
        Artifact.open(artifact) as opened,
        progress("comparing", quiet=as_json or as_csv) as show,
    ):
        found = compare_with_source(opened, plan, show, threads=workers)
        identity = {"model_id": opened.identity.model_id, "weights_id": opened.identity.weights_id}
        recipe = {"id": plan.recipe.id, "sha256": plan.recipe.sha256}
    beyond = [item.name for item in found.worst_first() if max_error is not None and item.loss.exceeds(max_error)]
    document = {"artifact": identity, "recipe": recipe, "max_error": max_error, "exceeded": beyond}
    _print(found, document, as_json=as_json, as_csv=as_csv)
    for name in beyond[:SHOWN_TENSORS]:
        say(f"error: {printable(name)}: the relative error is above --max-error {max_error}", err=True)
    if len(beyond) > SHOWN_TENSORS:
        say(f"error: and of {counted(len(beyond) - SHOWN_TENSORS, 'more tensor')}", err=True)
    return 1 if beyond else 0


def _artifacts(artifact: Path, other: Path, workers: int, *, as_json: bool, as_csv: bool) -> int:
    from ninfer_convert.artifact.contrast import compare_artifacts
    from ninfer_convert.artifact.reader import Artifact

    with (
        Artifact.open(artifact) as first,
        Artifact.open(other) as second,
        progress("comparing", quiet=as_json or as_csv) as show,
    ):
        found = compare_artifacts(first, second, show, threads=workers)
    _print(found, {"first": os.fspath(artifact), "second": os.fspath(other)}, as_json=as_json, as_csv=as_csv)
    return 0 if found.is_equal else 1


def _print(found: Comparison | Contrast, document: dict[str, Any], *, as_json: bool, as_csv: bool) -> None:
    from ninfer_convert.artifact import compare_text
    from ninfer_convert.artifact.contrast import Contrast

    if as_json:
        print_json(document | found.as_json())
    elif isinstance(found, Contrast):
        say(compare_text.contrast_csv(found) if as_csv else compare_text.contrast_text(found), nl=not as_csv)
    else:
        say(compare_text.comparison_csv(found) if as_csv else compare_text.comparison_text(found), nl=not as_csv)
