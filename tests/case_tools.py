"""Whole conversions for tests: a directory with source, recipe and output, and what must hold of every refusal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from checkpoints import Words, write_directory
from oracle import container, layouts
from oracle.encoders import GROUPED

from ninfer_convert import cli

Q4, Q5, Q6, W8 = GROUPED
NVFP4, FP8 = "NVFP4", "FP8_E4M3FN_ROW_BF16S"
ENCODERS = dict.fromkeys(GROUPED, "MAXABS_F16_RECIP_RNE_V1") | {FP8: "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"}

Tensors = Mapping[str, tuple[str, Words]]

HEAD = """\
schema: 1
id: case
artifact: {model_id: case-model, weights_id: case-weights}
evidence: none
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one command left: exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.lower().startswith("error: ")]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("warning: ")]


def run_cli(*arguments: object) -> Ran:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    texts = ["ninfer-convert", *map(str, arguments)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(sys, "argv", texts))
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("NINFER_CONVERT_DEBUG", None)
        code = cli._run()
    return Ran(code, out.getvalue(), err.getvalue())


def command(*arguments: object) -> list[str | bytes]:
    """Returns the words that start a command in a process of its own."""
    words = [argument if isinstance(argument, bytes) else os.fspath(str(argument)) for argument in arguments]
    return [sys.executable, "-m", "ninfer_convert", *words]


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from ninfer_convert import cli

real, calls = os.pwrite, 0

def pwrite(*arguments):
    global calls
    calls += 1
    if calls == {count}:
        {action}
    return real(*arguments)

os.pwrite = pwrite
cli.main()
"""


def interrupted_command(action: str, count: int, *arguments: object) -> list[str]:
    """Returns the words that start a command in a process of its own that does something at its nth write."""
    script = INTERRUPTED.format(action=action, count=count)
    return [sys.executable, "-c", script, *map(str, arguments)]


def start(words: Sequence[str | bytes], environment: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Starts a process, which sees the given variables beside the present ones."""
    settings = {**os.environ, **(environment or {})}
    settings.pop("NINFER_CONVERT_DEBUG", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(words, env=settings, **pipes)


def finish(process: subprocess.Popen[bytes]) -> Ran:
    """Waits for a process that was started with pipes."""
    out, err = process.communicate(timeout=120)
    return Ran(process.returncode, (out or b"").decode(), (err or b"").decode())


def spawn(*arguments: object, environment: Mapping[str, str] | None = None, **options: Any) -> Ran:
    """Runs a command in a process of its own."""
    return finish(start(command(*arguments), environment, **options))


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Returns every entry below a directory: its kind and mode, and a file's bytes and time of change."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            content: Any = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = (path.read_bytes(), status.st_mtime_ns)
        else:
            content = None
        found[str(path.relative_to(root))] = (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), content)
    return found


