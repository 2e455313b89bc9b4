"""Compare the answers of Google in a bundle with the loopback cloud's.

The shape of an operation's answers is, for each field, the kinds of its values and, for enums, the values. Of ids,
times and other texts only the kind counts.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ENUM: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
FREE: Final = frozenset({"labels", "metadata", "metadatas", "env", "options", "items"})
"""Objects with keys that are names chosen by users, unless they are lists."""

Shape = dict[str, set[str]]
"""A field's dotted path (`a.b[].c`) -> its kinds (string, number, bool, null, object, list, enum:VALUE)."""


def read_bundle(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a bundle's results and calls."""
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("results.json")), json.loads(file.read("calls.json"))


def differences(google: Iterable[Mapping[str, Any]], ours: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each difference between two recordings. Only operations that both have are compared."""
    theirs, mine = shapes(google), shapes(ours)
    for operation in sorted(theirs.keys() & mine.keys()):
        yield from (f"{operation}: {text}" for text in operation_differences(theirs[operation], mine[operation]))
    if unplayed := sorted(theirs.keys() - mine.keys()):
        yield f"not compared, the loopback cloud had no such call: {', '.join(unplayed)}"


def operation_differences(google: Shape, ours: Shape) -> Iterator[str]:
    """Yield the differences in one operation's answers.

    Fields below one that differs are skipped. So are the elements of a list that is empty on one side, because Google
    omits empty lists.
    """
    for path in sorted(google.keys() ^ ours.keys()):
        above = parent(path)
        known = not above or bool(kinds(google.get(above, ())) & kinds(ours.get(above, ())))
        is_empty = path.endswith("[]") or (path in ours and kinds(ours[path]) == {"list"})
        if known and not is_empty:
            yield f"missing field {path}" if path in google else f"extra field {path}"
    for path in sorted(google.keys() & ours.keys()):
        theirs, mine = kinds(google[path]), kinds(ours[path])
        values, known_values = enum_values(google[path]), enum_values(ours[path])
        if not theirs & mine:
            yield f"{path} is {' or '.join(sorted(theirs))}, not {' or '.join(sorted(mine))}"
        elif values and known_values and (others := values - known_values):
            yield f"{path} has other values: {', '.join(sorted(others))}"


def enum_values(field_kinds: Iterable[str]) -> set[str]:
    """Return the values of a field that is an enum."""
    return {kind.removeprefix("enum:") for kind in field_kinds if kind.startswith("enum:")}


def parent(path: str) -> str:
    """Return a.b for a.b.c and for a.b[]; empty at the top."""
    return path[:-2] if path.endswith("[]") else path.rpartition(".")[0]


def kinds(field_kinds: Iterable[str]) -> set[str]:
    """Return the kinds without enum values: an enum's value is a string."""
    return {kind.partition(":")[0].replace("enum", "string") for kind in field_kinds}


def shapes(calls: Iterable[Mapping[str, Any]]) -> dict[str, Shape]:
    """Return the union of the answers' shapes for each operation and status."""
    shape_of: dict[str, Shape] = {}
    for call in calls:
        if call.get("answer") is not None:
            add_value(shape_of.setdefault(f"{call['operation']} {call['status']}", {}), "", call["answer"])
    return shape_of


def add_value(shape: Shape, path: str, value: Any) -> None:
    """Add a value to a shape."""
    if path:
        shape.setdefault(path, set()).add(kind_of(value))
    if isinstance(value, Mapping):
        free = path.rpartition(".")[2] in FREE or any("/" in key for key in value)
        for key, each in value.items():
            add_value(shape, f"{path}.{'*' if free else key}".lstrip("."), each)
    elif isinstance(value, list):
        for each in value:
            add_value(shape, f"{path}[]", each)


def kind_of(value: Any) -> str:
    """Return the kind of one value."""
    if isinstance(value, str):
        return f"enum:{value}" if ENUM.fullmatch(value) and len(value) > 1 else "string"
    names = {bool: "bool", int: "number", float: "number", dict: "object", list: "list", type(None): "null"}
    return names[type(value)]
