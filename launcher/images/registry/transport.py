"""Send requests to a registry: sessions without implicit credentials, bounded retries, refusals with a fix."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, BinaryIO, Final, Self
from urllib.parse import urljoin, urlsplit

from launch_train.common.errors import innermost_error
from launch_train.common.loopback import is_loopback
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import PASSING
from launcher.images.reference import artifact_repository, is_googles

if TYPE_CHECKING:
    from requests import Response


class RegistryError(LaunchError):
    """A registry can't be reached, or refuses a request."""


class RepositoryMissing(RegistryError):
    """The repository does not exist. Artifact Registry never creates one by itself."""


def refusal(response: Response, host: str, repository: str, what: str, tried: str = "") -> LaunchError:
    """Return the error for a refusal. `what` is the operation ("put manifest x"), `tried` the credentials."""
    where, text = f"{host}/{repository}", registry_message(response)
    if response.status_code in (401, 403):
        return denied(host, f"{where}: {what}: {text}", tried)
    if response.status_code == 404 and "NAME_UNKNOWN" in codes(response):
        fix = "Create the repository first, or name another: image.repository"
        if artifact := artifact_repository(host, repository):
            fix = (
                "launch build --create-repository creates it; or gcloud artifacts repositories create "
                f"{artifact.repository} --project={artifact.project} --location={artifact.location} "
                "--repository-format=docker"
            )
        return RepositoryMissing(f"{where}: the repository does not exist ({text})", fix)
    return RegistryError(f"{where}: {what}: {text}")


def denied(host: str, problem: str, tried: str) -> NotAuthorised:
    """Return the error for denied access, with the credentials that were tried and the commands to log in."""
    ways = f"docker login {host}"
    if is_googles(host):
        ways = (
            f"gcloud auth login, then gcloud auth configure-docker {host}. Pushing needs "
            "roles/artifactregistry.writer on the repository; one that doesn't exist is refused in the same way."
        )
    return NotAuthorised(problem, f"Tried: {tried or 'no credentials'}.\nLog in: {ways}")


def is_success(response: Response) -> bool:
    """Return whether a request succeeded. A redirect, which requests counts as ok, has written nothing."""
    return 200 <= response.status_code < 300


def codes(response: Response) -> tuple[str, ...]:
    """Return the error codes in a response, such as BLOB_UPLOAD_UNKNOWN. Empty if there are none."""
    return tuple(code for code, _ in _errors(response))


def registry_message(response: Response) -> str:
    """Return the registry's message on one line: code and message of each error, else the text, else the status."""
    words = "; ".join(f"{code}: {message}" if message else code for code, message in _errors(response))
    words = words or " ".join(response.text[:300].split())
    return f"HTTP {response.status_code} {words or response.reason}"


def _errors(response: Response) -> list[tuple[str, str]]:
    """Parse errors as in https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes."""
    try:
        errors = json.loads(response.content)["errors"]
        return [(str(entry["code"]), str(entry.get("message") or "")) for entry in errors]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


TRIES: Final = 5
"""Tries of one request, or of an upload."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 8.0
"""The backoff in seconds doubles from the first bound to the second."""

JITTER: Final = Random().random  # noqa: S311 - it only spreads the waits
"""Random numbers of its own, which don't affect other generators."""

LONGEST_ASKED: Final = 120.0
"""The longest Retry-After, in seconds, that is followed. A registry that asks for more is considered down."""


class TransientError(Exception):
    """A transient failure: a status such as 503, or no response.

    `retry_after` is the registry's Retry-After in seconds.
    """

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


class Tries:
    """Bounded tries of one operation, which `what` names in errors, with exponential backoff."""

    def __init__(self, what: str, clock: Clock, jitter: Callable[[], float]) -> None:
        self.what = what
        self.failed = 0
        self._clock = clock
        self._jitter = jitter

    def wait(self, error: TransientError) -> None:
        """Wait before the next try.

        Raises RegistryError: it was the last one, or the registry demands too long a wait.
        """
        self.failed += 1
        if self.failed >= TRIES or error.retry_after > LONGEST_ASKED:
            hint = "No image was changed. Try again later: uploaded layers are not sent again."
            raise RegistryError(f"{self.what}: {error} (tried {self.failed} times)", hint) from error
        bound = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** (self.failed - 1))
        self._clock.sleep(max(error.retry_after, bound * (0.5 + self._jitter() / 2)))


def raise_if_transient(response: Response) -> None:
    """Raise TransientError for a response after which the same request may work."""
    if response.status_code in PASSING:
        seconds = response.headers.get("Retry-After", "")  # or a date, which is not followed
        raise TransientError(registry_message(response), float(seconds) if re.fullmatch(r"\d{1,6}", seconds) else 0.0)


CONNECT_SECONDS, SILENCE_SECONDS = 10.0, 60.0
"""Timeouts for connecting and for each pause in a response. Moving a large blob into place may take long."""

CONNECTIONS: Final = 16
"""Connections that are kept open for the threads of one registry."""

MOST_REDIRECTS: Final = 5

BLOCK: Final = 1 << 16
"""Bytes per read of a layer's file."""


class BlobBody:
    """A blob as the body of a request, read from its file while it is sent."""

    def __init__(self, open_blob: Callable[[], BinaryIO], size: int, http: Http) -> None:
        self._open = open_blob
        self._size = self._left = size
        self._http = http

    def __enter__(self) -> Self:
        with reading_layer():
            self._file = self._open()
        self._left = self._size
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.read(BLOCK):
            yield piece

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes. Raises RegistryError: the file can't be read, or is shorter than expected."""
        self._http.check_stopped()
        wanted = self._left if size < 0 else min(size, self._left)
        with reading_layer():
            piece = self._file.read(wanted)
        if wanted and not piece:
            raise RegistryError("a layer's file has become shorter while it was sent", "Start again.")
        self._left -= len(piece)
        self._http.count(len(piece))
        return piece


