"""Hypothesis strategies for everything that strangers make: headers, indexes, artifacts, recipes, journals, reports.

Each begins with something valid and changes it where its structure can be wrong: members are dropped, doubled,
swapped, given odd values; text is cut, spliced, damaged byte by byte. Most of what comes out gets past the first
check and breaks a later one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from artifacts import TINY, reframe, tiny_directory
from hypothesis import strategies as st
from miniatures import ROOT

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Token:
    """Text that stands in a document as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


class Pairs:
    """An object that may have a member twice."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self.pairs = pairs


TEXTS = (
    "", " ", "a", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\r\n", "\0", "\x7f", "\x9b2J", "é", "模型", "\U0001f600",
    "\u202egpj.exe", "\u2028", "../../etc/passwd", "/etc/passwd", "..", "a/b", "a\\b", "~", "*", "[", "[!]", "x" * 300,
    "NaN", "-0", "1e999", "true", "null", "<l>", "<vocab>", "<nothing>", "$q", "$nothing", "base:a", "model.", "U8",
    "BF16", "F6_E2M3", "NVFP4", "Q4G64_F16S", "row-split-k128-v1", "contiguous-le-v1", "raw-bytes-v1", "tensor",
    "resource", "MAXABS_F16_RECIP_RNE_V1", "model-00001-of-00003.safetensors", "__metadata__", "%s%n", "{}",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 0.5, 1e308, 1e-320,
)  # fmt: skip
TOKENS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "0.0", "1.0", "00", "+1", "0x10", "1_000", "'a'", "tru", '"\\ud800"',
    '"\\u0000"', '"\\x"', "[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70, "9" * 500, '"' + "\\n" * 200 + '"', "",
    "// comment", "[1,]", "{,}",
)  # fmt: skip
SCALARS = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(NUMBERS),
    st.sampled_from(TOKENS).map(Token),
    st.sampled_from((None, True, False)),
    st.sampled_from(([], {}, [[]], [{}], {"a": {}}, [0, 1], [1, 0], [-1, 2])),
    st.text(max_size=20),
    st.integers(-(2**70), 2**70),
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of everything inside a document."""
    pairs = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, child in pairs:
        yield value, key
        yield from _places(child)


def _edit(draw: Draw, document: Any) -> None:
    """Changes one place of a document."""
    places = list(_places(document))
    if not places:
        return
    container, key = places[draw(st.integers(0, len(places) - 1))]
    kind = draw(st.integers(0, 9))
    if kind <= 3:
        container[key] = copy.deepcopy(draw(SCALARS))
    elif kind == 4:
        del container[key]
    elif kind == 5:
        other, place = places[draw(st.integers(0, len(places) - 1))]
        container[key] = copy.deepcopy(other[place])
    elif kind == 6 and isinstance(container[key], int):
        container[key] += draw(st.sampled_from((-256, -1, 1, 2, 256, 2**32, 2**63)))
    elif kind == 7 and isinstance(container, dict):
        container[draw(st.sampled_from(TEXTS))] = container.pop(key)
    elif kind == 8 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif isinstance(container[key], dict):
        name = draw(st.sampled_from([*container[key], *TEXTS]))
        container[key] = Pairs([*container[key].items(), (name, copy.deepcopy(draw(SCALARS)))])


