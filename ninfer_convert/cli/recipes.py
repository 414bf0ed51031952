"""`recipe` and `formats`."""

from __future__ import annotations

from typing import Any

import click

from ninfer_convert.cli.groups import Entry, LazyGroup
from ninfer_convert.cli.options import print_json
from ninfer_convert.cli.output import say
from ninfer_convert.formats import FORMATS, DirectFormat, GroupedFormat, NumericFormat
from ninfer_convert.layout import LAYOUT_OF_FORMAT
from ninfer_convert.recipe.counting import plural

SECTIONS = {
    "Commands": {
        "init": Entry("ninfer_convert.cli.recipe_init:init", "Draft a recipe for a checkpoint."),
        "check": Entry("ninfer_convert.cli.recipe_check:check_recipe", "Tell every error and warning, with its place."),
        "show": Entry("ninfer_convert.cli.recipe_show:show_recipe", "Show a recipe written out, or explain objects."),
        "tune": Entry("ninfer_convert.cli.recipe_tune:tune_recipe", "Propose formats that fit a size."),
        "list": Entry("ninfer_convert.cli.recipes:list_recipes", "List the shipped recipes."),
        "schema": Entry("ninfer_convert.cli.recipe_schema:print_schema", "Print the JSON schema, for editors."),
    }
}


@click.group(cls=LazyGroup, sections=SECTIONS)
def recipe() -> None:
    """Draft, check, look at and tune recipes.

    A recipe is one YAML file that says what every stored object of an artifact is made of. RECIPE is such a file, or
    the name of a shipped recipe.

    \b
    Examples:
      ninfer-convert recipe init my-model -o my-model.yaml
      ninfer-convert recipe check my-model.yaml --source my-model
    """


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_recipes(as_json: bool) -> None:
    """List the shipped recipes: name, objects, sources with their repositories.

    Any of the names can be given where a command takes RECIPE.

    \b
    Examples:
      ninfer-convert recipe list
      ninfer-convert recipe list --json
    """
    from ninfer_convert.recipe.files import shipped_recipes
    from ninfer_convert.recipe.loader import load_recipe

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
        say(f"{name:<{width}}  {len(made.objects):>5} {plural(len(made.objects), 'object')}  {repos}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def formats(as_json: bool) -> None:
    """List the nine numeric formats: bits per weight, layout, encoders.

    A recipe names the format of every tensor, and the encoder where there is one to choose. Bits count the
    scales of groups; FP8_E4M3FN_ROW_BF16S takes 16 more per row. What pads rows is not in them.

    \b
    Examples:
      ninfer-convert formats
      ninfer-convert formats --json
    """
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
