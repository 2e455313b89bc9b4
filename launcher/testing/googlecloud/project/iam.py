"""IAM: policies, service accounts, the caller's permissions on the project, and organization policies.

Facts. Seen (gcloud 528's generated clients: iam v1, policytroubleshooter v3, orgpolicy v2): paths, fields, and that
getIamPolicy is a POST except in Cloud Storage and Artifact Registry. Documented: a write with another etag than the
policy's is refused with 409, by Cloud Storage with 412 (https://cloud.google.com/iam/docs/policies#etag); a service
account that does not exist can't be a member (400 "Service account X does not exist."); the states of
`overallAccessState`; effective organization policies have no etag
(https://cloud.google.com/resource-manager/reference/rest/v1/projects/getEffectiveOrgPolicy). Assumed:
testIamPermissions of an account that does not exist is refused with 404; a project's service agents have what Google
grants them; a list constraint that nobody set has the one rule allowAll, a boolean one none.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from launcher.testing.googlecloud.wire import (
    ApiError,
    Request,
    Response,
    Route,
    check_project,
    json_response,
    new_route,
    route,
)

Policy = dict[str, Any]

ACCOUNTS = "/v1/projects/{project}/serviceAccounts"
ACCOUNT = ACCOUNTS + "/{email}"
PROJECT = "/v1/projects/{project}"
NAMED = "iam.projects.serviceAccounts."
RESOURCES = "cloudresourcemanager.projects."
EFFECTIVE = "/v2/projects/{project}/policies/{constraint}:getEffectivePolicy"
RULE = {"values", "allowAll", "denyAll", "enforce", "condition", "parameters", "resourceTypes"}
"""Fields of GoogleCloudOrgpolicyV2PolicySpecPolicyRule."""
BOOLEAN = ("compute.requireShieldedVm",)
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
        bindings = [binding for binding in policy.get("bindings", ()) if binding["members"]]
        self.all[resource] = {"version": policy.get("version", 1), "bindings": bindings, "etag": self._etag()}
        return self.all[resource]

    def routes(self, path: str, operation: str, resource: Callable[..., str]) -> list[Route]:
        """Return the routes that read and replace a resource's policy; `resource` maps the path's parts to its name."""

        def read(request: Request, **names: str) -> Response:
            return json_response(self.get(resource(**names)))

        def replace(request: Request, **names: str) -> Response:
            return json_response(self.set(resource(**names), request.json()["policy"]))

        reads = "GET" if operation.startswith("artifactregistry.") else "POST"
        return [
            new_route(reads, path + ":getIamPolicy", read, operation + "getIamPolicy"),
            new_route("POST", path + ":setIamPolicy", replace, operation + "setIamPolicy"),
        ]

    def allows(self, member: str, permission: str, *resources: str) -> bool:
        """Return whether an unconditional binding on one of the resources grants a permission."""
        return any(
            permission in ROLES.get(binding["role"], ()) and member in binding["members"] and "condition" not in binding
            for resource in resources
            for binding in self.get(resource)["bindings"]
        )

    def _etag(self) -> str:
        return base64.b64encode(f"policy-{next(self._etags)}".encode()).decode()


class Iam:
    """Service accounts, and Policy Troubleshooter.

    An account that was not created also counts as existing, with every access (`access`), so that a test may use any
    name; with `strict` only created ones exist.

    `missing` are accounts that don't exist; `denied` are permissions that the caller lacks; `access` is what Policy
    Troubleshooter answers, by (principal, permission).
    """

    def __init__(self, project: str, number: str, who: Callable[[Request], str]) -> None:
        self.project, self.number, self.who = project, number, who
        self.strict = False
        self.accounts: dict[str, dict[str, Any]] = {}
        self.missing: set[str] = set()
        self.denied: set[str] = set()
        self.access: dict[tuple[str, str], str] = {}
        self.policies = Policies(self.exists)
        self.more_routes = self.policies.routes(ACCOUNT, NAMED, lambda project, email: f"serviceAccounts/{email}")

    def exists(self, email: str) -> bool:
        return email not in self.missing and (not self.strict or email in self.accounts or "gcp-sa-" in email)

    @route("POST", ACCOUNTS, NAMED + "create")
    def create(self, request: Request, project: str) -> Response:
        body = request.json()
        if not re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", body["accountId"]):
            raise ApiError(400, "Invalid service account id.")
        email = f"{body['accountId']}@{self.project}.iam.gserviceaccount.com"
        if email in self.accounts:
            raise ApiError(
                409, f"Service account {body['accountId']} already exists within project projects/{project}."
            )
        name = f"projects/{self.project}/serviceAccounts/{email}"
        self.accounts[email] = {"name": name, "email": email, "projectId": self.project, **body["serviceAccount"]}
        return json_response(self.accounts[email])

    @route("GET", ACCOUNT, NAMED + "get")
    def get(self, request: Request, project: str, email: str) -> Response:
        if email not in self.accounts:
            raise ApiError(404, f"Unknown service account {email}")
        return json_response(self.accounts[email])

    @route("POST", ACCOUNT + ":testIamPermissions", NAMED + "testIamPermissions")
    def test(self, request: Request, project: str, email: str) -> Response:
        if not self.exists(email):
            raise ApiError(404, f"Unknown service account {email}")
        resource, member = f"serviceAccounts/{email}", f"user:{self.who(request)}"
        have = [
            permission
            for permission in request.json()["permissions"]
            if permission not in self.denied and (not self.strict or self.policies.allows(member, permission, resource))
        ]
        return json_response({"permissions": have} if have else {})

    @route("POST", "/v3/iam:troubleshoot", "policytroubleshooter.iam.troubleshoot")
    def troubleshoot(self, request: Request) -> Response:
        access = request.json()["accessTuple"]
        principal, permission, name = access["principal"], access["permission"], access["fullResourceName"]
        default = "CAN_ACCESS"
        if principal in self.accounts:
            resource = re.sub(r"^//[^/]+/(projects/_/)?", "", name)
            allowed = self.policies.allows(f"serviceAccount:{principal}", permission, resource, "project")
            default = "CAN_ACCESS" if allowed else "CANNOT_ACCESS"
        state = self.access.get((principal, permission), default)
        return json_response({"overallAccessState": state, "accessTuple": access})


class ResourceManager:
    """The cloud's one project, on which the caller has all permissions but those in `denied`.

    https://cloud.google.com/resource-manager/reference/rest/v1/projects
    """

    def __init__(self, project: str, number: str, policies: Policies) -> None:
        self.project, self.number = project, number
        self.denied: set[str] = set()
        self.policies = policies
        self.more_routes = self.policies.routes(PROJECT, RESOURCES, lambda project: "project")

    @route("POST", PROJECT + ":testIamPermissions", RESOURCES + "testIamPermissions")
    def permissions(self, request: Request, project: str) -> Response:
        check_project(project, self.project)
        have = [permission for permission in request.json()["permissions"] if permission not in self.denied]
        return json_response({"permissions": have} if have else {})

    @route("GET", PROJECT, RESOURCES + "get")
    def get(self, request: Request, project: str) -> Response:
        """Return the project. Any other project is refused with 403, as Google does."""
        check_project(project, self.project, self.number)
        known = {"projectId": self.project, "projectNumber": self.number, "name": self.project}
        return json_response({**known, "lifecycleState": "ACTIVE"})


class OrgPolicy:
    """Organization policies. `rules` are those of each constraint (compute.vmExternalIpAccess)."""

    def __init__(self, project: str, number: str) -> None:
        self.project, self.number = project, number
        self.rules: dict[str, list[dict[str, Any]]] = {}

    @route("GET", EFFECTIVE, "orgpolicy.projects.policies.getEffectivePolicy")
    def effective(self, request: Request, project: str, constraint: str) -> Response:
        check_project(project, self.project, self.number)
        rules = self.rules.get(constraint, [] if constraint in BOOLEAN else [{"allowAll": True}])
        unknown = {name for rule in rules for name in rule} - RULE
        assert not unknown, f"Org Policy's rules have no {unknown}"
        name = f"projects/{self.number}/policies/{constraint}"
        return json_response({"name": name, "spec": {"rules": rules}})
