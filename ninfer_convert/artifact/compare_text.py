"""Comparisons as text of 80 columns and as CSV.

Owns columns and spelling. Refuses to compare (`compare`, `contrast`) and to print.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from ninfer_convert.artifact.compare import Comparison
from ninfer_convert.artifact.contrast import Contrast, Difference
from ninfer_convert.artifact.inspection_text import WIDTH, fit
from ninfer_convert.artifact.stats import Loss
from ninfer_convert.errors import printable

SHOWN_DIFFERENCES = 50
CSV_COLUMNS = (
    "object",
    "format",
    "shape",
    "elements",
    "relative_error",
    "sqnr_db",
    "largest_error",
    "largest_at",
    "differing",
    "groups",
    "zero_groups",
    "clipped_groups",
)


def comparison_text(found: Comparison) -> str:
    """Returns the losses per format and per tensor, worst first; tensors without any loss are only counted."""
    formats = [_row(entry.loss, None, f"{entry.format} ({len(entry.members)})") for entry in found.formats()]
    lossy = [item for item in found.worst_first() if item.loss.differing]
    lines = _table(formats, "format (tensors)") if formats else []
    if lossy:
        lines += ["", *_table([_row(item.loss, item.largest_at, item.name) for item in lossy], "tensor")]
    if exact := len(found.objects) - len(lossy):
        lines += ["", f"{exact} of {len(found.objects)} tensors are exact"]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def contrast_text(found: Contrast) -> str:
    """Returns what two artifacts have in common, every difference, and how far differing values lie apart."""
    lines = [f"{found.equal} objects are equal, {found.nbytes:,} bytes"]
    shown = found.differences[:SHOWN_DIFFERENCES]
    for difference in shown:
        lines += _difference_lines(difference)
    if len(found.differences) > len(shown):
        lines.append(f"and {len(found.differences) - len(shown)} more differences")
    if found.values.objects:
        lines += ["", "values of the second artifact, measured against those of the first", ""]
        lines.append(comparison_text(Comparison(found.values.objects, ())))
    if found.is_equal:
        lines.append("the artifacts are equal")
    return "\n".join([*lines, *(f"note: {note}" for note in found.values.notes)])


def comparison_csv(found: Comparison) -> str:
    """Returns one line per tensor, worst first, under a line of column names; an empty field is no number.

    Names are made printable. Numbers read back as the same binary64.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for item in found.worst_first():
        loss, at = item.loss, item.largest_at
        writer.writerow(
            [
                printable(item.name),
                item.format,
                "x".join(map(str, item.shape)),
                loss.elements,
                *("" if value is None else repr(value) for value in (loss.relative_error, loss.sqnr_db)),
                repr(loss.largest.error if loss.largest else 0.0),
                "" if at is None else " ".join(map(str, at)),
                loss.differing,
                loss.groups,
                loss.zero_groups,
                "" if loss.clipped_groups is None else loss.clipped_groups,
            ]
        )
    return out.getvalue()


def contrast_csv(found: Contrast) -> str:
    """Returns one line per difference under a line of column names, what neither artifact has left empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("object", "what", "first", "second"))
    for item in found.differences:
        writer.writerow([printable(text or "") for text in (item.object, item.what, item.first, item.second)])
    return out.getvalue()


def _row(loss: Loss, at: Sequence[int] | None, name: str) -> tuple[str, ...]:
    error, ratio = loss.relative_error, loss.sqnr_db
    return (
        "-" if error is None else f"{error:.3e}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{loss.largest.error:.3e}" if loss.largest else "0",
        "" if at is None else ",".join(map(str, at)),
        "-" if loss.clipped_groups is None else f"{loss.clipped_groups:,}",
        f"{loss.zero_groups:,}" if loss.groups else "-",
        name,
    )


def _table(rows: Sequence[tuple[str, ...]], label: str) -> list[str]:
    whole: list[tuple[str, ...]] = [("rel. error", "SQNR dB", "max error", "at", "clipped", "zero", label), *rows]
    if not any(row[3] for row in rows):
        whole = [row[:3] + row[4:] for row in whole]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    lines: list[str] = []
    for *cells, name in whole:
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[:-1], strict=True))
        shown = fit(name, WIDTH - 2)
        if len(line) + 2 + len(shown) <= WIDTH:
            lines.append(f"{line}  {shown}")
        else:
            lines += [line, f"  {shown}"]
    return lines


def _difference_lines(found: Difference) -> Iterator[str]:
    name = "artifact" if found.object is None else fit(found.object, WIDTH)
    if found.first is None or found.second is None:
        where = "second" if found.first is None else "first"
        yield fit(f"{name}: only in the {where}: {found.first or found.second}", WIDTH)
        return
    digits = 16 if found.what == "sha256" else WIDTH
    pair = f"{found.what} {found.first[:digits]} and {found.second[:digits]}"
    if len(name) + 2 + len(pair) <= WIDTH:
        yield f"{name}: {printable(pair)}"
    else:
        yield from (name, fit(f"  {pair}", WIDTH))
