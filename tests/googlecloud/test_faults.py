"""Planned faults and tokens: what a client sees of each, and what has happened in the cloud."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from launcher.testing.googlecloud import Fault, GoogleCloud, Reset, Stalled, Status, Torn, Truncated

INSERT, GET = "storage.objects.insert", "storage.objects.get"


def call(cloud: GoogleCloud, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return the status and body of one request's answer."""
    address = urlsplit(cloud.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=0.3)
    try:
        connection.request(method, path, body=body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def write(cloud: GoogleCloud) -> int:
    path = "/upload/storage/v1/b/my-bucket/o?uploadType=media&ifGenerationMatch=0&name=a"
    return call(cloud, "POST", path, b"0123456789")[0]


def read(cloud: GoogleCloud) -> bytes:
    return call(cloud, "GET", "/storage/v1/b/my-bucket/o/a?alt=media")[1]


@pytest.mark.parametrize(("effect", "is_written"), [(Reset("before"), False), (Reset("after"), True)])
def test_a_reset_comes_before_or_after_the_write(cloud: GoogleCloud, effect: Reset, is_written: bool) -> None:
    cloud.faults.add(Fault(INSERT, effect))
    with pytest.raises(ConnectionResetError):
        write(cloud)
    assert write(cloud) == (412 if is_written else 200)


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (Stalled("nothing"), TimeoutError),
        (Stalled("half"), TimeoutError),
        (Truncated(), http.client.IncompleteRead),
    ],
    ids=repr,
)
def test_an_answer_is_stalled_or_cut_off(cloud: GoogleCloud, effect: Any, error: type[Exception]) -> None:
    assert write(cloud) == 200
    cloud.faults.add(Fault(GET, effect))
    with pytest.raises(error):
        read(cloud)
    assert read(cloud) == b"0123456789"


def test_a_torn_answer_has_another_byte_and_the_right_length(cloud: GoogleCloud) -> None:
    assert write(cloud) == 200
    cloud.faults.add(Fault(GET, Torn(), step="media"))
    assert read(cloud) == b"0123446789"


def test_faults_take_turns_and_end(cloud: GoogleCloud) -> None:
    first = cloud.faults.add(Fault(INSERT, Status(503), name="^a", times=2))
    second = cloud.faults.add(Fault("storage.*", Status(429)))
    assert [write(cloud) for _ in range(5)] == [503, 503, 429, 200, 412]
    assert (cloud.faults.used[first], cloud.faults.used[second]) == (2, 1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer old"}, 401), ({"Authorization": "Bearer new"}, 200)],
)
def test_only_who_has_a_token_is_let_in(cloud: GoogleCloud, headers: dict[str, str], status: int) -> None:
    cloud.let_in("new")
    jobs = f"{cloud.url}/v1/projects/my-project/locations/us-central1/customJobs"
    assert requests.get(jobs, headers=headers, timeout=5).status_code == status
