"""Who may do what: Basic authentication, or Bearer tokens of a token service, as registries ask for them.

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

from launcher.testing.registry.wire import Request, Response, error

Rights = Mapping[str, frozenset[str]]
"""Actions (pull, push, delete) by repository."""


class Access(Protocol):
    """A gate before the registry."""

    def stop(self, request: Request, url: str) -> Response | None:
        """The refusal of a request; None lets it through."""

    def token(self, request: Request) -> Response:
        """The token service's answer."""


def needed(request: Request) -> Rights:
    """What a request needs, as Docker's registry sees it (registry/handlers/app.go): a mount also pulls its source."""
    if not request.repository:
        return {}
    actions = {"GET": {"pull"}, "HEAD": {"pull"}, "DELETE": {"delete"}}.get(request.method, {"pull", "push"})
    rights = {request.repository: frozenset(actions)}
    if request.step == "mount":
        rights.setdefault(request.parameter("from"), frozenset({"pull"}))
    return rights


@dataclass
class Basic:
    """Passwords by name."""

    users: Mapping[str, str]

    def stop(self, request: Request, url: str) -> Response | None:
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
    """Passwords and identity tokens by name, and a token service at /token whose tokens live for `lifetime` seconds.

    `reads` are the repositories that each name (None: everybody) may only pull from, the rest are open to all names;
    `denies` is what becomes of a token without the right: as Docker's registry (401), or as Artifact Registry (403).
    """

    users: Mapping[str, str]
    identity_tokens: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str | None, frozenset[str]] = field(default_factory=dict)
    lifetime: float = 300.0
    says_lifetime: bool = True
    clock: Callable[[], float] = time.monotonic
    denies: Literal[401, 403] = 401
    realm: str = ""
    asked: list[tuple[str | None, tuple[str, ...]]] = field(default_factory=list)
    """Name and scopes of each token that was given."""
    tokens: dict[str, _Token] = field(default_factory=dict)

    def stop(self, request: Request, url: str) -> Response | None:
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        token = self.tokens.get(value) if kind == "Bearer" else None
        rights = needed(request)
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
        self.asked.append((user, scopes))
        value = secrets.token_hex(8)
        self.tokens[value] = _Token(user, self._granted(user, scopes), self.clock() + self.lifetime)
        answer = {"access_token" if request.method == "POST" else "token": value}
        life = {"expires_in": int(self.lifetime)} if self.says_lifetime else {}
        return Response(200, {"Content-Type": "application/json"}, json.dumps({**answer, **life}).encode())

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
    """The name that a Basic header proves; None for none or a wrong one."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind != "Basic":
        return None
    name, _, password = base64.b64decode(value).decode().partition(":")
    return name if users.get(name) == password else None
