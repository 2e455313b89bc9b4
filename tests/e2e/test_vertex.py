"""`launch vertex` against a Vertex AI on loopback that really runs what it is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import GoogleCloud, Runner
from tests.e2e.running import TINY, run, started
from tests.registry import OciRegistry

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WHERE = """\
provisioning: standard
regions: [us-central1]
output: gs://my-bucket/runs
"""
SLOW = TINY.replace("steps: 12", "steps: 100000").replace("every: 6", "every: 0")


@pytest.fixture
def cloud() -> Iterator[GoogleCloud]:
    with GoogleCloud(runner=Runner()) as running:
        yield running


@pytest.fixture
def job(tmp_path: Path, cloud: GoogleCloud) -> Iterator[Job]:
    from tests.registry import put_image

    with OciRegistry() as registry:
        image = f"{registry.host}/p/train@{put_image(registry, 'p/train')}"
        yield Job(tmp_path, cloud, f"image: {{uri: '{image}'}}\n")


class Job:
    """A folder with specs, and the cloud they go to."""

    def __init__(self, folder: Path, cloud: GoogleCloud, image: str) -> None:
        self.folder = folder
        self.image = image
        self.env = {**cloud.environ(), "DOCKER_CONFIG": "/nonexistent"}

    def write(self, spec: str) -> None:
        (self.folder / "job.yaml").write_text(spec + WHERE + self.image)

    def launch(self, *argv: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        ran = run(*argv, cwd=self.folder, env=self.env)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran

    def data(self, *argv: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.launch(*argv, "-o", "json", code=code).stdout)
        return found

    def gcloud(self, gcloud: str, *argv: str) -> Any:
        line = [gcloud, "ai", "custom-jobs", *argv, "--region=us-central1", "--format=json"]
        env = {**os.environ, **self.env}
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "null")


@pytest.mark.gcloud
def test_a_long_one_is_left_found_and_cancelled_by_gcloud(job: Job, cloud: GoogleCloud, gcloud: str) -> None:
    job.write(SLOW)
    made = job.data("vertex", "job.yaml", "--detach")
    assert made["state"] in ("QUEUED", "PENDING", "RUNNING")
    with started("follow", made["run"], cwd=job.folder, env=job.env) as follower:
        seen = Reader(follower)
        assert seen.until("running", 300)
        assert seen.until("/100000  loss", 300)
        job.launch("vertex", "job.yaml", "--watch-for", "1s", code=6)
        (listed,) = job.gcloud(gcloud, "list")
        assert (listed["displayName"], listed["state"]) == (made["run"], "JOB_STATE_RUNNING")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(120) == 130
    assert job.data("status", made["run"])["state"] == "RUNNING"  # Ctrl-C detaches
    job.gcloud(gcloud, "cancel", made["job"])
    ended = job.launch("follow", made["run"], code=3)
    assert "cancelled" in ended.stderr
    assert f"--resume {made['run']}" in ended.stderr
    assert job.data("status", made["run"])["state"] == "CANCELLED"


class Reader:
    """A process's stderr, read all the time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self.lines.append(line)

    def until(self, text: str, seconds: float) -> bool:
        """Whether a line with `text` has come in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(text in line for line in self.lines):
                return True
            time.sleep(0.1)
        raise AssertionError("".join(self.lines))
