"""Mistakes that people make, seeded in a shipped recipe: each is told where it was made, with what was meant.

In a row, `@` in the wrong text is the place that has to be told; it is not part of the recipe.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from case_tools import run_cli
from recipe_texts import SMALL

from ninfer_convert.recipe.files import find_recipe

TEXT = find_recipe("qwen3.6-27b/groupwise-int").read_text(encoding="utf-8")

TYPOS = [
    ("\nartifact: {", "\n@artefact: {", "unknown key 'artefact' in a recipe", "artifact"),
    ("evidence:\n", "@evidance:\n", "unknown key 'evidance' in a recipe", "evidence"),
    ("\nid: qwen3_6_27b-v2", "\n@idd: qwen3_6_27b-v2", "unknown key 'idd' in a recipe", "id"),
    ("weights_id: groupwise-int", "@weight_id: groupwise-int", "unknown key 'weight_id' in artifact", "weights_id"),
    ("    revision: 6a9e", "    @revison: 6a9e", "unknown key 'revison' in a source", "revision"),
    ("    dtype: BF16\n", "    @dtpye: BF16\n", "unknown key 'dtpye' in a source", "dtype"),
    ("    dtype: BF16\n", "    dtype: @BF61\n", "unknown dtype 'BF61'", "BF16"),
    ("{from: 0, through: 63}", "{from: 0, @trough: 63}", "unknown key 'trough' in a set", "through"),
    ("gdn: {all: text, except: attention}", "gdn: {all: text, except: @atention}", "unknown set 'atention'",
     "attention"),
    ("  - for: {l: text}", "  - for: {l: @texts}", "unknown set 'texts'", "text"),
    ("      - when: {l: gdn}", "      - when: {@i: gdn}", "'i' is no loop variable here", None),
    ("      - when: {l: gdn}", "      - @wen: {l: gdn}", "unknown key 'wen' in an object", "when"),
    ("value: <P>norm.weight", "value: @<p>norm.weight", "placeholder <p> is not defined here", "<P>"),
    ("<P>layers.<l>.self_attn.o_proj.weight", "@<P>layers.<L>.self_attn.o_proj.weight", "placeholder <L> is not",
     "<l>"),
    ("[$query, <P>layers", "[@$qeury, <P>layers", "no value is named '$qeury' here", "$query"),
    ("[unique, {range: [0, 248076]}]", "[@uniqe, {range: [0, 248076]}]", "unknown rule 'uniqe'", "unique"),
    ("counts: ranking", "counts: @rankings", "unknown input 'rankings'", "ranking"),
    ("text/final_norm, shape: [5120], format: BF16", "text/final_norm, @shap: [5120], format: BF16",
     "unknown key 'shap' in a tensor", "shape"),
    ("text/final_norm, shape: [5120], format: BF16", "text/final_norm, shape: [5120], format: @B16",
     "unknown format 'B16'", "BF16"),
    ("[248320, 5120], format: Q6G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,\n     value: lm_head",
     "[248320, 5120], format: @Q6G64F16S, encoder: MAXABS_F16_RECIP_RNE_V1,\n     value: lm_head",
     "unknown format 'Q6G64F16S'", "Q6G64_F16S"),
    ("[248320, 5120], format: Q6G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,\n     value: lm_head",
     "[248320, 5120], format: Q6G64_F16S, encoder: @MAXABS_F16_RNE_V1,\n     value: lm_head",
     "unknown encoder 'MAXABS_F16_RNE_V1'", "MAXABS_F16_RECIP_RNE_V1"),
    ("{gather: {of: lm_head.weight, ids: $ids}}", "{@gater: {of: lm_head.weight, ids: $ids}}",
     "unknown expression 'gater'", "gather"),
    ("    file: tokenizer.json", "    @flie: tokenizer.json", "unknown key 'flie' in a resource", "file"),
    ("- component: vision", "- @componnent: vision", "unknown key 'componnent' in an object", "component"),
    ("value: {reshape: {of: <V>patch", "value: {reshape: {@fo: <V>patch", "unknown key 'fo' in reshape", "of"),
]  # fmt: skip

INDENTS = [
    ("\n    revision: 6a9e", "\n     revision@: 6a9e", "keys that stand together begin in one column", None),
    ("\n    dtype: BF16\n", "\n   @dtype: BF16\n", "keys that stand together begin in one column", None),
    ("\n  vision: {from", "\n@vision: {from", "unknown key 'vision' in a recipe", None),
    ("\n    sha256: e70c", "\n  @sha256: e70c", "the entries of a list begin in one column, each with '- '", None),
    ("\n        values:\n          # q_proj", "\n         @values:\n          # q_proj", "begin in one column", None),
    ("\n  - {name: text/final_norm, ", "\n @- {name: text/final_norm, ", "begin in one column", None),
    ("\n  - component: vision\n    objects:", "\n  - component: vision\n  @objects:", "begin in one column", None),
]

BOUNDS = [
    ("block: 512, span: [256, 512]}}\n        objects", "block: 512, span: @[256, 513]}}\n        objects",
     "the span ends at 513, beyond a block of 512 rows", None),
    ("{from: 0, through: 26}", "{from: 30, through: @26}", "the set is empty: it begins at 30 and ends at 26", None),
    ("{from: 3, through: 63, step: 4}", "{from: 3, through: 63, step: @0}", "step is 0; it must be 1 or more", None),
    ("{from: 3, through: 63, step: 4}\n  gdn: {all: text, except: attention}",
     "{from: 3, through: 67, step: 4}\n  gdn: {all: text, except: @attention}",
     "'except' names what is not in 'all': 67", None),
    ("take: 131072, ", "take: @331072, ", "take is 331072, more than the 248077 candidates", None),
    ("value: {slice: {of: <P>layers.<l>.linear_attn.in_proj_qkv.weight, span: [0, 4096]}}",
     "value: {@slice: {of: <P>layers.<l>.linear_attn.in_proj_qkv.weight, span: [0, 4095]}}",
     "the value has size 4095 along axis 0; its shape is [4096, 5120]", None),
    ("[131072], format: I32, value: $ids", "[131071], format: I32, value: @$ids",
     "object text/draft_head_token_ids: the value has size 131072 along axis 0; its shape is [131071]", None),
    ("shape: [4, 10240], format: BF16,\n             value: {transpose",
     "shape: [10240, 4], format: BF16,\n             value: {@transpose",
     "the value has size 4 along axis 0; its shape is [10240, 4] (line 150)", None),
    ("span: [4096, 10240]", "span: @[10240, 4096]", "the span [10240, 4096) is empty; end must be above begin", None),
    ("{range: [0, 248076]}", "{range: @[248076, 0]}", "the range from 248076.0 to 0.0 is empty", None),
    ("vision/position_embedding, shape: [2304, 1152]", "vision/position_embedding, shape: [@-2304, 1152]",
     "expected an integer that is 1 or more, found -2304", None),
    ("                                 axes: [1, 0]}}}", "                                 axes: @[0, 0]}}}",
     "axes [0, 0] are no permutation; name each axis from 0 to 1 once", None),
]  # fmt: skip

TYPES = [
    ("text/final_norm, shape: [5120], format: BF16", "text/final_norm, shape: [5120], format: @FP32",
     "the value is BF16; format FP32 takes F32; name the conversion: cast to FP32, rule exact", None),
    ("A_log, to: FP32, rule: exact", "A_log, to: FP32, rule: @checked", "rule checked casts to I32, not to FP32", None),
    ("A_log, to: FP32, rule: exact}}", "A_log, to: @F32, rule: exact}}", "unknown dtype of a cast 'F32'", "FP32"),
    ("value: {cast: {of: <P>layers.<l>.linear_attn.A_log, to: FP32, rule: exact}}",
     "value: {@cast: {of: <P>layers.<l>.linear_attn.A_log, to: BF16, rule: nearest-even}}",
     "the value is BF16 already; remove the cast to BF16", None),
    ("    dtype: BF16\n", "    dtype: @bf16\n", "unknown dtype 'bf16'", "BF16"),
    ("text/final_norm, shape: [5120]", "text/final_norm, shape: @5120", "expected a list of positive integers", None),
    ("text/final_norm, shape: [5120]",
     "text/final_norm, shape: [@5120.0]", "expected an integer, found '5120.0'", None),
    ("text/token_embedding, shape: [248320, 5120]", "text/token_embedding, shape: @[248320]",
     "has rank 1; Q6G64_F16S stores matrices [N, K] of rank 2", None),
    ("[248320, 5120], format: Q6G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,\n     value: lm_head",
     "[248320, 5120], format: Q6G64_F16S, encoder: @MAXABS_BF16S_RECIP_E4M3FN_RNE_V1,\n     value: lm_head",
     "does not make Q6G64_F16S", "MAXABS_F16_RECIP_RNE_V1"),
    ("[248320, 5120], format: Q6G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,\n     value: lm_head",
     "[248320, 5120], format: @Q6G64_F16S,\n     value: lm_head",
     "format Q6G64_F16S needs its encoder written out; add 'encoder: MAXABS_F16_RECIP_RNE_V1'", None),
    ("text/final_norm, shape: [5120], format: BF16, value: ",
     "text/final_norm, shape: [5120], format: BF16, words: @",
     "format BF16 has no words to copy", None),
    ("sha256: 5f9e4d49", "sha256: @5F9E4D49", "64 lowercase hexadecimal digits", None),
    ("revision: 6a9e13bd6f", "revision: @6a9e13bd", "a commit of 40 lowercase hexadecimal digits", None),
]  # fmt: skip

YAML = [
    ("mtp/final_norm, shape: [5120],", "mtp/final_norm, shape: @[5120,", "this [ is not closed before a }", None),
    ("  - {name: text/final_norm, shape: [5120], format: BF16, value: <P>norm.weight}\n",
     "  - @{name: text/final_norm, shape: [5120], format: BF16, value: <P>norm.weight\n",
     "this { is never closed; line 181 cannot go on with it", None),
    ("  - {name: text/final_norm, shape: [5120], format: BF16, value: <P>norm.weight}\n",
     "  - {name: text/final_norm, shape: [5120] @format: BF16, value: <P>norm.weight}\n",
     "did not find expected ',' or '}'", None),
    ("value: <P>norm.weight}\n", "value: <P>norm.weight}@}\n", "not valid YAML", None),
    ("    repo: Qwen/Qwen3.6-27B", "@\trepo: Qwen/Qwen3.6-27B", "a tab; write spaces", None),
    ("    dtype: BF16\n", "    @dtype:BF16\n", "a key is expected here; it ends with ': '", None),
    ("    dtype: BF16\n", "    dtype: BF16\n    @dtype: F32\n", "key 'dtype' is given twice; first on line 17", None),
    ("    dtype: BF16\n", "    dtype: @'BF16\n", "this ' is never closed", None),
    ("vision/layers/<b>/norm2/bias, shape", "@vision/layers/<b/norm2/bias, shape",
     "has a < or > that belongs to no placeholder <name>", None),
    ("        mamba_ssm_dtype: float32", "        mamba_ssm_dtype: @*float32", "has no anchor before it", None),
    ("        mamba_ssm_dtype: float32", "        mamba_ssm_dtype: @yes", "'yes': YAML reads a boolean", None),
    ("        mamba_ssm_dtype: float32", "        mamba_ssm_dtype: @%float32", "cannot start any token", None),
]  # fmt: skip


def seeded(right: str, wrong: str) -> tuple[str, int, int]:
    """Returns the recipe with a mistake, and the line and column of the place that has to be told."""
    assert TEXT.count(right) == 1
    assert wrong.count("@") == 1
    before = TEXT[: TEXT.index(right)] + wrong[: wrong.index("@")]
    line = before.count("\n") + 1
    return TEXT.replace(right, wrong.replace("@", "")), line, len(before) - before.rfind("\n")


MISTAKES = [*TYPOS, *INDENTS, *BOUNDS, *TYPES, *YAML]


@pytest.mark.parametrize(("right", "wrong", "fragment", "meant"), MISTAKES)
def test_a_mistake_is_told_where_it_was_made(
    right: str, wrong: str, fragment: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, line, column = seeded(right, wrong)
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    ran = run_cli("recipe", "check", "recipe.yaml", "--json")
    assert (ran.code, ran.err) == (1, "")
    first, *others = json.loads(ran.out)["problems"]
    assert (first["severity"], first["file"], first["line"], first["column"]) == ("error", "recipe.yaml", line, column)
    assert fragment in first["message"]
    assert first.get("suggestion") == meant
    # What is taken out with a definition is missed where it is used, and nothing else is told.
    assert all(re.search("^unknown set|^no value is named", other["message"]) for other in others)
    shown = run_cli("recipe", "check", "recipe.yaml").out.splitlines()
    assert shown[0] == f"recipe.yaml:{line}:{column}: error: {first['message']}"
    below = shown[2].index("^")
    assert shown[1][below:].startswith(text.splitlines()[line - 1][column - 1 :][:8].replace("\t", "\\t"))


def test_there_are_more_than_forty_kinds() -> None:
    assert len(MISTAKES) == len({wrong for _, wrong, _, _ in MISTAKES}) > 40


def altered(draw: random.Random) -> str:
    """Returns the recipe with every construct after one slip of the keyboard."""
    lines = SMALL.splitlines(keepends=True)
    row = draw.randrange(len(lines))
    line = lines[row]
    place = draw.randrange(len(line))
    lines[row] = draw.choice(
        [
            line[:place] + line[place + 1 :],
            line[:place] + draw.choice("{}[]:,-#&*!|>'\"%@`$<x \t\n\x1b\u6f22\u0301") + line[place:],
            line[:place] + line[place:][1:2] + line[place:][:1] + line[place:][2:],
            " " * draw.randrange(1, 4) + line,
            line.lstrip(" "),
            line + line,
            "",
        ]
    )
    return "".join(lines)


def test_any_slip_is_told_in_the_file_or_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(7)
    refused = 0
    for _ in range(250):
        text = altered(draw)
        Path("recipe.yaml").write_text(text, encoding="utf-8", newline="")
        document = run_cli("recipe", "check", "recipe.yaml", "--json")
        shown = run_cli("recipe", "check", "recipe.yaml")
        assert (document.code, document.err, shown.err) == (shown.code, "", "")
        problems = json.loads(document.out)["problems"]
        assert document.code == int(any(problem["severity"] == "error" for problem in problems))
        refused += document.code
        lines = text.split("\n")
        for problem in problems:
            assert 1 <= problem["line"] <= len(lines)
            length = len(lines[problem["line"] - 1])
            assert 1 <= problem["column"] <= length + 1
            assert problem["column"] < problem.get("end_column", length + 2) <= length + 2
        assert shown.out.replace("\n", "").isprintable()
        assert sum(": error: " in line for line in shown.out.splitlines()) >= len(
            [problem for problem in problems if problem["severity"] == "error"]
        )
    assert 100 < refused < 250
