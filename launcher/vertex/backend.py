"""Vertex AI's custom jobs by Google's own client: create, get, find, cancel.

A create has no request id, so the same one sent twice makes two jobs: it is sent once, and what came of it is either
known (a job, or a refusal) or not known (`UnreachableError`). Everything else may be asked twice.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from launcher.backend.base import GoneError, Listing
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import LOG_IN, REQUEST_SECONDS, Api, Service, UnreachableError, credentials, status_of
from launcher.gcp.parallel import Asking, of_create, together
from launcher.jobs.job import RUN_LABEL, Failure, Job
from launcher.plan.model import Attempt

SERVICE = Service("aiplatform", "Vertex AI", "roles/aiplatform.user")
NAME = re.compile(r"projects/[^/]+/locations/(?P<region>[^/]+)/customJobs/\d+")
ASKED = ("display_name", "job_spec", "labels", "encryption_spec")
"""The fields of a CustomJob that say what was asked for."""
PAGE = 100
REGION = re.compile(r"[a-z0-9-]+")
NOTICE_EVERY = 60.0
"""Seconds: 38 regions that give no answer are one piece of news."""
READINGS = 3
"""How often a list is begun whose page token has gone."""


class Vertex:
    """The custom jobs of one project. Any number of threads may use it.

    REST where the endpoint is http://, else gRPC, whose deadline holds for the whole of a request. `channel` is a gRPC
    channel to use instead.
    """

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        clock: Clock = REAL,
        channel: Any = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """`notice` is told, once a minute at most, that an answer is waited for."""
        self._notice, self._noticed = notice, float("-inf")
        self.project = project
        self.environ = environ
        self.clock = clock
        self._channel = channel
        self._apis: dict[str, Api] = {}
        self._lock = threading.Lock()

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """As `create_in`: Vertex AI knows no request ids."""
        return self.create_in(attempt.region, body)

    def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
        """The job that one request has made, and one alone: nothing is sent again.

        Raises:
            CreateRefused: for sure nothing was made.
            UnreachableError: whether there is a job now is not known.
            LaunchError: the request can't be written down; nothing was sent.
        """
        request = {"parent": self._parent(region), "custom_job": message_of(body)}
        client = self._api(region).client
        try:
            made = job_of(client.create_custom_job(request=request, retry=None, timeout=REQUEST_SECONDS))
        except Exception as error:
            raise of_create(error, SERVICE, self.project) from error
        if not NAME.fullmatch(made.name) or made.run != body.get("labels", {}).get(RUN_LABEL, ""):
            raise UnreachableError(f"{SERVICE.title} answered about another job: {made.name!r}")
        return made

    def get(self, name: str) -> Job:
        """A job as it is now. Raises GoneError; UnreachableError: no answer for a minute."""
        try:
            return job_of(self._api(region_of(name)).ask("get_custom_job", name=name))
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            raise gone(name) from error

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """The jobs of all these regions that pass a filter (labels.launch-run=ID), asked all at once.

        Unless `partly`, raises the first region's error: what can't be seen might be there.
        """
        apis = {region: self._api(region) for region in dict.fromkeys(regions)}
        found = together({region: partial(self._all, api, region, filter_) for region, api in apis.items()})
        unread = {region: answer for region, answer in found.items() if isinstance(answer, LaunchError)}
        if unread and not partly:
            raise next(iter(unread.values()))
        jobs = {job.name: job for answer in found.values() if not isinstance(answer, LaunchError) for job in answer}
        return Listing(tuple(sorted(jobs.values(), key=lambda job: (-job.created, job.name))), unread)

    def request_ids(self, name: str) -> frozenset[str]:
        """Return none: Vertex AI has no request ids."""
        return frozenset()

    def cancel(self, name: str) -> None:
        """Begin to cancel a job; one that has ended, or is being cancelled, is fine. Raises GoneError, and as `get`
        does."""
        try:
            self._api(region_of(name)).ask("cancel_custom_job", name=name)
        except LaunchError as error:
            if status_of(error) == 404:
                raise gone(name) from error
            if status_of(error) != 400 or not is_ending(self.get(name)):
                raise

    def delete(self, name: str) -> None:
        """Begin to delete a job that has ended. A job that no longer exists is fine."""
        try:
            self._api(region_of(name)).ask("delete_custom_job", name=name)
        except LaunchError as error:
            if status_of(error) != 404:
                raise

    def release(self, job: Job) -> None:
        """Nothing is left of a job that has ended."""

    def _all(self, api: Api, region: str, filter_: str) -> list[Job]:
        """All pages of one region. A page token that has gone makes the pages before it worthless too."""
        for reading in range(READINGS):
            jobs: list[Job] = []
            token = ""
            try:
                while True:
                    asked = {"parent": self._parent(region), "filter": filter_, "page_size": PAGE, "page_token": token}
                    page = api.ask("list_custom_jobs", **asked)
                    jobs += map(job_of, page.custom_jobs)
                    if not (token := page.next_page_token):
                        return jobs
            except LaunchError as error:
                stale = token and status_of(error) == 400 and "token" in error.problem.lower()
                if not stale or reading == READINGS - 1:
                    raise
        raise AssertionError("the last reading returns or raises")

    def _parent(self, region: str) -> str:
        return f"projects/{self.project}/locations/{region}"

    def _tell(self, text: str) -> None:
        with self._lock:
            due = self.clock.now() - self._noticed >= NOTICE_EVERY
            self._noticed = self.clock.now() if due else self._noticed
        if due and self._notice:
            self._notice(text)

    def _api(self, region: str) -> Api:
        """One client for each endpoint, made when it is first used."""
        endpoint = "" if self._channel else endpoint_of(region, self.environ)
        with self._lock:
            if endpoint not in self._apis:
                client = open_jobs(endpoint, self.environ, self._channel)
                self._apis[endpoint] = Asking(SERVICE, self.project, client, self.clock, self._tell)
            return self._apis[endpoint]


def is_ending(job: Job) -> bool:
    """Whether nothing is left to cancel."""
    return job.has_ended or job.state == "CANCELLING"


def gone(name: str) -> GoneError:
    """What a 404 says."""
    return GoneError(f"there is no job {name}")


def console_url(job: Job) -> str:
    """The job's page for people (google.cloud.aiplatform 2.7.0, jobs.py: _dashboard_uri)."""
    project = job.name.split("/")[1]
    return f"https://console.cloud.google.com/agent-platform/locations/{job.region}/training/{job.id}?project={project}"


