"""What each tensor of a checkpoint becomes: an object and its format, or nothing, and why.

Owns the choice, from names, dtypes and shapes alone. Refuses to know loops and YAML.

Source: tensor-formats.md sections 2.5, 3.1 to 3.4; layouts.md, "Sources of already selected words".
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ninfer_convert.formats import BF16, FORMATS, FP32, I32, NVFP4, DirectFormat, NumericFormat
from ninfer_convert.layout import MAX_RANK, LayoutError, geometry
from ninfer_convert.plan.casts import CASTS
from ninfer_convert.plan.planner import FLOAT_DTYPES
from ninfer_convert.plan.transform import NVFP4_GROUP, QUANTIZED_FIELDS
from ninfer_convert.recipe.counting import counted
from ninfer_convert.source.checkpoint import Checkpoint, TensorInfo

ROW_FP8 = "FP8_E4M3FN_ROW_BF16S"
DIRECT_OF_DTYPE = {numeric.source_dtype: numeric for numeric in (BF16, FP32, I32)}
MIN_SIDE = 64
"""Matrices with fewer rows or columns stay as they are: they are controls, and small."""

MAX_EXPERTS = 512
"""Rows that a router has at most; the gate of a gated MLP has more."""

_NORM = re.compile(r"(?:.*_)?(?:norm|layernorm|ln|ln_f|rmsnorm)[0-9_]*")
_ROUTER = re.compile(r"(?:.*_)?(?:router|gate)")
_POSITIONS = re.compile(r"(?:.*_)?(?:pos_embed|pos_embedding|positions?_embed.*|embed_positions?|token_type_embed.*)")

_CONV1D = {"gpt2": re.compile(r"(?:.*\.)?(?:c_attn|q_attn|c_proj|c_fc)\.weight")}
"""By model_type, the matrices that are kept as [inputs, outputs]."""

_CODE_FIELDS = (*QUANTIZED_FIELDS, "weight", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale")


@dataclass(frozen=True, slots=True)
class Object:
    """One object to be: everything but its name and that of its tensor.

    `role` says what the name stands for: a `tensor`, a `module` of encoded words, or the `divisor` of a module's
    input. The value is the tensor between `before` and `after`.
    """

    role: str
    source: str
    shape: tuple[int, ...]
    numeric: NumericFormat
    before: str = ""
    after: str = ""
    comment: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether words are copied, so that nothing is encoded here."""
        return self.role == "module"


