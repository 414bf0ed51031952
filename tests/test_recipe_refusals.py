"""Wrong recipes: every refusal with its message and place, limits, and nothing but a RecipeError otherwise.

Source: recipe.md; cases C31, C32, C34, C55, C56, C57.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_texts import FIXTURES, HEAD, SMALL, change, load, messages

from ninfer_convert.errors import RecipeError
from ninfer_convert.recipe.loader import load_recipe


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty directory the working directory, so that messages begin with bare file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rejections() -> list[Any]:
    cases = []
    for block in (FIXTURES / "recipe_rejections.txt").read_text(encoding="utf-8").split("\n\n")[1:]:
        lines = block.rstrip("\n").split("\n")
        before = "\n".join(line[2:] for line in lines if line.startswith("< "))
        after = "\n".join(line[2:] for line in lines if line.startswith("> "))
        told = [line for line in lines if not line.startswith(("< ", "> "))]
        cases.append(pytest.param(before, after, told, id=after.strip()[:60]))
    return cases


@pytest.mark.parametrize(("before", "after", "told"), rejections())
def test_a_wrong_recipe_is_refused_with_every_place(before: str, after: str, told: list[str], here: Path) -> None:
    assert SMALL.count(before) == 1
    assert [message.removeprefix("recipe.yaml:") for message in messages(SMALL.replace(before, after))] == told


OBJECT = "{name: x, shape: [1], format: BF16, value: v}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            HEAD.replace("{base: {}, other: {}}", "{}") + f"objects: [{OBJECT}]",
            ["5:10: a recipe needs at least one source"],
        ),
        (HEAD + "objects: x", ["6:10: expected a list of objects, found 'x'"]),
        (HEAD + "objects: []", ["6:10: expected a list of objects, found an empty list"]),
        (HEAD + "objects: [x]", ["6:11: expected an object, a mapping, found 'x'"]),
        (HEAD + f"objects: [{OBJECT}, {{component: c}}]", ["6:58: a component needs 'objects'"]),
        (HEAD + f"objects: [{OBJECT.replace('v}', chr(39) * 2 + '}')}]", ["6:54: expected a tensor, found empty text"]),
        (
            HEAD + f"objects: [{OBJECT.replace('v}', 'v, require: [{range: 5}]}')}]",
            ["6:75: expected the bounds [low, high], both included, found '5'"],
        ),
        (HEAD + f"objects: [{OBJECT}]\nconditions: x", ["7:13: expected a list of conditions, found 'x'"]),
        (HEAD + f"objects: [{OBJECT}]\nsets: {{a: {{all: [{{from: 1, thru: 2}}]}}}}", [
            "7:28: unknown key 'thru' in a set; nearest is 'through'",
        ]),
        (HEAD + f"objects: [{OBJECT}]\nsets: [a]", ["7:7: expected a mapping of sets, found a list"]),
        (HEAD + f"objects: [{OBJECT}]\nvalues: {{a: ''}}", ["7:13: expected a tensor, found empty text"]),
    ],
)  # fmt: skip
def test_a_section_of_the_wrong_kind_is_refused(text: str, told: list[str], here: Path) -> None:
    assert [message.removeprefix("recipe.yaml:") for message in messages(text)] == told


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{for: {l: fwe}, names: [<l>]}", ["7:27: unknown set 'fwe'; nearest is 'few'"]),
        ("{for: {l: few}, name: [<l>]}", [
            "7:33: unknown key 'name' in a 'for' block; nearest is 'names'",
        ]),
        ("{for: {l: few}, objects: [<l>], names: [<l>]}", [
            "7:33: unknown key 'objects' in a 'for' block; known: for, names"
        ]),
        ("{for: {l: few}, values: {q: x}, names: [<l>]}", [
            "7:33: unknown key 'values' in a 'for' block; known: for, names"
        ]),
        ("{for: {l: few}, names: <l>}", ["7:40: expected a list of globs of tensor names, found '<l>'"]),
        ("{for: {l: few}, names: []}", ["7:40: expected a list of globs of tensor names, found an empty list"]),
        ("{for: {l: few}, names: [<b>]}", ["7:41: placeholder <b> is not defined here; known: <l>"]),
        ("{for: {l: few}, names: [lm_head.*]}", [
            "7:41: 'lm_head.*' is listed again in another round of a loop; it lacks a variable"
        ]),
        ("{for: {l: few}, names: [{when: {l: [1]}, names: [<l>]}]}", [
            "7:48: 'when' never holds: no round of the loops around it is in its sets"
        ]),
        ("{when: {l: few}, names: [x]}", ["7:25: 'l' is no loop variable here; no loop is around it"]),
        ("{names: [x]}", ["7:17: a block of ignored names needs one of the keys for, when"]),
        ("{fro: {l: few}, names: [<l>]}", ["7:18: unknown key 'fro' in a block of ignored names; nearest is 'for'"]),
        ("[x]", ["7:17: expected a glob of tensor names, found a list"]),
    ],
)  # fmt: skip
def test_a_wrong_block_of_ignored_names_is_refused_at_its_place(entry: str, told: list[str], here: Path) -> None:
    text = HEAD + f"objects: [{OBJECT}]\nignore: {{base: [{entry}]}}\nsets: {{few: [0, 4]}}\n"
    assert [message.removeprefix("recipe.yaml:") for message in messages(text)] == told


def test_problems_of_several_sections_are_told_together_in_order(here: Path) -> None:
    text = SMALL.replace("[-1e1, .5]", "[-1e1, x]").replace("step: 2", "step: 0").replace("rule: exact", "rule: exakt")
    assert [message.split(": ")[0] for message in messages(text)] == [
        "recipe.yaml:23:36",
        "recipe.yaml:41:38",
        "recipe.yaml:86:98",
    ]


def test_an_error_in_a_loop_is_told_once(here: Path) -> None:
    entry = "{name: <l>, shape: [0], format: BF16, value: x}"
    text = f"{HEAD}objects: [{{for: {{l: {{from: 0, through: 63}}}}, objects: [{entry}]}}]"
    assert messages(text) == ["recipe.yaml:6:76: expected an integer that is 1 or more, found 0"]


BIG = f"""{HEAD}objects:
  - for: {{a: {{from: 0, through: 999}}, b: {{from: 0, through: 99}}}}
    objects: [{{name: <a>/<b>, shape: [], format: I32, value: x}}]
