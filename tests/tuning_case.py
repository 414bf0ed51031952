"""A conversion whose report tells what was lost, measured here and not by the converter, for `--set` and `tune`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from case_tools import FP8, Q4, Q5, Q6, W8, Case, entry, nvfp4
from checkpoints import bf16
from oracle.encoders import GROUPED

from ninfer_convert.artifact.decode import read_values
from ninfer_convert.artifact.reader import Artifact

LAYERS = 12
SHAPES = {"up": (96, 128), "down": (64, 320)}
Values = Mapping[str, np.ndarray[Any, Any]]


def drawn() -> dict[str, np.ndarray[Any, Any]]:
    """Returns the values of every matrix: normal, their norms a factor of 40 apart, tails heavier here and there."""
    draw = np.random.default_rng(7)
    found = {}
    for layer in range(LAYERS):
        for role, shape in SHAPES.items():
            tails = draw.standard_t(5, shape) if layer % 3 == 0 else draw.standard_normal(shape)
            found[f"layers/{layer}/{role}"] = (tails * 2.0 ** draw.uniform(-6, -1)).astype(np.float32)
    found["head"] = draw.standard_normal((160, 128)).astype(np.float32)
    found["rows"] = draw.standard_normal((40, 96)).astype(np.float32)
    return {name: _as_bf16(values) for name, values in found.items()}


def _as_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


class TuningCase(Case):
    """Twelve layers of two matrices, a head, an FP8 matrix, a word copy, a vector, a BF16 matrix, resources."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.values = drawn()
        tensors = {name.replace("/", "."): bf16(values) for name, values in self.values.items()}
        tensors |= {"norm": bf16(np.ones(128)), "plain": bf16(np.full((8, 128), 0.5)), **nvfp4("copied")}
        self.source({"model.safetensors": tensors}, files={"notes.txt": b"n" * 1000})
        self.write()

    def write(self, *, up: str = Q5, down: str = Q6, more: str = "") -> None:
        """Writes the recipe."""
        loop = ", ".join(
            entry(f"layers/<l>/{role}", SHAPES[role], numeric, f"layers.<l>.{role}")
            for role, numeric in (("up", up), ("down", down))
        )
        self.recipe(
            "{resource: notes, file: notes.txt}",
            entry("norm", [128], "BF16", "norm"),
            f"{{for: {{l: all}}, objects: [{loop}]}}",
            entry("head", [160, 128], W8, "head"),
            "{resource: again, file: notes.txt}",
            entry("rows", [40, 96], FP8, "rows"),
            entry("plain", [8, 128], "BF16", "plain"),
            entry("copied", [128, 64], "NVFP4", "copied", words=True),
            more=f"sets: {{all: {{from: 0, through: {LAYERS - 1}}}}}\n"
            f"ignore: [copied.input_global_scale]\n{more}",
        )

    def measured_report(self) -> dict[str, Any]:
        """Converts, and returns the report with statistics of every matrix that was encoded."""
        self.run("--overwrite")
        report = self.report()
        for item in report["objects"]:
            item.pop("stats", None)
            if item["name"] in self.values:
                item["stats"] = self.stats(item["name"])
        return report

    def stats(self, name: str) -> dict[str, float]:
        """Returns relative error and root mean square of one object of the artifact, in binary64."""
        values = self.values[name].astype(np.float64)
        error = np.linalg.norm(values - self.represented(name)) / np.linalg.norm(values)
        return {"relative_l2": float(error), "rms": math.sqrt(float(np.mean(values**2)))}

    def represented(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the represented values: codes times scales, as the oracle unpacks them, where it can."""
        if self.objects()[name].format in GROUPED:
            scales, codes = self.grouped(name)
            wide = np.array(scales, np.uint16).view(np.float16).astype(np.float64)
            group = 32 if self.objects()[name].format == W8 else 64
            return np.repeat(wide, group, axis=1)[:, : len(codes[0])] * np.array(codes)
        with Artifact.open(self.output) as opened:
            return read_values(opened, name, 0, self.values[name].shape[0]).astype(np.float64)

    def save(self, report: Mapping[str, Any]) -> Path:
        """Writes a report where nothing else is."""
        path = self.root / "measured.json"
        path.write_text(json.dumps(report), encoding="utf-8")
        return path


__all__ = ["FP8", "LAYERS", "Q4", "Q5", "Q6", "SHAPES", "W8", "TuningCase"]
