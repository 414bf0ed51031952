"""Rates of the kernels beside a plain copy: what one thread encodes or packs, and what two threads gain.

A ratio compares medians of runs that alternate within one process, over the same source bytes and with
destinations that have been written before, so that neither page faults nor the machine's load decide it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.encode.rows import SOURCE_DTYPES, encode_rows
from ninfer_convert.encode.words import pack_fp8_rows, pack_nvfp4_rows
from ninfer_convert.formats import FORMATS, NVFP4, GroupedFormat, RowScaledFormat
from ninfer_convert.layout import geometry

Array = npt.NDArray[Any]
Runs = Mapping[str, Callable[[], object]]

SOURCE_BYTES = 256 << 20
BLOCK_BYTES = 2 << 20
"""Of the row blocks that the threads work on, as in a conversion."""

K = 5120
ENCODED = tuple(f for f in FORMATS.values() if isinstance(f, (GroupedFormat, RowScaledFormat)))
GGML = {"Q4G64_F16S": "Q4_0", "Q5G64_F16S": "Q5_0", "W8G32_F16S": "Q8_0"}
"""The ggml type of about the same size for each format that has one."""

TARGETS = {
    ("BF16", "Q4G64_F16S"): 0.65,
    ("BF16", "Q5G64_F16S"): 0.5,
    ("BF16", "Q6G64_F16S"): 0.5,
    ("BF16", "W8G32_F16S"): 0.5,
    **{("F32", f.name): 0.6 for f in ENCODED if isinstance(f, GroupedFormat)},
    **{("F16", f.name): 0.35 for f in ENCODED if isinstance(f, GroupedFormat)},
    ("words", "NVFP4"): 0.5,
    ("words", "FP8_E4M3FN_ROW_BF16S"): 0.5,
}


def measure(repeats: int, source_bytes: int = SOURCE_BYTES) -> dict[str, Any]:
    """Returns every rate; medians of `repeats` runs over `source_bytes` of source each."""
    destination = np.ones(source_bytes, np.uint8)
    rows: list[dict[str, Any]] = []
    for dtype in SOURCE_DTYPES:
        rows += _encode_rates(dtype, source_bytes, destination, repeats)
    rows += _copy_rates(source_bytes, destination, repeats)
    hashing = _medians({"SHA-256": functools.partial(hashlib.sha256, destination)}, repeats)
    return {
        "source_bytes": source_bytes,
        "repeats": repeats,
        "rates": rows,
        "sha256_gb_per_s": source_bytes / hashing["SHA-256"] / 1e9,
        "threads": _thread_rates(repeats),
        "ggml": _ggml_rates(rows, repeats),
    }


def table(result: Mapping[str, Any]) -> str:
    """Returns the result as text."""
    lines = [f"{'source':6} {'format':21} {'GB/s':>6} {'Gweight/s':>9} {'copyto':>6} {'ratio':>5} {'target':>6}"]
    for row in result["rates"]:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        lines.append(
            f"{row['dtype']:6} {row['format']:21} {row['gb_per_s']:6.2f} {row['gweights_per_s']:9.2f}"
            f" {row['copy_gb_per_s']:6.2f} {row['ratio']:5.2f} {target:>6}"
        )
    lines += ["", f"SHA-256: {result['sha256_gb_per_s']:.2f} GB/s", "", "two threads on row blocks, times one thread:"]
    lines += [f"  {row['dtype']:6} {row['format']:21} {row['scaling']:.2f}" for row in result["threads"]]
    lines += ["", "ggml, one thread, the same weights from F32:"]
    if isinstance(result["ggml"], str):
        lines.append(f"  {result['ggml']}")
    else:
        lines += [
            f"  {row['type']:6} {row['gweights_per_s']:6.2f} Gweight/s; {row['format']} from BF16 is"
            f" {row['times']:.1f} times as fast"
            for row in result["ggml"]
        ]
    return "\n".join(lines)


def _medians(runs: Runs, repeats: int) -> dict[str, float]:
    """Returns the median seconds of each run; the runs take turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _weights(rows: int) -> npt.NDArray[np.float32]:
    """Returns [rows, K] weights as they occur: normal, of standard deviation 0.02; 1024 rows, repeated."""
    some = np.random.default_rng(1).standard_normal((min(rows, 1024), K), dtype=np.float32) * np.float32(0.02)
    return np.resize(some, (rows, K))


