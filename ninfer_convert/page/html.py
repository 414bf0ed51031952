"""The report page: one HTML file that asks nobody for anything.

Owns how data, style and script become one text. The page's policy allows exactly its own script and style, by
their digests, and no request at all; the data travel as JSON in an element that is never executed. Refuses to
know what is shown (`page_data`).

Source: cli.md, `report`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from string import Template
from typing import Any

from ninfer_convert import __version__
from ninfer_convert.page.data import Progress, Subject, page_data

SCRIPTS = ("basis.js", "sizes.js", "loss.js", "objects.js", "start.js")
"""Parts of the script, in their order; together they are one function."""


def page(first: Subject, second: Subject | None = None, progress: Progress | None = None) -> bytes:
    """Returns the page of an artifact, with a second one beside it if there is one, as UTF-8.

    Raises:
        ArtifactError: a file was cut or changed while it was read.
        OutputError: a read fails.

    Source: cli.md, `report`.
    """
    return render(page_data(first, second, progress)).encode("utf-8")


def render(data: dict[str, Any]) -> str:
    """Returns the page of the values of `page_data`."""
    style = _file("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_file, SCRIPTS)) + "})();\n"
    about = data["artifacts"][0]
    return Template(_file("page.html")).substitute(
        title=html.escape(f"{about['model_id']} / {about['weights_id']}"),
        model_id=html.escape(about["model_id"]),
        weights_id=html.escape(about["weights_id"]),
        converter=html.escape(__version__),
        style=style,
        style_digest=_digest(style),
        script=script,
        script_digest=_digest(script),
        data=embedded_json(data),
    )


def embedded_json(data: Any) -> str:
    """Returns JSON that an HTML parser takes as it stands inside of a script element: no `<`, `>` or `&`."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _file(name: str) -> str:
    return resources.files("ninfer_convert.page").joinpath("files", name).read_text(encoding="utf-8")
