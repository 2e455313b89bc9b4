"""Flags and `--set` put into the tree of a file before it is checked, so that they are checked like the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from launcher.errors import Problem, SpecError
from launcher.spec.loader import load
from launcher.spec.nodes import Map, Node, Scalar, clipped, from_plain, plain


class Override(NamedTuple):
    """One field said elsewhere than in the file."""

    path: str
    """Dotted: `machine.gpus`."""
    value: Any
    """Plain data: a scalar, list or dict."""
    where: str
    """The flag, for messages: `--gpus`, `--set limits.usd`."""
    node: Node | None = None
    """The value as it was written, where it was read as YAML; used as long as it says the same as `value`."""


def parse_set(text: str) -> Override:
    """`a.b=VALUE`, VALUE being YAML. Raises SpecError."""
    path, sign, value = text.partition("=")
    path = path.strip()
    where = f"--set {clipped(path)}"
    if not sign or not all(part.strip() == part != "" for part in path.split(".")):
        raise SpecError((Problem(f"--set {begun(text)}", "not a field and a value", "write --set a.b=VALUE"),))
    if not value.strip():
        raise SpecError((Problem(where, "no value", f"""write --set {clipped(path)}=VALUE; '""' is an empty text"""),))
    loaded = load(value.encode("utf-8", "surrogateescape"), lambda _line: where)
    if loaded.problems:
        raise SpecError(tuple(loaded.problems))
    return Override(path, plain(loaded.root), where, loaded.root)


def begun(text: str) -> str:
    """What of an unreadable --set may be shown: the field, if it is one. The rest may well be a secret."""
    from launcher.spec.secretive import known_secret, masked

    field = re.match(r"[\w.-]*", text)[0]  # type: ignore[index]  # it matches everything
    return masked(field) if known_secret(field) else clipped(field) + ("…" if field != text else "")


def apply(root: Node, overrides: Sequence[Override]) -> tuple[Node, list[Problem]]:
    """The tree with the overrides in it, the later ones on top, and what can't be set."""
    problems: list[Problem] = []
    for override in overrides:
        try:
            root = put(root, override.path.split("."), value_of(override), override)
        except SpecError as error:
            problems += error.problems
    return root, problems


def value_of(override: Override) -> Node:
    """The override's value as a node; as it was written where that is known and still true."""
    if override.node is not None and plain(override.node) == override.value:
        return override.node
    return from_plain(override.value, override.where)


def put(node: Node, path: Sequence[str], value: Node, override: Override) -> Node:
    """The node with `value` at `path` below it, sections made on the way. Raises SpecError where a value is in it."""
    if not path:
        return value
    if isinstance(node, Scalar) and node.value is None:
        node = Map(override.where, {})
    if not isinstance(node, Map):
        from launcher.spec.wording import is_a

        above = ".".join(override.path.split(".")[: -len(path)]) or "the spec"
        what = f"{above} is {is_a(node)} ({node.where}), so it has no `{clipped(path[0])}`"
        raise SpecError((Problem(override.where, what, f"set {above} as a whole"),))
    child = node.entries.get(path[0], Map(override.where, {}))
    return Map(node.where, {**node.entries, path[0]: put(child, path[1:], value, override)})
