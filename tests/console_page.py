"""A page of commands with their output, played: what it shows is what they print.

In a block ```console, a line that begins with `$ ` is a command, to its end or, behind a backslash, to that of the next
line; what follows up to the next command is its output, both streams as they come. A block ```yaml whose first line is
`# NAME.yaml` is that file. As a program it writes the output of today into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "recipes" / "README.md"

_BLOCK = re.compile(r"^```(console|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w.-]+\.yaml)\n")


def commands(block: str) -> list[str]:
    """Returns the commands of a block, each with the lines it goes on in."""
    return [found[1] for found in re.finditer(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)]


def played(page: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Yields each block of a page with what it ought to be, its commands run one after another in a directory."""
    (directory / "scripts").symlink_to(ROOT / "scripts")
    for kind, block in _BLOCK.findall(page):
        if kind == "yaml":
            if named := _FILE.match(block):
                (directory / named[1]).write_text(block, encoding="utf-8")
            continue
        yield block, "".join(f"$ {command}\n{_output(command, directory)}" for command in commands(block))


def steady(block: str) -> str:
    """Returns a block without what differs from run to run: seconds, progress, the size of a page that tells them."""
    block = re.sub(r"^converting: .* left\n", "", block, flags=re.MULTILINE)
    block = re.sub(r"\b\d+\.\d s$", "T s", block, flags=re.MULTILINE)
    return re.sub(r"^(wrote \S+\.html): .*$", r"\1", block, flags=re.MULTILINE)


def _output(command: str, directory: Path) -> str:
    """Returns what a command prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    gone = ("NINFER_CONVERT_DEBUG", "COLUMNS", "SLURM_CPUS_PER_TASK")
    variables = {name: text for name, text in os.environ.items() if name not in gone} | {"PATH": path}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as directory:
        for block, real in played(text, Path(directory)):
            if steady(block) != steady(real):
                text = text.replace(f"```console\n{block}```", f"```console\n{real}```", 1)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