def written(value: Any) -> str:
    """Returns a document as JSON, odd parts as they are."""
    if isinstance(value, Token):
        return value.text
    if isinstance(value, (dict, Pairs)):
        pairs = value.items() if isinstance(value, dict) else value.pairs
        return "{" + ",".join(f"{json.dumps(str(key))}:{written(child)}" for key, child in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


@st.composite
def edited(draw: Draw, documents: Sequence[Any]) -> bytes:
    """A valid JSON document with up to three changes, as UTF-8."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(0, 3))):
        try:
            _edit(draw, document)
        except (IndexError, KeyError):
            # An earlier change has taken away what this one was about.
            continue
    return written(document).encode("utf-8", "surrogatepass")


@st.composite
def spliced(draw: Draw, contents: st.SearchStrategy[bytes], at_most: int = 1) -> bytes:
    """Bytes that have been damaged in some places, or in none."""
    data = bytearray(draw(contents))
    for _ in range(draw(st.integers(0, at_most))):
        begin = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from((1, 1, 2, 8, 64, 4096)))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            del data[begin:]
        elif kind == 1:
            del data[begin : begin + length]
        elif kind == 2:
            data[begin:begin] = data[begin : begin + length]
        elif kind == 3:
            data[begin : begin + length] = draw(st.binary(max_size=8))
        elif kind == 4 and data:
            data[begin] ^= 1 << draw(st.integers(0, 7))
        else:
            data[begin : begin + 8] = draw(st.sampled_from(NUMBERS[:27])).to_bytes(16, "little", signed=True)[:8]
    return bytes(data)


# --- safetensors -------------------------------------------------------------------------------------------------

HEADERS = (
    {
        "__metadata__": {"format": "pt", "note": "é"},
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]},
        "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [20, 20]},
        "d": {"dtype": "F8_E4M3", "shape": [2, 2, 1], "data_offsets": [20, 24]},
    },
    {"only": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}},
    {},
)


@st.composite
def headers(draw: Draw) -> bytes:
    """A safetensors file, header and data, most often of the right length."""
    place = draw(st.integers(0, len(HEADERS) - 1))
    text = draw(edited(HEADERS[place : place + 1])) + b" " * draw(st.sampled_from((0, 0, 0, 3)))
    length = len(text) if draw(st.integers(0, 9)) else draw(st.sampled_from(NUMBERS[:26]))
    data = bytes((24, 3, 0)[place] if draw(st.integers(0, 7)) else draw(st.sampled_from((0, 3, 23, 25))))
    return draw(spliced(st.just((length % 2**64).to_bytes(8, "little") + text + data)))


@st.composite
def weights(draw: Draw, whole: bytes) -> bytes:
    """Valid weights in which up to eight words of the data are others: the sign, the exponent, everything."""
    data = bytearray(whole)
    begin = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw(st.integers(0, 8))):
        place = draw(st.integers(begin, len(data) - 4))
        data[place : place + 4] = draw(st.sampled_from(WORDS) | st.binary(min_size=1, max_size=4))
        del data[len(whole) :]
        data.extend(bytes(len(whole) - len(data)))
    return bytes(data)


WORDS = tuple(
    word.to_bytes(4, "little")
    for word in (0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 1, 0x7F80, 0xFF80, 0x7FC0, 0x7F, 0xFF)
)
INDEXES = (
    {
        "metadata": {"total_size": 48},
        "weight_map": {
            "one.a": "model-00001-of-00002.safetensors",
            "one.b": "model-00001-of-00002.safetensors",
            "two.a": "model-00002-of-00002.safetensors",
        },
    },
    {"weight_map": {"one.a": "absent.safetensors", "one.b": "model-00001-of-00002.safetensors"}},
)
CONFIGS = (
    {"model_type": "many", "text_config": {"hidden_size": 5, "layers": ["a", "b"]}, "eps": 1e-6, "tie": False},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}}},
)


# --- artifacts ---------------------------------------------------------------------------------------------------

DIRECTORIES = (tiny_directory(),)


@st.composite
def artifacts(draw: Draw) -> bytes:
    """The golden artifact with a changed directory, damaged bytes, or another directory length."""
    if draw(st.integers(0, 2)):
        text = draw(edited(DIRECTORIES))
        data = bytearray(reframe({}))
        head = data[:8] + len(text).to_bytes(8, "little") + text
        whole = bytes(head) + bytes(-len(head) % 4096) + TINY.read_bytes()[4096:]
    else:
        whole = TINY.read_bytes()
    return draw(spliced(st.just(whole), at_most=2))


# --- journals and reports ----------------------------------------------------------------------------------------

IDENTITY = {
    "recipe": "a" * 64,
    "converter": "0.1.0",
    "sources": {"base": [["model-00001-of-00002.safetensors", 100, 1, "b" * 64]]},
    "prefixes": {"base": {}},
    "resources": {"t": "c" * 64},
}
JOURNAL = (
    {"schema": 1, "writer": {"pid": 7, "host": "here"}, "identity": IDENTITY},
    {"object": 0, "sha256": "0" * 64},
    {"writer": {"pid": 8, "host": "there"}},
    {"object": 3, "sha256": "3" * 64},
)
REPORTS = (
    {
        "schema": 1,
        "artifact": {"model_id": "m", "weights_id": "w", "bytes": len(TINY.read_bytes()), "sha256": "a" * 64},
        "recipe": {"id": "r", "sha256": "b" * 64, "path": "recipe.yaml"},
        "sources": {"base": {"location": "/x", "repo": "a/b", "revision": None, "files": [{"name": "f", "bytes": 1}]}},
        "objects": [{"name": record["name"], "bytes": record["bytes"], "sha256": "c" * 64, "sources": []}
                    for record in tiny_directory()["objects"]],
        "run": {"converter": "0.1.0", "finished": "2026-01-01T00:00:00+00:00", "threads": 2, "command": ["run"]},
    },
)  # fmt: skip


SHARE_JOURNAL = (
    {"schema": 1, "writer": {"pid": 7, "host": "here"}, "identity": IDENTITY,
     "share": {"index": 1, "count": 2, "begin": 4096, "end": 8192}},
    {"begin": 4096, "end": 5000, "sha256": "0" * 64},
    {"writer": {"pid": 8, "host": "there"}},
    {"begin": 5000, "end": 8192, "sha256": "1" * 64},
    {"complete": True},
)  # fmt: skip
PLAN_FILE = {
    "kind": "ninfer-convert plan",
    "schema": 1,
    "recipe": "demo",
    "sources": {"base": "/checkpoint", "other": "hf://a/b@" + "0" * 40},
    "inputs": {"counts": "/counts"},
    "prefixes": ["a.=b."],
    "unpinned": False,
    "output": "/out.ninfer",
    "report": "/out.ninfer.conversion.json",
    "identity": IDENTITY,
    "totals": {"objects": 3},
}
TOKENIZER_CONFIG = {
    "chat_template": [{"name": "default", "template": "x"}, {"name": "tool", "template": "y"}],
    "added_tokens_decoder": {"6": {"special": True, "content": "<s>"}, "7": {"special": False}},
}


@st.composite
def journals(draw: Draw, journal: Sequence[Any] = JOURNAL) -> bytes:
    """A journal of which lines have been changed, and which has been damaged or torn."""
    lines = [draw(edited((line,))) if draw(st.integers(0, 2)) == 0 else written(line).encode() for line in journal]
    return draw(spliced(st.just(b"\n".join(lines) + b"\n")))


def reports() -> st.SearchStrategy[bytes]:
    """A conversion report that has been changed or damaged."""
    return spliced(edited(REPORTS))


# --- recipes -----------------------------------------------------------------------------------------------------

RECIPE_TEXTS = tuple(
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("tests/fixtures/small_recipe.yaml", "recipes/minilm-l6-v2.yaml", "recipes/demo.yaml")
)
_YAML_TOKEN = re.compile(r"[A-Za-z0-9_.<>$/*-]+|\s+|.", re.DOTALL)
PIECES = (
    "&a ", "*a", "<<: *a", "!!python/object/apply:os.system [true]", "!!binary x", "? ", ": ", "- ", "[", "]", "{", "}",
    "|\n", ">-\n  ", "# note", "---\n", "...\n", "%YAML 1.1\n", "\t", "\n", "\n\n", "  ", "'", '"', ",", "\\", "@", "`",
    "yes", "no", "on", "~", "null", "012", "1_000", "0o7", "1e6", ".inf", "2020-01-01", "1:30", "=", "through: 99999",
    "through: 999999999999", "step: 0", "for: {l: text}", "when: {l: odd}", "except: text", "all: all",
    "extends: ../recipe.yaml", "extends: recipe.yaml", "schema: 2", "concat: [a, a]", "{same: [a, b]}", "span: [5, 1]",
    *TEXTS,
)  # fmt: skip


@st.composite
def recipe_texts(draw: Draw) -> bytes:
    """The text of a recipe in which pieces have been replaced, dropped, doubled, moved or inserted."""
    pieces = _YAML_TOKEN.findall(draw(st.sampled_from(RECIPE_TEXTS)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(pieces) - 1))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            pieces[place] = draw(st.sampled_from(PIECES))
        elif kind == 1:
            del pieces[place : place + draw(st.sampled_from((1, 1, 5, 50)))]
        elif kind == 2:
            pieces[place:place] = pieces[place : place + draw(st.sampled_from((1, 5, 50, 500)))]
        elif kind == 3:
            pieces[place] = pieces[draw(st.integers(0, len(pieces) - 1))]
        else:
            pieces.insert(place, draw(st.sampled_from(PIECES)))
        pieces = pieces or [""]
    text = "".join(pieces).encode("utf-8", "surrogatepass")
    return draw(spliced(st.just(text))) if draw(st.integers(0, 4)) == 0 else text


RECIPE = {
    "schema": 1,
    "id": "fuzzed",
    "artifact": {"model_id": "m", "weights_id": "w"},
    "evidence": "none",
    "sources": {"base": {"dtype": ["BF16", "F32", "I64", "U8", "F8_E4M3"], "config": {"model_type": "many"}}},
    "inputs": {"counts": {}},
    "names": {"P": "m.", "n": 8},
    "sets": {"some": {"from": 0, "through": 3}, "odd": {"from": 1, "through": 3, "step": 2}, "few": [3, 0]},
    "values": {"rows": {"concat": ["<P>0.w", "<P>1.w"]}, "half": {"slice": {"of": "$rows", "span": [0, 8]}}},
    "objects": [
        {"resource": "t", "file": "tokenizer.json"},
        {"resource": "u", "any": [{"file": "absent"}, {"file": "tokenizer_config.json", "member": "chat_template"}]},
        {"resource": "c", "input": "counts"},
        {"for": {"l": "some"}, "objects": [
            {"name": "w/<l>", "shape": ["<n>", 130], "format": "Q4G64_F16S", "encoder": "MAXABS_F16_RECIP_RNE_V1",
             "value": "<P><l>.w"},
            {"when": {"l": "odd"}, "objects": [
                {"name": "v/<l>", "shape": [5], "format": "FP32", "value": "<P><l>.v", "require": ["finite"]}]},
        ]},
        {"name": "half", "shape": [8, 130], "format": "BF16", "value": "$half"},
        {"name": "turned", "shape": [130, 8], "format": "BF16", "value": {"transpose": {"of": "<P>0.w"}}},
        {"name": "flat", "shape": [1040], "format": "BF16", "value": {"reshape": {"of": "<P>0.w", "to": [1040]}}},
        {"name": "rows", "shape": [2, 130], "format": "BF16", "value": {"gather": {"of": "<P>0.w", "ids": "ids"}}},
        {"name": "ids", "shape": [2], "format": "I32", "value": {"cast": {"of": "ids", "to": "I32", "rule": "checked"}},
         "require": ["unique", {"range": [0, 7]}]},
        {"name": "wide", "shape": [5], "format": "BF16",
         "value": {"cast": {"of": "<P>0.v", "to": "BF16", "rule": "nearest-even"}}},
        {"name": "n", "shape": [128, 64], "format": "NVFP4", "words": "n"},
        {"name": "f", "shape": [5, 33], "format": "FP8_E4M3FN_ROW_BF16S", "words": "f"},
        {"name": "short", "shape": [5], "format": "I32", "value": {"shortlist": {
            "counts": "counts", "candidates": 8, "take": 5, "special": "tokenizer_config.json"}}},
        {"component": "mtp", "optional": True, "objects": [
            {"name": "mtp/x", "shape": [5], "format": "FP32", "value": "absent"}]},
    ],
    "conditions": [{"same": ["<P>0.v", "<P>1.v"]}],
    "ignore": ["*.input_global_scale", "m.2.v"],
}  # fmt: skip
"""Fits the checkpoint that `hostile` writes; as JSON it is YAML too."""


def recipes() -> st.SearchStrategy[bytes]:
    """A recipe that fits a checkpoint, changed in its structure."""
    return edited((RECIPE,))