@contextmanager
def reading_layer() -> Iterator[None]:
    """Convert an error of the disk. Errors of the connection are OSErrors too, but they are retried."""
    try:
        yield
    except OSError as error:
        raise RegistryError(f"a layer's file can't be read: {error}") from error


@dataclass(frozen=True)
class Request:
    """A request to a registry or its token service. `what` describes it in errors ("write latest")."""

    what: str
    method: str
    url: str
    repository: str = ""
    scopes: tuple[str, ...] = ()
    """The rights that it needs: `repository:NAME:pull,push`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    params: tuple[tuple[str, str], ...] = ()
    body: bytes | BlobBody = b""
    stream: bool = False
    """The caller reads the response's body."""


class Http:
    """One session, thread-safe. `sent` counts the bytes of request bodies, including retries.

    Raises LaunchError: the extra `docker` is not installed.
    """

    def __init__(self, host: str, clock: Clock = REAL, jitter: Callable[[], float] = JITTER) -> None:
        self.sent = 0
        self.stopped = False
        self.clock = clock
        self._jitter = jitter
        self._host = host
        self._reached: set[str] = set()
        self._lock = threading.Lock()
        try:
            import requests
        except ImportError as error:
            raise LaunchError(
                "the registry client needs the package requests", 'pip install "gcp-launch[docker]"'
            ) from error
        self._session = requests.Session()
        # This machine is reached without a proxy, and without reading ~/.netrc or proxy settings for each request.
        self._session.trust_env = not is_loopback(host)
        # Digests cover the stored bytes, so no content encoding may be applied.
        self._session.headers.update({"User-Agent": "gcp-launch", "Accept-Encoding": "identity"})
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))

    def check_stopped(self) -> None:
        """Raise RegistryError if all threads must end soon."""
        if self.stopped:
            raise RegistryError(f"{self._host}: stopped", "Start again: uploaded layers are not sent again.")

    def count(self, size: int) -> None:
        """Add to the number of bytes sent."""
        with self._lock:
            self.sent += size

    def tries(self, what: str) -> Tries:
        """Return the tries of one operation, which `what` names in errors."""
        return Tries(what, self.clock, self._jitter)

    def send(self, request: Request, authorization: str | None = None) -> Response:
        """Return the response, whatever its status. Redirects of GET and HEAD are followed without credentials.

        Raises TransientError: no response, but the same request may work later; RegistryError: no response is possible.
        """
        response = self._once(request, authorization)
        for _ in range(MOST_REDIRECTS):
            target = response.headers.get("Location")
            if request.method not in ("GET", "HEAD") or not response.is_redirect or not target:
                return response
            url = urljoin(str(response.url), target)
            response.close()
            response = self._once(replace(request, url=self.allowed(url), headers={}, params=()))
        raise RegistryError(f"{self._host}: {request.url} leads in circles (more than {MOST_REDIRECTS} redirects)")

    def close(self) -> None:
        self._session.close()

    def allowed(self, url: str) -> str:
        """Return `url`. Raises RegistryError: a registry with TLS redirects to an address without."""
        if urlsplit(url).scheme == "https" or is_loopback(url):
            return url
        raise RegistryError(f"{self._host}: the registry redirects to an address without TLS: {url}")

    def _once(self, request: Request, authorization: str | None = None) -> Response:
        from requests import exceptions

        self.check_stopped()
        place = urlsplit(request.url).netloc
        if isinstance(request.body, bytes):
            self.count(len(request.body))
        # urllib3 also uses the connect timeout for each pause while the registry receives a body, so it is longer once
        # a connection worked.
        connect = SILENCE_SECONDS if request.body and place in self._reached else CONNECT_SECONDS
        try:
            with nullcontext(request.body) if isinstance(request.body, bytes) else request.body as data:
                response = self._session.request(
                    request.method,
                    request.url,
                    params=list(request.params),
                    headers={**request.headers, **({"Authorization": authorization} if authorization else {})},
                    data=data,
                    auth=lambda prepared: prepared,  # none from ~/.netrc
                    timeout=(connect, SILENCE_SECONDS),
                    allow_redirects=False,
                    stream=request.stream,
                )
        except exceptions.RequestException as error:
            raise self._failure(error, place) from error
        self._reached.add(place)
        return response

    def _failure(self, error: Exception, place: str) -> Exception:
        """Classify an error of the session.

        If the first connection fails, the name is wrong or no registry is running there, so it is not retried.
        """
        from requests import exceptions
        from urllib3.exceptions import NewConnectionError

        cause = innermost_error(error)
        problem = " ".join(str(cause).split()) or type(cause).__name__
        hopeless = isinstance(error, (exceptions.InvalidURL, exceptions.InvalidSchema, exceptions.MissingSchema))
        reason = getattr(error.args[0], "reason", None) if error.args else None
        first = isinstance(error, (exceptions.ConnectTimeout, exceptions.ProxyError, exceptions.SSLError))
        if hopeless or (place not in self._reached and (first or isinstance(reason, NewConnectionError))):
            hint = "Is the name right, and is this machine online? Behind a proxy: HTTPS_PROXY, REQUESTS_CA_BUNDLE"
            if is_loopback(place):
                hint = "Start the registry, or name another: image.repository"
            return RegistryError(f"{place}: the registry can't be reached: {problem}", hint)
        return TransientError(problem)
