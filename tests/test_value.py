"""Bound values: every range of every tree of moves equals the same tree in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer_convert.errors import PlanError, SourceError
from ninfer_convert.plan import arrangement
from ninfer_convert.plan import value as value_module
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.transform import Binder
from ninfer_convert.plan.value import elements, load, source_tensors
from ninfer_convert.recipe.expression import (
    BlockRows,
    Cast,
    Concat,
    Expression,
    Gather,
    Mark,
    Reshape,
    Same,
    Slice,
    Tensor,
    Transpose,
)
from ninfer_convert.source.checkpoint import Checkpoint, open_checkpoint

MARK = Mark("test.yaml", 1, 1)
RNG = np.random.default_rng(7)
ARRAYS = {
    "a": RNG.integers(0, 2**16, (12, 10), np.uint16),
    "b": RNG.integers(0, 2**16, (6, 10), np.uint16),
    "bank": RNG.integers(0, 2**16, (3, 4, 10), np.uint16),
    "conv": RNG.integers(0, 2**16, (12, 1, 4), np.uint16),
    "wide": RNG.integers(0, 2**16, (5, 700), np.uint16),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("value") / "model.safetensors"
    tensors = {name: ("BF16", words) for name, words in ARRAYS.items()}
    tensors["ids"] = ("I64", np.array([3, 0, 1, 2, 11, 3]))
    tensors["copy"] = ("BF16", ARRAYS["a"])
    changed = ARRAYS["a"].copy()
    changed[7, 4] ^= 1
    tensors["changed"] = ("BF16", changed)
    write_safetensors(path, tensors)
    with open_checkpoint(path) as opened:
        yield opened


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranges must come out right however the scratch cuts them.
    for module in (value_module, arrangement):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    monkeypatch.setattr(arrangement, "TRANSPOSE_BYTES", 48)


def tensor(name: str) -> Tensor:
    return Tensor("source", name, MARK)


def binder(checkpoint: Checkpoint) -> Binder:
    return Binder({"source": checkpoint}, {})


def trees() -> st.SearchStrategy[tuple[Expression, np.ndarray]]:
    """Expressions with the array numpy says they are."""

    def grow(
        inner: st.SearchStrategy[tuple[Expression, np.ndarray]],
    ) -> st.SearchStrategy[tuple[Expression, np.ndarray]]:
        return inner.flatmap(one_move)

    leaves = st.sampled_from(sorted(ARRAYS)).map(lambda name: (tensor(name), ARRAYS[name]))
    return st.recursive(leaves, grow, max_leaves=4)


def one_move(made: tuple[Expression, np.ndarray]) -> st.SearchStrategy[tuple[Expression, np.ndarray]]:
    node, array = made
    options: list[st.SearchStrategy[tuple[Expression, np.ndarray]]] = [st.just(made)]
    axis = st.integers(0, array.ndim - 1)

    @st.composite
    def sliced(draw: st.DrawFn) -> tuple[Expression, np.ndarray]:
        chosen = draw(axis)
        begin = draw(st.integers(0, array.shape[chosen] - 1))
        end = draw(st.integers(begin + 1, array.shape[chosen]))
        return Slice(node, chosen, begin, end, MARK), array.take(range(begin, end), axis=chosen)

    @st.composite
    def joined(draw: st.DrawFn) -> tuple[Expression, np.ndarray]:
        chosen, count = draw(axis), draw(st.integers(1, 3))
        return Concat((node,) * count, chosen, MARK), np.concatenate([array] * count, axis=chosen)

    @st.composite
    def turned(draw: st.DrawFn) -> tuple[Expression, np.ndarray]:
        axes = tuple(draw(st.permutations(range(array.ndim))))
        return Transpose(node, axes, MARK), array.transpose(axes)

    @st.composite
    def blocked(draw: st.DrawFn) -> tuple[Expression, np.ndarray]:
        block = draw(st.sampled_from([d for d in range(1, array.shape[0] + 1) if array.shape[0] % d == 0]))
        begin = draw(st.integers(0, block - 1))
        end = draw(st.integers(begin + 1, block))
        rows = [r for r in range(array.shape[0]) if begin <= r % block < end]
        return BlockRows(node, block, begin, end, MARK), array[rows]

    flat = (Reshape(node, (array.size,), MARK), array.reshape(-1))
    pair = (Reshape(node, (1, array.size), MARK), array.reshape(1, -1))
    options += [sliced(), joined(), turned(), blocked(), st.just(flat), st.just(pair)]
    return st.one_of(options)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees(), st.data())
def test_every_range_of_every_move_tree_equals_numpy(
    checkpoint: Checkpoint, made: tuple[Expression, np.ndarray], data: st.DataObject
) -> None:
    node, array = made
    bound = binder(checkpoint).value(node)
    assert bound.shape == array.shape
    expected = np.ascontiguousarray(array).reshape(-1)
    begin = data.draw(st.integers(0, array.size - 1))
    end = data.draw(st.integers(begin + 1, array.size))
    out = np.empty((end - begin) * 2, np.uint8)
    bound.read(begin, end, out)
    assert np.array_equal(out.view("<u2"), expected[begin:end])
    assert np.array_equal(load(bound).view("<u2"), expected)
    name, index, shape = bound.locate(begin)
    source = ARRAYS[name.removeprefix("source:")]
    assert shape == source.shape
    assert source.reshape(-1)[index] == expected[begin]
    covered = {(info.name, byte) for _, info, low, high in bound.spans(begin, end) for byte in (low, high - 1)}
    assert all(0 <= byte < ARRAYS[name].nbytes for name, byte in covered)


def test_a_bank_of_experts_is_stored_as_rows_by_reshape(checkpoint: Checkpoint) -> None:
    bound = binder(checkpoint).value(Reshape(tensor("bank"), (12, 10), MARK))
    assert bound.shape == (12, 10)
    assert np.array_equal(load(bound).view("<u2"), ARRAYS["bank"].reshape(-1))


def test_a_convolution_drops_its_middle_axis_and_is_transposed(checkpoint: Checkpoint) -> None:
    bound = binder(checkpoint).value(Transpose(Reshape(tensor("conv"), (12, 4), MARK), (1, 0), MARK))
    assert bound.shape == (4, 12)
    assert np.array_equal(load(bound).view("<u2").reshape(4, 12), ARRAYS["conv"].reshape(12, 4).T)


def test_gather_takes_rows_in_the_order_of_the_ids(checkpoint: Checkpoint) -> None:
    bound = binder(checkpoint).value(Gather(tensor("a"), tensor("ids"), MARK))
    expected = ARRAYS["a"][[3, 0, 1, 2, 11, 3]]
    assert np.array_equal(load(bound).view("<u2"), expected.reshape(-1))
    for begin in range(0, 60, 7):
        for end in range(begin + 1, 61, 11):
            out = np.empty((end - begin) * 2, np.uint8)
            bound.read(begin, end, out)
            assert np.array_equal(out.view("<u2"), expected.reshape(-1)[begin:end])
    assert bound.locate(45) == ("source:a", 115, (12, 10))


def test_gather_refuses_an_id_out_of_range(checkpoint: Checkpoint) -> None:
    with pytest.raises(PlanError, match=r"id 11 at index 4 is out of range; source:b has 6 rows"):
        binder(checkpoint).value(Gather(tensor("b"), tensor("ids"), MARK))


def test_same_yields_the_value_and_names_the_first_difference(checkpoint: Checkpoint) -> None:
    equal = binder(checkpoint).value(Same((tensor("a"), tensor("copy")), MARK))
    assert np.array_equal(load(equal).view("<u2"), ARRAYS["a"].reshape(-1))
    different = binder(checkpoint).value(Same((tensor("a"), tensor("changed")), MARK))
    with pytest.raises(SourceError, match=r"tensor source:changed, row 7, column 4: word 0x.* differs from 0x"):
        load(different)


def test_source_tensors_lists_every_leaf(checkpoint: Checkpoint) -> None:
    node = Concat((tensor("a"), Slice(tensor("b"), 0, 1, 3, MARK)), 0, MARK)
    assert [leaf.info.name for leaf in source_tensors(binder(checkpoint).value(node))] == ["a", "b"]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Slice(tensor("a"), 0, 3, 13, MARK), r"test.yaml:1:1: span \[3, 13\) lies outside axis 0 of size 12"),
        (Slice(tensor("a"), 2, 0, 1, MARK), r"axis 2 does not exist in shape \[12, 10\]"),
        (BlockRows(tensor("a"), 5, 0, 1, MARK), r"shape \[12, 10\] does not divide into blocks of 5 rows"),
        (BlockRows(tensor("a"), 4, 2, 5, MARK), r"span \[2, 5\) lies outside a block of 4 rows"),
        (Reshape(tensor("a"), (7, 3), MARK), r"\[12, 10\] has 120 elements; shape \[7, 3\] holds 21"),
        (Transpose(tensor("a"), (0, 0), MARK), r"axes \[0, 0\] are no permutation"),
        (Concat((tensor("a"), tensor("wide")), 0, MARK), r"shapes \[12, 10\] and \[5, 700\] differ beyond axis 0"),
        (Concat((tensor("a"), tensor("ids")), 0, MARK), r"concat of BF16 and I64"),
        (Same((tensor("a"), tensor("b")), MARK), r"source:b is BF16 \[6, 10\], source:a is BF16 \[12, 10\]"),
        (Gather(tensor("a"), tensor("b"), MARK), r"ids are BF16 \[6, 10\]; required is a vector of I32 or I64"),
        (Cast(tensor("a"), "FP32", "nearest-even", MARK), r"from BF16 to FP32 is exact, the recipe names it nearest"),
        (Cast(tensor("a"), "BF16", "nearest-even", MARK), r"the value is BF16 already; remove the cast"),
        (tensor("bnak"), r"tensor bnak is not in source source .*; nearest: bank"),
    ],
)
def test_nodes_that_do_not_fit_their_operands_are_refused(
    checkpoint: Checkpoint, node: Expression, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        binder(checkpoint).value(node)


def test_a_failing_cast_names_tensor_row_and_column(tmp_path: Path) -> None:
    data = np.zeros((3, 50), "<u4")
    data[2, 41] = 0x7F7FFFFF
    path = write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", data)})
    with open_checkpoint(path) as opened:
        bound = binder(opened).value(Cast(tensor("w"), "BF16", "nearest-even", MARK))
        with pytest.raises(SourceError, match="tensor source:w, row 2, column 41: .* rounds to infinity"):
            load(bound)


def test_word_bytes_know_every_dtype_a_value_may_have() -> None:
    assert WORD_BYTES["BF16"] == 2
    assert elements(()) == 1
