"""Uploads in one or many requests, complete and interrupted, through Google's own client and as raw requests."""

from __future__ import annotations

import io
from typing import Any

import pytest
import requests
from google.api_core.retry import Retry
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from launcher.testing.googlecloud import Fault, GoogleCloud, KeepPart, LoseSession, Reset, Status

INSERT = "storage.objects.insert"
QUICK: Retry = DEFAULT_RETRY.with_delay(initial=0.01, multiplier=1, maximum=0.01).with_timeout(5)
CHUNK = 256 * 1024


def test_a_wrong_checksum_of_a_resumable_upload_is_refused(cloud: GoogleCloud, bucket: storage.Bucket) -> None:
    begun = requests.post(
        f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=resumable&name=a", json={}, timeout=5
    )
    place = begun.headers["Location"]
    wrong = {"Content-Range": "bytes 0-3/4", "X-Goog-Hash": "crc32c=AAAAAA=="}
    answer = requests.put(place, data=b"data", headers=wrong, timeout=5)
    assert (answer.status_code, "doesn't match calculated CRC32C" in answer.text) == (400, True)
    assert not cloud.objects.buckets["my-bucket"]


def test_a_resumable_upload_tells_how_far_it_got(cloud: GoogleCloud) -> None:
    begin = f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=resumable&name=a"
    place = requests.post(begin, json={}, timeout=5).headers["Location"]

    def put(data: bytes, span: str) -> requests.Response:
        return requests.put(place, data=data, headers={"Content-Range": f"bytes {span}"}, timeout=5)

    assert "Range" not in put(b"", "*/10").headers
    assert put(b"01234567", "0-7/10").headers["Range"] == "bytes=0-7"
    assert put(b"45", "4-5/10").headers["Range"] == "bytes=0-5"  # repeated from an earlier byte on
    assert put(b"6789", "6-9/10").json()["size"] == "10"
    assert put(b"", "*/10").json()["size"] == "10"  # complete: the answer to the last chunk is repeated
    assert cloud.objects.buckets["my-bucket"]["a"].data == b"0123456789"


def test_a_lost_answer_to_the_last_chunk_is_given_again(cloud: GoogleCloud, bucket: storage.Bucket) -> None:
    fault = cloud.faults.add(Fault(INSERT, Reset("after"), step="chunk", after=1))
    blob = bucket.blob("a", chunk_size=CHUNK)
    blob.upload_from_file(io.BytesIO(bytes(CHUNK + 1)), if_generation_match=0, retry=QUICK)
    assert (blob.size, cloud.faults.used[fault]) == (CHUNK + 1, 1)
    assert cloud.objects.buckets["my-bucket"]["a"].generation == blob.generation


def test_only_a_part_of_a_chunk_arrives(cloud: GoogleCloud) -> None:
    asked = cloud.faults.add(Fault(INSERT, Status(503), step="status"))
    fault = cloud.faults.add(Fault(INSERT, KeepPart(4)))
    begin = f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=resumable&name=a"
    place = requests.post(begin, json={}, timeout=5).headers["Location"]
    answer = requests.put(place, data=b"0123456789", headers={"Content-Range": "bytes 0-9/10"}, timeout=5)
    assert (answer.status_code, answer.headers["Range"]) == (308, "bytes=0-3")
    assert cloud.faults.used[asked] == 0
    assert requests.put(place, headers={"Content-Range": "bytes */10"}, timeout=5).status_code == 503
    answer = requests.put(place, data=b"456789", headers={"Content-Range": "bytes 4-9/10"}, timeout=5)
    assert (answer.json()["size"], cloud.faults.used[fault]) == ("10", 1)
    assert cloud.objects.buckets["my-bucket"]["a"].data == b"0123456789"


@pytest.mark.parametrize("code", [404, 410])
def test_a_lost_session(cloud: GoogleCloud, code: Any) -> None:
    fault = cloud.faults.add(Fault(INSERT, LoseSession(code), after=1))
    begin = f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=resumable&name=a"
    place = requests.post(begin, json={}, timeout=5).headers["Location"]
    spans = [(b"01234", "bytes 0-4/10"), (b"56789", "bytes 5-9/10"), (b"", "bytes */10")]
    answers = [requests.put(place, data=data, headers={"Content-Range": span}, timeout=5) for data, span in spans]
    assert [answer.status_code for answer in answers] == [308, code, 404]
    assert (cloud.objects.buckets["my-bucket"], cloud.faults.used[fault]) == ({}, 1)
