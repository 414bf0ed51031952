"""Components of a recipe: by which tensors each is known, and which of them a checkpoint lacks whole.

Source: recipe.md, duty 6.
"""

from __future__ import annotations

from collections.abc import Sequence

from ninfer_convert.errors import printable
from ninfer_convert.plan.transform import Binder
from ninfer_convert.recipe.expression import Expression, Module, Tensor, leaves
from ninfer_convert.recipe.model import Recipe, TensorSpec

SHOWN_MISSING = 3


def component_leaves(recipe: Recipe) -> dict[str, list[Expression]]:
    """Returns the tensors and modules by which every component is known, each once.

    What objects outside a component read as well says nothing about it, unless it reads nothing else.
    """
    if all(item.component is None for item in recipe.objects):
        return {}
    read: dict[str | None, dict[str, Expression]] = {}
    readers: dict[str, set[str | None]] = {}
    for item in recipe.objects:
        for leaf in leaves(item.value) if isinstance(item, TensorSpec) else ():
            if isinstance(leaf, (Tensor, Module)):
                read.setdefault(item.component, {}).setdefault(str(leaf), leaf)
                readers.setdefault(str(leaf), set()).add(item.component)
    return {
        component: [leaf for name, leaf in named.items() if len(readers[name]) == 1] or list(named.values())
        for component, named in read.items()
        if component is not None
    }


def left_out(recipe: Recipe, binder: Binder) -> frozenset[str]:
    """Returns the optional components that are absent whole."""
    return frozenset(
        component
        for component, named in component_leaves(recipe).items()
        if component in recipe.optional_components and not any(map(binder.has, named))
    )


def missing_text(
    component: str, missing: Sequence[Expression], total: int, near: Sequence[str], *, is_optional: bool
) -> str:
    """Returns what is wrong with a component of whose `total` tensors and modules some are missing.

    A misspelling is likelier than a part left out while some are there, so the names come before the advice.

    Args:
        near: the names that are most like the first missing one.
    """
    names = ", ".join(printable(str(leaf)) for leaf in missing[:SHOWN_MISSING])
    more = f" and {len(missing) - SHOWN_MISSING} more" if len(missing) > SHOWN_MISSING else ""
    nearest = f"; nearest: {', '.join(map(printable, near))}" if near else ""
    drop = f"left out with `change: [drop: {component}/*]`"
    if is_optional:
        advice = f"an optional component may be absent whole, not in part; it may be {drop}"
    elif len(missing) == total:
        advice = f"a component that is absent whole may be declared optional: true, or be {drop}"
    else:
        advice = f"it may be {drop}"
    return f"component {component}: {len(missing)} of {total} missing: {names}{more}{nearest}; {advice}"
