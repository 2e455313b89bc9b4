"""Jobs that run as processes: their states, their end, their log lines, and their cleanup."""

from __future__ import annotations

import copy
import os
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
from launcher.testing.googlecloud.vertex.processes import failed
from tests.googlecloud.test_custom_jobs import GOOD
from tests.googlecloud.test_logs import ask, message
from tests.googlecloud.waiting import until

REGION = "us-central1"


def program(tmp_path: Path, text: str) -> Runner:
    """Return a runner whose program is the Python code `text`, with json, os, sys and time imported."""
    file = tmp_path / "program.py"
    file.write_text(f"import json, os, signal, sys, time\n{text}\n")
    return Runner(pending=0, command=(sys.executable, "-S", str(file)))


@contextmanager
def running(runner: Runner, **options: Any) -> Iterator[tuple[GoogleCloud, Job]]:
    with GoogleCloud(runner=runner, **options) as cloud:
        yield cloud, cloud.jobs.submit(REGION, GOOD)


def state(cloud: GoogleCloud, job: Job) -> str:
    """Return the state in the job's answer, without its prefix."""
    number = shown(cloud.jobs.jobs[REGION, job.id], cloud.jobs.clock()).state
    return {3: "RUNNING", 4: "SUCCEEDED", 5: "FAILED", 6: "CANCELLING", 7: "CANCELLED"}.get(number, str(number))


def has_ended(cloud: GoogleCloud, job: Job) -> bool:
    return cloud.jobs.jobs[REGION, job.id].has_ended(cloud.jobs.clock())


def log(cloud: GoogleCloud, job: Job) -> list[tuple[str, str]]:
    found = ask(cloud, f'resource.labels.job_id="{job.id}"').json().get("entries", [])
    return [(entry["resource"]["labels"]["task_name"], message(entry)) for entry in found]


def test_a_job_runs_with_its_request_and_its_cloud(tmp_path: Path) -> None:
    """The program gets the request as Google's canonical JSON, and the cloud in its environment."""
    runner = program(
        tmp_path,
        """
args = sys.argv[1:]
request = json.load(open(args[1]))
print("[workerpool0-0] " + request["jobSpec"]["scheduling"]["strategy"], file=sys.stderr)
print("[workerpool0-0] " + " ".join(args[2:]), file=sys.stderr)
print("launch: " + os.environ["STORAGE_EMULATOR_HOST"], file=sys.stderr)
print(json.dumps({"exit_codes": {"workerpool0-0": 0}}))
""",
    )
    with running(runner) as (cloud, job):
        until(lambda: has_ended(cloud, job))
        assert state(cloud, job) == "SUCCEEDED"
        said = log(cloud, job)
        url = cloud.url
    flags = f"--as-job {job.id} -o json"
    assert said == [("workerpool0-0", "SPOT"), ("workerpool0-0", flags), ("service", f"launch: {url}")]


@pytest.mark.parametrize("docker", [False, True])
def test_flags_say_how_it_runs(tmp_path: Path, docker: bool) -> None:
    runner = program(tmp_path, 'print("[workerpool0-0] " + " ".join(sys.argv[7:]), file=sys.stderr)')
    runner = Runner(code=None if docker else tmp_path, docker=docker, pending=0, command=runner.command)
    with running(runner) as (cloud, job):
        until(lambda: has_ended(cloud, job))
        assert log(cloud, job) == [("workerpool0-0", "--docker" if docker else f"--code {tmp_path}")]


def test_a_replica_that_fails_fails_the_job(tmp_path: Path) -> None:
    runner = program(
        tmp_path, 'print(json.dumps({"exit_codes": {"workerpool0-0": 0, "workerpool1-0": -9}})); sys.exit(3)'
    )
    with running(runner) as (cloud, job):
        until(lambda: has_ended(cloud, job))
        message = shown(cloud.jobs.jobs[REGION, job.id], time.time())
        assert state(cloud, job) == "FAILED"
        said = "The replica workerpool1-0 exited with a non-zero status of 137."
        assert (message.error.code, message.error.message) == (3, said)
        assert message.start_time.ToNanoseconds() <= message.end_time.ToNanoseconds()


@pytest.mark.parametrize(
    ("result", "status", "found"),
    [
        ('{"exit_codes": {"workerpool0-0": 0}}', 0, ("workerpool0-0", 0)),
        ('{"exit_codes": {"workerpool0-0": 0, "workerpool1-1": 75}}', 3, ("workerpool1-1", 75)),
        ('{"exit_codes": {"workerpool0-0": -15}}', 3, ("workerpool0-0", 143)),
        ('{"exit_codes": {"workerpool0-0": 0}}', 1, ("workerpool0-0", 1)),
        ("", 2, ("workerpool0-0", 2)),
        ("", -9, ("workerpool0-0", 137)),
        ("{}", 0, ("workerpool0-0", 0)),
    ],
)
def test_how_a_job_failed(result: str, status: int, found: tuple[str, int]) -> None:
    assert failed(result, status) == found


SAVES = """
def save(*_):
    print("[workerpool0-0] saved", file=sys.stderr, flush=True)
    time.sleep(0.2)
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
print("[workerpool0-0] ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_cancelling_lets_it_end_by_itself(tmp_path: Path) -> None:
    with running(program(tmp_path, SAVES)) as (cloud, job):
        until(lambda: log(cloud, job))
        assert cloud.runs
        [pid] = cloud.runs.pids().values()
        post(cloud, job, ":cancel")
        assert state(cloud, job) == "CANCELLING"
        until(lambda: has_ended(cloud, job))
        assert state(cloud, job) == "CANCELLED"
        assert log(cloud, job)[1:] == [("workerpool0-0", "saved")]
        post(cloud, job, ":cancel")
        assert (state(cloud, job), gone(pid), cloud.runs.pids()) == ("CANCELLED", True, {})


def test_cancelled_while_it_waits_it_never_starts(tmp_path: Path) -> None:
    runner = program(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')")
    with running(Runner(pending=60, command=runner.command)) as (cloud, job):
        assert state(cloud, job) == "1"
        post(cloud, job, ":cancel")
        until(lambda: has_ended(cloud, job))
        assert state(cloud, job) == "CANCELLED"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("stubborn", [False, True])
def test_the_clouds_end_is_every_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool) -> None:
    monkeypatch.setattr("launcher.testing.googlecloud.vertex.processes.CLOSE_SECONDS", 0.3)
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    text = f'{ignores}print("[workerpool0-0] ready", file=sys.stderr, flush=True)\ntime.sleep(60)'
    began = time.monotonic()
    with running(program(tmp_path, text)) as (cloud, job):
        until(lambda: log(cloud, job))
        assert cloud.runs
        [pid] = cloud.runs.pids().values()
    assert gone(pid)
    assert time.monotonic() - began < 10


def post(cloud: GoogleCloud, job: Job, verb: str, method: str = "POST") -> None:
    url = f"{cloud.url}/v1/projects/my-project/locations/{REGION}/customJobs/{job.id}{verb}"
    assert requests.request(method, url, json={}, timeout=5).ok


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


WORKS = """
import os, sys
print("attempt of", os.environ["CLOUD_ML_JOB_ID"], flush=True)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.mark.parametrize(("status", "end"), [("", "SUCCEEDED"), ("76", "FAILED")])
def test_launch_local_runs_a_request(tmp_path: Path, status: str, end: str) -> None:
    """The real program: it runs the request as submitted, in the folder with the user's code."""
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
