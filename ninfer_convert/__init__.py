"""Turns safetensors checkpoints into `.ninfer` artifacts; `ninfer-convert --help` is the command line.

The names below are the library. Each loads with its module when it is first used, so that nothing heavy loads
for a command that does not need it. The pipeline itself is `ninfer_convert.convert.convert`, which loads the
compiled kernels.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "reader",
    "Checkpoint": "source",
    "ConvertError": "errors",
    "FORMATS": "formats",
    "Plan": "plan",
    "Recipe": "recipe",
    "check_plan": "inventory",
    "check_recipe": "inventory",
    "codes": "decode",
    "compare_artifacts": "contrast",
    "compare_with_source": "compare",
    "decode_rows": "decode",
    "export_artifact": "export",
    "gather_rows": "decode",
    "load_recipe": "recipe_loader",
    "make_plan": "plan",
    "open_checkpoint": "source",
    "read_values": "decode",
    "recheck_artifact": "recheck",
    "scale_words": "decode",
    "verify_artifact": "verify",
    "verify_report": "verify",
    "view_rows": "decode",
}
"""Public name -> the module it lives in; `__init__.pyi` tells type checkers the same."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
