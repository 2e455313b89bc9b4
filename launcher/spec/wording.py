"""How messages show values, kinds and near names. Loaded when there is something to complain about."""

from __future__ import annotations

from msgspec import Struct

from launcher.spec.nodes import List, Map, Node, Path, Scalar, clipped, dotted
from launcher.spec.secretive import known_secret, masked
from launcher.spec.shapes import Shape, fields, shape_of
from launcher.text import near

KIND_WORDS = {
    "text": "text",
    "choice": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "map": "a section of `name: value` lines",
    "model": "a section",
}
PRIVATE = ("env", "secrets")
"""Sections whose values are never shown in full: a secret may have ended up there."""


def show(node: Node, at: Path = ()) -> str:
    """A value as it may appear in a message: shortened, and never a secret."""
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
    """Return whether a value may be a secret, by its shape or its place."""
    return known_secret(text) or (at[:1] != () and at[0] in PRIVATE)


def mistake(node: Node, shape: Shape, at: Path) -> tuple[str, str]:
    """(what, fix) of a value that is of the wrong kind."""
    fix, kind = wanted(shape), KIND_WORDS[shape.kind]
    if isinstance(node, Scalar) and node.value is None:
        return "has no value", f"{fix}; or remove the line"
    if not isinstance(node, Scalar):
        return f"{show(node)}, not {kind}", fix
    if shape.kind in ("text", "choice") and not shape.bound("pattern"):
        fix = "put it in quotes to make it text"
        if not is_private(node.text, at):
            fix += f': "{clipped(node.text)}"'
    return f"{show(node, at)} is {is_a(node)}, not {kind}", fix


def is_a(node: Node) -> str:
    """What kind of value stands there: `text`, `a number`, `a list` …"""
    if not isinstance(node, Scalar):
        return show(node)
    if node.value is None:
        return "empty"
    kinds = ((bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "text"))
    return next((word for kind, word in kinds if isinstance(node.value, kind)), "of another kind")


def wanted(shape: Shape) -> str:
    """What would be right: `a whole number from 1 to 16: GPUs on each node`."""
    if shape.kind == "choice":
        what = "one of " + ", ".join(shape.choices)
    elif shape.kind == "model":
        needed = [name for name, field in fields(shape.items).items() if field.required]
        what = "a section" + (f" with {' and '.join(needed)}" if needed else "")
    elif shape.bound("pattern"):
        what = ""
    else:
        what = KIND_WORDS[shape.kind] + span(shape)
    return ": ".join(filter(None, (what, shape.meaning)))


def span(shape: Shape) -> str:
    """The bounds in words: ` from 1 to 16`, ` above 0, at most 168`."""
    above, least, most = shape.bound("gt"), shape.bound("ge"), shape.bound("le")
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}"
    words = [f"above {above:g}" if above is not None else "", f"at most {most:g}" if most is not None else ""]
    return (" " + ", ".join(filter(None, words))).rstrip()


def unknown_key(key: str, at: Path, model: type[Struct], root: type[Struct]) -> str:
    """What may have been meant by a key that `model` (at `at`) doesn't have."""
    here = list(fields(model))
    places = {path: path.rpartition(".")[2] for path in every_path(root)}
    same = [path for path, name in places.items() if name == key]
    if not same and (close := near(key, here, 0.7)):
        return f"did you mean `{close[0]}`?"
    if not same and (close := near(key, places.values(), 0.8)):
        same = [path for path, name in places.items() if name == close[0]]
    if not same:
        return f"{f'`{dotted(at)}`' if at else 'a spec'} has: {', '.join(here)}"
    name = places[same[0]]
    above = dict.fromkeys(path.rpartition(".")[0] for path in same)
    return f"`{name}` belongs " + " or ".join(f"under `{path}`" if path else "at the top level" for path in above)


def every_path(model: type[Struct], above: str = "") -> list[str]:
    """All fields of the models, dotted; those of a list's sections as `vertex.nfs.path`."""
    paths = []
    for name, field in fields(model).items():
        paths.append(above + name)
        inner = shape_of(field.shape.items) if field.shape.kind == "list" else field.shape
        if inner.kind == "model":
            paths += every_path(inner.items, f"{above}{name}.")
    return paths
