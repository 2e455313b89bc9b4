"""The real gcloud with the loopback cloud."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import FakeClock, GoogleCloud, parse_custom_job
from tests.googlecloud.test_custom_jobs import GOOD

pytestmark = pytest.mark.gcloud


def run(cloud: GoogleCloud, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cloud.environ()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_gcloud_creates_sees_and_cancels_a_job(
    gcloud: str, cloud: GoogleCloud, clock: FakeClock, tmp_path: Path
) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps(GOOD["jobSpec"]))
    jobs, where = [gcloud, "ai", "custom-jobs"], ["--region=us-central1", "--format=json"]
    name = ["--display-name=a", "--labels=launch-run=a-1"]
    created = json.loads(run(cloud, *jobs, "create", f"--config={config}", *name, *where).stdout)
    assert parse_custom_job(cloud.requests[0].body) == parse_custom_job(GOOD)
    clock.advance(2)
    [listed] = json.loads(run(cloud, *jobs, "list", *where).stdout)
    assert (listed["name"], listed["state"]) == (created["name"], "JOB_STATE_RUNNING")
    run(cloud, *jobs, "cancel", created["name"])
    clock.advance(2)
    described: dict[str, Any] = json.loads(run(cloud, *jobs, "describe", created["name"], "--format=json").stdout)
    assert described["state"] == "JOB_STATE_CANCELLED"


def test_gcloud_prints_a_refusal(gcloud: str, cloud: GoogleCloud) -> None:
    pool = "--worker-pool-spec=machine-type=a3-highgpu-3g,container-image-uri=x"
    create = [gcloud, "ai", "custom-jobs", "create", "--region=us-central1", "--display-name=a", pool]
    done = run(cloud, *create)
    assert done.returncode == 1
    assert 'INVALID_ARGUMENT: Machine type "a3-highgpu-3g" is not supported.' in done.stderr


def test_gcloud_reads_a_secret(gcloud: str, cloud: GoogleCloud) -> None:
    """gcloud uses the token in its file."""
    cloud.let_in("a-token")
    cloud.secrets.add("hf", b"value")
    access = [gcloud, "secrets", "versions", "access", "latest", "--secret=hf"]
    assert run(cloud, *access).stdout == "value"
    cloud.secrets.deny("hf")
    assert "PERMISSION_DENIED: Permission 'secretmanager.versions.access' denied" in run(cloud, *access).stderr


def test_gcloud_copies_to_and_from_a_bucket(gcloud: str, cloud: GoogleCloud, tmp_path: Path) -> None:
    data = bytes(range(256)) + b"\n"
    (tmp_path / "there").write_bytes(data)
    for source, target in ((tmp_path / "there", "gs://my-bucket/a/b"), ("gs://my-bucket/a/b", tmp_path / "back")):
        done = run(cloud, gcloud, "storage", "cp", str(source), str(target))
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "back").read_bytes() == data


def test_the_cloud_stands_by_itself(tmp_path: Path) -> None:
    record = tmp_path / "requests.jsonl"
    command = [sys.executable, "-m", "launcher.testing.googlecloud", "--port", "0", "--record", str(record)]
    command += ["--bucket", "first", "--bucket", "second", "--latency", "0.3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        exports = dict(line.removeprefix("export ").strip().split("=", 1) for line in _until_listening(server.stdout))
        endpoint = exports["CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM"]
        url = f"{endpoint}v1/projects/my-project/locations/us-central1/customJobs"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert json.load(answer) == {"customJobs": []}
        began = time.monotonic()
        with urllib.request.urlopen(f"{exports['STORAGE_EMULATOR_HOST']}/storage/v1/b/second", timeout=60) as answer:
            assert json.load(answer)["name"] == "second"
        assert time.monotonic() - began >= 0.3
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    first, second = map(json.loads, record.read_text().splitlines())
    assert second["path"] == "/storage/v1/b/second"
    assert first["path"] == "/v1/projects/my-project/locations/us-central1/customJobs"


def _until_listening(lines: Iterable[str]) -> Iterator[str]:
    return takewhile(lambda line: not line.startswith("# listening"), lines)
