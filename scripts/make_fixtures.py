"""Makes `tests/fixtures/compressed_tensors/`: modules quantized and saved by the compressed-tensors package itself.

The checkpoint as the package writes it; its own dequantization of every module as a second opinion, once in
binary32 and once as its decompression gives it (BF16); and a JSON file with the versions. Run it in an
environment that has compressed-tensors and torch (the project needs neither), and only when the package has
changed; the files are committed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

DIRECTORY = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "compressed_tensors"
NVFP4_MODULES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FUSED = ("mlp.gate_proj", "mlp.up_proj")
"""Modules that execute as one matrix: the publisher gives them one global scale."""
FP8_MODULES = ("self_attn.o_proj",)


def build_model() -> torch.nn.Module:
    """Returns a seeded BF16 model with an outlier, a row of zeros and a group of zeros."""
    generator = torch.Generator().manual_seed(20260101)
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.self_attn = torch.nn.Module()
    for name, (n, k) in {
        "mlp.gate_proj": (64, 64),
        "mlp.up_proj": (64, 64),
        "mlp.down_proj": (128, 64),
        "self_attn.o_proj": (40, 96),
    }.items():
        parent, child = name.split(".")
        linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        weight = torch.randn(n, k, generator=generator) * 0.02
        weight[1, 3] = 0.7
        weight[2, :16] = 0.0
        weight[5] = 0.0
        linear.weight = torch.nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
        setattr(getattr(model, parent), child, linear)
    return model


def calibrate(model: torch.nn.Module) -> None:
    """Sets the scales that a calibration run sets, by the package's own formulas."""
    peaks = {name: model.get_submodule(name).weight.float().abs().amax() for name in NVFP4_MODULES}
    shared = torch.stack([peaks[name] for name in FUSED]).amax()
    for name in NVFP4_MODULES:
        linear = model.get_submodule(name)
        groups = linear.weight.float().unflatten(-1, (-1, 16))
        peak = shared if name in FUSED else peaks[name]
        divisor = generate_gparam(-peak, peak)
        scale, _ = calculate_qparams(
            groups.amin(-1), groups.amax(-1), linear.quantization_scheme.weights, global_scale=divisor
        )
        linear.weight_global_scale.data.copy_(divisor)
        linear.weight_scale.data = scale.to(linear.weight_scale.dtype)
        activations = torch.tensor(7.3 if name in FUSED else 2.9)
        linear.input_global_scale.data.copy_(generate_gparam(-activations, activations))
    for name in FP8_MODULES:
        linear = model.get_submodule(name)
        rows = linear.weight
        scale, _ = calculate_qparams(
            rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True), linear.quantization_scheme.weights
        )
        linear.weight_scale.data.copy_(scale)


def second_opinion(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns each module's values by the package's dequantization, computed in binary32."""
    values = {}
    for name in (*NVFP4_MODULES, *FP8_MODULES):
        linear = model.get_submodule(name)
        args = linear.quantization_scheme.weights
        if name in NVFP4_MODULES:
            n, half_k = linear.weight_packed.shape
            codes = unpack_fp4_from_uint8(linear.weight_packed, n, half_k * 2, dtype=torch.float32)
            divisor = linear.weight_global_scale
        else:
            codes, divisor = linear.weight.float(), None
        scale = linear.weight_scale.float()
        values[name] = dequantize(codes, scale, args=args, dtype=torch.float32, global_scale=divisor)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DIRECTORY, help="default: %(default)s")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)

    model = build_model()
    groups = {
        "group_0": QuantizationScheme(
            **preset_name_to_scheme("NVFP4", [f"re:.*{name}$" for name in NVFP4_MODULES]).model_dump()
        ),
        "group_1": QuantizationScheme(
            **preset_name_to_scheme("FP8_DYNAMIC", [f"re:.*{name}$" for name in FP8_MODULES]).model_dump()
        ),
    }
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    calibrate(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "fixture"}\n', encoding="utf-8")
    compressor.update_config(str(directory))

    save_file(second_opinion(model), directory / "dequantized-fp32.safetensors")
    compressor.decompress_model(model)
    decompressed = {name: model.get_submodule(name).weight.data for name in (*NVFP4_MODULES, *FP8_MODULES)}
    save_file(decompressed, directory / "dequantized-bf16.safetensors")
    versions = {"compressed-tensors": compressed_tensors.__version__, "torch": torch.__version__}
    (directory / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
