"""Whole runs beside their floors: writing the same bytes, and the work itself; peak memory; start-up times.

W is writing the artifact's bytes with fsync into the same directory, R a plain positional read of the source from
a cold cache, C the encoding, the default hashing and one copy of the source, each alone, in memory, one thread,
divided by the threads. Runs and floors take turns, so that the machine's drift meets them all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_convert.allowance import allowed_threads
from ninfer_convert.artifact.verify import verify_artifact
from ninfer_convert.encode.block_maker import BlockMaker
from ninfer_convert.plan.block import blocks
from ninfer_convert.plan.planner import Plan, PlannedTensor, make_plan
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.source.checkpoint import Checkpoint, open_checkpoint
from ninfer_convert.stand_in.checkpoints import StandIn, write_demo_checkpoint, write_stand_in

COMMAND = [sys.executable, "-m", "ninfer_convert"]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is measured is the second start
K = 5120
MATRICES = {"W8G32_F16S": [65536], "Q4G64_F16S": [34816] * 4, "Q5G64_F16S": [17408] * 8, "Q6G64_F16S": [16384]}
"""Rows of the matrices of the dense checkpoint: about 4 GB of BF16, the formats in the shares of a 27B artifact."""

SLACK_SECONDS = 0.7
FACTOR = 1.25
PIECE = 8 << 20


def measure(repeats: int, directories: Sequence[Path]) -> dict[str, Any]:
    """Returns end-to-end figures for each directory, and start-up times."""
    return {"runs": [_dense(directory, repeats) for directory in directories], "startup": startup(repeats)}


def table(result: Mapping[str, Any]) -> str:
    """Returns the result as text."""
    lines = []
    for run in result["runs"]:
        lines += [
            f"end to end in {run['directory']}: {run['source_bytes'] / 1e9:.2f} GB in, "
            f"{run['artifact_bytes'] / 1e9:.2f} GB out, {run['threads']} threads, medians of {run['repeats']}",
            f"  W write and fsync {run['W']:.2f} s; C work / threads {run['C']:.2f} s "
            f"(encode {run['encode']:.2f}, hash {run['hash']:.2f}, copy {run['copy']:.2f}); "
            f"R cold read {run['R']:.2f} s",
        ]
        for name in ("warm", "cold"):
            bound = run[f"{name}_bound"]
            verdict = "met" if run[name] <= bound else "missed"
            lines.append(f"  {name} cache: run {run[name]:.2f} s, bound {bound:.2f} s, {verdict}")
        cost = run["warm"] / run["no_stats"] - 1
        lines.append(f"  measuring what encoding costs: {cost:+.0%} of {run['no_stats']:.2f} s (bound +10%)")
        peak, planned = run["peak_bytes"] / 2**20, run["planned_peak"] / 2**20
        lines.append(f"  peak memory with kernels to compile {peak:.0f} MiB, planned {planned:.0f} MiB")
        lines.append(f"  verify of the artifact, warm: {run['verify_ratio']:.2f} of a plain read (bound 0.50)")
    lines += ["", "start-up (median, bound):"]
    lines += [f"  {row['what']:36} {row['seconds']:.3f} s  {row['bound']:.1f} s" for row in result["startup"]]
    return "\n".join(lines)


# -- end to end ---------------------------------------------------------------------------------------------------


def _dense(parent: Path, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ninfer-bench-", dir=parent) as text:
        directory = Path(text)
        source, recipe = directory / "model.safetensors", directory / "recipe.yaml"
        write_dense_checkpoint(source)
        recipe.write_text(_recipe(), encoding="utf-8")
        with open_checkpoint(source, name="base") as checkpoint:
            plan = make_plan(load_recipe(str(recipe)), {"base": checkpoint})
            threads = allowed_threads()
            work = _work(plan, checkpoint, repeats)
            timed = _interleaved(directory, source, recipe, plan.file_bytes, repeats)
            floors = {name: statistics.median(times) for name, times in timed.items()}
            planned = _json([*COMMAND, "plan", str(recipe), "--source", str(source), "--json"])
            compute = sum(work.values()) / threads
            return {
                "directory": str(parent),
                "repeats": repeats,
                "threads": threads,
                "source_bytes": plan.source_bytes,
                "artifact_bytes": plan.file_bytes,
                **work,
                "C": compute,
                **floors,
                "warm_bound": FACTOR * max(floors["W"], compute) + SLACK_SECONDS,
                "cold_bound": FACTOR * max(floors["W"], compute, floors["R"]) + SLACK_SECONDS,
                "peak_bytes": _cold_peak(_run_command(recipe, source, directory / "out.ninfer")),
                "verify_ratio": _verify_ratio(directory / "out.ninfer", threads, repeats),
                "planned_peak": planned["totals"]["peak_memory_bytes"],
            }


def write_dense_checkpoint(path: Path) -> None:
    """Writes BF16 matrices of normally distributed weights, one after the other, in bounded memory."""
    header: dict[str, Any] = {}
    offset = 0
    for name, rows in _tensors():
        nbytes = rows * K * 2
        header[name] = {"dtype": "BF16", "shape": [rows, K], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    wide = rng.standard_normal(PIECE // 2, np.float32).view(np.uint32)
    piece = (wide >> np.uint32(16)).astype("<u2").tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            offset -= file.write(piece[: min(offset, len(piece))])


def _tensors() -> Iterator[tuple[str, int]]:
    for name, sizes in MATRICES.items():
        yield from ((f"{name}.{index}", rows) for index, rows in enumerate(sizes))


def _recipe() -> str:
    lines = ["schema: 1", "id: bench", "artifact: {model_id: bench, weights_id: dense}", "evidence: none"]
    lines += ["sources: {base: {}}", "objects:"]
    for name, rows in _tensors():
        lines.append(
            f"  - {{name: {name}, shape: [{rows}, {K}], format: {name.partition('.')[0]}, "
            f"encoder: MAXABS_F16_RECIP_RNE_V1, value: {name}}}"
        )
    return "\n".join(lines) + "\n"


def _work(plan: Plan, checkpoint: Checkpoint, repeats: int) -> dict[str, float]:
    """Returns seconds of one thread for encoding, hashing and copying, each alone and in memory.

    One block of each object stands for all of its blocks, so that no reading is counted.
    """
    encode = 0.0
    maker = _MemoryMaker()
    for item in plan.objects:
        if isinstance(item, PlannedTensor):
            cut = list(blocks(item))
            encode += median(lambda item=item, block=cut[0]: maker.make(item, block), 5 * repeats) * len(cut)
    buffer = np.ones(256 << 20, np.uint8)
    other = np.ones(256 << 20, np.uint8)
    hashing = median(lambda: hashlib.sha256(buffer), repeats) / len(buffer)
    copying = median(lambda: np.copyto(other, buffer), repeats) / len(buffer)
    # By default each object is hashed, and the whole file.
    hashed = plan.file_bytes + sum(item.nbytes for item in plan.objects)
    return {"encode": encode, "hash": hashing * hashed, "copy": copying * plan.source_bytes}


class _MemoryMaker(BlockMaker):
    """Reads a block of each object once; afterwards only the encoding is left."""

    def _read(self, name: str, value: Any, begin: int, end: int) -> Any:
        held = getattr(self, "_held", None)
        if held is None or held[0] != (id(value), begin, end):
            self._held = (id(value), begin, end), super()._read(name, value, begin, end)
        return self._held[1]


def _interleaved(
    directory: Path, source: Path, recipe: Path, nbytes: int, repeats: int
) -> dict[str, list[float]]:
    output = directory / "out.ninfer"
    command = _run_command(recipe, source, output)
    jobs: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "W": (lambda: None, lambda: _write(directory / "floor", nbytes)),
        "warm": (lambda: _read(source), lambda: _quietly(command)),
        "no_stats": (lambda: _read(source), lambda: _quietly([*command, "--no-stats"])),
        "R": (lambda: _drop(source), lambda: _read(source)),
        "cold": (lambda: _drop(source), lambda: _quietly(command)),
    }
    timed: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, (prepare, job) in jobs.items():
            prepare()
            os.sync()
            begin = time.perf_counter()
            job()
            if turn:
                timed[name].append(time.perf_counter() - begin)
            for left in (output, output.with_name("out.ninfer.conversion.json"), directory / "floor"):
                left.unlink(missing_ok=True)
    return timed


def _verify_ratio(artifact: Path, threads: int, repeats: int) -> float:
    """Returns how fast values are verified, against plain positional reads of the same file."""
    jobs = {"read": lambda: _read(artifact), "verify": lambda: verify_artifact(artifact, threads=threads)}
    timed: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            if turn:
                timed[name].append(time.perf_counter() - begin)
    return statistics.median(timed["read"]) / statistics.median(timed["verify"])


def _run_command(recipe: Path, source: Path, output: Path) -> list[str]:
    return [*COMMAND, "run", str(recipe), "--source", str(source), "-o", str(output), "-q", "--overwrite"]


def _write(path: Path, nbytes: int) -> None:
    piece = memoryview(np.ones(PIECE, np.uint8))
    with path.open("wb", buffering=0) as file:
        left = nbytes
        while left:
            left -= file.write(piece[: min(left, PIECE)])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    piece = np.empty(PIECE, np.uint8)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece.data):
            pass


def _drop(path: Path) -> None:
    """Drops a file's pages from the cache; on a file system in memory that does nothing."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- shares -------------------------------------------------------------------------------------------------------


