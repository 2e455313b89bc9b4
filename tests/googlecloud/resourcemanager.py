"""Resource Manager: which permissions the caller has in the project."""

from __future__ import annotations

from tests.googlecloud.errors import ApiError
from tests.googlecloud.wire import Request, Response, Route, json_response, route


class ResourceManager:
    """The service. The caller has every permission but those in `denied`."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.denied: set[str] = set()
        path = "/v1/projects/{project}:testIamPermissions"
        self.routes: list[Route] = [
            route("POST", path, self.permissions, "cloudresourcemanager.projects.testIamPermissions")
        ]

    def permissions(self, request: Request, project: str) -> Response:
        """Those of the permissions asked about that the caller has; without any, nothing."""
        request.only_query()
        if project != self.project:
            raise ApiError(403, "The caller does not have permission")
        have = [one for one in request.json()["permissions"] if one not in self.denied]
        return json_response({"permissions": have} if have else {})
