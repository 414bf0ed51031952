"""`completion`."""

from __future__ import annotations

import click

from ninfer_convert.cli.output import say
from ninfer_convert.cli.shells import SHELLS


@click.command()
@click.argument("shell", type=click.Choice(sorted(SHELLS)))
def completion(shell: str) -> None:
    """Print the completion script of SHELL: bash (4.4 or later), zsh or fish.

    It completes commands and options, recipes, names of sources and inputs, names of objects (of the artifact or the
    recipe that stands on the line), formats and files. For this session:

    \b
    bash  source <(ninfer-convert completion bash)
    zsh   source <(ninfer-convert completion zsh)
    fish  ninfer-convert completion fish | source

    For every session, once:

    \b
    bash  echo 'source <(ninfer-convert completion bash)' >> ~/.bashrc
    zsh   mkdir -p ~/.zfunc
          ninfer-convert completion zsh > ~/.zfunc/_ninfer-convert
          and in ~/.zshrc, once and before compinit: fpath+=(~/.zfunc)
    fish  mkdir -p ~/.config/fish/completions && cd ~/.config/fish/completions
          ninfer-convert completion fish > ninfer-convert.fish
    """
    say(SHELLS[shell].source_template, nl=False)
