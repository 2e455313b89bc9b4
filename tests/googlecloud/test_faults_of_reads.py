"""Faults of reads while a job runs: its state, its log lines, a secret; and lists that change while they are read."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
import requests
from google.cloud import aiplatform_v1

from launcher.testing.googlecloud import (
    FakeClock,
    Fault,
    GoogleCloud,
    Meanwhile,
    Reset,
    Slow,
    Stalled,
    Status,
    Torn,
    Truncated,
)
from launcher.testing.googlecloud.faults import Effect
from launcher.testing.googlecloud.logging import entries as logging
from launcher.testing.googlecloud.project import secrets as secretmanager
from tests.googlecloud.test_custom_jobs import GOOD, PARENT
from tests.googlecloud.waiting import patience, until

LIST = "aiplatform.projects.locations.customJobs.list"
REGION = f"/v1/{PARENT}/customJobs"
Ask = Callable[[GoogleCloud, float], requests.Response]
"""Asks, and waits for the answer for so many seconds."""


def get(path: str) -> Ask:
    return lambda cloud, seconds: requests.get(cloud.url + path, timeout=seconds)


def lines(cloud: GoogleCloud, seconds: float = 60, **body: Any) -> requests.Response:
    asked = {"resourceNames": ["projects/my-project"], "filter": 'resource.labels.job_id="7"', **body}
    return requests.post(f"{cloud.url}/v2/entries:list", json=asked, timeout=seconds)


READS: dict[str, tuple[Ask, str]] = {
    LIST: (get(REGION), "^us-central1$"),
    "aiplatform.projects.locations.customJobs.get": (get(f"{REGION}/1000000000000000001"), "^1000000000000000001$"),
    logging.OPERATION: (lines, 'job_id="7"'),
    secretmanager.OPERATION: (get("/v1/projects/my-project/secrets/hf/versions/1:access"), "^hf$"),
}


@pytest.fixture
def full(cloud: GoogleCloud) -> GoogleCloud:
    """Return a cloud with data for every kind of read."""
    cloud.jobs.submit("us-central1", GOOD)
    cloud.logs.write("7", "workerpool0-0", "hello")
    cloud.secrets.add("hf", b"value")
    return cloud


@pytest.mark.parametrize("operation", READS)
@pytest.mark.parametrize(
    ("effect", "broken"),
    [
        (Status(429, retry_after=3), 429),
        (Status(503), 503),
        (Status(500), 500),
        (Reset(), requests.ConnectionError),
        (Reset("after"), requests.ConnectionError),
        (Slow(5), requests.ReadTimeout),
        (Stalled("half"), requests.RequestException),
        (Truncated(), requests.RequestException),
        (Torn(bits=0x80), UnicodeDecodeError),
    ],
    ids=lambda given: repr(given) if hasattr(given, "step") else "",
)
def test_a_read_meets_each_fault_and_then_works(
    full: GoogleCloud, operation: str, effect: Effect, broken: int | type[Exception]
) -> None:
    ask, name = READS[operation]
    right = ask(full, 60).json()
    full.faults.add(Fault(operation, Status(400), name="another"))
    fault = full.faults.add(Fault(operation, effect, name=name))
    if isinstance(broken, int):
        answer = ask(full, 60)
        assert answer.status_code == answer.json()["error"]["code"] == broken
        assert "errors" not in answer.json()["error"]
    else:
        with pytest.raises(broken):
            ask(full, patience(effect)).content.decode()
    until(lambda: full.faults.used == {fault: 1})
    assert ask(full, 60).json() == right


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


def test_a_bucket_takes_nobody_but_no_wrong_token(cloud: GoogleCloud) -> None:
    cloud.let_in("new")
    url = f"{cloud.url}/storage/v1/b/my-bucket"
    assert requests.get(url, timeout=5).ok
    assert requests.get(url, headers={"Authorization": "Bearer new"}, timeout=5).ok
    answer = requests.get(url, headers={"Authorization": "Bearer old"}, timeout=5)
    assert (answer.status_code, answer.json()["error"]["errors"][0]["reason"]) == (401, "authError")


def test_the_environment_leads_to_the_token(cloud: GoogleCloud) -> None:
    assert cloud.environ()["CLOUDSDK_AUTH_DISABLE_CREDENTIALS"] == "true"
    cloud.let_in("one")
    cloud.let_in("two")
    environ = cloud.environ()
    assert "CLOUDSDK_AUTH_DISABLE_CREDENTIALS" not in environ
    assert Path(environ["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]).read_text(encoding="utf-8") == "two"


def test_all_times_are_the_clouds(full: GoogleCloud, clock: FakeClock) -> None:
    """A client clock that is a day off must not matter."""
    clock.advance(86_400)
    now = "2023-11-15T22:13:20"
    answer = requests.get(full.url + REGION, timeout=5)
    assert parsedate_to_datetime(answer.headers["Date"]).timestamp() == clock()
    assert full.jobs.submit("us-central1", GOOD).created == clock()
    assert requests.get(full.url + REGION, timeout=5).json()["customJobs"][0]["createTime"].startswith(now)
    insert = f"{full.url}/upload/storage/v1/b/my-bucket/o?uploadType=media&name=a"
    written = requests.post(insert, data=b"1", timeout=5).json()
    assert (written["updated"][:19], written["timeCreated"][:19]) == (now, now)
    full.logs.write("8", "workerpool0-0", "x")
    [entry] = lines(full, filter='resource.labels.job_id="8"').json()["entries"]
    assert (entry["timestamp"][:19], entry["receiveTimestamp"][:19]) == (now, now)
