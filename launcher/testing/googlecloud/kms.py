"""Cloud KMS: keys with their primary version.

Facts. Seen (gcloud 528's generated client, cloudkms v1): path and fields of CryptoKey, and a version's states.
"""

from __future__ import annotations

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route

KEY = "/v1/projects/{project}/locations/{location}/keyRings/{ring}/cryptoKeys/{key}"


class Kms:
    """The service. `states` are those of the primary version, by the key's resource name."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.routes: list[Route] = [route("GET", KEY, self.get, "cloudkms.projects.locations.keyRings.cryptoKeys.get")]

    def get(self, request: Request, project: str, location: str, ring: str, key: str) -> Response:
        """Return a key."""
        request.only_query()
        name = f"projects/{project}/locations/{location}/keyRings/{ring}/cryptoKeys/{key}"
        if name not in self.states:
            raise ApiError(404, f"CryptoKey {name} not found.")
        version = {"name": f"{name}/cryptoKeyVersions/1", "state": self.states[name]}
        return json_response({"name": name, "primary": version, "purpose": "ENCRYPT_DECRYPT"})
