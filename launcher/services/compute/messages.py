"""Convert Compute Engine's resources between JSON and Google's messages; make requests that its client can't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from launcher.errors import LaunchError
from launcher.gcp.api import http_date

ENDPOINT: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
PAGE_SIZE: Final = 500
"""Compute Engine's upper bound."""


class RestClient:
    """Plain REST requests, with the method signatures of Google's clients.

    The lists are over all zones and leave out a zone that is down, which compute_v1 1.56 can't request.
    """

    def __init__(self, session: Any, endpoint: str, project: str) -> None:
        self._session = session
        self._url = f"{endpoint}/compute/v1/projects/{project}"

    def instances(self, request: Mapping[str, str], retry: None, timeout: float) -> dict[str, Any]:
        """Return one page of the VMs in all zones."""
        return self._aggregated_list("instances", request, timeout)

    def disks(self, request: Mapping[str, str], retry: None, timeout: float) -> dict[str, Any]:
        """Return one page of the disks in all zones."""
        return self._aggregated_list("disks", request, timeout)

    def now(self, request: Mapping[str, str], retry: None, timeout: float) -> float:
        """Return the time of a response, which may be a refusal."""
        answer = self._session.get(self._url, params={"fields": "name"}, timeout=timeout)
        time = http_date(answer.headers.get("Date", ""))
        if time is None:
            raise ValueError("response without a Date header")
        return time

    def _aggregated_list(self, resource: str, request: Mapping[str, str], timeout: float) -> dict[str, Any]:
        from google.api_core.exceptions import from_http_response

        optional = {"filter": request["filter"], "pageToken": request["page_token"]}
        params = {"maxResults": PAGE_SIZE, "returnPartialSuccess": "true", **{k: v for k, v in optional.items() if v}}
        answer = self._session.get(f"{self._url}/aggregated/{resource}", params=params, timeout=timeout)
        if answer.status_code >= 400:
            raise from_http_response(answer)
        page = answer.json()
        if not isinstance(page, dict):
            raise ValueError("response is not a list")
        return page


def message_of(kind: Any, body: Mapping[str, Any]) -> Any:
    """Convert JSON to one of compute_v1's messages. Raises LaunchError: the client does not know one of its fields."""
    from google.protobuf.json_format import ParseDict, ParseError

    try:
        return kind.wrap(ParseDict(dict(body), kind.pb()()))
    except ParseError as error:
        message = str(error).partition("\n")[0]  # the other lines list all known fields
        raise LaunchError(
            f"the installed google-cloud-compute is too old for this request: {message}",
            "pip install --upgrade google-cloud-compute",
        ) from error


def as_json(message: Any) -> dict[str, Any]:
    """Convert one of compute_v1's messages to canonical proto3 JSON."""
    from google.protobuf.json_format import MessageToDict

    fields: dict[str, Any] = MessageToDict(type(message).pb(message))
    return fields


def origin_only(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with gcloud's endpoint override (…/compute/v1/) reduced to its origin: Google's clients
    add the path themselves."""
    url = urlsplit(environ.get(ENDPOINT, ""))
    return {**environ, ENDPOINT: f"{url.scheme}://{url.netloc}"} if url.netloc else environ
