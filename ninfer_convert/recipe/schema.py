"""A JSON schema of recipes, for editors: which keys there are, what they hold, what they are for.

Owns the descriptions of the keys. Formats, encoders, layouts, rules and dtypes come from the tables that the loader
uses. Refuses to know what goes beyond one mapping: names that exist, sizes that add up, evidence (`recipe_loader`).

Source: recipe.md, duties; JSON Schema draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ninfer_convert.formats import FORMATS, NumericFormat
from ninfer_convert.layout import LAYOUT_OF_FORMAT, LAYOUTS, MAX_RANK
from ninfer_convert.recipe.expressions import CAST_RULES
from ninfer_convert.recipe.files import SCHEMA
from ninfer_convert.recipe.objects import ENCODERS, RULES, WORD_FORMATS
from ninfer_convert.recipe.scalars import IDENTIFIER
from ninfer_convert.recipe.sections import SAFETENSORS_DTYPES

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_FORMAT = "How the values are stored: " + ", ".join(FORMATS) + "."
_ENCODER = "The rule that makes codes and scales; written out wherever the format has one to choose."
_SHAPE = "The stored shape, [output rows, input columns] for a matrix; [] is a scalar."
_VALUE = "What the object is made of: a tensor name, $name, or a mapping with one move such as concat."
_WORDS = "Modules of a quantized source whose codes and scales are copied, not encoded."
_REQUIRE = "Rules that the stored values must keep."
_VALUES = "Values with a name, used as $name in this block."
_SHA256 = "SHA-256 of the content, 64 lowercase hexadecimal digits."
_AXIS = "The axis, counted from 0; 0 if it is not said."
_SPAN = "Coordinates [begin, end): the first one, and the one after the last."
_ORIGIN: Mapping[str, str] = {
    "file": "A file in the directory of the source.",
    "input": "The name of an auxiliary input, in place of a file.",
    "source": "The source whose directory has the file; the first one if it is not said.",
    "member": "A text member of that JSON file, whose text is the resource.",
}


def schema() -> Schema:
    """Returns the JSON schema (draft 2020-12) of a recipe file."""
    return {
        "$schema": DIALECT,
        "title": "a recipe",
        "description": "What every stored object of a .ninfer artifact is made of.",
        "type": "object",
        "properties": _sections(),
        "required": ["schema", "id"],
        "additionalProperties": False,
        "if": {"required": ["extends"]},
        "else": {
            "required": ["artifact", "sources", "objects"],
            "properties": {"change": False, "artifact": {"required": ["model_id", "weights_id"]}},
        },
        "$defs": {**_scalars(), **_entries(), **_blocks(), **_expressions("value"), **_expressions("words")},
    }


def _ref(name: str, description: str | None = None) -> Schema:
    reference = {"$ref": f"#/$defs/{name}"}
    return reference if description is None else {**reference, "description": description}


def _list(items: Schema, description: str | None = None, *, least: int = 1) -> Schema:
    array: Schema = {"type": "array", "items": items} | ({"minItems": least} if least else {})
    return array if description is None else {**array, "description": description}


def _choice(choices: Collection[str], description: str) -> Schema:
    return {"enum": list(choices), "description": description}


def _mapping(title: str, properties: Mapping[str, Schema], required: Sequence[str] = (), **more: Any) -> Schema:
    """Returns the schema of a mapping with a closed set of keys; the title is what messages call it."""
    return {
        "title": title,
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def _named(values: Schema, description: str, **more: Any) -> Schema:
    """Returns the schema of a mapping from names of the recipe's own to values."""
    return {
        "type": "object",
        "propertyNames": {"pattern": f"^{IDENTIFIER.pattern}$"},
        "additionalProperties": values,
        "description": description,
        **more,
    }


def _one_of(*keys: str) -> list[Schema]:
    return [{"required": [key]} for key in keys]


