"""Nodes -> models: every field checked on its own, all problems collected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from launcher.errors import Problem
from launcher.spec.nodes import Broken, List, Map, Node, Path, Scalar, clipped, dotted, plain
from launcher.spec.shapes import LENIENT, ONE_OR_LIST, Field, Shape, fields, shape_of

BAD: Final = object()
"""Stands for a value that can't be taken; a problem says why."""

MOST_TEXT = 1024
"""Characters of a text that names something. It also keeps the patterns' backtracking short."""

TAKES: Final[dict[str, tuple[type, ...]]] = {
    "text": (str,),
    "choice": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


class Filler:
    """Fills models from nodes. `problems` are for the user; `bad` are the paths that hold no usable value."""

    def __init__(self, root: type[Struct]) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.bad: list[Path] = []

    def fill(self, node: Node, shape: Shape, at: Path) -> Any:
        """The value of a node, or BAD."""
        if isinstance(node, Broken):
            self.bad.append(at)
            return BAD
        if isinstance(node, Scalar) and node.value is None and shape.nullable:
            return None
        ways = {"model": self.model, "list": self.list, "map": self.map, "any": self.anything}
        return ways.get(shape.kind, self.scalar)(node, shape, at)

    def model(self, node: Node, shape: Shape, at: Path) -> Any:
        """A section. What is bad in it keeps its default, so that the combinations of the rest can be checked."""
        if not isinstance(node, Map):
            return self.mistyped(node, shape, at)
        known = fields(shape.items)
        values = {}
        for key, child in node.entries.items():
            if key not in known:
                self.unknown(child, (*at, key), shape)
            elif (value := self.fill(child, known[key].shape, (*at, key))) is not BAD:
                values[key] = value
        self.require(node, known, at)
        return shape.items(**{name: None for name, field in known.items() if field.required} | values)

    def unknown(self, node: Node, at: Path, shape: Shape) -> None:
        from launcher.spec.wording import unknown_key

        # Looking for a near name takes a while: a file of nothing but unknown keys is of another kind.
        fix = unknown_key(str(at[-1]), at[:-1], shape.items, self.root) if len(self.problems) < 50 else ""
        self.problems.append(Problem(node.where, f"{dotted(at)}: no such field", fix))

    def require(self, node: Map, known: Mapping[str, Field], at: Path) -> None:
        """What has to be there is there (or misspelt, which was said already)."""
        for name in (name for name, field in known.items() if field.required and name not in node.entries):
            from launcher.spec.wording import wanted
            from launcher.text import near

            if near(name, node.entries.keys() - known.keys(), 0.7):
                self.bad.append((*at, name))
            else:
                self.refuse(node, (*at, name), "is missing", wanted(known[name].shape))

    def list(self, node: Node, shape: Shape, at: Path) -> Any:
        """A list; for some fields one value stands for a list of it."""
        if isinstance(node, Scalar) and node.value in shape.choices:
            return node.value
        if isinstance(node, Scalar) and node.value is not None and at in ONE_OR_LIST:
            value = self.scalar(node, shape_of(shape.items), at)
            return BAD if value is BAD else (value,)
        if not isinstance(node, List):
            return self.mistyped(node, shape, at)
        if len(node.items) < (shape.bound("min_length") or 0):
            return self.refuse(node, at, "is empty", "name at least one")
        item, lenient = shape_of(shape.items), at in LENIENT
        values = [self.item(child, item, (*at, index), lenient) for index, child in enumerate(node.items)]
        return tuple(value for value in values if value is not BAD)

    def map(self, node: Node, shape: Shape, at: Path) -> Any:
        """A section with free keys."""
        if not isinstance(node, Map):
            return self.mistyped(node, shape, at)
        most = shape.bound("max_length")
        if most is not None and len(node.entries) > most:
            return self.refuse(node, at, f"has {len(node.entries)} entries", f"at most {most}")
        item, keys, lenient = shape_of(shape.items), shape_of(shape.keys), at in LENIENT
        values = {}
        for key, child in node.entries.items():
            named = self.scalar(Scalar(child.where, key, key), keys, (*at, key))
            value = self.item(child, item, (*at, key), lenient)
            if named is not BAD and value is not BAD:
                values[key] = value
        return values

    def item(self, node: Node, shape: Shape, at: Path, lenient: bool) -> Any:
        """An item of a list or map; where `lenient`, any scalar is text as it is written."""
        if not lenient or isinstance(node, Broken):
            return self.fill(node, shape, at)
        if isinstance(node, Scalar) and node.value is not None:
            return node.text
        if isinstance(node, Scalar):
            return self.refuse(node, at, "has no value", 'write "" for an empty text, or remove it')
        return self.mistyped(node, shape, at)

    def anything(self, node: Node, _shape: Shape, at: Path) -> Any:
        """A value that travels as JSON."""
        for path, scalar in scalars(node, at):
            value = scalar.value
            if isinstance(value, float) and not math.isfinite(value):
                fix = "JSON, in which it travels, has no .nan, no .inf and nothing above 1e308"
                self.refuse(scalar, path, f"{clipped(scalar.text)} can't be sent", fix)
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                self.refuse(scalar, path, f"{clipped(scalar.text)} can't be sent", "a whole number of at most 64 bits")
        return plain(node)

    def scalar(self, node: Node, shape: Shape, at: Path) -> Any:
        """A single value, by its kind and then by its bounds."""
        if not isinstance(node, Scalar) or not suits(node.value, shape):
            return self.mistyped(node, shape, at)
        if isinstance(node.value, str) and len(node.value) > MOST_TEXT:
            return self.out_of_bounds(node, shape, at, f"is too long ({len(node.value):,} characters)")
        if isinstance(node.value, str) and not node.value.isprintable():
            return self.out_of_bounds(node, shape, at, "has an invisible character in it, such as a line break")
        if isinstance(node.value, float) and not math.isfinite(node.value):
            return self.out_of_bounds(node, shape, at, "is out of bounds")
        try:
            return msgspec.convert(node.value, shape.hint, strict=True)
        except (msgspec.ValidationError, OverflowError):
            return self.out_of_bounds(node, shape, at, "can't be taken" if suits_text(shape) else "is out of bounds")

    def mistyped(self, node: Node, shape: Shape, at: Path) -> Any:
        from launcher.spec.wording import mistake

        return self.refuse(node, at, *mistake(node, shape, at))

    def out_of_bounds(self, node: Node, shape: Shape, at: Path, what: str) -> Any:
        from launcher.spec.wording import show, wanted

        return self.refuse(node, at, f"{show(node, at)} {what}", wanted(shape))

    def refuse(self, node: Node, at: Path, what: str, fix: str) -> Any:
        self.problems.append(Problem(node.where, f"{dotted(at) or 'the spec'}: {what}", fix))
        self.bad.append(at)
        return BAD


def suits(value: Any, shape: Shape) -> bool:
    """The value is of the kind (true is no number, and 2.0 no whole number)."""
    return isinstance(value, TAKES[shape.kind]) and (shape.kind == "bool" or not isinstance(value, bool))


def suits_text(shape: Shape) -> bool:
    return TAKES[shape.kind] == (str,)


def scalars(node: Node, at: Path) -> list[tuple[Path, Scalar]]:
    """All single values at and below a node."""
    if isinstance(node, Map):
        return [found for key, child in node.entries.items() for found in scalars(child, (*at, key))]
    if isinstance(node, List):
        return [found for index, child in enumerate(node.items) for found in scalars(child, (*at, index))]
    return [(at, node)] if isinstance(node, Scalar) else []
