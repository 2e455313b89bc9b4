"""Secret Manager's versions, and Cloud KMS's keys with their primary version.

Facts. Seen (gcloud 528's generated client, cloudkms v1): path and fields of CryptoKey, and a version's states.
"""

from __future__ import annotations

import base64

import google_crc32c

from launcher.testing.googlecloud.wire import ApiError, Request, Response, Target, json_response, route

VERSION = "/v1/projects/{project}/secrets/{secret}/versions/{version}:access"
OPERATION = "secretmanager.projects.secrets.versions.access"
KEY = "/v1/projects/{project}/locations/{location}/keyRings/{ring}/cryptoKeys/{key}"
ALIAS = "latest"
"""The version that was created last, in any state."""


def _secret(request: Request, **names: str) -> Target:
    return Target(names["secret"])


class SecretManager:
    """Secret Manager. Versions of a secret are counted from 1."""

    def __init__(self, project: str, number: str) -> None:
        self.project = project
        self.number = number
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.states: dict[tuple[str, str], str] = {}
        """(secret, version) -> DISABLED or DESTROYED. All others are enabled."""
        self.denied: set[str] = set()

    def add(self, name: str, value: bytes) -> str:
        versions = self.secrets.setdefault(name, {})
        number = str(len(versions) + 1)
        versions[number] = value
        return number

    def deny(self, name: str) -> None:
        """Deny access to a secret. Google answers the same for a secret that does not exist."""
        self.denied.add(name)

    def allow(self, name: str) -> None:
        self.denied.discard(name)

    def disable(self, name: str, version: str, state: str = "DISABLED") -> None:
        """Disable a version. `state` may be DESTROYED."""
        self.states[name, version] = state

    @route("GET", VERSION.removesuffix(":access"), OPERATION.replace("access", "get"), target=_secret)
    def get(self, request: Request, project: str, secret: str, version: str) -> Response:
        """Return a version without its value. The caller's right to see it is another than to access it."""
        number = self._number(secret, version)
        name = f"projects/{self.number}/secrets/{secret}/versions/{number}"
        return json_response({"name": name, "state": self.states.get((secret, number), "ENABLED")})

    @route("GET", VERSION, OPERATION, target=_secret)
    def access(self, request: Request, project: str, secret: str, version: str) -> Response:
        """Return the bytes of a version, with their CRC-32C."""
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


class Kms:
    """Cloud KMS. `states` are those of the primary version, by the key's resource name."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    @route("GET", KEY, "cloudkms.projects.locations.keyRings.cryptoKeys.get")
    def get(self, request: Request, project: str, location: str, ring: str, key: str) -> Response:
        name = f"projects/{project}/locations/{location}/keyRings/{ring}/cryptoKeys/{key}"
        if name not in self.states:
            raise ApiError(404, f"CryptoKey {name} not found.")
        version = {"name": f"{name}/cryptoKeyVersions/1", "state": self.states[name]}
        return json_response({"name": name, "primary": version, "purpose": "ENCRYPT_DECRYPT"})