def shares(repeats: int, directory: Path, counts: Sequence[int] = (1, 2, 4, 7)) -> dict[str, Any]:
    """Returns the seconds of a run, of all shares one after the other, and of preparing and finalizing them."""
    with tempfile.TemporaryDirectory(prefix="ninfer-bench-", dir=directory) as text:
        place = Path(text)
        source, recipe, output, plan = (place / name for name in ("model.safetensors", "recipe.yaml", "out", "plan"))
        write_dense_checkpoint(source)
        recipe.write_text(_recipe(), encoding="utf-8")
        planning = [*COMMAND, "plan", str(recipe), "--source", str(source), "-o", str(plan), "--output", str(output)]
        by_plan = ["--plan", str(plan), "-q"]
        plain: list[float] = []
        rows: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        _quietly(planning)
        for turn in range(repeats + 1):
            seconds = _timed(source, _run_command(recipe, source, output))
            plain += [seconds] if turn else []
            output.unlink()
            for count in counts:
                row = {"prepare": _timed(source, [*COMMAND, "prepare", *by_plan]), "shares": 0.0}
                for index in range(count):
                    row["shares"] += _timed(source, [*COMMAND, "run", *by_plan, "--shard", f"{index}/{count}"])
                row["finalize"] = _timed(source, [*COMMAND, "finalize", *by_plan])
                rows[count] += [row] if turn else []
                output.unlink()
        start = _start_seconds(place)
        run = statistics.median(plain)
        return {
            "repeats": repeats,
            "run": run,
            "start": start,
            "rows": [
                {"count": count, "bound": 1.1 * run + count * start}
                | {name: statistics.median(row[name] for row in found) for name in ("prepare", "shares", "finalize")}
                for count, found in rows.items()
            ],
        }


