"""Cloud Storage on loopback, through Google's own client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import requests
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
