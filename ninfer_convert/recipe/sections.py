"""The sections of a recipe around its objects: identity, sources, inputs, evidence, ignored tensors.

Owns what each section may say and how an extending recipe overrides it. Refuses to know objects
(`recipe_objects`).

Source: recipe.md, duties 1, 2, 6 and 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer_convert.recipe.blocks import BlockReader
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.files import Document
from ninfer_convert.recipe.model import Evidence, InputSpec, SourceSpec
from ninfer_convert.recipe.problems import PlacedError, Problems, quoted, suggestion
from ninfer_convert.recipe.scalars import (
    entry_kind,
    read_choice,
    read_filled_list,
    read_free,
    read_hex,
    read_map,
    read_members,
    read_named,
    read_prose,
)
from ninfer_convert.recipe.scope import Scope
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode

SAFETENSORS_DTYPES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64"),
    *("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"),
)
"""Every dtype that a safetensors header can name."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(slots=True)
class _Source:
    """The members of one source as nodes, the inherited ones included; `config` from base to extension."""

    mark: Mark
    members: dict[str, Node] = field(default_factory=dict)
    config: list[Node] = field(default_factory=list)
    ignore: dict[tuple[str, Mark], None] = field(default_factory=dict)


def merged_section(chain: Sequence[Document], section: str, what: str, problems: Problems) -> dict[str, Node]:
    """Returns the members of a section of named things; an override keeps the place of what it overrides."""
    merged: dict[str, Node] = {}
    for document in chain:
        if section in document.sections:
            merged |= problems.attempt(read_named, document.sections[section], what, problems) or {}
    return merged


