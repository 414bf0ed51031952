"""Files of strangers: whatever is in them, there is a message, soon, in little memory, and safe to print."""

from __future__ import annotations

import difflib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import strategies
from artifacts import TINY, frame, tensor, tiny_directory, write
from case_tools import Case, Ran, filled, once, run_cli, safetensors_bytes, words_of
from hostile import KINDS, WEIGHTS, Kind, prepare, require_contained, use_weights
from hypothesis import HealthCheck, given, settings

from ninfer_convert.artifact.directory import parse_directory
from ninfer_convert.errors import ConvertError, SourceError, printable
from ninfer_convert.recipe import globs, problems
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.writer import PartFile
from ninfer_convert.source.header import parse_header
from ninfer_convert.strict_json import PIECES_FROM_BYTES, load_object

EXAMPLES = {"weights": 25, "artifact": 60}
ESCAPES = "\x1b[31m\x1b]0;owned\x07\r\x9b2J\x7f\u202e"
SHOWN = printable(ESCAPES)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        use_weights(WEIGHTS, Path(name))
        yield Path(name)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_mutated_input_ends_in_success_or_in_messages(name: str, prepared: Path) -> None:
    """The same with a large budget: python scripts/fuzz.py --minutes 40."""
    outcomes = set()

    @settings(max_examples=EXAMPLES.get(name, 100), suppress_health_check=list(HealthCheck))
    @given(KINDS[name].inputs)
    def use(data: bytes) -> None:
        outcomes.add(require_contained(KINDS[name], data, prepared))

    use()
    assert "taken" in outcomes


# --- memory ------------------------------------------------------------------------------------------------------