def _start_seconds(directory: Path) -> float:
    """Returns the seconds of a run that has nothing to do: loading, planning, kernels from their cache."""
    demo = write_demo_checkpoint(directory / "demo")
    return median(functools.partial(_quietly, _demo_command(demo, directory / "demo.ninfer")), 5)


def _demo_command(demo: StandIn, output: Path) -> list[str]:
    run = [*COMMAND, "run", "demo", "--input", f"ranking={demo.ranking}", "--overwrite", "-q", "-o", str(output)]
    return [*run, "--source", f"base={demo.base}", "--source", f"quantized={demo.quantized}"]


def _timed(source: Path, command: Sequence[str]) -> float:
    _read(source)
    os.sync()
    begin = time.perf_counter()
    _quietly(command)
    return time.perf_counter() - begin


def shares_table(result: Mapping[str, Any]) -> str:
    """Returns the result as text."""
    lines = [
        f"one run {result['run']:.2f} s, process start {result['start']:.2f} s; by shares, one after the other, "
        f"medians of {result['repeats']}:"
    ]
    for row in result["rows"]:
        ratio = (row["shares"] - row["count"] * result["start"]) / result["run"]
        verdict = "met" if row["shares"] <= row["bound"] else "missed"
        lines.append(
            f"  {row['count']} shares {row['shares']:.2f} s, {ratio:.2f} of the run without the starts, bound "
            f"{row['bound']:.2f} s, {verdict}; prepare {row['prepare']:.2f} s, finalize {row['finalize']:.2f} s"
        )
    return "\n".join(lines)


