"""Writes stand-in checkpoints of a shipped model: the official one, its quantized sibling, the ranking input.

Full shape by default: real names, dtypes, shapes and shards, sparse on disk. With `--miniature` the same
structure with small numbers, every value present, and the shipped recipes rewritten to fit, under `recipes/`.

`llama` is one small checkpoint of a family that no shipped recipe is for: the one of recipes/README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ninfer_convert.stand_in.checkpoints import MODELS, miniature_recipe, write_stand_in
from ninfer_convert.stand_in.llama import write_llama
from ninfer_convert.stand_in.weights import FULL, MINIATURE

LLAMA = "llama"
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def write_miniature_recipes(directory: Path) -> None:
    """Writes every shipped recipe of these models in its miniature form, as `MODEL/WEIGHTS.yaml`."""
    for model in MODELS:
        (directory / model).mkdir(parents=True, exist_ok=True)
        for shipped in sorted((RECIPES / model).glob("*.yaml")):
            text = miniature_recipe(shipped.read_text(encoding="utf-8"))
            (directory / model / shipped.name).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*sorted(MODELS), LLAMA])
    parser.add_argument(
        "directory", type=Path,
        help="made if missing; gets base/, quantized/ and ranking.i64; for llama the checkpoint itself",
    )
    parser.add_argument("--miniature", action="store_true", help="a few megabytes, dense, with recipes to fit")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal bytes (default 0)")
    arguments = parser.parse_args()
    scale = MINIATURE if arguments.miniature else FULL
    if arguments.model == LLAMA and arguments.miniature:
        parser.error("llama has one size; leave --miniature out")
    try:
        if arguments.model == LLAMA:
            write_llama(arguments.directory, arguments.seed)
            print(arguments.directory)
            return
        made = write_stand_in(arguments.model, arguments.directory, scale, arguments.seed)
    except OSError as error:
        sys.exit(f"error: {error}")
    if arguments.miniature:
        write_miniature_recipes(arguments.directory / "recipes")
    for path in (made.base, made.quantized, made.ranking):
        print(path)


if __name__ == "__main__":
    main()
