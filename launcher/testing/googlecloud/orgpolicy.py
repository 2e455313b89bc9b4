"""Org Policy: a project's effective policies.

Facts. Seen (gcloud 528's generated client, orgpolicy v2): paths and fields. Documented: effective policies have no etag
(https://cloud.google.com/resource-manager/reference/rest/v1/projects/getEffectiveOrgPolicy). Assumed: a list constraint
that nobody set has the one rule allowAll, a boolean one none.
"""

from __future__ import annotations

from typing import Any

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route

RULE = {"values", "allowAll", "denyAll", "enforce", "condition", "parameters", "resourceTypes"}
"""Fields of GoogleCloudOrgpolicyV2PolicySpecPolicyRule."""
BOOLEAN = ("compute.requireShieldedVm",)


class OrgPolicy:
    """The service. `rules` are those of each constraint (compute.vmExternalIpAccess)."""

    def __init__(self, project: str, number: str) -> None:
        self.project, self.number = project, number
        self.rules: dict[str, list[dict[str, Any]]] = {}
        path = "/v2/projects/{project}/policies/{constraint}:getEffectivePolicy"
        self.routes: list[Route] = [
            route("GET", path, self.effective, "orgpolicy.projects.policies.getEffectivePolicy")
        ]

    def effective(self, request: Request, project: str, constraint: str) -> Response:
        """Return the effective policy of a constraint."""
        request.only_query()
        if project not in (self.project, self.number):
            raise ApiError(403, "The caller does not have permission")
        rules = self.rules.get(constraint, [] if constraint in BOOLEAN else [{"allowAll": True}])
        unknown = {name for rule in rules for name in rule} - RULE
        assert not unknown, f"Org Policy's rules have no {unknown}"
        name = f"projects/{self.number}/policies/{constraint}"
        return json_response({"name": name, "spec": {"rules": rules}})
