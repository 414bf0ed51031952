"""`recipe` and `formats`."""

from __future__ import annotations

from typing import Any

import click

from ninfer_convert.cli.options import print_json
from ninfer_convert.cli.output import say
from ninfer_convert.cli.recipe_check import check_recipe
from ninfer_convert.cli.recipe_init import init
from ninfer_convert.cli.recipe_schema import print_schema
from ninfer_convert.cli.recipe_show import show_recipe
from ninfer_convert.cli.recipe_tune import tune_recipe
from ninfer_convert.formats import FORMATS, DirectFormat, GroupedFormat, NumericFormat
from ninfer_convert.layout import LAYOUT_OF_FORMAT
from ninfer_convert.recipe.files import shipped_recipes
from ninfer_convert.recipe.loader import load_recipe


@click.group()
def recipe() -> None:
    """Look at recipes."""


recipe.add_command(check_recipe)
recipe.add_command(init)
recipe.add_command(print_schema)
recipe.add_command(show_recipe)
recipe.add_command(tune_recipe)


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
