"""OS Login: users' names on VMs, and their SSH keys (https://cloud.google.com/compute/docs/oslogin/rest/v1/users)."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from launcher.testing.googlecloud.wire import ApiError, Request, Response, json_response, route

USER = "/v1/users/{user}"
FIRST_UID = 2_000_000_001


class OsLogin:
    """The service. A user gets a POSIX account when a key is first imported."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.keys: dict[str, dict[str, dict[str, Any]]] = {}
        """User -> fingerprint -> SshPublicKey."""
        self.names: dict[str, str] = {}
        """User -> name on VMs."""

    @route("GET", USER + "/loginProfile", "oslogin.users.getLoginProfile", query="projectId")
    def profile(self, request: Request, user: str) -> Response:
        self._check(request, user)
        return json_response(self._profile(user))

    @route("POST", USER + ":importSshPublicKey", "oslogin.users.importSshPublicKey", query="projectId regions")
    def import_key(self, request: Request, user: str) -> Response:
        self._check(request, user)
        body = request.json()
        key = str(body.get("key", "")).strip()
        if not re.match(r"(ssh-(rsa|ed25519)|ecdsa-sha2-\S+) [A-Za-z0-9+/]+=*( |$)", key):
            raise ApiError(400, "Invalid SSH public key.")
        self.names.setdefault(user, re.sub(r"[^a-z0-9]", "_", user.lower()))
        self._put(user, {**body, "key": key})
        return json_response({"loginProfile": self._profile(user)})

    def _put(self, user: str, key: dict[str, Any]) -> None:
        fingerprint = hashlib.sha256(key["key"].encode()).hexdigest()
        name = f"users/{user}/sshPublicKeys/{fingerprint}"
        self.keys.setdefault(user, {})[fingerprint] = {**key, "fingerprint": fingerprint, "name": name}

    def _check(self, request: Request, user: str) -> None:
        if "@" not in user:
            raise ApiError(400, "Invalid user name.")
        if request.query.get("projectId", self.project) != self.project:
            raise ApiError(403, "The caller does not have permission", info="IAM_PERMISSION_DENIED")

    def _profile(self, user: str) -> dict[str, Any]:
        number = str(100_000_000_000_000_000_000 + int(hashlib.sha256(user.encode()).hexdigest()[:8], 16))
        profile: dict[str, Any] = {"name": number}
        if user in self.names:
            uid = str(FIRST_UID + list(self.names).index(user))
            name = self.names[user]
            account = {"username": name, "uid": uid, "gid": uid, "homeDirectory": f"/home/{name}", "shell": "/bin/bash"}
            whose = {"name": f"users/{user}/projects/{self.project}", "accountId": self.project}
            profile["posixAccounts"] = [{"primary": True, **account, "operatingSystemType": "LINUX", **whose}]
        return profile | ({"sshPublicKeys": self.keys[user]} if self.keys.get(user) else {})
