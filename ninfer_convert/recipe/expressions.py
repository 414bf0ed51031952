"""YAML nodes to expressions: what a value, or a copy of encoded words, is made of.

Owns the spelling of the expression language and its limits. Refuses to know shapes and dtypes of tensors
(`transform`).

Source: recipe.md, duty 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from ninfer_convert.layout import MAX_RANK
from ninfer_convert.recipe.expression import (
    BlockRows,
    Cast,
    Concat,
    Expression,
    Gather,
    Mark,
    Module,
    Reciprocal,
    Reshape,
    Same,
    Shortlist,
    Slice,
    Tensor,
    Tied,
    Transpose,
)
from ninfer_convert.recipe.problems import PlacedError, Problems, ReportedError, nearest, quoted, suggestion
from ninfer_convert.recipe.scalars import (
    IDENTIFIER,
    read_choice,
    read_filled_list,
    read_list,
    read_members,
)
from ninfer_convert.recipe.scope import Scope, read_at_least, read_file, read_shape
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode

MAX_DEPTH = 32
MAX_NODES = 4096
"""Nodes of one expression, named values written out."""

MAX_TOTAL_NODES = 250_000
"""Nodes of all expressions of a recipe."""

Mode = Literal["value", "words", "either"]
"""What an expression is read as. `either` is for a named value that nothing uses: it must be good for something."""

CAST_RULES: Mapping[str, str] = MappingProxyType({"exact": "FP32", "nearest-even": "BF16", "checked": "I32"})
"""The rules of a cast, each with the only dtype it produces."""

_WORD_MOVES = ("slice", "block_rows", "concat", "gather", "same", "modelopt")


class Read(NamedTuple):
    """An expression with what the limits need to know of it."""

    expression: Expression
    nodes: int
    depth: int


class ExpressionReader:
    """Reads expressions of one recipe; every problem is noted, the result is then None."""

    def __init__(self, sources: Sequence[str], inputs: Sequence[str], problems: Problems) -> None:
        self._sources = sources
        self._inputs = inputs
        self._problems = problems
        self._total = 0
        self._depth = 0
        self._moves: Mapping[str, Callable[[Node, Scope, Mode, Mark], Read]] = {
            "slice": self._slice,
            "block_rows": self._block_rows,
            "reshape": self._reshape,
            "transpose": self._transpose,
            "concat": self._concat,
            "cast": self._cast,
            "gather": self._gather,
            "same": self._same,
            "tied": self._tied,
            "reciprocal": self._reciprocal,
            "shortlist": self._shortlist,
            "tensor": self._tensor,
            "modelopt": self._modelopt,
        }

    def read(self, node: Node, scope: Scope, mode: Mode) -> Expression | None:
        """Returns the expression a node describes, or None after noting what is wrong with it."""
        found = self._problems.attempt(self._read, node, scope, mode)
        if found is None:
            return None
        self._total += found.nodes
        if self._total > MAX_TOTAL_NODES:
            self._problems.stop(node.mark, f"all expressions together have more than {MAX_TOTAL_NODES} nodes")
        return found.expression

    def check_unused(self, scope: Scope) -> None:
        """Notes what is wrong with the named values of a block that nothing has used."""
        for value in scope.values.values():
            if not value.results:
                self._problems.attempt(self._read, value.node, value.scope, "either")

    def source(self, node: Node, scope: Scope) -> str:
        """Returns the name of a declared source."""
        return self._declared(node, scope, self._sources, "source")

    def input(self, node: Node, scope: Scope) -> str:
        """Returns the name of a declared auxiliary input."""
        return self._declared(node, scope, self._inputs, "input")

    def default_source(self, mark: Mark) -> str:
        """Returns the source of a tensor that is named without one."""
        if not self._sources:
            raise ReportedError(mark)
        return self._sources[0]

    def _declared(self, node: Node, scope: Scope, names: Sequence[str], what: str) -> str:
        name = scope.text(node, f"the name of one of the {what}s")
        if name not in names:
            raise PlacedError(node.mark, f"unknown {what} {quoted(name)}{suggestion(name, names)}")
        return name

    def _read(self, node: Node, scope: Scope, mode: Mode) -> Read:
        # A named value is a level of reading and none of the expression.
        if self._depth >= 2 * MAX_DEPTH:
            raise PlacedError(node.mark, f"the expression is nested more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            if isinstance(node, ScalarNode):
                found = self._leaf(node, scope, mode)
            else:
                found = self._move(node, scope, mode)
        finally:
            self._depth -= 1
        if found.nodes > MAX_NODES:
            raise PlacedError(node.mark, f"the expression has more than {MAX_NODES} nodes")
        if found.depth > MAX_DEPTH:
            raise PlacedError(node.mark, f"the expression is nested more than {MAX_DEPTH} deep")
        return found

    def _leaf(self, node: ScalarNode, scope: Scope, mode: Mode) -> Read:
        if node.text.startswith("$"):
            return self._named(node, scope, mode)
        if scope.value(node.text) is not None:
            raise PlacedError(
                node.mark, f"{quoted(node.text)} is a named value; write ${node.text}, or {{tensor: {{name: ...}}}}"
            )
        source, name = self._sourced(node, scope, "a tensor" if mode != "words" else "a module")
        if mode == "words":
            return Read(Module(source, name, "compressed-tensors", node.mark), 1, 1)
        return Read(Tensor(source, name, node.mark), 1, 1)

    def _sourced(self, node: Node, scope: Scope, wanted: str) -> tuple[str, str]:
        text = scope.text(node, wanted)
        head, colon, tail = text.partition(":")
        if colon and head in self._sources:
            if not tail:
                raise PlacedError(node.mark, f"{quoted(text)} names a source and no tensor")
            return head, tail
        close = nearest(head, self._sources, 0.75) if colon else None
        if close is not None:
            raise PlacedError(
                node.mark,
                f"unknown source {quoted(head)}; nearest is {quoted(close)} "
                "(a tensor name with a colon is written {tensor: {name: ...}})",
            )
        return self.default_source(node.mark), text

    def _named(self, node: ScalarNode, scope: Scope, mode: Mode) -> Read:
        name = node.text[1:]
        if not IDENTIFIER.fullmatch(name):
            raise PlacedError(
                node.mark,
                f"{quoted(node.text)} is no $name (a tensor name with $ is written {{tensor: {{name: ...}}}})",
            )
        value = scope.value(name)
        if value is None:
            names = (f"${known}" for known in scope.value_names())
            raise PlacedError(node.mark, f"no value is named {quoted(node.text)} here{suggestion(node.text, names)}")
        if value.busy:
            raise PlacedError(node.mark, f"value {quoted(node.text)} is made of itself")
        if mode not in value.results:
            value.busy = True
            try:
                value.results[mode] = self._problems.attempt(self._read, value.node, value.scope, mode)
            finally:
                value.busy = False
        found: Read | None = value.results[mode]
        if found is None:
            raise ReportedError(node.mark)
        return found

    def _move(self, node: ListNode | MapNode, scope: Scope, mode: Mode) -> Read:
        wanted = "an expression: a tensor name, $name or a mapping with one key"
        if isinstance(node, ListNode):
            raise PlacedError(node.mark, f"expected {wanted}, found a list (concat joins, same compares)")
        if len(node.members) != 1:
            raise PlacedError(node.mark, f"expected {wanted}, found a mapping with {len(node.members)} keys")
        ((key, operand),) = node.members.items()
        legal = _WORD_MOVES if mode == "words" else self._moves
        if key not in self._moves:
            raise PlacedError(node.keys[key].mark, f"unknown expression {quoted(key)}{suggestion(key, legal)}")
        if key not in legal:
            raise PlacedError(
                node.keys[key].mark,
                f"{quoted(key)} cannot be applied to encoded words; whole rows can be moved: {', '.join(_WORD_MOVES)}",
            )
        if key == "modelopt" and mode == "value":
            raise PlacedError(node.keys[key].mark, "'modelopt' makes words; it stands under 'words', not 'value'")
        return self._moves[key](operand, scope, mode, node.keys[key].mark)

    def _members(
        self, node: Node, what: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> Mapping[str, Node]:
        members = read_members(node, what, required, optional, self._problems)
        if members is None:
            raise ReportedError(node.mark)
        return members

    def _operand(self, node: Node, scope: Scope, mode: Mode) -> Read | None:
        return self._problems.attempt(self._read, node, scope, mode)

    def _integer(self, node: Node, scope: Scope, least: int) -> int | None:
        return self._problems.attempt(read_at_least, node, scope, least)

    def _span(self, node: Node, scope: Scope) -> tuple[int, int] | None:
        items = read_list(node, "a span [begin, end)")
        if len(items) != 2:
            raise PlacedError(node.mark, f"expected a span of two integers [begin, end), found {len(items)} items")
        begin, end = self._integer(items[0], scope, 0), self._integer(items[1], scope, 0)
        if begin is None or end is None:
            return None
        if begin >= end:
            raise PlacedError(node.mark, f"the span [{begin}, {end}) is empty; end must be above begin")
        return begin, end

    def _axis(self, members: Mapping[str, Node], scope: Scope, mode: Mode) -> int | None:
        if "axis" not in members:
            return 0
        axis = self._integer(members["axis"], scope, 0)
        if axis is not None and axis >= MAX_RANK:
            raise PlacedError(members["axis"].mark, f"axis {axis} is out of range; at most {MAX_RANK - 1}")
        if axis and mode == "words":
            raise PlacedError(members["axis"].mark, "of encoded words only whole rows (axis 0) can be moved")
        return axis

    def _slice(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "slice", ("of", "span"), ("axis",))
        of = self._operand(members["of"], scope, mode)
        span = self._problems.attempt(self._span, members["span"], scope)
        axis = self._problems.attempt(self._axis, members, scope, mode)
        if of is None or span is None or axis is None:
            raise ReportedError(mark)
        return _over(Slice(of.expression, axis, *span, mark), of)

    def _block_rows(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "block_rows", ("of", "block", "span"))
        of = self._operand(members["of"], scope, mode)
        block = self._integer(members["block"], scope, 1)
        span = self._problems.attempt(self._span, members["span"], scope)
        if of is None or span is None or block is None:
            raise ReportedError(mark)
        if span[1] > block:
            raise PlacedError(members["span"].mark, f"the span ends at {span[1]}, beyond a block of {block} rows")
        return _over(BlockRows(of.expression, block, *span, mark), of)

    def _reshape(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "reshape", ("of", "to"))
        of = self._operand(members["of"], scope, mode)
        to = read_shape(members["to"], scope, self._problems)
        if of is None or to is None:
            raise ReportedError(mark)
        return _over(Reshape(of.expression, to, mark), of)

    def _transpose(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "transpose", ("of",), ("axes",))
        of = self._operand(members["of"], scope, mode)
        axes: list[int | None] = [1, 0]
        if "axes" in members:
            axes = [self._integer(item, scope, 0) for item in read_list(members["axes"], "a list of axes")]
        known = tuple(axis for axis in axes if axis is not None)
        if of is None or len(known) != len(axes):
            raise ReportedError(mark)
        if not known or sorted(known) != list(range(len(known))) or len(known) > MAX_RANK:
            wanted = f"each axis from 0 to {len(known) - 1} once" if known else "at least one axis"
            raise PlacedError(members["axes"].mark, f"axes {list(known)} are no permutation; name {wanted}")
        return _over(Transpose(of.expression, known, mark), of)

    def _concat(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members: Mapping[str, Node] = {"of": node}
        if not isinstance(node, ListNode):
            members = self._members(node, "concat", ("of",), ("axis",))
        of = self._several(members["of"], scope, mode, "concat")
        axis = self._problems.attempt(self._axis, members, scope, mode)
        if of is None or axis is None:
            raise ReportedError(mark)
        return _over(Concat(tuple(read.expression for read in of), axis, mark), *of)

    def _same(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        of = self._several(node, scope, mode, "same")
        if of is None:
            raise ReportedError(mark)
        return _over(Same(tuple(read.expression for read in of), mark), *of)

    def _several(self, node: Node, scope: Scope, mode: Mode, what: str) -> list[Read] | None:
        items = read_filled_list(node, f"a list of operands of {what}")
        if len(items) < 2:
            raise PlacedError(node.mark, f"{what} has one operand; it needs two or more")
        found = [self._operand(item, scope, mode) for item in items]
        present = [read for read in found if read is not None]
        return present if len(present) == len(found) else None

    def _cast(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "cast", ("of", "to", "rule"))
        of = self._operand(members["of"], scope, mode)
        to = self._problems.attempt(read_choice, members["to"], tuple(CAST_RULES.values()), "dtype of a cast")
        rule = self._problems.attempt(read_choice, members["rule"], tuple(CAST_RULES), "rule of a cast")
        if of is None or to is None or rule is None:
            raise ReportedError(mark)
        if CAST_RULES[rule] != to:
            raise PlacedError(members["rule"].mark, f"rule {rule} casts to {CAST_RULES[rule]}, not to {to}")
        return _over(Cast(of.expression, to, rule, mark), of)

    def _gather(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "gather", ("of", "ids"))
        of = self._operand(members["of"], scope, mode)
        ids = self._operand(members["ids"], scope, "value")
        if of is None or ids is None:
            raise ReportedError(mark)
        return _over(Gather(of.expression, ids.expression, mark), of, ids)

    def _tied(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "tied", ("head", "embedding"))
        head = self._operand(members["head"], scope, mode)
        embedding = self._operand(members["embedding"], scope, mode)
        if head is None or embedding is None:
            raise ReportedError(mark)
        if not isinstance(head.expression, Tensor):
            raise PlacedError(members["head"].mark, "'head' of tied must be a tensor")
        if not isinstance(embedding.expression, Tensor):
            raise PlacedError(members["embedding"].mark, "'embedding' of tied must be a tensor")
        return Read(Tied(head.expression, embedding.expression, mark), 3, 2)

    def _reciprocal(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        of = self._read(node, scope, mode)
        return _over(Reciprocal(of.expression, mark), of)

    def _shortlist(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        attempt = self._problems.attempt
        members = self._members(node, "shortlist", ("counts", "candidates", "take", "special"), ("source",))
        counts = attempt(self.input, members["counts"], scope)
        candidates = self._integer(members["candidates"], scope, 1)
        take = self._integer(members["take"], scope, 1)
        special = attempt(read_file, members["special"], scope)
        source = attempt(self.source, members["source"], scope) if "source" in members else self.default_source(mark)
        if counts is None or candidates is None or take is None or special is None or source is None:
            raise ReportedError(mark)
        if take > candidates:
            raise PlacedError(members["take"].mark, f"take is {take}, more than the {candidates} candidates")
        return Read(Shortlist(counts, candidates, take, special, source, mark), 1, 1)

    def _tensor(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        members = self._members(node, "tensor", ("name",), ("source",))
        name = self._problems.attempt(scope.text, members["name"], "the name of a tensor")
        if "source" in members:
            source = self._problems.attempt(self.source, members["source"], scope)
        else:
            source = self.default_source(mark)
        if name is None or source is None:
            raise ReportedError(mark)
        return Read(Tensor(source, name, mark), 1, 1)

    def _modelopt(self, node: Node, scope: Scope, mode: Mode, mark: Mark) -> Read:
        source, name = self._sourced(node, scope, "a module")
        return Read(Module(source, name, "modelopt", mark), 1, 1)


def _over(expression: Expression, *operands: Read) -> Read:
    nodes = 1 + sum(operand.nodes for operand in operands)
    return Read(expression, nodes, 1 + max(operand.depth for operand in operands))
