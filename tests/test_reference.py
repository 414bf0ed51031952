"""The reference itself: its shortcuts give what the oracle's plain loops give, and it borrows no code under test."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_directory
from miniatures import ROOT
from oracle import fast, layouts
from oracle.encoders import GROUPED
from reference import Array, Reference, encode

from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import TensorSpec

FP8 = "FP8_E4M3FN_ROW_BF16S"


def test_the_reference_takes_only_the_data_of_recipes_from_the_package() -> None:
    lines = (ROOT / "tests" / "reference.py").read_text(encoding="utf-8").splitlines()
    imported = {line.split()[1] for line in lines if line.lstrip().startswith(("from ninfer", "import ninfer"))}
    assert imported == {"ninfer_convert.recipe.expression", "ninfer_convert.recipe.model"}


@pytest.mark.parametrize("name", [*GROUPED, FP8])
@pytest.mark.parametrize("shape", [(1, 1), (7, 65), (40, 200), (9, 128)])
def test_leaving_out_zero_rows_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("reference.JOB_WEIGHTS", 500)
    draw = np.random.default_rng(1)
    words = (draw.standard_normal(shape).astype(np.float32).view("<u4") >> 16).astype("<u2")
    words[1::3] = 0
    # A row of negative zeros is not left out: its FP8 codes could have a sign.
    words[2:3] = 0x8000
    whole = fast.encode_matrix(name, shape, "BF16", words.tobytes())
    assert encode(name, Array("BF16", words)).tobytes() == whole


RECIPE = """\
schema: 1
id: words
artifact: {model_id: m, weights_id: w}
evidence: none
sources: {base: {}}
objects:
  - {name: four, shape: [128, 128], format: NVFP4, words: m}
  - {name: eight, shape: [6, 10], format: FP8_E4M3FN_ROW_BF16S, words: r}
"""


def test_words_are_laid_out_as_the_plain_packers_do(tmp_path: Path) -> None:
    draw = random.Random(2)
    codes = [[draw.randrange(16) for _ in range(128)] for _ in range(128)]
    scales = [[draw.randrange(127) for _ in range(8)] for _ in range(128)]
    rows = [[draw.randrange(127) for _ in range(10)] for _ in range(6)]
    row_scales = [draw.randrange(1, 0x7F80) for _ in range(6)]
    packed = [[low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)] for row in codes]
    tensors = {
        "m.weight_packed": ("U8", np.array(packed, np.uint8)),
        "m.weight_scale": ("F8_E4M3", np.array(scales, np.uint8)),
        "m.weight_global_scale": ("F32", np.array([0x40490FDB], "<u4")),
        "r.weight": ("F8_E4M3", np.array(rows, np.uint8)),
        "r.weight_scale": ("BF16", np.array(row_scales, "<u2").reshape(6, 1)),
    }
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    reference = Reference(load_recipe(tmp_path / "recipe.yaml"), {"base": source})
    four, eight = (reference.payload(spec).tobytes() for spec in reference.specs() if isinstance(spec, TensorSpec))
    assert four == layouts.pack_blockscale(codes, scales, 0x40490FDB)
    assert eight == layouts.pack_row_scale(row_scales, rows)
