"""Completion: what is offered where, in the protocol of each shell and in the shells themselves."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
from case_tools import run_cli

from ninfer_convert import cli
from ninfer_convert.artifact import container
from ninfer_convert.cli.shells import SHELLS
from ninfer_convert.layout import ROW_SPLIT
from ninfer_convert.recipe.files import shipped_recipes

HEAVY = ("numpy", "numba", "huggingface_hub", "distributed", "ml_dtypes")

LONELY = """\
schema: 1
id: lonely
artifact: {model_id: m, weights_id: w}
evidence: none
sources: {only: {}}
objects:
  - {name: norm, shape: [8], format: BF16, value: a}
  - {name: matrix, shape: [8, 64], format: W8G32_F16S, encoder: MAXABS_F16_RECIP_RNE_V1, value: b}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("model/shards", "my model"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("one.safetensors", "notes.txt", "one.ninfer", "plan.json", ".hidden.yaml"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "lonely.yaml").write_text(LONELY)
    return tmp_path


def answer(shell: str, words: str, number: str) -> list[str]:
    """Returns the lines that the command prints for a shell."""
    variables = {"COMP_WORDS": words, "COMP_CWORD": number, "_NINFER_CONVERT_COMPLETE": f"{shell}_complete"}
    code, out = with_variables(variables)
    assert code == 0
    return [line for line in out.split("\n") if line]


def with_variables(variables: Mapping[str, str]) -> tuple[int, str]:
    """Returns exit code and output of the command without a word, given variables; it complains of nothing."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", ["ninfer-convert"]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli._run()
    assert err.getvalue() == ""
    out.flush()
    return code, out.buffer.getvalue().decode()  # type: ignore[attr-defined]


def offered(*words: str) -> list[str]:
    """Returns what is offered in place of the last word; `file` and `dir` stand for what the shell itself offers."""
    lines = answer("zsh", "\n".join(["ninfer-convert", *words]), str(len(words)))
    return [line.split("\t")[1] if line.startswith("plain\t") else line.split("\t")[0] for line in lines]


def in_bash(*words: str) -> list[str]:
    """Returns what bash is told, which has broken the line into these words."""
    return answer("bash", "\n".join(["ninfer-convert", *words]), str(len(words)))


def write_artifact(path: Path, *names: str) -> Path:
    records, offset = [], 0
    for name in names:
        records.append(container.TensorRecord(name, (1, 128), "Q4G64_F16S", ROW_SPLIT, offset, 260))
        offset += 512
    head = container.encode_head(container.Identity("m", "w"), records)
    path.write_bytes(head + bytes(offset))
    return path


# -- what is offered ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ru"], ["run"]),
        (["re"], ["report", "recipe"]),
        (["recipe", ""], ["init", "check", "show", "tune", "list", "schema"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["run", "--str"], ["--stream"]),
        (["recipe", "tune", "--weight", ""], ["norm", "elements"]),
        (["export", "a", "--dtype", "b"], ["bf16"]),
        (["recipe", "init", "--matrix", "Q6"], ["Q6G64_F16S"]),
        (["recipe", "tune", "demo", "--formats", "Q4G64_F16S,Q"], ["Q4G64_F16S,Q5G64_F16S", "Q4G64_F16S,Q6G64_F16S"]),
        (["run", "--shard", ""], ["auto"]),
        (["run", "--dask", "l"], ["local:"]),
        (["run", "demo", "--report", ""], ["file"]),
        (["run", "demo", "-o", ""], ["file"]),
        (["demo", ""], ["dir"]),
        # RECIPE: shipped names, a part at a time, directories and YAML files
        (["plan", "qwen3.6-27b/n"], ["qwen3.6-27b/nvfp4"]),
        (["plan", "qw"], ["qwen3.6-27b/", "qwen3.8-27b/"]),
        (["plan", "m"], ["minilm-l6-v2", "model/"]),
        (["plan", "l"], ["lonely.yaml"]),
        (["plan", ".h"], [".hidden.yaml"]),
        (["plan", "./l"], ["./lonely.yaml"]),
        (["verify", "one.ninfer", "--recipe", "de"], ["demo"]),
        (["recipe", "show", "demo", "--diff", "mini"], ["minilm-l6-v2"]),
        (["verify", "o"], ["one.ninfer"]),
        (["prepare", "--plan", "p"], ["plan.json"]),
        # sources and inputs of the recipe on the line
        (["plan", "demo", "--source", ""], ["base=", "quantized="]),
        (["plan", "demo", "--source", "base=x", "--source", ""], ["quantized="]),
        (["plan", "demo", "--source", "base=mo"], ["base=model/"]),
        (["plan", "demo", "--source=ba"], ["--source=base="]),
        (["plan", "demo", "--source=base=mo"], ["--source=base=model/"]),
        (["plan", "lonely.yaml", "--source", "o"], ["one.safetensors"]),
        (["plan", "lonely.yaml", "--source", "h"], ["hf://"]),
        (["plan", "demo", "--input", ""], ["ranking="]),
        (["plan", "demo", "--input", "ranking=x"], ["file"]),
        (["recipe", "init", "m"], ["model/", "my model/"]),
        (["recipe", "init", "first=mo"], ["first=model/"]),
        # objects of a recipe, the formats they can have
        (["recipe", "show", "demo", "--object", "text/o"], ["text/output_head"]),
        (["recipe", "show", "--object", "norm", "lonely.yaml", "--object", ""], ["norm", "matrix"]),
        (["recipe", "show", "demo", "--object", "frontend/c"], ["frontend/chat_template.jinja"]),
        (["recipe", "show", "demo", "--object", "text/lay"], [f"text/layers/{layer}/" for layer in range(4)]),
        (["plan", "lonely.yaml", "--set", ""], ["norm=", "matrix="]),
        (["plan", "lonely.yaml", "--set", "norm="], ["norm=BF16", "norm=FP32", "norm=I32"]),
        (["plan", "lonely.yaml", "--set", "mat*=Q"], [f"mat*=Q{bits}G64_F16S" for bits in (4, 5, 6)]),
        (["plan", "lonely.yaml", "--set", "nothing=Q"], []),
        # a word copy keeps its format
        (["plan", "demo", "--set", "text/layers/0/attention"], []),
        (["plan", "demo", "--set", "text/layers/0/mlp/down="], []),
        (["plan", "demo", "--threads", ""], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_offers(here: Path, words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_a_directory_that_is_called_like_a_recipe_is_offered_once(here: Path) -> None:
    (here / "qwen3.6-27b").mkdir()
    (here / "qwen3.6-27b" / "own.yaml").write_bytes(b"")
    assert offered("plan", "qwen3.6") == ["qwen3.6-27b/groupwise-int", "qwen3.6-27b/nvfp4", "qwen3.6-27b/"]
    assert offered("plan", "qwen3.6-27b/o") == ["qwen3.6-27b/own.yaml"]
    assert offered("plan", "qwen3") == ["qwen3.6-27b/", "qwen3.8-27b/"]


def test_a_directory_without_recipes_is_offered_as_a_source_alone(here: Path) -> None:
    (here / "gptx").mkdir()
    (here / "gptx" / "model.safetensors").write_bytes(b"")
    assert offered("plan", "g") == []
    assert offered("plan", "lonely.yaml", "--source", "g") == ["gptx/"]
    (here / "gptx" / "own.yml").write_bytes(b"")
    assert offered("plan", "g") == ["gptx/"]
    assert offered("plan", "gptx/") == ["gptx/own.yml"]


def test_every_command_is_offered() -> None:
    listed = re.findall(r"^  ([a-z]+)  +[A-Z]", run_cli("--help").out, re.MULTILINE)
    assert sorted(offered("")) == sorted(listed)


def test_every_shipped_recipe_is_offered() -> None:
    found = [name for part in offered("recipe", "check", "") for name in
             (offered("recipe", "check", part) if part.endswith("/") else [part])]
    assert set(shipped_recipes()) <= set(found)


def test_objects_of_an_artifact_are_offered_from_its_directory(here: Path) -> None:
    write_artifact(here / "a.ninfer", "text/head", "text/layers/0/down", "text/layers/1/down")
    assert offered("inspect", "a.ninfer", "--object", "") == ["text/head", "text/layers/"]
    assert offered("inspect", "a.ninfer", "--object", "text/l") == ["text/layers/0/", "text/layers/1/"]
    assert offered("inspect", "a.ninfer", "--object", "text/layers/1") == ["text/layers/1/down"]
    assert offered("export", "a.ninfer", "--objects", "text/h") == ["text/head"]
    assert offered("inspect", "a.ninfer", "--filter", "text/h") == ["text/head"]
    # Nothing behind the directory is needed.
    with open(here / "a.ninfer", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 100)
    assert offered("inspect", "a.ninfer", "--object", "text/h") == ["text/head"]


def test_what_is_said_of_a_candidate() -> None:
    line = "plain\trun\tConvert a checkpoint by a recipe into one .ninfer artifact"
    assert answer("zsh", "ninfer-convert\nru", "1") == [line]
    assert answer("zsh", "ninfer-convert\nplan\ndemo\n--set\ntext/output_head=W", "4") == [
        "plain\ttext/output_head=W8G32_F16S\tas it is now"
    ]
    assert answer("fish", "ninfer-convert recipe show demo --object text/out", "text/out") == [
        "plain\ttext/output_head\tW8G32_F16S"
    ]


# -- what cannot be read gives nothing, and no complaint ------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"NINFER", b"NINFER\0\2" + b"\xff" * 8, b"NINFER\0\2\x10\0\0\0\0\0\0\0{\"version\":", b"\x89PNG" * 100],
    ids=["empty", "short", "long directory", "half a directory", "another kind"],
)
def test_a_broken_artifact_offers_nothing(here: Path, content: bytes) -> None:
    (here / "broken.ninfer").write_bytes(content)
    assert offered("inspect", "broken.ninfer", "--object", "") == []


def test_what_is_no_file_offers_nothing(here: Path) -> None:
    os.mkfifo(here / "pipe")
    for name in ("pipe", "model", "nowhere", "nowhere/else", "a\\"):
        assert offered("inspect", name, "--object", "") == []
    assert offered("inspect", "--object", "") == []


@pytest.mark.parametrize(
    "content", [b"", b"schema: 2\n", b"a: [", b"\xff\xfe", LONELY.replace("BF16", "BF61").encode()]
)
def test_a_broken_recipe_offers_nothing(here: Path, content: bytes) -> None:
    (here / "broken.yaml").write_bytes(content)
    for option in ("--set", "--input"):
        assert offered("plan", "broken.yaml", option, "") == []
    assert offered("plan", "nowhere", "--set", "") == []
    assert offered("recipe", "show", "broken.yaml", "--object", "") == []


def test_an_unreadable_directory_offers_nothing(here: Path) -> None:
    assert offered("plan", "nowhere/a") == []
    assert offered("plan", "notes.txt/") == []


def test_names_that_no_terminal_should_see_are_not_offered(here: Path) -> None:
    write_artifact(here / "a.ninfer", "plain", "bell\x07", "line\nbreak", "esc\x1b[2J")
    assert offered("inspect", "a.ninfer", "--object", "") == ["plain"]
    (here / "bell\x07.yaml").write_bytes(b"")
    assert offered("plan", "bel") == []


# -- the protocols --------------------------------------------------------------------------------------------


def test_bash_breaks_words_at_equals_signs_and_replaces_what_follows(here: Path) -> None:
    assert in_bash("plan", "demo", "--source", "ba") == ["plain base="]
    assert in_bash("plan", "demo", "--source", "base", "=") == [
        "plain model/", r"plain my\ model/", "plain one.safetensors"
    ]
    assert in_bash("plan", "demo", "--source", "base", "=", "mo") == ["plain model/"]
    assert in_bash("plan", "demo", "--source", "base", "=", "x", "--source", "") == ["plain quantized="]
    assert in_bash("plan", "demo", "--source", "=", "ba") == ["plain base="]
    assert in_bash("plan", "demo", "--source", "=", "base", "=", "mo") == ["plain model/"]
    assert in_bash("plan", "lonely.yaml", "--set", "matrix", "=", "W") == ["plain W8G32_F16S"]
    assert in_bash("plan", "demo", "--input", "ranking", "=", "x") == ["file"]


def test_bash_keeps_together_what_is_quoted(here: Path) -> None:
    assert in_bash("plan", "lonely.yaml", "--set", "'matrix=W") == ["plain matrix=W8G32_F16S"]
    assert in_bash("plan", "lonely.yaml", "--source", '"my m') == ["plain my model/"]
    assert in_bash("plan", "lonely.yaml", "--source", r"my\ m") == [r"plain my\ model/"]


def test_bash_is_told_nothing_that_it_would_run(here: Path) -> None:
    write_artifact(here / "a.ninfer", "$(reboot)", "a;b", "`c`", "plain")
    assert in_bash("inspect", "a.ninfer", "--object", "") == [
        r"plain \$\(reboot\)", r"plain a\;b", r"plain \`c\`", "plain plain"
    ]


def test_fish_tells_the_line_up_to_the_cursor(here: Path) -> None:
    assert answer("fish", "ninfer-convert plan demo --source base=x --source ", "") == ["plain\tquantized="]
    assert answer("fish", "ninfer-convert plan demo --source base=mo", "base=mo") == ["plain\tbase=model/"]
    assert answer("fish", "ninfer-convert plan demo --input ranking=x", "ranking=x") == ["file\tranking=\tx"]
    assert answer("fish", "ninfer-convert plan demo --source=ba", "--source=ba")[0].split("\t")[1] == "--source=base="


def test_a_path_behind_a_name_is_the_shells_own_matter() -> None:
    assert answer("zsh", "ninfer-convert\nplan\ndemo\n--input\nranking=x", "4") == ["file\tranking="]


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_the_command_prints_the_script_that_the_variable_gives(shell: str) -> None:
    ran = run_cli("completion", shell)
    assert (ran.code, ran.err) == (0, "")
    code, source = with_variables({"_NINFER_CONVERT_COMPLETE": f"{shell}_source"})
    assert (code, source.rstrip("\n")) == (0, ran.out.rstrip("\n"))
    assert f"_NINFER_CONVERT_COMPLETE={shell}_complete" in ran.out


def test_another_shell_is_a_usage_error() -> None:
    ran = run_cli("completion", "tcsh")
    assert (ran.code, ran.out) == (2, "")
    assert "'tcsh' is not one of 'bash', 'fish', 'zsh'" in ran.err


@pytest.mark.parametrize("words", ["\nru", "\nrun\n--st", "\nplan\n--", "\nbatch\n--", "\nrecipe\n", "\nfinalize\n--",
                                   "\nrun\nq", "\nverify\n--", "\ninspect\na.ninfer\n--object\n"])
def test_completion_loads_nothing_heavy(here: Path, words: str) -> None:
    write_artifact(here / "a.ninfer", "one", "two")
    script = (
        "import sys\nfrom ninfer_convert import cli\n"
        f"cli._run()\nprint([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    variables = {
        **os.environ,
        "COMP_WORDS": "ninfer-convert" + words,
        "COMP_CWORD": str(words.count("\n")),
        "_NINFER_CONVERT_COMPLETE": "bash_complete",
    }
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout.startswith("plain ")


# -- the shells themselves ------------------------------------------------------------------------------------

PROMPT = "ready:"
TYPED = [
    ("ninfer-convert comple\tba\t", "ninfer-convert completion bash "),
    ("ninfer-convert run --stre\t", "ninfer-convert run --stream "),
    ("ninfer-convert recipe check mini\t", "ninfer-convert recipe check minilm-l6-v2 "),
    ("ninfer-convert plan demo --source ba\tmod\t", "ninfer-convert plan demo --source base=model/"),
    ("ninfer-convert plan demo --input ran\tone.n\t", "ninfer-convert plan demo --input ranking=one.ninfer "),
    ("ninfer-convert plan lonely.yaml --set mat\tW\t", "ninfer-convert plan lonely.yaml --set matrix=W8G32_F16S "),
    ("ninfer-convert inspect a.n\t--object text/l\t", "ninfer-convert inspect a.ninfer --object text/layers/0/down "),
    ("ninfer-convert run demo -o one.n\t", "ninfer-convert run demo -o one.ninfer "),
]


@pytest.fixture
def path_with_command(here: Path) -> str:
    """A PATH with the command of this environment, in a directory with an artifact."""
    write_artifact(here / "a.ninfer", "text/head", "text/layers/0/down")
    (here / "bin").mkdir()
    script = here / "bin" / "ninfer-convert"
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m ninfer_convert \"$@\"\n")
    script.chmod(0o755)
    return f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}"


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, *command: str, **variables: str) -> None:
        self._end, other = pty.openpty()
        termios.tcsetwinsize(other, (50, 500))
        self._process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", **variables},
        )
        os.close(other)

    def until(self, text: str) -> str:
        """Returns what the shell prints up to a text."""
        found = b""
        while not found.endswith(text.encode()):
            assert select.select([self._end], [], [], 120)[0], found
            found += os.read(self._end, 1)
        return found.decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)


def completed(terminal: Terminal, typed: str) -> str:
    """Returns the line that keys lead to: it is quoted and echoed, not run."""
    terminal.until(PROMPT)
    # To the begin of the line, where what makes it a text is put in, and to its end again.
    terminal.type(f"{typed}\x01echo '<\x05>'\r")
    terminal.until("\n<")
    return terminal.until(">\r\n").removesuffix(">\r\n")


@pytest.fixture
def bash(here: Path, path_with_command: str) -> Iterator[Terminal]:
    terminal = Terminal("bash", "--norc", "--noprofile", "-i", PS1=PROMPT, PATH=path_with_command)
    terminal.until(PROMPT)
    terminal.type("source <(ninfer-convert completion bash)\r")
    yield terminal
    terminal.close()


def test_bash_itself(bash: Terminal) -> None:
    assert [completed(bash, typed) for typed, _ in TYPED] == [line for _, line in TYPED]


@pytest.mark.shells
def test_zsh_itself(here: Path, path_with_command: str) -> None:
    terminal = Terminal("zsh", "-f", "-i", PS1=PROMPT, PATH=path_with_command, ZDOTDIR=str(here), PROMPT_EOL_MARK="")
    terminal.until(PROMPT)
    terminal.type("bindkey -e; autoload -Uz compinit && compinit -u -d dump; source <(ninfer-convert completion zsh)\r")
    try:
        # The space behind a whole word is taken back when the cursor leaves it.
        assert [completed(terminal, typed) for typed, _ in TYPED] == [line.rstrip() for _, line in TYPED]
    finally:
        terminal.close()


@pytest.mark.shells
@pytest.mark.parametrize(("typed", "line"), TYPED)
def test_fish_itself(here: Path, path_with_command: str, typed: str, line: str) -> None:
    fish = shutil.which("fish")
    assert fish is not None
    text = ""
    for part in typed.split("\t")[:-1]:
        text += part
        script = 'ninfer-convert completion fish | source; complete --do-complete "$argv[1]"'
        variables = {**os.environ, "PATH": path_with_command, "HOME": str(here)}
        done = subprocess.run([fish, "--no-config", "-c", script, text], env=variables, capture_output=True, text=True,
                              check=True)
        (found,) = {one.split("\t")[0] for one in done.stdout.splitlines()}
        text = text[: text.rfind(" ") + 1] + found + ("" if found[-1] in "/=" else " ")
    assert text == line
