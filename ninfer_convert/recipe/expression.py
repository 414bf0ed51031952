"""What a value is made of: the closed set of expression nodes a recipe may use, as frozen data.

Owns the nodes and how one is written in words. Refuses to know YAML (`recipe`), shapes, dtypes and bytes
(`transform`).

Source: recipe.md, duties 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A place in a recipe file; line and column count from 1.

    `end_column`, where it is known, is just after the text that stands there, on the same line.
    """

    file: str
    line: int
    column: int
    end_column: int | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a source checkpoint, by the name the recipe uses (before prefix rules)."""

    source: str
    name: str
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True, slots=True)
class Module:
    """An already encoded weight: the tensors `name.weight_packed`, `name.weight_scale` and so on.

    `dialect` is `compressed-tensors` (a word copy) or `modelopt` (a named conversion: its global scale is a
    multiplier and becomes a divisor by an exact binary32 reciprocal).
    """

    source: str
    name: str
    dialect: str
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        text = f"{self.source}:{self.name}"
        return text if self.dialect == "compressed-tensors" else f"{self.dialect}({text})"


@dataclass(frozen=True, slots=True)
class Slice:
    """Coordinates `[begin, end)` of one axis."""

    of: Expression
    axis: int
    begin: int
    end: int
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        axis = f", axis {self.axis}" if self.axis else ""
        return f"slice({self.of}, [{self.begin}, {self.end}){axis})"


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows `[begin, end)` of every block of `block` rows along axis 0, in order."""

    of: Expression
    block: int
    begin: int
    end: int
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"block_rows({self.of}, block {self.block}, [{self.begin}, {self.end}))"


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in C order under another shape."""

    of: Expression
    to: tuple[int, ...]
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"reshape({self.of}, {list(self.to)})"


@dataclass(frozen=True, slots=True)
class Transpose:
    """Axes permuted: axis i of the result is axis `axes[i]` of the operand."""

    of: Expression
    axes: tuple[int, ...]
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"transpose({self.of}, {list(self.axes)})"


@dataclass(frozen=True, slots=True)
class Concat:
    """Operands joined along one axis, in order."""

    of: tuple[Expression, ...]
    axis: int
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        axis = f", axis {self.axis}" if self.axis else ""
        return f"concat({', '.join(map(str, self.of))}{axis})"


@dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype under a named rule: `exact`, `nearest-even` or `checked`.

    `exact` widens BF16 or F16 to FP32; `nearest-even` rounds F32 or F16 to BF16 and fails on overflow;
    `checked` takes any integer dtype, or floats that are integers, to I32 and fails outside its range.
    """

    of: Expression
    to: str
    rule: str
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"cast({self.of}, {self.to}, {self.rule})"


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows of axis 0 chosen by a vector of integers, in its order."""

    of: Expression
    ids: Expression
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"gather({self.of}, {self.ids})"


@dataclass(frozen=True, slots=True)
class Same:
    """Operands that must be bit-identical; the value is the first one's."""

    of: tuple[Expression, ...]
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"same({', '.join(map(str, self.of))})"


@dataclass(frozen=True, slots=True)
class Tied:
    """An output head that may be tied: `head` where the config says untied, else `embedding`.

    Where the config says tied and both exist they must be bit-identical.
    """

    head: Tensor
    embedding: Tensor
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"tied({self.head}, {self.embedding})"


@dataclass(frozen=True, slots=True)
class Reciprocal:
    """`round_f32(1 / x)` of one positive finite F32 scalar: a ModelOpt multiplier taken as a divisor."""

    of: Expression
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"reciprocal({self.of})"


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The frequency shortlist: `take` distinct ids out of `[0, candidates)`, an I32 vector.

    `counts` names an auxiliary input (raw little-endian I64 rows; row 0 is the total); `special` is the
    tokenizer config in the directory of `source` whose special added tokens are always kept.

    Source: targets/qwen3.6-27b.md, "Shortlist".
    """

    counts: str
    candidates: int
    take: int
    special: str
    source: str
    mark: Mark = field(compare=False)

    def __str__(self) -> str:
        return f"shortlist({self.counts}, {self.candidates} candidates, take {self.take})"


Leaf = Tensor | Module | Shortlist
Expression = Leaf | Slice | BlockRows | Reshape | Transpose | Concat | Cast | Gather | Same | Tied | Reciprocal


def operands(expression: Expression) -> tuple[Expression, ...]:
    """Returns the direct operands of a node, in order; none for a leaf."""
    match expression:
        case Tensor() | Module() | Shortlist():
            return ()
        case Concat() | Same():
            return expression.of
        case Tied():
            return (expression.head, expression.embedding)
        case Gather():
            return (expression.of, expression.ids)
        case _:
            return (expression.of,)


def leaves(expression: Expression) -> Iterator[Leaf]:
    """Yields the leaves of an expression from left to right."""
    if isinstance(expression, (Tensor, Module, Shortlist)):
        yield expression
    else:
        for operand in operands(expression):
            yield from leaves(operand)
