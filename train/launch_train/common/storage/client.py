"""Google's client for Cloud Storage: where the environment says that it is, and as whom it says that we ask."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch_train.common.errors import OutputError
from launch_train.common.loopback import is_plain_loopback

CONNECTIONS = 32
"""Kept open for the threads of one client; urllib3 keeps 10 unless told, and opens the others anew each time."""


def open_client() -> Any:
    """A client whose requests keep within their call's time. Raises OutputError."""
    try:
        from google.cloud import storage
    except ImportError as error:
        raise OutputError("gs:// needs google-cloud-storage: install the extra gcp") from error
    from google.auth.exceptions import DefaultCredentialsError

    endpoint = _endpoint(os.environ)
    options = {"api_endpoint": endpoint} if endpoint else None
    try:
        client = storage.Client(project=None, credentials=credentials(os.environ, endpoint), client_options=options)
    except DefaultCredentialsError as error:
        raise OutputError("gs:// needs credentials: gcloud auth application-default login") from error
    _keep_within_time(client)
    # For traces that nobody asked for, 3.17 asks for the bucket beside each first request: a permission that a run
    # need not have, in a thread with 120 s of tries of its own.
    client._bucket_metadata_cache = None
    _keep_off_our_randomness()
    return client


def _keep_within_time(client: Any) -> None:
    """There is no public way to the client's session; Google's own guides mount adapters like this."""
    from launch_train.common.storage.session import PatientAdapter

    session = client._http
    if not getattr(session, "is_mtls", False):  # its adapter carries the client's certificate
        for scheme in ("https://", "http://"):
            session.mount(scheme, PatientAdapter(pool_maxsize=CONNECTIONS))


def _keep_off_our_randomness() -> None:
    """Google's libraries draw from Python's global random numbers, for a boundary in each upload and for waits, in
    whatever thread: what a training run draws would depend on its network. They get a source of their own."""
    from google.auth import _exponential_backoff
    from google.cloud.storage._media import _upload

    for module in (_exponential_backoff, _upload):
        if getattr(module, "random", None) is random:
            module.random = _RANDOM


_RANDOM = random.Random()


def _endpoint(environ: Mapping[str, str]) -> str | None:
    """Scheme, host and port of Cloud Storage, from gcloud's variable (which ends with the API's path) or the
    emulator's (which may do without a scheme); None is Google's own."""
    override = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "").rstrip("/").removesuffix("/storage/v1")
    emulator = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    if not override and emulator and "://" not in emulator:
        return f"http://{emulator}"
    return override or emulator or None


def credentials(environ: Mapping[str, str], endpoint: str | None) -> Any:
    """As whom to ask: nobody where gcloud has its credentials disabled, who holds gcloud's token, nobody at an
    emulator, and otherwise (None) whom Google's libraries find."""
    from google.auth.credentials import AnonymousCredentials
    from google.oauth2.credentials import Credentials

    if environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in _TRUE:
        return AnonymousCredentials()
    if token := _token(environ):
        return Credentials(token)
    if environ.get("STORAGE_EMULATOR_HOST") or (endpoint and is_plain_loopback(endpoint)):
        return AnonymousCredentials()
    return None


_TRUE = ("true", "1", "yes", "on", "y")
"""What gcloud takes for true (googlecloudsdk.core.properties)."""


def _token(environ: Mapping[str, str]) -> str | None:
    """gcloud's access token, from the environment or the file that it names; None when there is none."""
    token, file = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"), environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    if token or not file:
        return token or None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise OutputError(f"the access token can't be read from {file}: {error}") from error
