"""Send requests to one registry, with credentials and retries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from launcher.errors import LaunchError
from launcher.images.registry.auth import Auth
from launcher.images.registry.errors import refusal
from launcher.images.registry.http import Ask, Http
from launcher.images.registry.reference import HUB, scheme
from launcher.images.registry.retry import RetryPolicy, TransientError, raise_if_transient

if TYPE_CHECKING:
    from requests import Response

HUBS_API = "registry-1.docker.io"


@dataclass(frozen=True)
class RegistryCall:
    """A request, its description for errors, and the scopes that it needs."""

    what: str
    repository: str
    scopes: tuple[str, ...]
    ask: Ask


def may_pull(repository: str) -> str:
    """Return the scope of a read."""
    return f"repository:{repository}:pull"


def may_push(repository: str) -> str:
    """Return the scope of a write. Registries require both pull and push."""
    return f"repository:{repository}:pull,push"


class Wire:
    """One registry. Thread-safe."""

    def __init__(self, host: str, environ: Mapping[str, str], policy: RetryPolicy) -> None:
        self.host = host
        self.policy = policy
        self.http = Http(host)
        self.auth = Auth(host, environ, self.http, policy)
        self._root = f"{scheme(host)}://{HUBS_API if host == HUB else host}"

    def url(self, path: str) -> str:
        """Return the URL of a path below /v2/, or of a Location header.

        Behind a proxy that terminates TLS, a registry may return its own address with http:. It gets the original
        scheme.

        Raises:
            RegistryError: it is on another host, without TLS.
        """
        url = urljoin(self._root, path)
        if self._is_ours(url):
            return urlsplit(url)._replace(scheme=urlsplit(self._root).scheme).geturl()
        return self.http.allowed(url)

    def do(self, call: RegistryCall) -> Response:
        """Return the response, with retries.

        Raises:
            NotAuthorised: no credentials are accepted.
            RegistryError: all tries failed, or the registry can't be reached.
        """
        tries = self.policy.begin(self.words(call))
        while True:
            try:
                return self.once(call)
            except TransientError as error:
                tries.wait(error)

    def once(self, call: RegistryCall) -> Response:
        """Send a request once, and again after renewing refused credentials.

        Raises:
            TransientError: no response, or a transient failure.
        """
        ours = self._is_ours(call.ask.url)
        header = self.auth.header(call.scopes, self.words(call)) if ours else None
        for refused in count():
            response = self.http.send(replace(call.ask, authorization=header))
            if response.status_code != 401 or not ours or not self._is_ours(str(response.url)):
                break  # the registry's credentials are never sent to a host that it redirects to
            header = self.auth.renew(call.scopes, response, header, first=refused == 0, what=self.words(call))
        raise_if_transient(response)
        return response

    def _is_ours(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self._root).netloc

    def unheeded(self, call: RegistryCall) -> None:
        """Send a request once and ignore errors, because its result does not matter. Credentials are not renewed."""
        with suppress(TransientError, LaunchError):
            header = self.auth.header(call.scopes, self.words(call))
            self.http.send(replace(call.ask, authorization=header))

    def refusal(self, call: RegistryCall, response: Response) -> LaunchError:
        """Return the error for a refusal."""
        return refusal(response, self.host, call.repository, call.what, self.auth.tried())

    def words(self, call: RegistryCall) -> str:
        """Return the operation and the host, for an error."""
        return f"{self.host}/{call.repository}: {call.what}"
