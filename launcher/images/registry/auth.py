"""Authenticate to a registry: Basic, or a Bearer token of its token service.

https://distribution.github.io/distribution/spec/auth/token/ and …/oauth/
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode, urlsplit

from launch_train.common.loopback import is_plain_loopback
from launcher.images.registry.credentials import Credentials, SourceError, sources
from launcher.images.registry.errors import RegistryError, denied, said
from launcher.images.registry.http import Ask, Http
from launcher.images.registry.retry import RetryPolicy, TransientError, raise_if_transient

if TYPE_CHECKING:
    from requests import Response

LIFETIME_SECONDS: Final = 60.0
"""The lifetime of a token whose service does not specify one: the specification's default."""

MARGIN: Final = 0.9
"""The fraction of its lifetime for which a token is used. It must not expire while a piece of 16 MiB is being sent."""

Scopes = tuple[str, ...]


@dataclass(frozen=True)
class Challenge:
    """A parsed WWW-Authenticate header. `scheme` is in lower case; `scope` is the one that the registry suggests."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""


@dataclass(frozen=True)
class Grant:
    """An Authorization header, the index of its credential source, and its expiry time."""

    header: str | None
    source: int
    until: float


class Auth:
    """The credentials of one registry: the first ones that it accepts, by scope. Thread-safe."""

    def __init__(self, host: str, environ: Mapping[str, str], http: Http, policy: RetryPolicy) -> None:
        self._host = host
        self._http = http
        self._policy = policy
        self._sources = sources(host, environ)
        self._challenge: Challenge | None = None
        self._grants: dict[Scopes, Grant] = {}
        self._outcomes: dict[str, str] = {}
        self._lock = threading.Lock()

    def header(self, scopes: Scopes, what: str) -> str | None:
        """Return the Authorization header for `scopes`. None until the registry has requested authentication.

        `what` is the operation, for error messages.

        Raises:
            NotAuthorised: no credentials are accepted.
            RegistryError: the token service fails.
        """
        with self._lock:
            grant = self._grants.get(scopes)
            if self._challenge is None or (grant and self._policy.clock.now() < grant.until):
                return grant.header if grant else None
            start = grant.source if grant else 0
            return self._grant(scopes, self._challenge, start, None, f"{what}: credentials are not accepted")

    def renew(self, scopes: Scopes, response: Response, refused: str | None, *, first: bool, what: str) -> str | None:
        """Return the header to send instead of `refused`, which the registry answered with a 401.

        On the `first` refusal the token may have expired, so the same credentials are used again. Afterwards they lack
        the permission, and the next ones are tried.

        Raises:
            NotAuthorised: there are no others.
            RegistryError: the token service fails, or the registry requests neither Basic nor Bearer.
        """
        with self._lock:
            grant = self._grants.get(scopes)
            if grant and grant.header != refused:
                return grant.header  # another thread has renewed it
            challenge = self._asked(response, what)
            self._challenge = replace(challenge, scope="")  # the scope was for this request only
            start = grant.source if grant else 0
            if refused is not None and not first:
                self._note(start, "refused")
                start += 1
            return self._grant(scopes, challenge, start, refused, f"{what}: {said(response)}")

    def tried(self) -> str:
        """Return the credentials that were tried and the results, never their values."""
        return ", ".join(f"{name} ({outcome})" for name, outcome in self._outcomes.items())

    def _grant(self, scopes: Scopes, challenge: Challenge, start: int, refused: str | None, problem: str) -> str | None:
        """Return the header of the first accepted credentials, from the source with index `start` on."""
        for index in range(start, len(self._sources)):
            found = self._granted(scopes, challenge, index)
            if found and found.header != refused:
                self._grants[scopes] = found
                return found.header
            if found:
                self._note(index, "refused")
        raise denied(self._host, problem, self.tried())

    def _granted(self, scopes: Scopes, challenge: Challenge, index: int) -> Grant | None:
        """Return a grant from one source. None: it has no credentials for this registry, or they are refused."""
        source = self._sources[index]
        try:
            known = source.known
            credentials = source.credentials()
            grant = self._exchanged(scopes, challenge, index, credentials)
            if grant is None and known and source.credentials(refresh=True) != credentials:
                grant = self._exchanged(scopes, challenge, index, source.credentials())
        except SourceError as error:
            self._note(index, str(error))
            return None
        if grant:
            self._note(index, "used")
        return grant

    def _exchanged(self, scopes: Scopes, challenge: Challenge, index: int, found: Credentials | None) -> Grant | None:
        if found is None and not self._sources[index].anonymous:
            self._note(index, "nothing for this registry")
            return None
        if challenge.scheme == "basic":
            return Grant(_basic(found), index, float("inf")) if found and not found.identity_token else None
        return self._token(scopes, challenge, index, found)

    def _token(self, scopes: Scopes, challenge: Challenge, index: int, found: Credentials | None) -> Grant | None:
        """Request a token from the token service. None: it refuses the credentials."""
        ask = _token_request(challenge, (*scopes, *challenge.scope.split()), found)
        tries = self._policy.begin(f"{self._host}: ask for a token at {challenge.realm}")
        while True:
            begun = self._policy.clock.now()
            try:
                response = self._http.send(ask)
                raise_if_transient(response)
                break
            except TransientError as error:
                tries.wait(error)
        if response.status_code in (400, 401, 403, 404):
            self._note(index, "refused")
            return None
        token, seconds = _token_of(response, f"{self._host}: ask for a token at {challenge.realm}")
        return Grant(f"Bearer {token}", index, begun + MARGIN * seconds)

    def _asked(self, response: Response, what: str) -> Challenge:
        """Return the first challenge that can be met. A password is only sent over TLS or loopback."""
        text = response.headers.get("WWW-Authenticate", "")
        for challenge in challenges(text):
            if challenge.scheme == "basic":
                return challenge
            if challenge.scheme == "bearer":
                if urlsplit(challenge.realm).scheme == "https" or is_plain_loopback(challenge.realm):
                    return challenge
                raise RegistryError(f"{what}: the registry's token service has no TLS: {challenge.realm!r}")
        raise RegistryError(f"{what}: {said(response)}; it asks for {text or 'nothing'!r}, not for Basic or Bearer")

    def _note(self, index: int, outcome: str) -> None:
        if index < len(self._sources):
            self._outcomes[self._sources[index].name] = outcome


_WORD = re.compile(r'([A-Za-z][\w-]*)(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+)))?')


def challenges(text: str) -> list[Challenge]:
    """Parse the challenges of a WWW-Authenticate header, in order (RFC 9110, section 11.6.1).

    A word without a value starts a challenge. Words with values are its parameters.
    """
    found: list[tuple[str, dict[str, str]]] = []
    for word in _WORD.finditer(text):
        name, quoted, bare = word[1].lower(), word[2], word[3]
        if quoted is None and bare is None:
            found.append((name, {}))
        elif found and name in ("realm", "service", "scope"):
            found[-1][1][name] = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    return [Challenge(scheme, **parameters) for scheme, parameters in found]


def _basic(credentials: Credentials) -> str:
    pair = f"{credentials.username}:{credentials.password}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _token_request(challenge: Challenge, scopes: Scopes, found: Credentials | None) -> Ask:
    """Build the request for a token: by GET with user name and password, or by POST with an identity token.

    Every token service supports GET.
    """
    distinct = tuple(dict.fromkeys(scopes))
    service = (("service", challenge.service),) if challenge.service else ()
    if found and found.identity_token:
        form = (
            ("grant_type", "refresh_token"),
            *service,
            ("client_id", "gcp-launch"),
            ("scope", " ".join(distinct)),
            ("refresh_token", found.identity_token),
        )
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return Ask("POST", challenge.realm, kind, body=urlencode(form).encode())
    params = (*service, *(("scope", scope) for scope in distinct))
    return Ask("GET", challenge.realm, params=params, authorization=_basic(found) if found else None)


def _token_of(response: Response, what: str) -> tuple[str, float]:
    """Return the token in a response, and its lifetime in seconds."""
    try:
        answer = json.loads(response.content) if response.ok else {}
        token = str(answer.get("token") or answer.get("access_token") or "")
        seconds = float(answer.get("expires_in") or LIFETIME_SECONDS)
    except (ValueError, TypeError, AttributeError):
        token, seconds = "", 0.0
    if not token:
        raise RegistryError(f"{what}: {said(response) if not response.ok else 'the answer has no token'}")
    return token, seconds
