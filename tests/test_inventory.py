"""Directories against plans and recipes: every member that differs is told once, by its object."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from miniatures import ROOT
from oracle import container
from pipeline import converted, planned, stand_in_places

from ninfer_convert.artifact.inventory import check_plan, check_recipe
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.verify import Problem
from ninfer_convert.plan.planner import Plan
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.stand_in.checkpoints import StandIn

DEMO = ROOT / "recipes" / "demo.yaml"
Objects = list[container.Tensor | container.Resource]


@pytest.fixture(scope="module")
def demo_artifact(demo: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inventory") / "demo.ninfer"
    converted(DEMO, path, *stand_in_places(demo))
    return path


def rebuilt(path: Path, target: Path, edit: Callable[[Objects], Any], identity: tuple[str, str] | None = None) -> Path:
    """Writes the artifact anew after an edit of its list of objects."""
    model_id, weights_id, objects = container.parse(path.read_bytes())
    edit(objects)
    target.write_bytes(container.build(*(identity or (model_id, weights_id)), objects))
    return target


def index_of(objects: Objects, name: str) -> int:
    return next(index for index, stored in enumerate(objects) if stored.name == name)


def replaced(objects: Objects, name: str, **members: Any) -> None:
    index = index_of(objects, name)
    objects[index] = dataclasses.replace(objects[index], **members)


def problems(path: Path, demo: StandIn, recipe: Path = DEMO) -> tuple[list[Problem], list[Problem]]:
    """Returns what the plan and what the recipe alone find."""
    with Artifact.open(path) as artifact, planned(recipe, *stand_in_places(demo)) as plan:
        return list(check_plan(artifact, plan)), list(check_recipe(artifact, load_recipe(recipe)))


def test_a_conversion_is_what_plan_and_recipe_say(demo: StandIn, demo_artifact: Path) -> None:
    assert problems(demo_artifact, demo) == ([], [])


def test_identity_is_compared(demo: StandIn, demo_artifact: Path, tmp_path: Path) -> None:
    path = rebuilt(demo_artifact, tmp_path / "a.ninfer", lambda objects: None, ("other\x1b", "nine"))
    expected = [
        Problem(None, "identity", "model_id is 'other\\x1b'; the recipe states 'demo'"),
        Problem(None, "identity", "weights_id is 'nine'; the recipe states 'nine-formats'"),
    ]
    assert problems(path, demo) == (expected, expected)


@pytest.mark.parametrize(
    ("edit", "object_name", "check", "detail"),
    [
        (
            lambda objects: objects.pop(index_of(objects, "text/final_norm")),
            "text/final_norm",
            "inventory",
            "the recipe names this object; the artifact does not hold it",
        ),
        (
            lambda objects: objects.append(container.Resource("extra", b"x")),
            "extra",
            "inventory",
            "the recipe does not name this object",
        ),
        (
            lambda objects: replaced(objects, "text/final_norm", shape=(2, 64)),
            "text/final_norm",
            "shape",
            "[2, 64]; the recipe states [128]",
        ),
        (
            lambda objects: replaced(objects, "text/layers/0/gdn/convolution", shape=(256, 4)),
            "text/layers/0/gdn/convolution",
            "shape",
            "[256, 4]; the recipe states [4, 256]",
        ),
        (
            lambda objects: replaced(objects, "text/draft_head_token_ids", format="FP32"),
            "text/draft_head_token_ids",
            "format",
            "FP32; the recipe states I32",
        ),
        (
            lambda objects: objects.insert(0, objects.pop(index_of(objects, "text/final_norm"))),
            "text/final_norm",
            "order",
            "stands where the recipe has 'frontend/tokenizer.json', 0 objects of both before it",
        ),
        (
            lambda objects: objects.append(objects.pop(2)),
            "text/token_embedding",
            "order",
            "stands where the recipe has 'frontend/chat_template.jinja', 2 objects of both before it",
        ),
    ],
)
def test_an_object_that_differs_is_named_once(
    demo: StandIn,
    demo_artifact: Path,
    tmp_path: Path,
    edit: Callable[[Objects], Any],
    object_name: str,
    check: str,
    detail: str,
) -> None:
    path = rebuilt(demo_artifact, tmp_path / "a.ninfer", edit)
    by_plan, by_recipe = problems(path, demo)
    assert by_plan == by_recipe == [Problem(object_name, check, detail)]


def test_a_tensor_in_place_of_a_resource_is_another_kind(demo: StandIn, demo_artifact: Path, tmp_path: Path) -> None:
    def edit(objects: Objects) -> None:
        index = index_of(objects, "frontend/chat_template.jinja")
        objects[index] = container.Tensor(objects[index].name, (2,), "BF16", b"abcd")

    path = rebuilt(demo_artifact, tmp_path / "a.ninfer", edit)
    by_plan, by_recipe = problems(path, demo)
    assert by_plan == [Problem("frontend/chat_template.jinja", "kind", "a tensor; the recipe states a resource")]
    assert by_recipe == [Problem("frontend/chat_template.jinja", "kind", "a tensor; the recipe states a resource")]


def test_a_resource_of_another_size_moves_others_and_is_told_alone(
    demo: StandIn, demo_artifact: Path, tmp_path: Path
) -> None:
    path = rebuilt(
        demo_artifact,
        tmp_path / "a.ninfer",
        lambda objects: replaced(objects, "frontend/tokenizer.json", payload=bytes(70_000)),
    )
    by_plan, by_recipe = problems(path, demo)
    size = (demo.base / "tokenizer.json").stat().st_size
    assert by_plan == [Problem("frontend/tokenizer.json", "bytes", f"70000; the recipe states {size}")]
    assert by_recipe == []


def test_an_object_behind_its_first_place_is_told_by_the_plan(
    demo: StandIn, demo_artifact: Path, tmp_path: Path
) -> None:
    data = demo_artifact.read_bytes()
    end = 16 + int.from_bytes(data[8:16], "little")
    directory = json.loads(data[16:end])
    directory["objects"][-1]["offset"] += 512
    text = json.dumps(directory, separators=(",", ":"), ensure_ascii=False).encode()
    payload = -(-end // 4096) * 4096
    last = directory["objects"][-1]
    begin = payload + last["offset"] - 512
    path = tmp_path / "a.ninfer"
    head = data[:8] + len(text).to_bytes(8, "little") + text
    path.write_bytes(head.ljust(payload, b"\0") + data[payload:begin] + bytes(512) + data[begin:])
    by_plan, by_recipe = problems(path, demo)
    detail = f"{last['offset']}; a plan takes the first permitted one, {last['offset'] - 512}"
    assert by_plan == [Problem("text/draft_head_token_ids", "offset", detail)]
    assert by_recipe == []


# A recipe alone


OPTIONAL = """\
schema: 1
id: t
artifact: {model_id: m, weights_id: w}
evidence: none
sources: {base: {}}
objects:
  - {name: a, shape: [2], format: BF16, value: a}
  - component: extra
    optional: true
    objects:
      - {name: extra/b, shape: [2], format: BF16, value: b}
      - {name: extra/c, shape: [2], format: BF16, value: c}
  - {resource: r, file: r.txt, sha256: DIGEST}
