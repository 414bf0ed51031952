"""Checkpoints of quantization methods that are not read are told by config or tensors, never by a KeyError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ninfer_convert.source.quantization import foreign_quantization, quantization_methods


@dataclass(frozen=True)
class Typed:
    dtype: str


def tensors(**dtypes: str) -> dict[str, Typed]:
    return {name.replace("__", "."): Typed(dtype) for name, dtype in dtypes.items()}


ACCEPTED = "; accepted: compressed-tensors, modelopt, or no quantization"


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "hqq", "quark", "GPTQ"])
def test_other_methods_are_named_with_what_is_accepted(method: str) -> None:
    reason = foreign_quantization({"quantization_config": {"quant_method": method}}, {})
    assert reason == f"config.json: quantization_config.quant_method is {method.lower()}{ACCEPTED}"


def test_a_nested_block_and_an_enumeration_text_are_understood() -> None:
    nested = {"text_config": {"quantization_config": {"quant_method": "QuantizationMethod.AWQ"}}}
    assert foreign_quantization(nested, {}) == (
        f"config.json: text_config.quantization_config.quant_method is awq{ACCEPTED}"
    )


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"quantization_config": None},
        {"quantization_config": []},
        {"quantization_config": "nvfp4"},
        {"quantization_config": {}},
        {"quantization_config": {"quant_method": None}},
        {"quantization_config": {"quant_method": 7}},
        {"quantization_config": {"quant_method": "none"}},
        {"quantization_config": {"config_groups": {"FP8_DYNAMIC": {}}, "quant_method": "compressed-tensors"}},
        {"quantization_config": {"quant_method": "compressed_tensors"}},
        {"quantization_config": {"quant_algo": "MIXED_PRECISION", "producer": {"name": "modelopt"}}},
        {"quantization_config": {"quant_method": "modelopt"}},
        {"text_config": {"quantization_config": {"quant_method": "modelopt_fp4"}}},
        {"text_config": None, "layers": [1, 2]},
    ],
)
def test_accepted_and_odd_configs_are_no_reason(config: dict[str, Any] | None) -> None:
    assert foreign_quantization(config, tensors(m__weight_packed="U8", m__weight_scale="F8_E4M3")) is None


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (tensors(m__qweight="I32", m__scales="F16"), "tensor m.qweight (I32) beside m.scales: weights are GPTQ or AWQ"),
        (tensors(qweight="I32", scales="F16"), "tensor qweight (I32) beside scales: weights are GPTQ or AWQ"),
        (tensors(m__weight="I8", m__SCB="F32"), "tensor m.weight (I8) beside m.SCB: weights are bitsandbytes int8"),
        ({"m.weight": Typed("U8"), "m.weight.absmax": Typed("F32")},
         "tensor m.weight (U8) beside m.weight.absmax: weights are bitsandbytes 4-bit"),
        (tensors(w__weight="U32", w__scales="BF16", w__biases="BF16"),
         "tensor w.weight (U32) beside w.scales and biases: weights are MLX"),
        (tensors(w__weight="U32", w__scales="U8"), "tensor w.weight (U32) beside w.scales: weights are MLX"),
    ],
)  # fmt: skip
def test_tell_tale_tensors_are_named(stored: dict[str, Typed], reason: str) -> None:
    assert foreign_quantization(None, stored) == reason + ACCEPTED
    stated = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert foreign_quantization(stated, stored) == reason + ACCEPTED


@pytest.mark.parametrize(
    "stored",
    [
        tensors(m__weight="BF16", m__bias="BF16"),
        tensors(m__qweight="I32", n__scales="F16"),
        tensors(m__weight="BF16", m__scales="F16", m__biases="F16"),
        tensors(m__weight="F8_E4M3", m__weight_scale="BF16"),
    ],
)
def test_ordinary_tensors_are_no_sign(stored: dict[str, Typed]) -> None:
    assert foreign_quantization(None, stored) is None


def test_every_method_a_config_names_is_listed_with_its_path() -> None:
    config = {
        "quantization_config": {"quant_method": "Compressed_Tensors"},
        "compression_config": {"quant_method": "x"},
        "vision_config": {"quantization_config": {"quant_method": "y"}},
    }
    assert list(quantization_methods(config)) == [
        ("quantization_config.quant_method", "compressed-tensors"),
        ("compression_config.quant_method", "x"),
        ("vision_config.quantization_config.quant_method", "y"),
    ]