def _sections() -> dict[str, Schema]:
    return {
        "schema": {"const": SCHEMA, "description": "The version of the recipe language."},
        "id": _ref("text", "The name of the recipe; the artifact's report carries it."),
        "extends": _ref("text", "A recipe that is taken over: a shipped name, or a path that ends in .yaml."),
        "artifact": _mapping(
            "artifact",
            {
                "model_id": _ref("text", "The model, such as qwen3.6-27b."),
                "weights_id": _ref("text", "Its weights in this form, such as groupwise-int."),
            },
            description="What the artifact calls itself.",
        ),
        "evidence": {
            "description": "Why the lossy choices are good enough; none for a demonstration.",
            "anyOf": [{"const": "none"}, _list(_ref("evidence"))],
        },
        "sources": _named(_ref("source"), "The checkpoints; the first one is the default.", minProperties=1),
        "inputs": _named(_ref("input"), "Files beside the checkpoints, given with --input NAME=PATH."),
        "names": _named({"type": ["string", "integer"]}, "Short names, used as <name> in texts and for integers."),
        "sets": _named(_ref("set"), "Sets of integers to loop over."),
        "values": _named(_ref("named_value"), "Values with a name, used as $name."),
        "objects": _list(_ref("object"), "The stored objects, in stored order."),
        "conditions": _list(_ref("condition"), "Demands on the sources that belong to no object."),
        "ignore": {
            "description": "Globs of tensors that are not used: a list if there is one source, else a list for each.",
            "anyOf": [_ref("ignored"), {"type": "object", "additionalProperties": _ref("ignored")}],
        },
        "change": _list(_ref("change"), "What is made different of the inherited objects, in order."),
    }


def _scalars() -> dict[str, Schema]:
    placeholder = {"type": "string", "pattern": f"^<{IDENTIFIER.pattern}>$"}
    hexadecimal = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    integers = _list(_ref("integer"), least=2) | {"maxItems": 2}
    bounds = _list({"anyOf": [{"type": "number"}, placeholder]}, "The bounds, both included.", least=2)
    limits = _mapping("a rule", {"range": bounds | {"maxItems": 2}}, ["range"])
    rules = [rule for rule in RULES if rule != "range"]
    return {
        "text": {"type": "string", "minLength": 1},
        "integer": {"anyOf": [{"type": "integer"}, placeholder]},
        "sha256": hexadecimal,
        "span": integers,
        "shape": _list(_ref("integer"), least=0) | {"maxItems": MAX_RANK},
        "globs": {"anyOf": [_ref("text"), _list(_ref("text"))]},
        "rules": _list({"anyOf": [{"enum": rules}, limits]}),
        "set": {"anyOf": [_ref("text"), _list(_ref("integer")), *_computed_sets()]},
        "united": {"anyOf": [_ref("set"), _list({"anyOf": [_ref("integer"), _ref("set")]})]},
        "picks": _named(_ref("set"), "Loop variables, each with a set.", minProperties=1),
        "named_values": _named(_ref("named_value"), _VALUES),
        "named_value": {"anyOf": [_ref("value"), _ref("words")]},
    }


def _computed_sets() -> list[Schema]:
    bounds = {
        "from": _ref("integer", "The first member."),
        "through": _ref("integer", "The last member, if a step ends on it."),
        "step": _ref("integer", "From one member to the next; 1 if it is not said."),
    }
    algebra = {
        "all": _ref("united", "A set, or a list of sets that are united."),
        "except": _ref("united", "What is left out of it."),
    }
    return [_mapping("a set", bounds, ["from", "through"]), _mapping("a set", algebra, ["all"])]


def _entries() -> dict[str, Schema]:
    dtype = _choice(SAFETENSORS_DTYPES, "A dtype that tensors of the checkpoint have.")
    commit = {"type": "string", "pattern": "^[0-9a-f]{40}$", "description": "The commit, 40 hexadecimal digits."}
    place = {key: _ref("text", description) for key, description in _ORIGIN.items()}
    place_rules: Schema = {"oneOf": _one_of("file", "input"), "dependentRequired": {"source": ["file"]}}
    places = _list(_ref("place"), "Places in order; the first that exists is taken.")
    digest = _ref("sha256", _SHA256)
    return {
        "evidence": _mapping(
            "evidence",
            {
                "text": _ref("text", "What is known, and where it is published."),
                "objects": _ref("globs", "Globs of the objects it is about; all if it is not said."),
            },
            ["text"],
        ),
        "source": _mapping(
            "a source",
            {
                "repo": _ref("text", "The repository on the Hugging Face hub: owner/name."),
                "revision": commit,
                "dtype": {"anyOf": [dtype, _list(dtype)], "description": "The dtypes its tensors may have at all."},
                "config": {"type": "object", "description": "Members that config.json must have, with equal values."},
                "prefix": {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                    "description": "Beginnings of names in the file, each with what the recipe calls it.",
                },
            },
        ),
        "input": _mapping("an input", {"sha256": digest}),
        "tensor": _tensor(),
        "resource": _mapping(
            "a resource",
            {"resource": _ref("text", "The name of a file that is stored byte for byte."), **place}
            | {"any": places, "sha256": digest},
            ["resource"],
            oneOf=_one_of("file", "input", "any"),
            dependentRequired={"source": ["file"]},
        ),
        "place": _mapping("a place of a resource", place, **place_rules),
        "change": {"oneOf": [_tensor_change(), _drop(), _resource_change(place | {"any": places, "sha256": digest})]},
    }


