"""Quantized checkpoints of a kind that no recipe can read, recognised by config and tensors.

Owns the tell-tale signs. The tensors decide; the config is often spelled differently, stale or absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ninfer_convert.source.header import shown

ACCEPTED_METHODS = ("compressed-tensors", "modelopt")

_SECTIONS = ("quantization_config", "compression_config")
_NONE = ("", "none", "null")


class _Typed(Protocol):
    @property
    def dtype(self) -> str: ...


def foreign_quantization(config: Mapping[str, Any] | None, tensors: Mapping[str, _Typed]) -> str | None:
    """Returns why the checkpoint is quantized in a way that is not read; None when nothing says so.

    Anything odd in the config that does not name another method is passed over.
    """
    accepted = f"accepted: {', '.join(ACCEPTED_METHODS)}, or no quantization"
    for path, method in quantization_methods(config):
        if not method.startswith(ACCEPTED_METHODS):
            return f"config.json: {path} is {shown(method)}; {accepted}"
    sign = _tell_tale(tensors)
    return f"{sign}; {accepted}" if sign else None


def quantization_methods(config: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yields every quantization method a config names, in lower case, with the path of the member."""
    nested = [(f"{key}.", value) for key, value in (config or {}).items() if isinstance(value, dict)]
    for prefix, scope in [("", config or {}), *nested]:
        for section in _SECTIONS:
            block = scope.get(section)
            method = block.get("quant_method") if isinstance(block, dict) else None
            # Some writers store the text of an enumeration member, QuantizationMethod.GPTQ.
            text = method.strip().lower().removeprefix("quantizationmethod.") if isinstance(method, str) else ""
            if text.replace("_", "-").startswith(ACCEPTED_METHODS[0]):
                text = ACCEPTED_METHODS[0]
            if text not in _NONE:
                yield f"{prefix}{section}.quant_method", text


def _tell_tale(tensors: Mapping[str, _Typed]) -> str | None:
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        beginning = f"{module}." if module else ""

        def beside(member: str, beginning: str = beginning) -> bool:
            return f"{beginning}{member}" in tensors

        where = f"tensor {shown(name)} ({tensor.dtype}) beside"
        if last == "qweight" and beside("scales"):
            return f"{where} {shown(beginning)}scales: weights are GPTQ or AWQ"
        if last == "weight" and beside("SCB"):
            return f"{where} {shown(beginning)}SCB: weights are bitsandbytes int8"
        if last == "weight" and tensor.dtype == "U8" and beside("weight.absmax"):
            return f"{where} {shown(name)}.absmax: weights are bitsandbytes 4-bit"
        if last == "weight" and tensor.dtype == "U32" and beside("scales"):
            also = " and biases" if beside("biases") else ""
            return f"{where} {shown(beginning)}scales{also}: weights are MLX"
    return None
