"""The HTTP server: one address for all services, which checks access tokens and refuses as Google's APIs do."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from launcher.testing.googlecloud.compute.oslogin import OsLogin
from launcher.testing.googlecloud.compute.service import Compute
from launcher.testing.googlecloud.faults import Faults
from launcher.testing.googlecloud.images.artifact_registry import ArtifactRegistry
from launcher.testing.googlecloud.images.cloud_build import CloudBuild
from launcher.testing.googlecloud.logs import Logging
from launcher.testing.googlecloud.project.billing import Billing
from launcher.testing.googlecloud.project.iam import Iam, OrgPolicy, ResourceManager
from launcher.testing.googlecloud.project.quotas import CloudQuotas
from launcher.testing.googlecloud.project.secrets import Kms, SecretManager
from launcher.testing.googlecloud.project.services import ServiceUsage
from launcher.testing.googlecloud.storage.api import Storage, Uploads
from launcher.testing.googlecloud.storage.objects import Bucket, Objects
from launcher.testing.googlecloud.vertex.jobs import LIFE, CustomJobs, Stage
from launcher.testing.googlecloud.vertex.processes import Place, Runner, Runs
from launcher.testing.googlecloud.wire import (
    ApiError,
    Call,
    Recorded,
    Request,
    Response,
    Route,
    Target,
    find_route,
    json_response,
    routes_of,
)
from launcher.testing.httpserver import LoopbackServer

EXPECTED = (
    "Expected OAuth 2 access token, login cookie or other valid authentication credential. "
    "See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
MISSING = f"Request is missing required authentication credential. {EXPECTED}"
INVALID = f"Request had invalid authentication credentials. {EXPECTED}"

ENDPOINTS = """
    AIPLATFORM ARTIFACTREGISTRY CLOUDBILLING CLOUDBUILD CLOUDKMS CLOUDRESOURCEMANAGER CLOUDQUOTAS IAM LOGGING MONITORING
    ORGPOLICY OSLOGIN POLICYTROUBLESHOOTER SECRETMANAGER SERVICEUSAGE