def _tensor_fields() -> dict[str, Schema]:
    return {
        "shape": _ref("shape", _SHAPE),
        "format": _choice(FORMATS, _FORMAT),
        "encoder": _choice(ENCODERS, _ENCODER),
        "value": _ref("value", _VALUE),
        "words": _ref("words", _WORDS),
        "require": _ref("rules", _REQUIRE),
    }


def _tensor() -> Schema:
    fields = {
        "name": _ref("text", "The name of the object in the artifact."),
        **_tensor_fields(),
        "layout": _choice(LAYOUTS, "How the bytes lie; every format has one, so that it need not be said."),
    }
    return _mapping(
        "a tensor",
        fields,
        ["name", "shape", "format"],
        oneOf=_one_of("value", "words"),
        allOf=[
            {"if": {"required": ["format"], "properties": {"format": {"const": name}}}, "then": _of_format(numeric)}
            for name, numeric in FORMATS.items()
        ],
    )


def _of_format(numeric: NumericFormat) -> Schema:
    """Returns what goes with a format: its layout, words only if they can be copied, an encoder only to encode."""
    properties: Schema = {"layout": {"const": LAYOUT_OF_FORMAT[numeric.name]}}
    if numeric.name not in WORD_FORMATS:
        properties["words"] = False
    if not numeric.encoders:
        properties["encoder"] = False
        return {"properties": properties} | ({"required": ["words"]} if numeric.name in WORD_FORMATS else {})
    encoded = {"required": ["encoder"], "properties": {"encoder": {"enum": list(numeric.encoders)}}}
    copied = {"properties": {"encoder": False}}
    return {"properties": properties, "if": {"required": ["words"]}, "then": copied, "else": encoded}


def _tensor_change() -> Schema:
    objects = {"objects": _ref("text", "A glob of the tensors that are changed.")}
    return _mapping("a change of tensors", objects | _tensor_fields(), ["objects"], minProperties=2,
                    **{"not": {"required": ["value", "words"]}})  # fmt: skip


def _drop() -> Schema:
    return _mapping("a drop", {"drop": _ref("text", "A glob of the objects that are left out.")}, ["drop"])


def _resource_change(fields: Mapping[str, Schema]) -> Schema:
    resource = {"resource": _ref("text", "The resource that is taken from elsewhere, or has another digest.")}
    return _mapping(
        "a change of a resource",
        {**resource, **fields},
        ["resource"],
        minProperties=2,
        anyOf=[*_one_of("file", "input", "any"), {"properties": dict.fromkeys(("source", "member"), False)}],
    )


def _blocks() -> dict[str, Schema]:
    component = _mapping(
        "a component",
        {
            "component": _ref("text", "The name of a part of the model."),
            "optional": {"type": "boolean", "description": "Whether a checkpoint may lack all of it."},
            "values": _ref("named_values", _VALUES),
            "objects": _list(_ref("object"), "Its objects."),
        },
        ["component", "objects"],
    )
    operands = _ref("value_operands", "Values that must be equal in every bit.")
    entries = [_ref("tensor"), _ref("resource"), *_loops("objects", "object", "The objects of a round."), component]
    return {
        "object": {"oneOf": entries},
        "condition": {
            "oneOf": [
                _mapping("a condition", {"same": operands}, ["same"]),
                *_loops("conditions", "condition", "The conditions of a round."),
            ]
        },
        "ignored": _list(_ref("ignored_names")),
        "ignored_names": {
            "anyOf": [_ref("text"), *_loops("names", "ignored_names", "Globs of tensor names.", with_values=False)]
        },
    }


