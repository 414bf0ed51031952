"""The library: public names, what loads when, what every function tells, and the example that people copy."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import Repo, client_environment, serving
from miniatures import ROOT
from oracle import container
from oracle.values import reconstruct
from test_hub import shard_name, write_model

import ninfer_convert
from ninfer_convert.errors import ArtifactError, SourceError, UsageError
from ninfer_convert.layout import geometry

PUBLIC = tuple(ninfer_convert.__all__)
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(ninfer_convert, name))]

EXAMPLE = '''\
from pathlib import Path
from ninfer_convert import Artifact, convert, gather_rows, load_recipe, make_plan, open_checkpoint
from ninfer_convert import read_values, verify_artifact

with open_checkpoint(".cache/minilm/model") as checkpoint:
    plan = make_plan(load_recipe("minilm-l6-v2"), {"base": checkpoint})
    convert(plan, Path("minilm.ninfer"), threads=2, overwrite=True)
assert verify_artifact("minilm.ninfer").ok
with Artifact.open("minilm.ninfer") as artifact:
    names = list(artifact.objects)                                      # in payload order
    values = read_values(artifact, "embeddings/tokens", 100, 110)       # [10, 384], binary32
    payload = gather_rows(artifact, "embeddings/tokens", [2023, 2003])  # a payload of the same format and layout
'''
"""What README shows."""


def test_the_example_of_the_readme_runs(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache" / "minilm").mkdir(parents=True)
    (tmp_path / ".cache" / "minilm" / "model").symlink_to(minilm)
    names: dict[str, Any] = {}
    exec(compile(EXAMPLE, "README.md", "exec"), names)
    stored = {entry.name: entry for entry in container.parse(Path("minilm.ninfer").read_bytes())[2]}
    assert names["names"] == list(stored)
    assert (names["values"].shape, names["values"].dtype) == ((10, 384), np.float32)
    numeric = ninfer_convert.FORMATS["W8G32_F16S"]
    assert len(names["payload"]) == geometry(numeric, (2, 384)).nbytes
    tokens = stored["embeddings/tokens"]
    for row, place in ((2023, 0), (2003, 1)):
        alone = reconstruct("W8G32_F16S", (2, 384), names["payload"])[place * 384 : (place + 1) * 384]
        whole = tokens.payload
        scales, codes = container_row(whole, row)
        assert alone == reconstruct("W8G32_F16S", (1, 384), codes.ljust(512, b"\0") + scales)


def container_row(payload: bytes, row: int) -> tuple[bytes, bytes]:
    """Returns the scale and code bytes of one row of the token embedding, [30522, 384] in W8G32_F16S."""
    scales = 30522 * 384
    assert scales % 256 == 0
    return payload[scales + row * 24 : scales + (row + 1) * 24], payload[row * 384 : (row + 1) * 384]


def test_the_readme_shows_this_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if "from ninfer_convert import" in readme:
        assert EXAMPLE in readme


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_come_from_the_module_that_type_checkers_are_told(name: str) -> None:
    stub = ast.parse((ROOT / "ninfer_convert" / "__init__.pyi").read_text(encoding="utf-8"))
    told = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(told) == set(PUBLIC)
    module, original = told[name]
    assert module is not None
    assert getattr(ninfer_convert, name) is getattr(importlib.import_module(module), original)


def test_no_public_name_is_hidden_by_a_module() -> None:
    """A module that is imported becomes an attribute of the package and would take the name."""
    modules = {path.stem for path in (ROOT / "ninfer_convert").glob("*.py")}
    assert modules.isdisjoint(PUBLIC)


def test_public_names_are_listed() -> None:
    assert set(PUBLIC) <= set(dir(ninfer_convert))
    assert sorted(PUBLIC) == list(PUBLIC)


def two_sources(directory: Path, wheres: str) -> str:
    """Writes a recipe of two sources; returns a program that converts by it and prints where they came from."""
    recipe = directory / "recipe.yaml"
    objects = "  - {name: w1, shape: [128, 1024], format: BF16, value: w1}\n"
    objects += "  - {name: v2, shape: [700], format: BF16, value: other:m.v2}\n"
    ignore = "ignore: {base: [v1, w2, w3, v2, v3, unwanted], other: [w*, m.v1, m.v3, unwanted]}\n"
    sources = "sources: {base: {}, other: {prefix: {v: m.v}}}\n"
    identity = "schema: 1\nid: two\nartifact: {model_id: m, weights_id: w}\nevidence: none\n"
    recipe.write_text(f"{identity}{sources}{ignore}objects:\n{objects}", encoding="utf-8")
    return (
        "from pathlib import Path\n"
        "from ninfer_convert import convert, load_recipe, make_plan, open_sources\n"
        f"recipe = load_recipe({str(recipe)!r})\n"
        f"with open_sources(recipe, {wheres}) as sources:\n"
        "    plan = make_plan(recipe, sources)\n"
        f"    convert(plan, Path({str(directory)!r}) / 'out.ninfer', threads=1)\n"
        "    print(*(source.location for source in sources.values()), plan.is_complete)\n"
    )


def ran(program: str, variables: Mapping[str, str]) -> list[str]:
    """Runs a program in a process of its own, which sees these variables; returns the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_sources_are_opened_where_they_lie_and_from_the_hub(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "local").mkdir()
    program = two_sources(tmp_path / "local", f"{{'base': Path({str(model)!r}), 'other': {str(model)!r}}}")
    assert ran(program, {}) == [str(model), str(model), "True"]
    (tmp_path / "hub").mkdir()
    repo = Repo(model)
    with serving(n=repo) as hub:
        program = two_sources(tmp_path / "hub", f"{{'base': 'hf://o/n', 'other': {str(model)!r}}}")
        assert ran(program, client_environment(hub, tmp_path / "home")) == [
            f"hf://o/n@{repo.commit}", str(model), "True"
        ]
    assert (tmp_path / "hub" / "out.ninfer").read_bytes() == (tmp_path / "local" / "out.ninfer").read_bytes()
    snapshot = tmp_path / "home" / "hub" / "models--o--n" / "snapshots" / repo.commit
    assert {path.name for path in snapshot.iterdir()} == {
        "config.json", "model.safetensors.index.json", shard_name(1)
    }


