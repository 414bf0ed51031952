"""The report page in a real browser: drawn, sorted, filtered, pointed at, on a desk and on a phone.

Nothing here passes or fails by the clock; how long a page takes is printed.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from artifacts import FORMATS, tensor, write
from browser import Browser
from page_artifacts import write_shown

from ninfer_convert.artifact.decode import E4M3FN_VALUES, bf16_values, f16_values
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.rules import LARGEST_BF16, LARGEST_E4M3FN, LARGEST_F16
from ninfer_convert.page.data import Subject
from ninfer_convert.page.html import page

pytestmark = pytest.mark.browser

DESK, PHONE = (1280, 900), (390, 844)
HOSTILE = "<img src=x onerror=document.title='hit'>/</script><script>document.title='hit'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a 1301-tensor artifact: with its report, beside a second one, and from the artifact alone."""
    root = tmp_path_factory.mktemp("pages")
    first = write_shown(root / "nvfp4.ninfer", "qwen3.6-27b/nvfp4")
    second = write_shown(root / "groupwise.ninfer", "qwen3.6-27b/groupwise-int", seed=1)
    hostile = write(root / "hostile.ninfer", [tensor(HOSTILE, "Q4G64_F16S", (4, 64)), tensor("one", "BF16", ())])
    with Artifact.open(first.path) as mine, Artifact.open(second.path) as theirs, Artifact.open(hostile) as odd:
        contents = {
            "full": page(Subject(mine, first.report)),
            "against": page(Subject(mine, first.report), Subject(theirs, second.report)),
            "alone": page(Subject(mine)),
            "hostile": page(Subject(odd)),
        }
    paths = {name: root / f"{name}.html" for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    return paths


def show(browser, path, size=DESK, scheme="light"):
    browser.prefer(scheme)
    browser.resize(*size, mobile=size == PHONE, ratio=2 if size == PHONE else 1)
    browser.console()
    browser.open(path)
    # Plots are drawn when their width is known, which is after the first layout.
    browser.wait("document.querySelector('#loss-body').children.length > 0 || document.querySelector('#loss').hidden")


def texts(browser, selector):
    return browser.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent);", selector)


def column(browser, name):
    """Returns the texts of a column of the shown rows."""
    script = """
    const heads = [...document.querySelectorAll("#table thead th")].map((head) => head.id);
    const place = heads.indexOf(`column-${arguments[0]}`);
    return [...document.querySelectorAll("#rows tr")].map((row) => row.children[place].textContent);
    """
    return browser.run(script, name)


def choose(browser, selector, value):
    browser.run(
        "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('change', { bubbles: true }));",
        selector,
        value,
    )


def objects(browser):
    return json.loads(browser.value("document.getElementById('data').textContent"))["objects"]