def _words(dtype: str, source_bytes: int) -> Array:
    if dtype == "F32":
        return _weights(source_bytes // 4 // K).view("<u4")
    weights = _weights(source_bytes // 2 // K)
    if dtype == "F16":
        return weights.astype("<f2").view("<u2")
    return (weights.view("<u4") >> np.uint32(16)).astype("<u2")


def _planes(numeric: Any, rows: int, k: int = K) -> dict[str, Array]:
    planes = geometry(numeric, (rows, k)).planes
    return {plane.name: np.ones((rows, plane.row_bytes), np.uint8) for plane in planes if plane.row_bytes}


def _rate(dtype: str, name: str, nbytes: int, weights: int, seconds: float, copy_seconds: float) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "format": name,
        "gb_per_s": nbytes / seconds / 1e9,
        "gweights_per_s": weights / seconds / 1e9,
        "copy_gb_per_s": nbytes / copy_seconds / 1e9,
        "ratio": copy_seconds / seconds,
        "target": TARGETS.get((dtype, name)),
    }


def _encode_rates(dtype: str, source_bytes: int, destination: Array, repeats: int) -> list[dict[str, Any]]:
    words = _words(dtype, source_bytes)
    copied = destination[: words.nbytes].view(words.dtype).reshape(words.shape)
    runs: dict[str, Callable[[], object]] = {"copy": functools.partial(np.copyto, copied, words)}
    for numeric in ENCODED:
        planes = _planes(numeric, len(words))
        runs[numeric.name] = functools.partial(encode_rows, numeric, dtype, words, planes)
    seconds = _medians(runs, repeats)
    copy = seconds.pop("copy")
    return [_rate(dtype, name, words.nbytes, words.size, each, copy) for name, each in seconds.items()]


def _copy_rates(source_bytes: int, destination: Array, repeats: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(1)
    rows = source_bytes * 16 // 9 // K // 128 * 128
    nvfp4 = generator.integers(0, 0x7F, (rows, K // 2 + K // 16), np.uint8)
    nvfp4_code = nvfp4.reshape(-1)[: rows * K // 2].reshape(rows, K // 2)
    nvfp4_scale = nvfp4.reshape(-1)[rows * K // 2 :].reshape(rows, K // 16)
    fp8_rows = source_bytes // K
    fp8_code = generator.integers(0, 0x7F, (fp8_rows, K), np.uint8)
    fp8_scale = np.full(fp8_rows, 0x3C00, "<u2")
    fp8_format = FORMATS["FP8_E4M3FN_ROW_BF16S"]
    runs: Runs = {
        "NVFP4 copy": functools.partial(np.copyto, destination[: nvfp4.size], nvfp4.reshape(-1)),
        "NVFP4": functools.partial(pack_nvfp4_rows, nvfp4_code, nvfp4_scale, _planes(NVFP4, rows)),
        "FP8 copy": functools.partial(np.copyto, destination[: fp8_code.size], fp8_code.reshape(-1)),
        "FP8": functools.partial(pack_fp8_rows, fp8_code, fp8_scale, _planes(fp8_format, fp8_rows)),
    }
    seconds = _medians(runs, repeats)
    return [
        _rate("words", "NVFP4", nvfp4.size, rows * K, seconds["NVFP4"], seconds["NVFP4 copy"]),
        _rate("words", fp8_format.name, fp8_code.size, fp8_code.size, seconds["FP8"], seconds["FP8 copy"]),
    ]


def _thread_rates(repeats: int) -> list[dict[str, Any]]:
    """Returns what two threads do in the time of one; each has a block of source rows and planes of its own."""
    results = []
    with ThreadPoolExecutor(2) as pool:
        for dtype in SOURCE_DTYPES:
            for numeric in ENCODED:
                work = [_block_work(numeric, dtype) for _ in range(2)]
                runs = {
                    "one": work[0],
                    "two": functools.partial(_in_threads, pool, work),
                }
                seconds = _medians(runs, repeats)
                scaling = 2 * seconds["one"] / seconds["two"]
                results.append({"dtype": dtype, "format": numeric.name, "scaling": scaling})
    return results


def _block_work(numeric: Any, dtype: str) -> Callable[[], None]:
    words = _words(dtype, BLOCK_BYTES)
    planes = _planes(numeric, len(words))

    def work() -> None:
        for _ in range(64):
            encode_rows(numeric, dtype, words, planes)

    return work


def _in_threads(pool: ThreadPoolExecutor, work: list[Callable[[], None]]) -> None:
    for future in [pool.submit(each) for each in work]:
        future.result()


def _ggml_rates(rates: list[dict[str, Any]], repeats: int) -> list[dict[str, Any]] | str:
    """Returns the rates of ggml's C quantizers, or why there are none."""
    try:
        import ggml
    except ImportError:
        return "not installed (pip install ggml-python)"
    weights = _weights(1024)
    out = np.ones(weights.nbytes, np.uint8)
    source = weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ours = {row["format"]: row["gweights_per_s"] for row in rates if row["dtype"] == "BF16"}
    results = []
    for name, ggml_name in GGML.items():
        ggml_type = getattr(ggml, f"GGML_TYPE_{ggml_name}")
        run = functools.partial(
            ggml.ggml_quantize_chunk, ggml_type, source, out.ctypes.data, 0, len(weights), K, None
        )
        rate = weights.size / _medians({"ggml": run}, repeats)["ggml"] / 1e9
        results.append({"type": ggml_name, "format": name, "gweights_per_s": rate, "times": ours[name] / rate})
    return results