"""
"""gcloud's names of the services whose endpoint is the cloud's address."""


class GoogleCloud(LoopbackServer):
    """A Google Cloud with one project, as a context manager. All requests are recorded in `requests`, in order.

    `clock` returns Unix seconds. `script` is the life of each new job. `record` is a file to which each request is
    appended as a line of JSON. Each answer is delayed by `latency` seconds of real time. With a `runner`, jobs run as
    processes until the cloud is closed. `faults` has the planned faults. Requests without one of `tokens` are refused;
    None accepts all requests.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        project: str = "my-project",
        number: str = "123456789012",
        buckets: tuple[str | Bucket, ...] = ("my-bucket",),
        clock: Callable[[], float] = time.time,
        script: tuple[Stage, ...] = LIFE,
        record: Path | None = None,
        latency: float = 0.0,
        runner: Runner | None = None,
        tokens: set[str] | None = None,
    ) -> None:
        self.project = project
        self.record = record
        self.latency = latency
        self.faults = Faults(clock)
        self.requests: list[Recorded] = []
        self.tokens = tokens
        self.logs = Logging(project, number, clock)
        self.runs = Runs(runner, Place(clock, self.environ, self.logs.write)) if runner else None
        self.jobs = CustomJobs(project, number, clock, script, self.runs)
        moment = 0.2 if clock is time.time else 0.0
        self.compute = Compute(project, number, clock, lambda: self.url, moment)
        self.iam = Iam(project, number, self.compute.who)
        self.artifacts = ArtifactRegistry(project, number, clock, self.iam.policies)
        self.objects = Objects(buckets, clock)
        self.builds = CloudBuild(project, number, clock, self.objects)
        self.secrets = SecretManager(project, number)
        self.oslogin = OsLogin(project)
        self.services = ServiceUsage(project, number)
        self.quotas = CloudQuotas(project, self.compute.quotas)
        self.projects = ResourceManager(project, number, self.iam.policies)
        self.billing = Billing()
        self.policies = OrgPolicy(project, number)
        self.keys = Kms()
        self.storage = Storage(self.objects, number, lambda: self.url, self.iam.policies)
        self.uploads = Uploads(self.objects, self.storage, lambda: self.url)
        self._lock = threading.Lock()
        accounts = (self.secrets, self.oslogin, self.projects, self.billing, self.iam, self.services, self.quotas)
        rules = (self.policies, self.keys)
        services = (self.jobs, self.compute, self.artifacts, self.builds, self.logs, *accounts, *rules)
        serial = [self._one_at_a_time(route) for service in services for route in routes_of(service)]
        self._routes = [*serial, *routes_of(self.storage), *routes_of(self.uploads)]  # Cloud Storage has its own lock
        super().__init__(lambda head: self.serve(Request.of(head)), "google-cloud", port=port, clock=clock)
        self._config = tempfile.TemporaryDirectory(prefix="gcloud-")

    def environ(self) -> dict[str, str]:
        """Return the environment that leads gcloud and Google's clients here."""
        endpoints = dict.fromkeys(ENDPOINTS.split(), f"{self.url}/")
        endpoints |= {"COMPUTE": f"{self.url}/compute/v1/", "STORAGE": f"{self.url}/storage/v1/"}
        return {
            "CLOUDSDK_CONFIG": self._config.name,
            "CLOUDSDK_CORE_PROJECT": self.project,
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
            **self._credentials(),
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "STORAGE_EMULATOR_HOST": self.url,
            **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": value for name, value in endpoints.items()},
        }

    def let_in(self, token: str) -> None:
        """Accept only requests with `token` from now on. gcloud's token file, which `environ` names, then has it."""
        self.tokens = {token}
        self._token_file.write_text(token, encoding="utf-8")

    @property
    def _token_file(self) -> Path:
        return Path(self._config.name) / "token"

    def _credentials(self) -> dict[str, str]:
        if self.tokens is None:
            return {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true"}
        return {"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(self._token_file)}

    def close(self) -> None:
        """End all jobs, and stop the server."""
        if self.runs:
            self.runs.close()  # checkpoints of jobs that are being stopped are still stored
        super().close()
        self._config.cleanup()

    def serve(self, request: Request) -> Response:
        """Return the answer to a request, faults included."""
        self._keep(request)
        try:
            response = self._with_faults(request) if self.faults.planned else self._answer(request)
        except ApiError as error:
            response = json_response(error.body(), error.code)
        return replace(response, wait=response.wait + self.latency)

    def _with_faults(self, request: Request) -> Response:
        call = Call(request, "", Target(""))
        if match := find_route(self._routes, request):
            route, names = match
            call = Call(request, route.operation, route.target(request, **names))
        effect = self.faults.meet(call)
        return effect(call, self._answer) if effect else self._answer(request)

    def _answer(self, request: Request) -> Response:
        match = find_route(self._routes, request)
        if match is None:
            message = f"The loopback cloud has no {request.method} {request.path}."
            return json_response(ApiError(404, message, reason="notFound").body(), 404)
        route, names = match
        try:
            if self.tokens is not None:
                check_token(request, route.operation, self.tokens)
            self.services.refuse(f"{route.operation.partition('.')[0]}.googleapis.com")
            return route.answer(request, **names)
        except ApiError as error:
            return json_response(error.body(), error.code)

    def _one_at_a_time(self, route: Route) -> Route:
        def locked(request: Request, **names: str) -> Response:
            with self._lock:
                return route.answer(request, **names)

        return route._replace(answer=locked)

    def _keep(self, request: Request) -> None:
        try:  # an object's bytes are larger than any JSON request
            body = json.loads(request.body) if len(request.body) < 1 << 20 else None
        except ValueError:
            body = None
        kept = Recorded(request.method, request.path, body, request.query)
        with self._lock:
            self.requests.append(kept)
            if self.record:
                with self.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(kept._asdict()) + "\n")


def check_token(request: Request, operation: str, tokens: Collection[str]) -> None:
    """Refuse requests without one of the tokens.

    Cloud Storage's clients are anonymous if STORAGE_EMULATOR_HOST is set. So a missing token is accepted there, but a
    wrong one is refused.

    Raises ApiError 401.
    """
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind == "Bearer" and token in tokens:
        return
    service = operation.partition(".")[0]
    if service in ("storage", "compute"):
        if service == "compute" or kind:
            raise ApiError(401, "Invalid Credentials", reason="authError")
        return
    reason = "ACCESS_TOKEN_EXPIRED" if kind else "CREDENTIALS_MISSING"
    metadata = {"service": f"{service}.googleapis.com"}
    raise ApiError(401, INVALID if kind else MISSING, info=reason, metadata=metadata)
