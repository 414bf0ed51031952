"""The report page: what it shows, what it believes, and that a name is never more than a name."""

import base64
import hashlib
import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest
from artifacts import FORMATS, TINY, tensor, write
from case_tools import run_cli
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from oracle import layouts
from oracle.container import Resource
from page_artifacts import write_shown

from ninfer_convert.artifact.container import REPORT_SUFFIX
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.scales import MAX_BINS, binned, scale_histogram, scale_plane
from ninfer_convert.errors import ArtifactError
from ninfer_convert.page.data import Subject, layer_and_role, page_data
from ninfer_convert.page.html import embedded_json, page, render
from ninfer_convert.page.report import MAX_TEXT, SHOWN_SOURCES

MAX_PAGE_BYTES = 3_000_000
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "a&lt;b/\"'`${1}",
    "right\u202eleft\u0007\u2028end",
    "__proto__",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    return {
        "nvfp4": write_shown(root / "nvfp4.ninfer", "qwen3.6-27b/nvfp4"),
        "groupwise": write_shown(root / "groupwise.ninfer", "qwen3.6-27b/groupwise-int", seed=1),
    }


def data_of(path, report=None, other=None, other_report=None):
    with Artifact.open(path) as first:
        if other is None:
            return page_data(Subject(first, report))
        with Artifact.open(other) as second:
            return page_data(Subject(first, report), Subject(second, other_report))


def page_of(path, report=None):
    with Artifact.open(path) as artifact:
        return page(Subject(artifact, report)).decode()


