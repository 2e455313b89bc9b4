"""Google's REST APIs by Google's own clients: where they are, as whom we ask, and what their refusals mean.

Endpoints and credentials follow gcloud's own variables, so any API can be played by a server on loopback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from launcher.apply.running import REAL, Clock
from launcher.errors import LaunchError, NotAuthorised

T = TypeVar("T")

REQUEST_SECONDS = 30.0
"""For one request without an answer."""
PATIENCE_SECONDS = 60.0
"""For one call with its tries and waits."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds: the waits between tries double from the one to the other."""
PASSING = (408, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work (https://google.aip.dev/194, and gateways before the API)."""
LOG_IN = "gcloud auth application-default login, or run as a service account"


class Service(NamedTuple):
    """An API: the host's first label, which is also gcloud's name for it; what people call it; and the role that it
    takes to use it."""

    name: str
    title: str
    role: str


class UnreachableError(LaunchError):
    """The API gave no answer, or only ones that pass, for as long as was waited for it: whether it has done what was
    asked is not known."""


class Api:
    """One API for one project; every call says what went wrong in launch's own words."""

    def __init__(self, service: Service, project: str, client: Any, clock: Clock = REAL) -> None:
        self.service = service
        self.project = project
        self.client = client
        self.clock = clock

    def ask(self, method: str, **request: Any) -> Any:
        """The answer to a request that may be sent twice.

        Raises:
            UnreachableError: no answer for a minute.
            LaunchError: it is refused; its cause is the client's own error.
        """
        until, wait = self.clock.now() + PATIENCE_SECONDS, FIRST_WAIT
        while True:
            try:
                return self.once(method, **request)
            except UnreachableError as error:
                pause = max(wait, retry_after(error.__cause__))
                if self.clock.now() + pause > until:
                    raise
            self.clock.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    def once(self, method: str, **request: Any) -> Any:
        """The answer to a request that is sent once. Raises as `ask` does, without the minute."""
        try:
            return getattr(self.client, method)(request=request, retry=None, timeout=REQUEST_SECONDS)
        except Exception as error:
            if (told := explain(error, self.service, self.project)) is None:
                raise
            raise told from error


def open_client(make: Callable[..., Any], service: Service, environ: Mapping[str, str]) -> Any:
    """A client with the REST transport. Raises NotAuthorised: there are no credentials."""
    from google.auth.exceptions import DefaultCredentialsError

    endpoint = environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.name.upper()}", "").rstrip("/")
    options = {"api_endpoint": endpoint} if endpoint else None
    try:
        return make(credentials=credentials(environ, endpoint), transport="rest", client_options=options)
    except DefaultCredentialsError as error:
        raise NotAuthorised(f"no credentials for {service.title}: {error}", LOG_IN) from error


def credentials(environ: Mapping[str, str], endpoint: str) -> Any:
    """As whom to ask: nobody where gcloud has its credentials disabled, who holds gcloud's token, nobody at a server
    of this machine, and otherwise (None) whom Google's libraries find. Raises NotAuthorised."""
    from google.auth.credentials import AnonymousCredentials
    from google.oauth2.credentials import Credentials

    if environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in TRUE:
        return AnonymousCredentials()
    if token := access_token(environ):
        return Credentials(token)
    return AnonymousCredentials() if is_loopback(endpoint) else None


TRUE = ("true", "1", "yes", "on", "y")
"""What gcloud takes for true (googlecloudsdk.core.properties)."""


def access_token(environ: Mapping[str, str]) -> str:
    """gcloud's access token, from the environment or the file that it names; empty when there is none."""
    token, file = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN", ""), environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", "")
    if token or not file:
        return token
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise NotAuthorised(
            f"the access token can't be read from {file}: {error}", "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE names that file."
        ) from error


def is_loopback(endpoint: str) -> bool:
    """A server of this machine without TLS: a test's."""
    url = urlsplit(endpoint)
    host = url.hostname or ""
    return url.scheme == "http" and (host in ("localhost", "::1") or host.startswith("127."))


def explain(error: Exception, service: Service, project: str) -> LaunchError | None:
    """A client's error in launch's words; None if it isn't the API's or the network's."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    if isinstance(error, GoogleAPICallError):
        return of_status(error, service, project)
    if isinstance(error, TransportError | RequestException | ConnectionError | TimeoutError):
        return UnreachableError(f"{service.title} gives no answer: {innermost(error)}", "Try again in a moment.")
    if isinstance(error, GoogleAuthError):
        return NotAuthorised(f"{service.title}: the credentials are not accepted: {error}", LOG_IN)
    return None


def of_status(error: Any, service: Service, project: str) -> LaunchError:
    """A refusal (google.api_core.exceptions.GoogleAPICallError) by its status and, where it has one, its reason."""
    message, code = words(error.message), int(error.code or 0)
    said = f"{service.title}: {message}"
    if code in PASSING:
        return UnreachableError(said, "Try again in a moment.")
    if code == 401:
        return NotAuthorised(said, LOG_IN)
    return forbidden(error.reason, message, service, project) if code == 403 else LaunchError(said)


def forbidden(reason: str, message: str, service: Service, project: str) -> LaunchError:
    """What is missing where Google answers 403."""
    said = f"{service.title}: {message}"
    if "quota project" in message:  # its reason is SERVICE_DISABLED too, but in gcloud's own project
        return NotAuthorised(said, f"gcloud auth application-default set-quota-project {project}")
    if reason == "SERVICE_DISABLED":
        enable = f"gcloud services enable {service.name}.googleapis.com --project={project}"
        return LaunchError(f"the {service.title} API is disabled in project {project}", f"{enable}; then wait a minute")
    if reason == "CONSUMER_INVALID" or "on resource project" in message:
        return NotAuthorised(said, f"Does project {project} exist, and may you use it? gcloud projects list")
    role = "roles/iam.serviceAccountUser" if "act as service account" in message else service.role
    member = f"--member=user:YOU@EXAMPLE.COM --role={role}"
    return NotAuthorised(said, f"gcloud projects add-iam-policy-binding {project} {member}")


def words(message: str) -> str:
    """What the API said, in one line: without the request before it, and no more than the start of a web page."""
    return " ".join(re.sub(r"^[A-Z]+ https?://\S+: ", "", message).split())[:300]


def status_of(error: BaseException) -> int:
    """HTTP's status of the refusal behind a LaunchError; 0 where there was no answer."""
    return int(getattr(error.__cause__, "code", 0) or 0)


def retry_after(error: BaseException | None) -> float:
    """Seconds that the API asks to wait (Retry-After); 0 if it doesn't say, or says a date."""
    response = getattr(error, "response", None)
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0


def innermost(error: BaseException) -> BaseException:
    """requests wraps urllib3's errors, which wrap the socket's: that one says what happened."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((each for each in reversed(error.args) if isinstance(each, BaseException)), None)
        if inner is None:
            return error
        error = inner
