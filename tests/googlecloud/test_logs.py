"""Cloud Logging on loopback: filters, orders, pages, and entries that arrive late."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from launcher.testing.googlecloud import FakeClock, GoogleCloud

JOB = 'resource.type="ml_job" AND resource.labels.job_id="7"'


def ask(cloud: GoogleCloud, text: str = JOB, **body: Any) -> requests.Response:
    asked = {"resourceNames": ["projects/my-project"], "filter": text, **body}
    return requests.post(f"{cloud.url}/v2/entries:list", json=asked, timeout=5)


def said(cloud: GoogleCloud, text: str = JOB, **body: Any) -> list[str]:
    answer = ask(cloud, text, **body)
    assert answer.ok, answer.text
    return [message(entry) for entry in answer.json().get("entries", [])]


def message(entry: dict[str, Any]) -> str:
    found: str = entry["textPayload"] if "textPayload" in entry else entry["jsonPayload"]["message"]
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "abcd"),
        (JOB, "abc"),
        (f'{JOB} AND resource.labels.task_name="workerpool0-0"', "ac"),
        ('resource.labels.job_id="7" resource.labels.task_name="workerpool1-0"', "b"),
        ('resource.labels.job_id!="7"', "d"),
        ('timestamp>="2023-11-14T22:13:22Z"', "cd"),
        ('timestamp>"2023-11-14T22:13:21.5Z" AND timestamp<"2023-11-14T23:13:22.000001+01:00"', "c"),
        ('jsonPayload.message="A"', "a"),
        ('logName="projects/my-project/logs/workerpool1-0"', "b"),
        ('jsonPayload.other="a"', ""),
    ],
)
def test_filters(cloud: GoogleCloud, clock: FakeClock, text: str, found: str) -> None:
    cloud.logs.write("7", "workerpool0-0", "a")
    clock.advance(1)
    cloud.logs.write("7", "workerpool1-0", "b", "WARNING")
    clock.advance(1)
    cloud.logs.write("7", "workerpool0-0", "c")
    clock.advance(1)
    cloud.logs.write("8", "service", "d", "ERROR", plain=True)
    assert "".join(said(cloud, text)) == found
