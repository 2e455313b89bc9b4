"""Vertex AI custom jobs through Google's own client: create, get, find, cancel.

A create request has no request id, so sending it twice creates two jobs. It is sent once, and its outcome is either
known (a job, or a refusal) or unknown (`UnreachableError`). All other requests are idempotent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UnreachableError
from launcher.gcp.api import REQUEST_SECONDS, Api, Clients, Service, credentials, no_credentials, status_of
from launcher.gcp.parallel import of_create, together
from launcher.jobs.job import RUN_LABEL, Failure, Job
from launcher.plan.model import Attempt
from launcher.services.base import GoneError, Listing, OfGoogle

SERVICE = Service("aiplatform", "Vertex AI", "roles/aiplatform.user")
NAME = re.compile(r"projects/[^/]+/locations/(?P<region>[^/]+)/customJobs/\d+")
ASKED = ("display_name", "job_spec", "labels", "encryption_spec")
"""The fields of a CustomJob that the request sets."""
PAGE = 1000
"""Jobs per page. Google documents no maximum; a service returns fewer if it has one (google.aip.dev/158)."""
SAFE_PAGE = 100
"""As gcloud asks for: used if the service refuses PAGE."""
REGION = re.compile(r"[a-z0-9-]+")
READINGS = 3
"""Maximum number of times that a list is read because its page token expired."""


class Vertex(OfGoogle):
    """The custom jobs of one project. Thread-safe.

    Uses REST if the endpoint is http://, else gRPC, whose deadline covers the whole request. `channel` replaces the
    gRPC channel.
    """

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        clock: Clock = REAL,
        channel: Any = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """`notice` receives a line, at most once a minute, while a call waits for an answer."""
        self.project = project
        self.environ = environ
        self.clock = clock
        self._channel = channel
        self._clients = Clients(SERVICE, project, clock, notice)

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """Create the job of an attempt, as `create_in` does. Vertex AI has no request ids."""
        return self.create_in(attempt.region, body)

    def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
        """Send one create request, without retries, and return its job.

        Raises:
            CreateRefused: nothing was created.
            UnreachableError: it is unknown whether a job was created.
            LaunchError: the request is invalid; nothing was sent.
        """
        request = {"parent": self._parent(region), "custom_job": message_of(body)}
        client = self._api(region).client
        try:
            job = job_of(client.create_custom_job(request=request, retry=None, timeout=REQUEST_SECONDS))
        except Exception as error:
            raise of_create(error, SERVICE, self.project) from error
        if not NAME.fullmatch(job.name) or job.run != body.get("labels", {}).get(RUN_LABEL, ""):
            raise UnreachableError(f"{SERVICE.title} answered about another job: {job.name!r}")
        return job

    def get(self, name: str) -> Job:
        """Return a job's current state. Raises GoneError; UnreachableError: no answer for a minute."""
        try:
            return job_of(self._api(region_of(name)).ask("get_custom_job", name=name))
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            raise gone(name) from error

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """Return the jobs in these regions that match a filter (labels.launch-run=ID).

        The regions are read in parallel. Unless `partly` is set, raises the first region's error, because an unread
        region may have matching jobs.
        """
        apis = {region: self._api(region) for region in dict.fromkeys(regions)}
        answers = together({region: partial(self._all, api, region, filter_) for region, api in apis.items()})
        unread = {region: answer for region, answer in answers.items() if isinstance(answer, LaunchError)}
        if unread and not partly:
            raise next(iter(unread.values()))
        jobs = {job.name: job for answer in answers.values() if not isinstance(answer, LaunchError) for job in answer}
        return Listing(tuple(sorted(jobs.values(), key=lambda job: (-job.created, job.name))), unread)

    def request_ids(self, name: str) -> frozenset[str]:
        """Return an empty set: Vertex AI has no request ids."""
        return frozenset()

    def cancel(self, name: str) -> None:
        """Begin to cancel a job. Does nothing if it has ended or is being cancelled.

        Raises GoneError, and the errors of `get`.
        """
        try:
            self._api(region_of(name)).ask("cancel_custom_job", name=name)
        except LaunchError as error:
            if status_of(error) == 404:
                raise gone(name) from error
            if status_of(error) != 400:
                raise
            job = self.get(name)
            if not (job.has_ended or job.state == "CANCELLING"):
                raise

    def delete(self, name: str) -> None:
        """Begin to delete an ended job. Does nothing if the job does not exist."""
        try:
            self._api(region_of(name)).ask("delete_custom_job", name=name)
        except LaunchError as error:
            if status_of(error) != 404:
                raise

    def forget(self, job: Job) -> None:
        """Begin to delete an ended job's record."""
        self.delete(job.name)

    def release(self, job: Job) -> None:
        """Do nothing: an ended job leaves nothing behind."""

    def _all(self, api: Api, region: str, filter_: str) -> list[Job]:
        """Return the jobs on all pages of one region. If a page token expires, all pages are read again."""
        size = PAGE
        for reading in range(READINGS):
            jobs: list[Job] = []
            token = ""
            try:
                while True:
                    page_request = {
                        "parent": self._parent(region),
                        "filter": filter_,
                        "page_size": size,
                        "page_token": token,
                    }
                    page = api.ask("list_custom_jobs", **page_request)
                    jobs += map(job_of, page.custom_jobs)
                    if not (token := page.next_page_token):
                        return jobs
            except LaunchError as error:
                refused = status_of(error) == 400
                stale = token and refused and "token" in error.problem.lower()
                too_large = refused and size > SAFE_PAGE  # Google may not say which argument is invalid
                if not (stale or too_large) or reading == READINGS - 1:
                    raise
                size = size if stale else SAFE_PAGE
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _parent(self, region: str) -> str:
        return f"projects/{self.project}/locations/{region}"

    def _api(self, region: str) -> Api:
        """Return the client of a region's endpoint. It is created on first use."""
        endpoint = "" if self._channel else endpoint_of(region, self.environ)
        return self._clients.api(endpoint, lambda: open_jobs(endpoint, self.environ, self._channel))


