"""What goes wrong around a run: threads, caches, memory, short reads, files that change, locales, logs and pipes.

Each test is one row of the list of known troubles, told end to end. Equal bytes under every setting (C30) are shown
in test_determinism, caches shared by processes (C43) in test_kernel_cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from case_tools import FP8, NVFP4, Q4, Case, Ran, command, entry, filled, finish, nvfp4, once, run_cli, spawn, start
from checkpoints import write_safetensors
from commands import run as run_measured
from oracle import container

import ninfer_convert.run.convert
from ninfer_convert.source import io as source_io
from ninfer_convert.source.checkpoint import Checkpoint

ONE = 0x3F80


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Objects of several layouts, out of two shards."""
    case = Case(tmp_path)
    draw = np.random.default_rng(0)
    words = {name: ("BF16", draw.integers(0x3C00, 0x4000, (96, 160)).astype("<u2")) for name in ("a", "b", "c")}
    case.source({"x-00001-of-00002.safetensors": words, "x-00002-of-00002.safetensors": nvfp4("m")})
    case.recipe(
        entry("a", [96, 160], Q4, "a"),
        entry("b", [96, 160], FP8, "b"),
        entry("c", [160, 96], "BF16", "{transpose: {of: c}}"),
        entry("m", [128, 64], NVFP4, "m", words=True),
        more="ignore: [m.input_global_scale]\n",
    )
    return case


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def expected(case: Case) -> str:
    """The digest of the artifact of an undisturbed run."""
    output = case.root / "undisturbed" / "out.ninfer"
    output.parent.mkdir()
    ran = run_cli(*case.arguments("run", "-o", output, "-q"))
    assert ran.code == 0, ran.err
    return sha256(output)



