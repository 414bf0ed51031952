"""`recipe schema`."""

from __future__ import annotations

import click

from ninfer_convert.cli.options import print_json


@click.command("schema")
def print_schema() -> None:
    """Print the JSON schema of recipes (draft 2020-12), by which editors complete keys and explain them.

    \b
    ninfer-convert recipe schema > ninfer-recipe.schema.json
    and as first line of a recipe, for editors with the YAML language server:
    # yaml-language-server: $schema=ninfer-recipe.schema.json
    """
    from ninfer_convert.recipe.schema import schema

    print_json(schema())
