"""A subset of Google's list filters: comparisons joined by AND, with optional NOT.

Unsupported filters are refused, never ignored.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from launcher.testing.googlecloud.errors import ApiError

TERM = re.compile(r'(?P<no>NOT\s+)?(?P<field>[A-Za-z_][\w.-]*)\s*(?P<op>!=|<=|>=|=|<|>|:)\s*(?P<value>"[^"]*"|[^\s"]+)')
NAMES = {"display_name": "displayName", "displayName": "displayName", "state": "state"}
TIMES = {"create_time": "createTime", "createTime": "createTime"}


def matches(job: dict[str, Any], text: str) -> bool:
    """Return whether a job (its JSON) matches a filter. Raises ApiError 400: unsupported filter."""
    return all(_term(job, term.strip()) for term in re.split(r"\s+AND\s+", text.strip()) if term.strip())


def _term(job: dict[str, Any], text: str) -> bool:
    found = TERM.fullmatch(text)
    if not found:
        raise ApiError(400, f"Invalid filter: {text}")
    value = found["value"].strip('"')
    return _compare(job, found["field"], found["op"], value, text) != bool(found["no"])


def _compare(job: dict[str, Any], field: str, operator: str, value: str, text: str) -> bool:
    if field.startswith("labels") and operator in (":", "="):
        labels = job.get("labels", {})
        key = field.removeprefix("labels").removeprefix(".") or value  # labels.KEY=VALUE, labels.KEY:* and labels:KEY
        return labels.get(key) == value if operator == "=" else key in labels
    if field in TIMES and operator != ":":
        return _ordered(job[TIMES[field]], operator, value)
    if field in NAMES and operator in ("=", "!="):
        return bool(job.get(NAMES[field], "") == value) == (operator == "=")
    if NAMES.get(field) == "displayName" and operator == ":":
        return fnmatchcase(job["displayName"], value)
    raise ApiError(400, f"Invalid filter: {text}")


def _ordered(left: str, operator: str, right: str) -> bool:
    """Compare RFC 3339 times in UTC, whose text order is their time order."""
    results = {"=": left == right, "!=": left != right, "<": left < right, ">": left > right}
    return {**results, "<=": left <= right, ">=": left >= right}[operator]