@pytest.mark.parametrize("size", [DESK, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["full", "against", "alone", "hostile"])
def test_every_page_is_drawn_without_a_word_on_the_console_and_fits(browser, pages, name, scheme, size, tmp_path):
    show(browser, pages[name], size, scheme)
    assert browser.console() == []
    assert browser.value("document.documentElement.scrollWidth") <= size[0]
    wide = """
    const clips = (e) => ["auto", "hidden"].includes(getComputedStyle(e).overflowX);
    const scrolls = (e) => e && (clips(e) || scrolls(e.parentElement));
    return [...document.querySelectorAll("main *, header *")]
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5 && !scrolls(e.parentElement))
      .map((e) => e.tagName + "." + e.getAttribute("class"));
    """
    assert browser.run(wide) == []
    assert browser.value("performance.getEntriesByType('resource').length") == 0
    complete = browser.value("performance.getEntriesByType('navigation')[0].domComplete")
    sort = """
    const begin = performance.now();
    document.querySelector("#column-bytes button").click();
    document.body.getBoundingClientRect();
    return performance.now() - begin;
    """
    took = f"complete after {complete:.0f} ms, sorted in {browser.run(sort):.0f} ms"
    print(f"{name} {scheme} {size[0]}: {pages[name].stat().st_size:,} bytes, {took}")
    if directory := os.environ.get("NINFER_CONVERT_SCREENSHOTS"):
        browser.screenshot(Path(directory) / f"{name}-{scheme}-{size[0]}.png")


def test_words_have_the_values_that_the_formats_give_them(browser, pages):
    source = (Path(__file__).parents[1] / "ninfer_convert" / "page" / "files" / "basis.js").read_text(encoding="utf-8")
    function = source[source.index("function wordValue") :].partition("\n}\n")[0] + "\n}"
    show(browser, pages["alone"])
    for kind, largest, expand in (
        ("F16", LARGEST_F16, f16_values),
        ("BF16", LARGEST_BF16, bf16_values),
        ("E4M3FN", LARGEST_E4M3FN, lambda words: E4M3FN_VALUES[words]),
    ):
        script = f"{function}\nreturn Array.from({{length: {largest + 1}}}, (_, word) => wordValue('{kind}', word));"
        assert browser.run(script) == expand(np.arange(largest + 1, dtype=np.uint16)).astype(float).tolist()


def test_columns_sort_both_ways(browser, pages):
    show(browser, pages["full"])
    rows = objects(browser)
    assert column(browser, "name") == [row["name"] for row in rows[:100]]
    browser.click("#column-bytes button")
    falling = sorted(rows, key=lambda row: -row["bytes"])
    assert column(browser, "name") == [row["name"] for row in falling[:100]]
    assert browser.value("document.querySelector('#column-bytes').getAttribute('aria-sort')") == "descending"
    browser.click("#column-bytes button")
    rising = sorted(rows, key=lambda row: row["bytes"])
    assert column(browser, "name") == [row["name"] for row in rising[:100]]
    assert browser.value("document.querySelector('#column-bytes').getAttribute('aria-sort')") == "ascending"
    # What is not known stands last, whichever way the rest is sorted.
    for order in (1, -1):
        browser.click("#column-sqnr button")
        known = [row for row in rows if "sqnr_db" in row.get("stats", {})]
        expected = sorted(known, key=lambda row, order=order: -order * row["stats"]["sqnr_db"])
        assert column(browser, "name")[:50] == [row["name"] for row in expected[:50]]


def test_search_and_filters_narrow_the_table(browser, pages):
    show(browser, pages["full"])
    rows = objects(browser)
    browser.type("#search", "mlp DOWN")
    found = [row["name"] for row in rows if "mlp" in row["name"] and "down" in row["name"]]
    assert column(browser, "name") == found[:100]
    assert texts(browser, "#count")[0].startswith(f"{len(found)} of {len(rows):,}, ")
    choose(browser, "#filter-format", "NVFP4")
    packed = [row["name"] for row in rows if row["name"] in found and row.get("format") == "NVFP4"]
    assert column(browser, "name") == packed[:100]
    assert set(column(browser, "format")) == {"NVFP4"}
    browser.run("document.querySelector('#search').select();")
    browser.type("#search", "text/layers/1?/mlp/*")
    assert len(column(browser, "name")) == sum(
        row["name"].startswith("text/layers/1") and row["name"][14:19] == "/mlp/" and row["format"] == "NVFP4"
        for row in rows
    )
    browser.type("#search", "(nothing[")
    assert texts(browser, "#rows tr") == ["No object matches."]
    assert browser.console() == []


def test_every_row_can_be_reached_page_by_page(browser, pages):
    show(browser, pages["full"])
    names = [row["name"] for row in objects(browser)]
    seen = column(browser, "name")
    while browser.value("!document.querySelector('#pager [aria-label=\"Next page\"]').disabled"):
        browser.run("document.querySelector('#pager [aria-label=\"Next page\"]').click();")
        seen += column(browser, "name")
    assert seen == names


def test_pointing_at_the_plots_tells_object_and_value(browser, pages):
    show(browser, pages["full"])
    for selector in ("#loss-body circle", "#loss-body rect.cell"):
        browser.run("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' });", selector)
        box = browser.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON();", selector)
        browser.point(1, 1)
        browser.point(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        browser.wait("!document.querySelector('#tip').hidden")
        told = texts(browser, "#tip > div")
        row = next(row for row in objects(browser) if row["name"] == told[0])
        assert told[1].startswith("relative error ")
        assert float(told[1].split()[2]) == pytest.approx(100 * row["stats"]["relative_l2"], rel=0.006)
        assert browser.value("document.querySelectorAll('#loss-body .line.lit').length") == 1


def test_each_measure_and_component_is_drawn(browser, pages):
    show(browser, pages["full"])
    measures = texts(browser, "#measure option")
    assert measures == [
        "relative error", "SQNR", "largest error", "clipped groups", "zero groups", "median scale", "bits per weight",
    ]
    rows = [row for row in objects(browser) if "layer" in row]
    components = browser.run("return [...document.querySelector('#component').options].map((o) => o.value);")
    assert components == ["text", "vision", ""]
    for component in components:
        choose(browser, "#component", component)
        for value in browser.run("return [...document.querySelector('#measure').options].map((o) => o.value);"):
            choose(browser, "#measure", value)
            points = browser.value("document.querySelectorAll('#loss-body circle').length")
            assert points == browser.value("document.querySelectorAll('#loss-body rect.cell').length")
            if value == "bits":
                assert points == sum(row["component"] == component or not component for row in rows if "shape" in row)
            assert "NaN" not in browser.value("document.querySelector('#loss-body').innerHTML")
    assert browser.console() == []


def test_worst_objects_are_the_worst(browser, pages):
    show(browser, pages["full"])
    rows = [row for row in objects(browser) if row.get("stats", {}).get("relative_l2")]
    rows.sort(key=lambda row: -row["stats"]["relative_l2"])
    assert texts(browser, "#worst-body button") == [row["name"] for row in rows[:12]]
    choose(browser, "#measure", "sqnr_db")
    assert texts(browser, "#worst-body button") == [row["name"] for row in rows[:12]]


def test_chosen_object_shows_its_scales_and_origin(browser, pages):
    show(browser, pages["full"])
    browser.type("#search", "text/layers/5/mlp/gate_up")
    browser.click("#rows button")
    assert browser.value("document.querySelector('#detail').open") is True
    row = next(row for row in objects(browser) if row["name"] == "text/layers/5/mlp/gate_up")
    assert texts(browser, "#detail-title") == [row["name"]]
    shown = texts(browser, "#detail")[0]
    assert row["sha256"] in shown
    assert row["sources"][1]["tensor"] in shown
    assert browser.value("document.querySelectorAll('#detail svg rect[fill]:not([fill=transparent])').length") == len(
        row["scales"]["counts"]
    )
    browser.type("#detail button[aria-label='Next object']", "\ue014")
    assert texts(browser, "#detail-title") != [row["name"]]
    browser.type("#detail button", "\ue00c")
    browser.wait("!document.querySelector('#detail').open")
    assert browser.console() == []


def test_keyboard_alone_reaches_a_cell_and_its_object(browser, pages):
    show(browser, pages["full"])
    browser.type("#loss-body svg[tabindex]", "\ue015\ue014\ue015\ue007")
    browser.wait("document.querySelector('#detail').open")
    assert texts(browser, "#loss-body [role=status]")[0].startswith(texts(browser, "#detail-title")[0])


def test_second_artifact_stands_beside_the_first(browser, pages):
    show(browser, pages["against"])
    rows = objects(browser)
    heads = texts(browser, "#against thead th")
    assert heads == ["nvfp4.ninfer", "groupwise.ninfer"]
    counts = {row["status"]: sum(other["status"] == row["status"] for other in rows) for row in rows}
    assert sorted(texts(browser, "#against .chips button")) == sorted(f"{n:,} {status}" for status, n in counts.items())
    browser.run("[...document.querySelectorAll('.chips button')].find((b) => /in second/.test(b.textContent)).click();")
    assert column(browser, "name") == [row["name"] for row in rows if row["status"] == "only in second"][:100]
    browser.run("document.querySelector('#rows button').click();")
    assert "second: only in second" in texts(browser, "#detail")[0]
    assert browser.console() == []


def test_artifact_alone_says_that_errors_are_not_known(browser, pages):
    show(browser, pages["alone"])
    assert "Errors are not known" in texts(browser, "#loss")[0]
    assert texts(browser, "#measure option") == ["zero groups", "median scale", "bits per weight"]
    assert "There is no conversion report" in texts(browser, "#provenance")[0]


def test_hostile_name_is_shown_and_not_run(browser, pages):
    show(browser, pages["hostile"])
    assert browser.value("document.querySelector('#worst').hidden") is (not objects(browser)[0]["scales"]["zero"])
    assert column(browser, "name")[0] == HOSTILE
    browser.run("document.querySelector('#rows button').click();")
    assert texts(browser, "#detail-title") == [HOSTILE]
    assert browser.value("document.title") == "test-model / test-weights"
    assert browser.value("document.images.length") == 0


def test_the_policy_refuses_what_is_not_the_page_s_own(browser, pages):
    show(browser, pages["alone"])
    browser.run(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
        "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
    )
    browser.wait("document.images.length === 1")
    assert browser.value("document.title") != "1"
    assert sum("Content Security Policy" in line for line in browser.console()) >= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_they_stand_on(browser, pages, scheme):
    show(browser, pages["full"], DESK, scheme)
    ratios = """
    const channel = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    const luminance = (color) => {
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((value) => channel(value / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = getComputedStyle(document.documentElement);
    const of = (name) => luminance(style.getPropertyValue(`--${name}`));
    const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    return Object.fromEntries(["ink", "quiet", "accent", "bad", "good"].flatMap((text) =>
      ["paper", "card", "soft"].map((ground) => [`${text} on ${ground}`, ratio(of(text), of(ground))])));
    """
    assert {pair: ratio for pair, ratio in browser.run(ratios).items() if ratio < 4.5} == {}


def test_controls_have_names(browser, pages):
    show(browser, pages["against"])
    nameless = """
    return [...document.querySelectorAll("button, input, select, svg, [role=application]")]
      .filter((e) => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()))
      .map((e) => e.outerHTML.slice(0, 80));
    """
    assert browser.run(nameless) == []
    assert set(FORMATS) >= {row["format"] for row in objects(browser) if "format" in row}
