"""Creating jobs with faults and concurrently: the jobs that exist afterwards, and the client's view of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from google.api_core.exceptions import (
    GatewayTimeout,
    InternalServerError,
    ServiceUnavailable,
    TooManyRequests,
)
from google.cloud import aiplatform_v1
from google.protobuf import json_format

from launcher.testing.googlecloud import (
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
from tests.googlecloud.test_custom_jobs import GOOD, PARENT
from tests.googlecloud.waiting import patience, until


@pytest.mark.parametrize(
    ("effect", "error", "made"),
    [
        (Status(429, message="quota"), TooManyRequests, 0),
        (Status(503), ServiceUnavailable, 0),
        (Status(500), InternalServerError, 0),
        (Status(504), GatewayTimeout, 0),
        (Reset(), requests.ConnectionError, 0),
        (Reset("after"), requests.ConnectionError, 1),
        (Slow(30), requests.ReadTimeout, 1),
        (Stalled("half"), requests.RequestException, 1),
        (Truncated(), requests.RequestException, 1),
        (Torn(at=0), json_format.ParseError, 1),
    ],
    ids=lambda given: repr(given) if hasattr(given, "step") else "",
)
def test_a_create_that_goes_wrong_has_made_a_job_or_not(
    cloud: GoogleCloud,
    client: aiplatform_v1.JobServiceClient,
    effect: Effect,
    error: type[Exception],
    made: int,
) -> None:
    fault = cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.create", effect, name="us-central1"))
    with pytest.raises(error):
        client.create_custom_job(parent=PARENT, custom_job=parse_custom_job(GOOD), retry=None, timeout=patience(effect))
    until(lambda: (len(cloud.jobs.jobs), cloud.faults.used[fault]) == (made, 1))


def test_jobs_that_come_at_once_are_all_there(cloud: GoogleCloud, client: aiplatform_v1.JobServiceClient) -> None:
    def create(n: int) -> str:
        job = parse_custom_job({**GOOD, "displayName": str(n)})
        return str(client.create_custom_job(parent=PARENT, custom_job=job).name)

    with ThreadPoolExecutor(10) as pool:
        names = [*pool.map(create, range(40))]
    listed = [*client.list_custom_jobs(parent=PARENT)]
    assert sorted(names) == sorted(job.name for job in listed)
    assert sorted(int(job.display_name) for job in listed) == [*range(40)]
