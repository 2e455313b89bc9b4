"""Jobs that run as processes: their states, their end, their log lines, and their cleanup."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from launcher.testing.googlecloud import GoogleCloud, Runner
from launcher.testing.googlecloud.vertex.jobs import Job, shown
from tests.googlecloud.test_custom_jobs import GOOD
from tests.googlecloud.test_logs import ask, message
from tests.googlecloud.waiting import until

REGION = "us-central1"


def state(cloud: GoogleCloud, job: Job) -> str:
    """Return the state in the job's answer, without its prefix."""
    number = shown(cloud.jobs.jobs[REGION, job.id], cloud.jobs.clock()).state
    return {3: "RUNNING", 4: "SUCCEEDED", 5: "FAILED", 6: "CANCELLING", 7: "CANCELLED"}.get(number, str(number))


def has_ended(cloud: GoogleCloud, job: Job) -> bool:
    return cloud.jobs.jobs[REGION, job.id].has_ended(cloud.jobs.clock())


def log(cloud: GoogleCloud, job: Job) -> list[tuple[str, str]]:
    found = ask(cloud, f'resource.labels.job_id="{job.id}"').json().get("entries", [])
    return [(entry["resource"]["labels"]["task_name"], message(entry)) for entry in found]


def gone(pid: int) -> bool:
    """Return whether a process has ended; nobody may have waited for it yet."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


WORKS = """
import os, sys
print("attempt of", os.environ["CLOUD_ML_JOB_ID"], flush=True)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.mark.parametrize(("status", "end"), [("", "SUCCEEDED"), ("76", "FAILED")])
def test_a_job_runs_the_users_code(tmp_path: Path, status: str, end: str) -> None:
    (tmp_path / "work.py").write_text(WORKS)
    body = copy.deepcopy(GOOD)
    [pool] = body["jobSpec"]["workerPoolSpecs"]
    env = [{"name": "STATUS", "value": status}] if status else []
    pool["containerSpec"] = {"imageUri": "x:y", "command": ["python", "work.py"], "env": env}
    with GoogleCloud(runner=Runner(code=tmp_path)) as cloud:
        job = cloud.jobs.submit(REGION, body)
        until(lambda: has_ended(cloud, job), 60)
        message = shown(cloud.jobs.jobs[REGION, job.id], time.time()).error.message
        assert (state(cloud, job), ("status of 76" in message)) == (end, bool(status)), log(cloud, job)
        assert ("workerpool0-0", f"attempt of {job.id}") in log(cloud, job)


TRAINS = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_server_by_itself_runs_jobs_and_stops_them_at_its_end(tmp_path: Path) -> None:
    """A signal also ends the server's jobs. They must not inherit a signal mask."""
    (tmp_path / "work.py").write_text(TRAINS)
    command = [sys.executable, "-m", "launcher.testing.googlecloud", "--run", "--code", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = next(line for line in server.stdout if line.startswith("# listening on ")).split()[-1]
        body = copy.deepcopy(GOOD)
        program = ["python", "work.py", str(tmp_path / "saved")]
        body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] = {"imageUri": "x:y", "command": program}
        jobs = f"{url}/v1/projects/my-project/locations/{REGION}/customJobs"
        assert requests.post(jobs, json=body, timeout=5).ok
        asked = {"resourceNames": ["projects/my-project"], "filter": 'resource.labels.task_name="workerpool0-0"'}

        def lines() -> list[dict[str, Any]]:
            found = requests.post(f"{url}/v2/entries:list", json=asked, timeout=5).json()
            return [*found.get("entries", [])]

        until(lines, 60)
        pid = int(message(lines()[0]))
        assert not gone(pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert (gone(pid), (tmp_path / "saved").exists()) == (True, True)
