"""CustomJobs over gRPC, through Google's own client: the same jobs and refusals as over REST."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.api_core.exceptions import (
    BadRequest,
    PermissionDenied,
)
from google.cloud import aiplatform_v1
from google.cloud.aiplatform_v1 import JobServiceClient as Client
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport

from launcher.testing.googlecloud import (
    Fault,
    GoogleCloud,
    Status,
    parse_custom_job,
)
from tests.googlecloud.rpc import serve_grpc
from tests.googlecloud.test_custom_jobs import GOOD, PARENT

CREATE = "aiplatform.projects.locations.customJobs.create"


@pytest.fixture
def client(cloud: GoogleCloud) -> Iterator[Client]:
    with serve_grpc(cloud) as address, grpc.insecure_channel(address) as channel:
        yield Client(transport=JobServiceGrpcTransport(channel=channel))


def create(client: Client, **options: Any) -> aiplatform_v1.CustomJob:
    options = {"timeout": 60, "retry": None, **options}
    return client.create_custom_job(parent=PARENT, custom_job=parse_custom_job(GOOD), **options)


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
