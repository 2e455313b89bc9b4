"""The server itself: a slow answer delays neither other answers nor the shutdown."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from launcher.testing.googlecloud import Fault, GoogleCloud, Slow, Stalled

LIST = "storage.objects.list"


def test_latency_is_before_each_answer_and_outside_of_locks() -> None:
    with GoogleCloud(latency=1.0) as cloud, ThreadPoolExecutor(8) as pool:
        jobs = f"{cloud.url}/v1/projects/my-project/locations/us-central1/customJobs"
        for url, status in ((jobs, 200), (f"{cloud.url}/storage/v1/b/none", 404)):
            began = time.monotonic()
            assert [answer.status_code for answer in pool.map(_get, [url] * 8)] == [status] * 8
            assert 1.0 <= time.monotonic() - began < 7


def _get(url: str) -> requests.Response:
    return requests.get(url, timeout=60)


def test_the_server_stops_though_answers_are_slow_or_stalled() -> None:
    with GoogleCloud() as cloud:
        cloud.faults.add(Fault("storage.buckets.get", Slow(60)))
        cloud.faults.add(Fault(LIST, Stalled()))
        urls = [f"{cloud.url}/storage/v1/b/my-bucket", f"{cloud.url}/storage/v1/b/my-bucket/o"]
        waiting = [threading.Thread(target=_broken, args=(url,)) for url in urls]
        for thread in waiting:
            thread.start()
        while cloud.faults.used.total() < 2:
            time.sleep(0.01)
        began = time.monotonic()
    for thread in waiting:
        thread.join()
    assert time.monotonic() - began < 20


def _broken(url: str) -> None:
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=50)