"""


def test_loops_that_multiply_too_far_are_refused_before_they_run(here: Path) -> None:
    assert messages(BIG) == ["recipe.yaml:7:3: with its loops unrolled the recipe has 300001 entries; at most 100000"]


@pytest.mark.parametrize("spelling", ["[{}]", "{{base: [{}]}}"])
def test_loops_over_ignored_names_count_too(spelling: str, here: Path) -> None:
    loops = "{for: {a: {from: 0, through: 999}, b: {from: 0, through: 99}}, names: [<a>.<b>]}"
    sources = HEAD if "base" in spelling else HEAD.replace(", other: {}", "")
    (message,) = messages(f"{sources}objects: [{OBJECT}]\nignore: {spelling.format(loops)}\n")
    assert message == "recipe.yaml:7:9: with its loops unrolled the recipe has 300003 entries; at most 100000"


def doubling(levels: int) -> str:
    values = ["v0: x"] + [f"v{i}: {{concat: [$v{i - 1}, $v{i - 1}]}}" for i in range(1, levels)]
    return f"{HEAD}values:\n  " + "\n  ".join(values) + "\nobjects: [{resource: x, file: y}]\n"


def chained(levels: int) -> str:
    values = ["v0: x"] + [f"v{i}: {{reshape: {{of: $v{i - 1}, to: []}}}}" for i in range(1, levels)]
    return f"{HEAD}values:\n  " + "\n  ".join(reversed(values)) + "\nobjects: [{resource: x, file: y}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (doubling(40), "recipe.yaml:19:8: the expression has more than 4096 nodes"),
        (chained(1000), "is nested more than 32 deep"),
        (
            HEAD + f"names:\n  n0: {'a' * 16}\n" + "".join(f"  n{i}: <n{i - 1}><n{i - 1}>\n" for i in range(1, 40)),
            "recipe.yaml:14:7: the text has more than 1024 characters, placeholders filled in",
        ),
        (
            HEAD + "sets:\n" + "".join(f"  s{i}: {{from: 0, through: 9999}}\n" for i in range(11)),
            "recipe.yaml:17:27: the sets of the recipe have more than 100000 members together",
        ),
        (HEAD + "sets: {" + ", ".join(f"s{i}: s{i + 1}" for i in range(99)) + ", s99: [0]}", "more than 64 deep"),
        (HEAD + "sets: {a: {all: b}, b: {all: [c, [1]]}, c: a}", "the set is defined by itself: a -> b -> c -> a"),
        (HEAD + f"objects: [{{resource: {'x' * 2000}, file: y}}]", "the text has more than 1024 characters"),
    ],
)
def test_what_grows_without_bound_is_refused_at_once(text: str, message: str, here: Path) -> None:
    found = messages(text)
    assert any(message in line for line in found)


def test_all_expressions_together_are_limited(here: Path) -> None:
    text = doubling(12).replace("[{resource: x, file: y}]", "\n  - for: {l: {from: 0, through: 299}}\n    objects:\n")
    text += "      - {name: <l>, shape: [], format: I32, value: $v11}\n"
    assert messages(text) == ["recipe.yaml:23:52: all expressions together have more than 250000 nodes"]


def test_values_may_be_chained_as_deep_as_expressions_may_be(here: Path) -> None:
    load(chained(32))
    assert any("nested more than 32 deep" in line for line in messages(chained(33)))


def test_values_that_refer_to_each_other_in_a_ring_are_refused(here: Path) -> None:
    text = HEAD + "values: {a: $b, b: {concat: [x, $a]}}\nobjects: [{resource: x, file: y}]\n"
    assert messages(text) == ["recipe.yaml:6:13: value '$b' is made of itself"]


def test_a_recipe_of_another_schema_is_told_only_that(here: Path) -> None:
    assert messages("schema: 3\nfuture: [1, on]\n") == [
        "recipe.yaml:1:9: schema 3 is not supported; this version reads schema 1"
    ]


@pytest.mark.parametrize("text", ["[]", "x", "- a: b", "12"])
def test_a_file_that_is_no_mapping_is_no_recipe(text: str, here: Path) -> None:
    (message,) = messages(text)
    assert message.startswith("recipe.yaml:1:1: expected a recipe, a mapping, found ")


# --- properties -----------------------------------------------------------------------------------------------

LITERALS = ["", "~", "x", "012", "-1", "1e-6", "[]", "{}", "$q", "<l>", "<P>", "*", "on", "text", "0", "9" * 20]
KEYS = ["name", "for", "when", "objects", "values", "same", "concat", "of", "span", "shape", "format", "<<", "1"]


def mutated(text: str, rng: random.Random) -> str:
    """Returns the recipe with a few of its YAML nodes replaced, swapped, doubled or removed."""
    root = yaml.compose(text, yaml.SafeLoader)
    nodes: list[Any] = []

    def walk(node: Any) -> None:
        nodes.append(node)
        for child in node.value if isinstance(node, yaml.SequenceNode) else ():
            walk(child)
        for key, child in node.value if isinstance(node, yaml.MappingNode) else ():
            nodes.append(key)
            walk(child)

    walk(root)
    for _round in range(rng.randint(1, 4)):
        node = rng.choice(nodes)
        if isinstance(node, yaml.ScalarNode):
            node.value = rng.choice([*LITERALS, *KEYS, node.value + "x"])
            node.style = rng.choice([None, None, '"'])
            node.tag = "tag:yaml.org,2002:str" if node.style else yaml.SafeLoader("").resolve(
                yaml.ScalarNode, node.value, (True, False)
            )
        elif node.value:
            action = rng.randrange(4)
            i = rng.randrange(len(node.value))
            if action == 0:
                del node.value[i]
            elif action == 1:
                node.value.append(node.value[i])
            elif isinstance(node, yaml.SequenceNode):
                node.value[i] = rng.choice(nodes[1:] if action == 2 else [yaml.SequenceNode(node.tag, [])])
            else:
                node.value[i] = (node.value[i][0], rng.choice(nodes[1:]))
    return str(yaml.serialize(root))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), extending=st.booleans())
def test_a_mutated_recipe_is_a_recipe_or_a_recipe_error(seed: int, extending: bool, here: Path) -> None:
    rng = random.Random(seed)
    Path("base.yaml").write_text(SMALL)
    source = change("{objects: '*/qk', format: BF16}", "{drop: mtp/*}", "{resource: frontend/ranking, file: x}")
    try:
        text = mutated(source if extending else SMALL, rng)
    except (RecursionError, yaml.YAMLError):
        return  # a node put inside itself cannot be written
    try:
        recipe = load(text)
    except RecipeError as error:
        told = error.messages
    else:
        told = []
        assert recipe.objects
    assert all(message.startswith(("recipe.yaml:", "base.yaml:")) or "more problems" in message for message in told)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, len(SMALL)),
    length=st.integers(0, 3),
    text=st.text("ax1<>$:{}[],\n -'\"&*!|#?", max_size=3),
)
def test_an_edited_text_is_a_recipe_or_a_recipe_error(place: int, length: int, text: str, here: Path) -> None:
    edited = SMALL[:place] + text + SMALL[place + length :]
    Path("recipe.yaml").write_text(edited)
    try:
        recipe = load_recipe("recipe.yaml")
    except RecipeError as error:
        told = list(error.messages)
    else:
        told = []
        assert recipe.objects
    assert told == sorted(told, key=lambda message: [int(part) for part in message.split(":")[1:3]])
