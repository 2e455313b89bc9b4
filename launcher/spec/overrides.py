"""Apply flags and `--set` to the nodes of a file before they are decoded, so that the same checks cover them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from launcher.errors import Problem, SpecError
from launcher.spec.nodes import List, Map, Node, Scalar, clipped, from_plain, plain
from launcher.spec.yaml_loader import load

BOOLEAN: Final = "(?i:true|false|yes|no|on|off|0|1)"
VALUE: Final = r"(?s)(-\.?\d|[^-]).*|-?"
"""Texts after `--NAME` that are its value: true or false, or anything but the next option."""
SET_ALL_ARGS: Final = "set run.args as a whole: --set 'run.args=[--NAME, VALUE]'"


class Override(Struct, frozen=True):
    """A setting that a flag gives."""

    path: str
    """Dotted: `machine.gpus`."""
    value: Any
    """Plain data: a scalar, list or dict."""
    where: str
    """The flag, for messages: `--gpus`, `--set limits.usd`."""
    node: Node | None = None
    """The value as it was written in YAML, if it was; ignored if it no longer equals `value`."""
    is_default: bool = False
    """It applies only if nothing before has set the field."""


def parse_set(text: str) -> Override:
    """Parse `a.b=VALUE`, where VALUE is YAML. Raises SpecError."""
    path, sign, value = text.partition("=")
    path = path.strip()
    where = f"--set {clipped(path)}"
    if not sign or not all(part.strip() == part != "" for part in path.split(".")):
        from launcher.spec.secret_detection import known_secret, masked

        field = re.match(r"[\w.-]*", text)[0]  # type: ignore[index]  # it matches everything
        start = masked(field) if known_secret(field) else clipped(field) + ("…" if field != text else "")  # no value
        what = "expected SETTING=VALUE"
        raise SpecError((Problem(f"--set {start}", what, "for example --set machine.gpus=8"),))
    if not value.strip():
        fix = f"""use --set {clipped(path)}=VALUE, or --set {clipped(path)}='""' for an empty text"""
        raise SpecError((Problem(where, "the value is missing", fix),))
    loaded = load(value.encode("utf-8", "surrogateescape"), lambda _line: where)
    if loaded.problems:
        raise SpecError(tuple(loaded.problems))
    return Override(path, plain(loaded.root), where, loaded.root)


def apply_overrides(root: Node, overrides: Sequence[Override]) -> tuple[Node, list[Problem]]:
    """Return the nodes with the overrides applied in order, and the problems of those that cannot be applied."""
    problems: list[Problem] = []
    for override in overrides:
        if override.is_default and is_set(root, override.path.split(".")):
            continue
        try:
            node = override.node  # as it was written, if possible
            if node is None or plain(node) != override.value:
                node = from_plain(override.value, override.where)
            root = put(root, override.path.split("."), node, override)
        except SpecError as error:
            problems += error.problems
    return root, problems


def is_set(node: Node, path: Sequence[str]) -> bool:
    """Return whether a field, or what should be a section above it, has a value other than null."""
    for step in path:
        if not isinstance(node, Map):
            break
        if step not in node.entries:
            return False
        node = node.entries[step]
    return not isinstance(node, Scalar) or node.value is not None


def put(node: Node, path: Sequence[str], value: Node, override: Override) -> Node:
    """Return the node with `value` at `path` below it, adding missing sections. Raises SpecError if a parent is not
    a section."""
    if not path:
        return value
    if override.path == f"run.args.{'.'.join(path)}":
        return put_argument(node, ".".join(path), value, override.where)
    if isinstance(node, Scalar) and node.value is None:
        node = Map(override.where, {})
    if not isinstance(node, Map):
        from launcher.spec.wording import type_of

        parent = ".".join(override.path.split(".")[: -len(path)]) or "the spec"
        what = f"cannot set {clipped(path[0])}: {parent} is {type_of(node)} ({node.where}), not a section"
        raise SpecError((Problem(override.where, what, f"set {parent} as a whole"),))
    child = node.entries.get(path[0], Map(override.where, {}))
    return Map(node.where, {**node.entries, path[0]: put(child, path[1:], value, override)})


def put_argument(arguments: Node, name: str, value: Node, where: str) -> Node:
    """Return `run.args` with one argument set. `--NAME VALUE`, `--NAME=VALUE` and `NAME=VALUE` keep their form; an
    argument that is missing is added as `--NAME=VALUE`, or as `NAME=VALUE` if all others have that form. true and false
    add and remove a flag without a value.

    Raises SpecError: the value is not a single one, the argument has several numbers, or `run.args` is not a list.
    """
    items = [*arguments.items] if isinstance(arguments, List) else []
    is_list = isinstance(arguments, List) or not plain(arguments)
    if not is_list or not isinstance(value, Scalar) or value.value is None:
        what = "expected a single value" if is_list else f"run.args is not a list ({arguments.where})"
        raise SpecError((Problem(where, what, SET_ALL_ARGS),))
    texts = [item.text if isinstance(item, Scalar) else "" for item in items]
    end = texts.index("--") if "--" in texts else len(texts)  # what follows are no options
    names = [text.partition("=")[0].lstrip("-+").replace("_", "-") for text in texts[:end]]
    same = [place for place, text in enumerate(names) if text == name.replace("_", "-")]
    place = next((at for at in reversed(same) if texts[at][0] in "-+" or "=" in texts[at]), end)  # the last one counts
    is_hydra = any("=" in text for text in texts) and not any(text.startswith("-") for text in texts)
    numbers = [
        item
        for item in items[place + 1 : min(place + 3, end)]
        if isinstance(item, Scalar) and type(item.value) in (int, float)
    ]
    if len(numbers) == 2 and "=" not in texts[place]:
        what = f"{texts[place]} has several values ({numbers[0].where})"
        raise SpecError((Problem(where, what, SET_ALL_ARGS),))
    if place < end and "=" in texts[place]:
        text = f"{texts[place].partition('=')[0]}={value.text}"
        items[place] = Scalar(where, text, text)
    elif place + 1 < end and re.fullmatch(BOOLEAN if isinstance(value.value, bool) else VALUE, texts[place + 1]):
        items[place + 1] = value
    elif isinstance(value.value, bool) and not is_hydra:
        flag = f"--{name}" if place == end else texts[place]
        items[place : place + (place < end)] = [Scalar(where, flag, flag)] * value.value
    elif place < end:
        items.insert(place + 1, value)
    else:
        text = f"{'' if is_hydra else '--'}{name}={value.text}"
        items.insert(end, Scalar(where, text, text))
    return List(where, tuple(items))
