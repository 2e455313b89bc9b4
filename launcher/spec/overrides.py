"""Apply flags and `--set` to the nodes of a file before they are decoded, so that the same checks cover them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from launcher.errors import Problem, SpecError
from launcher.spec.nodes import Map, Node, Scalar, clipped, from_plain, plain
from launcher.spec.yaml_loader import load


class Override(NamedTuple):
    """A setting that a flag gives."""

    path: str
    """Dotted: `machine.gpus`."""
    value: Any
    """Plain data: a scalar, list or dict."""
    where: str
    """The flag, for messages: `--gpus`, `--set limits.usd`."""
    node: Node | None = None
    """The value as it was written in YAML, if it was; ignored if it no longer equals `value`."""


def parse_set(text: str) -> Override:
    """Parse `a.b=VALUE`, where VALUE is YAML. Raises SpecError."""
    path, sign, value = text.partition("=")
    path = path.strip()
    where = f"--set {clipped(path)}"
    if not sign or not all(part.strip() == part != "" for part in path.split(".")):
        what = "expected SETTING=VALUE"
        raise SpecError((Problem(f"--set {shown_start(text)}", what, "for example --set machine.gpus=8"),))
    if not value.strip():
        fix = f"""use --set {clipped(path)}=VALUE, or --set {clipped(path)}='""' for an empty text"""
        raise SpecError((Problem(where, "the value is missing", fix),))
    loaded = load(value.encode("utf-8", "surrogateescape"), lambda _line: where)
    if loaded.problems:
        raise SpecError(tuple(loaded.problems))
    return Override(path, plain(loaded.root), where, loaded.root)


def shown_start(text: str) -> str:
    """Return the part of an invalid --set that a message may show: the setting's name. The rest may be a secret."""
    from launcher.spec.secret_detection import known_secret, masked

    field = re.match(r"[\w.-]*", text)[0]  # type: ignore[index]  # it matches everything
    return masked(field) if known_secret(field) else clipped(field) + ("…" if field != text else "")


def apply(root: Node, overrides: Sequence[Override]) -> tuple[Node, list[Problem]]:
    """Return the nodes with the overrides applied in order, and the problems of those that cannot be applied."""
    problems: list[Problem] = []
    for override in overrides:
        try:
            root = put(root, override.path.split("."), value_of(override), override)
        except SpecError as error:
            problems += error.problems
    return root, problems


def value_of(override: Override) -> Node:
    """Return the override's value as a node, as it was written if possible."""
    if override.node is not None and plain(override.node) == override.value:
        return override.node
    return from_plain(override.value, override.where)


def put(node: Node, path: Sequence[str], value: Node, override: Override) -> Node:
    """Return the node with `value` at `path` below it, adding missing sections. Raises SpecError if a parent is not
    a section."""
    if not path:
        return value
    if isinstance(node, Scalar) and node.value is None:
        node = Map(override.where, {})
    if not isinstance(node, Map):
        from launcher.spec.wording import type_of

        parent = ".".join(override.path.split(".")[: -len(path)]) or "the spec"
        what = f"cannot set {clipped(path[0])}: {parent} is {type_of(node)} ({node.where}), not a section"
        raise SpecError((Problem(override.where, what, f"set {parent} as a whole"),))
    child = node.entries.get(path[0], Map(override.where, {}))
    return Map(node.where, {**node.entries, path[0]: put(child, path[1:], value, override)})
