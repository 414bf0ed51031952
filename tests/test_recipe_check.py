"""`recipe check` and `recipe list`: what they print, and where.

Source: cli.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from pathlib import Path

import pytest
from case_tools import Case, entry, f32, run_cli, snapshot, words_of
from commands import source_arguments
from recipe_texts import COMMIT, GROUPED, HEAD, SMALL, TUNE

from ninfer_convert.cli.carets import BEFORE, MAX_WIDTH, pointed
from ninfer_convert.errors import RecipeError
from ninfer_convert.plan.findings import folded
from ninfer_convert.recipe.files import recipes_directory
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.problems import told_nearest
from ninfer_convert.stand_in.checkpoints import write_demo_checkpoint

OBJECT = "{name: x, shape: [1], format: BF16, value: v}"
LOSSY = f"{{name: x, shape: [1, 64], format: Q4G64_F16S, encoder: {GROUPED}, value: v}}"
ONE = HEAD.replace(", other: {}", "")

RIGHT = SMALL
"""The recipe with every construct, without those parts that are warned of."""
for idle in (", width: <vocab>", "  spare: {modelopt: quantized:nothing}\n", ", {when: {l: [2]}, names: [<L><l>.z]}",
             "      z: {slice: {of: $q, span: [0, 2], axis: 1}}\n"):  # fmt: skip
    assert SMALL.count(idle) == 1
    RIGHT = RIGHT.replace(idle, "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty directory the working directory, so that messages begin with bare file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RIGHT, "21 objects, 2 sources"),
        (ONE + f"objects: [{OBJECT}]\n", "1 object, 1 source"),
        (ONE + f"objects: [{LOSSY}]\n", "1 object, 1 source, evidence: none for 1 lossy object"),
    ],
)
def test_a_right_recipe_is_told_in_one_line(text: str, told: str, here: Path) -> None:
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert (ran.code, ran.out, ran.err) == (0, f"recipe.yaml: {told}: no problems\n", "")


def test_a_right_recipe_as_json(here: Path) -> None:
    Path("recipe.yaml").write_text(RIGHT, encoding="utf-8")
    ran = run_cli("recipe", "check", "--json", "recipe.yaml")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == {"ok": True, "recipe": "recipe.yaml", "objects": 21, "problems": []}


@pytest.mark.parametrize("name", ["demo", "examples/fine-tune", "qwen3.8-27b/nvfp4"])
def test_a_shipped_recipe_is_checked_by_its_name(name: str, here: Path) -> None:
    ran = run_cli("recipe", "check", name)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{recipes_directory() / name}.yaml: {len(load_recipe(name).objects)} objects, ")


def test_every_problem_is_told_at_its_place(here: Path) -> None:
    Path("base.yaml").write_text(SMALL.replace("step: 2", "step: 0"), encoding="utf-8")
    Path("tune.yaml").write_text(TUNE + "ingore: [a]\nnames: {z: [1]}\n", encoding="utf-8")
    told = [
        ("base.yaml", 23, 36, "step is 0; it must be 1 or more"),
        ("tune.yaml", 4, 1, "unknown key 'ingore' in a recipe; nearest is 'ignore'"),
        ("tune.yaml", 5, 12, "expected text or an integer, found a list"),
    ]
    ran = run_cli("recipe", "check", "tune.yaml")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out == """\
base.yaml:23:36: error: step is 0; it must be 1 or more
   23 |   odd: {from: 1, through: 3, step: 0}
      |                                    ^
tune.yaml:4:1: error: unknown key 'ingore' in a recipe; nearest is 'ignore'
    4 | ingore: [a]
      | ^~~~~~
tune.yaml:5:12: error: expected text or an integer, found a list
    5 | names: {z: [1]}
      |            ^
