"""Names as globs: those that are wanted, all of them, and no other."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_convert.tune.folding import by_role, fold, role

NAMES = [
    *(f"text/layers/{layer}/mlp/{part}" for layer in range(64) for part in ("up", "down")),
    *(f"m/{layer}/experts/{expert}/up" for layer in range(4) for expert in range(12)),
    *(f"deep/{layer}/up" for layer in range(3)),
    *(f"deep/{layer}/more/up" for layer in range(3)),
    *("a/[x]*", "b?", "c/<d>", "e.1.f", "e.2.f", "e/01/f", "e/1/f"),
]


@pytest.mark.parametrize(
    ("wanted", "globs"),
    [
        ([f"text/layers/{i}/mlp/down" for i in range(64)], ["text/layers/*/mlp/down"]),
        ([f"text/layers/{i}/mlp/down" for i in (62, 63)], ["text/layers/6[23]/mlp/down"]),
        ([f"text/layers/{i}/mlp/up" for i in range(8, 41)],
         ["text/layers/[89]/mlp/up", "text/layers/[1-3][0-9]/mlp/up", "text/layers/40/mlp/up"]),
        ([f"m/{i}/experts/{e}/up" for i in (1, 3) for e in range(12)], ["m/[13]/experts/*/up"]),
        ([f"m/{i}/experts/{e}/up" for i in range(4) for e in (0, 1, 2, 5)], ["m/*/experts/[0-25]/up"]),
        # A star crosses separators, so it would reach the objects further in.
        ([f"deep/{i}/up" for i in range(3)], ["deep/[0-2]/up"]),
        (["a/[x]*"], ["a/[[]x][*]"]),
        (["b?", "c/<d>"], ["b[?]", "c/[<]d>"]),
        (["e.1.f", "e.2.f"], ["e.*.f"]),
        (["e/01/f"], ["e/01/f"]),
    ],
)
def test_names_fold_to_globs(wanted: list[str], globs: list[str]) -> None:
    assert fold(wanted, NAMES) == globs


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_globs_match_what_is_wanted_and_nothing_else(chosen: set[str]) -> None:
    wanted = [name for name in NAMES if name in chosen]
    globs = fold(wanted, NAMES)
    assert [name for name in NAMES if any(fnmatch.fnmatchcase(name, glob) for glob in globs)] == wanted
    # No name is meant twice.
    assert sum(len(fnmatch.filter(NAMES, glob)) for glob in globs) == len(wanted)


def test_names_are_told_by_their_numbers() -> None:
    assert role([f"l/{i}/x" for i in (0, 1, 2, 7, 9, 10)]) == "l/{0..2,7,9,10}/x"
    assert role(["l/3/x"]) == "l/3/x"
    assert by_role(["l/1/x", "l/1/y", "l/2/x", "z"]) == [["l/1/x", "l/2/x"], ["l/1/y"], ["z"]]
