"""Call Google's REST APIs through Google's own clients: endpoints, credentials, retries and errors.

Endpoints and credentials follow gcloud's variables, so a loopback server can replace any API.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from launch_train.common.errors import innermost_error
from launch_train.common.loopback import is_plain_loopback
from launcher.clock import REAL, Clock, stopwatch
from launcher.diagnosis import Refusal
from launcher.diagnosis.api_error import BUSY
from launcher.errors import LaunchError, NotAuthorised, UnreachableError

REQUEST_SECONDS = 30.0
"""Timeout of one request."""
PATIENCE_SECONDS = 60.0
"""Timeout of a call with its retries and backoff."""
NOTICE_SECONDS = 4.0
"""Seconds without an answer after which `notice` is called."""
NOTICE_INTERVAL = 60.0
"""Seconds between notices to the user. If all 38 regions are unreachable, one notice is enough."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds: the backoff between retries doubles from the first to the second."""
PASSING = (408, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed (https://google.aip.dev/194, and those of gateways before the API)."""
LOG_IN = "gcloud auth application-default login, or run as a service account"
SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
TOKEN_FILE: Final = "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"  # noqa: S105 - a variable's name
MESSAGE: Final = 4000
"""The maximum length of a refusal's message, in characters. Vertex AI lists every fault of a request."""


class Service(NamedTuple):
    """An API: its host's first label (also gcloud's name), its title for messages, and the role needed to use it."""

    name: str
    title: str
    role: str


class ApiDisabledError(LaunchError):
    """The API is disabled in the project, or was enabled less than a minute ago."""


@dataclass(eq=False)
class Api:
    """An API for one project. Calls raise launch's own errors."""

    service: Service
    project: str
    client: Any
    clock: Clock = REAL
    notice: Callable[[str], None] = lambda _line: None
    """Called with a message while a call waits for an answer."""

    def ask(self, method: str, **request: Any) -> Any:
        """Return the answer to an idempotent request, with retries.

        Raises:
            UnreachableError: no answer for a minute.
            LaunchError: the API refused it; the cause is the client's error.
        """
        began = self.clock.now()
        return self._ask(method, request, PATIENCE_SECONDS, lambda: self.clock.now() - began)

    def ask_soon(self, method: str, seconds: float, **request: Any) -> Any:
        """Return the answer to an idempotent request, retrying for at most `seconds`.

        Time in which this machine slept counts. Raises as `ask` does.
        """
        return self._ask(method, request, seconds, stopwatch(self.clock, self.wall))

    def wall(self) -> float:
        """Return the seconds of a clock that continues while this machine sleeps."""
        return time.time()

    def _ask(self, method: str, request: Mapping[str, Any], seconds: float, elapsed: Callable[[], float]) -> Any:
        wait = FIRST_WAIT
        while True:
            try:
                return self.once(method, **request)
            except UnreachableError as error:
                pause = max(wait, retry_after(error.__cause__))
                if elapsed() + pause > seconds:
                    raise
                if elapsed() >= NOTICE_SECONDS:
                    self.notice(f"{self.service.title} does not respond; retrying")
                trouble = error
            self.clock.sleep(pause)
            if elapsed() > seconds:  # this machine slept meanwhile
                raise trouble
            wait = min(2 * wait, LONGEST_WAIT)

    def once(self, method: str, seconds: float | None = None, **request: Any) -> Any:
        """Return the answer to a request, without retries, within `seconds` (default: REQUEST_SECONDS). Raises as `ask`
        does."""
        try:
            return getattr(self.client, method)(request=request, retry=None, timeout=seconds or REQUEST_SECONDS)
        except LaunchError:
            raise
        except Exception as error:
            if explained := explain(error, self.service, self.project):
                raise explained from error
            if not is_torn(error):
                raise
            raise UnreachableError(f"{self.service.title}'s answer can't be read: {words(str(error))}") from error


class Clients:
    """The opened APIs of one service in a project, by name. Thread-safe."""

    def __init__(self, service: Service, project: str, clock: Clock, notice: Callable[[str], None] | None) -> None:
        """`notice` receives a line, at most once a minute, while a call waits for an answer."""
        self._service, self._project, self._clock = service, project, clock
        self._notice, self._noticed = notice, float("-inf")
        self._apis: dict[str, Api] = {}
        self._lock = threading.RLock()

    def api(self, name: str, open_client: Callable[[], Any]) -> Api:
        """Return an API; on first use, `open_client` opens its client. Raises what that raises."""
        with self._lock:
            if name not in self._apis:
                self._apis[name] = Api(self._service, self._project, open_client(), self._clock, self._tell)
            return self._apis[name]

    def _tell(self, text: str) -> None:
        with self._lock:
            due = self._clock.now() - self._noticed >= NOTICE_INTERVAL
            self._noticed = self._clock.now() if due else self._noticed
        if due and self._notice:
            self._notice(text)


def is_torn(error: BaseException) -> bool:
    """Return whether an answer could not be parsed."""
    from google.protobuf.json_format import Error

    return isinstance(error, Error | ValueError)


class RestClient:
    """JSON requests to an API without a client library, with the method signature that `Api` expects.

    `server_time`: Google's clock at the last answer, refusals included, in Unix seconds; None before the first.
    """

    def __init__(self, service: Service, session: Any, url: str) -> None:
        """`session` and `url` are those of `open_session`."""
        self.session, self._url, self._title = session, url, service.title
        self.server_time: float | None = None

    def send(self, request: Mapping[str, Any], retry: None, timeout: float) -> dict[str, Any]:
        """Return the JSON object in the answer to `request`: its `path` with a leading slash, and if needed `verb`,
        `params` and `json`. Raises the exceptions of Google's own clients; UnreachableError: the answer isn't JSON."""
        from google.api_core.exceptions import from_http_response

        options = {name: value for name, value in request.items() if name not in ("path", "verb")}
        url = self._url + request["path"]
        answer = self.session.request(request.get("verb", "GET"), url, timeout=timeout, **options)
        self.server_time = http_date(answer.headers.get("Date", "")) or self.server_time
        if answer.status_code >= 400:
            raise from_http_response(answer)
        try:
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except msgspec.DecodeError as error:  # cut off on its way
            problem = f"{self._title}'s answer can't be read: {error}"
            raise UnreachableError(problem, "Try again in a moment.") from error


def open_client(make: Callable[..., Any], service: Service, environ: Mapping[str, str]) -> Any:
    """Return a client with the REST transport. Raises NotAuthorised: no credentials."""
    from google.auth.exceptions import DefaultCredentialsError

    url = endpoint(service, environ)
    options = None if url == google_endpoint(service) else {"api_endpoint": url}
    try:
        return make(credentials=credentials(environ, url), transport="rest", client_options=options)
    except DefaultCredentialsError as error:
        raise no_credentials(service, error) from error


def no_credentials(service: Service, error: Exception) -> NotAuthorised:
    """Return the error of missing or unusable credentials. Google's text for missing ones says less than the hint."""
    problem = "" if str(error).startswith("Your default credentials were not found") else f": {error}"
    return NotAuthorised(f"no credentials for {service.title}{problem}", LOG_IN)


def service_account(credentials: Any) -> str:
    """Return the service account of the credentials. Empty for a person's credentials, and if they don't show it."""
    email = getattr(credentials, "service_account_email", "") or ""
    return email if "@" in email else ""  # Compute Engine's own credentials say "default" until first use


def default_credentials() -> Any:
    """Return Google's default credentials. Raises DefaultCredentialsError, OSError."""
    import google.auth

    return google.auth.default(scopes=[SCOPE])[0]


def open_session(
    service: Service, environ: Mapping[str, str], default: Callable[[], Any] = default_credentials
) -> tuple[Any, str]:
    """Return an authorised session and the endpoint of an API without a client library.

    The session is one of google.auth.transport.requests. The endpoint has no trailing slash. Raises NotAuthorised: no
    credentials.
    """
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import AuthorizedSession

    url = endpoint(service, environ)
    try:
        return AuthorizedSession(credentials(environ, url) or default()), url
    except (DefaultCredentialsError, OSError) as error:
        raise no_credentials(service, error) from error


def endpoint(service: Service, environ: Mapping[str, str]) -> str:
    """Return an API's address without a trailing slash: gcloud's override without the API's own path (/compute/v1),
    which Google's clients add themselves, else Google's."""
    override = environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.name.upper()}", "")
    if not override and service.name == "storage":
        override = environ.get("STORAGE_EMULATOR_HOST", "")
    return re.sub(rf"(/{service.name}/\w+)?/*$", "", override) or google_endpoint(service)


def google_endpoint(service: Service) -> str:
    """Return Google's own address of an API."""
    return f"https://{service.name}.googleapis.com"


def credentials(environ: Mapping[str, str], endpoint: str) -> Any:
    """Return the credentials to use. None means Google's default credentials.

    In this order: anonymous if gcloud's are disabled; gcloud's access token, from the environment or a file; anonymous
    for a server on loopback. Raises NotAuthorised.
    """
    from google.auth.credentials import AnonymousCredentials
    from google.oauth2.credentials import Credentials

    if environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in TRUE:
        return AnonymousCredentials()
    if token := environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN", "").strip():
        return Credentials(token)
    if file := environ.get(TOKEN_FILE, ""):
        return of_file(file)
    return AnonymousCredentials() if is_plain_loopback(endpoint) else None


TRUE = ("true", "1", "yes", "on", "y")
"""Values that gcloud accepts as true (googlecloudsdk.core.properties)."""


def of_file(file: str) -> Any:
    """Return credentials that follow gcloud's token file. Raises NotAuthorised."""
    from launcher.gcp.access_token_file import file_credentials

    try:
        return file_credentials(Path(file))
    except (OSError, ValueError) as error:
        raise NotAuthorised(
            f"the access token can't be read from {file}: {error}", f"{TOKEN_FILE} names that file."
        ) from error


def explain(error: Exception, service: Service, project: str) -> LaunchError | None:
    """Convert a client's error to launch's own; None if neither the API nor the network caused it."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    if isinstance(error, GoogleAPICallError):
        return of_status(error, service, project)
    if isinstance(error, TransportError | RequestException | ConnectionError | TimeoutError):
        return UnreachableError(f"{service.title} does not respond: {innermost_error(error)}", "Try again in a moment.")
    if isinstance(error, GoogleAuthError):
        if error.retryable:  # the token server failed, not the credentials
            return UnreachableError(f"{service.title}: no access token: {error}", "Try again in a moment.")
        return NotAuthorised(f"{service.title}: the credentials are not accepted: {error}", LOG_IN)
    return None


def of_status(error: Any, service: Service, project: str) -> LaunchError:
    """Convert a refusal (google.api_core.exceptions.GoogleAPICallError) by its status and reason."""
    message, code = words(error.message), int(error.code or 0)
    said = f"{service.title}: {message}"
    if UNTOKENED.match(message) and REFUSED_TOKEN.search(message):
        return NotAuthorised(said, LOG_IN)
    is_busy = code == 403 and not BUSY.isdisjoint({older_reason(error), str(error.reason)})  # Compute's rate limit
    if code in PASSING or is_busy:
        return UnreachableError(said, "Try again in a moment.")
    if code == 401:
        return NotAuthorised(said, LOG_IN)
    return (
        forbidden(error.reason or older_reason(error), message, service, project) if code == 403 else LaunchError(said)
    )


UNTOKENED: Final = re.compile("Getting metadata from plugin failed")
REFUSED_TOKEN: Final = re.compile("invalid_grant|invalid_client|unauthorized_client|reauth|refresh|revoked", re.I)
"""gRPC reports any failure of google-auth to get a token as UNAVAILABLE, with the error's text."""


def forbidden(reason: str, message: str, service: Service, project: str) -> LaunchError:
    """Convert a 403 to an error that names the missing permission or API."""
    said = f"{service.title}: {message}"
    if "quota project" in message:  # its reason is SERVICE_DISABLED too, but in gcloud's own project
        return NotAuthorised(said, f"gcloud auth application-default set-quota-project {project}")
    if reason in ("SERVICE_DISABLED", "accessNotConfigured"):  # accessNotConfigured: the older APIs' name for it
        enable = f"gcloud services enable {service.name}.googleapis.com --project={project}"
        problem = f"the {service.title} API is disabled in project {project}"
        return ApiDisabledError(problem, f"{enable}; then wait a minute")
    if reason == "CONSUMER_INVALID" or "on resource project" in message:
        return NotAuthorised(
            said, f"Check that project {project} exists and that you have access: gcloud projects list"
        )
    role = "roles/iam.serviceAccountUser" if "act as service account" in message else service.role
    member = f"--member=user:YOU@EXAMPLE.COM --role={role}"
    return NotAuthorised(said, f"gcloud projects add-iam-policy-binding {project} {member}")


def words(message: str, most: int = 300) -> str:
    """Return an API's message as one line of at most `most` characters, without the request before it."""
    return " ".join(re.sub(r"^[A-Z]+ https?://\S+: ", "", message).split())[:most]


def refusal_of(error: Any, service: Service) -> Refusal:
    """Return a refusal (google.api_core.exceptions.GoogleAPICallError, by REST or gRPC) as data."""
    return Refusal(
        code=int(error.code or 0),
        message=words(str(error.message or ""), MESSAGE),
        reason=str(error.reason or older_reason(error)),
        metadata={str(name): str(value) for name, value in dict(error.metadata or {}).items()},
        service=service.name,
        retry_after=retry_after(error),
    )


def older_reason(error: Any) -> str:
    """Return the reason in errors[], as Compute Engine and Storage use it; empty if there is none."""
    return next((str(each["reason"]) for each in error.errors if isinstance(each, Mapping) and each.get("reason")), "")


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the refusal behind a LaunchError; 0 if there was no answer."""
    return int(getattr(answer_behind(error), "code", 0) or 0)


def answer_behind(error: BaseException | None) -> BaseException | None:
    """Return the client's error behind a LaunchError, following its causes; None if there is none."""
    for _ in range(10):
        if error is None or hasattr(error, "code"):
            return error
        error = error.__cause__ if error.__cause__ is not error else error.__context__
    return None


def retry_after(error: BaseException | None) -> float:
    """Return the seconds that the API asks to wait, by HTTP's Retry-After or google.rpc.RetryInfo; otherwise 0."""
    answer = answer_behind(error)
    headers = getattr(getattr(answer, "response", None), "headers", None) or {}  # gRPC's response has none
    text = str(headers.get("Retry-After", ""))
    if re.fullmatch(r"\d{1,6}", text):
        return float(text)
    until, now = http_date(text), http_date(str(headers.get("Date", "")))
    if until and now:
        return max(0.0, until - now)  # both by the server's clock
    return max(map(retry_delay, getattr(answer, "details", None) or ()), default=0.0)


def http_date(text: str) -> float | None:
    """Return the Unix seconds of an HTTP date; None if it is invalid."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def retry_delay(detail: Any) -> float:
    """Return the seconds in a google.rpc.RetryInfo, as JSON or message; 0 for any other detail."""
    if isinstance(detail, Mapping):
        said = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)s", str(detail.get("retryDelay", "")))
        return float(said[1]) if said else 0.0
    delay = getattr(detail, "retry_delay", None)
    return delay.seconds + delay.nanos / 1e9 if delay is not None else 0.0


INSTALL: Final = 'pip install "gcp-launch[gcp]"'


class Rest:
    """Requests to Google's APIs for one project, without retries. Thread-safe.

    Endpoints and credentials follow gcloud's variables (launcher.gcp.api). `server_time`: Google's clock at the last
    answer in Unix seconds; None before the first.
    """

    def __init__(self, project: str, environ: Mapping[str, str] = os.environ) -> None:
        self.project = project
        self.server_time: float | None = None
        self._environ = environ
        self._default = cache(default_credentials)  # all APIs share their token
        self._clients: dict[str, RestClient] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        service: Service,
        path: str,
        *,
        verb: str = "GET",
        params: Any = None,
        body: Any = None,
        seconds: float = REQUEST_SECONDS,
    ) -> dict[str, Any]:
        """Return the JSON answer to one request. `path` begins with a slash, `params` are the query's.

        Raises:
            UnreachableError: no answer, or a transient error.
            NotAuthorised: no credentials, or a permission is missing.
            LaunchError: another refusal; `status_of` returns its HTTP status.
        """
        try:
            with self._lock:
                if service.name not in self._clients:
                    session = open_session(service, self._environ, self._default)
                    self._clients[service.name] = RestClient(service, *session)
                client = self._clients[service.name]
            answer: dict[str, Any] = Api(service, self.project, client).once(
                "send", seconds, path=path, verb=verb, params=params, json=body
            )
        except ImportError as error:
            raise LaunchError(f"{service.title}: Google's client libraries are not installed", INSTALL) from error
        self.server_time = client.server_time or self.server_time
        return answer
