"""`report`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ninfer_convert.cli import candidates
from ninfer_convert.cli.artifact import load_report, report_beside
from ninfer_convert.cli.options import progress, size_text
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable

if TYPE_CHECKING:
    # at run time these load when the command runs, so that its help does not wait for numpy
    from ninfer_convert.page.data import Subject


def _name_html(context: click.Context, option: click.Parameter, value: str | None) -> None:
    """Tells who writes `-o`, as other commands have it, what this one has instead."""
    if value is not None:
        raise UsageError(f"-o {printable(value)}: report writes a page; name it with --html {printable(value)}")


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=candidates.artifacts)
@click.option("--html", "output", required=True, metavar="OUT.html", type=click.Path(path_type=Path),
              help="Where to write the page.")
@click.option("-o", "--output", "misnamed", hidden=True, is_eager=True, expose_value=False, callback=_name_html)
@click.option("--against", "other", metavar="OTHER", type=click.Path(path_type=Path),
              shell_complete=candidates.artifacts,
              help="Show a second artifact beside it.")
@click.option("--report", "report_path", metavar="PATH", type=click.Path(path_type=Path),
              shell_complete=candidates.json_files,
              help="ARTIFACT's conversion report  [default: the one beside it, if there is one]")
@click.option("--overwrite", is_flag=True, help="Replace an existing page.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def report(
    artifact: Path, output: Path, other: Path | None, report_path: Path | None, overwrite: bool, quiet: bool
) -> None:
    """Write one HTML page about ARTIFACT: sizes, losses by layer and role, scales, every object.

    The page is one file that needs no network. Losses, sources and digests come from the conversion report; without
    one the page shows what the artifact itself tells.

    \b
    Examples:
      ninfer-convert report out.ninfer --html out.html
      ninfer-convert report out.ninfer --html both.html --against smaller.ninfer
    """
    from ninfer_convert.artifact.reader import Artifact
    from ninfer_convert.page.data import Subject
    from ninfer_convert.page.html import page
    from ninfer_convert.run.own_files import write_file
    from ninfer_convert.run.writer import require_output

    with contextlib.ExitStack() as stack:
        first = Subject(
            stack.enter_context(Artifact.open(artifact)),
            report_beside(artifact) if report_path is None else load_report(report_path),
        )
        second = None
        if other is not None:
            second = Subject(stack.enter_context(Artifact.open(other)), report_beside(other))
        protected = [artifact, *([] if other is None else [other]), *([] if report_path is None else [report_path])]
        require_output(output, overwrite=overwrite, protected=protected)
        # A report that was asked for and does not fit is a mistake; one that lies there is only worth a note.
        if report_path is not None and (problem := first.problem()) is not None:
            raise UsageError(f"--report {printable(str(report_path))} is not of this artifact: {problem}")
        _note_problems(first, *([] if second is None else [second]))
        with progress("reading scales", quiet=quiet) as show:
            content = page(first, second, show)
    write_file(output, content)
    say(f"wrote {printable(str(output))}: {size_text(len(content))}")


def _note_problems(*subjects: Subject) -> None:
    for subject in subjects:
        if (problem := subject.problem()) is not None:
            text = "the conversion report beside it is not of this artifact and is not used"
            say(f"note: {subject.artifact.path}: {text}: {problem}", err=True)
