"""A subset of Compute Engine's list filters, pages, and lists over all zones.

Unsupported filters are refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from launcher.testing.googlecloud.wire import COMPARISONS, ApiError, Request, Response, json_response, page

LIST = ("filter", "maxResults", "orderBy", "pageToken", "returnPartialSuccess")
AGGREGATED = (*LIST, "includeAllScopes", "serviceProjectNumber")
MOST = 500

TERM = re.compile(
    r"\(?\s*(?P<no>NOT\s+|-)?(?P<field>[A-Za-z_][\w.-]*?)\s*(?P<op>!=|<=|>=|=|<|>|:|\beq\b|\bne\b)\s*"
    r'(?P<value>"[^"]*"|[^\s"()]+)\s*\)?'
)
JOINED = re.compile(r"\s+AND\s+|(?<=\))\s+(?=\()")

Item = dict[str, Any]


def passing(items: Iterable[Item], text: str) -> list[Item]:
    """Return the items that match a filter; all if it is empty. Raises ApiError 400."""
    terms = [_term(part.strip(), text) for part in JOINED.split(text.strip()) if part.strip()]
    return [item for item in items if all(term(item) for term in terms)]


def _term(part: str, text: str) -> Callable[[Item], bool]:
    match = TERM.fullmatch(part)
    if not match:
        raise ApiError(
            400, f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.", reason="invalid"
        )
    field, operator, value = match["field"], match["op"], match["value"].strip('"')
    return lambda item: _compare(_at(item, field), operator, value) != bool(match["no"])


def _at(item: Any, path: str) -> Any:
    """Return a field by its path. A label's name may contain dots and dashes."""
    for name in path.split("."):
        item = item.get(name) if isinstance(item, Mapping) else None
    return item


def _compare(have: Any, operator: str, value: str) -> bool:
    text = str(have).lower() if isinstance(have, bool) else "" if have is None else str(have)
    if operator in ("eq", "ne"):
        return bool(re.fullmatch(value.strip("'"), text)) == (operator == "eq")
    if operator == ":":
        return have is not None and (value == "*" or value.lower() in text.lower())
    return COMPARISONS[operator](text, value)


def listed(request: Request, kind: str, items: Iterable[Item]) -> Response:
    """Return a page of the items that match the request's filter. Raises ApiError 400."""
    request.only_query(*LIST)
    chosen, following = _page(request, passing(items, request.query.get("filter", "")))
    shown = {"items": chosen} if chosen else {}
    return json_response({"kind": kind, **shown, **following})


def aggregated(
    request: Request, kind: str, name: str, items: Iterable[tuple[str, Item]], scopes: Collection[str],
    unreachable: Collection[str] = (),
) -> Response:  # fmt: skip
    """Return a page over all `scopes` (zones/Z, regions/R). `items` are pairs of a scope and an item in it.

    Raises ApiError 503 if scopes are unreachable and the client does not accept partial lists.
    """
    request.only_query(*AGGREGATED)
    if unreachable and request.query.get("returnPartialSuccess", "").lower() != "true":
        where = ", ".join(sorted(unreachable))
        raise ApiError(503, f"The service is currently unavailable in {where}.", reason="backendError")
    pairs = [(scope, item) for scope, item in items if scope not in unreachable]
    kept = {id(item) for item in passing((item for _, item in pairs), request.query.get("filter", ""))}
    chosen, following = _page(request, [pair for pair in pairs if id(pair[1]) in kept])
    by_scope: dict[str, Any] = {scope: _warning("NO_RESULTS_ON_PAGE", scope) for scope in scopes}
    by_scope |= {scope: _warning("UNREACHABLE", scope) for scope in unreachable}
    for scope, item in chosen:
        by_scope[scope] = {name: [*by_scope[scope].get(name, ()), item]}
    more = {"unreachables": sorted(unreachable)} if unreachable else {}
    return json_response({"kind": kind, "items": by_scope, **more, **following})


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, str]]:
    size = min(int(request.query.get("maxResults", MOST)), MOST)
    chosen, following = page(items, size, request.query.get("pageToken", ""))
    return chosen, {"nextPageToken": following} if following else {}


def _warning(code: str, scope: str) -> dict[str, Any]:
    texts = {
        "NO_RESULTS_ON_PAGE": f"There are no results for scope '{scope}' on this page.",
        "UNREACHABLE": f"The scope '{scope}' is not reachable at the moment.",
    }
    return {"warning": {"code": code, "message": texts[code], "data": [{"key": "scope", "value": scope}]}}
