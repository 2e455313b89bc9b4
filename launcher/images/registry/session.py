"""Requests to one registry: with the credentials that it takes, and tried again where that may help."""

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
from launcher.images.registry.retry import Passing, Patience, raise_if_passing

if TYPE_CHECKING:
    from requests import Response

HUBS_API = "registry-1.docker.io"


@dataclass(frozen=True)
class RegistryCall:
    """A request and what it is for: the words of its error, and the rights that it needs."""

    what: str
    repository: str
    scopes: tuple[str, ...]
    ask: Ask


def may_pull(repository: str) -> str:
    """The scope of a read."""
    return f"repository:{repository}:pull"


def may_push(repository: str) -> str:
    """The scope of a write; registries require pull as well as push."""
    return f"repository:{repository}:pull,push"


class Wire:
    """One registry, for all threads."""

    def __init__(self, host: str, environ: Mapping[str, str], patience: Patience) -> None:
        self.host = host
        self.patience = patience
        self.http = Http(host)
        self.auth = Auth(host, environ, self.http, patience)
        self._root = f"{scheme(host)}://{HUBS_API if host == HUB else host}"

    def url(self, path: str) -> str:
        """The address of something below /v2/, or of a Location that the registry gave.

        Behind a proxy that ends TLS, a registry may give an http: address of its own: it is reached as before.

        Raises:
            RegistryError: it lies elsewhere, and without TLS.
        """
        url = urljoin(self._root, path)
        if self._is_ours(url):
            return urlsplit(url)._replace(scheme=urlsplit(self._root).scheme).geturl()
        return self.http.allowed(url)

    def do(self, call: RegistryCall) -> Response:
        """Return the response to the first try that gets one.

        Raises:
            NotAuthorised: no credentials are taken.
            RegistryError: none of the tries had an answer, or the registry can't be reached.
        """
        tries = self.patience.begin(self.words(call))
        while True:
            try:
                return self.once(call)
            except Passing as error:
                tries.wait(error)

    def once(self, call: RegistryCall) -> Response:
        """Return the response; renew an expired token and repeat the request.

        Raises:
            Passing: no answer, or one that passes.
        """
        ours = self._is_ours(call.ask.url)
        header = self.auth.header(call.scopes, self.words(call)) if ours else None
        for refused in count():
            response = self.http.send(replace(call.ask, authorization=header))
            if response.status_code != 401 or not ours or not self._is_ours(str(response.url)):
                break  # where the registry only sends its readers on to, nobody asks for its credentials
            header = self.auth.renew(call.scopes, response, header, first=refused == 0, what=self.words(call))
        raise_if_passing(response)
        return response

    def _is_ours(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self._root).netloc

    def unheeded(self, call: RegistryCall) -> None:
        """Send a request once, whose answer changes nothing: no credentials are given up over it."""
        with suppress(Passing, LaunchError):
            header = self.auth.header(call.scopes, self.words(call))
            self.http.send(replace(call.ask, authorization=header))

    def refusal(self, call: RegistryCall, response: Response) -> LaunchError:
        """Return the error for a refusal."""
        return refusal(response, self.host, call.repository, call.what, self.auth.tried())

    def words(self, call: RegistryCall) -> str:
        """Return the operation and the host, for an error."""
        return f"{self.host}/{call.repository}: {call.what}"
