"""IAM policies: read, replaced with an etag, and what they allow.

Facts. Seen (gcloud 528's generated clients): fields, and that getIamPolicy is a POST except in Cloud Storage and
Artifact Registry. Documented (https://cloud.google.com/iam/docs/policies#etag): a write with another etag than the
policy's is refused with 409; Cloud Storage refuses with 412. Documented: a service account that does not exist can't be
a member (400 "Service account X does not exist.").
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from launcher.testing.googlecloud.errors import ApiError

Policy = dict[str, Any]

ROLES: Mapping[str, tuple[str, ...]] = {
    "roles/storage.objectUser": ("storage.objects.create", "storage.objects.delete", "storage.objects.get",
                                 "storage.objects.list"),
    "roles/storage.objectViewer": ("storage.objects.get", "storage.objects.list"),
    "roles/secretmanager.secretAccessor": ("secretmanager.versions.access",),
    "roles/logging.logWriter": ("logging.logEntries.create",),
    "roles/artifactregistry.reader": ("artifactregistry.repositories.downloadArtifacts",),
    "roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs",),
}  # fmt: skip
"""Permissions of predefined roles, as far as launch uses them (https://cloud.google.com/iam/docs/roles-permissions)."""


class Policies:
    """All policies by resource. `known` says whether a service account exists."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self.known = known
        self.all: dict[str, Policy] = {}
        self._etags = count(1)

    def get(self, resource: str) -> Policy:
        """Return a resource's policy; a new one is empty."""
        return self.all.setdefault(resource, {"version": 1, "bindings": [], "etag": self._etag()})

    def set(self, resource: str, policy: Policy, stale: int = 409) -> Policy:
        """Replace a policy. Raises ApiError: it was changed since it was read (`stale`), or a member does not exist."""
        if policy.get("etag", self.get(resource)["etag"]) != self.get(resource)["etag"]:
            said = "There were concurrent policy changes. Please retry the whole read-modify-write."
            raise ApiError(stale, said, status="ABORTED")
        for binding in policy.get("bindings", ()):
            for member in binding["members"]:
                kind, _, email = member.partition(":")
                if kind == "serviceAccount" and not self.known(email):
                    raise ApiError(400, f"Service account {email} does not exist.")
        bindings = [one for one in policy.get("bindings", ()) if one["members"]]
        self.all[resource] = {"version": policy.get("version", 1), "bindings": bindings, "etag": self._etag()}
        return self.all[resource]

    def allows(self, member: str, permission: str, *resources: str) -> bool:
        """Return whether an unconditional binding on one of the resources grants a permission."""
        return any(
            permission in ROLES.get(one["role"], ()) and member in one["members"] and "condition" not in one
            for resource in resources
            for one in self.get(resource)["bindings"]
        )

    def _etag(self) -> str:
        return base64.b64encode(f"policy-{next(self._etags)}".encode()).decode()