tune.yaml: 3 errors
"""
    ran = run_cli("recipe", "check", "tune.yaml", "--json")
    assert (ran.code, ran.err) == (1, "")
    keys = ("file", "line", "column", "message")
    expected = [{"severity": "error", **dict(zip(keys, problem, strict=True))} for problem in told]
    expected[0] |= {"end_column": 37}
    expected[1] |= {"end_column": 7, "suggestion": "ignore"}
    assert json.loads(ran.out) == {"ok": False, "recipe": "tune.yaml", "objects": None, "problems": expected}


def test_a_check_goes_on_where_an_error_stops(here: Path) -> None:
    entries = "".join(f"  - {{name: x{i}, shape: [0], format: BF16, value: v}}\n" for i in range(250))
    Path("recipe.yaml").write_text(f"{HEAD}objects:\n{entries}", encoding="utf-8")
    expected = [f"recipe.yaml:{7 + i}:" for i in range(250)]
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert len(caught.value.messages) == 101
    assert caught.value.messages[-1] == "150 more problems are not shown"
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert ran.code == 1
    *told, last = ran.out.splitlines()[::3]
    assert [line.startswith(at) for line, at in zip(told, expected, strict=True)] == [True] * 250
    assert last == "recipe.yaml: 250 errors"
    assert len(json.loads(run_cli("recipe", "check", "--json", "recipe.yaml").out)["problems"]) == 250


def test_a_file_that_is_no_yaml_is_told_at_its_place(here: Path) -> None:
    Path("recipe.yaml").write_text("a: b: c\n", encoding="utf-8")
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("recipe.yaml:1:5: error: not valid YAML")


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing.yaml", "error: nothing.yaml: the recipe cannot be read: No such file or directory\n"),
        ("qwen3.6-27b/nvpf4", "error: no recipe file and no shipped recipe is named 'qwen3.6-27b/nvpf4'; nearest is "
         "'qwen3.6-27b/nvfp4'\n"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_not_there_is_an_error_and_no_result(
    name: str, told: str, options: tuple[str, ...], here: Path
) -> None:
    ran = run_cli("recipe", "check", name, *options)
    assert (ran.code, ran.out, ran.err) == (1, "", told)


def test_a_path_that_is_not_utf8_is_shown_escaped(here: Path) -> None:
    name = os.fsdecode(b"\xff\x1b.yaml")
    Path(name).write_text(RIGHT, encoding="utf-8")
    assert run_cli("recipe", "check", name).out == "\\udcff\\x1b.yaml: 21 objects, 2 sources: no problems\n"
    assert json.loads(run_cli("recipe", "check", "--json", name).out)["recipe"] == "\\udcff\\x1b.yaml"
    Path(name).write_text(f"{HEAD}objects: x\n", encoding="utf-8")
    assert run_cli("recipe", "check", name).out.startswith(
        "\\udcff\\x1b.yaml:6:10: error: expected a list of objects, found 'x'\n    6 | objects: x\n      |          ^\n"
    )


def test_the_list_has_the_recipes_that_can_be_converted_as_they_are() -> None:
    names = [
        "demo",
        "minilm-l6-v2",
        "qwen3.6-27b/groupwise-int",
        "qwen3.6-27b/nvfp4",
        "qwen3.8-27b/groupwise-int",
        "qwen3.8-27b/nvfp4",
    ]
    ran = run_cli("recipe", "list")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == names
    assert [entry["name"] for entry in json.loads(run_cli("recipe", "list", "--json").out)] == names


# -- warnings -----------------------------------------------------------------------------------------------------


def test_warnings_pass_unless_they_are_asked_to_fail(here: Path) -> None:
    Path("recipe.yaml").write_text(f"{ONE}objects: [{OBJECT}]\nnames: {{P: a, Q: <P>}}\n", encoding="utf-8")
    told = """\
recipe.yaml:7:9: warning: name 'P' is not used
    7 | names: {P: a, Q: <P>}
      |         ^
recipe.yaml:7:15: warning: name 'Q' is not used
    7 | names: {P: a, Q: <P>}
      |               ^
recipe.yaml: 1 object, 1 source: 2 warnings
"""
    for options, code in (((), 0), (("--strict",), 1)):
        ran = run_cli("recipe", "check", "recipe.yaml", *options)
        assert (ran.code, ran.out, ran.err) == (code, told, "")
        document = json.loads(run_cli("recipe", "check", "recipe.yaml", "--json", *options).out)
        assert (document["ok"], document["objects"]) == (not code, 1)
        place = {"severity": "warning", "file": "recipe.yaml", "line": 7}
        assert document["problems"] == [
            {**place, "column": 9, "end_column": 10, "message": "name 'P' is not used"},
            {**place, "column": 15, "end_column": 16, "message": "name 'Q' is not used"},
        ]


@pytest.mark.parametrize("name", ["demo", "minilm-l6-v2", "qwen3.6-27b/groupwise-int", "qwen3.6-27b/nvfp4",
                                  "qwen3.8-27b/groupwise-int", "qwen3.8-27b/nvfp4", "examples/fine-tune",
                                  "examples/text-only"])  # fmt: skip
def test_what_is_shipped_passes_strictly(name: str) -> None:
    ran = run_cli("recipe", "check", name, "--strict")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith(": no problems\n")
    assert ran.out.count("\n") == 1


# -- what the message says was meant ------------------------------------------------------------------------------


def suggested(text: str) -> list[str | None]:
    """Returns the suggestion of every problem of a recipe."""
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    problems = json.loads(run_cli("recipe", "check", "recipe.yaml", "--json").out)["problems"]
    return [problem.get("suggestion") for problem in problems]


@pytest.mark.parametrize(
    ("right", "wrong", "meant"),
    [
        ("ignore:", "ignroe:", "ignore"),
        ("weights_id:", "weight_id:", "weights_id"),
        ("{from: 1, through: 3", "{from: 1, thru: 3", "through"),
        ("format: W8G32_F16S", "format: W8G32F16", "W8G32_F16S"),
        ("encoder: MAXABS_F16_RECIP_RNE_V1\n    layout", "encoder: MAXABS_RECIP_RNE_V1\n    layout",
         "MAXABS_F16_RECIP_RNE_V1"),
        ("encoder: MAXABS_F16_RECIP_RNE_V1\n    layout", "encoder: MAXABS_BF16S_RECIP_E4M3FN_RNE_V1\n    layout",
         "MAXABS_F16_RECIP_RNE_V1"),
        ("layout: row-split-k128-v1", "layout: row-split-v1", "row-split-k128-v1"),
        ("layout: row-split-k128-v1", "layout: row-scale-v1", "row-split-k128-v1"),
        ("value: <P>embed_tokens.weight\n    require", "value: <PP>embed_tokens.weight\n    require", "<P>"),
        ("name: text/<l>/norm", "name: text/<ll>/norm", "<l>"),
        ("when: {l: odd}", "when: {l: ood}", "odd"),
        ("when: {l: odd}", "when: {ll: odd}", "l"),
        ("counts: ranking", "counts: rankings", "ranking"),
        ("quantized: {repo", "quantised: {repo", "quantised"),
        ("md, source: quantized}", "md, source: quantised}", "quantized"),
        ("ignore:\n  base:", "ignore:\n  bse:", "base"),
        ("value: $ids", "value: $idz", "$ids"),
        ("unique, {range", "uniq, {range", "unique"),
        ("rule: exact", "rule: exakt", "exact"),
        ("to: FP32, rule", "to: FP23, rule", "FP32"),
        ("{reciprocal:", "{reciprical:", "reciprocal"),
        ("dtype: [BF16, F32]", "dtype: [BF16, FP32]", "F32"),
    ],
)  # fmt: skip
def test_what_was_meant_is_a_member_of_its_own(right: str, wrong: str, meant: str, here: Path) -> None:
    assert RIGHT.count(right) == 1
    assert meant in suggested(RIGHT.replace(right, wrong))


def test_shipped_recipes_and_inherited_objects_are_suggested(here: Path) -> None:
    assert suggested("schema: 1\nid: t\nextends: qwen3.6-27b/nvpf4\n") == ["qwen3.6-27b/nvfp4"]
    Path("base.yaml").write_text(RIGHT, encoding="utf-8")
    assert suggested(TUNE + "change: [{objects: text/token_embeding, format: BF16}]\n") == ["text/token_embedding"]
    assert suggested(TUNE + "change: [{drop: text/idz}]\n") == ["text/ids"]
    assert suggested(TUNE + "change: [{resource: frontend/tokeniser.json, file: x}]\n") == ["frontend/tokenizer.json"]
    assert suggested(TUNE + "change: [{object: text/ids, require: [finite]}]\n") == ["objects"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("unknown key 'a'; nearest is 'b'", "b"),
        ("no recipe; nearest is 'a' or 'b' (a path ends in .yaml)", "a"),
        ("no recipe; nearest is 'a' (a path ends in .yaml)", "a"),
        ("unknown key 'x; nearest is 'y'", "y"),
        ("placeholder <a> is not defined here; nearest is <b>", "<b>"),
        ("tensor a is not in source b (c); nearest: d.e, f; config.json says", "d.e"),
        ("X does not make Y; its encoder is Z", "Z"),
        ("unknown key 'a'; known: b, c", None),
        (f"nearest is '{'a' * 80}...'", None),
        ("", None),
    ],
)
def test_what_a_message_says_was_meant(text: str, told: str | None) -> None:
    assert told_nearest(text) == told


# -- carets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "column", "end", "shown", "pointer"),
    [
        ("a: b", 4, 5, "a: b", "   ^"),
        ("a: bcd", 4, 7, "a: bcd", "   ^~~"),
        ("a: bcd", 4, None, "a: bcd", "   ^"),
        ("a: b", 5, None, "a: b", "    ^"),
        ("a: b", 99, 120, "a: b", "    ^"),
        ("a: bcd", 4, 99, "a: bcd", "   ^~~"),
        # Two columns each; the mark below is as wide as what it means.
        ("漢字: 値x", 5, 7, "漢字: 値x", "      ^~~"),
        ("\uff57: x", 4, 5, "\uff57: x", "    ^"),
        # No column of its own.
        ("e\u0301e\u0301: x", 7, 8, "e\u0301e\u0301: x", "    ^"),
        ("x: e\u0301e\u0301", 4, 8, "x: e\u0301e\u0301", "   ^~"),
        # Escapes have the width of what is printed.
        ("a\tb", 2, None, "a\\tb", " ^~"),
        ("\x1b[31m: x", 8, 9, "\\x1b[31m: x", "          ^"),
        ("a\u202eb: x", 6, 7, "a\\u202eb: x", "          ^"),
        ("\udcff: x", 4, 5, "\\udcff: x", "        ^"),
    ],
)
def test_a_caret_stands_below_its_character(line: str, column: int, end: int | None, shown: str, pointer: str) -> None:
    assert pointed(line, column, end)[0] == shown
    assert pointed(line, column, end)[1] == pointer


def test_a_long_line_is_cut_around_the_caret() -> None:
    line = "".join(f"{i:04}" for i in range(500))
    for column in (1, 30, 41, 60, 101, 1000, 1950, 2000):
        shown, pointer = pointed(line, column, column + 4)
        assert len(shown) <= MAX_WIDTH + 6
        begin = pointer.index("^")
        assert begin <= BEFORE + 3
        meant = line[column - 1 : column + 3]
        assert shown[begin : begin + len(meant)] == meant
        assert pointer[begin:] == "^" + "~" * (len(meant) - 1)
        assert shown.startswith("...") == (column > BEFORE + 1)
        assert shown.endswith("...") == (column - 1 + MAX_WIDTH - min(column - 1, BEFORE) < len(line))
    shown, pointer = pointed("漢" * 300, 150, 300)
    assert (shown, pointer) == ("..." + "漢" * 60 + "...", " " * 43 + "^" + "~" * 79)
    assert pointed("x" * MAX_WIDTH, 1, None)[0] == "x" * MAX_WIDTH


def test_lines_are_those_that_yaml_counts(here: Path) -> None:
    text = "\ufeff" + f"{ONE}objects: [{OBJECT}]\nignore: 漢\n"
    for ends in ("\n", "\r\n", "\r"):
        Path("recipe.yaml").write_bytes(text.replace("\n", ends).encode())
        told = run_cli("recipe", "check", "recipe.yaml").out.splitlines()
        assert told[1:3] == ["    7 | ignore: 漢", "      |         ^~"]
    Path("recipe.yaml").write_bytes(b"\xef\xbb\xbfid: a\xffb\n")
    assert run_cli("recipe", "check", "recipe.yaml").out.splitlines() == [
        "recipe.yaml:1:6: error: byte 0xff is not UTF-8; save the file as UTF-8",
        "    1 | id: a\\udcffb",
        "      |      ^~~~~~",
        "recipe.yaml: 1 error",
    ]
    Path("recipe.yaml").write_bytes(b"a:\tb\n")
    assert run_cli("recipe", "check", "recipe.yaml").out.splitlines()[1:3] == ["    1 | a:\\tb", "      |   ^~"]
    Path("recipe.yaml").write_bytes(b"")
    assert run_cli("recipe", "check", "recipe.yaml").out == (
        "recipe.yaml:1:1: error: the file holds no YAML document\nrecipe.yaml: 1 error\n"
    )


def test_a_recipe_that_can_be_read_once_is_shown_all_the_same(here: Path) -> None:
    os.mkfifo("recipe.yaml")
    writer = threading.Thread(target=lambda: Path("recipe.yaml").write_text("schema: x\n", encoding="utf-8"))
    writer.start()
    ran = run_cli("recipe", "check", "recipe.yaml")
    writer.join()
    assert "    1 | schema: x\n      |         ^\n" in ran.out


# -- with sources -------------------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    return Case(Path())


def checked(case: Case, *extra: object, code: int) -> list[tuple[str, int, int, str]]:
    """Returns severity, line, column and message of what is told with the sources of a case."""
    words = [word for name, place in case.sources.items() for word in ("--source", f"{name}={place}")]
    words += [word for name, place in case.inputs.items() for word in ("--input", f"{name}={place}")]
    before = snapshot(case.root)
    ran = run_cli("recipe", "check", case.recipe_path, *words, "--json", *extra)
    assert (ran.code, snapshot(case.root)) == (code, before)
    problems = json.loads(ran.out)["problems"]
    assert {problem["file"] for problem in problems} <= {"recipe.yaml"}
    return [(one["severity"], one["line"], one["column"], one["message"]) for one in problems]


def test_a_recipe_that_fits_its_source(case: Case) -> None:
    case.source({"a": words_of("BF16", 1, 2)})
    case.recipe(entry("x", [2], "BF16", "a"))
    ran = run_cli("recipe", "check", "recipe.yaml", "--source", "base")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "recipe.yaml: 1 object, 1 source: no problems, with the headers of its sources\n"


def test_shapes_dtypes_and_coverage_are_told_at_their_places(case: Case) -> None:
    case.source({"a": words_of("BF16", 1, 2), "b": f32(1), "unlike": f32(1), "layer.weight": f32(1)})
    case.recipe(
        entry("x", [3], "BF16", "a"),
        entry("y", [1], "BF16", "b"),
        entry("z", [1], "FP32", "layer.wieght"),
        entry("w", [5], "BF16", "{slice: {of: a, span: [0, 5]}}"),
        more="ignore: [mtp.*]\nnames: {idle: x}\n",
    )
    assert checked(case, code=1) == [
        ("error", 6, 9, "source base: 1 tensor is neither used nor ignored: unlike; use them or list them under "
         "ignore"),
        ("error", 6, 10, "ignore mtp.* matches no tensor of source base"),
        ("warning", 7, 9, "name 'idle' is not used"),
        ("error", 9, 48, "object x: base:a has shape [2], expected [3]"),
        ("error", 10, 35, "object y: base:b is F32; format BF16 takes BF16; name the conversion: cast to BF16, rule "
         "nearest-even"),
        ("error", 11, 48, "tensor layer.wieght is not in source base (base); nearest: layer.weight"),
        ("error", 12, 49, "span [0, 5) lies outside axis 0 of size 2"),
    ]  # fmt: skip
    ran = run_cli("recipe", "check", "recipe.yaml", "--source", "base")
    assert (ran.code, ran.err) == (1, "")
    assert """\
recipe.yaml:11:48: error: tensor layer.wieght is not in source base (base); nearest: layer.weight
   11 |   - {name: z, shape: [1], format: FP32, value: layer.wieght}
      |                                                ^~~~~~~~~~~~
""" in ran.out
    assert ran.out.endswith("recipe.yaml: 4 objects, 1 source: 6 errors, 1 warning\n")
    document = json.loads(run_cli("recipe", "check", "recipe.yaml", "--source", "base", "--json").out)
    assert [problem["suggestion"] for problem in document["problems"] if "suggestion" in problem] == ["layer.weight"]


def test_what_a_source_contradicts_is_told_where_the_recipe_says_it(case: Case) -> None:
    config = {"model_type": "x", "text_config": {"size": 1}}
    case.source({"a": words_of("BF16", 1, 2), "b": f32(1)}, config=config)
    case.input("text", b"content")
    case.recipe(
        entry("x", [2], "BF16", "a"), entry("y", [1], "FP32", "b"), "{resource: r, input: text}",
        sources=f"\n  base:\n    repo: me/x\n    revision: {COMMIT}\n    dtype: BF16\n"
                "    config: {model_type: y, text_config: {size: 2, depth: 3}}",
        more=f"inputs:\n  text: {{sha256: {'a' * 64}}}\n",
    )  # fmt: skip
    found = [
        ("error", 9, 5, "source base: tensor b is F32; the recipe states BF16"),
        ("error", 10, 14, 'source base: config.json model_type: "x" found, "y" required'),
        ("error", 10, 43, "source base: config.json text_config.size: 1 found, 2 required"),
        ("error", 10, 52, "source base: config.json text_config.depth: nothing found, 3 required"),
    ]
    digest = hashlib.sha256(b"content").hexdigest()
    pin = f"input text (text.bin): SHA-256 {digest} found, {'a' * 64} required"
    assert checked(case, code=1) == [*found, ("error", 12, 10, f"{pin}; --unpinned accepts it and records that")]
    case.source({"a": words_of("BF16", 1, 2), "b": words_of("BF16", 1)}, config={"model_type": "y"})
    text = case.recipe_path.read_text(encoding="utf-8").replace(", text_config: {size: 2, depth: 3}", "")
    case.recipe_path.write_text(text.replace("format: FP32", "format: BF16"), encoding="utf-8")
    assert checked(case, "--unpinned", "--strict", code=0) == [("note", 12, 10, pin)]


def test_one_mistake_in_a_loop_is_told_once(case: Case) -> None:
    case.source({f"{name}.{i}.w": words_of("BF16", 1, 2) for i in range(9) for name in "abcd"})
    case.recipe(
        "{for: {l: {from: 0, through: 8}}, objects: [{name: o/<l>, shape: [3], format: BF16, value: a.<l>.w}, "
        "{name: p/<l>, shape: [2], format: BF16, value: b.<l>.x}]}",
        sources="{base: {dtype: F16}}", more="ignore: [c.*, d.*]\n",
    )  # fmt: skip
    assert checked(case, code=1) == [
        ("error", 5, 18, "source base: tensor a.0.w is BF16; the recipe states F16 (and 8 more like it)"),
        ("error", 8, 96, "object o/0: base:a.0.w has shape [2], expected [3] (and 8 more like it)"),
        ("error", 8, 153, "tensor b.0.x is not in source base (base); nearest: b.0.w, d.0.w, c.0.w (and 8 more like "
         "it)"),
    ]  # fmt: skip
    document = json.loads(run_cli("recipe", "check", "recipe.yaml", "--source", "base", "--json").out)
    assert document["problems"][2]["suggestion"] == "b.0.w"
    told = case.refused(messages=3)
    mistakes = [re.sub(r"^error: (\S+:[0-9]+:[0-9]+: )?", "", message) for message in told]
    assert sorted(mistakes) == sorted(problem["message"] for problem in document["problems"])


def test_every_turn_of_a_long_loop_is_counted_though_not_each_is_told_the_nearest(case: Case) -> None:
    case.source({f"a.{i}.w": words_of("BF16", 1, 2) for i in range(64)})
    loop = "{for: {l: {from: 0, through: 63}}, objects: [{name: o/<l>, shape: [2], format: BF16, value: a.<l>.v}]}"
    case.recipe(loop)
    nearest = "a.0.w, a.60.w, a.50.w"
    case.refused(f"tensor a.0.v is not in source base (base); nearest: {nearest} (and 63 more like it)")


def test_mistakes_of_different_places_and_sources_are_not_alike() -> None:
    messages = [
        "a1.yaml:1:2: tensor x.0 is not in source s",
        "a1.yaml:1:2: tensor x.1 is not in source s; nearest: y.1, y.2",
        "a2.yaml:1:2: tensor x.2 is not in source s",
        "a1.yaml:1:3: tensor x.3 is not in source s",
        "source q1: tensor a.0 is F32; the recipe states F16",
        "source q2: tensor a.1 is F32; the recipe states F16",
        "source q1: tensor a.2 is not used",
        "source q1: tensor a.3 is not used",
        "source q1: config.json a.b: 1 found, 2 required",
        "source q1: config.json a.c: 1 found, 2 required",
        "input r1 (a): SHA-256 0 found, 1 required",
        "input r2 (b): SHA-256 0 found, 1 required",
    ]
    more = " (and 1 more like it)"
    assert folded(messages) == [messages[0] + more, *messages[2:6], messages[6] + more, *messages[8:]]



def test_a_format_that_a_change_has_set_is_told_with_the_place_of_the_change(case: Case) -> None:
    case.source({"a": words_of("BF16", 1, 2), "i": words_of("I64", *range(64), shape=[1, 64])})
    case.recipe(entry("x", [2], "BF16", "a"), entry("y", [1, 64], "I32", "{cast: {of: i, to: I32, rule: checked}}"))
    base = case.recipe_path.rename(case.root / "inherited.yaml")
    case.recipe_path.write_text(
        f"schema: 1\nid: tune\nextends: {base.name}\nchange:\n  - {{objects: x, format: I32}}\n"
        "  - {objects: x, format: FP32}\n  - {objects: x, require: [finite]}\n"
        f"  - {{objects: y, format: Q4G64_F16S, encoder: {GROUPED}}}\nevidence: none\n"
    )
    takes = "format FP32 (set at recipe.yaml:6:5) takes F32; name the conversion: cast to FP32, rule exact"
    case.refused(
        f"inherited.yaml:7:5: object x: base:a is BF16; {takes}",
        "the encoder (set at recipe.yaml:8:5) takes BF16, F16, F32", messages=2,
    )  # fmt: skip
    found = [place for place in checked(case, code=1) if place[0] == "error"]
    assert found[0] == ("error", 6, 26, f"object x: base:a is BF16; {takes}")
    assert [place[:3] for place in found] == [("error", 6, 26), ("error", 8, 26)]


def test_a_missing_input_is_told_once(case: Case) -> None:
    case.source({"a": words_of("BF16", 1, 2)}, files={"tokenizer_config.json": b"{}"})
    shortlist = "{shortlist: {counts: ranking, candidates: 2, take: 1, special: tokenizer_config.json}}"
    case.recipe(entry("x", [2], "BF16", "a"), entry("y", [1], "I32", shortlist), more="inputs: {ranking: {}}\n")
    assert checked(case, code=1) == [("error", 6, 19, "input ranking is not given; add --input ranking=PATH")]


def test_what_the_base_says_is_told_in_the_base(case: Case) -> None:
    case.source({"a": words_of("BF16", 1, 2)}, config={"model_type": "x"})
    case.recipe(entry("x", [3], "BF16", "a"), sources="{base: {config: {model_type: y}}}")
    Path("tune.yaml").write_text("schema: 1\nid: t\nextends: recipe.yaml\n", encoding="utf-8")
    ran = run_cli("recipe", "check", "tune.yaml", "--source", "base")
    assert ran.code == 1
    assert ran.out == """\
recipe.yaml:5:27: error: source base: config.json model_type: "x" found, "y" required
    5 | sources: {base: {config: {model_type: y}}}
      |                           ^~~~~~~~~~
recipe.yaml:7:48: error: object x: base:a has shape [2], expected [3]
    7 |   - {name: x, shape: [3], format: BF16, value: a}
      |                                                ^
tune.yaml: 1 object, 1 source: 2 errors
"""


def test_options_of_sources_need_one(case: Case) -> None:
    case.recipe(entry("x", [3], "BF16", "a"))
    for options in (("--unpinned",), ("--input", "a=b"), ("--prefix", "a=b")):
        ran = run_cli("recipe", "check", "recipe.yaml", *options)
        assert (ran.code, ran.out) == (2, "")
        assert "--input, --prefix and --unpinned say how a source is read; add --source" in ran.err
    ran = run_cli("recipe", "check", "recipe.yaml", "--source", "nowhere")
    assert (ran.code, ran.out) == (1, "")
    assert "nowhere" in ran.err


def test_shipped_recipes_are_checked_against_miniatures_of_their_checkpoints(case: Case) -> None:
    made = write_demo_checkpoint(Path("made"))
    ran = run_cli("recipe", "check", "demo", *source_arguments(made, "base", "quantized"))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("evidence: none for 12 lossy objects: no problems, with the headers of its sources\n")