def repeated(piece: str, nbytes: int) -> str:
    """Returns so many bytes of pieces with commas between them; # is another name each time."""
    if "#" not in piece:
        return ",".join([piece] * (nbytes // (len(piece) + 1)))
    pieces, size = [], 0
    while size < nbytes:
        pieces.append(piece.replace("#", format(len(pieces), "x")))
        size += len(pieces[-1]) + 1
    return ",".join(pieces)


PIECES = ("[]", "{}", "[[[[]]]]", "1", "1.5", '"ab"', '"é"', '{"a":1}', '{"a":{"a":{}}}', '"#":1', '"#":{}', '"#":[]')


@pytest.mark.parametrize("nbytes", [900_000, 4_000_000])
@pytest.mark.parametrize("piece", PIECES)
def test_small_values_by_the_million_take_bounded_memory(piece: str, nbytes: int, tmp_path: Path) -> None:
    """Parsed in one go they take up to forty times their text."""
    text = "{" + repeated(piece, nbytes) + "}" if piece.startswith('"#"') else '{"a":[' + repeated(piece, nbytes) + "]}"

    def use(data: bytes, _: Path) -> None:
        load_object(data, "document")

    require_contained(Kind(strategies.headers(), use), text.encode(), tmp_path, seconds=60)


LARGE = PIECES_FROM_BYTES * 6 // 5
ENTRY = '"#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
RECORD = (
    '{"name":"#","kind":"tensor","shape":[1],"format":"I32","layout":"contiguous-le-v1","offset":0,"bytes":4}'
)


@pytest.mark.parametrize(
    "text",
    [
        "{" + repeated(ENTRY, LARGE) + "}",
        '{"a":{"dtype":[' + repeated("[]", LARGE) + "]}}",
        '{"a":{"dtype":"' + "\U0001f600" * (LARGE // 4) + '"}}',
        '{"__metadata__":{' + repeated('"#":""', LARGE) + "}}",
        '{"a":' + repeated("{}", LARGE) + "}",
    ],
    ids=["many entries", "lists", "text", "metadata", "no members"],
)
def test_a_large_header_takes_bounded_memory(text: str, tmp_path: Path) -> None:
    require_contained(KINDS["header"], safetensors_bytes(text.encode()), tmp_path, seconds=60)


@pytest.mark.parametrize(
    "objects", [repeated(RECORD, LARGE), repeated("{}", LARGE), "[" + repeated("[]", LARGE) + "]"]
)
def test_a_large_directory_takes_bounded_memory(objects: str, tmp_path: Path) -> None:
    text = '{"identity":{"model_id":"m","weights_id":"w"},"objects":[' + objects + "]}"
    require_contained(KINDS["artifact"], frame(text.encode()), tmp_path, seconds=60)


def test_large_headers_and_directories_are_read_like_small_ones() -> None:
    """Piece by piece, or in one go: the same entries, in any spelling that JSON has."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "é\n": "\\\"{}"}}
    for number in range(20_000):
        name = f'layers.{number}.{"é{}" if number % 7 == 0 else chr(34)}'
        entries[name] = {"dtype": "U8", "shape": [1, 2], "data_offsets": [2 * number, 2 * number + 2]}
    for separators, ensure_ascii in (((",", ":"), True), ((" ,\n", "\t: "), False)):
        text = json.dumps(entries, separators=separators, ensure_ascii=ensure_ascii).encode()
        raw = safetensors_bytes(text + b"  ", bytes(40_000))
        assert len(text) > PIECES_FROM_BYTES
        header = parse_header(lambda begin, end, raw=raw: raw[begin:end], len(raw), "file")  # type: ignore[misc]
        assert header.metadata == entries["__metadata__"]
        found = {entry.name: (entry.dtype, entry.shape, entry.begin) for entry in header.entries}
        assert found == {
            name: ("U8", (1, 2), header.nbytes + entry["data_offsets"][0])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    directory = tiny_directory()
    record = directory["objects"][0]
    end = record["offset"] + record["bytes"]
    for number in range(12_000):
        extra = {"name": f"more/{number}é{{", "kind": "resource", "encoding": "raw-bytes-v1", "offset": end, "bytes": 1}
        directory["objects"].append(extra)
    for order in (1, -1):
        members = dict(list(directory.items())[::order])
        parsed = parse_directory(json.dumps(members, ensure_ascii=False, indent=1).encode())
        assert [found.name for found in parsed.objects] == [entry["name"] for entry in directory["objects"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"a":{"dtype":1},"a":{}', r'header: member "a" is given twice'),
        ('"a":[]', "header: byte 1000003: required: a name with an object of texts, numbers and lists"),
        ('"a":{"b":{}}', "header: byte 1000003: required: a name with an object"),
        ('"a":{},', "header: byte 1000010: required: a name with an object"),
        ('"a":{} x', "header: byte 1000010: required: ,"),
        ('"a":{"dtype":01}', r"header: not JSON: Expecting ',' delimiter at line 1 column"),
        ('"a":{"x":1,"x":2}', r'header: member "x" is given twice'),
        ('"\\ud800":{}', "header: a string holds half of a surrogate pair"),
    ],
)
def test_what_is_wrong_in_a_large_header_is_told_with_its_place(text: str, message: str) -> None:
    spaces = b" " * 1_000_001
    raw = safetensors_bytes(b"{" + spaces + b"\n" + text.encode() + b"}" + b" " * 100_000)
    with pytest.raises(SourceError, match=message):
        parse_header(lambda begin, end: raw[begin:end], len(raw), "file")
    raw = safetensors_bytes(b"{}" + b" " * 1_100_000 + b"x")
    with pytest.raises(SourceError, match="header: byte 1100002: required: the end"):
        parse_header(lambda begin, end: raw[begin:end], len(raw), "file")


# --- work --------------------------------------------------------------------------------------------------------

HEAD = "schema: 1\nid: t\nartifact: {model_id: m, weights_id: w}\nevidence: none\nsources: {base: {}}\n"


def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that tells how many names misspellings have been compared with."""
    real, counts = difflib.get_close_matches, []

    def counted(word: str, possibilities: Any, **options: Any) -> list[str]:
        names = list(possibilities)
        counts.append(len(names))
        return real(word, names, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    return lambda: sum(counts)


@pytest.mark.parametrize(
    ("known", "used"),
    [
        ("values:\n{}", "value: $velue_{}x"),
        ("names:\n{}", "value: <velue_{}x>"),
        ("sets:\n{}", "shape: [1], when: {{l: velue_{}x}}"),
    ],
)
def test_thousands_of_misspellings_among_thousands_of_names_cost_bounded_work(
    known: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = compared(monkeypatch)
    names = "".join(f"  value_{number}: {'[1]' if known.startswith('sets') else 'a'}\n" for number in range(1000))
    objects = "".join(
        f"  - {{name: o{number}, shape: [1], format: BF16, {used.format(number)}}}\n" for number in range(1000)
    )
    (tmp_path / "r.yaml").write_text(HEAD + known.format(names) + "objects:\n" + objects)
    with pytest.raises(ConvertError):
        load_recipe(tmp_path / "r.yaml")
    assert total() <= problems.MAX_COMPARISONS


def test_many_globs_over_many_objects_are_refused(tmp_path: Path) -> None:
    evidence = "".join(f"  - {{objects: 'o{number}*', text: x}}\n" for number in range(110))
    text = HEAD.replace("evidence: none", "evidence:\n" + evidence) + (
        "sets: {all: {from: 0, through: 30000}}\nobjects:\n"
        "  - {for: {x: all}, objects: [{name: o<x>, shape: [1], format: BF16, value: a<x>}]}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConvertError, match=f"look at more than {globs.MAX_MATCHES} names; use fewer"):
        load_recipe(tmp_path / "r.yaml")


def test_of_many_missing_tensors_the_first_are_told_with_the_nearest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)
    case.source({f"layers.{number}.weight": filled("BF16", [1], 0) for number in range(200)})
    case.recipe(*(f"{{name: o{number}, shape: [1], format: BF16, value: l.{number}.weight}}" for number in range(200)))
    ran = case.plan()
    assert ran.code == 1
    assert ran.errors[-1] == "error: and 150 more problems"
    assert all("; nearest: " in line for line in ran.errors[:-1])


# --- what is not a file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "model.safetensors", "input", "report"]
)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.source({"a": filled("BF16", [4], 0x3F80)}, files={"tokenizer.json": b"{}"})
    case.recipe(
        "{name: a, shape: [4], format: BF16, value: a}",
        "{resource: t, file: tokenizer.json}",
        "{resource: i, input: i}",
        more="inputs: {i: {}}\n",
    )
    case.input("i", b"x")
    pipe = {"input": case.inputs["i"], "report": case.report_path}.get(name, case.sources["base"] / name)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    try:
        ran = case.run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert ran.code in (1, 2)
    assert str(pipe) in ran.err
    assert not case.output.exists()


def test_endless_devices_are_no_inputs(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.source({"a": filled("BF16", [4], 0x3F80)})
    case.recipe(
        "{name: a, shape: [4], format: BF16, value: a}", "{resource: i, input: i}", more="inputs: {i: {}}\n"
    )
    case.inputs["i"] = Path("/dev/zero")
    case.refused("input i: /dev/zero: is not a file that holds bytes; required: a regular file", messages=2)


# --- what is shown -----------------------------------------------------------------------------------------------


def require_harmless(*ran: Ran) -> None:
    for one in ran:
        text = (one.out + one.err).replace("\n", "")
        assert text.isprintable(), text
        assert "Traceback" not in text


def quoted(text: str) -> str:
    return json.dumps(text)


def test_names_in_checkpoints_are_never_printed_raw(tmp_path: Path) -> None:
    case = Case(tmp_path)
    tensors = {f"a{ESCAPES}": filled("BF16", [2, 4], 0x3F80), f"b{ESCAPES}": filled("BF16", [4], 0x7F80)}
    source = case.source(tensors, config={f"c{ESCAPES}": ESCAPES, "model_type": ESCAPES}, files={ESCAPES: b"x"})
    good = f"{{name: {quoted('o' + ESCAPES)}, shape: [2, 4], format: BF16, value: {quoted('a' + ESCAPES)}}}"
    recipes = {
        "unused": [good],
        "missing": [good, f"{{name: p, shape: [4], format: BF16, value: {quoted('x' + ESCAPES)}}}"],
        "values": [good, f"{{name: p, shape: [4], format: BF16, value: {quoted('b' + ESCAPES)}, require: [finite]}}"],
        "shape": [good, f"{{name: p, shape: [5], format: BF16, value: {quoted('b' + ESCAPES)}}}"],
        "resource": [good, f"{{resource: {quoted('r' + ESCAPES)}, file: {quoted('n' + ESCAPES)}}}"],
        "word": [good, f"{{name: p, shape: [4], format: BF16, words: {quoted('b' + ESCAPES)}}}"],
    }
    for name, objects in recipes.items():
        case.recipe(*objects, sources=f"{{base: {{config: {{model_type: {quoted('other' + ESCAPES)}}}}}}}")
        ran = case.plan()
        assert (ran.code, SHOWN in ran.err) == (1, True), (name, ran.err)
        require_harmless(ran)
    (source / "model.safetensors").write_bytes(
        safetensors_bytes({f"a{ESCAPES}": {"dtype": ESCAPES, "shape": [1], "data_offsets": [0, 2]}}, b"xx")
    )
    ran = case.plan()
    assert (ran.code, SHOWN in ran.err) == (1, True)
    require_harmless(ran)


def test_names_in_recipes_are_printable_or_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.source({"a": filled("BF16", [4], 0x3F80)})
    for entry in (
        f"{{name: {quoted('o' + ESCAPES)}, shape: [4], format: BF16, value: a}}",
        f"{{resource: {quoted('r' + ESCAPES)}, file: t}}",
    ):
        case.recipe(entry)
        ran = case.plan()
        assert (ran.code, SHOWN in ran.err) == (1, True)
        require_harmless(ran)


def test_names_of_files_are_never_printed_raw(tmp_path: Path) -> None:
    odd = tmp_path / f"d{ESCAPES}"
    odd.mkdir()
    case = Case(odd)
    case.output = odd / f"out{ESCAPES}.ninfer"
    case.source({"a": filled("BF16", [2, 4], 0x3F80)}, files={"f": b"x"})
    case.recipe("{name: o, shape: [2, 4], format: BF16, value: a}", "{resource: r, file: f}")
    codes = {
        0: [
            case.plan("--objects"),
            case.plan("--json"),
            case.run("-v"),
            run_cli("inspect", case.output),
            run_cli("inspect", case.output, "--objects"),
            run_cli("inspect", case.output, "--json"),
            run_cli("verify", case.output),
            run_cli("verify", case.output, "--recipe", case.recipe_path, "--source", case.sources["base"]),
            run_cli("compare", case.output, case.output),
            run_cli("export", case.output, "-o", odd / f"x{ESCAPES}.safetensors"),
        ],
        1: [
            run_cli("plan", odd / f"none{ESCAPES}.yaml"),
            run_cli("plan", case.recipe_path, "--source", odd / f"none{ESCAPES}"),
            run_cli("inspect", odd / f"none{ESCAPES}"),
        ],
        2: [
            case.run(),
            run_cli("plan", case.recipe_path, ESCAPES),
            run_cli("plan", f"--{ESCAPES}"),
            run_cli(ESCAPES),
            run_cli("plan", case.recipe_path, "--threads", ESCAPES),
        ],
    }
    for code, ran in codes.items():
        assert [one.code for one in ran] == [code] * len(ran), [one.err for one in ran]
        require_harmless(*ran)
    assert SHOWN in codes[0][2].err
    assert SHOWN in codes[1][2].err


def test_names_in_artifacts_and_reports_are_never_printed_raw(tmp_path: Path) -> None:
    name = f"o{ESCAPES}"
    path = write(tmp_path / "out.ninfer", [tensor(name, "Q4G64_F16S", [3, 130]), tensor(f"p{ESCAPES}", "I32", [4])])
    report = {
        "recipe": {"id": ESCAPES},
        "run": {"converter": ESCAPES, "finished": ESCAPES},
        "sources": {ESCAPES: {"repo": ESCAPES}},
        "objects": [{"name": ESCAPES}, {"name": name, "bytes": ESCAPES, "sha256": ESCAPES}],
    }
    (tmp_path / "out.ninfer.conversion.json").write_text(json.dumps(report))
    ran = [
        run_cli("inspect", path),
        run_cli("inspect", path, "--objects"),
        run_cli("inspect", path, "--json"),
        run_cli("inspect", path, "--object", name),
        run_cli("inspect", path, "--object", f"q{ESCAPES}"),
        run_cli("verify", path),
        run_cli("verify", path, "--report", tmp_path / "out.ninfer.conversion.json"),
        run_cli("verify", path, "--report", tmp_path / "out.ninfer.conversion.json", "--json"),
        run_cli("verify", path, "--recipe", "demo"),
        run_cli("compare", path, TINY),
        run_cli("compare", path, TINY, "--csv"),
        run_cli("export", path, "-o", tmp_path / "x.safetensors", "--objects", ESCAPES),
    ]
    require_harmless(*ran)
    assert [one.code for one in ran] == [0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 2]
    assert SHOWN in ran[1].out


# --- what was found ----------------------------------------------------------------------------------------------


def resourceful(tmp_path: Path, document: object) -> Case:
    case = Case(tmp_path)
    case.source({"a": filled("BF16", [4], 0x3F80)}, files={"tokenizer_config.json": json.dumps(document).encode()})
    case.recipe(
        "{name: a, shape: [4], format: BF16, value: a}",
        "{resource: t, file: tokenizer_config.json, member: chat_template}",
    )
    return case


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 5, True])
def test_a_template_whose_name_is_no_text_is_left_out(tmp_path: Path, name: object) -> None:
    document = {"chat_template": [{"name": name, "template": "x"}, {"name": "default", "template": "y"}]}
    case = resourceful(tmp_path, document)
    assert case.run().code == 0
    assert case.payload("t") == b"y"


@pytest.mark.parametrize("candidates", [2**31, 2**50, 2**61, 2**62])
def test_a_shortlist_of_more_candidates_than_the_input_holds_takes_no_memory_for_them(
    tmp_path: Path, candidates: int
) -> None:
    case = Case(tmp_path)
    case.source(
        {"a": filled("BF16", [4], 0x3F80)}, files={"t.json": b'{"added_tokens_decoder": {"1": {"special": true}}}'}
    )
    case.input("counts", bytes(64))
    shortlist = f"{{shortlist: {{counts: counts, candidates: {candidates}, take: 4, special: t.json}}}}"
    case.recipe(
        "{name: a, shape: [4], format: BF16, value: a}",
        f"{{name: ids, shape: [4], format: I32, value: {shortlist}}}",
        more="inputs: {counts: {}}\n",
    )
    ran = case.plan()
    assert ran.code == 1
    assert "counts.bin) holds 64 bytes" in ran.err or "candidates" in ran.err
    require_harmless(ran)


def test_an_input_that_is_replaced_while_the_plan_is_made_is_named(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.source({"a": filled("BF16", [4], 0x3F80), "b": words_of("BF16", 1)})
    case.input("i", b"one")
    case.recipe(
        "{name: a, shape: [4], format: BF16, value: a}", "{resource: i, input: i}",
        more="inputs: {i: {}}\nignore: [b]\n",
    )  # fmt: skip
    from ninfer_convert.plan import planner

    with once(planner, "check_coverage", lambda: case.inputs["i"].write_bytes(b"two!")):
        ran = case.run()
    assert ran.code == 1
    assert ran.errors == [
        f"error: {case.inputs['i']}: file changed or truncated while reading: it had 3 bytes and now has 4"
    ]
    assert not case.output.exists()


def test_small_files_are_read_once_before_the_first_byte_is_written(tmp_path: Path) -> None:
    """Later changes of theirs are nothing to the artifact: it holds what was read, and the report its digest."""
    case = Case(tmp_path)
    source = case.source(
        {"a": filled("BF16", [4], 0x3F80)}, config={"model_type": "x"}, files={"tokenizer.json": b"before"}
    )
    case.recipe("{name: a, shape: [4], format: BF16, value: a}", "{resource: t, file: tokenizer.json}")

    def change() -> None:
        (source / "tokenizer.json").write_bytes(b"after")
        (source / "config.json").unlink()
        case.recipe_path.write_text("nothing")

    with once(PartFile, "begin", change):
        assert case.run().code == 0
    assert case.payload("t") == b"before"


@pytest.mark.heavy
def test_a_few_bytes_of_recipe_that_unroll_to_the_limits_take_bounded_memory(tmp_path: Path) -> None:
    slices = ", ".join(["{slice: {of: a<x>, span: [0, 1]}}"] * 12)
    text = HEAD + (
        "sets: {all: {from: 0, through: 33000}}\nobjects:\n"
        f"  - {{for: {{x: all}}, objects: [{{name: o<x>, shape: [1], format: BF16, value: {{concat: [{slices}]}}}}]}}\n"
    )
    assert require_contained(KINDS["recipe-text"], text.encode(), tmp_path, seconds=60) == "refused"
