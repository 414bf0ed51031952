"""Prefix rules and nearest names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_convert.errors import SourceError
from ninfer_convert.source.names import nearest, rename

WANTED = "model.language_model.layers.0.mlp.down_proj.weight"


def names(stored: list[str], prefixes: dict[str, str]) -> list[str]:
    return list(rename(stored, prefixes, "m").names.values())


def refused(stored: list[str], prefixes: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        rename(stored, prefixes, "m")
    return tuple(caught.value.messages)


@pytest.mark.parametrize(
    ("stored", "prefixes"),
    [
        ("model.layers.0.mlp.down_proj.weight", {"model.": "model.language_model."}),
        ("model.layers.0.mlp.down_proj.weight", {"model.layers.": "model.language_model.layers."}),
        ("language_model.model.layers.0.mlp.down_proj.weight", {"language_model.model.": "model.language_model."}),
        (
            "model.language_model.language_model.language_model.layers.0.mlp.down_proj.weight",
            {"model.language_model.language_model.language_model.": "model.language_model."},
        ),
        (f"_orig_mod.{WANTED}", {"_orig_mod.": ""}),
        ("layers.0.mlp.down_proj.weight", {"": "model.language_model."}),
        (WANTED, {"model.": "model.language_model."}),
        (WANTED, {}),
    ],
)
def test_names_found_in_the_wild_reach_the_recipe(stored: str, prefixes: dict[str, str]) -> None:
    assert names([stored], prefixes) == [WANTED]


def test_the_longest_rule_is_taken_once() -> None:
    rules = {"a.": "b.", "a.x.": "c.", "b.": "d."}
    assert names(["a.1", "a.x.2", "b.3", "e.4"], rules) == ["b.1", "c.2", "d.3", "e.4"]
    assert rename(["a.1", "a.x.2", "b.3", "e.4"], rules, "m").applied == rules


def test_a_rule_without_effect_is_not_recorded() -> None:
    renaming = rename([WANTED], {"model.": "model.language_model."}, "m")
    assert renaming.applied == {}


def test_a_name_that_only_begins_with_the_result_is_changed_when_the_rule_does_not_nest() -> None:
    assert names(["x.y.1"], {"x.y.": "x."}) == ["x.1"]


def test_two_names_that_become_equal_are_ambiguous() -> None:
    (message,) = refused([WANTED, "model.layers.0.mlp.down_proj.weight"], {"model.": "model.language_model."})
    assert message == (
        f"m: tensors {WANTED} and model.layers.0.mlp.down_proj.weight are ambiguous:"
        f" by the prefix rules both are {WANTED}"
    )


def test_stripping_demands_the_prefix_of_every_name() -> None:
    assert names(["module.a", "module.b"], {"module.": ""}) == ["a", "b"]
    (message,) = refused(["module.a", "b"], {"module.": ""})
    assert message == "m: prefix rule module.= strips a prefix that every name must carry: module.a does, b does not"


def test_a_rule_that_matches_nothing_names_what_exists() -> None:
    (message,) = refused(["a.1", "a.2", "a.3", "a.4"], {"b.": "c."})
    assert message == "m: prefix rule b.=c.: no tensor name begins with b.; names that exist: a.1, a.2, a.3"
    assert refused([], {"b.": "c."})[0].endswith("names that exist: none")


def test_all_problems_are_reported_at_once() -> None:
    assert len(refused(["a.1", "b.1"], {"a.": "b.", "c.": "d.", "e.": "f."})) == 3


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(st.text("ab.", max_size=5), unique=True, max_size=6),
    st.dictionaries(st.text("ab.", max_size=3), st.text("ab.", max_size=3), max_size=3),
)
def test_renaming_is_one_to_one_or_refused(stored: list[str], prefixes: dict[str, str]) -> None:
    try:
        renaming = rename(stored, prefixes, "m")
    except SourceError:
        return
    assert list(renaming.names) == stored
    assert len(set(renaming.names.values())) == len(stored)


def test_nearest_prefers_names_that_end_alike() -> None:
    tripled = "model.language_model.language_model.language_model.layers.0.mlp.down_proj.weight"
    others = [WANTED.replace("0.mlp", f"{layer}.mlp") for layer in range(1, 20)]
    assert nearest(WANTED, [*others, tripled, "lm_head.weight"])[0] == tripled


def test_nearest_finds_misspelled_names() -> None:
    existing = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(20) for part in ("up", "down")]
    assert nearest("model.layers.7.mlp.donw_proj.weight", existing)[0] == "model.layers.7.mlp.down_proj.weight"
    assert nearest("lm_haed.weight", [*existing, "lm_head.weight"])[0] == "lm_head.weight"


def test_nearest_gives_at_most_three_and_nothing_for_nonsense() -> None:
    assert len(nearest("a.b.weight", [f"{x}.a.b.weight" for x in "vwxyz"])) == 3
    assert nearest("zzzz", ["model.norm.weight"]) == ()
    assert nearest("zzzz", []) == ()
