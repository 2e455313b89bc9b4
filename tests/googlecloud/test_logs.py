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


def refusal(cloud: GoogleCloud, text: str = JOB, **body: Any) -> tuple[int, str]:
    answer = ask(cloud, text, **body)
    return answer.status_code, answer.json()["error"]["message"]


def pages(cloud: GoogleCloud, **body: Any) -> list[list[str]]:
    found, token = [], ""
    while True:
        answer = ask(cloud, pageSize=2, pageToken=token, **body).json()
        found.append([message(entry) for entry in answer.get("entries", [])])
        token = answer.get("nextPageToken", "")
        if not token:
            return found


def write(cloud: GoogleCloud, clock: FakeClock, *texts: str) -> None:
    for text in texts:
        cloud.logs.write("7", "workerpool0-0", text)
        clock.advance(1)


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resource.type=", "Unparseable filter: syntax error at 'resource.type='"),
        ('resource.type="ml_job', "syntax error at"),
        ("(severity=INFO)", "syntax error at '(severity=INFO)'"),
        ("severity=INFO OR severity=ERROR", "syntax error at 'OR severity=ERROR'"),
        ("NOT severity=INFO", "syntax error at 'NOT severity=INFO'"),
        ("AND severity=INFO", "syntax error at 'AND severity=INFO'"),
        ("colour=red", "Field not found: 'colour'."),
        ('timestamp>"yesterday"', "Invalid timestamp: 'yesterday'"),
        ("x" * 20_001, "longer than 20000"),
    ],
)
def test_a_filter_that_cant_be_read_is_refused(cloud: GoogleCloud, text: str, words: str) -> None:
    code, told = refusal(cloud, text)
    assert code == 400
    assert words in told


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"orderBy": "insertId asc"}, 400, "order_by must be"),
        ({"pageSize": 1001}, 400, "page_size"),
        ({"pageSize": -1}, 400, "page_size"),
        ({"pageSize": "many"}, 400, "pageSize"),
        ({"orderby": ""}, 400, "unknown field `orderby`"),
        ({"resourceNames": []}, 400, "resource name"),
        ({"resourceNames": ["projects/other"]}, 403, "Permission denied for all log views"),
        ({"pageToken": "abc"}, 400, "page_token is invalid"),
    ],
)
def test_a_request_is_read_strictly(cloud: GoogleCloud, body: dict[str, Any], code: int, words: str) -> None:
    found, told = refusal(cloud, **body)
    assert (found, words in told) == (code, True), told


def test_pages_and_orders(cloud: GoogleCloud, clock: FakeClock) -> None:
    write(cloud, clock, *"abcde")
    assert pages(cloud) == [["a", "b"], ["c", "d"], ["e"]]
    assert pages(cloud, orderBy="timestamp desc") == [["e", "d"], ["c", "b"], ["a"]]


def test_a_late_entry_has_an_old_time_and_cant_be_read_before(cloud: GoogleCloud, clock: FakeClock) -> None:
    write(cloud, clock, "a", "b")
    cloud.logs.write("7", "workerpool0-0", "late", when=clock() - 1.5, late=30)
    assert said(cloud) == ["a", "b"]
    clock.advance(30)
    assert said(cloud) == ["a", "late", "b"]


def test_an_empty_page_with_a_token_is_not_the_end(cloud: GoogleCloud, clock: FakeClock) -> None:
    write(cloud, clock, "a", "b", "c")
    cloud.logs.empty_pages = 2
    assert pages(cloud) == [[], [], ["a", "b"], ["c"]]
