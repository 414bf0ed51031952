"""`recipe init`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ninfer_convert.cli import candidates
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.formats import FORMATS, W8G32_F16S
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.scalars import IDENTIFIER

DEFAULT_NAMES = ("base", "quantized")
"""What sources without a name are called, as in the shipped recipes."""

ENCODED_FORMATS = tuple(name for name, numeric in FORMATS.items() if numeric.encoders)


@click.command("init")
@click.argument("places", metavar="[NAME=]SOURCE...", nargs=-1, required=True,
                shell_complete=candidates.places)
@click.option("-o", "--output", metavar="RECIPE.yaml", type=click.Path(path_type=Path),
              help="Write the recipe there  [default: standard output]")
@click.option("--matrix", type=click.Choice(ENCODED_FORMATS),
              help="Format of matrices; a draft of its own, whether or not a shipped recipe fits  "
              f"[default: {W8G32_F16S.name}, if none fits]")
@click.option("--input", "inputs", multiple=True, metavar="NAME=PATH", shell_complete=candidates.inputs,
              help="An auxiliary input file of the shipped recipe that fits; its digest becomes the recipe's.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def init(
    places: tuple[str, ...], output: Path | None, matrix: str | None, inputs: tuple[str, ...], overwrite: bool
) -> None:
    """Draft a recipe for checkpoints, from their headers; it can be planned and run as it is.

    SOURCE is a directory, a .safetensors file, or hf://owner/name[@revision]. Of several sources, encoded words come
    first, then what stands first. Where a shipped recipe fits, the draft extends it and says what differs.

    \b
    Examples:
      ninfer-convert recipe init my-model -o my-model.yaml
      ninfer-convert recipe init my-model --matrix Q5G64_F16S > five-bits.yaml
      ninfer-convert run my-model.yaml --source my-model -o my-model.ninfer
    """
    # the help of the command does not wait for numpy
    from ninfer_convert.draft.draft import draft_recipe
    from ninfer_convert.draft.opening import opened
    from ninfer_convert.run.own_files import write_file
    from ninfer_convert.run.writer import require_output

    named = _named(places)
    files = {name: Path(path) for name, path in _input_paths(inputs).items()}
    with opened(named) as sources:
        protected = [Path(path) for checkpoint in sources.values() for path in checkpoint.paths()]
        if output is not None:
            require_output(output, overwrite=overwrite, protected=[*protected, *files.values()])
        for checkpoint in sources.values():
            for warning in checkpoint.warnings:
                say(f"warning: {warning}", err=True)
        draft = draft_recipe(sources, files, FORMATS[matrix] if matrix else None)
    for note in draft.notes:
        say(f"note: {note}", err=True)
    if output is None:
        say(draft.text, nl=False)
        return
    write_file(output, draft.text.encode())
    origin = f"extends {draft.extends}" if draft.extends else "stands alone"
    say(f"wrote {printable(str(output))}: {counted(draft.objects, 'object')}; {origin}")


def _named(places: tuple[str, ...]) -> dict[str, str]:
    """Returns the sources by name, in their order."""
    named: dict[str, str] = {}
    for number, text in enumerate(places):
        name, equals, where = text.partition("=")
        # A path may hold an equals sign.
        if not equals or not IDENTIFIER.fullmatch(name) or os.path.lexists(text):
            name, where = (*DEFAULT_NAMES, *(f"source{place}" for place in range(3, number + 2)))[number], text
        if name in named:
            raise UsageError(f"source {name} is given twice; write NAME=SOURCE to tell them apart")
        if not where:
            raise UsageError(f"source {name} has no place; write NAME=SOURCE")
        named[name] = where
    return named


def _input_paths(texts: tuple[str, ...]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise UsageError(f"--input {printable(text)}: write NAME=PATH")
        if name in paths:
            raise UsageError(f"--input {printable(name)} is given twice")
        paths[name] = path
    return paths
