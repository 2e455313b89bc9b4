"""Jobs that run as processes: their states, their end, their log lines, and their cleanup."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def job_of(code: str, *arguments: str) -> dict[str, Any]:
    """Return a custom job whose replica runs the Python code, with os, signal, sys and time imported."""
    body = copy.deepcopy(GOOD)
    command = ["python", "-c", f"import os, signal, sys, time\n{code}", *arguments]
    body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] |= {"command": command}
    return body


@contextmanager
def running(body: dict[str, Any], runner: Runner | None = None) -> Iterator[tuple[GoogleCloud, Job]]:
    with GoogleCloud(runner=runner or Runner(pending=0)) as cloud:
        yield cloud, cloud.jobs.submit(REGION, body)


def state(cloud: GoogleCloud, job: Job) -> str:
    """Return the state in the job's answer, without its prefix."""
    number = shown(cloud.jobs.jobs[REGION, job.id], cloud.jobs.clock()).state
    return {3: "RUNNING", 4: "SUCCEEDED", 5: "FAILED", 6: "CANCELLING", 7: "CANCELLED"}.get(number, str(number))


def has_ended(cloud: GoogleCloud, job: Job) -> bool:
    return cloud.jobs.jobs[REGION, job.id].has_ended(cloud.jobs.clock())


def log(cloud: GoogleCloud, job: Job) -> list[tuple[str, str]]:
    found = ask(cloud, f'resource.labels.job_id="{job.id}"').json().get("entries", [])
    return [(entry["resource"]["labels"]["task_name"], message(entry)) for entry in found]


def test_a_job_runs_with_its_request_and_its_cloud() -> None:
    code = 'print(os.environ["A"], os.environ["CLOUD_ML_JOB_ID"], os.environ["STORAGE_EMULATOR_HOST"])'
    with running(job_of(code)) as (cloud, job):
        until(lambda: has_ended(cloud, job), 30)
        assert state(cloud, job) == "SUCCEEDED"
        service = ("service", "launch: image not used: runs in the local Python environment")
        assert log(cloud, job) == [service, ("workerpool0-0", f"1 {job.id} {cloud.url}")]


@pytest.mark.parametrize(("code", "status"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), 6)", 134)])
def test_a_replica_that_fails_fails_the_job(code: str, status: int) -> None:
    body = job_of(code)
    body["jobSpec"]["scheduling"]["disableRetries"] = True
    with running(body) as (cloud, job):
        until(lambda: has_ended(cloud, job), 30)
        message = shown(cloud.jobs.jobs[REGION, job.id], time.time())
        assert state(cloud, job) == "FAILED"
        said = f"The replica workerpool0-0 exited with a non-zero status of {status}."
        assert (message.error.code, message.error.message) == (3, said)
        assert message.start_time.ToNanoseconds() <= message.end_time.ToNanoseconds()


SAVES = """
def save(*_):
    print("saved", flush=True)
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_cancelling_lets_it_end_by_itself() -> None:
    with running(job_of(SAVES)) as (cloud, job):
        until(lambda: len(log(cloud, job)) > 1, 30)
        assert cloud.runs
        [pid] = cloud.runs.pids().values()
        post(cloud, job, ":cancel")
        assert state(cloud, job) == "CANCELLING"
        until(lambda: has_ended(cloud, job), 30)
        assert state(cloud, job) == "CANCELLED"
        assert log(cloud, job)[2:] == [("workerpool0-0", "saved")]
        post(cloud, job, ":cancel")
        assert (state(cloud, job), gone(pid), cloud.runs.pids()) == ("CANCELLED", True, {})


def test_cancelled_while_it_waits_it_never_starts(tmp_path: Path) -> None:
    body = job_of("open(sys.argv[1], 'w')", str(tmp_path / "started"))
    with running(body, Runner(pending=60)) as (cloud, job):
        assert state(cloud, job) == "1"
        post(cloud, job, ":cancel")
        until(lambda: has_ended(cloud, job))
        assert state(cloud, job) == "CANCELLED"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("stubborn", [False, True])
def test_the_clouds_end_is_every_jobs(monkeypatch: pytest.MonkeyPatch, stubborn: bool) -> None:
    monkeypatch.setattr("launcher.testing.googlecloud.vertex.processes.CLOSE_SECONDS", 0.3)
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    began = time.monotonic()
    with running(job_of(f"{ignores}print(os.getpid(), flush=True)\ntime.sleep(60)")) as (cloud, job):
        until(lambda: len(log(cloud, job)) > 1, 30)
        pid = int(log(cloud, job)[1][1])
    until(lambda: gone(pid))
    assert time.monotonic() - began < 20


def post(cloud: GoogleCloud, job: Job, verb: str, method: str = "POST") -> None:
    url = f"{cloud.url}/v1/projects/my-project/locations/{REGION}/customJobs/{job.id}{verb}"
    assert requests.request(method, url, json={}, timeout=5).ok


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
