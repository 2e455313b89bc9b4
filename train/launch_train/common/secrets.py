"""Secrets: read from Secret Manager on the node, for the environment of what it starts, and for nothing else.

The request names them (contract.SECRETS); a value is in no request, log, record or error. REST through google-auth, as
the image has it: Secret Manager's own client brings gRPC for one request.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from launch_train.common import contract
from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.storage.client import credentials

ENDPOINT: Final = "https://secretmanager.googleapis.com"
SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
VERSION: Final = re.compile(r"projects/([^/]+)/secrets/([\w-]+)/versions/(\w+)")
PASSING: Final = (408, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work (https://google.aip.dev/194, and gateways before the API)."""
Patiently = Callable[[Callable[[], Mapping[str, str]]], Mapping[str, str]]
"""Asks again after an AwayError, for as long as that is worth it."""


class SecretError(UnfitError):
    """A secret can't be read or used. Nothing forbids the next start of the run: once the grant is given it works."""


class AwayError(SecretError):
    """Secret Manager doesn't answer, or not with an answer that is whole: a moment later it may."""


def secrets_of(
    environ: Mapping[str, str], seconds: float, patiently: Patiently, say: Callable[[str], None]
) -> Mapping[str, str]:
    """Variable -> value of the request's secrets, for the processes alone. `seconds`: for one request.

    Raises UsageError, SecretError, and what `patiently` raises.
    """
    vault = Vault(environ, seconds)
    found = patiently(vault.read)
    for name, value in found.items():
        if value.endswith("\n"):
            say(f"the secret {name} ends with a new line, which is handed on as it is")
    if found:
        say(f"read from Secret Manager: {', '.join(found)}")
    return found


class Vault:
    """Secret Manager for one job: its variables, each with its version. `seconds`: for one request."""

    def __init__(self, environ: Mapping[str, str], seconds: float) -> None:
        """Raises UsageError."""
        self._wanted = references(environ)
        self._environ = environ
        self._seconds = seconds
        self._found: dict[str, str] = {}
        self._session: Any = None

    def read(self) -> Mapping[str, str]:
        """Variable -> value. What was read before an AwayError isn't read again. Raises SecretError."""
        for name, version in self._wanted.items():
            if name not in self._found:
                self._found[name] = text(name, version, self._bytes(name, version))
        return self._found

    def _bytes(self, name: str, version: str) -> bytes:
        from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError
        from requests.exceptions import RequestException

        try:
            answer = self._ask(version)
        except (RequestException, TransportError) as error:
            raise AwayError(f"secret {name}: Secret Manager gives no answer ({type(error).__name__})") from None
        except GoogleAuthError as error:
            kind = AwayError if isinstance(error, RefreshError) and error.retryable else SecretError
            raise kind(f"secret {name}: Secret Manager takes no such credentials: {said(str(error))}") from None
        if answer.status_code in PASSING:
            raise AwayError(f"secret {name}: Secret Manager answers {answer.status_code}")
        if answer.status_code != 200:
            raise SecretError(f"secret {name} ({version}) {refused(answer, version, self._account())}")
        return payload(name, answer)

    def _ask(self, version: str) -> Any:
        endpoint = self._environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER", "").rstrip("/")
        if self._session is None:
            self._session = session(self._environ, endpoint)
        return self._session.get(f"{endpoint or ENDPOINT}/v1/{version}:access", timeout=self._seconds)

    def _account(self) -> str:
        """The service account that asks, as far as its credentials know; empty for others'."""
        email = str(getattr(self._session.credentials, "service_account_email", None) or "")
        return email if "@" in email else ""


def references(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Variable -> version, as the request says it. Raises UsageError."""
    try:
        wanted = json.loads(environ.get(contract.SECRETS) or "{}")
    except ValueError:
        wanted = None
    if not isinstance(wanted, dict) or not all(VERSION.fullmatch(str(version)) for version in wanted.values()):
        raise UsageError(f"{contract.SECRETS} must be a JSON object of projects/P/secrets/S/versions/V")
    return wanted


def session(environ: Mapping[str, str], endpoint: str) -> Any:
    """A session that asks as the job. Raises GoogleAuthError, and OutputError for a token that can't be read."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    # The emulator of Cloud Storage says nothing of Secret Manager.
    theirs = {name: value for name, value in environ.items() if name != "STORAGE_EMULATOR_HOST"}
    mine = credentials(theirs, endpoint) or google.auth.default(scopes=[SCOPE])[0]
    return AuthorizedSession(mine)


def payload(name: str, answer: Any) -> bytes:
    """The bytes of an answer, held against their checksum. Raises AwayError: it is torn."""
    import google_crc32c

    try:
        told = answer.json()["payload"]
        data = base64.b64decode(told["data"], validate=True)
        whole = int(told.get("dataCrc32c", google_crc32c.value(data))) == google_crc32c.value(data)
    except (ValueError, KeyError, TypeError):
        raise AwayError(f"secret {name}: Secret Manager's answer can't be read") from None  # it may hold the value
    if not whole:
        raise AwayError(f"secret {name}: what arrived is not what Secret Manager sent (crc32c)")
    return data


def text(name: str, version: str, data: bytes) -> str:
    """A value as an environment variable's. Raises SecretError, which tells nothing of it."""
    try:
        value = data.decode()
    except UnicodeDecodeError:
        raise SecretError(f"secret {name} ({version}) is not UTF-8, so it can be no environment variable") from None
    if "\0" in value:
        raise SecretError(f"secret {name} ({version}) has a NUL in it, so it can be no environment variable")
    return value


# --- What a refusal means ---------------------------------------------------------------------------------------------


def refused(answer: Any, version: str, account: str) -> str:
    """What follows `secret S `: what is missing, and the command that gives it."""
    message, reason = words(answer)
    project, secret, number = version.split("/")[1::2]
    in_project = f"--project={project}"
    if reason == "SERVICE_DISABLED":
        enable = f"gcloud services enable secretmanager.googleapis.com {in_project}"
        return f"can't be read: the Secret Manager API is disabled: {enable}"
    if reason == "ACCESS_TOKEN_SCOPE_INSUFFICIENT":  # Vertex AI's own account gets no token for it
        return f"can't be read: the job must run as an account of yours, identity.service_account: {message}"
    if answer.status_code == 403:
        who = account or "the account that this job runs as"
        return f"can't be read: {who} may not, or it doesn't exist: {grant(project, secret, account)}"
    if answer.status_code == 404:
        return f"doesn't exist: {message}: gcloud secrets versions list {secret} {in_project}"
    if "DISABLED" in message and number != "latest":
        return f"can't be read: {message}: gcloud secrets versions enable {number} --secret={secret} {in_project}"
    return f"can't be read: {message}"


def grant(project: str, secret: str, account: str) -> str:
    """The command that lets `account` read one secret."""
    return (
        f"gcloud secrets add-iam-policy-binding {secret} --project={project} "
        f"--member=serviceAccount:{account or 'ACCOUNT'} --role=roles/secretmanager.secretAccessor"
    )


def words(answer: Any) -> tuple[str, str]:
    """The API's message on one line, and the reason of its ErrorInfo; a refusal holds no value."""
    try:
        error = answer.json()["error"]
        infos: list[Mapping[str, Any]] = [one for one in error.get("details", []) if "reason" in one]
        return said(str(error["message"])), str(infos[0]["reason"]) if infos else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {answer.status_code}", ""


def said(message: str) -> str:
    """One line, and no more than a person reads."""
    return " ".join(message.split())[:300]