class Parsed(HTMLParser):
    """The elements of a page as a browser's parser meets them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self._open = [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]] = self.texts.get(self._open[-1], "") + data


def tiny_report(**changes):
    """Returns a report of the golden artifact."""
    with Artifact.open(TINY) as artifact:
        objects = [
            {"name": name, "kind": record.kind, "bytes": record.nbytes, "sha256": artifact.digest(name)}
            for name, record in artifact.objects.items()
        ]
    about = {"model_id": "tiny", "weights_id": "all-nine", "bytes": TINY.stat().st_size, "sha256": "00" * 32}
    return {"schema": 1, "artifact": about, "objects": objects} | changes


def entry(data, name):
    return next(item for item in data["objects"] if item["name"] == name)


# Scale histograms


def oracle_scales(format_name, shape, payload):
    """Returns the scale words of the logical groups, flat."""
    if format_name == "NVFP4":
        scales = layouts.unpack_blockscale(shape, payload)[1]
    elif format_name == "FP8_E4M3FN_ROW_BF16S":
        return list(layouts.unpack_row_scale(shape, payload)[0])
    else:
        scales = layouts.unpack_row_split(format_name, shape, payload)[0]
        groups = -(-shape[1] // layouts.GROUPED[format_name].group)
        scales = [row[:groups] for row in scales]
    return [word for row in scales for word in row]


@pytest.mark.parametrize("format_name", FORMATS[:6])
@pytest.mark.parametrize("block_bytes", [2**20, 512])
def test_histogram_counts_every_scale_of_every_logical_group(tmp_path, monkeypatch, format_name, block_bytes):
    monkeypatch.setattr("ninfer_convert.artifact.reader.READ_BYTES", block_bytes)
    shape = (128, 192) if format_name == "NVFP4" else (37, 200)
    stored = tensor("t", format_name, shape)
    words = oracle_scales(format_name, shape, stored.payload)
    with Artifact.open(write(tmp_path / "a.ninfer", [stored])) as artifact:
        seen = []
        found = scale_histogram(artifact, artifact.tensor("t"), seen.append)
        plane = scale_plane(artifact.tensor("t"))
    positive = sorted(word for word in words if word)
    assert (found.groups, found.zero, found.invalid) == (len(words), words.count(0), 0)
    bins = [0] * len(found.counts)
    for word in positive:
        bins[(word >> found.shift) - found.first] += 1
    assert list(found.counts) == bins
    assert found.median == positive[(len(positive) - 1) // 2]
    assert (found.least, found.largest) == (positive[0], positive[-1])
    assert sum(seen) == plane.nbytes


@pytest.mark.parametrize("format_name", FORMATS[6:])
def test_direct_tensor_has_no_histogram(tmp_path, format_name):
    with Artifact.open(write(tmp_path / "a.ninfer", [tensor("t", format_name, (4, 5))])) as artifact:
        assert scale_histogram(artifact, artifact.tensor("t")) is None


def test_words_that_no_scale_may_be_are_counted_apart(tmp_path):
    stored = tensor("t", "Q4G64_F16S", (2, 128))
    payload = bytearray(stored.payload)
    payload[-8:] = np.array([0x3C00, 0x7C00, 0x8000, 0], "<u2").tobytes()
    path = write(tmp_path / "a.ninfer", [type(stored)("t", (2, 128), "Q4G64_F16S", bytes(payload))])
    with Artifact.open(path) as artifact:
        found = scale_histogram(artifact, artifact.tensor("t"))
    assert (found.groups, found.zero, found.invalid) == (4, 1, 2)
    assert (found.shift, found.first, found.counts, found.median) == (0, 0x3C00, (1,), 0x3C00)
    assert (found.least, found.largest) == (0x3C00, 0x3C00)


def test_scales_that_are_all_zero_have_no_bins():
    assert binned(np.zeros(100, np.int64), 1) == (0, 0, ())


def test_a_tensor_whose_scales_are_all_zero_has_no_least_and_no_largest(tmp_path):
    stored = tensor("t", "Q4G64_F16S", (2, 128))
    path = write(tmp_path / "a.ninfer", [type(stored)("t", (2, 128), "Q4G64_F16S", bytes(len(stored.payload)))])
    with Artifact.open(path) as artifact:
        found = scale_histogram(artifact, artifact.tensor("t"))
    assert (found.groups, found.zero, found.counts) == (4, 4, ())
    assert (found.least, found.median, found.largest) == (None, None, None)


@given(st.dictionaries(st.integers(1, 0x7F7F), st.integers(1, 1000), min_size=1, max_size=40))
def test_bins_are_few_exact_and_as_narrow_as_they_can_be(words):
    counts = np.zeros(0x7F7F, np.int64)
    for word, count in words.items():
        counts[word - 1] = count
    shift, first, bins = binned(counts, 1)
    assert len(bins) <= MAX_BINS
    assert bins[0]
    assert bins[-1]
    assert sum(bins) == sum(words.values())
    assert all(bins[(word >> shift) - first] >= count for word, count in words.items())
    assert shift == 0 or (max(words) >> (shift - 1)) - (min(words) >> (shift - 1)) >= MAX_BINS


def test_only_scales_and_divisors_are_read(shown, monkeypatch):
    read = []
    read_into = Artifact.read_into

    def count(self, begin, out, what="the file"):
        read.append(len(out))
        read_into(self, begin, out, what)

    monkeypatch.setattr(Artifact, "read_into", count)
    told = []
    with Artifact.open(shown["nvfp4"].path) as artifact:
        page_data(Subject(artifact), progress=lambda done, total: told.append((done, total)))
        planes = [scale_plane(record) for record in artifact.objects.values() if record.kind == "tensor"]
        divisors = sum(getattr(record, "format", None) == "NVFP4" for record in artifact.objects.values())
    scale_bytes = sum(plane.nbytes for plane in planes if plane)
    assert sum(read) == scale_bytes + 4 * divisors
    assert max(read) <= 2**20
    assert told[-1] == (scale_bytes, scale_bytes)


# Data


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("text/layers/12/mlp/down", 12, "text/layers/*/mlp/down"),
        ("model.layers.007.weight", 7, "model.layers.*.weight"),
        ("text/layers/3/experts/5/up", 3, "text/layers/*/experts/5/up"),
        ("text/final_norm", None, "text/final_norm"),
        ("vision/norm1/weight", None, "vision/norm1/weight"),
        ("vision/fc2", None, "vision/fc2"),
        ("0", 0, "*"),
        ("a/1234567890/b", None, "a/1234567890/b"),
        ("a/\u0663/b", None, "a/\u0663/b"),
    ],
)
def test_layer_is_the_first_whole_number_of_a_path(name, layer, role):
    assert layer_and_role(name) == (layer, role)


def test_page_of_the_golden_artifact_without_a_report():
    data = data_of(TINY)
    about = data["artifacts"][0]
    assert (about["model_id"], about["weights_id"]) == ("tiny", "all-nine")
    assert (about["has_report"], about["report_problem"], about["facts"]) == (False, None, [])
    assert (about["totals"]["objects"], about["totals"]["file_bytes"]) == (11, 13072)
    assert len(data["objects"]) == 11
    quantized = [item for item in data["objects"] if "scales" in item]
    assert sorted(item["format"] for item in quantized) == sorted(FORMATS[:6])
    assert all(item["scales"]["groups"] == item["scales"]["zero"] + sum(item["scales"]["counts"]) for item in quantized)
    assert not any({"stats", "sha256", "sources", "status", "other"} & set(item) for item in data["objects"])


def test_nvfp4_median_is_divided_by_the_divisor(tmp_path):
    stored = tensor("t", "NVFP4", (128, 64))
    payload = bytearray(stored.payload)
    where = layouts.planes("NVFP4", (128, 64))
    payload[where["scale"][0] : sum(where["scale"])] = bytes([0x40]) * where["scale"][1]
    payload[-4:] = np.array([8.0], "<f4").tobytes()
    path = write(tmp_path / "a.ninfer", [type(stored)("t", (128, 64), "NVFP4", bytes(payload))])
    found = entry(data_of(path), "t")
    assert (found["divisor"], found["scales"]["median"]) == (8.0, 0.25)


def test_report_gives_statistics_sources_and_digests(shown):
    data = data_of(shown["nvfp4"].path, shown["nvfp4"].report)
    assert data["artifacts"][0]["report_problem"] is None
    found = entry(data, "text/layers/0/mlp/gate_up")
    item = next(item for item in shown["nvfp4"].report["objects"] if item["name"] == found["name"])
    assert found["stats"] == item["stats"]
    assert found["sha256"] == item["sha256"]
    assert (found["word_copy"], found["transform"]) == (True, item["transform"])
    assert [source["tensor"] for source in found["sources"]] == [source["tensor"] for source in item["sources"]]
    assert (found["component"], found["layer"], found["role"]) == ("text", 0, "text/layers/*/mlp/gate_up")
    facts = {group["title"]: dict(map(tuple, group["facts"])) for group in data["artifacts"][0]["facts"]}
    assert facts["Recipe"]["id"] == "qwen3_6_27b_nvfp4-v1"
    assert facts["Source base"]["revision"] == "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9"
    assert "revision required" not in facts["Source base"]
    assert facts["Run"]["peak memory, bytes"] == "287,309,824"
    assert facts["Artifact"]["SHA-256"] == shown["nvfp4"].report["artifact"]["sha256"]
    assert facts["Notes"] == {"": "the shortlist keeps 131,072 of 248,320 rows"}


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ({"artifact": {"model_id": "large"}}, "its model_id is large; the artifact's is tiny"),
        ({"artifact": {"bytes": 5}}, "its bytes is 5; the artifact's is 13072"),
        ({"objects": [{"name": "nobody\u202e"}]}, r"it has object 'nobody\u202e'; the artifact does not"),
    ],
)
def test_report_of_another_artifact_is_not_used(report, problem):
    data = data_of(TINY, tiny_report() | report)
    assert data["artifacts"][0]["report_problem"] == problem
    assert data["artifacts"][0]["facts"] == []
    assert not any("sha256" in item for item in data["objects"])


def test_report_whose_object_has_another_form_is_not_used():
    report = tiny_report()
    report["objects"][3]["bytes"] += 1
    name = report["objects"][3]["name"]
    with Artifact.open(TINY) as artifact:
        assert f"object '{name}': its bytes is" in Subject(artifact, report).problem()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = ("recipe", "sources", "inputs", "run", "notes", "warnings", "waived", "objects", "artifact", "schema")
OBJECT_MEMBERS = ("stats", "sources", "encoder", "transform", "sha256", "word_copy", "bytes", "kind")


@given(st.dictionaries(st.sampled_from(MEMBERS), JSON), st.dictionaries(st.sampled_from(OBJECT_MEMBERS), JSON))
def test_no_report_whatsoever_breaks_the_page(report, item):
    for found in (report, tiny_report(**report), tiny_report(objects=[{"name": "w/0"} | item])):
        text = render(data_of(TINY, found))
        assert json.loads(Parsed(text).texts["script", "data"])["artifacts"][0]["model_id"] == "tiny"


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "0.1", None, [1.0], 10**400])
def test_statistics_that_are_no_finite_numbers_are_left_out(value):
    report = tiny_report()
    report["objects"][1]["stats"] = {"relative_l2": value, "sqnr_db": 12.5, "zero_groups": value}
    report["objects"][2]["stats"] = {"relative_l2": value, "max_error_at": value}
    data = data_of(TINY, report)
    assert data["objects"][1]["stats"] == {"sqnr_db": 12.5}
    assert "stats" not in data["objects"][2]


def test_long_texts_and_many_sources_are_cut():
    report = tiny_report(notes=["x" * 10_000])
    report["objects"][1]["sources"] = [{"tensor": f"expert.{number}"} for number in range(300)]
    data = data_of(TINY, report)
    assert len(data["objects"][1]["sources"]) == SHOWN_SOURCES
    assert data["objects"][1]["more_sources"] == 300 - SHOWN_SOURCES
    (note,) = [text for group in data["artifacts"][0]["facts"] for _, text in group["facts"] if text.startswith("x")]
    assert len(note) == MAX_TEXT + 3


def test_two_artifacts_side_by_side(tmp_path):
    same, changed = tensor("text/0/same", "BF16", (4, 8)), tensor("text/0/changed", "BF16", (4, 8))
    mine = write(tmp_path / "a.ninfer", [
        same, changed, tensor("text/0/format", "Q4G64_F16S", (4, 64)), tensor("text/0/shape", "BF16", (4,)),
        tensor("text/0/kind", "FP32", (2,)), Resource("text/0/resource", b"one"), tensor("text/0/mine", "I32", (3,)),
    ])
    theirs = write(tmp_path / "b.ninfer", [
        same, tensor("text/0/changed", "BF16", (4, 8), seed=1), tensor("text/0/format", "Q5G64_F16S", (4, 64)),
        tensor("text/0/shape", "BF16", (5,)), Resource("text/0/kind", b"kind"), Resource("text/0/resource", b"three"),
        tensor("text/0/theirs", "W8G32_F16S", (3, 64)),
    ])

    def report(path):
        with Artifact.open(path) as artifact:
            return {"objects": [{"name": name, "sha256": artifact.digest(name)} for name in artifact.objects]}

    data = data_of(mine, report(mine), theirs, report(theirs))
    assert {item["name"].rpartition("/")[2]: item["status"] for item in data["objects"]} == {
        "same": "same bytes",
        "changed": "other bytes",
        "format": "other format",
        "shape": "other shape",
        "kind": "other kind",
        "resource": "other bytes",
        "mine": "only in first",
        "theirs": "only in second",
    }
    assert entry(data, "text/0/format")["other"]["format"] == "Q5G64_F16S"
    theirs_only = entry(data, "text/0/theirs")
    assert "kind" not in theirs_only
    assert theirs_only["other"]["scales"]["groups"] == 6
    assert (theirs_only["layer"], theirs_only["component"]) == (0, "text")
    unknown = {item["status"] for item in data_of(mine, None, theirs)["objects"] if item["name"].endswith("e")}
    assert {"not known", "other bytes"} <= unknown


def test_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.ninfer"
    path.write_bytes(TINY.read_bytes())
    with Artifact.open(path) as artifact:
        path.write_bytes(TINY.read_bytes() + b"\0")
        with pytest.raises(ArtifactError, match="was changed while it was read"):
            page_data(Subject(artifact))


# The page


def test_page_asks_nobody_for_anything(shown):
    parsed = Parsed(page_of(shown["nvfp4"].path, shown["nvfp4"].report))
    links = [
        value for _, attributes in parsed.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert sorted(links) == ["#objects", "data:,"]
    assert not any(name.startswith("on") or name == "style" for _, found in parsed.elements for name in found)
    (policy,) = [found["content"] for tag, found in parsed.elements if found.get("http-equiv")]
    digests = {
        kind: base64.b64encode(hashlib.sha256(parsed.texts[kind, None].encode()).digest()).decode()
        for kind in ("script", "style")
    }
    assert policy.split("; ")[:3] == [
        "default-src 'none'",
        f"style-src 'sha256-{digests['style']}'",
        f"script-src 'sha256-{digests['script']}'",
    ]
    assert "url(" not in parsed.texts["style", None]
    assert "@import" not in parsed.texts["style", None]


def test_names_are_never_markup(tmp_path):
    objects = [tensor(f"{name}/{number}", "BF16", (2,)) for number, name in enumerate(HOSTILE)]
    path = write(tmp_path / "a.ninfer", objects)
    text = page_of(path, {"recipe": {"id": HOSTILE[0]}, "notes": list(HOSTILE)})
    plain = page_of(write(tmp_path / "b.ninfer", [tensor("plain", "BF16", (2,))]))
    parsed = Parsed(text)
    assert [tag for tag, _ in parsed.elements] == [tag for tag, _ in Parsed(plain).elements]
    names = [item["name"] for item in json.loads(parsed.texts["script", "data"])["objects"]]
    assert names[:3] == [f"{name}/{number}" for number, name in enumerate(HOSTILE[:3])]
    assert names[3] == r"right\u202eleft\x07\u2028end/3"
    assert names[4] == "__proto__/4"


def test_identity_is_never_markup(tmp_path):
    data = data_of(TINY)
    data["artifacts"][0] |= {"model_id": "</title><script>1</script>", "weights_id": 'x" onload="1'}
    parsed = Parsed(render(data))
    assert parsed.texts["title", None] == '</title><script>1</script> / x" onload="1'
    assert [tag for tag, _ in parsed.elements].count("script") == 2


@given(st.text() | st.dictionaries(st.text(), st.text()))
def test_embedded_json_reads_back_and_ends_no_element(value):
    text = embedded_json(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set(text) & set("<>&")


@pytest.mark.parametrize("against", [False, True])
def test_page_of_1301_tensors_is_below_3_mb(shown, against):
    with Artifact.open(shown["nvfp4"].path) as first, Artifact.open(shown["groupwise"].path) as second:
        other = Subject(second, shown["groupwise"].report) if against else None
        content = page(Subject(first, shown["nvfp4"].report), other)
        assert content == page(Subject(first, shown["nvfp4"].report), other)
    assert sum(record.kind == "tensor" for record in first.objects.values()) == 1301
    assert len(content) < MAX_PAGE_BYTES


# The command


def test_command_writes_the_page_with_the_report_beside_the_artifact(shown, tmp_path):
    done = run("report", shown["nvfp4"].path, "--html", tmp_path / "out.html", "--against", shown["groupwise"].path)
    content = (tmp_path / "out.html").read_bytes()
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"wrote {tmp_path / 'out.html'}: {len(content):,} bytes")
    with Artifact.open(shown["nvfp4"].path) as first, Artifact.open(shown["groupwise"].path) as second:
        expected = page(Subject(first, shown["nvfp4"].report), Subject(second, shown["groupwise"].report))
    assert content == expected


def test_command_works_from_the_artifact_alone(tmp_path):
    done = run("report", TINY, "--html", tmp_path / "out.html", "-q")
    assert (done.code, done.err) == (0, "")
    data = json.loads(Parsed((tmp_path / "out.html").read_text()).texts["script", "data"])
    assert data["artifacts"][0]["has_report"] is False


def test_command_never_writes_over_what_is_there(tmp_path):
    artifact = tmp_path / "a.ninfer"
    artifact.write_bytes(TINY.read_bytes())
    (tmp_path / "link.html").symlink_to(artifact)
    (tmp_path / "out.html").write_text("mine")
    for output, message in (
        ("out.html", "exists; --overwrite replaces it"),
        ("a.ninfer", "a source is never overwritten"),
        ("link.html", "a source is never overwritten"),
    ):
        options = [] if output == "out.html" else ["--overwrite"]
        done = run("report", artifact, "--html", tmp_path / output, *options)
        assert done.code == 2
        assert message in done.err
    assert artifact.read_bytes() == TINY.read_bytes()
    assert run("report", artifact, "--html", tmp_path / "out.html", "--overwrite").code == 0
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_command_says_that_a_report_is_of_another_artifact(tmp_path):
    artifact = tmp_path / "a.ninfer"
    artifact.write_bytes(TINY.read_bytes())
    report = artifact.with_name(artifact.name + REPORT_SUFFIX)
    report.write_text(json.dumps({"artifact": {"bytes": 1}}))
    done = run("report", artifact, "--html", tmp_path / "out.html")
    assert done.code == 0
    assert "is not of this artifact and is not used: its bytes is 1; the artifact's is 13072" in done.err
    done = run("report", artifact, "--html", tmp_path / "again.html", "--report", report)
    assert done.code == 2
    assert "is not of this artifact: its bytes is 1" in done.err
    assert not (tmp_path / "again.html").exists()


def test_command_needs_an_artifact(tmp_path):
    (tmp_path / "a.ninfer").write_bytes(b"no")
    done = run("report", tmp_path / "a.ninfer", "--html", tmp_path / "out.html")
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    "words",
    [["-o", "x.html"], ["--output", "x.html"], ["-ox.html"], ["--html", "out.html", "--output=x.html"]],
)
def test_command_says_what_it_has_for_the_output_option_of_others(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = run_cli("report", TINY, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: -o x.html: report writes a page; name it with --html x.html\n"
    assert list(tmp_path.iterdir()) == []
    assert "--output" not in run_cli("report", "--help").out
