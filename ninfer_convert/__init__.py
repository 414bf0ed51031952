"""Turns safetensors checkpoints into `.ninfer` artifacts; `ninfer-convert --help` is the command line.

The names below are the library. Each loads with its module when it is first used, so that nothing heavy loads
for a command that does not need it.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "artifact.reader",
    "Checkpoint": "source.checkpoint",
    "ConvertError": "errors",
    "FORMATS": "formats",
    "Plan": "plan.planner",
    "Recipe": "recipe.model",
    "check_plan": "artifact.inventory",
    "check_recipe": "artifact.inventory",
    "codes": "artifact.decode",
    "compare_artifacts": "artifact.contrast",
    "compare_with_source": "artifact.compare",
    "convert": "run.convert",
    "decode_rows": "artifact.decode",
    "export_artifact": "artifact.export",
    "gather_rows": "artifact.decode",
    "load_recipe": "recipe.loader",
    "make_plan": "plan.planner",
    "open_checkpoint": "source.checkpoint",
    "open_sources": "source.acquisition",
    "read_values": "artifact.decode",
    "recheck_artifact": "artifact.recheck",
    "scale_words": "artifact.decode",
    "verify_artifact": "artifact.verify",
    "verify_report": "artifact.verify",
    "view_rows": "artifact.decode",
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
