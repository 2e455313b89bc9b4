"""What the loader returns: the values of a file, each with the place where it stands."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

Path = tuple[str | int, ...]
"""The way from the top of a spec to one value: ``("vertex", "nfs", 0, "path")``."""


class Scalar(Struct, frozen=True):
    """One value: `value` is what YAML 1.2 makes of it, `text` how it was written, without quotes."""

    where: str
    text: str
    value: bool | int | float | str | None


class List(Struct, frozen=True):
    """A list."""

    where: str
    items: tuple[Node, ...]


class Map(Struct, frozen=True):
    """A section: keys in the file's order. The `where` of an entry is its key's line."""

    where: str
    entries: dict[str, Node]


class Broken(Struct, frozen=True):
    """A value that the loader has complained about already; nothing more is said about it."""

    where: str


Node = Scalar | List | Map | Broken


def plain(node: Node) -> Any:
    """The node as dicts, lists and scalars; a broken value is None."""
    if isinstance(node, Map):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, List):
        return [plain(item) for item in node.items]
    return node.value if isinstance(node, Scalar) else None


def from_plain(value: Any, where: str) -> Node:
    """The opposite of `plain`, for a value that a flag gave."""
    if isinstance(value, dict):
        return Map(where, {str(key): from_plain(item, where) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return List(where, tuple(from_plain(item, where) for item in value))
    return Scalar(where, written(value), value)


def written(value: Any) -> str:
    """A scalar as one writes it in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def place(node: Node, path: Path) -> str:
    """Where the value at `path` stands, or else its nearest ancestor that the file has."""
    for step in path:
        if isinstance(node, Map) and step in node.entries:
            node = node.entries[str(step)]
        elif isinstance(node, List) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
        else:
            break
    return node.where


def clipped(text: str) -> str:
    """At most 40 characters of it, for messages."""
    return text if len(text) <= 40 else text[:39] + "…"


def dotted(path: Path) -> str:
    """A path as it is written in messages and after --set: ``vertex.nfs[0].path``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{clipped(step)}" for step in path)
    return "".join(steps).removeprefix(".")
