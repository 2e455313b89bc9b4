"""Parse JSON strictly into Google's protobuf types.

`json_format.ParseDict` stops at the first error and accepts some invalid input (a list in place of a message, an
unknown enum number). So the body is first checked against the message's descriptor, and then passed to ParseDict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from launcher.testing.googlecloud.wire import ApiError, Request, Response, Violation, json_response

WELL_KNOWN = "google.protobuf."  # durations, timestamps and others have their own JSON format


def parse(body: dict[str, Any], message: Any, root: str) -> Any:
    """Fill `message` (an empty protobuf message) from `body` and return it. `root` is the body's name in errors.

    Raises ApiError 400 with all violations, with the messages of Google's JSON front end.
    """
    violations = tuple(_message(body, message.DESCRIPTOR, root))
    if violations:
        raise ApiError(400, "\n".join(message for _, message in violations), violations=violations)
    try:
        return json_format.ParseDict(body, message, ignore_unknown_fields=False)
    except (json_format.ParseError, TypeError, AttributeError) as error:
        text = f"Invalid value at '{root}': {error}"
        raise ApiError(400, text, violations=(Violation(root, text),)) from error


def message_response(request: Request, message: Any) -> Response:
    return json_response(to_json(message, request))


def to_json(message: Any, request: Request | None = None) -> dict[str, Any]:
    """Convert a message as an API does: camelCase, and enums by name unless the request's $alt wants numbers."""
    numbers = request is not None and "enum-encoding=int" in request.query.get("$alt", "")
    return json_format.MessageToDict(message, use_integers_for_enums=numbers)


def _message(value: Any, descriptor: Any, path: str) -> Iterator[Violation]:
    if value is None or descriptor.full_name.startswith(WELL_KNOWN):
        return
    if not isinstance(value, dict):
        yield _invalid(path, descriptor.full_name, value)
        return
    for name, item in value.items():
        field = descriptor.fields_by_camelcase_name.get(name) or descriptor.fields_by_name.get(name)
        field = field or next((f for f in descriptor.fields if f.json_name == name), None)
        if field is None:
            text = f"Invalid JSON payload received. Unknown name {json.dumps(name)} at '{path}': Cannot find field."
            yield Violation(path, text)
        else:
            yield from _field(item, field, f"{path}.{field.name}")


def _field(value: Any, field: Any, path: str) -> Iterator[Violation]:
    if value is None:
        return
    if field.message_type and field.message_type.GetOptions().map_entry:
        yield from _map(value, field, path)
    elif not field.is_repeated:
        yield from _single(value, field, path)
    elif not isinstance(value, list):
        yield _invalid(path, "list", value)
    else:
        for n, item in enumerate(value):
            yield from _single(item, field, f"{path}[{n}]")


def _map(value: Any, field: Any, path: str) -> Iterator[Violation]:
    if not isinstance(value, dict):
        yield _invalid(path, "map", value)
        return
    for key, item in value.items():
        yield from _single(item, field.message_type.fields_by_name["value"], f"{path}[{json.dumps(key)}]")


def _single(value: Any, field: Any, path: str) -> Iterator[Violation]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        yield from _message(value, field.message_type, path)
    elif field.type == FieldDescriptor.TYPE_STRING:
        yield from _string(value, field, path)
    elif field.type == FieldDescriptor.TYPE_BOOL and not isinstance(value, bool):
        yield _invalid(path, "TYPE_BOOL", value)
    elif field.type == FieldDescriptor.TYPE_ENUM:
        enum = field.enum_type
        known = enum.values_by_name if isinstance(value, str) else enum.values_by_number
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in known:
            yield _invalid(path, f"type.googleapis.com/{enum.full_name}", value)


def _string(value: Any, field: Any, path: str) -> Iterator[Violation]:
    """Check a string. Compute's enums are string fields; a nested enum of the same name lists the allowed values."""
    if not isinstance(value, str):
        yield _invalid(path, "TYPE_STRING", value)
        return
    name = "".join(part.capitalize() for part in field.name.split("_"))
    enum = field.containing_type.enum_types_by_name.get(name)
    if enum is not None and value not in enum.values_by_name:
        camel = re.sub(r"_(\w)", lambda m: m[1].upper(), path)
        yield Violation(path, f"Invalid value for field '{camel}': '{value}'.")


def _invalid(path: str, kind: str, value: Any) -> Violation:
    return Violation(path, f"Invalid value at '{path}' ({kind}), {json.dumps(value)}")