def endpoint_of(region: str, environ: Mapping[str, str]) -> str:
    """Where a region's jobs are: gcloud's own override, to which it prefixes the region where the host begins with
    `aiplatform`, or Google's. As scheme://host. Raises LaunchError: invalid region name.

    Credentials are sent to that host, and a region may come from a run folder.
    """
    if not REGION.fullmatch(region):
        raise LaunchError(f"invalid region name {region!r}", "A region has only a-z, 0-9 and -, such as us-central1.")
    override = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", "").rstrip("/")
    url = urlsplit(override or "https://aiplatform.googleapis.com")
    host = f"{region}-{url.netloc}" if url.netloc.startswith("aiplatform.") else url.netloc
    return f"{url.scheme}://{host}"


def open_jobs(endpoint: str, environ: Mapping[str, str], channel: Any) -> Any:
    """Google's client. Raises NotAuthorised: there are no credentials."""
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
        raise NotAuthorised(f"no credentials for {SERVICE.title}: {error}", LOG_IN) from error


# --- CustomJob: Google's protobuf type and our data ------------------------------------------------------------------


def region_of(name: str) -> str:
    """The region in a job's resource name. Raises LaunchError."""
    if found := NAME.fullmatch(name):
        return found["region"]
    raise LaunchError(f"{name} is no custom job's name", "projects/PROJECT/locations/REGION/customJobs/NUMBER")


def message_of(body: Mapping[str, Any]) -> Any:
    """A plan's request as Google's type, whole: a field or value that the installed client doesn't know is an error."""
    from google.cloud.aiplatform_v1 import CustomJob
    from google.protobuf import json_format

    try:
        return CustomJob.wrap(json_format.ParseDict(dict(body), CustomJob.pb()()))
    except json_format.ParseError as error:
        raise LaunchError(
            f"the installed google-cloud-aiplatform doesn't know all of the request: {error}",
            "pip install --upgrade google-cloud-aiplatform",
        ) from error


def job_of(made: Any) -> Job:
    """A CustomJob as data."""
    from google.protobuf import json_format

    message = type(made).pb(made)
    asked = type(message)()
    asked.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        if field.name not in ASKED:
            asked.ClearField(field.name)
    return Job(
        name=message.name,
        region=(found["region"] if (found := NAME.fullmatch(message.name)) else ""),
        state=state_of(message),
        created=seconds(message.create_time),
        started=seconds(message.start_time) if message.HasField("start_time") else None,
        ended=seconds(message.end_time) if message.HasField("end_time") else None,
        error=Failure(code=message.error.code, message=message.error.message) if message.HasField("error") else None,
        labels=dict(message.labels),
        request=json_format.MessageToDict(asked),
    )


def state_of(message: Any) -> str:
    """QUEUED, RUNNING, …; one that the installed client doesn't know by its number."""
    known = message.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number.get(message.state)
    return known.name.removeprefix("JOB_STATE_") if known else f"STATE {message.state}"


def seconds(timestamp: Any) -> float:
    """A protobuf Timestamp as Unix seconds."""
    return float(timestamp.seconds + timestamp.nanos / 1e9)
