"""The arithmetic inside the kernels, against numpy, ml_dtypes and the oracle, over every word or a dense sample."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from oracle import casts

from ninfer_convert.encode import compiled, interface, kernels
from ninfer_convert.encode.rows import SOURCE_DTYPES, encode_rows
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import geometry

ROOT = Path(__file__).parents[1]
COMPILED = {name: value for name, value in vars(kernels).items() if hasattr(value, "targetoptions")}
ENTRY_POINTS = set(interface.SIGNATURES)

round_f16, round_e4m3, widen_f16 = kernels._round_to_f16, kernels._round_to_e4m3, kernels._f16_to_f32


@numba.njit(error_model="numpy")
def all_to_f32(words, out):
    for i in range(words.size):
        out[i] = widen_f16(words[i])


@numba.njit(error_model="numpy")
def all_to_f16(words, out):
    for i in range(words.size):
        out[i] = round_f16(np.uint32(words[i]).view(np.float32))


@numba.njit(error_model="numpy")
def all_to_e4m3(words, out):
    for i in range(words.size):
        out[i] = round_e4m3(np.uint32(words[i]).view(np.float32))


def words_around(low_bits):
    """Returns every upper part of a binary32 word with the lower parts where a rounding turns, and random words."""
    half = 1 << (low_bits - 1)
    lower = np.array([0, 1, half - 1, half, half + 1, 2 * half - 1], np.uint32)
    upper = np.arange(1 << (32 - low_bits), dtype=np.uint32) << np.uint32(low_bits)
    random = np.random.default_rng(2).integers(0, 1 << 32, 1 << 20, np.uint32)
    return np.concatenate([(upper[:, None] | lower).reshape(-1), random])


def f16_of(words):
    out = np.empty(words.size, np.uint32)
    all_to_f16(words, out)
    return out


def f16_differences(words):
    """Returns the words of values >= 0 that the kernel rounds otherwise than numpy; any word >= 0x7C00 is infinity."""
    with np.errstate(over="ignore"):
        expected = words.view(np.float32).astype(np.float16).view(np.uint16)
    return words[np.minimum(f16_of(words), 0x7C00) != expected]


def test_scales_round_to_binary16_as_numpy_rounds():
    words = words_around(13)
    assert f16_differences(words[words <= 0x7F800000]).tolist() == []


@pytest.mark.heavy
def test_all_positive_binary32_words_round_to_binary16_as_numpy_rounds():
    step = 1 << 23
    tiny, too_large = 0x33000000, 0x477FF000
    for begin in range(0, 0x7F800000, step):
        words = np.arange(begin, begin + step, dtype=np.uint32)
        assert f16_differences(words[(words > tiny) & (words < too_large)]).tolist() == []
        assert f16_of(words[words <= tiny]).max(initial=0) == 0
        assert f16_of(words[words >= too_large]).min(initial=0x7C00) == 0x7C00


@pytest.mark.parametrize("low_bits", [16, 20])
def test_e4m3_rounds_as_ml_dtypes_rounds(low_bits):
    words = words_around(low_bits)
    words = words[np.abs(words.view(np.float32)) <= 448]
    found = np.empty(words.size, np.uint8)
    all_to_e4m3(words, found)
    expected = words.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert words[found != expected].tolist() == []


def test_floating_point_is_neither_contracted_nor_reassociated():
    assert set(COMPILED) >= ENTRY_POINTS
    for name, kernel in COMPILED.items():
        assert not kernel.targetoptions.get("fastmath"), name
        assert not kernel.targetoptions.get("parallel"), name
        assert kernel.targetoptions["nogil"], name
        assert kernel.targetoptions["error_model"] == "numpy", name


def test_every_entry_point_has_a_kernel():
    assert {kernel.name for kernel in compiled.KERNELS.values()} == ENTRY_POINTS


def test_importing_compiles_nothing_loads_no_compiler_and_touches_no_directory(tmp_path):
    script = (
        "import sys\n"
        "from ninfer_convert.encode import block_maker, compiled, rows, words\n"
        "assert not any(kernel._function for kernel in compiled.KERNELS.values())\n"
        "assert 'numba' not in sys.modules\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


def test_all_binary16_words_widen_exactly():
    words = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.uint32)
    all_to_f32(words, out)
    assert out.tolist() == [casts.f16_to_f32(word) for word in range(65536)]


def digests():
    """Returns a digest of the planes and the loss of one matrix, for every encoder and every source dtype."""
    weights = np.random.default_rng(3).standard_normal((5, 2749), dtype=np.float32)
    weights *= np.float32(10) ** np.linspace(-9, 3, 5, dtype=np.float32)[:, None]
    sources = {
        "BF16": (weights.view("<u4") >> np.uint32(16)).astype("<u2"),
        "F16": weights.astype("<f2").view("<u2"),
        "F32": weights.view("<u4"),
    }
    result = {}
    for numeric in FORMATS.values():
        for dtype in SOURCE_DTYPES if numeric.encoders else ():
            planes = {
                plane.name: np.empty((5, plane.row_bytes), np.uint8) for plane in geometry(numeric, (5, 2749)).planes
            }
            loss = np.zeros(interface.LOSS_WORDS, np.int64)
            encode_rows(numeric, dtype, sources[dtype], planes, loss)
            content = b"".join(planes[name].tobytes() for name in sorted(planes)) + loss.tobytes()
            result[f"{numeric.name} {dtype}"] = hashlib.sha256(content).hexdigest()
    return result


def test_a_processor_without_vector_units_makes_the_same_bytes(tmp_path):
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    script = "import test_kernels; print(test_kernels.digests())"
    found = subprocess.run([sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True)
    expected = digests()
    assert len(expected) == 15
    assert found.stdout.strip() == str(expected)
