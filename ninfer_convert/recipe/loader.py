"""A recipe file, by path or shipped name, to a frozen `Recipe`; every problem is reported at once.

Owns the order of work and the checks across sections: unique names, evidence for every lossy object, limits.
Refuses to know tensor data and where checkpoints lie.

Source: recipe.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_convert.recipe.blocks import MAX_ENTRIES, BlockReader
from ninfer_convert.recipe.changes import ChangeReader, Watcher, without_pins
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.expression import Cast, Expression, Mark, operands
from ninfer_convert.recipe.expressions import ExpressionReader
from ninfer_convert.recipe.files import Document, chain_digest, find_recipe, locate, read_chain, shipped_recipes
from ninfer_convert.recipe.globs import Globs, too_many
from ninfer_convert.recipe.model import ConditionSpec, Evidence, ObjectSpec, Recipe, TensorSpec
from ninfer_convert.recipe.objects import ObjectReader
from ninfer_convert.recipe.problems import Problems, quoted, suggestion
from ninfer_convert.recipe.scalars import entry_kind, read_filled_list
from ninfer_convert.recipe.scope import IndexSets, Scope, read_names
from ninfer_convert.recipe.sections import SectionReader, merged_section
from ninfer_convert.recipe.yaml_nodes import MapNode, Node

__all__ = ["find_recipe", "load_recipe", "read_recipe", "shipped_recipes"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A recipe with what became known while it was read.

    `chain` has its file last and those it extends before it; `always_true` are the places of `when` conditions that
    held in every round.
    """

    recipe: Recipe
    chain: Sequence[Document]
    always_true: Sequence[Mark]


def load_recipe(path_or_name: str | os.PathLike[str]) -> Recipe:
    """Returns a recipe with its loops unrolled.

    Args:
        path_or_name: the path of a YAML file, or the name of a shipped recipe.

    Raises:
        WrongRecipeError: anything is wrong with the recipe; one message for each problem, sorted by place,
            each with file, line and column.
        RecipeError: there is no such recipe, or its file cannot be read.

    Source: recipe.md.
    """
    return read_recipe(path_or_name, Problems()).recipe


def read_recipe(
    path_or_name: str | os.PathLike[str], problems: Problems, watcher: Watcher | None = None
) -> Reading:
    """Returns a recipe as `load_recipe` does, with what is known of how it came about.

    `problems` is new, and holds the bytes of the files afterwards; `watcher` is told of every change.
    """
    chain = read_chain(locate(path_or_name), problems)
    assembly = _Assembly(chain, problems, watcher)
    recipe = assembly.recipe()
    problems.raise_if_any()
    if recipe is None:
        problems.stop(chain[-1].mark, "the recipe cannot be read")
    return Reading(recipe, chain, assembly.blocks.always_true())


