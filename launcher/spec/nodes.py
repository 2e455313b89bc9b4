"""Nodes of a parsed YAML file: its values, each with its position (`file:line`)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

Path = tuple[str | int, ...]
"""Path from the root of a spec to a value: ``("vertex", "nfs", 0, "path")``."""


class Scalar(Struct, frozen=True):
    """A single value: `value` as YAML 1.2 resolves it, `text` as written, without quotes."""

    where: str
    text: str
    value: bool | int | float | str | None


class List(Struct, frozen=True):
    """A list."""

    where: str
    items: tuple[Node, ...]


class Map(Struct, frozen=True):
    """A section, with keys in the file's order. The `where` of an entry is the line of its key."""

    where: str
    entries: dict[str, Node]


class Broken(Struct, frozen=True):
    """A value that the loader has already reported, so that later checks stay silent."""

    where: str


Node = Scalar | List | Map | Broken


def plain(node: Node) -> Any:
    """Return the node as dicts, lists and scalars; a broken value becomes None."""
    if isinstance(node, Map):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, List):
        return [plain(item) for item in node.items]
    return node.value if isinstance(node, Scalar) else None


def from_plain(value: Any, where: str) -> Node:
    """Return the node of plain data; the inverse of `plain`, for the value of a flag."""
    if isinstance(value, dict):
        return Map(where, {str(key): from_plain(item, where) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return List(where, tuple(from_plain(item, where) for item in value))
    return Scalar(where, written(value), value)


def written(value: Any) -> str:
    """Return a scalar as YAML text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def node_at(node: Node, path: Path) -> Node:
    """Return the value at `path`, or its nearest ancestor in the file."""
    for step in path:
        if isinstance(node, Map) and step in node.entries:
            node = node.entries[str(step)]
        elif isinstance(node, List) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
        else:
            break
    return node


def clipped(text: str) -> str:
    """Shorten a text to 40 characters, for messages."""
    return text if len(text) <= 40 else text[:39] + "…"


def dotted(path: Path) -> str:
    """Return a path as messages show it: ``vertex.nfs[0].path``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{clipped(step)}" for step in path)
    return "".join(steps).removeprefix(".")
