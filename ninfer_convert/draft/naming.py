"""Names of objects, made of the names of tensors: short where that is unmistakable, and never the same twice.

Source: recipe.md, duty 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from ninfer_convert.draft.choices import Object, Placed
from ninfer_convert.draft.folding import Parts, is_index, split
from ninfer_convert.source.names import unwrapped

Skeleton = tuple[str, str, Parts]
"""Role, source, and a name with its integers taken out: what all rounds of a loop share."""

_LEVELS = 4


class Names:
    """The name of every object, by the name of its tensor or module."""

    def __init__(self, placed: Iterable[Placed]) -> None:
        self._levels: dict[Skeleton, int] = {}
        every = [(_skeleton(split(item.name), item.made), item) for item in placed]
        for _ in range(_LEVELS):
            owners: dict[str, list[Skeleton]] = {}
            for skeleton, item in every:
                owners.setdefault(self.of(split(item.name), item.made), []).append(skeleton)
            crowded = {skeleton for skeletons in owners.values() if len(skeletons) > 1 for skeleton in skeletons}
            for skeleton in crowded:
                self._levels[skeleton] = min(_LEVELS - 1, self._levels.get(skeleton, 0) + 1)
            if not crowded:
                break

    def of(self, parts: Iterable[str], made: Object) -> str:
        """Returns the name of an object; an index may be a placeholder `<l>` of a loop."""
        name = [*parts]
        level = self._levels.get(_skeleton(name, made), 0)
        if level == _LEVELS - 1:
            # No two tensors of a source have this name.
            return f"{made.source}:{'.'.join(name)}" + (":words" if made.role == "module" else "")
        if level == 0:
            name = unwrapped(".".join(name)).split(".")
        if made.role == "divisor":
            name[-1] = "input_scale_divisor"
        elif made.role == "tensor" and level < 2 and len(name) > 1:
            if name[-1] == "weight":
                name = name[:-1]
            elif name[-1] == "bias":
                name[-2:] = [f"{name[-2]}_bias"]
        return "/".join(name) or "tensor"


def _skeleton(parts: Iterable[str], made: Object) -> Skeleton:
    return made.role, made.source, tuple("#" if is_index(part) or _is_variable(part) else part for part in parts)


def _is_variable(part: str) -> bool:
    return part.startswith("<") and part.endswith(">")
