"""What the tests of recipes share: a recipe with every construct, and loading from text."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer_convert.errors import RecipeError
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import Recipe, ResourceSpec, TensorSpec

FIXTURES = Path(__file__).parent / "fixtures"
SMALL = (FIXTURES / "small_recipe.yaml").read_text(encoding="utf-8")
DIGEST = "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42"
OTHER_DIGEST = "0" * 63 + "a"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GROUPED = "MAXABS_F16_RECIP_RNE_V1"
FP8_ROW = "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"
FP8 = "FP8_E4M3FN_ROW_BF16S"

HEAD = """\
schema: 1
id: t
artifact: {model_id: m, weights_id: w}
evidence: none
sources: {base: {}, other: {}}
"""
"""The beginning of a recipe that wants evidence for nothing."""

TUNE = "schema: 1\nid: tune\nextends: base.yaml\n"
"""The beginning of a recipe that extends `base.yaml`."""


def load(text: str, name: str = "recipe.yaml") -> Recipe:
    Path(name).write_text(text, encoding="utf-8")
    return load_recipe(name)


def messages(text: str, name: str = "recipe.yaml") -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(text, name)
    return list(caught.value.messages)


def tensors(recipe: Recipe) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in recipe.objects if isinstance(spec, TensorSpec)}


def resources(recipe: Recipe) -> dict[str, ResourceSpec]:
    return {spec.name: spec for spec in recipe.objects if isinstance(spec, ResourceSpec)}


def change(*entries: str) -> str:
    """Returns a recipe that extends `base.yaml` and changes it."""
    return TUNE + "change:\n" + "".join(f"  - {entry}\n" for entry in entries)
