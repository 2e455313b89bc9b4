"""CustomJobs over gRPC, through Google's own client: the same jobs and refusals as over REST."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.api_core.exceptions import (
    BadRequest,
    DeadlineExceeded,
    GoogleAPICallError,
    InternalServerError,
    NotFound,
    PermissionDenied,
    ServiceUnavailable,
    TooManyRequests,
    Unauthenticated,
)
from google.cloud import aiplatform_v1
from google.cloud.aiplatform_v1 import JobServiceClient as Client
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport

from launcher.testing.googlecloud import (
    FakeClock,
    Fault,
    GoogleCloud,
    Reset,
    Slow,
    Stalled,
    Status,
    Torn,
    Truncated,
    parse_custom_job,
)
from launcher.testing.googlecloud.faults import Effect
from launcher.testing.googlecloud.vertex.rpc import serve_grpc
from tests.googlecloud.test_custom_jobs import GOOD, PARENT
from tests.googlecloud.waiting import patience, until

CREATE = "aiplatform.projects.locations.customJobs.create"
State = aiplatform_v1.JobState


@pytest.fixture
def client(cloud: GoogleCloud) -> Iterator[Client]:
    with serve_grpc(cloud) as address, grpc.insecure_channel(address) as channel:
        yield Client(transport=JobServiceGrpcTransport(channel=channel))


def create(client: Client, **options: Any) -> aiplatform_v1.CustomJob:
    options = {"timeout": 60, "retry": None, **options}
    return client.create_custom_job(parent=PARENT, custom_job=parse_custom_job(GOOD), **options)


def test_a_job_over_grpc_is_the_one_over_http(cloud: GoogleCloud, client: Client, clock: FakeClock) -> None:
    job = create(client)
    assert (job.state, job.job_spec) == (State.JOB_STATE_QUEUED, parse_custom_job(GOOD).job_spec)
    clock.advance(2)
    assert client.get_custom_job(name=job.name).state == State.JOB_STATE_RUNNING
    client.cancel_custom_job(name=job.name)
    assert client.get_custom_job(name=job.name).state == State.JOB_STATE_CANCELLING
    client.delete_custom_job(name=job.name)
    with pytest.raises(NotFound, match="The CustomJob does not exist"):
        client.get_custom_job(name=job.name)
    paths = [request.path.rpartition("/")[2].lstrip("0123456789") for request in cloud.requests]
    assert paths == ["customJobs", "", ":cancel", "", "", ""]


def test_list_has_pages_and_filters(client: Client) -> None:
    for _ in range(3):
        create(client)
    asked = aiplatform_v1.ListCustomJobsRequest(parent=PARENT, filter="labels.launch-run=a-1", page_size=2)
    assert len(list(client.list_custom_jobs(asked))) == 3
    asked.filter = "labels.launch-run=other"
    assert list(client.list_custom_jobs(asked)) == []


def test_refusals_have_their_details(cloud: GoogleCloud, client: Client) -> None:
    metadata = {"service": "aiplatform.googleapis.com", "consumer": "projects/123"}
    cloud.faults.add(Fault(CREATE, Status(403, message="disabled", info="SERVICE_DISABLED", metadata=metadata)))
    with pytest.raises(PermissionDenied) as caught:
        create(client)
    assert (caught.value.reason, caught.value.metadata) == ("SERVICE_DISABLED", metadata)
    job = parse_custom_job(GOOD)
    job.display_name = ""
    with pytest.raises(BadRequest, match=r"Field: display_name; Message: Required") as refused:
        client.create_custom_job(parent=PARENT, custom_job=job, retry=None)
    assert refused.value.details[0].field_violations[0].field == "display_name"


@pytest.mark.parametrize(
    ("effect", "error", "made"),
    [
        (Status(429), TooManyRequests, 0),
        (Status(503), ServiceUnavailable, 0),
        (Status(500), InternalServerError, 0),
        (Status(504), DeadlineExceeded, 0),
        (Reset(), ServiceUnavailable, 0),
        (Reset("after"), ServiceUnavailable, 1),
        (Truncated(), ServiceUnavailable, 1),
        (Torn(at=0), InternalServerError, 1),
        (Slow(30), DeadlineExceeded, 1),
        (Stalled(), DeadlineExceeded, 1),
    ],
    ids=lambda given: repr(given) if hasattr(given, "step") else "",
)
def test_each_fault_reaches_the_caller(
    cloud: GoogleCloud, client: Client, effect: Effect, error: type[GoogleAPICallError], made: int
) -> None:
    cloud.faults.add(Fault(CREATE, effect))
    with pytest.raises(error):
        create(client, timeout=patience(effect))
    until(lambda: len(cloud.jobs.jobs) == made)  # of a call that the client has given up the server may be slow
    create(client)
    assert len(cloud.jobs.jobs) == made + 1


def test_a_token_is_asked_for(cloud: GoogleCloud, client: Client) -> None:
    cloud.let_in("t-1")
    with pytest.raises(Unauthenticated, match="Expected OAuth 2 access token"):
        create(client)
    create(client, metadata=[("authorization", "Bearer t-1")])
