"""What encoding has cost: the kernels' sums against binary64, and that no cut and no order changes them."""

import itertools
import json
import random
from fractions import Fraction

import ml_dtypes
import numba
import numpy as np
import pytest
from case_tools import FP8, Case, entry, finish, interrupted_command, run_cli, start
from hypothesis import given
from hypothesis import strategies as st

from ninfer_convert.artifact import stats
from ninfer_convert.artifact.decode import decode_rows
from ninfer_convert.encode import interface, kernels
from ninfer_convert.encode.loss import Loss
from ninfer_convert.encode.rows import SOURCE_DTYPES, encode_rows
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import geometry

ENCODED = [name for name, numeric in FORMATS.items() if numeric.encoders]


def words_of(values, dtype):
    """Returns the words of binary32 values, and the values that these stand for."""
    if dtype == "BF16":
        words = (values.view("<u4") >> np.uint32(16)).astype("<u2")
        return words, (words.astype("<u4") << np.uint32(16)).view("<f4")
    if dtype == "F16":
        half = values.astype("<f2")
        return half.view("<u2"), half.astype(np.float32)
    return values.view("<u4"), values


def measured(name, dtype, words, first=0):
    numeric = FORMATS[name]
    rows, k = words.shape
    planes = {plane.name: np.empty((rows, plane.row_bytes), np.uint8) for plane in geometry(numeric, (rows, k)).planes}
    found = np.zeros(interface.LOSS_WORDS, np.int64)
    encode_rows(numeric, dtype, words, planes, found)
    return Loss.of_block(found, rows * k, first), planes