class _Assembly:
    """The readers of one recipe, made once its names, sets and sources are known."""

    def __init__(self, chain: Sequence[Document], problems: Problems, watcher: Watcher | None) -> None:
        self._chain = chain
        self._problems = problems
        names = Scope.outermost(read_names(merged_section(chain, "names", "placeholder", problems), problems))
        sets = IndexSets(merged_section(chain, "sets", "set", problems), names, problems)
        self._scope = names.inner({}, merged_section(chain, "values", "value", problems))
        self.blocks = BlockReader(sets, problems)
        self._globs = Globs()
        self._require_size()
        self._sections = SectionReader(chain, names, self.blocks, problems)
        self._sources = self._sections.sources()
        self._inputs = self._sections.inputs()
        self._expressions = ExpressionReader(list(self._sources), list(self._inputs), problems)
        self._objects = ObjectReader(self._expressions, self.blocks, problems)
        self._changes = ChangeReader(self._objects, problems, self._globs, watcher)

    def recipe(self) -> Recipe | None:
        """Returns the recipe, or None after noting why there is none."""
        identity = self._sections.identity()
        objects = self._all_objects()
        conditions: list[ConditionSpec] = []
        for document in self._chain:
            if "conditions" in document.sections:
                self._conditions(document.sections["conditions"], self._scope, conditions)
        self._expressions.check_unused(self._scope)
        self.blocks.check_conditions()
        evidence = self._sections.evidence()
        self._require_unique(objects)
        self._require_evidence(objects, evidence)
        if identity is None:
            return None
        present = {spec.component for spec in objects}
        return Recipe(
            id=identity[0],
            model_id=identity[1],
            weights_id=identity[2],
            evidence=evidence or (),
            sources=self._sources,
            inputs=self._inputs,
            objects=tuple(objects),
            conditions=tuple(conditions),
            optional_components=frozenset(
                name for name, optional in self._objects.optional.items() if optional and name in present
            ),
            sha256=chain_digest(self._chain),
            path=self._chain[-1].path,
        )

    def _require_size(self) -> None:
        total = 0
        for document in self._chain:
            for section, body in (("objects", "objects"), ("conditions", "conditions"), ("ignore", "names")):
                if section in document.sections:
                    node = document.sections[section]
                    lists = node.members.values() if isinstance(node, MapNode) else (node,)
                    total += sum(self.blocks.count(entries, body) for entries in lists)
                    if total > MAX_ENTRIES:
                        text = f"with its loops unrolled the recipe has {total} entries; at most {MAX_ENTRIES}"
                        self._problems.stop(node.mark, text)

    def _all_objects(self) -> list[ObjectSpec]:
        objects: list[ObjectSpec] = []
        for document in self._chain:
            objects = without_pins(objects, self._sections.moved(document))
            if "change" in document.sections and "extends" in document.sections:
                objects = self._changes.apply(document.sections["change"], objects, self._scope)
                if not objects:
                    self._problems.add(document.sections["change"].mark, "the changes leave no object")
            if "objects" in document.sections:
                objects += self._objects.read(document.sections["objects"], self._scope)
        return objects

    def _conditions(self, node: Node, scope: Scope, found: list[ConditionSpec]) -> None:
        for entry in self._problems.attempt(read_filled_list, node, "a list of conditions") or ():
            self._problems.attempt(self._condition, entry, scope, found)

    def _condition(self, node: Node, scope: Scope, found: list[ConditionSpec]) -> None:
        kind = entry_kind(node, ("same", "for", "when"), ("values", "conditions"), "a condition")
        if kind == "same":
            value = self._expressions.read(node, scope, "value")
            if value is not None:
                found.append(ConditionSpec(value, node.mark))
            return
        for block in self.blocks.read(node, kind, "conditions", scope):
            self._conditions(block.body, block.scope, found)
            self._expressions.check_unused(block.scope)

    def _require_unique(self, objects: Sequence[ObjectSpec]) -> None:
        marks: dict[str, Mark] = {}
        for spec in objects:
            if spec.name not in marks:
                marks[spec.name] = spec.mark
                continue
            first = marks[spec.name]
            self._problems.next_turn()
            if first == spec.mark:
                text = f"object {quoted(spec.name)} is made again in another round of a loop; its name lacks a variable"
            else:
                text = f"object {quoted(spec.name)} is there already, at {first}"
            self._problems.add(spec.mark, text)

    def _require_evidence(self, objects: Sequence[ObjectSpec], evidence: tuple[Evidence, ...] | None) -> None:
        names = dict.fromkeys(spec.name for spec in objects)
        # What a base cites may speak of objects that a change has dropped.
        own = [entry for entry in evidence or () if entry.mark.file == self._chain[-1].mark.file]
        covered: set[str] = set()
        for entry in (evidence or ()) if names else ():
            for glob, mark in entry.objects:
                found = self._globs.matching(glob, names)
                if found is None:
                    self._problems.stop(mark, too_many())
                if not found and entry in own:
                    self._problems.add(mark, f"{quoted(glob)} matches no object{suggestion(glob, names, listed=0)}")
                covered.update(found)
        if evidence == ():
            return
        lossy = [spec for spec in objects if isinstance(spec, TensorSpec) and is_lossy(spec)]
        if evidence is None and lossy:
            if any(document.has_unknown for document in self._chain):
                return
            lose = f"{counted(len(lossy), 'object')} {'loses' if len(lossy) == 1 else 'lose'} precision"
            text = f"{lose}, {quoted(lossy[0].name)} first, and 'evidence' is missing"
            self._problems.add(self._chain[-1].mark, f"{text}; cite it, or write 'evidence: none' for a demonstration")
            return
        for spec in lossy:
            if spec.name not in covered:
                self._problems.next_turn()
                self._problems.add(spec.mark, f"object {quoted(spec.name)} loses precision and no evidence covers it")


def is_lossy(spec: TensorSpec) -> bool:
    """Answers whether making the stored words from the source may lose precision."""
    return spec.encoder is not None or _rounds(spec.value)


def _rounds(expression: Expression) -> bool:
    if isinstance(expression, Cast) and expression.rule == "nearest-even":
        return True
    return any(_rounds(operand) for operand in operands(expression))
