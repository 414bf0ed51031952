"""`recipe show`: the expanded recipe, one object explained, two recipes compared."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ninfer_convert.cli import candidates
from ninfer_convert.cli.options import opened_sources, place_options, print_json
from ninfer_convert.cli.output import say
from ninfer_convert.errors import RecipeError, UsageError, printable
from ninfer_convert.recipe.diff import difference, difference_text
from ninfer_convert.recipe.files import Document
from ninfer_convert.recipe.globs import Globs, too_many
from ninfer_convert.recipe.loader import load_recipe, read_recipe
from ninfer_convert.recipe.model import Recipe, ResourceSpec
from ninfer_convert.recipe.origins import Origins, line_json
from ninfer_convert.recipe.problems import Problems, quoted
from ninfer_convert.recipe.render import beyond_limits, expanded, recipe_text


@click.command("show")
@click.argument("recipe_name", metavar="RECIPE", shell_complete=candidates.recipe_names)
@click.option("--object", "names", multiple=True, metavar="NAME|GLOB", shell_complete=candidates.recipe_objects,
              help="Explain these objects; with --diff, compare nothing but them.")
@click.option("--diff", "other", metavar="OTHER", shell_complete=candidates.recipe_names,
              help="Show what changes from RECIPE to recipe OTHER.")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show_recipe(
    recipe_name: str,
    names: tuple[str, ...],
    other: str | None,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show RECIPE with `extends`, loops, sets, names and changes worked in: a recipe that does the same.

    --object explains objects instead: the lines that decided them, what they are made of step by step, their
    bytes; with --source also the tensors they read, from headers alone. --diff compares two recipes.

    Exit code: 1 if two recipes differ, or if an object that is explained has problems.

    \b
    Examples:
      ninfer-convert recipe show my-tune.yaml
      ninfer-convert recipe show demo --object 'text/layers/0/*'
      ninfer-convert recipe show qwen3.6-27b/groupwise-int --diff my-tune.yaml
    """
    where = {"--source": sources, "--input": inputs, "--prefix": prefixes}
    for option, given in where.items():
        if given and (other is not None or not names):
            raise UsageError(f"{option} goes with --object, which explains what is read; without it nothing is")
        if given and not sources:
            raise UsageError(f"{option} needs --source")
    if other is not None:
        return _show_difference(load_recipe(recipe_name), load_recipe(other), names, as_json=as_json)
    reading = read_recipe(recipe_name, Problems())
    if names:
        with contextlib.ExitStack() as stack:
            opened = None
            if sources:
                opened = stack.enter_context(opened_sources(reading.recipe, sources, inputs, prefixes, "headers"))
            found = _explained(reading.recipe, reading.chain, _chosen(names, [reading.recipe]), opened)
        return _show_objects(found, as_json=as_json)
    document = expanded(reading.recipe)
    text = recipe_text(document)
    if excess := beyond_limits(document, text):
        say(f"note: written out, the recipe cannot be loaded again: {excess}", err=True)
    if as_json:
        print_json(document)
    else:
        say(text, nl=False)
    return 0


def _show_difference(here: Recipe, there: Recipe, names: Sequence[str], *, as_json: bool) -> int:
    found = difference(here, there, set(_chosen(names, [here, there])) if names else None)
    if as_json:
        print_json(found)
    else:
        say(difference_text(found))
    return 0 if found["equal"] else 1


def _explained(recipe: Recipe, chain: Sequence[Document], names: Iterable[str], opened: Any) -> list[dict[str, Any]]:
    # numpy loads here, for the values that the headers may hold.
    from ninfer_convert.plan.explain import Explainer

    explainer = Explainer(recipe) if opened is None else Explainer(recipe, *opened)
    origins = Origins(recipe, chain)
    specs = {spec.name: spec for spec in recipe.objects}
    found = []
    for spec in map(specs.__getitem__, names):
        made = explainer.resource(spec) if isinstance(spec, ResourceSpec) else explainer.tensor(spec)
        found.append({**made, "lines": [line_json(line) for line in origins.lines(spec)]})
    return found


def _show_objects(found: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    from ninfer_convert.plan.explain_text import explanation_text

    if as_json:
        print_json({"objects": found})
    else:
        say("\n\n".join(map(explanation_text, found)))
    return 1 if any(made["problems"] for made in found) else 0


def _chosen(patterns: Sequence[str], recipes: Sequence[Recipe]) -> list[str]:
    """Returns the names of the objects that are meant, in stored order, each once."""
    names = dict.fromkeys(spec.name for recipe in recipes for spec in recipe.objects)
    globs, chosen = Globs(), set()
    for pattern in patterns:
        found = globs.matching(pattern, names)
        if found is None:
            raise RecipeError(too_many())
        # A name may have brackets of its own.
        if not found and pattern not in names:
            raise RecipeError(_unknown(pattern, names, recipes))
        chosen.update(found or [pattern])
    return [name for name in names if name in chosen]


def _unknown(pattern: str, names: Iterable[str], recipes: Sequence[Recipe]) -> str:
    known = " or ".join(recipe.id for recipe in recipes)
    near = difflib.get_close_matches(pattern, list(names), n=3)
    hint = f"; nearest: {', '.join(map(printable, near))}" if near else ""
    return f"no object of recipe {printable(known)} is named {quoted(pattern)}{hint}"
