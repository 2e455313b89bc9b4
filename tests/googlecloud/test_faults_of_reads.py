"""Faults of reads while a job runs: its state, its log lines, a secret; and lists that change while they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
from google.cloud import aiplatform_v1

from launcher.testing.googlecloud import (
    Fault,
    GoogleCloud,
    Meanwhile,
)
from tests.googlecloud.test_custom_jobs import GOOD, PARENT

LIST = "aiplatform.projects.locations.customJobs.list"
REGION = f"/v1/{PARENT}/customJobs"
Ask = Callable[[GoogleCloud, float], requests.Response]
"""Asks, and waits for the answer for so many seconds."""


def get(path: str) -> Ask:
    return lambda cloud, seconds: requests.get(cloud.url + path, timeout=seconds)


def lines(cloud: GoogleCloud, seconds: float = 60, **body: Any) -> requests.Response:
    asked = {"resourceNames": ["projects/my-project"], "filter": 'resource.labels.job_id="7"', **body}
    return requests.post(f"{cloud.url}/v2/entries:list", json=asked, timeout=seconds)


@pytest.fixture
def full(cloud: GoogleCloud) -> GoogleCloud:
    """Return a cloud with data for every kind of read."""
    cloud.jobs.submit("us-central1", GOOD)
    cloud.logs.write("7", "workerpool0-0", "hello")
    cloud.secrets.add("hf", b"value")
    return cloud


def listed(client: aiplatform_v1.JobServiceClient) -> list[str]:
    request = aiplatform_v1.ListCustomJobsRequest(parent=PARENT, page_size=2)
    return [job.display_name for job in client.list_custom_jobs(request)]


@pytest.mark.parametrize("deleted", [False, True], ids=["appears", "vanishes"])
def test_a_list_changes_while_it_is_read(
    cloud: GoogleCloud, client: aiplatform_v1.JobServiceClient, deleted: bool
) -> None:
    """A page begins after the last item of the previous one: deletions neither repeat nor hide items."""
    jobs = [cloud.jobs.submit("us-central1", {**GOOD, "displayName": str(n)}) for n in range(5)]

    def change() -> None:
        if deleted:
            del cloud.jobs.jobs["us-central1", jobs[4].id]
        else:
            cloud.jobs.submit("us-central1", {**GOOD, "displayName": "new"})

    fault = cloud.faults.add(Fault(LIST, Meanwhile(change)))
    assert listed(client) == ["4", "3", "2", "1", "0"]
    assert cloud.faults.used[fault] == 1
    assert listed(client) == (["3", "2", "1", "0"] if deleted else ["new", "4", "3", "2", "1", "0"])


TOKENS: list[tuple[dict[str, str], int, str]] = [
    ({}, 401, "CREDENTIALS_MISSING"),
    ({"Authorization": "Bearer old"}, 401, "ACCESS_TOKEN_EXPIRED"),
    ({"Authorization": "Bearer new"}, 200, ""),
]


@pytest.mark.parametrize("path", [REGION, "/v1/projects/my-project/secrets/hf/versions/1:access"])
@pytest.mark.parametrize(("headers", "status", "reason"), TOKENS)
def test_only_who_has_a_token_is_let_in(
    full: GoogleCloud, path: str, headers: dict[str, str], status: int, reason: str
) -> None:
    full.let_in("new")
    answer = requests.get(full.url + path, headers=headers, timeout=5)
    assert answer.status_code == status
    if reason:
        error = answer.json()["error"]
        assert error["status"] == "UNAUTHENTICATED"
        assert error["message"].endswith("https://developers.google.com/identity/sign-in/web/devconsole-project.")
        assert error["details"][0]["reason"] == reason
    full.tokens = None
    assert requests.get(full.url + path, timeout=5).ok