class SectionReader:
    """Reads the sections of one recipe and of those it extends; every problem is noted."""

    def __init__(self, chain: Sequence[Document], scope: Scope, blocks: BlockReader, problems: Problems) -> None:
        self._chain = chain
        self._scope = scope
        self._blocks = blocks
        self._problems = problems
        self._moved: dict[str, dict[str, Mark]] = {}

    def identity(self) -> tuple[str, str, str] | None:
        """Returns recipe id, model_id and weights_id; None if one of them is missing or wrong."""
        members: dict[str, Node] = {}
        for document in self._chain:
            if "artifact" in document.sections:
                node = document.sections["artifact"]
                required = () if "extends" in document.sections else ("model_id", "weights_id")
                optional = ("model_id", "weights_id") if not required else ()
                found = self._problems.attempt(read_members, node, "artifact", required, optional, self._problems)
                members |= found or {}
        if "id" in self._chain[-1].sections:
            members["id"] = self._chain[-1].sections["id"]
        keys = ("id", "model_id", "weights_id")
        texts = [self._problems.attempt(self._scope.text, members[key], key) for key in keys if key in members]
        present = [text for text in texts if text is not None]
        return (present[0], present[1], present[2]) if len(present) == 3 else None

    def inputs(self) -> dict[str, InputSpec]:
        """Returns the auxiliary inputs; an override takes nothing over from what it overrides."""
        found: dict[str, InputSpec] = {}
        for document in self._chain:
            for name, node in self._named(document, "inputs", "input"):
                members = self._problems.attempt(read_members, node, "an input", (), ("sha256",), self._problems)
                sha256 = self._hex((members or {}).get("sha256"), 64, "a SHA-256")
                found[name] = InputSpec(name, sha256, node.mark)
        return found

    def sources(self) -> dict[str, SourceSpec]:
        """Returns the sources, the default one first, each with what it need not use."""
        merged: dict[str, _Source] = {}
        for document in self._chain:
            named = self._named(document, "sources", "source")
            moved = self._moved[document.path] = {}
            for name, node in named:
                if self._merge(merged.setdefault(name, _Source(node.mark)), node):
                    moved[name] = node.mark
            if "ignore" in document.sections:
                self._problems.attempt(self._ignore, document.sections["ignore"], merged)
        if not merged and any("sources" in document.sections for document in self._chain):
            node = next(document.sections["sources"] for document in self._chain if "sources" in document.sections)
            self._problems.add(node.mark, "a recipe needs at least one source")
        return {name: self._source(name, source) for name, source in merged.items()}

    def moved(self, document: Document) -> Mapping[str, Mark]:
        """Returns the sources that this recipe of the chain took to another repository, each with the place where.

        `sources` has to be called first.
        """
        return self._moved[document.path]

    def evidence(self) -> tuple[Evidence, ...] | None:
        """Returns what the recipe cites; nothing for `none`, None if it does not speak of evidence at all.

        An entry that is wrong, which has been noted, stands as evidence for everything.
        """
        found: list[Evidence] | None = None
        for document in self._chain:
            node = document.sections.get("evidence")
            if node is None:
                continue
            if isinstance(node, ScalarNode) and node.text == "none":
                found = []
                continue
            wanted = "'none' or a list of evidence"
            for item in self._problems.attempt(read_filled_list, node, wanted) or (node,):
                entry = self._problems.attempt(self._evidence, item) if item is not node else None
                found = [*(found or ()), entry or Evidence((("*", item.mark),), "", item.mark)]
        return None if found is None else tuple(found)

    def _evidence(self, node: Node) -> Evidence | None:
        members = read_members(node, "evidence", ("text",), ("objects",), self._problems)
        if members is None:
            return None
        globs: tuple[tuple[str, Mark], ...] = (("*", node.mark),)
        if "objects" in members:
            listed = members["objects"]
            items = read_filled_list(listed, "globs of object names") if isinstance(listed, ListNode) else (listed,)
            found = [self._problems.attempt(self._scope.text, item, "a glob of object names") for item in items]
            globs = tuple((glob or "*", item.mark) for glob, item in zip(found, items, strict=True))
        return Evidence(globs, read_prose(members["text"]), node.mark)

    def _named(self, document: Document, section: str, what: str) -> list[tuple[str, Node]]:
        if section not in document.sections:
            return []
        named = self._problems.attempt(read_named, document.sections[section], what, self._problems)
        return list((named or {}).items())

    def _hex(self, node: Node | None, digits: int, what: str) -> str | None:
        return None if node is None else self._problems.attempt(read_hex, node, digits, what)

    def _merge(self, source: _Source, node: Node) -> bool:
        """Overrides members of a source; answers whether it moves to another repository."""
        keys = ("repo", "revision", "dtype", "config", "prefix")
        members = self._problems.attempt(read_members, node, "a source", (), keys, self._problems)
        if members is None:
            return False
        moves = "repo" in members and self._repo(members) != self._repo(source.members)
        if moves:
            # A commit belongs to its repository.
            source.members.pop("revision", None)
        source.members |= members
        if "config" in members:
            source.config.append(members["config"])
        return moves

    def _repo(self, members: Mapping[str, Node]) -> str | None:
        return self._problems.attempt(self._repository, members["repo"]) if "repo" in members else None

    def _ignore(self, node: Node, sources: Mapping[str, _Source]) -> None:
        if isinstance(node, ListNode):
            if len(sources) > 1:
                raise PlacedError(node.mark, "with several sources, 'ignore' is a mapping from source to list")
            for source in sources.values():
                self._globs(node, self._scope, source.ignore)
            return
        table = read_map(node, "a list of globs, or a mapping from source to list")
        for name, globs in table.members.items():
            if name in sources:
                self._globs(globs, self._scope, sources[name].ignore)
            else:
                self._problems.add(table.keys[name].mark, f"unknown source {quoted(name)}{suggestion(name, sources)}")

    def _globs(self, node: Node, scope: Scope, found: dict[tuple[str, Mark], None]) -> None:
        for item in self._problems.attempt(read_filled_list, node, "a list of globs of tensor names") or ():
            self._problems.attempt(self._glob, item, scope, found)

    def _glob(self, node: Node, scope: Scope, found: dict[tuple[str, Mark], None]) -> None:
        if isinstance(node, MapNode):
            kind = entry_kind(node, ("for", "when"), ("names",), "a block of ignored names")
            for block in self._blocks.read(node, kind, "names", scope, optional=()):
                self._globs(block.body, block.scope, found)
            return
        glob = scope.text(node, "a glob of tensor names")
        if scope.loops and (glob, node.mark) in found:
            raise PlacedError(
                node.mark, f"{quoted(glob)} is listed again in another round of a loop; it lacks a variable"
            )
        found[glob, node.mark] = None

    def _source(self, name: str, source: _Source) -> SourceSpec:
        attempt = self._problems.attempt
        members = source.members
        repo = self._repo(members)
        if "revision" in members and "repo" not in members:
            self._problems.add(members["revision"].mark, "'revision' needs 'repo'")
        config: dict[str, Any] = {}
        for node in source.config:
            config = _merged_config(config, attempt(self._config, node) or {})
        return SourceSpec(
            name=name,
            repo=repo,
            revision=self._hex(members.get("revision"), 40, "a commit"),
            dtypes=(attempt(self._dtypes, members["dtype"]) or ()) if "dtype" in members else (),
            config=config,
            prefixes=(attempt(self._prefixes, members["prefix"]) or {}) if "prefix" in members else {},
            ignore=tuple(source.ignore),
            mark=source.mark,
        )

    def _repository(self, node: Node) -> str:
        repo = self._scope.text(node, "a repository such as org/name")
        if not _REPOSITORY.fullmatch(repo):
            raise PlacedError(node.mark, f"expected a repository such as org/name, found {quoted(repo)}")
        return repo

    def _config(self, node: Node) -> dict[str, Any]:
        read_map(node, "a mapping of config members")
        value: dict[str, Any] = read_free(node, self._problems, self._scope.free)
        return value

    def _dtypes(self, node: Node) -> tuple[str, ...]:
        items = read_filled_list(node, "a dtype or a list of dtypes") if not isinstance(node, ScalarNode) else (node,)
        found = [self._problems.attempt(read_choice, item, SAFETENSORS_DTYPES, "dtype") for item in items]
        for i, item in enumerate(items):
            if found[i] is not None and found[i] in found[:i]:
                self._problems.add(item.mark, f"dtype {found[i]} is listed twice")
        return tuple(dtype for dtype in found if dtype is not None)

    def _prefixes(self, node: Node) -> dict[str, str]:
        table = read_map(node, "a mapping from a beginning in the file to one in the recipe")
        found: dict[str, str] = {}
        for key, value in table.members.items():
            begins = self._problems.attempt(self._scope.literal, table.keys[key])
            becomes = self._problems.attempt(self._scope.literal, value)
            if begins in found:
                self._problems.add(table.keys[key].mark, f"prefix {quoted(key)} is given twice, placeholders filled in")
            elif begins is not None and becomes is not None:
                found[begins] = becomes
        return found


def _merged_config(inherited: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(inherited)
    for key, value in override.items():
        before: Any = merged.get(key)
        nested = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = _merged_config(before, value) if nested else value
    return merged