@dataclass(frozen=True, slots=True)
class Placed:
    """An object with the name of its tensor or module, and every tensor that is read for it."""

    name: str
    made: Object
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A tensor that becomes nothing, and why; `is_elsewhere` when another source supplies it."""

    name: str
    reason: str
    is_elsewhere: bool = False


def choose(checkpoint: Checkpoint, source: str, matrix: NumericFormat) -> Iterator[Placed | Unplaced]:
    """Yields what every tensor of a checkpoint becomes.

    Args:
        checkpoint: the open checkpoint; nothing but its headers is looked at.
        source: what the recipe calls it.
        matrix: the format of matrices.
    """
    transposed = _CONV1D.get(str((checkpoint.config or {}).get("model_type")))
    fields: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, _, field = name.rpartition(".")
        fields.setdefault(module, {})[field] = info
    for module, held in fields.items():
        rest = dict(held)
        if module and any(field in held for field in QUANTIZED_FIELDS):
            yield from _module(module, source, held, matrix)
            rest = {field: info for field, info in held.items() if field not in _CODE_FIELDS}
        for info in rest.values():
            found = _tensor(info, source, matrix)
            if isinstance(found, Placed) and transposed and transposed.fullmatch(info.name) and len(info.shape) == 2:
                yield dataclasses.replace(found, made=_transposed(found.made))
            else:
                yield found


def _transposed(made: Object) -> Object:
    return dataclasses.replace(
        made,
        shape=made.shape[::-1],
        before="{transpose: {of: " + made.before,
        after=made.after + ", axes: [1, 0]}}",
        comment=made.comment or "turned to [outputs, inputs], along which groups lie",
    )


def _module(
    module: str, source: str, held: Mapping[str, TensorInfo], matrix: NumericFormat
) -> Iterator[Placed | Unplaced]:
    """Yields what becomes of the fields of a quantized module."""
    found = _compressed(held) or _modelopt(held) or _fp8_rows(held)
    used: set[str] = set()
    if isinstance(found, _Words):
        made = Object("module", source, found.shape, found.numeric, found.before, found.after)
        yield Placed(module, made, tuple(f"{module}.{field}" for field in found.fields))
        used.update(found.fields)
        if divisor := _divisor(source, held, found):
            field, made = divisor
            yield Placed(f"{module}.{field}", made, (f"{module}.{field}",))
            used.add(field)
        reason = "belongs to a quantized module, and its words do without it"
    else:
        reason = found or "codes of a quantized module in a form that no format stores"
    for field, info in held.items():
        if field in _CODE_FIELDS and field not in used:
            is_value = field == "input_scale" and "weight_scale_2" not in held
            yield _tensor(info, source, matrix) if is_value else Unplaced(info.name, reason)


@dataclass(frozen=True, slots=True)
class _Words:
    numeric: NumericFormat
    shape: tuple[int, ...]
    fields: tuple[str, ...]
    before: str = ""
    after: str = ""


def _compressed(held: Mapping[str, TensorInfo]) -> _Words | str | None:
    fields = ("weight_packed", "weight_scale", "weight_global_scale")
    if "weight_packed" not in held:
        return None
    if other := next((field for field in ("weight", "weight_scale_2") if field in held), None):
        return f"the module has both .weight_packed and .{other}, and one form is required"
    return _nvfp4(held, fields, "")


def _modelopt(held: Mapping[str, TensorInfo]) -> _Words | str | None:
    fields = ("weight", "weight_scale", "weight_scale_2")
    if "weight_scale_2" not in held or "weight" not in held:
        return None
    return _nvfp4(held, fields, "{modelopt: ")


def _nvfp4(held: Mapping[str, TensorInfo], fields: tuple[str, str, str], before: str) -> _Words | str:
    if missing := [field for field in fields if field not in held]:
        return f"not NVFP4: .{missing[0]} is missing"
    codes, scales, divisor = (held[field] for field in fields)
    if codes.dtype != "U8" or len(codes.shape) != 2:
        return f"not NVFP4: .{fields[0]} is {codes.dtype} {list(codes.shape)}; required is U8 [N, K/2]"
    shape = codes.shape[0], codes.shape[1] * 2
    if scales.dtype != "F8_E4M3" or scales.shape != (shape[0], shape[1] // NVFP4_GROUP):
        return f"not NVFP4: .{fields[1]} is {scales.dtype} {list(scales.shape)}; required is one F8_E4M3 for 16 codes"
    if divisor.dtype != "F32" or math.prod(divisor.shape) != 1:
        return f"not NVFP4: .{fields[2]} is {divisor.dtype} {list(divisor.shape)}; required is F32 [1]"
    if reason := _layout_problem(NVFP4, shape):
        return f"{reason}; joined with modules of the same divisor it may be stored"
    return _Words(NVFP4, shape, fields, before, "}" if before else "")


def _fp8_rows(held: Mapping[str, TensorInfo]) -> _Words | str | None:
    if "weight" not in held or held["weight"].dtype != "F8_E4M3":
        return None
    if "weight_global_scale" in held or "weight_scale_2" in held:
        return "FP8 codes beside the scales of another form"
    codes, scales = held["weight"], held.get("weight_scale")
    if len(codes.shape) != 2 or 0 in codes.shape:
        return f"FP8 of shape {list(codes.shape)}; matrices are stored"
    if scales is None:
        return "FP8 with a scale for each block; one BF16 scale for each row is stored"
    n = codes.shape[0]
    if scales.dtype != "BF16" or scales.shape not in ((n,), (n, 1)):
        found = f"{scales.dtype} {list(scales.shape)}"
        return f"FP8 with a scale {found}; one BF16 scale for each row is stored"
    return _Words(FORMATS[ROW_FP8], codes.shape, ("weight", "weight_scale"))


def _divisor(source: str, held: Mapping[str, TensorInfo], words: _Words) -> tuple[str, Object] | None:
    """Returns the divisor of the activations that enter a module: field and object."""
    if words.numeric != NVFP4:
        return None
    field = "input_scale" if words.before else "input_global_scale"
    info = held.get(field)
    if info is None or info.dtype != "F32" or math.prod(info.shape) != 1:
        return None
    before, after = ("{reciprocal: ", "}") if words.before else ("", "")
    if info.shape:
        before, after = "{reshape: {to: [], of: " + before, after + "}}"
    return field, Object("divisor", source, (), FP32, before, after)


def _tensor(info: TensorInfo, source: str, matrix: NumericFormat) -> Placed | Unplaced:
    direct, before, after = _direct(info)
    if reason := _problem(info, direct):
        return Unplaced(info.name, reason)
    shape, comment = info.shape, ""
    numeric: NumericFormat = direct or BF16
    if info.dtype in FLOAT_DTYPES and len(shape) > 1:
        if reason := _why_direct(info, matrix, numeric):
            comment = f"not encoded: {reason}"
        else:
            numeric, before, after = matrix, "", ""
            if len(shape) == 3:
                shape = (shape[0] * shape[1], shape[2])
                before, after = "{reshape: {to: " + f"[{shape[0]}, {shape[1]}], of: ", "}}"
                comment = f"{info.shape[0]} matrices of {counted(info.shape[1], 'row')}, one below the other"
    made = Object("tensor", source, shape, numeric, before, after, comment)
    return Placed(info.name, made, (info.name,))


def _direct(info: TensorInfo) -> tuple[DirectFormat | None, str, str]:
    """Returns the format that keeps every value, and the cast to it around the tensor's name."""
    if info.dtype in DIRECT_OF_DTYPE:
        return DIRECT_OF_DTYPE[info.dtype], "", ""
    if info.dtype not in ("F64", "BOOL"):
        for to in ("F32", "I32"):
            if rule := CASTS.get((info.dtype, to)):
                numeric = DIRECT_OF_DTYPE[to]
                return numeric, "{cast: {of: ", f", to: {numeric.name}, rule: {rule}" + "}}"
    return None, "", ""