"""


@pytest.fixture
def optional(tmp_path: Path) -> Path:
    path = tmp_path / "optional.yaml"
    path.write_text(OPTIONAL.replace("DIGEST", hashlib.sha256(b"right").hexdigest()), encoding="utf-8")
    return path


def artifact_of(tmp_path: Path, *names: str, resource: bytes = b"right") -> Path:
    tensors = [container.Tensor(name, (2,), "BF16", b"abcd") for name in names]
    path = tmp_path / "made.ninfer"
    path.write_bytes(container.build("m", "w", [*tensors, container.Resource("r", resource)]))
    return path


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["a", "extra/b", "extra/c"], None),
        (["a"], None),
        (["a", "extra/b"], "extra/c"),
        (["a", "extra/c"], "extra/b"),
        (["extra/b", "extra/c"], "a"),
    ],
)
def test_an_optional_component_is_there_whole_or_not_at_all(
    tmp_path: Path, optional: Path, names: list[str], missing: str | None
) -> None:
    with Artifact.open(artifact_of(tmp_path, *names)) as artifact:
        found = check_recipe(artifact, load_recipe(optional))
    detail = "the recipe names this object; the artifact does not hold it"
    assert found == (() if missing is None else (Problem(missing, "inventory", detail),))


def test_a_pinned_resource_is_hashed_unless_pins_are_waived(tmp_path: Path, optional: Path) -> None:
    with Artifact.open(artifact_of(tmp_path, "a", resource=b"wrong")) as artifact:
        (problem,) = check_recipe(artifact, load_recipe(optional))
        assert check_recipe(artifact, load_recipe(optional), unpinned=True) == ()
    wrong, right = (hashlib.sha256(content).hexdigest() for content in (b"wrong", b"right"))
    assert problem == Problem("r", "digest", f"SHA-256 is {wrong}; the recipe requires {right}")


def test_the_command_checks_an_inventory_without_a_source(tmp_path: Path, optional: Path) -> None:
    done = run("verify", artifact_of(tmp_path, "a"), "--recipe", optional)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1] == "its inventory is that of recipe t"
    done = run("verify", artifact_of(tmp_path, "a", resource=b"wrong"), "--recipe", optional, "--json")
    assert done.code == 1
    assert [problem["check"] for problem in json.loads(done.out)["problems"]] == ["digest"]
    assert run("verify", tmp_path / "made.ninfer", "--recipe", optional, "--unpinned").code == 0


@pytest.mark.parametrize(
    ("before", "after", "why", "rest"),
    [
        (
            "weights_id: w",
            "weights_id: draft",
            "weights_id is 'w'; the recipe states 'draft'",
            [],
        ),
        (
            "{model_id: m, weights_id: w}",
            "{model_id: n, weights_id: draft}",
            "model_id is 'm'; the recipe states 'n'; weights_id is 'w'; the recipe states 'draft'",
            [],
        ),
        (
            "name: a, shape: [2], format: BF16",
            "name: z, shape: [2], format: BF16",
            "2 objects in one of them alone, a first",
            [
                "a: inventory: the recipe does not name this object",
                "z: inventory: the recipe names this object; the artifact does not hold it",
            ],
        ),
        ("name: a, shape: [2]", "name: a, shape: [3]", None, ["a: shape: [2]; the recipe states [3]"]),
    ],
)
def test_the_first_line_says_that_an_artifact_is_of_another_recipe(
    tmp_path: Path, optional: Path, before: str, after: str, why: str | None, rest: list[str]
) -> None:
    path = artifact_of(tmp_path, "a", "extra/b", "extra/c")
    optional.write_text(optional.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    done = run("verify", path, "--recipe", optional)
    first = [] if why is None else [f"error: {path} is the artifact of another recipe: {why}"]
    assert (done.code, done.err.splitlines()) == (1, [*first, *(f"error: {line}" for line in rest)])
    assert done.out == f"{path} is well formed: 4 objects, 17 bytes checked\n"
    # As JSON every one of the problems stands by itself.
    found = json.loads(run("verify", path, "--recipe", optional, "--json").out)["problems"]
    assert len(found) == len(rest) or {problem["check"] for problem in found} == {"identity"}


def test_every_shipped_plan_of_full_size_is_its_own_inventory(miniatures: Any, tmp_path: Path) -> None:
    """At miniature size: recipe and plan of one conversion agree about every object."""
    for path in sorted((miniatures.recipes / "qwen3.6-27b").glob("*.yaml")):
        made = miniatures.models["qwen3.6-27b"]
        places, inputs = stand_in_places(made)
        with planned(path, {name: places[name] for name in load_recipe(path).sources}, inputs) as plan:
            head_only = tmp_path / "head.ninfer"
            write_head(plan, head_only)
            with Artifact.open(head_only) as artifact:
                assert check_plan(artifact, plan) == ()
                assert check_recipe(artifact, load_recipe(path), unpinned=True) == ()


def write_head(plan: Plan, path: Path) -> None:
    with path.open("wb") as file:
        file.write(plan.head)
        file.truncate(plan.file_bytes)
