"""Strict YAML: what is accepted, what is refused and where, and that both PyYAML parsers agree.

Source: engineering_facts.md D4; cases C31, C54, C55.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_convert.errors import RecipeError
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.problems import MAX_MESSAGES, Problems, nearest, quoted, suggestion
from ninfer_convert.recipe.yaml_nodes import (
    LOADER,
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_NODES,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    parse_document,
    yaml_reading,
)

PARSERS = [pytest.param(yaml.SafeLoader, id="python")]
if hasattr(yaml, "CSafeLoader"):
    PARSERS.append(pytest.param(yaml.CSafeLoader, id="c"))
both_parsers = pytest.mark.parametrize("loader", PARSERS)


def plain(node: Node) -> Any:
    """Returns nodes as nested tuples and dicts of text."""
    if isinstance(node, ScalarNode):
        return node.text
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.members.items()}


def placed(node: Node) -> Any:
    """Returns nodes with everything they say about themselves."""
    at = (node.mark.line, node.mark.column)
    if isinstance(node, ScalarNode):
        return at, node.text, node.plain
    if isinstance(node, ListNode):
        return at, [placed(item) for item in node.items]
    keys = [(key, node.keys[key].mark.line, node.keys[key].mark.column) for key in node.members]
    return at, keys, [placed(value) for value in node.members.values()]


def parse(text: str | bytes, loader: Any = LOADER) -> Node:
    problems = Problems()
    node = parse_document(text if isinstance(text, bytes) else text.encode(), "r.yaml", problems, loader)
    problems.raise_if_any()
    return node


def messages(text: str | bytes, loader: Any = LOADER) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse(text, loader)
    return list(caught.value.messages)


@both_parsers
def test_nodes_know_text_style_and_place(loader: Any) -> None:
    node = parse("a: 1\nb:\n  - 'x y'\n  - {c: <P>x.<l>.w, d: }\n", loader)
    assert placed(node) == (
        (1, 1),
        [("a", 1, 1), ("b", 2, 1)],
        [
            ((1, 4), "1", True),
            (
                (3, 3),
                [
                    ((3, 5), "x y", False),
                    ((4, 5), [("c", 4, 6), ("d", 4, 21)], [((4, 9), "<P>x.<l>.w", True), ((4, 21), "", True)]),
                ],
            ),
        ],
    )


@both_parsers
@pytest.mark.parametrize("text", ["<P>x.<l>.w", "quantized:<P>x", "$ids", "a/<l>/b", "mtp.*", "6a9e13bd"])
def test_recipe_spellings_need_no_quotes_in_flow_collections(text: str, loader: Any) -> None:
    assert plain(parse(f"{{a: [{text}, {text}], b: {text}}}", loader)) == {"a": [text, text], "b": text}


@both_parsers
def test_an_alias_stands_for_its_anchor(loader: Any) -> None:
    node = parse("a: &x [1, {b: c}]\nd: *x\n", loader)
    assert isinstance(node, MapNode)
    assert node.members["a"] is node.members["d"]


@both_parsers
def test_a_merge_key_gives_way_to_the_mapping_and_earlier_merges_win(loader: Any) -> None:
    node = parse("- &a {x: 1, y: 1}\n- &b {x: 2, y: 2, z: 2}\n- {<<: [*a, *b], x: 3, w: 3}\n- {<<: *a}\n", loader)
    assert plain(node)[2:] == [{"z": "2", "x": "3", "y": "1", "w": "3"}, {"x": "1", "y": "1"}]


@both_parsers
def test_a_quoted_merge_key_is_an_ordinary_key(loader: Any) -> None:
    assert plain(parse('{"<<": 1}', loader)) == {"<<": "1"}


@both_parsers
@pytest.mark.parametrize("data", [b"\xef\xbb\xbfa: \xc3\xa9\r\nb: c\r\n", "a: é\nb: c\n".encode()])
def test_a_byte_order_mark_and_crlf_change_nothing(data: bytes, loader: Any) -> None:
    values = [((1, 4), "é", True), ((2, 4), "c", True)]
    assert placed(parse(data, loader)) == ((1, 1), [("a", 1, 1), ("b", 2, 1)], values)


@both_parsers
def test_document_markers_around_the_one_document_are_fine(loader: Any) -> None:
    assert plain(parse("# c\n---\na: b\n...\n", loader)) == {"a": "b"}


DUPLICATES = [
    ("a:\n  down: q4\n  down: q6\n", "r.yaml:3:3: key 'down' is given twice; first on line 2"),
    ('a: 1\nb: 2\n"a": 3\n', "r.yaml:3:1: key 'a' is given twice; first on line 1"),
    ("- &m {x: 1}\n- {<<: *m, <<: *m}\n", "r.yaml:2:12: key '<<' is given twice; first on line 2"),
]

SYNTAX = [
    ("a: !!str b\n", "r.yaml:1:4: tag '!!str' is not allowed; remove it"),
    ("a: !!python/object/apply:os.system [x]\n", "r.yaml:1:4: tag '!!python/object/apply:os.system' is not allowed"),
    ("a: !x {b: c}\n", "r.yaml:1:4: tag '!x' is not allowed"),
    ("--- !x\na: b\n", "r.yaml:1:5: tag '!x' is not allowed"),
    ("a: b\n---\nc: d\n---\ne: f\n", "r.yaml:2:1: a second YAML document begins; one file holds one document"),
    ("a: &x [1, *x]\n", "r.yaml:1:11: *x stands inside its own anchor"),
    ("a: &x {b: {c: *x}}\n", "r.yaml:1:15: *x stands inside its own anchor"),
    ("a: *x\n", "r.yaml:1:4: *x has no anchor before it; quote text that begins with *"),
    ("a: [*.x]\n", "; quote text that begins with * or &"),
    ("{a: b/6[23]/c}\n", "; between brackets, quote text that has one of [ ] { } or a comma"),
    ("a: &x 1\nb: &x 2\n", "r.yaml:2:4: anchor &x is given twice"),
    ("- <<: [1]\n", "r.yaml:1:8: a merge key << takes a mapping or a list of mappings"),
    ("<<: x\n", "r.yaml:1:5: a merge key << takes a mapping or a list of mappings"),
    ("on: 1\n", "r.yaml:1:1: key 'on' is read by YAML as a boolean; quote it"),
    ("a:\n  12: 1\n", "r.yaml:2:3: key '12' is read by YAML as an integer; quote it"),
    ("~: 1\n", "r.yaml:1:1: key '~' is read by YAML as null; quote it"),
    ("2024-01-01: 1\n", "r.yaml:1:1: key '2024-01-01' is read by YAML as a date; quote it"),
    ("? [a]\n: 1\n", "r.yaml:1:3: a key must be text, not a list or a mapping"),
    ("{{a: b}: c}\n", "r.yaml:1:2: a key must be text, not a list or a mapping"),
    ("%YAML 1.1\n---\na: b\n", "r.yaml:1:1: a line begins with %; YAML directives are not allowed"),
    ("a:\tb\n", "r.yaml:1:3: a tab; write spaces"),
    ("a: b\n\tc: d\n", "r.yaml:2:1: a tab; write spaces"),
    ("a: \x07\n", "r.yaml:1:4: character U+0007 is not allowed"),
    ("a: b\r\nc: \u2028\n", "r.yaml:2:4: character U+2028 is not allowed"),
    ("a: b\ufeff\n", "r.yaml:1:5: character U+FEFF is not allowed"),
    ("", "r.yaml:1:1: the file holds no YAML document"),
    ("# only a comment\n", "r.yaml:1:1: the file holds no YAML document"),
    ("a: [b\nc: d\n", "r.yaml:1:4: not valid YAML: this [ is never closed; line 2 cannot go on with it"),
    ("a:\n  - {b: [c]\n  - {d: e}\n", "r.yaml:2:5: not valid YAML: this { is never closed; line 3 cannot go on"),
    ("a: [b\n  c: d\n", "r.yaml:2:4: not valid YAML: "),
    ("a: {b: [c, d: e}\n", "r.yaml:1:8: not valid YAML: this [ is not closed before a }"),
    ("a: [b,\n  {c: d]\n", "r.yaml:2:3: not valid YAML: this { is not closed before a ]"),
    ("a: b\nc:d\ne: f\n", "r.yaml:2:1: not valid YAML: a key is expected here; it ends with ': '"),
    ("a: 'b\nc: d\n", "r.yaml:1:4: not valid YAML: this ' is never closed; the file ends before that"),
    ("a:\n  b: c\n d: e\n", "begin"),
    ("a: b\n - c: d\n", "keys that stand together begin in one column; quote text that has ': '"),
    ("a: b: c\n", "r.yaml:1:5: not valid YAML: mapping values are not allowed"),
    ("a: @b\n", "cannot start any token; quote text that begins so"),
    ("{a: [b:]}\n", "not valid YAML: "),
    ("[a?, b]\n", "r.yaml:1:"),
    ("a: >#c\n b\n", "r.yaml:1:"),
]


@both_parsers
@pytest.mark.parametrize(("text", "message"), DUPLICATES + SYNTAX)
def test_yaml_is_refused_at_its_place(text: str, message: str, loader: Any) -> None:
    (found,) = messages(text, loader)
    assert message in found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: b\nc\xc3\xa9: \xff\n", "r.yaml:2:5: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"a: \xed\xa0\x80\n", "r.yaml:1:4: byte 0xed is not UTF-8; save the file as UTF-8"),
        ("a: b".encode("utf-16"), "r.yaml:1:1: the file is UTF-16 or UTF-32; save it as UTF-8"),
        ("a: b".encode("utf-16-be"), "r.yaml:1:1: character U+0000 is not allowed"),
        ("a: é".encode("latin-1"), "r.yaml:1:4: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), f"r.yaml:1:1: the file has more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_encodings_are_refused_at_their_place(data: bytes, message: str) -> None:
    assert messages(data) == [message]


def test_half_a_surrogate_pair_is_refused_by_both_parsers() -> None:
    assert messages('a: "\\ud800"\n', yaml.SafeLoader) == [
        "r.yaml:1:4: the text has half of a surrogate pair, which is no character"
    ]
    assert "r.yaml:1:" in messages('a: "\\ud800"\n')[0]


def test_every_problem_that_does_not_stop_the_reading_is_reported_in_order() -> None:
    assert messages("b: !x 1\non: 2\nb: 3\n") == [
        "r.yaml:1:4: tag '!x' is not allowed; remove it",
        "r.yaml:2:1: key 'on' is read by YAML as a boolean; quote it",
        "r.yaml:3:1: key 'b' is given twice; first on line 1",
    ]


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels + 1)]
    return "\n".join(lines)


BOMBS = {
    "nine levels of aliases": (laughs(9), f"more than {MAX_NODES} nodes"),
    "a mapping merged again and again": (
        f"a: &a {{{', '.join(f'k{i}: 1' for i in range(4000))}}}\n"
        + "".join(f"b{i}: {{<<: *a}}\n" for i in range(2000)),
        f"more than {MAX_NODES} nodes",
    ),
    "lists in lists": ("[" * 500_000, "deep|depth"),
    "mappings in mappings": ("{a: " * 200_000, f"nested more than {MAX_DEPTH} deep"),
    "block lists in block lists": ("- " * 500_000, f"nested more than {MAX_DEPTH} deep"),
    "keys in keys": ("? " * 500_000, f"nested more than {MAX_DEPTH} deep"),
    "many nodes": ("[" + "x," * 150_000 + "x]", f"more than {MAX_NODES} nodes"),
    "deep by aliases": (
        "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [[[[[[[[*a{i - 1}]]]]]]]]" for i in range(1, 12)),
        f"nested more than {MAX_DEPTH} deep",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_fails_at_once(name: str) -> None:
    text, message = BOMBS[name]
    (found,) = messages(text)
    assert any(part in found for part in message.split("|"))


def test_depth_and_nodes_are_limited_exactly() -> None:
    parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    deeper = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    assert messages(deeper) == [f"r.yaml:1:65: nested more than {MAX_DEPTH} deep"]
    inner = "\n".join("- x" for _ in range(MAX_NODES - 1))
    parse(inner)
    assert messages(inner + "\n- x") == [
        f"r.yaml:{MAX_NODES}:3: the document has more than {MAX_NODES} nodes, aliases written out"
    ]


PIECES = ["a", "b: ", "- ", "? ", ": ", ":", "[", "]", "{", "}", ",", ", ", "'", '"', "|", ">", "#", " #", "&x ", "*x"]
PIECES += ["\n", "\n  ", "\n- ", "  ", "~", "012", "<<: ", "!t ", "x:y", "\\", "%", "@", "...", "---", "=", "é"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=24))
def test_the_two_parsers_give_the_same_nodes_or_both_refuse(pieces: list[str]) -> None:
    text = "".join(pieces)
    outcomes = []
    for loader in (yaml.SafeLoader, LOADER):
        try:
            outcomes.append(placed(parse(text, loader)))
        except RecipeError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=64), st.text(max_size=32).map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_any_bytes_are_nodes_or_a_recipe_error(data: bytes) -> None:
    problems = Problems()
    problems.attempt(parse_document, data, "r.yaml", problems)
    try:
        problems.raise_if_any()
    except RecipeError as caught:
        error = caught
    else:
        return
    assert [message for message in error.messages if not message.startswith("r.yaml:")] == []


READINGS = {
    "null": ["", "~", "null", "Null", "NULL"],
    "a boolean": ["yes", "Yes", "NO", "no", "on", "Off", "true", "TRUE", "False"],
    "an integer": ["0", "12", "-3", "+5", "012", "08", "0x1F", "0b01", "0o17", "1_000", "1:30", "12:30:45"],
    "a number": ["1.0", ".5", "1e-6", "1E6", "1.", "-1.5e+3", ".inf", "-.INF", ".NaN", "1:30.5", "1_0.5"],
    "a date": ["2024-01-01", "2024-1-1", "2001-12-14t21:59:43.10-05:00", "2001-12-14 21:59:43"],
    "a merge key": ["<<"],
    "a default value": ["="],
}


@pytest.mark.parametrize(("reading", "text"), [(name, text) for name, texts in READINGS.items() for text in texts])
def test_what_yaml_reads_is_told(reading: str, text: str) -> None:
    assert yaml_reading(text) == reading


@pytest.mark.parametrize("text", ["y", "n", "1.2.3", "q4", "6a9e13bd", "1-2", "..", "0x", "nan", "None", "yEs", "+"])
def test_text_is_text(text: str) -> None:
    assert yaml_reading(text) is None


@settings(max_examples=500, deadline=None)
@given(st.text("0123456789abxoeEnN_.:-+~truefalsyinT ", min_size=1, max_size=12))
def test_whatever_pyyaml_does_not_read_as_text_is_told(text: str) -> None:
    tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False))
    if tag != "tag:yaml.org,2002:str":
        assert yaml_reading(text) is not None


def test_problems_are_sorted_by_place_and_told_once() -> None:
    problems = Problems()
    problems.add(Mark("b", 1, 1), "z")
    problems.add(Mark("a", 10, 1), "y")
    problems.add(Mark("a", 9, 2), "x")
    problems.add(Mark("a", 9, 2), "x")
    problems.add(Mark("a", 9, 2), "w")
    problems.next_turn()
    problems.add(Mark("a", 9, 2), "in another round")
    with pytest.raises(RecipeError) as caught:
        problems.raise_if_any()
    assert list(caught.value.messages) == ["a:9:2: x", "a:9:2: w", "a:10:1: y", "b:1:1: z"]


def test_no_problem_raises_nothing_and_too_many_are_counted() -> None:
    problems = Problems()
    problems.raise_if_any()
    for line in range(MAX_MESSAGES + 3):
        problems.add(Mark("a", line + 1, 1), "x")
    with pytest.raises(RecipeError) as caught:
        problems.raise_if_any()
    assert len(caught.value.messages) == MAX_MESSAGES + 1
    assert caught.value.messages[-1] == "3 more problems are not shown"


@pytest.mark.parametrize(
    ("text", "candidates", "found"),
    [
        ("fromat", ["name", "format", "for"], "format"),
        ("Q4_G64", ["BF16", "Q4G64_F16S", "Q5G64_F16S"], "Q4G64_F16S"),
        ("q6", ["Q4G64_F16S", "Q6G64_F16S"], "Q6G64_F16S"),
        ("q", ["Q4G64_F16S", "Q6G64_F16S"], None),
        ("w8g32_f16s", ["W8G32_F16S"], "W8G32_F16S"),
        ("ident", ["id", "sets"], "id"),
        ("text/layers/*/mlp/dwon", ["text/layers/0/mlp/down", "vision/x"], "text/layers/0/mlp/down"),
        ("zzz", ["abc"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_spelling_is_found(text: str, candidates: list[str], found: str | None) -> None:
    assert nearest(text, candidates) == found


def test_a_suggestion_lists_few_candidates_and_keeps_quiet_about_many() -> None:
    assert suggestion("zzz", ["a", "b"]) == "; known: a, b"
    assert suggestion("zzz", [f"n{i}" for i in range(17)]) == ""
    assert suggestion("zzz", []) == ""
    assert suggestion("nmae", ["name"]) == "; nearest is 'name'"


def test_quoted_text_is_printable_and_short() -> None:
    assert quoted("a\x1b[31m\n") == "'a\\x1b[31m\\n'"
    assert quoted("x" * 100) == f"'{'x' * 80}...'"
