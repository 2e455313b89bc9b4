"""Open Google's client for Cloud Storage, with the endpoint and credentials that the environment selects.

Every request respects the time limit of its call. Imports requests, so it is imported late.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import Timeout

from launch_train.common.errors import OutputError
from launch_train.common.loopback import is_plain_loopback
from launch_train.common.storage.retry import CURRENT, RetryBudget

CONNECTIONS = 32
"""Connections kept open for the threads of one client; urllib3 would keep 10, and reopen the others each time."""

BLOCK = 1 << 20
"""Bytes of a body between two checks of the time."""


def open_storage_client() -> Any:
    """Return a client whose requests respect the time limit of their call. Raises OutputError."""
    try:
        from google.cloud import storage
    except ImportError as error:
        raise OutputError("gs:// needs google-cloud-storage: pip install 'gcp-launch[gcp]'") from error
    from google.auth.exceptions import DefaultCredentialsError

    endpoint = _endpoint(os.environ)
    options = {"api_endpoint": endpoint} if endpoint else None
    try:
        client = storage.Client(
            project=None, credentials=storage_credentials(os.environ, endpoint), client_options=options
        )
    except DefaultCredentialsError as error:
        raise OutputError("gs:// needs credentials: gcloud auth application-default login") from error
    # The client's session isn't public, but Google's guides mount an adapter in the same way.
    if not getattr(client._http, "is_mtls", False):  # its adapter carries the client's certificate
        for scheme in ("https://", "http://"):
            client._http.mount(scheme, TimeLimitAdapter(pool_maxsize=CONNECTIONS))
    # For tracing, version 3.17 requests the bucket's metadata beside each first request. That needs a permission that
    # a run may lack, and retries for 120 s in its own thread.
    client._bucket_metadata_cache = None
    _use_separate_randomness()
    return client


class TimeLimitAdapter(HTTPAdapter):
    """Shortens timeouts to the remaining time of the call.

    A timeout only limits one silence, and a slow link may never be silent; so an endless body is aborted between two
    blocks.
    """

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, *args: Any, **options: Any
    ) -> Response:
        if budget := CURRENT.get():
            timeout = (budget.timeout(), budget.timeout())
            body: Any = request.body
            if isinstance(body, bytes | memoryview) and len(body) > BLOCK:
                request.body = _LimitedBody(memoryview(body), budget)  # type: ignore[assignment]  # any iterable works
        response = super().send(request, stream, timeout, *args, **options)
        if response.status_code >= 400:
            # Read now: Google's client doesn't read the body of a 401, which blocks the connection.
            _ = response.content
        return response


class _LimitedBody:
    """A body that is sent in blocks, without a copy, until the time is up."""

    def __init__(self, body: memoryview, budget: RetryBudget) -> None:
        self._body, self._budget = body, budget

    def __len__(self) -> int:
        return len(self._body)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._body), BLOCK):
            if self._budget.left() <= 0:
                raise Timeout("the time limit passed while the body was sent")
            yield self._body[start : start + BLOCK]


def _use_separate_randomness() -> None:
    """Give Google's libraries a separate random generator.

    They draw from Python's global one, for upload boundaries and waits, in any thread: the random numbers of a training
    run would depend on its network.
    """
    from google.auth import _exponential_backoff
    from google.cloud.storage._media import _upload

    for module in (_exponential_backoff, _upload):
        if getattr(module, "random", None) is random:
            module.random = _RANDOM


_RANDOM = random.Random()


def _endpoint(environ: Mapping[str, str]) -> str | None:
    """Return scheme, host and port of Cloud Storage, from gcloud's variable (which ends with the API's path) or the
    emulator's (which may lack a scheme); None for Google's own."""
    override = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "").rstrip("/").removesuffix("/storage/v1")
    emulator = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    if not override and emulator and "://" not in emulator:
        return f"http://{emulator}"
    return override or emulator or None


def storage_credentials(environ: Mapping[str, str], endpoint: str | None) -> Any:
    """Return the credentials to use.

    Anonymous if gcloud's credentials are disabled; else gcloud's token; else anonymous for an emulator; else None:
    Google's default.
    """
    from google.auth.credentials import AnonymousCredentials
    from google.oauth2.credentials import Credentials

    if environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in _TRUE:
        return AnonymousCredentials()
    if token := _gcloud_token(environ):
        return Credentials(token)
    if environ.get("STORAGE_EMULATOR_HOST") or (endpoint and is_plain_loopback(endpoint)):
        return AnonymousCredentials()
    return None


_TRUE = ("true", "1", "yes", "on", "y")
"""Values that gcloud treats as true (googlecloudsdk.core.properties)."""


def _gcloud_token(environ: Mapping[str, str]) -> str | None:
    """Return gcloud's access token, from the environment or the file that it names; None if there is none."""
    token, file = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"), environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    if token or not file:
        return token or None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise OutputError(f"the access token can't be read from {file}: {error}") from error
