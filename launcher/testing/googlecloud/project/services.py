"""Service Usage: which APIs a project has enabled, and enabling them.

Facts. Seen (gcloud 528's generated client, serviceusage v1): paths, fields, states. Documented: batchEnable takes up to
20 services (https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchEnable). Assumed: an operation
that enables APIs is done at once; a disabled API refuses with the ErrorInfo SERVICE_DISABLED (documented for all APIs).
"""

from __future__ import annotations

from typing import Any

from launcher.testing.googlecloud.wire import ApiError, Request, Response, json_response, route

SERVICES = "/v1/projects/{project}/services"
NAMED = "serviceusage.services."


class ServiceUsage:
    """The service. `disabled` are APIs (compute.googleapis.com); the cloud refuses their requests."""

    def __init__(self, project: str, number: str) -> None:
        self.project, self.number = project, number
        self.disabled: set[str] = set()

    def refuse(self, api: str) -> None:
        """Raise ApiError 403 if an API is disabled."""
        if api in self.disabled:
            said = (
                f"{api} API has not been used in project {self.number} before or it is disabled. Enable it by visiting"
            )
            metadata = {"service": api, "consumer": f"projects/{self.number}"}
            raise ApiError(403, said, info="SERVICE_DISABLED", metadata=metadata)

    @route("GET", SERVICES + ":batchGet", NAMED + "batchGet", query="names")
    def batch_get(self, request: Request, project: str) -> Response:
        names = [name.rpartition("/")[2] for name in request.query.get("names", "").split(",")]
        return json_response({"services": [self._service(name) for name in names]})

    @route("POST", SERVICES + ":batchEnable", NAMED + "batchEnable")
    def batch_enable(self, request: Request, project: str) -> Response:
        names = request.json()["serviceIds"]
        if len(names) > 20:
            raise ApiError(400, "A maximum of 20 services can be enabled in one batch.")
        self.disabled -= {*names}
        return self._done({"services": [self._service(name) for name in names]})

    @route("POST", SERVICES + "/{api}:enable", NAMED + "enable")
    def enable(self, request: Request, project: str, api: str) -> Response:
        self.disabled.discard(api)
        return self._done({"service": self._service(api)})

    @route("GET", SERVICES + "/{api}", NAMED + "get")
    def get(self, request: Request, project: str, api: str) -> Response:
        return json_response(self._service(api))

    @route("GET", SERVICES, NAMED + "list", query="filter pageSize pageToken")
    def list(self, request: Request, project: str) -> Response:
        if request.query.get("filter", "state:ENABLED") != "state:ENABLED":
            raise ApiError(400, "The loopback cloud lists enabled services only.")
        return json_response({"services": [self._service(api) for api in USED if api not in self.disabled]})

    @route("GET", "/v1/operations/acf.{operation}", "serviceusage.operations.get")
    def operation(self, request: Request, operation: str) -> Response:
        return self._done({})

    def _done(self, response: dict[str, Any]) -> Response:
        return json_response({"name": "operations/acf.1", "done": True, "response": response})

    def _service(self, api: str) -> dict[str, Any]:
        state = "DISABLED" if api in self.disabled else "ENABLED"
        return {"name": f"projects/{self.number}/services/{api}", "config": {"name": api}, "state": state}


USED = tuple(
    f"{name}.googleapis.com"
    for name in """
        aiplatform artifactregistry cloudbilling cloudquotas cloudresourcemanager compute iam iap logging monitoring
        orgpolicy oslogin policytroubleshooter secretmanager serviceusage storage
    """.split()  # noqa: SIM905 - one name a line would take 16 lines
)