class Case:
    """One conversion to be: `recipe.yaml`, sources and `out.ninfer` in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe_path = root / "recipe.yaml"
        self.output = root / "out.ninfer"
        self.report_path = root / "out.ninfer.conversion.json"
        self.sources: dict[str, Path] = {}
        self.inputs: dict[str, Path] = {}

    def source(
        self,
        shards: Tensors | Mapping[str, Tensors],
        name: str = "base",
        *,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Writes a checkpoint: tensors for `model.safetensors`, or a mapping of shards."""
        if not all(isinstance(value, Mapping) for value in shards.values()) or not shards:
            shards = {"model.safetensors": shards}  # type: ignore[dict-item]
        self.sources[name] = self.root / name
        shutil.rmtree(self.sources[name], ignore_errors=True)
        return write_directory(self.sources[name], shards, config=config, files=files)  # type: ignore[arg-type]

    def input(self, name: str, content: bytes) -> Path:
        """Writes an auxiliary input file."""
        self.inputs[name] = self.root / f"{name}.bin"
        self.inputs[name].write_bytes(content)
        return self.inputs[name]

    def recipe(self, *objects: str, sources: str = "{base: {}}", more: str = "") -> None:
        """Writes the recipe: entries of `objects`, and text for the top level."""
        lines = "".join(f"  - {entry}\n" for entry in objects)
        self.recipe_path.write_text(f"{HEAD}sources: {sources}\n{more}objects:\n{lines}", encoding="utf-8")

    def arguments(self, command: str, *extra: object) -> list[object]:
        """Returns the words of `plan` or `run` over this case."""
        one = len(self.sources) == 1
        words: list[object] = [command, self.recipe_path]
        for name, place in self.sources.items():
            words += ["--source", place if one else f"{name}={place}"]
        for name, place in self.inputs.items():
            words += ["--input", f"{name}={place}"]
        if command == "run":
            words += ["-o", self.output]
        return [*words, *extra]

    def plan(self, *extra: object) -> Ran:
        return run_cli(*self.arguments("plan", *extra))

    def run(self, *extra: object) -> Ran:
        return run_cli(*self.arguments("run", *extra))

    def converted(self, *extra: object) -> Ran:
        """Converts; the sources stay as they are and nothing but artifact and report appears."""
        before = snapshot(self.root)
        ran = self.run(*extra)
        assert ran.code == 0, ran.err
        self.require_complete(before)
        return ran

    def require_complete(self, before: Mapping[str, tuple[Any, ...]]) -> None:
        """Requires that artifact and report have appeared, agree, and are all that is new."""
        after = snapshot(self.root)
        assert after.pop(self.output.name) is not None
        assert after.pop(self.report_path.name) is not None
        assert after == {
            name: entry for name, entry in before.items() if name not in (self.output.name, self.report_path.name)
        }
        assert len(self.objects()) == len(self.report()["objects"])

    def refused(
        self, *fragments: str, code: int = 1, messages: int = 1, extra: Sequence[object] = (), planned: bool = True
    ) -> list[str]:
        """Requires that `plan` and `run` refuse in the same words, all fragments in them, and leave no trace.

        `planned` is false for what only `run` knows, such as the output.
        """
        found = self._refusal("run", code, extra)
        assert len(found) == messages, found
        for fragment in fragments:
            assert fragment in "\n".join(found)
        if planned:
            assert self._refusal("plan", code, extra) == found
        return found

    def refused_by_values(self, *fragments: str, messages: int = 1, extra: Sequence[object] = ()) -> list[str]:
        """Requires that the plan is good, and that `plan --deep` and `run` find the same values wrong."""
        before = snapshot(self.root)
        ran = self.plan(*extra)
        assert (ran.code, ran.errors) == (0, [])
        assert snapshot(self.root) == before
        found = self._refusal("run", 1, extra)
        assert len(found) == messages, found
        for fragment in fragments:
            assert fragment in "\n".join(found)
        assert self._refusal("plan", 1, ["--deep", *extra]) == found
        return found

    def _refusal(self, command: str, code: int, extra: Sequence[object]) -> list[str]:
        before = snapshot(self.root)
        ran = run_cli(*self.arguments(command, *extra))
        require_refusal(ran, code)
        assert snapshot(self.root) == before
        return ran.errors

    def report(self) -> dict[str, Any]:
        """Returns the conversion report."""
        document: dict[str, Any] = json.loads(self.report_path.read_bytes())
        return document

    def objects(self) -> dict[str, Any]:
        """Returns the stored objects by name, as the oracle reads the artifact."""
        _, _, objects = container.parse(self.output.read_bytes())
        return {stored.name: stored for stored in objects}

    def payload(self, name: str) -> bytes:
        """Returns the stored bytes of one object."""
        payload: bytes = self.objects()[name].payload
        return payload

    def words(self, name: str) -> list[int]:
        """Returns the stored words of a direct object."""
        stored = self.objects()[name]
        return layouts.unpack_contiguous(stored.format, stored.payload)

    def grouped(self, name: str) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the scale words and the codes of a grouped object, row by row."""
        stored = self.objects()[name]
        return layouts.unpack_row_split(stored.format, stored.shape, stored.payload)


def require_refusal(ran: Ran, code: int) -> None:
    """Requires an exit code and nothing but readable messages, all of them on standard error."""
    assert ran.code == code, (ran.code, ran.err)
    assert ran.errors, ran.err
    assert ran.out == ""
    for forbidden in ("Traceback", "internal:", "\x1b", "\r"):
        assert forbidden not in ran.err


def entry(name: str, shape: Sequence[int], numeric: str, of: str, *, words: bool = False, more: str = "") -> str:
    """Returns one tensor entry of a recipe, its encoder written out where there is one."""
    key = "words" if words else "value"
    encoder = f", encoder: {ENCODERS[numeric]}" if numeric in ENCODERS and not words else ""
    return f"{{name: {name}, shape: {list(shape)}, format: {numeric}{encoder}, {key}: {of}{more}}}"


def words_of(dtype: str, *words: int, shape: Sequence[int] | None = None) -> tuple[str, Words]:
    """Returns a tensor of given words, a vector unless a shape is given."""
    kind = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F8_E4M3": "u1", "U8": "u1", "I64": "<i8", "I32": "<i4"}
    array = np.array(words, kind[dtype])
    return dtype, array.reshape(array.shape if shape is None else tuple(shape))


def filled(dtype: str, shape: Sequence[int], word: int, **changes: int) -> tuple[str, Words]:
    """Returns a tensor of one word, except at flat places: `filled("BF16", [2, 4], 0x3f80, at3=0)`."""
    flat = [word] * int(np.prod(shape))
    for place, other in changes.items():
        flat[int(place.removeprefix("at"))] = other
    return words_of(dtype, *flat, shape=shape)


def f32(*values: float) -> tuple[str, Words]:
    """Returns an F32 vector of the words nearest to the values."""
    return "F32", np.array(values, "<f4").view("<u4")


def nvfp4(name: str, rows: int = 128, columns: int = 64, seed: int = 0) -> dict[str, tuple[str, Words]]:
    """Returns the four fields of a valid compressed-tensors NVFP4 module."""
    draw = np.random.default_rng([seed, rows, columns])
    return {
        f"{name}.weight_packed": ("U8", draw.integers(0, 256, (rows, columns // 2), np.uint8)),
        f"{name}.weight_scale": ("F8_E4M3", draw.integers(1, 0x7E, (rows, columns // 16), np.uint8)),
        f"{name}.weight_global_scale": f32(1536.0),
        f"{name}.input_global_scale": f32(24.5),
    }


def modelopt(name: str, rows: int = 128, columns: int = 64, seed: int = 0) -> dict[str, tuple[str, Words]]:
    """Returns the four fields of a valid ModelOpt NVFP4 module."""
    module = nvfp4("m", rows, columns, seed)
    return {
        f"{name}.weight": module["m.weight_packed"],
        f"{name}.weight_scale": module["m.weight_scale"],
        f"{name}.weight_scale_2": words_of("F32", 0x3A2AAAAB, shape=[]),
        f"{name}.input_scale": words_of("F32", 0x3DCCCCCD, shape=[]),
    }


def fp8(name: str, rows: int = 4, columns: int = 8, seed: int = 0) -> dict[str, tuple[str, Words]]:
    """Returns the two fields of a valid FP8 module with one multiplier for each row."""
    draw = np.random.default_rng([seed, rows, columns])
    return {
        f"{name}.weight": ("F8_E4M3", draw.integers(0, 0x7F, (rows, columns), np.uint8)),
        f"{name}.weight_scale": ("BF16", draw.integers(0x3C00, 0x3E00, (rows, 1)).astype("<u2")),
    }


def changed(tensors: Tensors, name: str, place: int, word: int) -> dict[str, tuple[str, Words]]:
    """Returns the tensors with one word of one of them replaced."""
    dtype, words = tensors[name]
    other = words.copy()
    other.reshape(-1)[place] = word
    return {**tensors, name: (dtype, other)}


@contextlib.contextmanager
def once(target: object, name: str, action: Any) -> Iterator[None]:
    """Calls `action` just before the first call of `target.name` in the block."""
    real, done = getattr(target, name), []

    def first(*arguments: Any, **options: Any) -> Any:
        if not done:
            done.append(True)
            action()
        return real(*arguments, **options)

    with mock.patch.object(target, name, first):
        yield


def safetensors_bytes(header: Mapping[str, Any] | bytes, payload: bytes = b"") -> bytes:
    """Returns a safetensors file with this header, however wrong it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload
