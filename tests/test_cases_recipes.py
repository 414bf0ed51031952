"""What goes wrong with recipes: YAML's silent readings, doubled keys, typing errors, bombs.

Each test is one row of the list of known troubles, told through the command line: one message with the place, or
the recipe is taken as it is written.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from case_tools import HEAD, Case, entry, require_refusal, run_cli, snapshot, words_of
from commands import run
from hostile import limited

ONE = 0x3F80
TENSOR = entry("w", [2], "BF16", "w")
BASE = "sources: {base: {}}"


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.source({"w": words_of("BF16", ONE, ONE)})
    return case


def write(case: Case, text: str | bytes) -> None:
    case.recipe_path.write_bytes(text if isinstance(text, bytes) else text.encode())


class TestDoubledKeys:
    """C31."""

    def test_an_object_that_is_named_twice_is_refused_with_both_lines(self, case: Case) -> None:
        layer = entry("text/layers/0/mlp/down", [2], "BF16", "w")
        case.recipe(layer, layer)
        case.refused("recipe.yaml:8:", "'text/layers/0/mlp/down' is there already", "recipe.yaml:7:5")

    @pytest.mark.parametrize(
        ("text", "key", "line", "first"),
        [
            ("sources: {base: {}}\nsources: {base: {}}\n", "sources", 6, 5),
            ("sources: {base: {}}\nnames:\n  a: x\n  a: y\n", "a", 8, 7),
            ('sources: {base: {}}\nnames:\n  "a": x\n  a: y\n', "a", 8, 7),
            ("sources: {base: {config: {d: 1, e: {f: 1,\n  f: 2}}}}\n", "f", 6, 5),
        ],
    )
    def test_a_key_that_is_given_twice_is_refused_with_both_lines(
        self, case: Case, text: str, key: str, line: int, first: int
    ) -> None:
        write(case, f"{HEAD}{text}objects:\n  - {TENSOR}\n")
        case.refused(f"recipe.yaml:{line}:", f"key '{key}' is given twice; first on line {first}")

    def test_a_merge_key_with_an_override_keeps_working(self, case: Case) -> None:
        case.source({"w": words_of("BF16", ONE, ONE)}, config={"a": 1, "b": 2})
        case.source({"w": words_of("BF16", ONE, ONE)}, "other", config={"a": 1, "b": 3})
        sources = "\n  base: {config: &base {a: 1, b: 2}}\n  other: {config: {<<: *base, b: 3}}"
        case.recipe(TENSOR, sources=sources, more="ignore: {other: [w]}\n")
        case.converted()
        sources = sources.replace("b: 3", "b: 4")
        case.recipe(TENSOR, sources=sources, more="ignore: {other: [w]}\n")
        case.refused("source other: config.json b: 3 found, 4 required", extra=["--unpinned"])


class TestIntegers:
    """C32."""

    @pytest.mark.parametrize(
        "literal", ["012", "010", "1:30", "1_000", "08", "true", "128.0", "0x10", "+2", "1e3", '"2"', "0o7"]
    )
    def test_a_literal_that_is_no_plain_decimal_is_named_as_written(self, case: Case, literal: str) -> None:
        case.recipe(entry("w", [2], "BF16", f"{{slice: {{of: w, span: [0, {literal}]}}}}"))
        case.refused("recipe.yaml:7:", literal.strip('"'), "write a plain decimal")

    @pytest.mark.parametrize("literal", ["012", "true", "2.0"])
    def test_in_a_shape_and_in_a_set_too(self, case: Case, literal: str) -> None:
        case.recipe(f"{{name: w, shape: [{literal}], format: BF16, value: w}}")
        case.refused("recipe.yaml:7:", literal, "write a plain decimal")
        case.recipe(f"{{for: {{l: [{literal}]}}, objects: [{TENSOR}]}}")
        case.refused("recipe.yaml:7:", literal, "write a plain decimal")


class TestTypingErrors:
    """C34."""

    @pytest.mark.parametrize(
        ("more", "messages", "fragments"),
        [
            (
                "change: [{objects: text/layers/*/mlp/dwon, format: BF16}]\n",
                1,
                ("text/layers/*/mlp/dwon", "text/layers/0/mlp/down"),
            ),
            ("change: [{objects: '*', fromat: BF16}]\n", 2, ("unknown key 'fromat'", "'format'")),
            ("change: [{objects: '*', format: Q4_G64}]\n", 1, ("'Q4_G64'", "Q4G64_F16S")),
            ("chnage: []\n", 1, ("unknown key 'chnage'", "'change'")),
        ],
    )
    def test_a_selector_or_key_that_matches_nothing_is_named_with_the_nearest(
        self, case: Case, more: str, messages: int, fragments: tuple[str, str]
    ) -> None:
        base = case.root / "base.yaml"
        layer = entry("text/layers/0/mlp/down", [2], "BF16", "w")
        base.write_text(f"{HEAD}sources: {{base: {{}}}}\nobjects:\n  - {layer}\n")
        write(case, f"schema: 1\nid: tune\nextends: ./base.yaml\n{more}")
        case.refused("recipe.yaml:4:", *fragments, messages=messages)

    @pytest.mark.parametrize(
        ("sources", "tensor", "line", "fragments"),
        [
            ("sources: {base: {reop: o/n}}", TENSOR, 5, ("unknown key 'reop'", "'repo'")),
            ("source: {base: {}}", TENSOR, 5, ("unknown key 'source'", "'sources'")),
            (BASE, "{name: w, shape: [2], fromat: BF16, value: w}", 6, ("'fromat'", "'format'")),
            (BASE, "{name: w, shape: [2, 2], format: q4_g64_fp16, value: w}", 6, ("'q4_g64_fp16'", "Q4G64_F16S")),
            (BASE, "{name: w, shape: [2], format: BF16, value: {slcie: w}}", 6, ("'slcie'", "'slice'")),
            (BASE, "{name: w, shape: [2], format: BF16, value: bsae:w}", 6, ("'bsae'", "'base'")),
        ],
    )
    def test_unknown_words_are_errors_at_every_level(
        self, case: Case, sources: str, tensor: str, line: int, fragments: tuple[str, ...]
    ) -> None:
        write(case, f"{HEAD}{sources}\nobjects: [{tensor}]\n")
        ran = case.run()
        require_refusal(ran, 1)
        assert any(f"recipe.yaml:{line}:" in error for error in ran.errors)
        for fragment in fragments:
            assert fragment in ran.err

    def test_every_problem_is_reported_at_once(self, case: Case) -> None:
        objects = (
            "{name: a, shape: [0], format: BF16, value: w}",
            "{name: b, shape: [2], format: Q9, value: w}",
            "{name: c, shape: [2], format: BF16, value: $nothing}",
        )
        case.recipe(*objects)
        messages = case.refused(messages=3)
        assert [message.split("recipe.yaml:")[1][0] for message in messages] == ["7", "8", "9"]

    def test_a_recipe_that_is_not_there_is_named_with_the_shipped_ones(self, case: Case) -> None:
        case.recipe_path = Path("qwen3.6-27b/nvpf4")
        case.refused("qwen3.6-27b/nvpf4", "qwen3.6-27b/nvfp4")


LEVELS = [f"{this}: &{this} [{', '.join([f'*{last}'] * 10)}]\n" for last, this in itertools.pairwise("abcdefghi")]
BOMBS = {
    "nested": "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(LEVELS),
    "python": "a: !!python/object/apply:os.system ['touch PLACE']\n",
    "itself": "a: &a [*a]\n",
    "merged": "a: &a {<<: *a}\n",
    "documents": "a: 1\n---\nb: 2\n---\nc: 3\n",
    "deep": "a: " + "[" * 5000 + "]" * 5000 + "\n",
}


class TestBombs:
    """C55."""

    @pytest.mark.parametrize("bomb", BOMBS)
    def test_a_bomb_is_refused_at_once_with_its_line(self, case: Case, bomb: str) -> None:
        place = case.root / "touched"
        write(case, BOMBS[bomb].replace("PLACE", str(place)))
        before = snapshot(case.root)
        with limited(1):
            ran = run_cli(*case.arguments("run"))
        require_refusal(ran, 1)
        assert "recipe.yaml:" in ran.err
        assert snapshot(case.root) == before

    def test_a_bomb_takes_no_memory(self, case: Case) -> None:
        write(case, BOMBS["nested"])
        done = run(*map(str, case.arguments("plan")))
        assert done.code == 1
        assert done.peak_bytes < 200 << 20


class TestNumbers:
    """C56."""

    @pytest.mark.parametrize(("literal", "found"), [("1e-6", 1e-6), ("1E-6", 1e-6), (".5", 0.5), ("1.0e+3", 1000)])
    def test_a_plain_number_is_a_number(self, case: Case, literal: str, found: float) -> None:
        case.source({"w": words_of("BF16", ONE, ONE)}, config={"eps": found})
        case.recipe(TENSOR, sources=f"{{base: {{config: {{eps: {literal}}}}}}}")
        case.converted()

    @pytest.mark.parametrize("literal", ['"0.5"', ".nan", ".inf", "-.inf", "1e999", "1:30.5", "0.5.1"])
    def test_anything_else_is_named_with_its_place(self, case: Case, literal: str) -> None:
        case.recipe(entry("w", [2], "BF16", "w", more=f", require: [{{range: [0, {literal}]}}]"))
        case.refused("recipe.yaml:7:", literal.strip('"'))

    @pytest.mark.parametrize("literal", [".nan", ".inf"])
    def test_a_config_member_is_finite(self, case: Case, literal: str) -> None:
        case.recipe(TENSOR, sources=f"{{base: {{config: {{eps: {literal}}}}}}}")
        case.refused("recipe.yaml:5:", literal)


class TestNames:
    """C57."""

    @pytest.mark.parametrize(
        ("literal", "reading"),
        [
            ("no", "a boolean"),
            ("NO", "a boolean"),
            ("on", "a boolean"),
            ("~", "null"),
            ("2024-01-01", "a date"),
            ("12", "an integer"),
            ("1e3", "a number"),
        ],
    )
    def test_a_name_that_yaml_reads_as_something_else_is_named_with_the_reading(
        self, case: Case, literal: str, reading: str
    ) -> None:
        for value in (f"{{name: {literal}, shape: [2], format: BF16, value: w}}", entry("w", [2], "BF16", literal)):
            case.recipe(value)
            case.refused("recipe.yaml:7:", f"'{literal}'", f"YAML reads as {reading}", "quote it")

    def test_a_key_is_a_name_too(self, case: Case) -> None:
        case.recipe(TENSOR, more="names: {on: x}\n")
        case.refused("recipe.yaml:6:", "'on'", "a boolean", "quote it")

    def test_quoted_names_are_names(self, case: Case) -> None:
        case.source({name: words_of("BF16", ONE, ONE) for name in ("no", "2024-01-01", "~")})
        case.recipe(*(entry(f"'{name}'", [2], "BF16", f"'{name}'") for name in ("no", "2024-01-01", "~")))
        case.converted()
        assert list(case.objects()) == ["no", "2024-01-01", "~"]

    @pytest.mark.parametrize("literal", ["y", "n", "Null_", "offset", "1.weight", "2024-01-01.weight"])
    def test_what_every_yaml_reads_as_text_needs_no_quotes(self, case: Case, literal: str) -> None:
        case.source({literal: words_of("BF16", ONE, ONE)})
        case.recipe(entry(literal, [2], "BF16", literal))
        case.converted()


class TestEncodings:
    """C54: recipes are UTF-8, with or without a byte order mark, whatever ends their lines."""

    TEXT = HEAD + "sources: {base: {}}\nobjects:\n  - " + entry("重み/é", [2], "BF16", "w") + "\n"

    @pytest.mark.parametrize("ends", ["\n", "\r\n"])
    @pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
    def test_byte_order_mark_and_line_ends_do_not_matter(self, case: Case, mark: bytes, ends: str) -> None:
        write(case, mark + self.TEXT.replace("\n", ends).encode())
        case.converted()
        assert list(case.objects()) == ["重み/é"]

    @pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "cp932"])
    def test_another_encoding_is_named(self, case: Case, encoding: str) -> None:
        write(case, self.TEXT.replace("重み/" if encoding == "latin-1" else "/é", "x").encode(encoding))
        case.refused("recipe.yaml:", "UTF-8")
