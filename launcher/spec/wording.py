"""Format values, types and suggestions for error messages. Imported only when there is an error to report."""

from __future__ import annotations

from msgspec import Struct

from launch_train.common.config import Config
from launcher.spec.nodes import List, Map, Node, Path, Scalar, clipped, dotted
from launcher.spec.secret_detection import known_secret, masked
from launcher.spec.shapes import Shape, fields, shape_of
from launcher.text import near

TYPE_NAMES = {
    "text": "text",
    "choice": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "map": "a section with `name: value` lines",
    "model": "a section",
}
PRIVATE = ("env", "secrets")
"""Sections whose values are never shown in full, as one may be a secret."""


MAIN = {("run",): "script", ("machine",): "type"}
"""Section -> the setting in it that a text in the section's place most likely is."""
WEBHOOK: tuple[Path, ...] = (("notify",), ("notify", "webhook"))
"""A webhook's URL is a secret, also where it stands in the place of its section."""


def show(node: Node, at: Path = ()) -> str:
    """Format a value for a message: shortened, and with secrets masked."""
    if isinstance(node, Map):
        return "a section"
    if isinstance(node, List):
        return "a list"
    if not isinstance(node, Scalar):
        return "an unreadable value"
    if is_private(node.text, at):
        return masked(node.text)
    return repr(clipped(node.text)) if isinstance(node.value, str) else clipped(node.text)


def is_private(text: str, at: Path) -> bool:
    """Return whether a value may be a secret, judged by its form or its section."""
    return known_secret(text) or (at[:1] != () and at[0] in PRIVATE) or at in WEBHOOK


def type_mismatch(node: Node, shape: Shape, at: Path) -> tuple[str, str]:
    """Return (what, fix) for a value of the wrong type."""
    fix, expected = f"use {wanted(shape)}", TYPE_NAMES[shape.kind]
    if isinstance(node, Scalar) and node.value is None:
        return "has no value", f"{fix}; or remove the line"
    if not isinstance(node, Scalar):
        return f"is {show(node)}, not {expected}", fix
    if at in MAIN and isinstance(node.value, str) and not is_private(node.text, at):
        fix = f"use {dotted(at)}: {{{MAIN[at]}: {clipped(node.text)}}}"
    if shape.kind in ("text", "choice") and not shape.pattern:
        fix = "to make it text, put it in quotes"
        if not is_private(node.text, at):
            fix += f': "{clipped(node.text)}"'
    return f"{show(node, at)} is {type_of(node)}, not {expected}", fix


def type_of(node: Node) -> str:
    """Return the type of a value in words: `text`, `a number`, `a list` …"""
    if not isinstance(node, Scalar):
        return show(node)
    if node.value is None:
        return "empty"
    types = ((bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "text"))
    return next((name for type_, name in types if isinstance(node.value, type_)), "of an unknown type")


def wanted(shape: Shape) -> str:
    """Describe a valid value: `a whole number from 1 to 16: GPUs on each node`."""
    if shape.kind == "choice":
        what = "one of " + ", ".join(shape.choices)
    elif shape.kind == "model":
        needed = [name for name, field in fields(shape.items).items() if field.required]
        what = "a section" + (f" with {' and '.join(needed)}" if needed else "")
    elif shape.pattern:
        what = ""
    else:
        above, least, most = shape.bound("gt"), shape.bound("ge"), shape.bound("le")
        bounds = [f"above {above:g}"] if above is not None else []
        bounds += [f"at most {most:g}"] if most is not None else []
        if least is not None and most is not None:
            bounds = [f"from {least:g} to {most:g}"]
        elif least is not None:
            bounds = [f"from {least:g}"]
        what = " ".join(filter(None, (TYPE_NAMES[shape.kind], ", ".join(bounds))))
    return ": ".join(filter(None, (what, shape.meaning)))


def unknown_key(key: str, at: Path, model: type[Struct], root: type[Struct]) -> str:
    """Suggest what an unknown key of the section `model` (at `at`) may have meant."""
    here = list(fields(model))
    places = {path: path.rpartition(".")[2] for path in every_path(root)}
    places |= {f"run.config.{name}": name for name in Config._fields}
    same = [path for path, name in places.items() if name == key]
    if not same and (close := near(key, here, 0.7)):
        return f"did you mean {close[0]}?"
    if not same and (close := near(key, places.values(), 0.8)):
        same = [path for path, name in places.items() if name == close[0]]
    if not same:
        return f"{f'`{dotted(at)}`' if at else 'a spec'} has: {', '.join(here)}"
    name = places[same[0]]
    above = dict.fromkeys(path.rpartition(".")[0] for path in same)
    return f"`{name}` belongs " + " or ".join(f"under `{path}`" if path else "at the top level" for path in above)


def every_path(model: type[Struct], above: str = "") -> list[str]:
    """Return the dotted names of all settings; those in the sections of a list as `vertex.nfs.path`."""
    paths = []
    for name, field in fields(model).items():
        paths.append(above + name)
        inner = shape_of(field.shape.items) if field.shape.kind == "list" else field.shape
        if inner.kind == "model":
            paths += every_path(inner.items, f"{above}{name}.")
    return paths
