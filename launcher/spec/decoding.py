"""Decode YAML nodes into the spec's models: check each setting on its own and collect all problems."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.errors import Problem
from launcher.spec.nodes import Broken, List, Map, Node, Path, Scalar, clipped, dotted, plain
from launcher.spec.shapes import LENIENT, ONE_OR_LIST, Field, Shape, fields, shape_of

INVALID: Final = object()
"""Placeholder for an invalid value, which `problems` explains."""

MAX_TEXT = 1024
"""Characters. The limit also bounds the time of the patterns' backtracking."""

ACCEPTED_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "text": (str,),
    "choice": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


class Decoder:
    """Decodes nodes into models. `problems` are for the user; `invalid` are the paths without a valid value."""

    def __init__(self, root: type[Struct]) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.invalid: list[Path] = []

    def decode(self, node: Node, shape: Shape, at: Path) -> Any:
        """Return the value of a node, or INVALID."""
        if isinstance(node, Broken):
            self.invalid.append(at)
            return INVALID
        if isinstance(node, Scalar) and node.value is None and shape.nullable:
            return None
        decoders = {"model": self.model, "list": self.list, "map": self.map, "any": self.json}
        kind = "list" if shape.kind == "text" and shape.items and isinstance(node, List) else shape.kind
        return decoders.get(kind, self.scalar)(node, shape, at)

    def model(self, node: Node, shape: Shape, at: Path) -> Any:
        """Decode a section. Invalid settings keep their defaults, so that the others can be checked in combination."""
        if not isinstance(node, Map):
            return self.mistyped(node, shape, at)
        known = fields(shape.items)
        values = {}
        for key, child in node.entries.items():
            if key not in known:
                self.unknown(child, (*at, key), shape)
            elif (value := self.decode(child, known[key].shape, (*at, key))) is not INVALID:
                values[key] = value
        self.check_required(node, known, at)
        return shape.items(**{name: None for name, field in known.items() if field.required} | values)

    def unknown(self, node: Node, at: Path, shape: Shape) -> None:
        from launcher.spec.wording import unknown_key

        # The search for a similar name is slow, and a file full of unknown settings is not a spec.
        fix = unknown_key(str(at[-1]), at[:-1], shape.items, self.root) if len(self.problems) < 50 else ""
        self.problems.append(Problem(node.where, f"unknown setting {dotted(at)}", fix))

    def check_required(self, node: Map, known: Mapping[str, Field], at: Path) -> None:
        """Report each required setting that is missing, unless a misspelt one was reported in its place."""
        for name in (name for name, field in known.items() if field.required and name not in node.entries):
            from launcher.spec.wording import wanted
            from launcher.text import near

            if near(name, node.entries.keys() - known.keys(), 0.7):
                self.invalid.append((*at, name))
            else:
                self.refuse(node, (*at, name), "required, but missing", f"add {wanted(known[name].shape)}")

    def list(self, node: Node, shape: Shape, at: Path) -> Any:
        """Decode a list; some settings also take a single value."""
        if isinstance(node, Scalar) and node.value in shape.choices:
            return node.value
        if isinstance(node, Scalar) and node.value is not None and at in ONE_OR_LIST:
            value = self.scalar(node, replace(shape_of(shape.items), choices=shape.choices), at)
            return INVALID if value is INVALID else (value,)
        if not isinstance(node, List):
            return self.mistyped(node, shape, at)
        if len(node.items) < (shape.bound("min_length") or 0):
            return self.refuse(node, at, "is an empty list", "add an entry")
        item, lenient = shape_of(shape.items), at in LENIENT
        values = [self.item(child, item, (*at, index), lenient) for index, child in enumerate(node.items)]
        return tuple(value for value in values if value is not INVALID)

    def map(self, node: Node, shape: Shape, at: Path) -> Any:
        """Decode a section with free keys."""
        if not isinstance(node, Map):
            return self.mistyped(node, shape, at)
        limit = shape.bound("max_length")
        if limit is not None and len(node.entries) > limit:
            return self.refuse(node, at, f"has {len(node.entries)} entries", f"use {limit} or fewer")
        item, keys, lenient = shape_of(shape.items), shape_of(shape.keys), at in LENIENT
        values = {}
        for key, child in node.entries.items():
            valid_key = self.scalar(Scalar(child.where, key, key), keys, (*at, key))
            value = self.item(child, item, (*at, key), lenient)
            if valid_key is not INVALID and value is not INVALID:
                values[key] = value
        return values

    def item(self, node: Node, shape: Shape, at: Path, lenient: bool) -> Any:
        """Decode an item of a list or map. If `lenient`, any scalar is text, exactly as written."""
        if not lenient or isinstance(node, Broken):
            return self.decode(node, shape, at)
        if isinstance(node, Scalar) and node.value is not None:
            return node.text
        if isinstance(node, Scalar):
            return self.refuse(node, at, "has no value", 'write "" for an empty text, or remove the line')
        return self.mistyped(node, shape, at)

    def json(self, node: Node, _shape: Shape, at: Path) -> Any:
        """Return free-form data, and report numbers that JSON cannot represent."""
        for path, scalar in scalars_below(node, at):
            value = scalar.value
            if isinstance(value, float) and not math.isfinite(value):
                fix = "use a finite number up to 1e308: the value is sent as JSON, which has no .nan and no .inf"
                self.refuse(scalar, path, f"invalid number {clipped(scalar.text)}", fix)
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                self.refuse(scalar, path, f"{clipped(scalar.text)} is out of range", "use a 64-bit integer")
        return plain(node)

    def scalar(self, node: Node, shape: Shape, at: Path) -> Any:
        """Decode a single value: check its type, then its range or pattern."""
        types = ACCEPTED_TYPES[shape.kind]
        is_bool = isinstance(node, Scalar) and isinstance(node.value, bool)  # true is an int to Python, but no number
        if not isinstance(node, Scalar) or not isinstance(node.value, types) or is_bool != (shape.kind == "bool"):
            return self.mistyped(node, shape, at)
        if isinstance(node.value, str) and len(node.value) > MAX_TEXT:
            length = f"is too long ({len(node.value):,} characters; the maximum is {MAX_TEXT:,})"
            return self.rejected(node, shape, at, length)
        if isinstance(node.value, str) and not node.value.isprintable():
            return self.rejected(node, shape, at, "contains an invisible character, such as a line break")
        if isinstance(node.value, float) and not math.isfinite(node.value):
            return self.rejected(node, shape, at, "is out of range")
        try:
            value = msgspec.convert(node.value, shape.hint, strict=True)
        except (msgspec.ValidationError, OverflowError):
            return self.rejected(node, shape, at, "is invalid" if types == (str,) else "is out of range")
        matches = not shape.pattern or re.search(shape.pattern, value)
        return value if matches else self.rejected(node, shape, at, "is invalid")

    def mistyped(self, node: Node, shape: Shape, at: Path) -> Any:
        from launcher.spec.wording import type_mismatch

        return self.refuse(node, at, *type_mismatch(node, shape, at))

    def rejected(self, node: Node, shape: Shape, at: Path, why: str) -> Any:
        from launcher.spec.wording import show, wanted
        from launcher.text import near

        words = (*shape.choices, *(shape.bound("extra") or {}).get("words", ()))
        close = near(node.value, words) if isinstance(node, Scalar) and isinstance(node.value, str) else []
        fix = f"did you mean {close[0]}?" if close else f"use {wanted(shape)}"
        return self.refuse(node, at, f"{show(node, at)} {why}", fix)

    def refuse(self, node: Node, at: Path, what: str, fix: str) -> Any:
        self.problems.append(Problem(node.where, f"{dotted(at) or 'the spec'}: {what}", fix))
        self.invalid.append(at)
        return INVALID


def scalars_below(node: Node, at: Path) -> list[tuple[Path, Scalar]]:
    """Return all single values at and below a node, with their paths."""
    if isinstance(node, Map):
        return [scalar for key, child in node.entries.items() for scalar in scalars_below(child, (*at, key))]
    if isinstance(node, List):
        return [scalar for index, child in enumerate(node.items) for scalar in scalars_below(child, (*at, index))]
    return [(at, node)] if isinstance(node, Scalar) else []
