"""`recipe` and `formats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ninfer_convert.cli.options import print_json
from ninfer_convert.cli.output import say
from ninfer_convert.cli.recipe_init import init
from ninfer_convert.cli.recipe_show import show_recipe
from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS, DirectFormat, GroupedFormat, NumericFormat
from ninfer_convert.layout import LAYOUT_OF_FORMAT
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.files import locate, shipped_recipes
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import Recipe
from ninfer_convert.recipe.problems import WrongRecipeError


@click.group()
def recipe() -> None:
    """Look at recipes."""


recipe.add_command(init)
recipe.add_command(show_recipe)


@recipe.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_recipes(as_json: bool) -> None:
    """List the shipped recipes: name, artifact, objects, sources."""
    loaded = [(name, load_recipe(name)) for name in shipped_recipes()]
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "id": made.id,
                    "model_id": made.model_id,
                    "weights_id": made.weights_id,
                    "objects": len(made.objects),
                    "sources": {key: source.repo for key, source in made.sources.items()},
                    "inputs": list(made.inputs),
                }
                for name, made in loaded
            ]
        )
        return
    width = max((len(name) for name, _ in loaded), default=0)
    for name, made in loaded:
        repos = ", ".join(f"{key} = {source.repo}" if source.repo else key for key, source in made.sources.items())
        say(f"{name:<{width}}  {len(made.objects):>5} objects  {repos}")


@recipe.command("check")
@click.argument("recipe_name", metavar="RECIPE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check_recipe(recipe_name: str, as_json: bool) -> int:
    """Check RECIPE, a file or a shipped recipe, without any checkpoint; every problem is told with its place."""
    path = locate(recipe_name)
    file = printable(path)
    made: Recipe | None = None
    problems: Sequence[tuple[Mark, str]] = ()
    try:
        made = load_recipe(path)
    except WrongRecipeError as error:
        problems = error.problems
    if as_json:
        listed = [{"file": at.file, "line": at.line, "column": at.column, "message": text} for at, text in problems]
        count = None if made is None else len(made.objects)
        print_json({"ok": made is not None, "recipe": file, "objects": count, "problems": listed})
    elif made is None:
        for mark, text in problems:
            say(f"{mark}: {text}")
    else:
        say(f"{file}: {len(made.objects)} objects, {len(made.sources)} sources: no problems")
    return 1 if made is None else 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def formats(as_json: bool) -> None:
    """List the nine numeric formats with their layouts and encoders."""
    rows = [_row(numeric) for numeric in FORMATS.values()]
    if as_json:
        print_json(rows)
        return
    say(f"{'format':<22}{'bits':>6}  {'layout':<26}encoder")
    for row in rows:
        encoders = ", ".join(row["encoders"]) or ("word copy" if row["format"] == "NVFP4" else "words as they are")
        say(f"{row['format']:<22}{row['bits_per_weight']:>6}  {row['layout']:<26}{encoders}")


def _row(numeric: NumericFormat) -> dict[str, Any]:
    if isinstance(numeric, DirectFormat):
        bits: float = numeric.word_bytes * 8
    elif isinstance(numeric, GroupedFormat):
        bits = numeric.code_bits + 16 / numeric.group
    else:
        bits = numeric.code_bits + (8 / 16 if numeric.code_bits == 4 else 0)
    return {
        "format": numeric.name,
        "kind": numeric.kind,
        "bits_per_weight": bits,
        "layout": LAYOUT_OF_FORMAT[numeric.name],
        "encoders": list(numeric.encoders),
    }
