"""`verify` and `inspect`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from ninfer_convert import inspection
from ninfer_convert.cli.options import chosen_threads, print_json, progress, size_text
from ninfer_convert.errors import ArtifactError, printable
from ninfer_convert.reader import Artifact
from ninfer_convert.verify import Verification, verify_artifact

MAX_REPORT_BYTES = 256 << 20
SHOWN_PROBLEMS = 50


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(1, 256), help="Reading threads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(artifact: Path, threads: int | None, as_json: bool) -> int:
    """Check every byte of ARTIFACT: framing, directory, geometry, and every value rule of its formats."""
    total = artifact.stat().st_size if artifact.exists() else 0
    done = 0
    with progress("verifying", quiet=as_json) as show:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if show:
                show(min(done, total), total)

        found = verify_artifact(artifact, advance, threads=chosen_threads(threads))
    if as_json:
        print_json(found.as_json())
    else:
        _print_verification(artifact, found)
    return 0 if found.ok else 1


def _print_verification(artifact: Path, found: Verification) -> None:
    for note in found.notes:
        click.echo(f"note: {note}")
    for problem in found.problems[:SHOWN_PROBLEMS]:
        name = "" if problem.object is None else f"{printable(problem.object)}: "
        click.echo(f"error: {name}{problem.check}: {problem.detail}", err=True)
    if len(found.problems) > SHOWN_PROBLEMS:
        click.echo(f"error: and {len(found.problems) - SHOWN_PROBLEMS} more problems", err=True)
    if found.ok:
        click.echo(f"{os.fspath(artifact)} is valid: {found.objects} objects, {size_text(found.nbytes)} checked")


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--objects", "listed", is_flag=True, help="List every object.")
@click.option("--filter", "patterns", multiple=True, metavar="GLOB", help="Only objects whose name matches.")
@click.option("--object", "name", metavar="NAME", help="Show one object in detail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect(artifact: Path, listed: bool, patterns: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """Show what ARTIFACT holds: identity, totals by format and component, objects."""
    with Artifact.open(artifact) as opened:
        if name is not None:
            found = inspection.detail(opened, name)
            if as_json:
                print_json(found)
            else:
                click.echo(inspection.detail_text(found))
            return
        found = inspection.summary(opened)
    if patterns:
        found["objects"] = inspection.matching(found["objects"], patterns)
    report = _report_beside(artifact)
    if as_json:
        print_json(found | ({"report": report} if report else {}))
        return
    click.echo(inspection.summary_text(found))
    if report:
        click.echo(inspection.report_text(report))
    if listed or patterns:
        click.echo(inspection.objects_text(found["objects"]))


def _report_beside(artifact: Path) -> dict[str, Any] | None:
    """Returns the conversion report beside an artifact, if one is there."""
    path = artifact.with_name(artifact.name + ".conversion.json")
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ArtifactError(f"{printable(str(path))} is larger than a report can be ({MAX_REPORT_BYTES} bytes)")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{printable(str(path))} is not valid JSON") from error
    if not isinstance(document, dict):
        raise ArtifactError(f"{printable(str(path))} is not a JSON object")
    return document