class TestThreads:
    """C41, C42."""

    def write_many(self, case: Case) -> None:
        draw = np.random.default_rng(1)
        names = [f"w{i}" for i in range(8)]
        case.source({name: ("BF16", draw.integers(0x3C00, 0x4000, (256, 4096)).astype("<u2")) for name in names})
        case.recipe(*(entry(name, [256, 4096], Q4, name) for name in names))

    def test_the_most_threads_under_the_weakest_threading_layer(self, case: Case) -> None:
        self.write_many(case)
        outputs = [case.root / "one.ninfer", case.root / "many.ninfer"]
        arguments = case.arguments("run", "--max-memory", "4GiB", "-q")
        assert run_cli(*arguments, "-o", outputs[0], "--threads", 1).code == 0
        ran = spawn(
            *arguments, "-o", outputs[1], "--threads", 256, environment={"NUMBA_THREADING_LAYER": "workqueue"}
        )
        assert ran.code == 0, ran.err
        assert sha256(outputs[0]) == sha256(outputs[1])

    def test_a_process_that_was_forked_around_used_kernels(self, case: Case) -> None:
        script = (
            "import os, sys\n"
            "from ninfer_convert import cli\n"
            "first, second = sys.argv[1:3]\n"
            "words = sys.argv[3:]\n"
            "sys.argv[1:] = [*words, '-o', first]\n"
            "assert cli._run() == 0\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    sys.argv[1:] = [*words, '-o', second]\n"
            "    os._exit(cli._run())\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        )
        outputs = [case.root / "parent.ninfer", case.root / "child.ninfer"]
        words = [*map(str, outputs), *map(str, case.arguments("run", "-q", "--threads", 2))]
        ran = finish(start([sys.executable, "-c", script, *words], {"NUMBA_THREADING_LAYER": "workqueue"}))
        assert ran.code == 0, ran.err
        assert sha256(outputs[0]) == sha256(outputs[1])

    def on_one_processor(self, case: Case, *extra: object, **environment: str) -> Ran:
        def pin() -> None:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

        return spawn(*case.arguments("run", *extra), environment=environment, preexec_fn=pin)

    def test_more_threads_than_the_allowance_are_honoured_with_one_note(self, case: Case, expected: str) -> None:
        ran = self.on_one_processor(case, "--threads", 8, NUMBA_NUM_THREADS="1")
        assert ran.code == 0, ran.err
        notes = [line for line in ran.err.splitlines() if line.startswith("note: ")]
        assert notes == ["note: --threads 8 is more than the 1 processor this process may use"]
        assert case.report()["run"]["threads"] == 8
        assert sha256(case.output) == expected

    def test_the_default_is_the_allowance(self, case: Case) -> None:
        ran = self.on_one_processor(case)
        assert ran.code == 0, ran.err
        assert "note" not in ran.err
        assert case.report()["run"]["threads"] == 1

    @pytest.mark.parametrize("threads", ["0", "-1", "x", "257", "1.5", ""])
    def test_what_is_no_number_of_threads_is_usage(self, case: Case, threads: str) -> None:
        case.refused("--threads", code=2, extra=["--threads", threads])


class TestShortReads:
    """C44."""

    def test_seven_bytes_at_a_time_give_the_same_artifact(
        self, case: Case, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preadv, pwrite, calls = os.preadv, os.pwrite, {"read": 0, "write": 0}

        def short_read(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
            calls["read"] += 1
            if calls["read"] % 1000 == 5:
                raise InterruptedError
            return preadv(descriptor, [memoryview(buffers[0])[:7]], offset, *flags)

        def short_write(descriptor: int, data: Any, offset: int) -> int:
            calls["write"] += 1
            if calls["write"] % 1000 == 5:
                raise InterruptedError
            return pwrite(descriptor, memoryview(data)[:7], offset)

        monkeypatch.setattr(os, "preadv", short_read)
        monkeypatch.setattr(os, "pwrite", short_write)
        case.converted()
        assert sha256(case.output) == expected
        assert min(calls.values()) > 5000

    def test_a_file_that_ends_early_is_named_with_tensor_and_place(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = source_io.os.preadv
        info = run_cli(*case.arguments("plan", "--json"))
        assert info.code == 0

        def ending(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
            is_shard = os.readlink(f"/proc/self/fd/{descriptor}").endswith("x-00001-of-00002.safetensors")
            view = memoryview(buffers[0])
            return real(descriptor, [view[: max(0, 40000 - offset)] if is_shard else view], offset, *flags)

        monkeypatch.setattr(source_io.os, "preadv", ending)
        case.refused_by_values(
            "x-00001-of-00002.safetensors: tensor b: file changed or truncated while reading",
            "got ",
            " of 30720 bytes",
            extra=["--threads", "1"],
        )


    @pytest.mark.parametrize(
        ("file", "more", "told"),
        [
            ("tokenizer.json", "", "tokenizer.json: cannot be read: "),
            ("counts.bin", "", "counts.bin: cannot be read: "),
            ("model.safetensors", "", "model.safetensors: cannot be read: "),
            ("model.safetensors", "conditions: [{same: [w, v]}]\n", "model.safetensors: cannot be read: "),
        ],
    )
    def test_a_medium_that_fails_while_planning_may_answer_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, more: str, told: str
    ) -> None:
        case = Case(tmp_path)
        tensors = {name: filled("BF16", [4], ONE) for name in ("v", "w")}
        case.source(tensors, files={"tokenizer.json": b"{}"})
        case.input("counts", bytes(8))
        objects = [] if more else [entry(name, [4], "BF16", name) for name in tensors]
        case.recipe(
            "{resource: tokenizer, file: tokenizer.json}", *objects, more=f"inputs: {{counts: {{}}}}\n{more}"
        )
        real, header = source_io.os.preadv, len((case.sources["base"] / "model.safetensors").read_bytes()) - 16

        def failing(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(file) and offset >= header * (file[-1] == "s"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, buffers, offset, *flags)

        monkeypatch.setattr(source_io.os, "preadv", failing)
        case.refused(told + os.strerror(errno.EIO), code=74)


class TestMemory:
    """C45."""

    def sparse(self, path: Path, tensors: dict[str, tuple[int, int]]) -> None:
        """Writes a shard of zeros that takes no room on the disk."""
        header, place = {}, 0
        for name, shape in tensors.items():
            end = place + 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + place)

    def test_the_peak_depends_neither_on_the_number_nor_on_the_size_of_tensors(self, case: Case) -> None:
        names = [f"w{i}" for i in range(64)]
        directory = case.source({"unused": filled("BF16", [2], ONE)})
        shapes = dict.fromkeys(names, (1024, 4096)) | {"large": (32768, 4096)}
        self.sparse(directory / "model.safetensors", shapes)
        concat = f"{{concat: [{', '.join(names[:8])}]}}"
        case.recipe(
            *(entry(name, [1024, 4096], Q4, name) for name in names),
            entry("large", [32768, 4096], Q4, "large"),
            entry("joined", [8192, 4096], Q4, concat),
            entry("columns", [1024, 32768], Q4, f"{{concat: {{of: [{', '.join(names[:8])}], axis: 1}}}}"),
        )
        done = run_measured(*map(str, case.arguments("run", "--max-memory", "256MiB", "-q")))
        assert done.code == 0, done.err
        assert done.peak_bytes < 256 << 20
        reported = case.report()["run"]["peak_memory_bytes"]
        assert reported < 256 << 20
        assert len(container.parse(case.output.read_bytes())[2]) == 67

    def test_memory_that_is_not_there_names_the_object_and_the_bytes(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = np.empty

        def empty(shape: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(shape, int) and shape == 96 * 160 * 2:
                raise MemoryError
            return real(shape, *arguments, **options)

        monkeypatch.setattr("ninfer_convert.encode.block_maker.np.empty", empty)
        case.refused_by_values("object a: out of memory", "bytes", extra=["--threads", "1"])


class TestChangingSources:
    """C46: a file that changes ends the run, by an exception and never by a signal."""

    def damage(self, case: Case, change: Callable[[Path], None], target: object, name: str) -> str:
        shard = case.sources["base"] / "x-00001-of-00002.safetensors"
        with once(target, name, lambda: change(shard)):
            ran = case.run("--threads", "1")
        assert ran.code == 1, ran.err
        assert sorted(path.name for path in case.root.iterdir()) == ["base", "recipe.yaml"]
        (message,) = ran.errors
        assert str(shard) in message
        return message

    def test_a_file_that_is_cut_before_the_first_read(self, case: Case) -> None:
        def cut(shard: Path) -> None:
            os.truncate(shard, shard.stat().st_size // 2)

        message = self.damage(case, cut, ninfer_convert.run.convert, "convert")
        assert "tensor a: " in message
        assert "file changed or truncated while reading" in message

    def test_a_file_that_is_cut_between_two_reads(self, case: Case) -> None:
        def cut(shard: Path) -> None:
            os.truncate(shard, 35000)

        message = self.damage(case, cut, ninfer_convert.encode.block_maker.BlockMaker, "make")
        assert "tensor b" in message
        assert "file changed or truncated while reading" in message

    def test_a_file_that_another_one_replaces(self, case: Case) -> None:
        def replace(shard: Path) -> None:
            other = shard.with_name("other")
            other.write_bytes(shard.read_bytes())
            os.utime(other, ns=(shard.stat().st_atime_ns, shard.stat().st_mtime_ns))
            os.replace(other, shard)

        assert "another file took its place" in self.damage(case, replace, ninfer_convert.run.convert, "convert")

    def test_a_file_that_is_written_to_is_noticed_at_the_end(self, case: Case) -> None:
        def touch(shard: Path) -> None:
            os.utime(shard, ns=(1, 1))

        assert "it was written to" in self.damage(case, touch, Checkpoint, "verify_unchanged")

    def test_a_file_system_that_cannot_map_files_is_no_matter(
        self, case: Case, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: object, **options: object) -> NoReturn:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

        monkeypatch.setattr(mmap, "mmap", refuse)
        case.converted()
        assert sha256(case.output) == expected


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


class TestLocales:
    """C54."""

    TOKENIZER = b"\xef\xbb\xbf" + '{"vocab": {"重み": 1,\r\n"é": 2}}\r\n'.encode()
    CONFIG = '{"model_type": "重み"}'.encode()

    def write(self, directory: bytes) -> None:
        os.makedirs(directory)
        write_safetensors(Path(os.fsdecode(directory)) / "model.safetensors", {"重み": filled("BF16", [4], ONE)})
        for name, content in ((b"tokenizer.json", self.TOKENIZER), (b"config.json", b"\xef\xbb\xbf" + self.CONFIG)):
            with open(os.path.join(directory, name), "wb") as file:
                file.write(content)

    @pytest.mark.parametrize(
        "place",
        ["é 空/mo del".encode(), b"\xff-model", b"new\nline", b"=a=b"],
        ids=["spaces", "no-utf-8", "line-end", "equals"],
    )
    @pytest.mark.parametrize("variables", [C_LOCALE, {"PYTHONUTF8": "1"}], ids=["c", "utf-8"])
    def test_text_is_utf_8_and_bytes_are_bytes(
        self, case: Case, place: bytes, variables: dict[str, str], tmp_path: Path
    ) -> None:
        root = os.fsencode(tmp_path)
        source, output = os.path.join(root, place), os.path.join(root, place, b"..", b"out \xff.ninfer")
        self.write(source)
        case.recipe(
            "{resource: frontend/tokenizer.json, file: tokenizer.json}",
            entry("重み", [4], "BF16", "重み"),
            sources="{base: {config: {model_type: 重み}}}",
        )
        words = command("run", case.recipe_path, "--source", source, "-o", output)
        ran = finish(start(words, variables))
        assert ran.code == 0, ran.err
        assert ran.out.endswith("out \\udcff.ninfer\n")
        assert len(ran.out.splitlines()) == len(ran.err.splitlines()) == 1
        with open(output, "rb") as file:
            raw = file.read()
        _, _, (tokenizer, tensor) = container.parse(raw)
        assert (tokenizer.payload, tensor.name) == (self.TOKENIZER, "重み")
        assert ran.out.startswith(hashlib.sha256(raw).hexdigest())
        with open(output + b".conversion.json", "rb") as file:
            report = json.loads(file.read())
        json.dumps(report, ensure_ascii=False).encode()
        assert report["artifact"]["sha256"] == hashlib.sha256(raw).hexdigest()
        assert sha256_of_plain(case, tmp_path) == report["artifact"]["sha256"]

    def test_a_missing_file_of_such_a_name_is_one_readable_line(self, case: Case) -> None:
        case.recipe(entry("w", [4], "BF16", "w"))
        words = command("plan", case.recipe_path, "--source", os.fsencode(case.root) + b"/\xff\n\x1b[31m")
        ran = finish(start(words, C_LOCALE))
        assert ran.code == 1
        assert len(ran.err.splitlines()) == 1
        assert "\x1b" not in ran.err
        assert "no such file or directory" in ran.err


def sha256_of_plain(case: Case, root: Path) -> str:
    """Returns the digest of the same conversion with ordinary paths, made in this process."""
    plain = root / "plain"
    TestLocales().write(os.fsencode(plain))
    output = root / "plain.ninfer"
    assert run_cli("run", case.recipe_path, "--source", plain, "-o", output, "-q").code == 0
    return sha256(output)


class TestLogs:
    """C59."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        case = Case(tmp_path)
        names = [f"w{i}" for i in range(60)]
        case.source({name: filled("BF16", [16, 64], ONE) for name in names})
        case.recipe(*(entry(name, [16, 64], Q4, name) for name in names))
        return case

    @pytest.mark.parametrize("variables", [{}, {"TERM": "dumb"}, {"NO_COLOR": "1"}])
    def test_a_log_has_one_plain_line_and_the_result_is_on_standard_output(
        self, case: Case, variables: dict[str, str]
    ) -> None:
        ran = spawn(*case.arguments("run"), environment=variables)
        assert ran.code == 0
        assert ran.out == f"{sha256(case.output)}  {case.output}\n"
        assert len(ran.err.splitlines()) == 1
        assert ran.err.startswith("wrote ")
        assert not {"\r", "\x1b"} & set(ran.out + ran.err)

    def on_a_terminal(self, case: Case, term: str) -> str:
        controller, terminal = pty.openpty()
        process = start(
            command(*case.arguments("run")), {"TERM": term, "NO_COLOR": "1"}, stdout=subprocess.DEVNULL, stderr=terminal
        )
        os.close(terminal)
        shown = b""
        # The terminal ends with an error when its last writer is gone.
        while True:
            try:
                piece = os.read(controller, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        os.close(controller)
        assert process.wait(timeout=60) == 0
        return shown.decode().replace("\r\n", "\n")

    def test_a_dumb_terminal_is_a_log(self, case: Case) -> None:
        shown = self.on_a_terminal(case, "dumb")
        assert len(shown.splitlines()) == 1
        assert not {"\r", "\x1b"} & set(shown)

    def test_a_terminal_without_colour_has_none(self, case: Case) -> None:
        shown = self.on_a_terminal(case, "xterm-256color")
        assert "\x1b[3" not in shown
        assert shown.splitlines()[-1].startswith("wrote ") or "wrote " in shown

    @pytest.mark.parametrize("words", [("plan", "--objects"), ("plan", "--json"), ("run",)])
    def test_a_reader_that_goes_away_is_no_failure(self, case: Case, words: tuple[str, ...]) -> None:
        process = start(command(*case.arguments(*words)))
        process.stdout.close()
        process.stdout = None
        ran = finish(process)
        assert ran.code == 0, ran.err
        assert "Traceback" not in ran.err
        assert "Broken" not in ran.err
        assert "Exception" not in ran.err
        assert case.output.exists() == (words == ("run",))

    def test_json_is_one_document(self, case: Case) -> None:
        ran = case.plan("--json", "--deep")
        document = json.loads(ran.out)
        assert ran.err == ""
        assert [item["name"] for item in document["objects"]] == [f"w{i}" for i in range(60)]
