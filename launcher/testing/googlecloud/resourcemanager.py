"""Resource Manager: the project, and the caller's permissions, in the version that gcloud uses.

https://cloud.google.com/resource-manager/reference/rest/v1/projects
"""

from __future__ import annotations

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.policies import Policies
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route


class ResourceManager:
    """The service, with the cloud's one project. The caller has all permissions but those in `denied`."""

    def __init__(self, project: str, number: str, policies: Policies) -> None:
        self.project, self.number = project, number
        self.denied: set[str] = set()
        self.policies = policies
        path = "/v1/projects/{project}:testIamPermissions"
        self.routes: list[Route] = [
            route("POST", path, self.permissions, "cloudresourcemanager.projects.testIamPermissions"),
            route(
                "POST", "/v1/projects/{project}:getIamPolicy", self.policy,
                "cloudresourcemanager.projects.getIamPolicy",
            ),
            route(
                "POST", "/v1/projects/{project}:setIamPolicy", self.set_policy,
                "cloudresourcemanager.projects.setIamPolicy",
            ),
            route("GET", "/v1/projects/{project}", self.get, "cloudresourcemanager.projects.get"),
        ]  # fmt: skip

    def permissions(self, request: Request, project: str) -> Response:
        """Return which of the requested permissions the caller has. Empty if none is requested."""
        request.only_query()
        if project != self.project:
            raise ApiError(403, "The caller does not have permission")
        have = [one for one in request.json()["permissions"] if one not in self.denied]
        return json_response({"permissions": have} if have else {})

    def policy(self, request: Request, project: str) -> Response:
        """Return the project's policy."""
        return json_response(self.policies.get("project"))

    def set_policy(self, request: Request, project: str) -> Response:
        """Replace the project's policy."""
        return json_response(self.policies.set("project", request.json()["policy"]))

    def get(self, request: Request, project: str) -> Response:
        """Return the project. Any other project is refused with 403, as Google does."""
        request.only_query()
        if project not in (self.project, self.number):
            raise ApiError(403, "The caller does not have permission")
        known = {"projectId": self.project, "projectNumber": self.number, "name": self.project}
        return json_response({**known, "lifecycleState": "ACTIVE"})
