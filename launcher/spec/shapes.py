"""Describe the models' types as data: what kind of value each field takes, and within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct
from msgspec.structs import fields as struct_fields

LENIENT = frozenset({("env",), ("run", "args"), ("run", "command"), ("run", "resume_args")})
"""Sections whose values are text for a program: plain scalars are kept as written (`LR: 1e-4` is "1e-4")."""

ONE_OR_LIST = frozenset({("provisioning",), ("regions",), ("zones",)})
"""Lists that also accept a single value."""

KINDS = {str: "text", int: "int", float: "float", bool: "bool", Any: "any"}


class Shape(Struct, frozen=True):
    """The values that a field takes. `kind`: text, int, float, bool, choice, list, map, model or any."""

    kind: str
    hint: Any
    """The type to convert a scalar to, bounds included."""
    metas: tuple[Meta, ...] = ()
    nullable: bool = False
    items: Any = None
    """list: the type of an item; map: of a value; model: the class; text: of an item of the list that may stand in its
    place."""
    keys: Any = None
    """map: the type of a key."""
    choices: tuple[str, ...] = ()
    """choice: the allowed words; list: words accepted instead of a list."""

    def bound(self, name: str) -> Any:
        """Return the innermost bound of this name (`ge`, `max_length` …), or None."""
        return next((value for meta in self.metas if (value := getattr(meta, name)) is not None), None)

    @property
    def pattern(self) -> str | None:
        """The pattern that a text matches somewhere (launcher.spec.kinds.matching), or None."""
        extras = (meta.extra for meta in self.metas if meta.extra)
        return next((extra["pattern"] for extra in extras if "pattern" in extra), None)

    @property
    def meaning(self) -> str:
        """The descriptions of the type and of the field, in this order."""
        return "; ".join(dict.fromkeys(meta.description for meta in self.metas if meta.description))


class Field(Struct, frozen=True):
    """A field of a model."""

    shape: Shape
    required: bool


@cache
def fields(model: type[Struct]) -> Mapping[str, Field]:
    """Return the fields of a model by name, in their order."""
    return {
        info.name: Field(shape_of(info.type), info.default is NODEFAULT and info.default_factory is NODEFAULT)
        for info in struct_fields(model)
    }


def shape_of(hint: Any, metas: tuple[Meta, ...] = ()) -> Shape:
    """Return the shape of a type hint; `metas` are those of the enclosing hints."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return shape_of(args[0], (*hint.__metadata__, *metas))
    if origin in (Union, UnionType):
        return union_shape(args, metas)
    bounded = Annotated[(hint, *metas)] if metas else hint
    if hint in KINDS:
        return Shape(KINDS[hint], bounded, metas)
    of_generic = {
        Literal: lambda: Shape("choice", bounded, metas, choices=args),
        tuple: lambda: Shape("list", bounded, metas, items=args[0]),
        dict: lambda: Shape("map", bounded, metas, items=args[1], keys=args[0]),
    }
    return of_generic[origin]() if origin else Shape("model", bounded, metas, items=hint)


def union_shape(args: tuple[Any, ...], metas: tuple[Meta, ...]) -> Shape:
    """Return the shape of `T | None`, of a list with an alternative word (`regions: any`), or of a text with an
    alternative list (`machine.type`)."""
    first, *rest = [shape_of(arg, metas) for arg in args if arg is not NoneType]
    words = tuple(word for other in rest for word in other.choices)
    items = first.items or next((other.items for other in rest), None)
    return Shape(first.kind, first.hint, first.metas, NoneType in args, items, first.keys, (*first.choices, *words))
