"""What every command prints goes through here: nothing that a stranger can name changes a terminal's state."""

from __future__ import annotations

import click

from ninfer_convert.errors import printable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints lines; whatever in them is not printable is escaped."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)
