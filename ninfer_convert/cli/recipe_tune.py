"""`recipe tune`."""

from __future__ import annotations

from pathlib import Path

import click

from ninfer_convert.cli import candidates
from ninfer_convert.cli.options import planned, print_json, where_options
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable


@click.command("tune")
@click.argument("recipe_name", metavar="RECIPE", shell_complete=candidates.recipe_names)
@click.option("--target-size", required=True, metavar="SIZE",
              help="What the artifact may take, such as 16.5GB or 15GiB.")
@click.option("--report", "report_path", required=True, metavar="PATH", type=click.Path(path_type=Path),
              shell_complete=candidates.json_files,
              help="The conversion report of an earlier conversion of the same checkpoint, with `stats`.")
@click.option("--formats", metavar="A,B,...", shell_complete=candidates.format_list,
              help="What objects may become  [default: the four grouped formats]")
@click.option("--objects", "globs", multiple=True, metavar="GLOB", shell_complete=candidates.recipe_objects,
              help="Tune these alone, whatever their present format  [default: all in a grouped format]")
@click.option("--keep", multiple=True, metavar="GLOB", shell_complete=candidates.recipe_objects,
              help="Leave these as they are.")
@click.option("--weight", type=click.Choice(["norm", "elements"]), default="norm", show_default=True,
              help="What the squared relative error of an object is multiplied with: the squared norm of its values, "
              "which needs `rms` in the report, or the number of its elements.")
@where_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; the recipe is in it.")
def tune_recipe(
    recipe_name: str,
    target_size: str,
    report_path: Path,
    formats: str | None,
    globs: tuple[str, ...],
    keep: tuple[str, ...],
    weight: str,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    as_json: bool,
) -> None:
    """Propose a format for each object of RECIPE so that the artifact fits a size with the least squared error.

    Prints a recipe that extends RECIPE. Errors come from the report; those of other formats are estimates. Word
    copies, vectors and resources stay as they are. With --source the checkpoint is planned and held against the
    report; without it the report tells the sizes of resources. Whether an engine runs an object in the proposed
    format is not known here.

    \b
    Examples:
      ninfer-convert recipe tune qwen3.6-27b/groupwise-int --target-size 16GB \\
          --report out.ninfer.conversion.json > smaller.yaml
    """
    from ninfer_convert.allowance import parse_size
    from ninfer_convert.cli.artifact import load_report
    from ninfer_convert.plan.measured import read_measurements
    from ninfer_convert.recipe.loader import load_recipe
    from ninfer_convert.tune.proposal import GROUPED, Wish, planned_inventory, propose, reported_inventory
    from ninfer_convert.tune.text import proposal_json, recipe_text

    names = GROUPED if formats is None else tuple(dict.fromkeys(formats.split(",")))
    wish = Wish(parse_size(target_size), names, globs, keep, by_elements=weight == "elements")
    measurements = read_measurements(load_report(report_path), printable(str(report_path)))
    if sources:
        with planned(recipe_name, sources, inputs, prefixes, unpinned, "headers") as made:
            measurements.require_source(made)
            recipe, inventory = made.recipe, planned_inventory(made)
    else:
        if inputs or prefixes or unpinned:
            raise UsageError("--input, --prefix and --unpinned go with --source")
        recipe = load_recipe(recipe_name)
        inventory = reported_inventory(recipe, measurements)
    proposal = propose(inventory, measurements, wish)
    text = recipe_text(proposal, recipe, recipe_name, measurements)
    if as_json:
        print_json(proposal_json(proposal, measurements) | {"recipe": text})
    else:
        say(text, nl=False)
