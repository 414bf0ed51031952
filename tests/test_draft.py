"""Drafts of recipes: every tensor has its place, loops say what the names say, and the text is what people read."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tools import f32, fp8, modelopt, nvfp4
from checkpoints import write_directory
from hollow import Shapes, write_hollow
from hypothesis import given
from hypothesis import strategies as st

from ninfer_convert.draft.choices import Placed, Unplaced, choose
from ninfer_convert.draft.draft import Draft, draft_recipe
from ninfer_convert.draft.folding import Leaf, Loop, Node, fold
from ninfer_convert.draft.prefixes import prefix_rules
from ninfer_convert.draft.text import comment, glob_parts, scalar
from ninfer_convert.errors import ConvertError, PlanError, SourceError
from ninfer_convert.formats import FORMATS
from ninfer_convert.plan.planner import Plan, PlannedResource, make_plan
from ninfer_convert.recipe.globs import Globs
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.source.checkpoint import open_checkpoint

Q5 = FORMATS["Q5G64_F16S"]


def drafted(*places: Path, matrix: str | None = "Q5G64_F16S") -> Draft:
    """Drafts a recipe for sources that are called base, quantized and third."""
    names = ("base", "quantized", "third")
    sources = {name: open_checkpoint(place) for name, place in zip(names, places, strict=False)}
    return draft_recipe(sources, {}, FORMATS[matrix] if matrix else None)


def body(text: str, section: str) -> str:
    """Returns the lines of one section of a recipe."""
    lines = text.split("\n")
    begin = lines.index(f"{section}:") + 1
    end = next((place for place in range(begin, len(lines)) if lines[place][:1] not in ("", " ")), len(lines))
    return "\n".join(lines[begin:end]).strip("\n")


def planned(draft: Draft, tmp_path: Path, *places: Path) -> Plan:
    """Plans the text of a draft, written to a file."""
    path = tmp_path / "drafted.yaml"
    path.write_text(draft.text, encoding="utf-8")
    recipe = load_recipe(path)
    return make_plan(recipe, {name: open_checkpoint(place) for name, place in zip(recipe.sources, places, strict=True)})


def require_every_tensor_once(plan: Plan) -> None:
    """Requires that each tensor of each source is either used or ignored."""
    for name, spec in plan.recipe.sources.items():
        for tensor in plan.sources[name].tensors:
            is_ignored = any(Globs().matching(glob, [tensor]) for glob, _ in spec.ignore)
            assert is_ignored != (tensor in plan.used[name]), tensor


# --- folding -------------------------------------------------------------------------------------------------------

PARTS = ("layers", "mlp", "experts", "0", "1", "2", "10", "01", "weight", "bias", "embed_tokens", "lm_head", "a")
PAIRS = st.dictionaries(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(tuple), st.sampled_from("xyz"), min_size=1, max_size=40
)


def unrolled(nodes: Sequence[Node], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for node in nodes:
        path = (*prefix, *node.path)
        if isinstance(node, Leaf):
            yield path, node.thing
        else:
            for member in node.members:
                for block in node.blocks:
                    if member in block.members:
                        yield from unrolled(block.nodes, (*path, str(member)))


@given(PAIRS, st.randoms(use_true_random=False))
def test_what_is_folded_unrolls_to_the_same_names_whatever_their_order(
    pairs: dict[tuple[str, ...], str], shuffler: random.Random
) -> None:
    nodes = fold(pairs.items())
    found = list(unrolled(nodes))
    assert len(found) == len(pairs)
    assert dict(found) == pairs
    shuffled = list(pairs.items())
    shuffler.shuffle(shuffled)
    assert fold(shuffled) == nodes


def test_loops_fold_within_loops() -> None:
    pairs = {("l", str(i), "e", str(e), w): "m" for i in range(3) for e in range(4) for w in ("up", "down")}
    (loop,) = fold(pairs.items())
    assert isinstance(loop, Loop)
    assert (loop.path, loop.members) == (("l",), (0, 1, 2))
    (block,) = loop.blocks
    (inner,) = block.nodes
    assert isinstance(inner, Loop)
    assert (inner.path, inner.members) == (("e",), (0, 1, 2, 3))
    assert [node.path for node in inner.blocks[0].nodes] == [("down",), ("up",)]


def test_members_with_nothing_in_common_are_no_loop() -> None:
    pairs = {("net", "0", "weight"): "a", ("net", "2", "weight"): "b", ("net", "2", "bias"): "c"}
    assert all(isinstance(node, Leaf) for node in fold(pairs.items()))


def test_stacks_within_stacks_that_are_no_loops_are_looked_at_once() -> None:
    pairs = {(*["0"] * depth, "1"): "x" for depth in range(23)}
    nodes = fold(pairs.items())
    assert all(isinstance(node, Leaf) for node in nodes)
    assert dict(unrolled(nodes)) == pairs


def test_integers_that_a_loop_cannot_write_are_names() -> None:
    nodes = fold({("l", number): "x" for number in ("00", "01", "1234567890", "²")}.items())
    assert [node.path[1] for node in nodes] == ["00", "01", "1234567890", "²"]
    assert all(isinstance(node, Leaf) for node in nodes)


# --- what becomes of one tensor ------------------------------------------------------------------------------------

CHOICES = {
    # name: dtype, shape, format, shape of the object, what the comment says
    "l.0.mlp.up_proj.weight": ("BF16", (256, 128), "Q5G64_F16S", (256, 128), ""),
    "l.0.mlp.half.weight": ("F16", (256, 128), "Q5G64_F16S", (256, 128), ""),
    "l.0.odd.weight": ("F32", (1152, 4304), "Q5G64_F16S", (1152, 4304), ""),
    "l.0.mlp.experts.up": ("BF16", (4, 128, 256), "Q5G64_F16S", (512, 256), "4 matrices of 128 rows"),
    "l.0.norm.weight": ("BF16", (128,), "BF16", (128,), ""),
    "l.0.A_log": ("F32", (48,), "FP32", (48,), ""),
    "l.0.half_bias": ("F16", (48,), "FP32", (48,), ""),
    "l.0.in_proj_a.weight": ("BF16", (48, 5120), "BF16", (48, 5120), "not encoded: small"),
    "l.0.k.weight": ("BF16", (5120, 32), "BF16", (5120, 32), "not encoded: small"),
    "l.0.q_norm.weight": ("BF16", (128, 128), "BF16", (128, 128), "not encoded: a norm"),
    "l.0.mlp.gate.weight": ("BF16", (128, 256), "BF16", (128, 256), "a router"),
    "l.0.gated.gate.weight": ("BF16", (1024, 256), "Q5G64_F16S", (1024, 256), ""),
    "e.position_embeddings.weight": ("F32", (512, 384), "FP32", (512, 384), "positions"),
    "e.token_type_embeddings.weight": ("F32", (128, 384), "FP32", (128, 384), "types of tokens"),
    "conv1d.weight": ("BF16", (10240, 1, 4), "BF16", (10240, 1, 4), "no matrix"),
    "patch.weight": ("BF16", (1152, 3, 2, 16, 16), "BF16", (1152, 3, 2, 16, 16), "no matrix"),
    "ids": ("I64", (1, 512), "I32", (1, 512), ""),
    "scalar": ("F32", (), "FP32", (), ""),
}
REFUSED = {
    "mask": ("BOOL", (4,), "no format holds values of dtype BOOL"),
    "double": ("F64", (4,), "no format holds values of dtype F64"),
    "eighth": ("F8_E5M2", (64, 64), "no format holds values of dtype F8_E5M2"),
    "marker": ("F32", (0, 4), "without elements"),
    "deep": ("F32", (1,) * 17, "of rank 17"),
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Placed | Unplaced]:
    tensors: Shapes = {name: row[:2] for name, row in {**CHOICES, **REFUSED}.items()}
    place = write_hollow(tmp_path_factory.mktemp("choices"), tensors)
    return {found.name: found for found in choose(open_checkpoint(place), "base", Q5)}


@pytest.mark.parametrize("name", CHOICES)
def test_a_tensor_becomes_an_object(chosen: dict[str, Placed | Unplaced], name: str) -> None:
    found = chosen[name]
    assert isinstance(found, Placed)
    assert (found.made.numeric.name, found.made.shape) == CHOICES[name][2:4]
    assert CHOICES[name][4] in found.made.comment
    assert bool(CHOICES[name][4]) == bool(found.made.comment)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_no_format_holds_becomes_nothing_and_the_reason_is_told(
    chosen: dict[str, Placed | Unplaced], name: str
) -> None:
    found = chosen[name]
    assert isinstance(found, Unplaced)
    assert REFUSED[name][2] in found.reason


def test_a_matrix_that_a_format_does_not_make_smaller_stays(tmp_path: Path) -> None:
    # 64 columns take the room of 128, in 8 bits and scales.
    place = write_hollow(tmp_path, {"w": ("BF16", (128, 64))})
    ((wide, narrow),) = [
        [next(choose(open_checkpoint(place), "base", FORMATS[name])) for name in ("W8G32_F16S", "Q4G64_F16S")]
    ]
    assert isinstance(wide, Placed)
    assert isinstance(narrow, Placed)
    assert (wide.made.numeric.name, wide.made.comment) == ("BF16", "not encoded: W8G32_F16S would not be smaller")
    assert narrow.made.numeric.name == "Q4G64_F16S"


# --- whole texts ---------------------------------------------------------------------------------------------------

LLAMA: Shapes = {
    "lm_head.weight": ("BF16", (512, 128)),
    "model.embed_tokens.weight": ("BF16", (512, 128)),
    "model.norm.weight": ("BF16", (128,)),
    **{
        f"model.layers.{layer}.{name}": ("BF16", shape)
        for layer in range(12)
        for name, shape in (
            ("input_layernorm.weight", (128,)),
            ("mlp.down_proj.weight", (128, 256)),
            *((("self_attn.q_proj.weight", (128, 128)),) if layer % 4 == 3 else (("conv.weight", (64, 1, 4)),)),
        )
    },
    **{f"model.layers.{layer}.self_attn.mask": ("BOOL", (1,)) for layer in (3, 7)},
}
LLAMA_CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "rope_theta": 1e6}
LLAMA_DRAFT = """\
# A draft for tiny-llama, made from the headers of its checkpoint. Nothing in it has been measured: look at it before
# you use it.
# 39 tensors, in stored order.
schema: 1
id: tiny-llama-draft
# What an engine will know the artifact by.
artifact: {model_id: tiny-llama, weights_id: draft}
# Nobody has measured what Q5G64_F16S costs this model; say here why it is good enough once you know.
evidence: none

