"""Access control of the registry: Basic authentication, or Bearer tokens from a token service.

https://distribution.github.io/distribution/spec/auth/token/ and …/scope/
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol
from urllib.parse import parse_qs

from launcher.testing.httpserver import Response
from launcher.testing.registry.api import Request, error

Rights = Mapping[str, frozenset[str]]
"""Repository -> the actions that are allowed or required (pull, push, delete)."""


class Access(Protocol):
    """Decides whether the registry accepts a request."""

    def refuse(self, request: Request, url: str) -> Response | None:
        """Return the refusal of a request, or None if it is allowed. `url` is the registry's address."""

    def token(self, request: Request) -> Response:
        """Return the token service's response."""


def required_rights(request: Request) -> Rights:
    """Return the rights that a request requires; a mount also pulls its source (Docker's registry/handlers/app.go)."""
    if not request.repository:
        return {}
    actions = {"GET": {"pull"}, "HEAD": {"pull"}, "DELETE": {"delete"}}.get(request.method, {"pull", "push"})
    rights = {request.repository: frozenset(actions)}
    if request.step == "mount":
        rights.setdefault(request.parameter("from"), frozenset({"pull"}))
    return rights


@dataclass
class Basic:
    """Basic authentication. `users`: user name -> password."""

    users: Mapping[str, str]

    def refuse(self, request: Request, url: str) -> Response | None:
        if _user(request, self.users):
            return None
        return error(401, "UNAUTHORIZED", "authentication required", {"WWW-Authenticate": 'Basic realm="registry"'})

    def token(self, request: Request) -> Response:
        return error(404, "UNSUPPORTED")


@dataclass(frozen=True)
class _Token:
    user: str | None
    rights: Rights
    until: float


@dataclass
class Bearer:
    """Bearer authentication with a token service at /token, whose tokens are valid for `lifetime` seconds.

    `users`: user name -> password. `identity_tokens`: user name -> refresh token. `reads`: user name (None: anonymous)
    -> repositories from which that user may only pull; all users may push to the others. `denies`: the status for a
    token that lacks a right, 401 as in Docker's registry or 403 as in Artifact Registry.
    """

    users: Mapping[str, str]
    identity_tokens: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str | None, frozenset[str]] = field(default_factory=dict)
    lifetime: float = 300.0
    reports_lifetime: bool = True
    clock: Callable[[], float] = time.monotonic
    denies: Literal[401, 403] = 401
    realm: str = ""
    issued: list[tuple[str | None, tuple[str, ...]]] = field(default_factory=list)
    """User name (None: anonymous) and scopes of each issued token."""
    tokens: dict[str, _Token] = field(default_factory=dict)

    def refuse(self, request: Request, url: str) -> Response | None:
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        token = self.tokens.get(value) if kind == "Bearer" else None
        rights = required_rights(request)
        if token is None or token.until <= self.clock():
            return self._ask(rights, url, "invalid_token" if value else "")
        if all(actions <= token.rights.get(name, frozenset()) for name, actions in rights.items()):
            return None
        if self.denies == 403:
            return error(403, "DENIED", "Permission denied on the resource (or it may not exist)")
        return self._ask(rights, url, "insufficient_scope")

    def token(self, request: Request) -> Response:
        form = parse_qs(request.body.decode())
        user, scopes = _user(request, self.users), tuple(request.parameters("scope"))
        if request.method == "POST":
            named = {token: name for name, token in self.identity_tokens.items()}
            user, scopes = named.get(form["refresh_token"][0]), tuple(form["scope"][0].split())
        if user is None and (request.method == "POST" or "authorization" in request.headers):
            return error(401, "UNAUTHORIZED", "incorrect username or password")
        self.issued.append((user, scopes))
        value = secrets.token_hex(8)
        self.tokens[value] = _Token(user, self._granted(user, scopes), self.clock() + self.lifetime)
        answer = {"access_token" if request.method == "POST" else "token": value}
        life = {"expires_in": int(self.lifetime)} if self.reports_lifetime else {}
        return Response(json.dumps({**answer, **life}).encode(), 200, {"Content-Type": "application/json"})

    def _granted(self, user: str | None, scopes: tuple[str, ...]) -> Rights:
        rights: dict[str, frozenset[str]] = {}
        for scope in scopes:
            _, name, actions = scope.split(":")
            only_pull = user is None or name in self.reads.get(user, frozenset())
            hidden = user is None and name not in self.reads.get(None, frozenset())
            allowed = {"pull"} if only_pull else {"pull", "push", "delete"}
            granted = frozenset(set(actions.split(",")) & (set() if hidden else allowed))
            rights[name] = rights.get(name, frozenset()) | granted
        return rights

    def _ask(self, rights: Rights, url: str, problem: str) -> Response:
        scope = " ".join(f"repository:{name}:{','.join(sorted(actions))}" for name, actions in rights.items())
        parts = [f'realm="{self.realm or f"{url}/token"}"', 'service="loopback"']
        parts += [f'scope="{scope}"'] * bool(scope) + [f'error="{problem}"'] * bool(problem)
        return error(401, "UNAUTHORIZED", "authentication required", {"WWW-Authenticate": f"Bearer {','.join(parts)}"})


def _user(request: Request, users: Mapping[str, str]) -> str | None:
    """Return the user that a Basic header authenticates; None if there is no such header or the password is wrong."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind != "Basic":
        return None
    name, _, password = base64.b64decode(value).decode().partition(":")
    return name if users.get(name) == password else None