def gone(name: str) -> GoneError:
    return GoneError(f"job {name} does not exist")


def console_url(job: Job) -> str:
    """Return the URL of the job's page in the console (google.cloud.aiplatform 2.7.0, jobs.py: _dashboard_uri)."""
    project = job.name.split("/")[1]
    return f"https://console.cloud.google.com/agent-platform/locations/{job.region}/training/{job.id}?project={project}"


def endpoint_of(region: str, environ: Mapping[str, str]) -> str:
    """Return a region's endpoint as scheme://host. Raises LaunchError: invalid region name.

    gcloud's endpoint override comes first; the region is prefixed if its host begins with `aiplatform`, as gcloud does.
    The region name is checked because it may come from a run folder, and credentials are sent to the host.
    """
    if not REGION.fullmatch(region):
        raise LaunchError(f"invalid region name {region!r}", "A region has only a-z, 0-9 and -, such as us-central1.")
    override = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", "").rstrip("/")
    url = urlsplit(override or "https://aiplatform.googleapis.com")
    host = f"{region}-{url.netloc}" if url.netloc.startswith("aiplatform.") else url.netloc
    return f"{url.scheme}://{host}"


def import_client_library() -> None:
    """Import Google's client, which takes half a second. Call it on a thread while waiting for other services."""
    with suppress(Exception):  # open_jobs raises it, where it is told
        from google.cloud.aiplatform_v1 import JobServiceClient  # noqa: F401 - open_jobs finds it imported


def open_jobs(endpoint: str, environ: Mapping[str, str], channel: Any) -> Any:
    """Return Google's client. Raises NotAuthorised: there are no credentials."""
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.aiplatform_v1 import JobServiceClient
    from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport

    if channel is not None:
        return JobServiceClient(transport=JobServiceGrpcTransport(channel=channel))
    plain = endpoint.startswith("http://")
    host = endpoint if plain else urlsplit(endpoint).netloc
    try:
        return JobServiceClient(
            credentials=credentials(environ, endpoint),
            transport="rest" if plain else "grpc",
            client_options={"api_endpoint": host},
        )
    except DefaultCredentialsError as error:
        raise no_credentials(SERVICE, error) from error


# --- CustomJob: Google's protobuf type and our data ------------------------------------------------------------------


def region_of(name: str) -> str:
    """Return the region in a job's resource name. Raises LaunchError."""
    if match := NAME.fullmatch(name):
        return match["region"]
    raise LaunchError(f"{name} is not the name of a custom job", "projects/PROJECT/locations/REGION/customJobs/NUMBER")


def message_of(body: Mapping[str, Any]) -> Any:
    """Convert a plan's request to Google's type. Raises LaunchError if the installed client lacks a field or value."""
    from google.cloud.aiplatform_v1 import CustomJob
    from google.protobuf import json_format

    try:
        return CustomJob.wrap(json_format.ParseDict(dict(body), CustomJob.pb()()))
    except json_format.ParseError as error:
        raise LaunchError(
            f"the installed google-cloud-aiplatform is too old for this request: {error}",
            "pip install --upgrade google-cloud-aiplatform",
        ) from error


def job_of(custom_job: Any) -> Job:
    from google.protobuf import json_format

    message = type(custom_job).pb(custom_job)
    requested = type(message)()
    requested.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        if field.name not in ASKED:
            requested.ClearField(field.name)
    return Job(
        name=message.name,
        region=(match["region"] if (match := NAME.fullmatch(message.name)) else ""),
        state=state_of(message),
        created=seconds(message.create_time),
        started=seconds(message.start_time) if message.HasField("start_time") else None,
        ended=seconds(message.end_time) if message.HasField("end_time") else None,
        error=Failure(code=message.error.code, message=message.error.message) if message.HasField("error") else None,
        labels=dict(message.labels),
        request=json_format.MessageToDict(requested),
    )


def state_of(message: Any) -> str:
    """Return QUEUED, RUNNING, …. A state that the installed client does not know is returned as a number."""
    known = message.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number.get(message.state)
    return known.name.removeprefix("JOB_STATE_") if known else f"STATE {message.state}"


def seconds(timestamp: Any) -> float:
    """Convert a protobuf Timestamp to Unix seconds."""
    return float(timestamp.seconds + timestamp.nanos / 1e9)