sources:
  base:
    # A plain directory: add repo and revision, so that others find the same weights.
    dtype: BF16
    config:
      architectures: [LlamaForCausalLM]
      model_type: llama
      vocab_size: 512

sets:
  layers: {from: 0, through: 11}
  layers_conv: {all: layers, except: layers_self_attn}
  layers_self_attn: {from: 3, through: 11, step: 4}
  layers_self_attn_mask: [3, 7]

objects:
  - resource: frontend/config.json
    file: config.json
    sha256: CONFIG_SHA256
  - resource: frontend/tokenizer.json
    file: tokenizer.json
    sha256: 44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a

  - {name: embed_tokens, shape: [512, 128], format: Q5G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,
     value: model.embed_tokens.weight}
  - for: {l: layers}
    objects:
      - when: {l: layers_conv}
        objects:
          # Not encoded: no matrix.
          - {name: layers/<l>/conv, shape: [64, 1, 4], format: BF16, value: model.layers.<l>.conv.weight}
      - {name: layers/<l>/input_layernorm, shape: [128], format: BF16, value: model.layers.<l>.input_layernorm.weight}
      - {name: layers/<l>/mlp/down_proj, shape: [128, 256], format: Q5G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,
         value: model.layers.<l>.mlp.down_proj.weight}
      - when: {l: layers_self_attn}
        objects:
          - {name: layers/<l>/self_attn/q_proj, shape: [128, 128],
             format: Q5G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1, value: model.layers.<l>.self_attn.q_proj.weight}
  - {name: norm, shape: [128], format: BF16, value: model.norm.weight}
  - {name: lm_head, shape: [512, 128], format: Q5G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1, value: lm_head.weight}

