"""Where an artifact is cut into shares, and the small tools of those who make and check them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from case_tools import Case, entry, filled
from hypothesis import given
from hypothesis import strategies as st
from many_objects import write_many_objects
from miniatures import Miniatures
from pipeline import planned, stand_in_places

from ninfer_convert.encode.block_maker import BlockMaker
from ninfer_convert.formats import DirectFormat
from ninfer_convert.plan.block import blocks, stored_ranges, whole
from ninfer_convert.plan.planner import Plan, PlannedTensor
from ninfer_convert.run import cuts, digests
from ninfer_convert.run.cuts import cut, partition
from ninfer_convert.run.digests import take_digests
from ninfer_convert.run.intervals import Intervals

COUNTS = (1, 2, 3, 4, 7, 16, 100, 2000)


@pytest.fixture(scope="module", params=["many", "qwen3.6-27b/nvfp4", "qwen3.8-27b/groupwise-int"])
def plan(
    request: pytest.FixtureRequest, miniatures: Miniatures, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plan]:
    if request.param == "many":
        many = write_many_objects(tmp_path_factory.mktemp("many"))
        with planned(many.recipe, {"base": many.source}) as made:
            yield made
    else:
        recipe = miniatures.recipes / f"{request.param}.yaml"
        with planned(recipe, *stand_in_places(miniatures.models[request.param.partition("/")[0]])) as made:
            yield made


# -- shares -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_shares_cover_the_payload_once_and_are_cut_at_pages(plan: Plan, count: int) -> None:
    shares = cut(plan, count)
    assert [(share.index, share.count) for share in shares] == [(index, count) for index in range(count)]
    assert (shares[0].begin, shares[-1].end) == (plan.payload_offset, plan.file_bytes)
    assert all(before.end == share.begin for before, share in itertools.pairwise(shares))
    assert all(share.begin <= share.end for share in shares)
    assert all(share.begin % 4096 == 0 for share in shares if share.begin < plan.file_bytes)


@pytest.mark.parametrize("count", COUNTS)
def test_a_quantized_object_is_cut_only_in_its_first_page_or_its_last(plan: Plan, count: int) -> None:
    """Whoever makes the second half of its bytes makes all of its rows."""
    begins = {(plan.payload_offset + item.offset) // 4096 * 4096 for item in plan.objects}
    assert {share.begin for share in cut(plan, count)} <= begins | {plan.file_bytes}


@pytest.mark.parametrize("count", COUNTS)
def test_every_condition_is_dealt_to_one_share(plan: Plan, count: int) -> None:
    dealt = [condition for share in cut(plan, count) for condition in share.conditions]
    assert sorted(dealt) == list(range(len(plan.conditions)))


def test_a_direct_tensor_is_cut_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuts, "ATOM_BYTES", 8192)
    case = Case(tmp_path)
    case.source({"big": filled("BF16", [5, 4096], 0x3F80), "small": filled("BF16", [5], 0x3F80)})
    case.recipe(entry("small", [5], "BF16", "small"), entry("big", [5, 4096], "BF16", "big"))
    with planned(case.recipe_path, case.sources) as made:
        assert made.file_bytes - made.payload_offset == 256 + 5 * 8192
        # The atoms begin 256 bytes behind a page, with the object.
        begins = [share.begin - made.payload_offset for share in cut(made, 5)]
    assert begins == [0, 8192, 16384, 24576, 32768]


def brute_partition(loads: list[int], count: int) -> int:
    """Returns the least possible largest sum of a run, by trying all cuts."""
    ways = itertools.combinations_with_replacement(range(len(loads) + 1), count - 1)
    edges = ([0, *way, len(loads)] for way in ways)
    return min(max(sum(loads[a:b]) for a, b in itertools.pairwise(each)) for each in edges)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_the_largest_share_is_as_small_as_it_can_be(loads: list[int], count: int) -> None:
    starts = partition(loads, count)
    runs = [loads[begin:end] for begin, end in itertools.pairwise([*starts, len(loads)])]
    assert (len(starts), starts[0], list(itertools.chain(*runs))) == (count, 0, loads)
    assert max(map(sum, runs)) == brute_partition(loads, count)
    assert all(runs[: len(loads)])


def test_four_equal_objects_in_three_shares_leave_none_idle() -> None:
    assert partition([5, 5, 5, 5], 3) == [0, 2, 3]
    assert partition([5, 5], 4) == [0, 1, 2, 2]


# -- what is stored where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 20])
def test_ranges_of_a_block_are_the_pieces_that_it_makes(plan: Plan, block_bytes: int) -> None:
    maker = BlockMaker()
    seen = set()
    for item in plan.objects:
        if not isinstance(item, PlannedTensor) or (item.numeric.name, item.shape) in seen:
            continue
        seen.add((item.numeric.name, item.shape))
        for block in itertools.islice(blocks(item, block_bytes), 3):
            pieces = [(offset, offset + data.nbytes) for offset, data in maker.make(item, block)]
            assert sorted(pieces) == sorted(stored_ranges(item, block))
    assert len(seen) > 10


def test_ranges_of_an_object_are_its_planes_whole(plan: Plan) -> None:
    for item in plan.objects:
        if isinstance(item, PlannedTensor):
            planes = [(plane.offset, plane.offset + plane.nbytes) for plane in item.geometry.planes if plane.nbytes]
            expected = [(0, item.nbytes)] if isinstance(item.numeric, DirectFormat) else planes
            assert list(stored_ranges(item, whole(item))) == expected


# -- intervals and digests ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=12), st.integers(0, 40), st.integers(1, 9))
def test_intervals_are_a_set_of_integers(added: list[tuple[int, int]], begin: int, length: int) -> None:
    intervals, members = Intervals(), set()
    for low, size in added:
        intervals.add(low, low + size)
        members |= set(range(low, low + size))
    asked = set(range(begin, begin + length))
    assert intervals.nbytes == len(members)
    assert intervals.covers(begin, begin + length) == (asked <= members)
    assert intervals.missing(begin, begin + length) == len(asked - members)


@pytest.mark.parametrize("threads", [1, 3])
@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60)), max_size=8),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60)), max_size=8),
)
def test_digests_of_overlapping_ranges_are_those_of_their_bytes(
    threads: int, nbytes: int, first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    content = np.arange(nbytes, dtype=np.uint8).tobytes()
    wanted = [[(low, low + size) for low, size in ranges if low + size <= nbytes] for ranges in (first, second)]

    def read(begin: int, piece: memoryview) -> None:
        piece[:] = content[begin : begin + len(piece)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "PIECE_BYTES", 16)
        found = take_digests(read, nbytes, wanted, threads)
    assert found.file == hashlib.sha256(content).hexdigest()
    for ranges, taken in zip(wanted, found.ranges, strict=True):
        assert list(taken) == [hashlib.sha256(content[low:high]).hexdigest() for low, high in ranges]


def test_a_failed_read_ends_the_hashing() -> None:
    def read(begin: int, piece: memoryview) -> None:
        if begin:
            raise OSError("gone")
        piece[:] = bytes(len(piece))

    with pytest.raises(OSError, match="gone"):
        take_digests(read, digests.PIECE_BYTES + 1, [[(0, 5)]], 2)
