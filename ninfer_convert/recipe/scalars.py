"""What nodes mean once a key asks for a type: text, integers, numbers, digests, and closed sets of keys.

Owns the literal forms a recipe may use. Nothing is converted silently: a literal that YAML and a reader might
take differently is an error that says how to write it. Refuses to know placeholders (`recipe_scope`).

Source: cases C32, C34, C56, C57.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ninfer_convert.recipe.problems import PlacedError, Problems, nearest, quoted, suggestion
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode, yaml_reading

MAX_INTEGER = 2**63 - 1

IDENTIFIER = re.compile("[A-Za-z_][A-Za-z0-9_-]*")
"""The names of sources, inputs, names, sets, values and loop variables."""

_INTEGER = re.compile("-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def describe(node: Node) -> str:
    """Returns what a node is, for a message."""
    if isinstance(node, ListNode):
        return "a list"
    if isinstance(node, MapNode):
        return "a mapping"
    if node.plain:
        return quoted(node.text) if node.text else "nothing"
    return f"quoted {quoted(node.text)}"


def read_scalar(node: Node, wanted: str) -> ScalarNode:
    """Returns the node if it is a scalar with a value."""
    if not isinstance(node, ScalarNode) or (node.plain and not node.text):
        raise PlacedError(node.mark, f"expected {wanted}, found {describe(node)}")
    return node


def read_text(node: Node, wanted: str = "text") -> str:
    """Returns text of one line, not empty; a plain scalar that YAML reads as something else is an error."""
    text = read_literal(node, wanted)
    if not text:
        raise PlacedError(node.mark, f"expected {wanted}, found empty text")
    return text


def read_literal(node: Node, wanted: str = "text") -> str:
    """Returns text of one line as `read_text` does, except that quoted text may be empty."""
    scalar = read_scalar(node, wanted)
    require_text(scalar, wanted)
    if not scalar.text.isprintable():
        raise PlacedError(node.mark, f"{quoted(scalar.text)} has a character that cannot be printed on one line")
    return scalar.text


def require_text(scalar: ScalarNode, wanted: str = "text") -> None:
    """Raises PlacedError if YAML reads this scalar as anything but text."""
    reading = yaml_reading(scalar.text) if scalar.plain else None
    if reading is not None:
        raise PlacedError(
            scalar.mark, f"expected {wanted}, found {describe(scalar)}, which YAML reads as {reading}; quote it"
        )


def read_prose(node: Node) -> str:
    """Returns text that may have several lines, without the space around it."""
    scalar = read_scalar(node, "text")
    require_text(scalar)
    text = scalar.text.strip()
    if not text:
        raise PlacedError(node.mark, "expected text, found empty text")
    if not text.replace("\n", "").isprintable():
        raise PlacedError(node.mark, "the text has a control character")
    return text


def read_integer(node: Node) -> int:
    """Returns an integer written as a plain decimal."""
    scalar = read_scalar(node, "an integer")
    if not scalar.plain or not _INTEGER.fullmatch(scalar.text):
        raise PlacedError(node.mark, f"expected an integer, found {describe(node)}; write a plain decimal")
    if len(scalar.text) > 20 or abs(int(scalar.text)) > MAX_INTEGER:
        raise PlacedError(node.mark, f"{quoted(scalar.text)} is out of range; at most {MAX_INTEGER}")
    return int(scalar.text)


def read_number(node: Node) -> float:
    """Returns a finite binary64 number written as a plain decimal, with or without exponent."""
    scalar = read_scalar(node, "a number")
    if not scalar.plain or not _NUMBER.fullmatch(scalar.text):
        raise PlacedError(
            node.mark, f"expected a number, found {describe(node)}; write a finite decimal such as 0.5 or 1.0e-6"
        )
    value = float(scalar.text)
    if not math.isfinite(value):
        raise PlacedError(node.mark, f"{quoted(scalar.text)} is out of range; at most 1.7976931348623157e308")
    return value


def read_boolean(node: Node) -> bool:
    """Returns a boolean written `true` or `false`."""
    if isinstance(node, ScalarNode) and node.plain and node.text in ("true", "false"):
        return node.text == "true"
    raise PlacedError(node.mark, f"expected a boolean, found {describe(node)}; write true or false")


def read_hex(node: Node, digits: int, what: str) -> str:
    """Returns text of exactly so many lowercase hexadecimal digits."""
    text = read_text(node, what)
    if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
        found = f"{quoted(text)} of {len(text)} characters"
        raise PlacedError(node.mark, f"expected {what} of {digits} lowercase hexadecimal digits, found {found}")
    return text


def read_choice(node: Node, choices: Collection[str], what: str) -> str:
    """Returns text that is one of the choices."""
    text = read_text(node, what)
    if text not in choices:
        raise PlacedError(node.mark, f"unknown {what} {quoted(text)}{suggestion(text, choices)}")
    return text


def read_list(node: Node, wanted: str) -> Sequence[Node]:
    """Returns the items of a list, which may be empty."""
    if not isinstance(node, ListNode):
        raise PlacedError(node.mark, f"expected {wanted}, found {describe(node)}")
    return node.items


def read_filled_list(node: Node, wanted: str) -> Sequence[Node]:
    """Returns the items of a list that is not empty."""
    items = read_list(node, wanted)
    if not items:
        raise PlacedError(node.mark, f"expected {wanted}, found an empty list")
    return items


def read_map(node: Node, wanted: str) -> MapNode:
    """Returns the node if it is a mapping."""
    if not isinstance(node, MapNode):
        raise PlacedError(node.mark, f"expected {wanted}, found {describe(node)}")
    return node


def read_members(
    node: Node, what: str, required: Collection[str], optional: Collection[str], problems: Problems
) -> Mapping[str, Node] | None:
    """Returns the members of a mapping with a closed set of keys; None if a required one is missing.

    Unknown and missing keys are noted in problems; one that is only misspelt is not missing, too.
    """
    members = read_map(node, f"{what}, a mapping").members
    known = [*required, *optional]
    misspelt = set()
    for key in members:
        if key not in known:
            mark = read_map(node, what).keys[key].mark
            # A key that is there already is not what was meant.
            close = nearest(key, [name for name in known if name not in members])
            misspelt.add(close)
            hint = f"; nearest is {quoted(close)}" if close else f"; known: {', '.join(known)}"
            problems.add(mark, f"unknown key {quoted(key)} in {what}{hint}")
    missing = [key for key in required if key not in members]
    if untold := [key for key in missing if key not in misspelt]:
        problems.add(node.mark, f"{what} needs {' and '.join(map(quoted, untold))}")
    if missing:
        return None
    return members


def entry_kind(node: Node, kinds: Sequence[str], others: Collection[str], what: str) -> str:
    """Returns the one key of an entry that says what it is; `others` are keys that may stand beside it.

    Raises:
        PlacedError: there is none, or more than one.
    """
    table = read_map(node, f"{what}, a mapping")
    found = [kind for kind in kinds if kind in table.members]
    if len(found) == 1:
        return found[0]
    if found:
        both = " and ".join(map(quoted, found))
        raise PlacedError(node.mark, f"{both} cannot stand in one entry; write one block inside the other")
    for key, child in table.keys.items():
        if key not in others and (close := nearest(key, kinds)) is not None:
            raise PlacedError(child.mark, f"unknown key {quoted(key)} in {what}; nearest is {quoted(close)}")
    raise PlacedError(node.mark, f"{what} needs one of the keys {', '.join(kinds)}")


def read_named(node: Node, what: str, problems: Problems) -> dict[str, Node]:
    """Returns the members of a mapping whose keys are identifiers; other keys are noted and left out."""
    named = {}
    table = read_map(node, f"a mapping of {what}s")
    for key, value in table.members.items():
        if IDENTIFIER.fullmatch(key):
            named[key] = value
        else:
            problems.add(
                table.keys[key].mark,
                f"{quoted(key)} cannot be the name of a {what}; use letters, digits, - and _, no digit first",
            )
    return named


def read_free(node: Node, problems: Problems, text: Callable[[ScalarNode], Any]) -> Any:
    """Returns the Python value of free-form YAML: mappings, lists, text, numbers, booleans, null.

    `text` reads a plain scalar that YAML takes for text; quoted text is returned as it stands. Ambiguous
    scalars are noted in problems and stand as None.
    """
    if isinstance(node, ListNode):
        return [read_free(item, problems, text) for item in node.items]
    if isinstance(node, MapNode):
        return {key: read_free(value, problems, text) for key, value in node.members.items()}
    return problems.attempt(_free_scalar, node, text)


def _free_scalar(scalar: ScalarNode, text: Callable[[ScalarNode], Any]) -> Any:
    if not scalar.plain:
        return scalar.text
    if scalar.text in ("true", "false"):
        return scalar.text == "true"
    if scalar.text == "null":
        return None
    if _INTEGER.fullmatch(scalar.text):
        return read_integer(scalar)
    if _NUMBER.fullmatch(scalar.text):
        return read_number(scalar)
    reading = yaml_reading(scalar.text)
    if reading is None:
        return text(scalar)
    raise PlacedError(
        scalar.mark,
        f"{describe(scalar)}: YAML reads {reading}; write a plain decimal, true, false or null, or quote it for text",
    )