ignore:
  # No format holds values of dtype BOOL.
  - for: {l: layers_self_attn_mask}
    names:
      - model.layers.<l>.self_attn.mask
"""


def test_a_draft_reads_as_a_person_would_write_it(tmp_path: Path) -> None:
    place = write_hollow(
        tmp_path / "Tiny Llama", LLAMA, config=LLAMA_CONFIG, files={"tokenizer.json": b"{}", "README.md": b"no"}
    )
    digest = hashlib.sha256((place / "config.json").read_bytes()).hexdigest()
    assert drafted(place).text == LLAMA_DRAFT.replace("CONFIG_SHA256", digest)


def test_the_order_of_tensors_and_shards_does_not_show(tmp_path: Path) -> None:
    names = list(LLAMA)
    texts = set()
    for number, step in enumerate((1, 5, 7, 11)):
        order = [names[(place * step) % len(names)] for place in range(len(names))]
        shards = {"model-1.safetensors": order[:13], "model-2.safetensors": order[13:]}
        place = write_hollow(tmp_path / str(number) / "model", LLAMA, config=LLAMA_CONFIG, shards=shards)
        texts.add(drafted(place).text)
    assert len(texts) == 1


DTYPES = ("BF16", "F16", "F32", "I64", "I32", "U8", "BOOL", "F64")
SHAPES: tuple[Sequence[int], ...] = ((), (1,), (8,), (64, 64), (128, 192), (2, 64, 128), (4, 1, 4), (0, 3))
ODD_PARTS = (*PARTS, "model", "a b", "x/y", "true", "$q", "base:a", "é", "a*[b]?", "q: {", "#", "norm", "-", "", "k,v")
TENSORS = st.dictionaries(
    st.lists(st.sampled_from(ODD_PARTS), min_size=1, max_size=4).map(".".join).filter(bool),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
    min_size=1,
    max_size=25,
)


@given(TENSORS)
def test_every_tensor_is_placed_or_ignored_whatever_its_name(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("any")
    place = write_hollow(directory / "model", tensors)
    held = {name for name, (dtype, shape) in tensors.items() if dtype not in ("BOOL", "F64") and 0 not in shape}
    if not held:
        with pytest.raises(PlanError, match="^no tensor can be placed: "):
            drafted(place)
        return
    draft = drafted(place)
    plan = planned(draft, directory, place)
    require_every_tensor_once(plan)
    assert plan.used["base"] == held
    assert draft.objects == len(plan.objects) == len(held)


@pytest.mark.parametrize("length", [2, 20, 400])
def test_names_of_many_parts_are_no_trouble(tmp_path: Path, length: int) -> None:
    names = [f"{'.'.join([first] * length)}.{last}" for first in "01" for last in "01"]
    place = write_hollow(tmp_path / "model", dict.fromkeys(names, ("F32", (2,))))
    plan = planned(drafted(place), tmp_path, place)
    assert plan.used["base"] == set(names)


def test_long_members_of_a_config_are_not_pinned(tmp_path: Path) -> None:
    config = {"model_type": "t" * 1025, "architectures": ["a" * 1024]}
    place = write_hollow(tmp_path / "model", {"w": ("F32", (2,))}, config=config)
    draft = drafted(place)
    assert "model_type" not in draft.text
    assert f"      architectures: [{'a' * 1024}]\n" in draft.text
    planned(draft, tmp_path, place)


def test_a_stack_with_a_wide_gap_is_listed(tmp_path: Path) -> None:
    names = [f"l.{index}.w" for index in (0, 1, 2, 999999999)]
    place = write_hollow(tmp_path / "model", dict.fromkeys(names, ("F32", (2,))))
    draft = drafted(place)
    assert "  l: [0, 1, 2, 999999999]\n" in draft.text
    assert planned(draft, tmp_path, place).used["base"] == set(names)


ODD_WORDS = ("no", "Yes", "on", "y", "n", "null", "true", "0", "00", "_", "_0", "a_0", "a_no", "é")


@pytest.mark.parametrize("word", ODD_WORDS)
def test_stacks_and_variables_are_words_that_a_recipe_can_say(tmp_path: Path, word: str) -> None:
    names = [f"{word}.{index}.{inner}.{deep}.w" for index in range(3) for inner in "ab" for deep in range(3)]
    place = write_hollow(tmp_path / "model", dict.fromkeys(names, ("F32", (2,))))
    draft = drafted(place)
    assert draft.text.count("for:") == 3
    assert planned(draft, tmp_path, place).used["base"] == set(names)


def test_a_name_that_is_too_long_to_be_written_is_ignored_by_its_beginning(tmp_path: Path) -> None:
    names = ["x" * 5000, "y[" * 2000, ".".join("z" * 3000), "plain"]
    place = write_hollow(tmp_path / "model", dict.fromkeys(names, ("F32", (2,))))
    plan = planned(drafted(place), tmp_path, place)
    require_every_tensor_once(plan)
    assert plan.used["base"] == {"plain"}


# --- names of objects ----------------------------------------------------------------------------------------------


def object_names(tmp_path: Path, *names: str) -> dict[str, str]:
    """Returns what the objects of some tensors are called, by tensor."""
    place = write_hollow(tmp_path / "model", dict.fromkeys(names, ("F32", (2,))))
    plan = planned(drafted(place), tmp_path, place)
    return {next(iter(item.leaves())).info.name: item.name for item in plan.objects}  # type: ignore[union-attr]


def test_names_are_short_where_that_is_unmistakable(tmp_path: Path) -> None:
    names = {
        "model.language_model.layers.3.mlp.down_proj.weight": "layers/3/mlp/down_proj",
        "model.layers.3.mlp.fc.bias": "layers/3/mlp/fc_bias",
        "lm_head.weight": "lm_head",
        "weight": "weight",
        "model.visual.A_log": "visual/A_log",
    }
    assert object_names(tmp_path, *names) == names


def test_names_that_would_be_equal_are_longer_and_others_stay(tmp_path: Path) -> None:
    names = {
        "model.norm.weight": "model/norm",
        "norm.weight": "norm",
        "fc.bias": "fc/bias",
        "fc_bias": "fc_bias",
        "m.weight": "m/weight",
        "m": "m",
        "x/y": "base:x/y",
        "x.y": "base:x.y",
        "alone.weight": "alone",
    }
    assert object_names(tmp_path, *names) == names


def test_a_stack_of_layers_is_longer_as_a_whole(tmp_path: Path) -> None:
    found = object_names(tmp_path, *(f"{head}layers.{layer}.a.weight" for head in ("model.", "") for layer in range(3)))
    assert set(found.values()) == {f"{head}layers/{layer}/a" for head in ("model/", "") for layer in range(3)}


# --- quantized checkpoints -----------------------------------------------------------------------------------------


def test_modules_are_copied_word_for_word_with_their_divisors(tmp_path: Path) -> None:
    tensors = {
        **{name: tensor for layer in range(4) for name, tensor in nvfp4(f"l.{layer}.up").items()},
        **{name: tensor for layer in range(4, 6) for name, tensor in fp8(f"l.{layer}.up").items()},
        **modelopt("head"),
        "l.0.up.bias": f32(1.0),
    }
    draft = drafted(place := write_directory(tmp_path / "m", {"model.safetensors": tensors}))
    assert body(draft.text, "sets") == (
        "  l: {from: 0, through: 5}\n"
        "  l_up_nvfp4: {from: 0, through: 3}\n"
        "  l_up_fp8: [4, 5]\n"
        "  l_up_bias: [0]"
    )
    assert body(draft.text, "objects") == (
        "  - for: {l: l}\n"
        "    objects:\n"
        "      - when: {l: l_up_nvfp4}\n"
        "        objects:\n"
        "          - {name: l/<l>/up, shape: [128, 64], format: NVFP4, words: l.<l>.up}\n"
        "          - {name: l/<l>/up/input_scale_divisor, shape: [], format: FP32,\n"
        "             value: {reshape: {to: [], of: l.<l>.up.input_global_scale}}, require: [finite, positive]}\n"
        "      - when: {l: l_up_fp8}\n"
        "        objects:\n"
        "          - {name: l/<l>/up, shape: [4, 8], format: FP8_E4M3FN_ROW_BF16S, words: l.<l>.up}\n"
        "      - when: {l: l_up_bias}\n"
        "        objects:\n"
        "          - {name: l/<l>/up_bias, shape: [1], format: FP32, value: l.<l>.up.bias}\n"
        "  - {name: head, shape: [128, 64], format: NVFP4, words: {modelopt: head}}\n"
        "  - {name: head/input_scale_divisor, shape: [], format: FP32, value: {reciprocal: head.input_scale},\n"
        "     require: [finite, positive]}"
    )
    require_every_tensor_once(planned(draft, tmp_path, place))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("F32", ())}, "FP8 with a scale F32 []"),
        ({"weight": ("F8_E4M3", (64, 64)), "weight_scale_inv": ("F32", (1, 1))}, "FP8 with a scale for each block"),
        ({"weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 1))}, "4: .weight_global_scale is missing"),
        ({"weight": ("I8", (64, 64)), "weight_scale": ("BF16", (64, 1))}, "in a form that no format stores"),
        ({"weight": ("BF16", (64, 64)), "weight_packed": ("U8", (64, 32))}, "has both .weight_packed and .weight, and"),
        ({"weight_packed": ("U8", (64, 32)), "weight_scale_2": ("F32", ())}, "both .weight_packed and .weight_scale_2"),
        ({"weight": ("F8_E4M3", (64, 64)), "weight_global_scale": ("F32", (1,))}, "FP8 codes beside the scales"),
        (
            {
                "weight_packed": ("U8", (64, 32)),
                "weight_scale": ("F8_E4M3", (64, 4)),
                "weight_global_scale": ("F32", (1,)),
            },
            "N = 64 is not a multiple of 128",
        ),
        (
            {
                "weight_packed": ("U8", (128, 32)),
                "weight_scale": ("F8_E4M3", (128, 2)),
                "weight_global_scale": ("F32", (1,)),
            },
            "Not NVFP4: .weight_scale is F8_E4M3 [128, 2]",
        ),
        (
            {
                "weight_packed": ("U8", (128, 32)),
                "weight_scale": ("F8_E4M3", (128, 4)),
                "weight_global_scale": ("F32", (2,)),
            },
            "Not NVFP4: .weight_global_scale is F32 [2]",
        ),
    ],
)
def test_modules_of_other_forms_are_ignored_whole_and_the_reason_is_told(
    tmp_path: Path, fields: dict[str, tuple[str, Sequence[int]]], reason: str
) -> None:
    tensors = {f"m.{field}": entry for field, entry in fields.items()}
    place = write_hollow(tmp_path / "m", {**tensors, "norm.weight": ("F32", (4,))})
    draft = drafted(place)
    ignored = body(draft.text, "ignore")
    assert reason in ignored
    assert [line for line in ignored.splitlines() if "#" not in line] == [f"  - m.{field}" for field in sorted(
        fields, key=lambda field: (field != "weight", field)
    )]
    assert draft.notes == (f"{len(fields)} tensors in no object; see `ignore` in the draft for the reasons",)
    require_every_tensor_once(planned(draft, tmp_path, place))


FORMS: dict[str, list[tuple[str, Sequence[int]]]] = {
    "weight": [("BF16", (128, 64)), ("F8_E4M3", (128, 64)), ("U8", (128, 32)), ("I8", (128, 64)), ("F8_E4M3", (128,))],
    "weight_packed": [("U8", (128, 32)), ("I32", (128, 8)), ("U8", (64, 32))],
    "weight_scale": [("F8_E4M3", (128, 4)), ("BF16", (128, 1)), ("BF16", (128,)), ("F32", ()), ("BF16", (1,))],
    "weight_global_scale": [("F32", (1,)), ("F32", ()), ("BF16", (1,))],
    "weight_scale_2": [("F32", ()), ("F32", (1,))],
    "weight_scale_inv": [("F32", (1, 1))],
    "input_scale": [("F32", ()), ("F32", (1,)), ("BF16", (2,))],
    "input_global_scale": [("F32", (1,)), ("F32", ()), ("BF16", (1,)), ("F32", (2,))],
    "bias": [("BF16", (128,))],
    "weight_shape": [("I32", (2,))],
}
ONES = {"BF16": ("<u2", 0x3F80), "F32": ("<u4", 0x3F800000), "F8_E4M3": ("u1", 0x38), "I32": ("<i4", 1)}
FIELDS = st.dictionaries(st.sampled_from(["a", "l.0.b", "l.1.b"]).flatmap(
    lambda module: st.sampled_from(list(FORMS)).map(lambda field: (module, field))
), st.integers(0, 4), max_size=16)  # fmt: skip


def ones(dtype: str, shape: Sequence[int]) -> tuple[str, Any]:
    kind, word = ONES.get(dtype, ("u1", 1))
    return dtype, np.full(shape, word, kind)


@given(st.lists(FIELDS, min_size=1, max_size=2))
def test_every_tensor_has_its_place_whatever_forms_its_modules_have(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: list[dict[tuple[str, str], int]]
) -> None:
    directory = tmp_path_factory.mktemp("forms")
    places = []
    for number, fields in enumerate(checkpoints):
        tensors = {
            f"{module}.{field}": ones(*FORMS[field][choice % len(FORMS[field])])
            for (module, field), choice in fields.items()
        }
        shards = {"model.safetensors": {**tensors, "norm.weight": ones("F32", (4,))}}
        places.append(write_directory(directory / str(number), shards))
    require_every_tensor_once(planned(drafted(*places), directory, *places))


def test_of_two_sources_words_come_first_then_what_stands_first(tmp_path: Path) -> None:
    matrix, vector = ("BF16", np.zeros((128, 64), "<u2")), ("BF16", np.zeros(64, "<u2"))
    base = {"a.weight": matrix, "b.weight": matrix, "norm.weight": vector}
    quantized = {**nvfp4("a"), "b.weight": matrix, "norm.weight": vector, "extra.weight": vector}
    places = [
        write_directory(tmp_path / name, {"model.safetensors": tensors}, files={"tokenizer.json": name.encode()})
        for name, tensors in (("base", base), ("quantized", quantized))
    ]
    draft = drafted(*places, matrix="Q4G64_F16S")
    assert "words: quantized:a}" in draft.text
    assert "value: {reshape: {to: [], of: quantized:a.input_global_scale}}" in draft.text
    assert "value: b.weight}" in draft.text
    assert "value: quantized:extra.weight}" in draft.text
    assert body(draft.text, "ignore") == (
        "  base:\n    # The words come from source quantized.\n    - a.weight\n"
        "  quantized:\n    # Taken from source base.\n    - b.weight\n    - norm.weight"
    )
    assert draft.notes == ()
    plan = planned(draft, tmp_path, *places)
    require_every_tensor_once(plan)
    assert [item.content for item in plan.objects if isinstance(item, PlannedResource)] == [b"base"]


# --- output heads that may be tied ---------------------------------------------------------------------------------

TIED = {"architectures": ["TinyForCausalLM"], "tie_word_embeddings": True}
EMBEDDING: Shapes = {"model.embed_tokens.weight": ("BF16", (256, 128))}
HEAD: Shapes = {"lm_head.weight": ("BF16", (256, 128))}


@pytest.mark.parametrize("head", [{}, HEAD])
def test_a_tied_head_is_stated(tmp_path: Path, head: Shapes) -> None:
    place = write_hollow(tmp_path / "m", {**EMBEDDING, **head}, config=TIED)
    draft = drafted(place)
    assert body(draft.text, "objects").split("\n")[-3:] == [
        "  # Tied to the embedding, as config.json says; drop it if the engine reads the embedding instead.",
        "  - {name: lm_head, shape: [256, 128], format: Q5G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,",
        "     value: {tied: {head: lm_head.weight, embedding: model.embed_tokens.weight}}}",
    ]
    require_every_tensor_once(planned(draft, tmp_path, place))


@pytest.mark.parametrize(
    ("config", "tensors", "note"),
    [
        ({**TIED, "text_config": {"tie_word_embeddings": False}}, HEAD, "# config.json contradicts itself about tie_"),
        (TIED, {"lm_head.weight": ("BF16", (128, 128))}, "# config.json says that the output head is tied to the emb"),
        (TIED, {"shared.weight": ("BF16", (128, 128))}, "# config.json says that the output head is tied to the emb"),
        ({"architectures": ["TinyForCausalLM"]}, {}, "# No lm_head.weight is here, and config.json does not say that"),
        ({**TIED, "architectures": ["BertModel"]}, {}, None),
        ({**TIED, "tie_word_embeddings": False}, HEAD, None),
    ],
)
def test_what_cannot_be_tied_is_stored_as_it_is(
    tmp_path: Path, config: dict[str, Any], tensors: Shapes, note: str | None
) -> None:
    place = write_hollow(tmp_path / "m", {**EMBEDDING, **tensors}, config=config)
    draft = drafted(place)
    assert "{tied:" not in draft.text
    notes = [line for line in draft.text.split("\n") if line.startswith("# ") and "config.json" in line]
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)
    require_every_tensor_once(planned(draft, tmp_path, place))


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"m.qweight": ("I32", (8, 8)), "m.scales": ("F16", (1, 8))}, "source base: .*weights are GPTQ or AWQ"),
        ({"m.lora_A.weight": ("F32", (8, 8)), "m.weight": ("F32", (8, 8))}, "source base: .*LoRA adapter"),
        ({"mask": ("BOOL", (4,))}, "no tensor can be placed: no format holds values of dtype BOOL"),
        ({}, "no tensor can be placed: there is none"),
    ],
)
def test_a_checkpoint_that_no_recipe_can_read_gets_no_draft(tmp_path: Path, tensors: Shapes, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        drafted(write_hollow(tmp_path, tensors))


def test_a_checkpoint_with_an_absent_shard_gets_no_draft(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": ["a"], "model-2.safetensors": ["b"]}
    write_hollow(tmp_path, dict.fromkeys("ab", ("F32", (4,))), shards=shards)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(SourceError, match=r"source base: model-2.safetensors is absent .* needs the header of every"):
        drafted(tmp_path)


def test_what_the_plan_refuses_is_not_handed_out(tmp_path: Path) -> None:
    tensors = {**nvfp4("m"), "m.input_global_scale": f32(0.0)}
    place = write_directory(tmp_path, {"model.safetensors": tensors})
    with pytest.raises(PlanError, match=r"^draft.yaml:\d+:\d+: .*m.input_global_scale is 0.0 .* finite and positive"):
        drafted(place)


# --- small parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("layers/<l>/a.weight", "layers/<l>/a.weight"),
        ("yes", '"yes"'),
        ("1e5", '"1e5"'),
        ("a b", '"a b"'),
        ("a\\b", '"a\\\\b"'),
        ("5f" * 20, "5f" * 20),
        ("12" * 20, f'"{"12" * 20}"'),
        ("1e" + "2" * 38, f'"1e{"2" * 38}"'),
        (True, "true"),
        (None, "null"),
        ([1, "a", False], "[1, a, false]"),
    ],
)
def test_scalars_are_read_as_what_they_are(value: Any, text: str) -> None:
    assert scalar(value) == text


def test_comments_are_wrapped_and_keep_every_word() -> None:
    words = [f"word{number}" for number in range(60)]
    lines = comment(" ".join(words), 4)
    assert all(line.startswith("    # ") and len(line) <= 120 for line in lines)
    assert " ".join(line.removeprefix("    # ") for line in lines).split() == words
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["a*b", "[x]", "a?b.c", "we<ird>", "bell\a", "plain.0"])
def test_a_glob_matches_the_name_it_is_made_of(name: str) -> None:
    glob = ".".join(glob_parts(name))
    assert fnmatchcase(name, glob)
    assert not fnmatchcase(name + "x", glob)
    assert glob.isprintable()


@pytest.mark.parametrize(
    ("wanted", "stored", "rules"),
    [
        (["model.language_model.layers.0.a"], ["model.layers.0.a", "model.visual.b"],
         {"model.layers.": "model.language_model.layers."}),
        (["model.language_model.layers.0.a"], ["model.layers.0.a"], {"model.": "model.language_model."}),
        (["model.a.b", "model.c.d", "lm_head.w"], ["a.b", "c.d", "lm_head.w"], {"a.": "model.a.", "c.": "model.c."}),
        (["model.a.b"], ["model.a.b"], {}),
        (["model.a.b"], ["module.a.b", "language_model.a.b"], {}),
        ([f"model.{letter}.x" for letter in "abcdefghi"], [f"{letter}.x" for letter in "abcdefghi"], {}),
    ],
)  # fmt: skip
def test_prefix_rules_lead_from_the_names_of_a_file_to_those_of_a_recipe(
    wanted: Sequence[str], stored: Sequence[str], rules: Mapping[str, str]
) -> None:
    assert prefix_rules(wanted, stored) == rules
