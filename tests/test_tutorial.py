"""recipes/README.md: its tutorial run as it is written, and its table of formats held against the converter."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from case_tools import Case, entry, run_cli, words_of
from console_page import PAGE, commands, played, steady
from miniatures import ROOT

from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import LayoutError, geometry

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    found = list(played(TEXT, tmp_path))
    assert [steady(block) for block, _ in found] == [steady(real) for _, real in found]
    assert sum(len(commands(block)) for block, _ in found) > 20
    # Nothing fails but the slip of the finger.
    errors = re.findall(r"^(?:(\S+?)(?::\d+:\d+)?: )?[Ee]rror: ", "".join(real for _, real in found), re.MULTILINE)
    assert errors == ["slip.yaml", "slip.yaml"]
    assert {path.name for path in tmp_path.glob("*.ninfer")} == {"llama.ninfer", "mixed.ninfer", "tuned.ninfer"}


def test_a_page_that_has_rotted_is_seen(tmp_path: Path) -> None:
    page = "```yaml\n# a.yaml\nb: 1\n```\n\n```console\n$ cat \\\n    a.yaml\nb: 2\n$ echo took 1.5 s\ntook 2.5 s\n```"
    ((block, real),) = played(page, tmp_path)
    assert commands(block) == ["cat \\\n    a.yaml", "echo took 1.5 s"]
    assert real == "$ cat \\\n    a.yaml\n# a.yaml\nb: 1\n$ echo took 1.5 s\ntook 1.5 s\n"
    assert steady(block) != steady(real)
    assert steady("took 1.5 s\n") == steady("took 2.5 s\n")


@pytest.mark.parametrize("page", [ROOT / "README.md", PAGE], ids=["README", "tutorial"])
def test_what_the_commands_of_a_page_leave_in_a_clone_is_ignored(page: Path) -> None:
    blocks = re.findall(r"^```\w+\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks)
    made = re.findall(r"(?:(?:^|\s)(?:-o|>|--output|--html|--scheduler-file)|make_checkpoint.py \S+) (\S+)", text)
    made += re.findall(r"^# (\S+\.yaml)$", text, re.MULTILINE)
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    assert len(set(made)) > 8
    assert [path for path in made if not any(fnmatch(path.split("/")[0], pattern) for pattern in ignored)] == []


def test_links_of_the_page_lead_somewhere() -> None:
    titles = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert target[1:] in titles if target.startswith("#") else (PAGE.parent / target).is_file(), target


# -- the table of formats -------------------------------------------------------------------------------------

ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TEXT.partition("## The formats")[2].partition("## In an editor")[0].splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}
DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "I32", "I64")


def test_the_table_has_every_format_with_its_bits_and_encoder() -> None:
    listed = {row["format"]: row for row in json.loads(run_cli("formats", "--json").out)}
    assert list(ROWS) == list(FORMATS) == list(listed)
    for name, (bits, encoder, _, _) in ROWS.items():
        assert float(bits.partition(", and ")[0]) == listed[name]["bits_per_weight"]
        assert re.findall(r"`([A-Z0-9_]+)`", encoder) == listed[name]["encoders"]
        assert encoder.startswith("none") == (not listed[name]["encoders"])


@pytest.mark.parametrize("name", ROWS)
def test_the_bits_of_the_table_are_those_of_the_stored_planes(name: str) -> None:
    """Rows and columns of a shape that no format pads; what lies between planes counts nowhere."""
    n, k = 128, 256
    per_weight, _, per_row = ROWS[name][0].partition(", and ")
    bits = float(per_weight) * n * k + int(per_row.removesuffix(" per row") or 0) * n
    assert sum(plane.nbytes for plane in geometry(FORMATS[name], (n, k)).planes) * 8 - bits in (0, 32)
    told = f"{name} takes 16 more per row." in " ".join(run_cli("formats", "--help").out.split())
    assert told == (per_row == "16 per row")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "NVFP4"])
def test_formats_are_made_from_the_dtypes_of_the_table(tmp_path: Path, name: str, dtype: str) -> None:
    case = Case(tmp_path)
    if dtype == "F16":
        tensor = ("F16", np.full((4, 128), 0x3C00, "<u2"))
    else:
        tensor = words_of(dtype, *([0] * 512), shape=[4, 128])
    case.source({"a": tensor})
    case.recipe(entry("a", [4, 128], name, "a"))
    ran = case.plan()
    assert (ran.code == 0) == (dtype in ROWS[name][2].split(", ")), ran.err


def accepts(rule: str, shape: tuple[int, ...]) -> bool:
    """Tells what the table says of a shape."""
    if rule == "any":
        return True
    assert rule.startswith("`[N, K]`")
    n, k = (re.search(rf"{word}(?: a multiple)? of (\d+)", rule) for word in ("N", "K"))
    return len(shape) == 2 and not (n and shape[0] % int(n[1])) and not (k and shape[1] % int(k[1]))


@pytest.mark.parametrize("name", ROWS)
def test_shapes_are_those_of_the_table(name: str) -> None:
    rule = ROWS[name][3]
    for shape in [(), (64,), (2, 3, 64), *((n, k) for n in (1, 127, 128, 256) for k in (1, 63, 64, 65, 128, 704))]:
        try:
            size = geometry(FORMATS[name], shape).nbytes
        except LayoutError:
            assert not accepts(rule, shape), shape
            continue
        assert accepts(rule, shape), shape
        if "padded" in rule:
            padded = -(-shape[1] // 128) * 128
            assert size == geometry(FORMATS[name], (shape[0], padded)).nbytes
            assert size > geometry(FORMATS[name], (shape[0], padded - 128)).nbytes if padded > 128 else True
