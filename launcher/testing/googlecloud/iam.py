"""IAM's service accounts with their policies, and Policy Troubleshooter.

Facts. Seen (gcloud 528's generated clients, iam v1 and policytroubleshooter v3): paths and fields. Documented: the
states of `overallAccessState`. Assumed: testIamPermissions of an account that does not exist is refused with 404; a
project's service agents have what Google grants them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.policies import Policies
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route

ACCOUNTS = "/v1/projects/{project}/serviceAccounts"
ACCOUNT = ACCOUNTS + "/{email}"
NAMED = "iam.projects.serviceAccounts."


class Iam:
    """The service. An account that was not created also counts as existing, with every access (`access`), so
    that a test may use any name; with `strict` only created ones exist.

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
        self.routes: list[Route] = [
            route("POST", ACCOUNTS, self.create, NAMED + "create"),
            route("GET", ACCOUNT, self.get, NAMED + "get"),
            route("POST", ACCOUNT + ":testIamPermissions", self.test, NAMED + "testIamPermissions"),
            route("POST", ACCOUNT + ":getIamPolicy", self.policy, NAMED + "getIamPolicy"),
            route("POST", ACCOUNT + ":setIamPolicy", self.set_policy, NAMED + "setIamPolicy"),
            route("POST", "/v3/iam:troubleshoot", self.troubleshoot, "policytroubleshooter.iam.troubleshoot"),
        ]

    def exists(self, email: str) -> bool:
        """Return whether an account exists."""
        return email not in self.missing and (not self.strict or email in self.accounts or "gcp-sa-" in email)

    def create(self, request: Request, project: str) -> Response:
        """Create a service account."""
        request.only_query()
        asked = request.json()
        if not re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", asked["accountId"]):
            raise ApiError(400, "Invalid service account id.")
        email = f"{asked['accountId']}@{self.project}.iam.gserviceaccount.com"
        if email in self.accounts:
            raise ApiError(
                409, f"Service account {asked['accountId']} already exists within project projects/{project}."
            )
        name = f"projects/{self.project}/serviceAccounts/{email}"
        self.accounts[email] = {"name": name, "email": email, "projectId": self.project, **asked["serviceAccount"]}
        return json_response(self.accounts[email])

    def get(self, request: Request, project: str, email: str) -> Response:
        """Return an account that was created here."""
        if email not in self.accounts:
            raise ApiError(404, f"Unknown service account {email}")
        return json_response(self.accounts[email])

    def test(self, request: Request, project: str, email: str) -> Response:
        """Return which of the permissions the caller has on an account."""
        if not self.exists(email):
            raise ApiError(404, f"Unknown service account {email}")
        resource, member = f"serviceAccounts/{email}", f"user:{self.who(request)}"
        have = [
            one
            for one in request.json()["permissions"]
            if one not in self.denied and (not self.strict or self.policies.allows(member, one, resource))
        ]
        return json_response({"permissions": have} if have else {})

    def policy(self, request: Request, project: str, email: str) -> Response:
        """Return an account's policy."""
        return json_response(self.policies.get(f"serviceAccounts/{email}"))

    def set_policy(self, request: Request, project: str, email: str) -> Response:
        """Replace an account's policy."""
        return json_response(self.policies.set(f"serviceAccounts/{email}", request.json()["policy"]))

    def troubleshoot(self, request: Request) -> Response:
        """Return whether a principal has a permission, by the policies here."""
        asked = request.json()["accessTuple"]
        principal, permission, name = asked["principal"], asked["permission"], asked["fullResourceName"]
        default = "CAN_ACCESS"
        if principal in self.accounts:
            resource = re.sub(r"^//[^/]+/(projects/_/)?", "", name)
            allowed = self.policies.allows(f"serviceAccount:{principal}", permission, resource, "project")
            default = "CAN_ACCESS" if allowed else "CANNOT_ACCESS"
        state = self.access.get((principal, permission), default)
        return json_response({"overallAccessState": state, "accessTuple": asked})
