"""The table of the spec's fields in docs/spec.md, made from the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launcher.spec.schema import json_schema
from tests.command import ROOT

PAGE = ROOT / "docs" / "spec.md"
TABLE = re.compile(r"(<!-- fields -->\n).*(<!-- end of fields -->)", re.DOTALL)


def renewed(text: str) -> str:
    """The page with its table as the schema has it now."""
    rows = "\n".join(f"| `{path}` | {kind} | {meaning} |" for path, kind, meaning in fields())
    return TABLE.sub(lambda match: f"{match[1]}| field | value | meaning |\n|---|---|---|\n{rows}\n{match[2]}", text)


def fields() -> Iterator[tuple[str, str, str]]:
    """(dotted path, kind of value, meaning) of every field."""
    schema = json_schema()
    yield from below("", schema["$defs"]["JobSpec"], schema["$defs"])


def below(path: str, model: dict[str, Any], models: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The fields of one model; nested models follow in place."""
    for name, field in model["properties"].items():
        nested = model_of(field, models)
        where = f"{path}{name}"
        if nested:
            yield from below(f"{where}{'[]' if 'items' in str(field)[:200] else ''}.", nested, models)
        else:
            required = " (required)" if name in model.get("required", ()) else ""
            yield where, kind_of(field) + required, str(field.get("description", "")).replace("|", "\\|")


def model_of(field: dict[str, Any], models: dict[str, Any]) -> dict[str, Any] | None:
    """The model that a field refers to, directly, or as an option, or as a list's item."""
    for option in (field, *field.get("anyOf", ()), field.get("items", {})):
        if "$ref" in option:
            found: dict[str, Any] = models[option["$ref"].rpartition("/")[2]]
            return found
    return None


def kind_of(field: dict[str, Any]) -> str:
    """`text`, `whole number`, `one of a, b` …"""
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    words |= {"object": "map", "array": "list", "null": ""}
    options = field.get("anyOf", [field])
    found: list[str] = []
    for option in options:
        if "enum" in option:
            found.append(" or ".join(f"`{value}`" for value in option["enum"] if value is not None))
        else:
            kinds = option.get("type", "")
            found += [words.get(kind, str(kind)) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    return ", ".join(dict.fromkeys(word for word in found if word))