def expected(name, dtype, values, planes):
    """Returns the loss as `compare` takes it: everything decoded, in binary64."""
    numeric, k = FORMATS[name], values.shape[1]
    represented = decode_rows(numeric, k, planes)
    found = stats.loss(values.reshape(-1), represented.reshape(-1))
    scales = planes["scale"].view("<u2")[:, : -(-k // getattr(numeric, "group", k))]
    return found, stats.group_counts(numeric, scales, values)


def matrices():
    """Returns matrices of each kind of values."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((9, 2749), np.float32)
    sparse = normal.copy()
    sparse[:, 64:320] = 0
    sparse[3] = 0
    return {
        "normal": normal,
        "heavy tails": rng.standard_t(2, (7, 640)).astype(np.float32),
        "short": rng.standard_normal((5, 3), np.float32),
        "rows of unlike size": normal * np.float32(10) ** np.linspace(-7, 3, 9, dtype=np.float32)[:, None],
        "zeros": sparse,
        # Scales so small that few bits of them are left: codes are clamped.
        "subnormal scales": normal * np.float32(2e-7),
    }


@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("what", list(matrices()))
def test_the_loss_is_what_binary64_finds(what, name, dtype):
    values = matrices()[what]
    words, values = words_of(values, dtype)
    loss, planes = measured(name, dtype, words)
    wanted, (_, zero, clipped) = expected(name, dtype, values, planes)
    figures = loss.figures(values.shape[1])
    assert figures["relative_l2"] == pytest.approx(wanted.relative_error, rel=2e-6)
    assert figures["rms"] == pytest.approx(np.sqrt(np.mean(np.square(values.astype(np.float64)))), rel=2e-6)
    assert (figures["zero_groups"], figures["clipped_groups"]) == (zero, clipped)
    if wanted.largest is None:
        assert (figures["max_error"], figures["max_error_at"], figures["sqnr_db"]) == (0, None, None)
        return
    assert figures["sqnr_db"] == pytest.approx(wanted.sqnr_db, abs=2e-5)
    assert figures["max_error"] == pytest.approx(wanted.largest.error, rel=2e-5)
    row, column = figures["max_error_at"]
    represented = decode_rows(FORMATS[name], values.shape[1], planes)
    there = abs(float(values[row, column]) - float(represented[row, column]))
    assert there == pytest.approx(wanted.largest.error, rel=2e-5)


@pytest.mark.parametrize("name", [name for name in ENCODED if name != FP8])
def test_every_clipped_group_is_counted(name):
    values = matrices()["normal"] * np.float32(3e-8 * FORMATS[name].code_max)
    loss, planes = measured(name, "F32", values.view("<u4"))
    _, (groups, _, clipped) = expected(name, "F32", values, planes)
    assert loss.clipped_groups == clipped
    assert groups // 10 < clipped < groups


@pytest.mark.parametrize("name", [name for name in ENCODED if name.startswith(("Q", "W"))])
def test_values_whose_squares_binary32_cannot_hold_count(name):
    values = np.full((2, 128), 1e-25, np.float32)
    loss, _ = measured(name, "F32", values.view("<u4"))
    assert (loss.figures(128)["relative_l2"], loss.figures(128)["rms"]) == (1.0, pytest.approx(1e-25, rel=1e-6))


def test_values_near_the_largest_bf16_have_a_finite_loss_in_fp8():
    values = np.tile(np.float32([1e38, -2e38, 3e38, 7e36]), (2, 32))
    words, values = words_of(values, "BF16")
    loss, planes = measured(FP8, "BF16", words)
    wanted, _ = expected(FP8, "BF16", values, planes)
    assert loss.figures(128)["relative_l2"] == pytest.approx(wanted.relative_error, rel=2e-6)


@pytest.mark.parametrize("power", [0, -126, -127, 118])
def test_what_a_format_can_represent_has_no_loss(power):
    """As when the source is FP8 that was decoded: every value is a code times its row's scale, whatever that is."""
    rng = np.random.default_rng(13)
    codes = rng.integers(0, 0x7F, (60, 300), np.uint8) | rng.integers(0, 2, (60, 300), np.uint8) << np.uint8(7)
    codes[:, 17] = 0x7E
    # All significands that a multiplier can have, but for those that are too small for a reciprocal.
    significands = (1 + rng.permutation(120)[:60] / 128).astype(np.float32) if power != -127 else 1
    scales = np.broadcast_to(np.float32(2.0**power) * significands, (60,)).astype(np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[:, None]
    loss, planes = measured(FP8, "F32", values.view("<u4"))
    assert planes["code"].tolist() == codes.tolist()
    figures = loss.figures(300)
    assert (loss.noise, figures["relative_l2"], figures["sqnr_db"], figures["max_error_at"]) == (0, 0, None, None)
    assert figures["rms"] == pytest.approx(np.sqrt(np.mean(np.square(values.astype(np.float64)))), rel=2e-6)


@pytest.mark.parametrize("name", ENCODED)
def test_the_first_of_equal_largest_errors_is_named(name):
    values = np.zeros((3, 256), np.float32)
    values[1:, 128:] = 448
    values[1, 200] = values[1, 230] = values[2, 130] = 17.3
    loss, _ = measured(name, "F32", values.view("<u4"))
    assert loss.figures(256)["max_error_at"] == [1, 200]


@pytest.mark.parametrize("name", ENCODED)
def test_no_cut_into_rows_changes_a_bit(name):
    values = np.random.default_rng(7).standard_t(3, (24, 333)).astype(np.float32)
    whole, _ = measured(name, "F32", values.view("<u4"))
    for cuts in ([0, 24], [0, 1, 24], [0, 7, 9, 23, 24], list(range(25))):
        parts = [
            measured(name, "F32", values[begin:end].view("<u4"), begin * 333)[0]
            for begin, end in itertools.pairwise(cuts)
        ]
        random.Random(len(cuts)).shuffle(parts)
        assert sum(parts, Loss()) == whole


@numba.njit
def add_all(values, sums):
    for value in values:
        kernels._add_exactly(value, sums)


@given(st.lists(st.floats(2.0**-340, 1e90), max_size=50))
def test_sums_of_binary64_numbers_are_exact(values):
    limbs = np.zeros(interface.LIMBS, np.int64)
    add_all(np.array(values, np.float64), limbs)
    loss = Loss.of_block(np.concatenate([limbs, np.zeros(interface.LIMBS + 4, np.int64)]), 1, 0)
    assert Fraction(loss.noise) * Fraction(2) ** interface.LIMB_UNIT == sum(map(Fraction, values))


def test_what_is_far_below_every_square_is_left_out():
    limbs = np.zeros(interface.LIMBS, np.int64)
    add_all(np.array([0.0, 5e-324, 2.0**-349], np.float64), limbs)
    assert not limbs.any()


# As JSON

LOSS = Loss(640, 3 << 390, 5 << 400, 2, 1, 0x3F000000, 130)


def test_a_loss_reads_back_from_json():
    assert Loss.from_json(json.loads(json.dumps(LOSS.as_json()))) == LOSS


@pytest.mark.parametrize(
    "change",
    [
        {"noise": 3},
        {"noise": "xyz"},
        {"noise": "-3"},
        {"zero_groups": -1},
        {"zero_groups": True},
        {"elements": 1.0},
        {"largest_word": 0x7F800000},
        {"noise": "1" + "0" * 200},
        {"signal": "1" + "0" * 300},
        {"elements": 1 << 64},
        {"largest_at": 640},
        {"more": 1},
    ],
)
def test_what_is_no_loss_reads_as_none(change):
    assert Loss.from_json({**LOSS.as_json(), **change}) is None
    assert Loss.from_json([change]) is None


def test_figures_are_defined_or_null():
    assert LOSS.figures(128) == {
        "relative_l2": pytest.approx(np.sqrt(3 / 5 / 1024)),
        "sqnr_db": pytest.approx(10 * np.log10(5 * 1024 / 3)),
        "rms": pytest.approx(np.sqrt(5 / 640)),
        "max_error": 0.5,
        "max_error_at": [1, 2],
        "clipped_groups": 1,
        "zero_groups": 2,
    }
    nothing = Loss(640, 0, 0, 10).figures(128)
    assert [nothing[name] for name in ("relative_l2", "sqnr_db", "rms", "max_error", "max_error_at")] == [
        *(None, None, 0, 0, None)
    ]


# In the report


def a_case(directory):
    """Returns a conversion with an object of each kind; enough rows for several blocks."""
    made = Case(directory)
    rng = np.random.default_rng(11)
    words = (rng.standard_normal((4096, 512), np.float32).view("<u4") >> np.uint32(16)).astype("<u2")
    made.source({"w": ("BF16", words), "v": ("BF16", words[0])})
    made.recipe(*(entry(f"w/{name}", (4096, 512), name, "w") for name in ENCODED), entry("v", (512,), "BF16", "v"))
    return made


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return a_case(tmp_path_factory.mktemp("loss"))


def stats_of(case, *options):
    """Converts; returns the `stats` of every object, in the report's order."""
    assert case.run("--overwrite", *options).code == 0
    return {item["name"]: item.get("stats") for item in case.report()["objects"]}


@pytest.fixture(scope="module")
def reported(case):
    return stats_of(case, "--threads", "1")


def test_the_report_says_what_each_encoded_object_has_lost(case, reported):
    assert [name for name, found in reported.items() if found] == [f"w/{name}" for name in ENCODED]
    ran = run_cli("compare", case.output, "--recipe", case.recipe_path, "--source", case.sources["base"], "--json")
    compared = {item["name"]: item for item in json.loads(ran.out)["objects"]}
    for name, found in reported.items():
        if found:
            assert found["relative_l2"] == pytest.approx(compared[name]["relative_error"], rel=2e-6)
            assert found["max_error"] == pytest.approx(compared[name]["largest_error"], rel=2e-5)
            assert found["max_error_at"] == compared[name]["largest_at"]
            assert found["zero_groups"] == compared[name]["zero_groups"]
            assert found["clipped_groups"] == compared[name]["clipped_groups"]


@pytest.mark.parametrize("options", ["--threads 2", "--threads 3", "--threads 7", "--max-memory 256MiB --threads 5"])
def test_the_figures_depend_on_neither_threads_nor_memory(case, reported, options):
    assert stats_of(case, *options.split()) == reported


def test_without_stats_nothing_is_measured(case):
    assert set(stats_of(case, "--no-stats").values()) == {None}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_measure_the_same(tmp_path, reported, count):
    case = a_case(tmp_path)
    plan = tmp_path / "plan.json"
    for words in (
        ("plan", case.recipe_path, "--source", case.sources["base"], "-o", plan, "--output", case.output),
        ("prepare", "--plan", plan),
        *(("run", "--plan", plan, "--shard", f"{index}/{count}") for index in range(count)),
        ("finalize", "--plan", plan),
    ):
        ran = run_cli(*words)
        assert ran.code == 0, ran.err
    assert {item["name"]: item.get("stats") for item in case.report()["objects"]} == reported
    # Once published, nobody knows the figures but the report.
    assert run_cli("finalize", "--plan", plan).code == 0


def test_shares_that_were_run_without_stats_are_measured_when_run_with_them(tmp_path, reported):
    case = a_case(tmp_path)
    plan = tmp_path / "plan.json"
    for words in (
        ("plan", case.recipe_path, "--source", case.sources["base"], "-o", plan, "--output", case.output),
        ("prepare", "--plan", plan),
        ("run", "--plan", plan, "--shard", "0/1", "--no-stats"),
        ("run", "--plan", plan, "--shard", "0/1"),
        ("finalize", "--plan", plan),
    ):
        ran = run_cli(*words)
        assert ran.code == 0, ran.err
    assert {item["name"]: item.get("stats") for item in case.report()["objects"]} == reported


def test_losses_in_journals_that_no_object_can_have_are_not_reported(tmp_path, reported):
    case = a_case(tmp_path)
    plan, journal = tmp_path / "plan.json", tmp_path / "out.ninfer.part.journal.0-of-1"
    for words in (
        ("plan", case.recipe_path, "--source", case.sources["base"], "-o", plan, "--output", case.output),
        ("prepare", "--plan", plan),
        ("run", "--plan", plan, "--shard", "0/1"),
    ):
        assert run_cli(*words).code == 0
    direct = len(ENCODED)
    with journal.open("a") as file:
        for index, elements in ((-1, 4096 * 512), (direct, 512), (99, 512), (0, 512)):
            print(json.dumps({"object": index, "loss": Loss(elements, 3, 5).as_json()}), file=file)
    assert run_cli("finalize", "--plan", plan).code == 0
    found = {item["name"]: item.get("stats") for item in case.report()["objects"]}
    assert found == {**reported, f"w/{ENCODED[0]}": None}


@pytest.mark.parametrize("first", [(), ("--no-stats",)])
def test_a_resumed_run_reports_the_same(tmp_path, reported, first):
    case = a_case(tmp_path)
    end = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2)"
    ran = finish(start(interrupted_command(end, 20, *case.arguments("run", "--threads", "1", *first))))
    assert ran.code == 75, ran.err
    assert case.output.with_name("out.ninfer.part").exists()
    assert stats_of(case) == reported
