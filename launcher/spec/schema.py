"""Generate the JSON Schema of a spec, for editors, from the models. It accepts what the reader accepts."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.spec.models import JobSpec
from launcher.spec.shapes import LENIENT, ONE_OR_LIST

AS_WRITTEN = ["string", "number", "boolean"]
"""Types of a plain scalar that the reader takes as text, exactly as written."""


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). It covers each setting on its own; only the reader checks combinations."""
    schema = msgspec.json.decode(msgspec.json.encode(msgspec.json.schema(JobSpec)))  # JSON has no tuples
    definitions: dict[str, Any] = schema["$defs"]
    for definition in definitions.values():
        for name, field in definition["properties"].items():
            definition["properties"][name] = described(field)
    for one_or_list in ONE_OR_LIST:  # a single value in place of a list
        options = field_at(definitions, one_or_list)["anyOf"]
        options.append(next(option["items"] for option in options if option.get("type") == "array"))
    for lenient in LENIENT:  # unquoted numbers and booleans as text
        field = field_at(definitions, lenient)
        inner = next((option for option in field.get("anyOf", ()) if option.get("type") == "array"), field)
        inner["additionalProperties" if inner["type"] == "object" else "items"] = {"type": AS_WRITTEN}
    definitions["JobSpec"]["required"].remove("name")  # the reader's default is the file's name
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "launch: a job",
        "description": "A training job, or a VM to work on, for launch.",
        **schema,
    }


def described(field: dict[str, Any]) -> dict[str, Any]:
    """Return an optional field with its description where editors look for it and also at its type, as its pattern."""
    options = field.get("anyOf", ({},))
    if "description" in field and options[-1] == {"type": "null"} and options[0].get("type") != "array":
        about = {name: field.pop(name) for name in ("description", "pattern") if name in field}
        field["anyOf"] = [{**about, **options[0]}, *options[1:]]
    described = [option for option in field.get("anyOf", ()) if "description" in option]
    return {"description": described[0]["description"], **field} if described else field


def field_at(definitions: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a field, following the references of its sections."""
    properties = definitions["JobSpec"]["properties"]
    for section in path[:-1]:
        properties = definitions[properties[section]["$ref"].rpartition("/")[2]]["properties"]
    field: dict[str, Any] = properties[path[-1]]
    return field
