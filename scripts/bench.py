"""Measures the converter on this machine: python scripts/bench.py [kernels | run | memory | shares] [--json]."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_kernels
import bench_run
import numba
import numpy as np


def machine() -> dict[str, Any]:
    """Returns what a reader needs to judge the numbers."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = f"{len(names)} x {names[0]}" if names else model
    return {
        "processor": model,
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["kernels", "run", "memory", "shares"]
    parser.add_argument("part", nargs="?", choices=parts, help="one part; all when left out")
    parser.add_argument("--repeats", type=int, default=7, help="runs per number, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument(
        "--directory",
        type=Path,
        action="append",
        help="where whole runs read and write, about 8 GB; may be given twice, such as a disk and a tmpfs",
    )
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    texts = ["; ".join(f"{name} {value}" for name, value in result["machine"].items())]
    if arguments.part in (None, "kernels"):
        result["kernels"] = bench_kernels.measure(arguments.repeats)
        texts.append(bench_kernels.table(result["kernels"]))
    if arguments.part in (None, "run"):
        directories = arguments.directory or [Path(tempfile.gettempdir())]
        result["run"] = bench_run.measure(arguments.repeats, directories)
        texts.append(bench_run.table(result["run"]))
    if arguments.part in (None, "memory"):
        result["memory"] = bench_run.memory()
        texts.append(bench_run.memory_table(result["memory"]))
    if arguments.part in (None, "shares"):
        directory = (arguments.directory or [Path(tempfile.gettempdir())])[0]
        result["shares"] = bench_run.shares(arguments.repeats, directory)
        texts.append(bench_run.shares_table(result["shares"]))
    print(json.dumps(result, indent=1) if arguments.json else "\n\n".join(texts))


if __name__ == "__main__":
    main()