def _loops(body: str, item: str, description: str, *, with_values: bool = True) -> list[Schema]:
    """Returns the schemas of the `for` and the `when` block around entries of one kind."""
    inside = {body: _list(_ref(item), description)}
    if with_values:
        inside["values"] = _ref("named_values", _VALUES)
    about = {
        "for": "Loop variables, each with the set it runs through; <l> is the variable l in texts.",
        "when": "Loop variables of blocks around this one, each with the set it must be in.",
    }
    return [
        _mapping(f"a '{kind}' block", {kind: _ref("picks", text), **inside}, [kind, body])
        for kind, text in about.items()
    ]


def _expressions(mode: str) -> dict[str, Schema]:
    """Returns what may stand under `value` or under `words`, and lists of it."""
    moves = _moves(mode)
    return {
        mode: {
            "anyOf": [
                _ref("text"),
                {"type": "object", "properties": moves, "minProperties": 1, "maxProperties": 1,
                 "additionalProperties": False},
            ]
        },
        f"{mode}_operands": _list(_ref(mode), least=2),
    }  # fmt: skip


def _moves(mode: str) -> dict[str, Schema]:
    of = _ref(mode, "What is moved.")
    operands = _ref(f"{mode}_operands", "What is joined, in order.")
    axis = _ref("integer", _AXIS) if mode == "value" else {"const": 0, "description": "Only whole rows, axis 0."}
    span = _ref("span", _SPAN)
    block = _ref("integer", "Rows of a block.")
    ids = _ref("value", "A vector of integers: the rows, in their order.")
    moves = {
        "slice": _move("slice", "Coordinates [begin, end) of one axis.",
                       {"of": of, "span": span, "axis": axis}, "axis"),
        "block_rows": _move("block_rows", "Rows [begin, end) of every block of rows.",
                            {"of": of, "block": block, "span": span}),
        "concat": {
            "description": "Operands joined along an axis.",
            "anyOf": [_ref(f"{mode}_operands"), _move("concat", None, {"of": operands, "axis": axis}, "axis")],
        },
        "gather": _move("gather", "Rows chosen by integers.", {"of": of, "ids": ids}),
        "same": _ref(f"{mode}_operands", "Operands that must be equal in every bit; the value is the first one's."),
    }  # fmt: skip
    if mode == "words":
        return {**moves, "modelopt": _ref("text", "A ModelOpt module: converted, not copied.")}
    return {**moves, **_value_moves(of)}


def _value_moves(of: Schema) -> dict[str, Schema]:
    axes = _list(_ref("integer"), "Axis i of the result is axis axes[i] of the operand; [1, 0] if it is not said.")
    tensor = _ref("value", "The name of a tensor.")
    casts = [{"properties": {"rule": {"const": rule}, "to": {"const": to}}} for rule, to in CAST_RULES.items()]
    return {
        "reshape": _move("reshape", "The same elements in another shape.", {"of": of, "to": _ref("shape", _SHAPE)}),
        "transpose": _move("transpose", "Axes exchanged.", {"of": of, "axes": axes}, "axes"),
        "cast": _move("cast", "Another dtype, by a named rule.", {
            "of": of,
            "to": _choice(CAST_RULES.values(), "The dtype that is made."),
            "rule": _choice(CAST_RULES, "exact widens to FP32, nearest-even rounds to BF16, checked makes I32."),
        }) | {"anyOf": casts},
        "tied": _move("tied", "An output head that may be tied, as the config says.",
                      {"head": tensor, "embedding": tensor}),
        "reciprocal": _ref("value", "The exact binary32 reciprocal of a scalar."),
        "shortlist": _move("shortlist", "The most frequent tokens and all special ones.", {
            "counts": _ref("text", "The input with the counts: raw little-endian I64, row 0 the total."),
            "candidates": _ref("integer", "Ids from 0 to below this are candidates."),
            "take": _ref("integer", "How many are taken."),
            "special": _ref("text", "The tokenizer config that says which tokens are special."),
            "source": _ref("text", "The source whose directory has it; the first one if it is not said."),
        }, "source"),
        "tensor": _move("tensor", "A tensor whose name could be taken for something else.", {
            "name": _ref("text", "Its name, as it is."),
            "source": _ref("text", "Its source; the first one if it is not said."),
        }, "source"),
    }  # fmt: skip


def _move(key: str, description: str | None, properties: Mapping[str, Schema], *optional: str) -> Schema:
    more = {} if description is None else {"description": description}
    return _mapping(key, properties, [name for name in properties if name not in optional], **more)
