"""The closed table of layouts, and the exact place of every plane."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import container
from oracle import layouts as oracle

from ninfer_convert import layout
from ninfer_convert.errors import ConvertError
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import LAYOUT_OF_FORMAT, LAYOUTS, LayoutError, geometry

GOLDEN = Path(__file__).parent / "golden"
TENSORS = [
    (stored.format, stored.shape, len(stored.payload))
    for stored in container.parse((GOLDEN / "tiny.ninfer").read_bytes())[2]
    if isinstance(stored, container.Tensor)
]
PAYLOADS = [
    (case["format"], tuple(case["shape"]), len(base64.b64decode(case["payload"])))
    for case in json.loads((GOLDEN / "layouts.json").read_text())
]
MATRIX_FORMATS = [name for name in FORMATS if name not in ("BF16", "FP32", "I32")]
GROUPED = MATRIX_FORMATS[:4]

PAIRS = {
    ("contiguous-le-v1", "BF16"),
    ("contiguous-le-v1", "FP32"),
    ("contiguous-le-v1", "I32"),
    ("row-split-k128-v1", "Q4G64_F16S"),
    ("row-split-k128-v1", "Q5G64_F16S"),
    ("row-split-k128-v1", "Q6G64_F16S"),
    ("row-split-k128-v1", "W8G32_F16S"),
    ("blockscale-k16-m128x4-v1", "NVFP4"),
    ("row-scale-v1", "FP8_E4M3FN_ROW_BF16S"),
}


def planes_of(name, shape):
    return {plane.name: (plane.offset, plane.nbytes) for plane in geometry(FORMATS[name], shape).planes}


# The table


def test_there_are_exactly_four_layouts():
    assert list(LAYOUTS) == ["contiguous-le-v1", "row-split-k128-v1", "blockscale-k16-m128x4-v1", "row-scale-v1"]
    assert layout.RAW_BYTES == "raw-bytes-v1"


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layout_stores_exactly_its_own_formats(layout_name, name):
    exists = (layout_name, name) in PAIRS
    assert (name in LAYOUTS[layout_name]) is exists
    assert (LAYOUT_OF_FORMAT[name] == layout_name) is exists


def test_the_tables_are_read_only_and_name_no_other_format():
    assert {name for names in LAYOUTS.values() for name in names} == set(FORMATS) == set(LAYOUT_OF_FORMAT)
    with pytest.raises(TypeError, match="does not support item assignment"):
        LAYOUTS["row-split-k64-v1"] = ("BF16",)
    with pytest.raises(TypeError, match="does not support item assignment"):
        LAYOUT_OF_FORMAT["FP16"] = "contiguous-le-v1"


def test_alignments_and_limits_are_those_of_the_specification():
    assert (layout.TENSOR_ALIGNMENT, layout.RESOURCE_ALIGNMENT, layout.MAX_RANK) == (256, 1, 16)


@pytest.mark.parametrize(("value", "aligned"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)])
def test_align_up_is_the_next_multiple(value, aligned):
    assert layout.align_up(value, 256) == aligned


@pytest.mark.parametrize(("k", "k_pad"), [(1, 128), (64, 128), (128, 128), (129, 256), (4304, 4352)])
def test_padded_k_is_a_multiple_of_128(k, k_pad):
    assert layout.padded_k(k) == k_pad


def test_high_group_bytes_are_those_of_the_table():
    assert [layout.high_group_bytes(FORMATS[name]) for name in GROUPED] == [0, 8, 16, 0]


# Exact sizes


def test_worked_example_of_the_page():
    example = geometry(FORMATS["Q5G64_F16S"], (2, 130))
    assert planes_of("Q5G64_F16S", (2, 130)) == {"base": (0, 256), "high": (256, 64), "scale": (512, 16)}
    assert (example.layout, example.rows, example.row_quantum, example.nbytes) == ("row-split-k128-v1", 2, 1, 528)
    assert [plane.row_bytes for plane in example.planes] == [128, 32, 8]


EXACT = [
    ("BF16", (), {"words": (0, 2)}),
    ("FP32", (), {"words": (0, 4)}),
    ("I32", (131072,), {"words": (0, 524288)}),
    ("BF16", (4, 10240), {"words": (0, 81920)}),
    ("FP32", (1,) * 16, {"words": (0, 4)}),
    # 1 row: 2 groups of 32 + 2 scale words, the scale plane on the next 256
    ("Q4G64_F16S", (1, 1), {"base": (0, 64), "scale": (256, 4)}),
    ("W8G32_F16S", (1, 1), {"base": (0, 128), "scale": (256, 8)}),
    # 248320 rows of 80 groups: 32 + 16 + 2 bytes each
    (
        "Q6G64_F16S",
        (248320, 5120),
        {"base": (0, 635699200), "high": (635699200, 317849600), "scale": (953548800, 39731200)},
    ),
    # K = 4304 is padded to 4352 = 68 groups
    ("Q5G64_F16S", (1152, 4304), {"base": (0, 2506752), "high": (2506752, 626688), "scale": (3133440, 156672)}),
    ("W8G32_F16S", (5120, 10240), {"base": (0, 52428800), "scale": (52428800, 3276800)}),
    ("NVFP4", (128, 64), {"code": (0, 4096), "scale": (4096, 512), "divisor": (4608, 4)}),
    ("NVFP4", (34816, 5120), {"code": (0, 89128960), "scale": (89128960, 11141120), "divisor": (100270080, 4)}),
    ("FP8_E4M3FN_ROW_BF16S", (3, 37), {"code": (0, 111), "scale": (256, 6)}),
    ("FP8_E4M3FN_ROW_BF16S", (248320, 5120), {"code": (0, 1271398400), "scale": (1271398400, 496640)}),
]


@pytest.mark.parametrize(("name", "shape", "planes"), EXACT, ids=[f"{name} {list(shape)}" for name, shape, _ in EXACT])
def test_planes_lie_where_the_page_puts_them(name, shape, planes):
    assert planes_of(name, shape) == planes
    assert geometry(FORMATS[name], shape).nbytes == max(offset + nbytes for offset, nbytes in planes.values())


@pytest.mark.parametrize(("name", "shape", "nbytes"), PAYLOADS + TENSORS)
def test_size_is_that_of_the_golden_payload(name, shape, nbytes):
    assert geometry(FORMATS[name], shape).nbytes == nbytes


DIMENSIONS = st.integers(1, 700)
SHAPES = {name: st.tuples(DIMENSIONS, DIMENSIONS) for name in MATRIX_FORMATS}
SHAPES["NVFP4"] = st.tuples(DIMENSIONS.map(lambda n: 128 * n), DIMENSIONS.map(lambda k: 64 * k))
SHAPES |= dict.fromkeys(("BF16", "FP32", "I32"), st.lists(DIMENSIONS, max_size=5).map(tuple))
ANY_TENSOR = st.sampled_from(list(FORMATS)).flatmap(lambda name: st.tuples(st.just(name), SHAPES[name]))


@settings(derandomize=True)
@given(ANY_TENSOR)
def test_geometry_equals_the_oracle(tensor):
    name, shape = tensor
    found = geometry(FORMATS[name], shape)
    assert planes_of(name, shape) == oracle.planes(name, shape)
    assert found.nbytes == oracle.payload_bytes(name, shape)
    assert found.layout == oracle.LAYOUTS[name]


@settings(derandomize=True)
@given(ANY_TENSOR)
def test_rows_divide_every_plane_and_planes_stand_apart(tensor):
    name, shape = tensor
    found = geometry(FORMATS[name], shape)
    assert found.rows == (shape[0] if len(shape) > 1 else 1)
    assert found.row_quantum == (128 if name == "NVFP4" else 1)
    assert found.rows % found.row_quantum == 0
    cursor = 0
    for plane in found.planes:
        assert plane.offset >= cursor
        assert plane.offset % 256 == 0 or plane.name == "divisor"
        assert plane.nbytes == (4 if plane.name == "divisor" else found.rows * plane.row_bytes)
        assert (plane.row_bytes == 0) is (plane.name == "divisor")
        cursor = plane.offset + plane.nbytes
    assert cursor == found.nbytes


# Rejections


def rejection(name, shape):
    with pytest.raises(LayoutError) as caught:
        geometry(FORMATS[name], shape)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_stores_rank_17(name):
    shape = (1,) * 17
    assert rejection(name, shape) == f"shape {[1] * 17} has rank 17; {name} stores rank 0 to 16"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (128, 0), (-128, 64), (128, -64)])
def test_no_format_stores_a_dimension_below_one(name, shape):
    assert rejection(name, shape) == f"shape {list(shape)} has a dimension below 1; every dimension must be positive"


@pytest.mark.parametrize("name", MATRIX_FORMATS)
@pytest.mark.parametrize("shape", [(), (64,), (2, 128, 64), (1, 1, 128, 64)])
def test_quantized_formats_store_matrices_only(name, shape):
    hint = " (reshape [E, N, K] to [E*N, K])" if len(shape) == 3 else ""
    message = f"shape {list(shape)} has rank {len(shape)}; {name} stores matrices [N, K] of rank 2{hint}"
    assert rejection(name, shape) == message


@pytest.mark.parametrize("n", [1, 100, 127, 129, 192])
def test_nvfp4_needs_a_multiple_of_128_rows(n):
    message = f"shape [{n}, 64]: N = {n} is not a multiple of 128, which blockscale-k16-m128x4-v1 requires"
    assert rejection("NVFP4", (n, 64)) == message


@pytest.mark.parametrize("k", [1, 16, 63, 72, 96])
def test_nvfp4_needs_a_multiple_of_64_columns(k):
    message = f"shape [128, {k}]: K = {k} is not a multiple of 64, which blockscale-k16-m128x4-v1 requires"
    assert rejection("NVFP4", (128, k)) == message


def test_no_payload_is_larger_than_a_file_offset():
    assert geometry(FORMATS["BF16"], (2**62 - 1,)).nbytes == 2**63 - 2
    message = f"shape [{2**62}] needs {2**63} bytes; at most {2**63 - 1} can be stored"
    assert rejection("BF16", (2**62,)) == message
    assert "can be stored" in rejection("Q4G64_F16S", (2**40, 2**40))


def test_a_layout_error_ends_a_run_with_exit_code_1():
    assert issubclass(LayoutError, ConvertError)
    assert LayoutError("x").exit_code == 1
