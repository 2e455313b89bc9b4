"""Secret Manager: access to secret versions."""

from __future__ import annotations

import base64

import google_crc32c

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.wire import Request, Response, Route, Target, json_response, route

VERSION = "/v1/projects/{project}/secrets/{secret}/versions/{version}:access"
OPERATION = "secretmanager.projects.secrets.versions.access"
ALIAS = "latest"
"""The version that was created last, in any state."""


class SecretManager:
    """The service. Versions of a secret are counted from 1."""

    def __init__(self, project: str, number: str) -> None:
        self.project = project
        self.number = number
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.states: dict[tuple[str, str], str] = {}
        """(secret, version) -> DISABLED or DESTROYED. All others are enabled."""
        self.denied: set[str] = set()
        self.routes: list[Route] = [
            route("GET", VERSION, self.access, OPERATION, _secret),
            route("GET", VERSION.removesuffix(":access"), self.get, OPERATION.replace("access", "get"), _secret),
        ]

    def add(self, name: str, value: bytes) -> str:
        """Add a version and return its number."""
        versions = self.secrets.setdefault(name, {})
        number = str(len(versions) + 1)
        versions[number] = value
        return number

    def deny(self, name: str) -> None:
        """Deny access to a secret. Google answers the same for a secret that does not exist."""
        self.denied.add(name)

    def allow(self, name: str) -> None:
        """Restore access to a secret."""
        self.denied.discard(name)

    def disable(self, name: str, version: str, state: str = "DISABLED") -> None:
        """Disable a version. `state` may be DESTROYED."""
        self.states[name, version] = state

    def get(self, request: Request, project: str, secret: str, version: str) -> Response:
        """Return a version without its value. The caller's right to see it is another than to access it."""
        number = self._number(secret, version)
        name = f"projects/{self.number}/secrets/{secret}/versions/{number}"
        return json_response({"name": name, "state": self.states.get((secret, number), "ENABLED")})

    def access(self, request: Request, project: str, secret: str, version: str) -> Response:
        """Return the bytes of a version, with their CRC-32C."""
        request.only_query()
        if project not in (self.project, self.number) or secret in self.denied:
            where = f"projects/{project}/secrets/{secret}/versions/{version}"
            said = f"Permission 'secretmanager.versions.access' denied for resource '{where}' (or it may not exist)."
            raise ApiError(403, said, info="IAM_PERMISSION_DENIED")
        number = self._number(secret, version)
        name = f"projects/{self.number}/secrets/{secret}/versions/{number}"
        if state := self.states.get((secret, number)):
            raise ApiError(400, f"Secret Version [{name}] is in {state} state.", status="FAILED_PRECONDITION")
        value = self.secrets[secret][number]
        payload = {"data": base64.b64encode(value).decode(), "dataCrc32c": str(google_crc32c.value(value))}
        return json_response({"name": name, "payload": payload})

    def _number(self, secret: str, version: str) -> str:
        versions = self.secrets.get(secret, {})
        if not versions:
            name = f"projects/{self.number}/secrets/{secret}"
            raise ApiError(404, f"Secret [{name}] not found or has no versions.")
        number = max(versions, key=int) if version == ALIAS else version
        if number not in versions:
            name = f"projects/{self.number}/secrets/{secret}/versions/{version}"
            raise ApiError(404, f"Secret Version [{name}] not found.")
        return number


def _secret(request: Request, project: str, secret: str, version: str) -> Target:
    return Target(secret)
