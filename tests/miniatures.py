"""Miniature checkpoints, and the shipped recipes at their size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.stand_in.checkpoints import MODELS, StandIn, miniature_recipe, write_stand_in
from ninfer_convert.stand_in.weights import MINIATURE

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"


@dataclass(frozen=True)
class Miniatures:
    """The small stand-ins, by model, and the directory of the recipes rewritten for them."""

    models: Mapping[str, StandIn]
    recipes: Path


def write_miniatures(directory: Path) -> Miniatures:
    """Writes miniature stand-ins of both models, and the recipes for Qwen at their size."""
    models = {model: write_stand_in(model, directory / model, MINIATURE) for model in MODELS}
    for shipped in (*RECIPES.glob("qwen*/*.yaml"), *RECIPES.glob("examples/*.yaml")):
        path = directory / "recipes" / shipped.relative_to(RECIPES)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = miniature_recipe(shipped.read_text(encoding="utf-8"))
        # The last two layers of the fine-tune are 10 and 11 here.
        path.write_text(text.replace("text/layers/6[23]/", "text/layers/1[01]/"), encoding="utf-8")
    return Miniatures(models, directory / "recipes")
