"""Binds expressions to checkpoints: names become tensors, shapes and dtypes are inferred and checked.

Owns the leaves: which tensors a name or a module means, and what they must be. What moves demand of their operands
is in `moves`. Refuses to know formats (`plan` matches a bound value to one) and YAML. Nothing is read here but
scalars, shortlist inputs and ids.

Source: recipe.md, duties 4 and 5; layouts.md, "Sources of already selected words".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.errors import PlanError, printable
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.divisors import positive_word, reciprocal, reciprocal_word
from ninfer_convert.plan.moves import block_rows, cast, gathered, identical, joined, reshaped, sliced, transposed
from ninfer_convert.plan.shortlist import shortlist
from ninfer_convert.plan.value import Reshaped, SourceTensor, Value, elements, source_tensors
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
    leaves,
)
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.header import shown
from ninfer_convert.source.quantization import quantization_methods

MAX_HINTS = 50
"""Missing tensors that are told with the names nearest to them: each costs a look at every name of the source."""

QUANTIZED_FIELDS = (
    *("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    *("weight_scale_2", "weight_scale_inv"),
)
DIVISOR_FIELDS = (".weight_global_scale", ".input_global_scale")
MULTIPLIER_FIELDS = (".weight_scale_2", ".input_scale")
NVFP4_GROUP = 16
class MissingError(PlanError):
    """A tensor is not in its source."""


class AbsentError(PlanError):
    """A tensor lies in a file that is not there, which the binder remembers, or an input that is not given."""


@dataclass(frozen=True, slots=True)
class Words:
    """An already encoded matrix: code rows and scale rows that move together.

    `codes` is uint8 [N, K/2] (NVFP4) or [N, K] (FP8); `scales` is F8_E4M3 [N, K/16] or BF16 [N, 1];
    `divisor` is the binary32 word d_w of an NVFP4 matrix.
    """

    format: str
    shape: tuple[int, int]
    codes: Value
    scales: Value
    divisor: int | None
    leaves: tuple[SourceTensor, ...]
    """Every tensor the words come from: codes, scales and divisors, module by module."""
    is_copy: bool
    """Whether every word is one of a source; a divisor made of a ModelOpt multiplier is not."""


class Binder:
    """Binds the expressions of one recipe and remembers which tensors they used.

    Attributes:
        used: per source, the names of the tensors that some expression reads.
        spoken_of: per source, tensors that an expression which could not be bound names, or that were told as the
            nearest to a missing one. They may well be used once the recipe is mended.
        absent: per source and absent file, the tensors in it that some expression reads.
        notes: facts a reader of the report wants, such as a tied head taken from the embedding.
    """

    def __init__(self, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path]) -> None:
        self._sources = sources
        self._inputs = inputs
        self._shortlists: dict[Shortlist, Value] = {}
        self._modules: dict[str, dict[str, set[str]]] = {}
        self.used: dict[str, set[str]] = {name: set() for name in sources}
        self.spoken_of: dict[str, set[str]] = {name: set() for name in sources}
        self.absent: dict[tuple[str, str], dict[str, None]] = {}
        self.notes: list[str] = []
        self._hints = 0

    def value(self, expression: Expression) -> Value:
        """Returns the bound value of an expression over tensors.

        Raises:
            PlanError: a name, shape or dtype does not fit; the message begins with the place in the recipe.
        """
        return self._bind(expression, self._leaf_value)

    def words(self, expression: Expression) -> Words:
        """Returns the bound words of an expression over modules: the same moves on codes and on scales.

        Raises:
            PlanError: a module lacks a field, has another kind or shape, or fused divisors differ.
        """
        modules = [leaf for leaf in leaves(expression) if isinstance(leaf, Module)]
        bound = {module: self._module(module) for module in modules}
        kinds = {words.format for words in bound.values()}
        if len(kinds) > 1:
            named = ", ".join(f"{printable(str(module))} is {words.format}" for module, words in bound.items())
            raise PlanError(f"{expression.mark}: one object cannot mix formats: {named}")
        codes = self._bind(expression, lambda leaf: bound[_module(leaf)].codes)
        scales = self._bind(expression, lambda leaf: bound[_module(leaf)].scales)
        per_code = 2 if kinds == {"NVFP4"} else 1
        divisor = _one_divisor(expression.mark, bound) if kinds == {"NVFP4"} else None
        shape = codes.shape[0], codes.shape[1] * per_code
        modules_of = [tensor for words in bound.values() for tensor in words.leaves]
        known = {(tensor.source, tensor.info.name) for tensor in modules_of}
        chosen_by = [leaf for leaf in source_tensors(codes) if (leaf.source, leaf.info.name) not in known]
        tensors = (*modules_of, *chosen_by)
        is_copy = all(words.is_copy for words in bound.values())
        return Words(kinds.pop(), shape, codes, scales, divisor, tensors, is_copy)

    def give_up(self, expression: Expression) -> None:
        """Takes note of the tensors that an expression which cannot be bound means to read."""
        for leaf in leaves(expression):
            if isinstance(leaf, Tensor):
                self.spoken_of[leaf.source].add(leaf.name)
            elif isinstance(leaf, Module):
                self.spoken_of[leaf.source].update(f"{leaf.name}.{field}" for field in self._fields(leaf))

    @property
    def names_fit(self) -> bool:
        """Whether few enough tensors are missing for those that nothing uses to be worth telling."""
        return self._hints <= MAX_HINTS

    def has(self, leaf: Expression) -> bool:
        """Tells whether a leaf's tensors (any of them, for a module) exist in its source, be it in an absent file."""
        if isinstance(leaf, Tensor):
            checkpoint = self._sources[leaf.source]
            return leaf.name in checkpoint.tensors or leaf.name in checkpoint.absent
        if isinstance(leaf, Module):
            return bool(self._fields(leaf))
        return True

    def _fields(self, module: Module) -> set[str]:
        """Returns the last name parts of the tensors of a module."""
        if module.source not in self._modules:
            modules = self._modules[module.source] = {}
            checkpoint = self._sources[module.source]
            for name in (*checkpoint.tensors, *checkpoint.absent):
                parent, _, field = name.rpartition(".")
                modules.setdefault(parent, set()).add(field)
        return self._modules[module.source].get(module.name, set())

    # -- leaves ---------------------------------------------------------------------------------------------

    def _leaf_value(self, leaf: Expression) -> Value:
        if isinstance(leaf, Tensor):
            return self._plain_tensor(leaf)
        if isinstance(leaf, Shortlist):
            if leaf.counts not in self._inputs:
                raise AbsentError(f"{leaf.mark}: shortlist needs input {leaf.counts}")
            if leaf not in self._shortlists:
                self._shortlists[leaf] = shortlist(leaf, self._inputs[leaf.counts], self._sources[leaf.source])
            return self._shortlists[leaf]
        raise PlanError(f"{leaf.mark}: {printable(str(leaf))} is a module of encoded words; a value needs a tensor")

    def _tensor(self, source: str, name: str, mark: Mark) -> SourceTensor:
        checkpoint = self._sources[source]
        info = checkpoint.tensors.get(name)
        if name in checkpoint.absent:
            self.absent.setdefault((source, checkpoint.absent[name]), {})[name] = None
            raise AbsentError(f"{mark}: tensor {printable(name)} lies in an absent file")
        if info is None:
            raise MissingError(f"{mark}: {self._why_missing(source, name)}")
        self.used[source].add(name)
        return SourceTensor(source, checkpoint, info)

    def _why_missing(self, source: str, name: str) -> str:
        checkpoint = self._sources[source]
        message = f"tensor {printable(name)} is not in source {source} ({printable(checkpoint.location)})"
        self._hints += 1
        near = self.nearest(source, name) if self._hints <= MAX_HINTS else ()
        if near:
            message += f"; nearest: {', '.join(map(printable, near))}"
        if name.endswith("lm_head.weight") and (members := _tie_members(checkpoint)):
            message += f"; {_said(members)}"
        return message

    def nearest(self, source: str, name: str) -> tuple[str, ...]:
        """Returns the names most like that of a missing tensor, which may have been meant."""
        near = self._sources[source].nearest(name)
        self.spoken_of[source].update(near)
        return near

    def _plain_tensor(self, leaf: Tensor) -> Value:
        bound = self._tensor(leaf.source, leaf.name, leaf.mark)
        tensors, name = bound.checkpoint.tensors, leaf.name
        label = f"{leaf.mark}: tensor {printable(name)}"
        if bound.dtype not in WORD_BYTES:
            raise PlanError(f"{label} has dtype {bound.dtype}; accepted are {', '.join(WORD_BYTES)}")
        if 0 in bound.shape:
            raise PlanError(f"{label} has shape {list(bound.shape)}; every dimension must be positive")
        module, dot, field = name.rpartition(".")
        present = [f"{module}.{other}" for other in QUANTIZED_FIELDS if f"{module}.{other}" in tensors]
        if dot and field == "weight" and present:
            if f"{module}.weight_packed" in present:
                raise PlanError(
                    f"{label} is ambiguous: {printable(module)}.weight_packed is there too; a module has one form"
                )
            raise PlanError(
                f"{label} belongs to a quantized module ({', '.join(map(printable, present))} exist); "
                "take it with words:, its codes are not values"
            )
        if name.endswith(MULTIPLIER_FIELDS) and f"{module}.weight_scale_2" in tensors:
            raise PlanError(
                f"{label} is a ModelOpt multiplier where NInfer stores divisors; "
                "name the conversion: reciprocal for a scalar, modelopt for a module's words"
            )
        if name.endswith(DIVISOR_FIELDS):
            positive_word(bound, leaf.mark)
        return bound

    def _module(self, module: Module) -> Words:
        label = f"{module.mark}: module {printable(module.name)}"
        fields = self._fields(module)
        if {"weight", "weight_packed"} <= fields:
            raise PlanError(f"{label} is ambiguous: it has both .weight and .weight_packed; a module has one form")
        if module.dialect == "modelopt":
            return self._nvfp4(module, "weight", "weight_scale_2", inverted=True)
        if "weight_scale_2" in fields:
            raise PlanError(
                f"{label} is ModelOpt NVFP4: weight_scale_2 and input_scale are multipliers where NInfer stores "
                "divisors. That is a conversion, not a word copy; name it: {modelopt: " + printable(module.name) + "}"
            )
        if "weight_packed" in fields or "weight_global_scale" in fields:
            return self._nvfp4(module, "weight_packed", "weight_global_scale", inverted=False)
        return self._fp8_rows(module)

    def _nvfp4(self, module: Module, code_field: str, global_field: str, *, inverted: bool) -> Words:
        def part(field: str) -> SourceTensor:
            return self._tensor(module.source, f"{module.name}.{field}", module.mark)

        codes = part(code_field)
        self._require_method(module, codes)
        if codes.dtype != "U8" or len(codes.shape) != 2:
            raise _field_error(module, codes, "U8 [N, K/2]")
        n, k = codes.shape[0], codes.shape[1] * 2
        scales, divisor = part("weight_scale"), part(global_field)
        if scales.dtype != "F8_E4M3" or scales.shape != (n, k // NVFP4_GROUP):
            raise _field_error(module, scales, f"F8_E4M3 {[n, k // NVFP4_GROUP]}")
        if divisor.dtype != "F32" or elements(divisor.shape) != 1:
            raise _field_error(module, divisor, "F32 [1]")
        word = positive_word(divisor, module.mark)
        if inverted:
            word = reciprocal_word(word, divisor, module.mark)
        return Words("NVFP4", (n, k), codes, scales, word, (codes, scales, divisor), not inverted)

    def _fp8_rows(self, module: Module) -> Words:
        codes = self._tensor(module.source, f"{module.name}.weight", module.mark)
        if codes.dtype != "F8_E4M3" or len(codes.shape) != 2:
            raise _field_error(module, codes, "F8_E4M3 [N, K], or the fields of an NVFP4 module")
        n, k = codes.shape
        if {"weight_scale", "weight_scale_inv"} & self._fields(module) == {"weight_scale_inv"}:
            blocks = self._tensor(module.source, f"{module.name}.weight_scale_inv", module.mark)
            raise _field_error(module, blocks, f"weight_scale BF16 [{n}, 1], one multiplier per row and none per block")
        scales = self._tensor(module.source, f"{module.name}.weight_scale", module.mark)
        if scales.dtype != "BF16" or scales.shape not in ((n,), (n, 1)):
            raise _field_error(module, scales, f"BF16 [{n}] or [{n}, 1], one multiplier per row")
        return Words("FP8_E4M3FN_ROW_BF16S", (n, k), codes, Reshaped(scales, (n, 1)), None, (codes, scales), True)

    def _require_method(self, module: Module, codes: SourceTensor) -> None:
        """The tensors decide what a module is; a config that names nothing but another method contradicts them."""
        methods = list(quantization_methods(codes.checkpoint.config))
        if methods and not any(method.startswith(module.dialect) for _, method in methods):
            path, method = methods[0]
            raise PlanError(
                f"{module.mark}: tensor {printable(codes.info.name)} is taken as {module.dialect}, but config.json "
                f"says {path}: {printable(method)}; a divisor of one is a multiplier of the other"
            )

    # -- moves and casts ------------------------------------------------------------------------------------

    def _bind(self, node: Expression, leaf: Callable[[Expression], Value]) -> Value:
        match node:
            case Slice():
                return sliced(node, self._bind(node.of, leaf))
            case BlockRows():
                return block_rows(node, self._bind(node.of, leaf))
            case Reshape():
                return reshaped(node, self._bind(node.of, leaf))
            case Transpose():
                return transposed(node, self._bind(node.of, leaf))
            case Concat():
                return joined(node, [self._bind(operand, leaf) for operand in node.of])
            case Cast():
                return cast(node, self._bind(node.of, leaf))
            case Gather():
                return gathered(node, self._bind(node.of, leaf), self.value(node.ids))
            case Same():
                return identical(node, [self._bind(operand, leaf) for operand in node.of])
            case Reciprocal():
                return reciprocal(node, self._reciprocal_operand(node))
            case Tied():
                return self._tied(node)
            case _:
                return leaf(node)

    def _reciprocal_operand(self, node: Reciprocal) -> Value:
        """A multiplier is legal here and nowhere else, so its leaf skips the checks of a plain tensor."""

        def leaf(tensor: Expression) -> Value:
            if isinstance(tensor, Tensor):
                return self._tensor(tensor.source, tensor.name, tensor.mark)
            return self._leaf_value(tensor)

        return self._bind(node.of, leaf)

    def _tied(self, node: Tied) -> Value:
        checkpoint = self._sources[node.head.source]
        members = _tie_members(checkpoint)
        for key, found in members.items():
            if not isinstance(found, bool):
                text = shown(json.dumps(found, ensure_ascii=False))
                raise PlanError(
                    f"{node.mark}: config.json {key}: {text} found, true or false required; correct it or state the "
                    "output head in the recipe"
                )
        if len(set(members.values())) > 1:
            said = " but ".join(f"{key}: {json.dumps(tied)}" for key, tied in members.items())
            raise PlanError(f"{node.mark}: config.json contradicts itself: {said}; state the output head in the recipe")
        said = _said(members)
        try:
            if not any(members.values()):
                return self._plain_tensor(node.head)
            embedding = self._plain_tensor(node.embedding)
            if node.head.name not in checkpoint.tensors:
                self.notes.append(f"{node.head.name} is tied: taken from {node.embedding.name}")
                return embedding
            both = [embedding, self._plain_tensor(node.head)]
        except MissingError as error:
            message = str(error)
            raise MissingError(message if said in message else f"{message}; {said}") from error
        return identical(Same((node.embedding, node.head), node.mark), both, f"{said}, so they must be bit-identical")


def _module(leaf: Expression) -> Module:
    if not isinstance(leaf, Module):
        raise PlanError(f"{leaf.mark}: {printable(str(leaf))} is not a module; words: moves modules only")
    return leaf


def _tie_members(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what the config says of a tied head, of whatever type, by the path of the member."""
    config: Mapping[str, Any] = checkpoint.config or {}
    places = {"": config, "text_config.": config.get("text_config")}
    name = "tie_word_embeddings"
    return {path + name: at[name] for path, at in places.items() if isinstance(at, Mapping) and name in at}


def _said(members: Mapping[str, Any]) -> str:
    if not members:
        return "config.json does not say tie_word_embeddings"
    return "config.json says " + " and ".join(
        f"{key}: {shown(json.dumps(tied, ensure_ascii=False))}" for key, tied in members.items()
    )


def _field_error(module: Module, found: SourceTensor, required: str) -> PlanError:
    name = printable(found.info.name)
    return PlanError(f"{module.mark}: tensor {name} is {found.dtype} {list(found.shape)}; required is {required}")


def _one_divisor(mark: Mark, bound: Mapping[Module, Words]) -> int | None:
    """Returns the divisor that every module of a fused parent shares bit for bit."""
    first, *others = bound.items()
    for module, words in others:
        if words.divisor != first[1].divisor:
            raise PlanError(
                f"{mark}: weight divisors of one fused parent differ: {printable(str(first[0]))} has word "
                f"0x{first[1].divisor:08x}, {printable(str(module))} has 0x{words.divisor:08x}"
            )
    return first[1].divisor