# -- memory and start-up ------------------------------------------------------------------------------------------


def peak_memory(command: Sequence[str], **environment: str) -> int:
    """Returns the peak resident memory of a command, in bytes."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *command],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return int(found.stdout) * (1 if sys.platform == "darwin" else 1024)


def _cold_peak(command: Sequence[str]) -> int:
    """Returns the peak resident memory of a command that finds no compiled kernels, in bytes."""
    with tempfile.TemporaryDirectory() as cache:
        return peak_memory(command, NUMBA_CACHE_DIR=cache)


def startup(repeats: int) -> list[dict[str, Any]]:
    """Returns the times of commands that should answer at once."""
    with tempfile.TemporaryDirectory(prefix="ninfer-bench-") as text:
        directory = Path(text)
        demo = write_demo_checkpoint(directory / "demo")
        full = write_stand_in("qwen3.6-27b", directory / "full")
        run = _demo_command(demo, directory / "demo.ninfer")
        plan = [*COMMAND, "plan", "qwen3.6-27b/nvfp4", "--unpinned", "--input", f"ranking={full.ranking}"]
        plan += ["--source", f"base={full.base}", "--source", f"quantized={full.quantized}"]
        commands = {
            "--help": ([*COMMAND, "--help"], 0.2),
            "plan of qwen3.6-27b/nvfp4": (plan, 1.0),
            "run of the demo, kernels cached": (run, 1.5),
        }
        return [
            {"what": name, "seconds": median(functools.partial(_quietly, command), repeats), "bound": bound}
            for name, (command, bound) in commands.items()
        ]


def _quietly(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def memory(limits: Sequence[str] = ("1GiB", "256MiB")) -> list[dict[str, Any]]:
    """Returns peak memory of full-scale runs, with an empty kernel cache, beside what `plan` says."""
    results = []
    with tempfile.TemporaryDirectory(prefix="ninfer-bench-") as text:
        directory = Path(text)
        full = write_stand_in("qwen3.6-27b", directory / "full")
        jobs = {
            "one [248320, 5120] tensor": (_one_tensor(directory), ["--source", str(full.base)]),
            "qwen3.6-27b/groupwise-int": (
                "qwen3.6-27b/groupwise-int",
                ["--unpinned", "--source", str(full.base), "--input", f"ranking={full.ranking}"],
            ),
        }
        for name, (recipe, options) in jobs.items():
            for limit in limits:
                common = [recipe, *options, "--max-memory", limit]
                output = directory / "out.ninfer"
                peak = _cold_peak([*COMMAND, "run", *common, "-o", str(output), "-q", "--overwrite"])
                output.unlink()
                planned = _json([*COMMAND, "plan", *common, "--json"])["totals"]["peak_memory_bytes"]
                results.append({"what": name, "limit": limit, "peak_bytes": peak, "planned_bytes": planned})
    return results


def memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the memory figures as text."""
    lines = [f"{'run':30} {'--max-memory':>12} {'peak MiB':>9} {'planned':>8} {'ratio':>6}"]
    for row in rows:
        peak, planned = row["peak_bytes"] / 2**20, row["planned_bytes"] / 2**20
        lines.append(f"{row['what']:30} {row['limit']:>12} {peak:9.0f} {planned:8.0f} {planned / peak:6.2f}")
    return "\n".join(lines)


def _one_tensor(directory: Path) -> str:
    path = directory / "one.yaml"
    path.write_text(
        "schema: 1\nid: one\nartifact: {model_id: bench, weights_id: one}\nevidence: none\nsources: {base: {}}\n"
        "objects:\n  - {name: head, shape: [248320, 5120], format: Q6G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,\n"
        "     value: lm_head.weight}\nignore: ['model.*', 'mtp.*']\n",
        encoding="utf-8",
    )
    return str(path)


def median(job: Callable[[], object], repeats: int) -> float:
    """Returns the median seconds of a job, after one run that is not counted."""
    times = []
    for turn in range(repeats + 1):
        begin = time.perf_counter()
        job()
        if turn:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _json(command: Sequence[str]) -> Any:
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
