"""Google's answers held against those of the tests' loopback cloud: names the fields where ours is wrong. Pure.

The shape of an operation's answers is, for each field, the kinds of values and, of enums, the values. Ids, times and
other texts count by their kind alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

ENUM: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
FREE: Final = frozenset({"labels", "metadata", "metadatas", "env", "options", "items"})
"""Objects whose keys are somebody's names, where they aren't lists."""

Shape = dict[str, set[str]]
"""A field's dotted path (`a.b[].c`) -> its kinds (string, number, bool, null, object, list, enum:VALUE)."""


def differences(google: Iterable[Mapping[str, Any]], ours: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What differs between two recordings, a line each. Operations that only one of them has say nothing of a field."""
    theirs, mine = shapes(google), shapes(ours)
    for operation in sorted(theirs.keys() & mine.keys()):
        yield from (f"{operation}: {text}" for text in of_operation(theirs[operation], mine[operation]))
    if unplayed := sorted(theirs.keys() - mine.keys()):
        yield f"not compared, as the loopback cloud was not asked: {', '.join(unplayed)}"


def of_operation(google: Shape, ours: Shape) -> Iterator[str]:
    """What differs in one operation's answers. Below a field that differs nothing more is told, and nothing of a list
    that is empty on one side: of Google's, an empty one isn't written at all."""
    for path in sorted(google.keys() ^ ours.keys()):
        above = parent(path)
        known = not above or bool(kinds(google.get(above, ())) & kinds(ours.get(above, ())))
        is_empty = path.endswith("[]") or (path in ours and kinds(ours[path]) == {"list"})
        if known and not is_empty:
            yield f"missing field {path}" if path in google else f"extra field {path}"
    for path in sorted(google.keys() & ours.keys()):
        yield from of_field(path, google[path], ours[path])


def of_field(path: str, google: set[str], ours: set[str]) -> Iterator[str]:
    """What differs in one field."""
    enums, own = {one for one in google if one.startswith("enum:")}, {one for one in ours if one.startswith("enum:")}
    if not kinds(google) & kinds(ours):
        yield f"{path} is {' or '.join(sorted(kinds(google)))}, not {' or '.join(sorted(kinds(ours)))}"
    elif enums and own and (others := enums - own):
        yield f"{path} has other values: {', '.join(sorted(one.removeprefix('enum:') for one in others))}"


def parent(path: str) -> str:
    """a.b for a.b.c, a.b for a.b[]; empty at the top."""
    return path[:-2] if path.endswith("[]") else path.rpartition(".")[0]


def kinds(found: Iterable[str]) -> set[str]:
    """The kinds alone: an enum's value is a string."""
    return {one.partition(":")[0].replace("enum", "string") for one in found}


def shapes(calls: Iterable[Mapping[str, Any]]) -> dict[str, Shape]:
    """Of each operation and status the union of its answers' shapes."""
    found: dict[str, Shape] = {}
    for call in calls:
        if call.get("answer") is not None:
            note(found.setdefault(f"{call['operation']} {call['status']}", {}), "", call["answer"])
    return found


def note(shape: Shape, path: str, value: Any) -> None:
    """Add a value to a shape."""
    if path:
        shape.setdefault(path, set()).add(kind_of(value))
    if isinstance(value, Mapping):
        free = path.rpartition(".")[2] in FREE or any("/" in key for key in value)
        for key, each in value.items():
            note(shape, f"{path}.{'*' if free else key}".lstrip("."), each)
    elif isinstance(value, list):
        for each in value:
            note(shape, f"{path}[]", each)


def kind_of(value: Any) -> str:
    """The kind of one value."""
    if isinstance(value, str):
        return f"enum:{value}" if ENUM.fullmatch(value) and len(value) > 1 else "string"
    names = {bool: "bool", int: "number", float: "number", dict: "object", list: "list", type(None): "null"}
    return names[type(value)]
