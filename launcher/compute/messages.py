"""Compute Engine's resources between JSON and Google's messages, and the one list that its client can't ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from launcher.errors import LaunchError

ENDPOINT: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
PAGE: Final = 500
"""The most that Compute Engine puts on one."""


class Lists:
    """The list over all zones, which compute_v1 1.56 can't ask to leave out a zone that is down."""

    def __init__(self, session: Any, endpoint: str, project: str) -> None:
        self._session = session
        self._url = f"{endpoint}/compute/v1/projects/{project}/aggregated/instances"

    def instances(self, request: Mapping[str, str], retry: None, timeout: float) -> dict[str, Any]:
        """One page, as a client's method answers it."""
        from google.api_core.exceptions import from_http_response

        wanted = {"filter": request["filter"], "pageToken": request["page_token"]}
        params = {"maxResults": PAGE, "returnPartialSuccess": "true", **{k: v for k, v in wanted.items() if v}}
        answer = self._session.get(self._url, params=params, timeout=timeout)
        if answer.status_code >= 400:
            raise from_http_response(answer)
        page = answer.json()
        if not isinstance(page, dict):
            raise ValueError("a list that is none")
        return page


def changed(metadata: Mapping[str, Any], key: str, value: str | None) -> dict[str, Any]:
    """An Instance's metadata with one item set, or without it; its fingerprint tells upon which state."""
    others = [item for item in metadata.get("items", ()) if item.get("key") != key]
    items = others if value is None else [*others, {"key": key, "value": value}]
    fingerprint = {"fingerprint": metadata["fingerprint"]} if "fingerprint" in metadata else {}
    return {**fingerprint, "items": items}


def message_of(kind: Any, body: Mapping[str, Any]) -> Any:
    """JSON as one of compute_v1's messages. Raises LaunchError: this client doesn't know a field of it."""
    from google.protobuf.json_format import ParseDict, ParseError

    try:
        return kind.wrap(ParseDict(dict(body), kind.pb()()))
    except ParseError as error:
        said = str(error).partition("\n")[0]  # it goes on with all fields that there are
        raise LaunchError(
            f"the installed google-cloud-compute doesn't know all of the request: {said}",
            "pip install --upgrade google-cloud-compute",
        ) from error


def as_json(message: Any) -> dict[str, Any]:
    """One of compute_v1's messages as canonical proto3 JSON."""
    from google.protobuf.json_format import MessageToDict

    found: dict[str, Any] = MessageToDict(type(message).pb(message))
    return found


def origin_only(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with gcloud's override of the endpoint (…/compute/v1/) as Google's clients take it: without its
    path, which they bring themselves."""
    url = urlsplit(environ.get(ENDPOINT, ""))
    return {**environ, ENDPOINT: f"{url.scheme}://{url.netloc}"} if url.netloc else environ
