"""Recipe files: finding one by path or shipped name, and following `extends`.

Owns where recipes lie and which keys a recipe has at its top. Refuses to know what the sections say
(`recipe_sections`, `recipe_loader`).

Source: recipe.md, duties 1 and 7; cli.md, RECIPE.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.errors import WRONG_PATH, OutputError, RecipeError, printable
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.problems import PlacedError, Problems, nearest, quoted
from ninfer_convert.recipe.scalars import read_integer, read_map, read_members, read_text
from ninfer_convert.recipe.yaml_nodes import MAX_FILE_BYTES, Node, parse_document

SCHEMA = 1
MAX_EXTENDS = 16
"""Files in one chain of `extends`."""

SUFFIXES = (".yaml", ".yml")

_EXAMPLES = "examples/"
"""How names begin that stand for nothing anybody could convert as it is: they are found, and not listed."""

_SECTIONS = ("artifact", "evidence", "sources", "inputs", "names", "sets", "values", "objects", "conditions", "ignore")


@dataclass(frozen=True, slots=True)
class Document:
    """One recipe file: its sections as nodes, and the SHA-256 of its bytes."""

    path: str
    mark: Mark
    sections: Mapping[str, Node]
    digest: bytes
    has_unknown: bool
    """Whether it has sections that no recipe has; one that seems to be missing may be among them."""


def recipes_directory() -> Path:
    """Returns where the shipped recipes lie: inside an installed package, else beside it in a working copy."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> list[str]:
    """Returns the names of the shipped recipes, sorted, such as `qwen3.6-27b/groupwise-int`; no examples."""
    return [name for name in _known_recipes() if not name.startswith(_EXAMPLES)]


def _known_recipes() -> list[str]:
    directory = recipes_directory()
    return sorted(path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Returns the file of a shipped recipe, or of an example of extending one.

    Raises:
        RecipeError: no shipped recipe has this name; the message has the nearest ones.
    """
    names = _known_recipes()
    if name in names:
        return recipes_directory() / f"{name}.yaml"
    near = [known for known in names if known.endswith(f"/{name}")] or [
        known for known in (nearest(name, names, 0.4),) if known is not None
    ]
    hint = f"; nearest is {' or '.join(map(quoted, near))}" if near else f"; shipped: {', '.join(shipped_recipes())}"
    raise RecipeError(f"no recipe file and no shipped recipe is named {quoted(name)}{hint}")


def locate(path_or_name: str | os.PathLike[str]) -> str:
    """Returns the path of a recipe given as a path or as the name of a shipped recipe."""
    text = os.fsdecode(path_or_name)
    if isinstance(path_or_name, os.PathLike) or text.endswith(SUFFIXES):
        return text
    if os.path.exists(text) and not os.path.isdir(text):
        return text
    try:
        return os.fspath(find_recipe(text))
    except RecipeError as error:
        if not os.path.isdir(text):
            raise
        directory = f"no shipped recipe is named {quoted(text)}, and here it is a directory"
        raise RecipeError(f"{directory}; give a recipe file, which `recipe init` drafts for a checkpoint") from error


def read_chain(path: str, problems: Problems) -> list[Document]:
    """Returns a recipe file and those it extends, the outermost base first.

    Raises:
        RecipeError: one of the files is not there or cannot be parsed, or extends itself.
        OutputError: one of the files cannot be read.
    """
    chain = [_read(path, _bytes(path), problems)]
    while (extends := chain[-1].sections.get("extends")) is not None:
        if len(chain) == MAX_EXTENDS:
            problems.stop(extends.mark, f"more than {MAX_EXTENDS} recipes extend each other")
        base = problems.attempt(_base_path, extends, chain[-1].path)
        if base is None:
            break
        paths = [document.path for document in chain]
        if os.path.realpath(base) in map(os.path.realpath, paths):
            names = " -> ".join(quoted(name) for name in [*paths, base])
            problems.stop(extends.mark, f"the recipe extends itself: {names}")
        data = problems.attempt(_base_bytes, base, extends.mark)
        if data is None:
            break
        chain.append(_read(base, data, problems))
    if chain[-1].sections.get("extends") is not None:
        problems.raise_if_any()
    return chain[::-1]


def chain_digest(chain: Sequence[Document]) -> str:
    """Returns the SHA-256 of a recipe, in hexadecimal.

    For a recipe on its own it is the digest of its file; for one that extends others it is the digest of the
    files' digests (32 bytes each), the recipe's own first.
    """
    if len(chain) == 1:
        return chain[0].digest.hex()
    return hashlib.sha256(b"".join(document.digest for document in reversed(chain))).hexdigest()


def _base_path(node: Node, extending: str) -> str:
    text = read_text(node, "a path or the name of a shipped recipe")
    if text.endswith(SUFFIXES):
        return os.path.normpath(os.path.join(os.path.dirname(extending), text))
    try:
        return os.fspath(find_recipe(text))
    except RecipeError as error:
        raise PlacedError(node.mark, f"{error} (a path ends in .yaml)") from None


def _base_bytes(path: str, mark: Mark) -> bytes:
    try:
        return _bytes(path)
    except RecipeError as error:
        raise PlacedError(mark, str(error)) from None


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, OSError) and error.errno not in WRONG_PATH:
            raise OutputError(f"{printable(path)}: the recipe cannot be read: {reason}") from None
        hint = ""
        if (name := os.path.splitext(path)[0]) in _known_recipes():
            hint = f" (the shipped recipe is named {quoted(name)})"
        raise RecipeError(f"{printable(path)}: the recipe cannot be read: {reason}{hint}") from None


def _read(path: str, data: bytes, problems: Problems) -> Document:
    problems.files[printable(path)] = data
    root = problems.attempt(parse_document, data, printable(path), problems)
    table = problems.attempt(read_map, root, "a recipe, a mapping") if root is not None else None
    if table is None:
        problems.raise_if_any()
        raise RecipeError(f"{printable(path)}: not a recipe")
    if "schema" in table.members:
        schema = problems.attempt(read_integer, table.members["schema"])
        if schema not in (None, SCHEMA):
            mark = table.members["schema"].mark
            problems.stop(mark, f"schema {schema} is not supported; this version reads schema {SCHEMA}")
    extending = "extends" in table.members
    required = ("schema", "id") if extending else ("schema", "id", "artifact", "sources", "objects")
    known = [section for section in _SECTIONS if section not in required]
    if "change" in table.members and not extending:
        problems.add(table.keys["change"].mark, "'change' needs 'extends': there is nothing inherited to change")
    optional = [*known, "extends", "change"]
    read_members(table, "a recipe", required, optional, problems)
    has_unknown = not table.members.keys() <= {*required, *optional}
    return Document(path, table.mark, table.members, hashlib.sha256(data).digest(), has_unknown)