def _problem(info: TensorInfo, direct: DirectFormat | None) -> str:
    """Returns why no object can be made of a tensor; nothing when one can."""
    if direct is None:
        return f"no format holds values of dtype {info.dtype}"
    if 0 in info.shape:
        return "without elements"
    if len(info.shape) > MAX_RANK:
        return f"of rank {len(info.shape)}; at most {MAX_RANK} is stored"
    return _layout_problem(direct, info.shape)


def _why_direct(info: TensorInfo, matrix: NumericFormat, direct: NumericFormat) -> str:
    """Returns why a matrix stays as it is; nothing when it is to be encoded."""
    last = info.name.removesuffix(".weight").rpartition(".")[2].lower()
    if _NORM.fullmatch(last):
        return "a norm"
    if _POSITIONS.fullmatch(last) or last == "wpe":
        return "positions, or types of tokens"
    if _ROUTER.fullmatch(last) and len(info.shape) == 2 and info.shape[0] <= MAX_EXPERTS:
        return "a router, whose few weights decide much"
    if len(info.shape) > 3 or (len(info.shape) == 3 and min(info.shape[1:]) < MIN_SIDE):
        return "no matrix"
    if min(info.shape[-2:]) < MIN_SIDE:
        return "small"
    shape = (math.prod(info.shape[:-1]), info.shape[-1])
    if _layout_problem(matrix, shape):
        return "too large to be encoded"
    if geometry(matrix, shape).nbytes >= geometry(direct, info.shape).nbytes:
        return f"{matrix.name} would not be smaller"
    return ""


def _layout_problem(numeric: NumericFormat, shape: tuple[int, ...]) -> str:
    try:
        geometry(numeric, shape)
    except LayoutError as error:
        return str(error)
    return ""
