"""Cloud Storage on loopback, through Google's own client."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from google.api_core.exceptions import Forbidden
from google.cloud import storage

from launcher.testing.googlecloud import GoogleCloud


def test_a_list_loses_nothing_to_deletions_between_its_pages(bucket: storage.Bucket) -> None:
    for name in "abcdef":
        bucket.blob(name).upload_from_string(b"")
    seen = []
    for blob in bucket.list_blobs(page_size=2):
        seen.append(blob.name)
        blob.delete()
    assert seen == [*"abcdef"]


@pytest.mark.parametrize(
    ("asked", "got", "span"),
    [
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=-30", b"0123456789", "bytes 0-9/10"),
        ("bytes=8-100", b"89", "bytes 8-9/10"),
    ],
)
def test_ranges(cloud: GoogleCloud, bucket: storage.Bucket, asked: str, got: bytes, span: str) -> None:
    bucket.blob("a").upload_from_string(b"0123456789")
    url = f"{cloud.url}/storage/v1/b/my-bucket/o/a?alt=media"
    answer = requests.get(url, headers={"Range": asked}, timeout=5)
    assert (answer.status_code, answer.content, answer.headers["Content-Range"]) == (206, got, span)
    assert requests.get(url, headers={"Range": "bytes=10-"}, timeout=5).status_code == 416


def test_what_is_not_permitted(cloud: GoogleCloud, bucket: storage.Bucket) -> None:
    bucket.blob("a").upload_from_string(b"1")
    denied: dict[str, Callable[[], object]] = {
        "storage.objects.create": lambda: bucket.blob("b").upload_from_string(b"2"),
        "storage.objects.get": lambda: bucket.blob("a").download_as_bytes(),
        "storage.objects.list": lambda: list(bucket.list_blobs()),
        "storage.objects.delete": lambda: bucket.blob("a").delete(),
        "storage.buckets.get": bucket.reload,
    }
    for permission, attempt in denied.items():
        cloud.objects.deny("my-bucket", permission)
        with pytest.raises(Forbidden, match=rf"does not have {permission} access .* \'{permission}\' denied") as error:
            attempt()
        assert error.value.response.json()["error"]["errors"][0]["reason"] == "forbidden"
    cloud.objects.deny("my-bucket", "storage.objects.delete")
    bucket.blob("new").upload_from_string(b"")
    with pytest.raises(Forbidden, match=r"storage\.objects\.delete"):
        bucket.blob("a").upload_from_string(b"overwriting needs the permission to delete")
    cloud.objects.deny("my-bucket")
    assert bucket.blob("a").download_as_bytes() == b"1"


def test_only_one_of_many_creates_wins() -> None:
    """Make the clock slow.

    It is read between the check of the preconditions and the change, so another write may come in between.
    """

    def clock() -> float:
        time.sleep(0.02)
        return 1.7e9

    with GoogleCloud(clock=clock) as cloud, ThreadPoolExecutor(8) as pool:
        url = f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=media&ifGenerationMatch=0&name=a"
        statuses = [*pool.map(lambda n: requests.post(url, data=b"%d" % n, timeout=20).status_code, range(8))]
    assert sorted(statuses) == [200, *[412] * 7]
