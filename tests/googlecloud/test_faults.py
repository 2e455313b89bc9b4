"""Planned faults: on raw connections to see what is sent, and through Google's own client to see its reaction."""

from __future__ import annotations

import base64
import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import google_crc32c
import pytest
import requests

from launcher.testing.googlecloud import (
    FakeClock,
    Fault,
    GoogleCloud,
    Reset,
    Stalled,
    Status,
    Torn,
    Truncated,
)

INSERT, GET, LIST = "storage.objects.insert", "storage.objects.get", "storage.objects.list"


@pytest.fixture
def raw(cloud: GoogleCloud) -> Iterator[http.client.HTTPConnection]:
    address = urlsplit(cloud.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    yield connection
    connection.close()


def write(raw: http.client.HTTPConnection, name: str, data: bytes = b"0123456789") -> int:
    """Create an object in one request and return the status."""
    where = f"/upload/storage/v1/b/my-bucket/o?uploadType=media&ifGenerationMatch=0&name={name}"
    raw.request("POST", where, body=data)
    answer = raw.getresponse()
    answer.read()
    return answer.status


def read(raw: http.client.HTTPConnection, name: str) -> http.client.HTTPResponse:
    """Return the beginning of an answer with an object's bytes."""
    raw.request("GET", f"/storage/v1/b/my-bucket/o/{name}?alt=media")
    return raw.getresponse()


def names(cloud: GoogleCloud) -> list[str]:
    return sorted(cloud.objects.buckets["my-bucket"])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (401, "authError"),
        (403, "forbidden"),
        (408, "uploadBrokenConnection"),
        (429, "rateLimitExceeded"),
        (500, "internalError"),
        (503, "backendError"),
    ],
)
def test_a_status_has_googles_reason_and_no_effect(cloud: GoogleCloud, code: int, reason: str) -> None:
    fault = cloud.faults.add(Fault(INSERT, Status(code, retry_after=7)))
    url = f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=media&name=a"
    answer = requests.post(url, data=b"1", timeout=5)
    assert (answer.status_code, answer.headers["Retry-After"]) == (code, "7")
    assert answer.json()["error"]["errors"][0]["reason"] == reason
    assert names(cloud) == []
    assert requests.post(url, data=b"1", timeout=5).ok
    assert (cloud.faults.used[fault], names(cloud)) == (1, ["a"])


def test_a_fault_starts_after_and_ends(cloud: GoogleCloud, raw: http.client.HTTPConnection) -> None:
    fault = cloud.faults.add(Fault(INSERT, Status(503), name="^m/", after=1, times=2))
    assert [write(raw, name) for name in ("m/0", "c/1", "m/1", "m/2", "m/3")] == [200, 200, 503, 503, 200]
    assert cloud.faults.used[fault] == 2


def test_faults_take_turns_in_their_order(cloud: GoogleCloud, raw: http.client.HTTPConnection) -> None:
    first = cloud.faults.add(Fault(INSERT, Status(503)))
    cloud.faults.add(Fault("storage.objects.delete", Status(500), times=None))
    second = cloud.faults.add(Fault("storage.*", Status(429), times=None))
    assert [write(raw, f"a{n}") for n in range(4)] == [503, 429, 429, 429]
    assert (cloud.faults.used[first], cloud.faults.used[second]) == (1, 3)
    cloud.faults.clear()
    assert write(raw, "a") == 200
    assert cloud.faults.used[second] == 3


@pytest.mark.parametrize(("when", "there"), [("before", []), ("after", ["a"])])
def test_a_reset_connection(cloud: GoogleCloud, raw: http.client.HTTPConnection, when: Any, there: list[str]) -> None:
    cloud.faults.add(Fault(INSERT, Reset(when)))
    with pytest.raises(ConnectionResetError):
        write(raw, "a")
    assert names(cloud) == there
    raw.close()
    assert write(raw, "a") == (412 if there else 200)


@pytest.mark.parametrize("effect", [None, Status(503)])
def test_down_until(
    cloud: GoogleCloud, clock: FakeClock, raw: http.client.HTTPConnection, effect: Status | None
) -> None:
    outage = cloud.faults.down(clock() + 180, effect)
    for _ in range(3):
        if effect:
            assert write(raw, "a") == 503
        else:
            with pytest.raises(ConnectionResetError):
                write(raw, "a")
            raw.close()
        clock.advance(59)
    assert (names(cloud), cloud.faults.used[outage]) == ([], 3)
    clock.advance(3)
    assert write(raw, "a") == 200


@pytest.mark.parametrize("sent", ["nothing", "head", "half"])
def test_a_stalled_answer_ends_with_the_clients_patience(
    cloud: GoogleCloud, raw: http.client.HTTPConnection, sent: Any
) -> None:
    assert write(raw, "a") == 200
    cloud.faults.add(Fault(GET, Stalled(sent)))
    raw.sock.settimeout(0.2)
    if sent == "nothing":
        with pytest.raises(TimeoutError):
            read(raw, "a")
    else:
        answer = read(raw, "a")
        assert answer.headers["Content-Length"] == "10"
        assert answer.read(5) == b"01234" if sent == "half" else True
        with pytest.raises(TimeoutError):
            answer.read()
    raw.close()
    assert read(raw, "a").read() == b"0123456789"


@pytest.mark.parametrize(("keep", "got"), [(None, b"01234"), (0, b""), (9, b"012345678")])
def test_a_truncated_answer(cloud: GoogleCloud, raw: http.client.HTTPConnection, keep: int | None, got: bytes) -> None:
    assert write(raw, "a") == 200
    cloud.faults.add(Fault(GET, Truncated(keep)))
    answer = read(raw, "a")
    assert answer.headers["Content-Length"] == "10"
    with pytest.raises(http.client.IncompleteRead) as error:
        answer.read()
    assert error.value.partial == got


def test_a_torn_read_has_the_right_length_and_headers(cloud: GoogleCloud, raw: http.client.HTTPConnection) -> None:
    assert write(raw, "a") == 200
    for at, wrong in ((None, b"0123446789"), (0, b"1123456789"), (9, b"0123456788")):
        cloud.faults.add(Fault(GET, Torn(at), step="media"))
        answer = read(raw, "a")
        right = base64.b64encode(google_crc32c.value(b"0123456789").to_bytes(4)).decode()
        assert answer.read() == wrong
        assert answer.headers["X-Goog-Hash"].startswith(f"crc32c={right}")
    assert cloud.objects.buckets["my-bucket"]["a"].data == b"0123456789"
    cloud.faults.add(Fault(GET, Torn(10)))
    assert read(raw, "a").status == 400
