"""An HTTP session for a registry's client, without implicit credentials and with two kinds of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urljoin, urlsplit

from launch_train.common.loopback import is_loopback
from launcher.errors import LaunchError
from launcher.images.registry.errors import RegistryError
from launcher.images.registry.retry import TransientError

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

CONNECT_SECONDS, SILENCE_SECONDS = 10.0, 60.0
"""Timeouts for connecting and for each pause in a response. Moving a large blob into place may take long."""

CONNECTIONS: Final = 16
"""Connections that are kept open for the threads of one registry."""

MOST_REDIRECTS: Final = 5


class Body(Protocol):
    """A readable body of known length, for one request."""

    def read(self, size: int = -1) -> bytes: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


Bodies = Callable[[], AbstractContextManager[Body]]
"""Opens a body, once for each request that sends it."""


@dataclass(frozen=True)
class Ask:
    """One request. `authorization` is the header's value. With `stream`, the caller reads the response's body."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    params: tuple[tuple[str, str], ...] = ()
    body: bytes | Bodies = b""
    authorization: str | None = None
    stream: bool = False


class Http:
    """One session, thread-safe. `sent` counts the bytes of request bodies, including retries.

    Raises:
        LaunchError: the extra `docker` is not installed.
    """

    def __init__(self, host: str) -> None:
        self.sent = 0
        self.stopped = False
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

    def go_on(self) -> None:
        """Raise RegistryError if `stop` was called."""
        if self.stopped:
            raise RegistryError(f"{self._host}: stopped", "Start again: uploaded layers are not sent again.")

    def count(self, size: int) -> None:
        """Add to the number of bytes sent."""
        with self._lock:
            self.sent += size

    def send(self, ask: Ask) -> Response:
        """Return the response, whatever its status. Redirects of GET and HEAD are followed without credentials.

        Raises:
            TransientError: no response, but the same request may work later.
            RegistryError: no response is possible.
        """
        response = self._once(ask)
        for _ in range(MOST_REDIRECTS):
            target = response.headers.get("Location")
            if ask.method not in ("GET", "HEAD") or not response.is_redirect or not target:
                return response
            url = urljoin(str(response.url), target)
            response.close()
            response = self._once(Ask(ask.method, self.allowed(url), stream=ask.stream))
        raise RegistryError(f"{self._host}: {ask.url} leads in circles (more than {MOST_REDIRECTS} redirects)")

    def stop(self) -> None:
        """Make all threads stop soon: each fails at its next request or piece of a body."""
        self.stopped = True

    def close(self) -> None:
        """Close all connections."""
        self._session.close()

    def allowed(self, url: str) -> str:
        """Return `url`. Raises RegistryError: a registry with TLS redirects to an address without."""
        if urlsplit(url).scheme == "https" or is_loopback(url):
            return url
        raise RegistryError(f"{self._host}: the registry redirects to an address without TLS: {url}")

    def _once(self, ask: Ask) -> Response:
        from requests import exceptions

        self.go_on()
        place = urlsplit(ask.url).netloc
        opened = nullcontext(ask.body) if isinstance(ask.body, bytes) else ask.body()
        if isinstance(ask.body, bytes):
            self.count(len(ask.body))
        try:
            with opened as data:
                response = self._session.request(
                    ask.method,
                    ask.url,
                    params=list(ask.params),
                    headers=dict(ask.headers),
                    data=data,
                    auth=_Authorization(ask.authorization),
                    timeout=(self._for_sending(place, ask), SILENCE_SECONDS),
                    allow_redirects=False,
                    stream=ask.stream,
                )
        except exceptions.RequestException as error:
            raise self._failure(error, place) from error
        self._reached.add(place)
        return response

    def _for_sending(self, place: str, ask: Ask) -> float:
        """Return the connect timeout in seconds.

        urllib3 also uses it for each pause while the registry receives a body, so it is longer once a connection
        worked.
        """
        return SILENCE_SECONDS if ask.body and place in self._reached else CONNECT_SECONDS

    def _failure(self, error: Exception, place: str) -> Exception:
        """Classify an error of the session.

        If the first connection fails, the name is wrong or no registry is running there, so it is not retried.
        """
        from requests import exceptions
        from urllib3.exceptions import NewConnectionError

        hopeless = isinstance(error, (exceptions.InvalidURL, exceptions.InvalidSchema, exceptions.MissingSchema))
        reason = getattr(error.args[0], "reason", None) if error.args else None
        first = isinstance(error, (exceptions.ConnectTimeout, exceptions.ProxyError, exceptions.SSLError))
        if hopeless or (place not in self._reached and (first or isinstance(reason, NewConnectionError))):
            hint = "Is the name right, and is this machine online? Behind a proxy: HTTPS_PROXY, REQUESTS_CA_BUNDLE"
            if is_loopback(place):
                hint = "Start the registry, or name another: image.repository"
            return RegistryError(f"{place}: the registry can't be reached: {_innermost(error)}", hint)
        return TransientError(_innermost(error))


class _Authorization:
    """Sets the header, or keeps requests from taking one from ~/.netrc."""

    def __init__(self, value: str | None) -> None:
        self._value = value

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        if self._value:
            request.headers["Authorization"] = self._value
        return request


def _innermost(error: BaseException) -> str:
    """Return the socket's error, which urllib3's and requests' errors wrap."""
    while True:
        reason = getattr(error, "reason", None)
        inner = reason if isinstance(reason, BaseException) else None
        inner = inner or next((each for each in reversed(error.args) if isinstance(each, BaseException)), None)
        if inner is None:
            return " ".join(str(error).split()) or type(error).__name__
        error = inner
