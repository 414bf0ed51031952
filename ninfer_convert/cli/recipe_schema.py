"""`recipe schema`."""

from __future__ import annotations

import click

from ninfer_convert.cli.options import print_json


@click.command("schema")
def print_schema() -> None:
    """Print the JSON schema of recipes (draft 2020-12), by which editors complete keys and explain them.

    \b
    Examples:
      ninfer-convert recipe schema > ninfer-recipe.schema.json

    Editors with the YAML language server are told by a line at the top of a recipe:

    \b
      # yaml-language-server: $schema=ninfer-recipe.schema.json
    """
    from ninfer_convert.recipe.schema import schema

    print_json(schema())
