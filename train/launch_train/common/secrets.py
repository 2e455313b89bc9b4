"""Read secrets from Secret Manager on the node, for the environment of the processes and nothing else.

The request names them (contract.SECRETS); their values are in no request, log, record or error. It uses REST with
google-auth, which the image has: Secret Manager's own client would need gRPC.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from launch_train.common import contract
from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.text import one_line

ENDPOINT: Final = "https://secretmanager.googleapis.com"
SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
VERSION: Final = re.compile(r"projects/([^/]+)/secrets/([\w-]+)/versions/(\w+)")
RETRYABLE: Final = (408, 429, 500, 502, 503, 504)
"""Status codes after which a retry may work (https://google.aip.dev/194, and gateways before the API)."""
Retry = Callable[[Callable[[], Mapping[str, str]]], Mapping[str, str]]
"""Retries after an UnavailableError, for as long as that is worth it."""


class SecretError(UnfitError):
    """A secret can't be read or used. The run may be started again, because a new grant fixes it."""


class UnavailableError(SecretError):
    """Secret Manager is unavailable, or its answer was truncated; a retry may work."""


def read_secrets(
    environ: Mapping[str, str], seconds: float, retry: Retry, say: Callable[[str], None]
) -> Mapping[str, str]:
    """Return variable -> value of the request's secrets, for the processes only. `seconds`: limit of one request.

    Raises UsageError, SecretError, and what `retry` raises.
    """
    values = retry(SecretReader(environ, seconds).read)
    for name, value in values.items():
        if value.endswith("\n"):
            say(f"warning: the secret {name} ends with a newline, which is part of its value")
    if values:
        say(f"{'sent by launch' if sent_secrets() else 'read from Secret Manager'}: {', '.join(values)}")
    return values


@cache
def sent_secrets() -> Mapping[str, str]:
    """Return variable -> value of the secrets that launch sent with a job on a host. Closes the file with them."""
    if not (handle := os.environ.get(contract.SECRETS_FILE)):
        return {}
    with os.fdopen(int(handle), encoding="utf-8") as file:
        values: dict[str, str] = json.load(file)
    if handle == "0":  # the input of a container; now the lowest free number
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    return values


class SecretReader:
    """Reads the secrets of one job. `seconds`: limit of one request."""

    def __init__(self, environ: Mapping[str, str], seconds: float) -> None:
        """Raises UsageError."""
        self._wanted = secret_versions(environ)
        self._environ = environ
        self._seconds = seconds
        self._found = {name: value for name, value in sent_secrets().items() if name in self._wanted}
        self._session: Any = None

    def read(self) -> Mapping[str, str]:
        """Return variable -> value. After an UnavailableError, values that were read are not read again. Raises
        SecretError."""
        for name, version in self._wanted.items():
            if name not in self._found:
                self._found[name] = decode_value(name, version, self._bytes(name, version))
        return self._found

    def _bytes(self, name: str, version: str) -> bytes:
        from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError
        from requests.exceptions import RequestException

        endpoint = self._environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER", "").rstrip("/")
        try:
            self._session = self._session or session(self._environ, endpoint)
            answer = self._session.get(f"{endpoint or ENDPOINT}/v1/{version}:access", timeout=self._seconds)
        except (RequestException, TransportError) as error:
            raise UnavailableError(f"secret {name}: Secret Manager is unreachable ({type(error).__name__})") from None
        except GoogleAuthError as error:
            kind = UnavailableError if isinstance(error, RefreshError) and error.retryable else SecretError
            raise kind(f"secret {name}: Secret Manager rejected the credentials: {one_line(error)}") from None
        if answer.status_code in RETRYABLE:
            raise UnavailableError(f"secret {name}: Secret Manager answers {answer.status_code}")
        if answer.status_code != 200:
            refusal = explain_refusal(answer, version, service_account_of(self._session))
            raise SecretError(f"secret {name} ({version}) {refusal}")
        return payload(name, answer)


def secret_versions(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return variable -> version from the request. Raises UsageError."""
    try:
        wanted = json.loads(environ.get(contract.SECRETS) or "{}")
    except ValueError:
        wanted = None
    if not isinstance(wanted, dict) or not all(VERSION.fullmatch(str(version)) for version in wanted.values()):
        raise UsageError(f"{contract.SECRETS} must be a JSON object of projects/P/secrets/S/versions/V")
    return wanted


def service_account_of(session: Any) -> str:
    """Return the service account's address, as far as its credentials know it; empty for other accounts."""
    email = str(getattr(session.credentials, "service_account_email", None) or "")
    return email if "@" in email else ""


def session(environ: Mapping[str, str], endpoint: str) -> Any:
    """Return a session with the job's credentials. Raises GoogleAuthError, and OutputError for an unreadable token."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    from launch_train.common.storage.client import storage_credentials

    # An emulator of Cloud Storage doesn't emulate Secret Manager.
    relevant = {name: value for name, value in environ.items() if name != "STORAGE_EMULATOR_HOST"}
    chosen = storage_credentials(relevant, endpoint) or google.auth.default(scopes=[SCOPE])[0]
    return AuthorizedSession(chosen)


def payload(name: str, answer: Any) -> bytes:
    """Return the bytes of an answer, checked by its checksum. Raises UnavailableError if it is truncated."""
    import google_crc32c

    try:
        content = answer.json()["payload"]
        data = base64.b64decode(content["data"], validate=True)
        is_intact = int(content.get("dataCrc32c", google_crc32c.value(data))) == google_crc32c.value(data)
    except (ValueError, KeyError, TypeError):
        raise UnavailableError(f"secret {name}: Secret Manager's answer is invalid") from None  # it may hold the value
    if not is_intact:
        raise UnavailableError(f"secret {name}: Secret Manager's answer is damaged (crc32c)")
    return data


def decode_value(name: str, version: str, data: bytes) -> str:
    """Return a secret's value as text. Raises SecretError, which contains nothing of it."""
    try:
        value = data.decode()
    except UnicodeDecodeError:
        raise SecretError(f"secret {name} ({version}) is not UTF-8, so it can't be an environment variable") from None
    if "\0" in value:
        raise SecretError(f"secret {name} ({version}) contains a NUL, so it can't be an environment variable")
    return value


# --- Error messages ---------------------------------------------------------------------------------------------------


def explain_refusal(answer: Any, version: str, account: str) -> str:
    """Return the text after `secret S `: what is missing, and the command that fixes it."""
    message, reason = message_and_reason(answer)
    project, secret, number = version.split("/")[1::2]
    in_project = f"--project={project}"
    if reason == "SERVICE_DISABLED":
        enable = f"gcloud services enable secretmanager.googleapis.com {in_project}"
        return f"can't be read: the Secret Manager API is disabled: {enable}"
    if reason == "ACCESS_TOKEN_SCOPE_INSUFFICIENT":  # Vertex AI's service agent gets no such token
        return f"can't be read: run the job as your own service account (identity.service_account): {message}"
    if answer.status_code == 403:
        who = account or "the job's service account"
        grant = (
            f"gcloud secrets add-iam-policy-binding {secret} {in_project} "
            f"--member=serviceAccount:{account or 'ACCOUNT'} --role=roles/secretmanager.secretAccessor"
        )
        return f"can't be read: {who} has no access, or it doesn't exist: {grant}"
    if answer.status_code == 404:
        return f"doesn't exist: {message}: gcloud secrets versions list {secret} {in_project}"
    if "DISABLED" in message and number != "latest":
        return f"can't be read: {message}: gcloud secrets versions enable {number} --secret={secret} {in_project}"
    return f"can't be read: {message}"


def message_and_reason(answer: Any) -> tuple[str, str]:
    """Return the API's message on one line, and the reason of its ErrorInfo. An error contains no secret value."""
    try:
        error = answer.json()["error"]
        infos: list[Mapping[str, Any]] = [info for info in error.get("details", []) if "reason" in info]
        return " ".join(str(error["message"]).split())[:300], str(infos[0]["reason"]) if infos else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {answer.status_code}", ""