def test_a_source_without_a_place_and_a_place_without_a_source_are_told(tmp_path: Path) -> None:
    two_sources(tmp_path, "")
    recipe = ninfer_convert.load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(UsageError) as caught:
        with ninfer_convert.open_sources(recipe, {"base": tmp_path, "others": tmp_path}):
            pass
    assert list(caught.value.messages) == [
        "source other of the recipe is not given",
        "the recipe has no source others; it has base, other",
    ]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ninfer_convert' has no attribute 'nothing'"):
        ninfer_convert.nothing  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_gives_and_rests_on(name: str) -> None:
    function = getattr(ninfer_convert, name)
    text = inspect.getdoc(function) or ""
    assert text.endswith(".") or "\n" in text
    assert "Raises:" in text or name in ("check_plan", "check_recipe", "decode_rows")
    assert "Source:" in text or name in ("make_plan", "open_checkpoint", "load_recipe")
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(part.annotation is not inspect.Parameter.empty for part in signature.parameters.values())


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.splitlines()[-1].split())


def test_names_load_when_they_are_used() -> None:
    heavy = {"numpy", "ninfer_convert.artifact.reader"}
    assert modules_after("import ninfer_convert; dir(ninfer_convert)").isdisjoint(heavy)
    loaded = modules_after("from ninfer_convert import Artifact, read_values, verify_artifact")
    assert "numpy" in loaded
    assert loaded.isdisjoint({"numba", "huggingface_hub", "click", "ninfer_convert.encode.kernels"})


@pytest.mark.parametrize("command", ["verify", "inspect", "compare", "export"])
def test_the_help_of_a_command_does_not_wait_for_numpy(command: str) -> None:
    code = (
        "from ninfer_convert.cli import cli\n"
        f"try:\n    cli.main([{command!r}, '--help'], prog_name='ninfer-convert')\nexcept SystemExit:\n    pass"
    )
    assert modules_after(code).isdisjoint({"numpy", "numba", "yaml", "huggingface_hub", "ninfer_convert.plan.planner"})


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "ninfer_convert" / "py.typed").is_file()


def test_errors_are_of_one_root() -> None:
    for error in (ArtifactError, SourceError):
        assert issubclass(error, ninfer_convert.ConvertError)
