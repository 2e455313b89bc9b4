"""What every service promises of its jobs (services.base.Jobs): Vertex AI, VMs on Compute Engine, this machine, a host
that is reached by SSH, and its Slurm."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from launcher.clock import Clock
from launcher.diagnosis import diagnose_end
from launcher.errors import LaunchError
from launcher.jobs.job import GONE, RUN_LABEL, Job
from launcher.remote.connection import connect_to
from launcher.runs.cancelling import cancel_run
from launcher.runs.endings import cancel_and_confirm
from launcher.runs.find import FoundRun
from launcher.runs.story import live_of
from launcher.services.base import GoneError, Jobs
from launcher.services.hosts.service import OnHost
from launcher.services.local.client import run_job
from launcher.services.local.job import LocalJob, Printed
from launcher.services.local.service import ThisMachine
from launcher.services.request import context_of_job
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, GoogleCloud, Stage
from tests.plan.planning import planned, request
from tests.remote.hosts import NAME, a_host, host_request
from tests.runs.submitting import LONG
from tests.services.compute.vm_site import Site
from tests.slurm.cluster import SlurmCluster, a_cluster
from tests.ssh.server import SshServer


class Service(Protocol):
    """A service with what tests of its jobs need."""

    jobs: Jobs
    clock: Clock
    unknown: str
    """The name of a job that does not exist."""

    def running(self) -> Job:
        """Return a job that runs until it is cancelled."""

    def ended(self, code: int) -> Job:
        """Return a job whose program has ended with an exit code."""

    def count(self) -> int:
        """Return how many jobs exist."""


class VertexAI:
    def __init__(self, cloud: GoogleCloud, clock: FakeClock) -> None:
        self.cloud, self.clock = cloud, Clock(clock, clock.advance)
        self.jobs: Jobs = Vertex("my-project", cloud.environ(), self.clock)
        self.unknown = "projects/my-project/locations/us-central1/customJobs/7"

    def running(self) -> Job:
        self.cloud.jobs.script = LONG
        return self._created(10)

    def ended(self, code: int) -> Job:
        error = (3, f"The replica workerpool0-0 exited with a non-zero status of {code}.") if code else None
        end = Stage("JOB_STATE_FAILED" if code else "JOB_STATE_SUCCEEDED", 2, *([error] if error else []))
        self.cloud.jobs.script = (Stage("JOB_STATE_PENDING", 0), Stage("JOB_STATE_RUNNING", 1), end)
        return self._created(10)

    def _created(self, seconds: float) -> Job:
        assert isinstance(self.jobs, Vertex)
        job = self.jobs.create_in("us-central1", request())
        self.clock.sleep(seconds)
        return self.jobs.get(job.name)

    def count(self) -> int:
        return len(self.cloud.jobs.jobs)


class ComputeEngine:
    def __init__(self, cloud: GoogleCloud, clock: FakeClock) -> None:
        self.site, self.clock = Site(cloud, clock), Clock(clock, clock.advance)
        self.jobs: Jobs = self.site.vms
        self.unknown = "projects/my-project/zones/us-central1-a/instances/7"

    def running(self) -> Job:
        return self.site.running()

    def ended(self, code: int) -> Job:
        job = self.site.running()
        self.site.write(job.id, exit=code)
        return self.jobs.get(job.name)

    def count(self) -> int:
        return len(self.site.cloud.compute.names())


class Here:
    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock()
        self.jobs: Jobs = ThisMachine()
        self.unknown = str(folder / "none-0123abcd")
        self.threads: list[threading.Thread] = []

    def running(self) -> Job:
        started = threading.Event()
        job = self._job("print('ready', flush=True); import time; time.sleep(100)")

        def on_event(event: object) -> None:
            if isinstance(event, Printed):
                started.set()

        thread = threading.Thread(target=run_job, args=(job, on_event))
        self.threads.append(thread)
        thread.start()
        assert started.wait(30)
        return self.jobs.get(str(self.folder / "tiny-0123abcd"))

    def ended(self, code: int) -> Job:
        run_job(self._job(f"raise SystemExit({code})"), lambda _event: None)
        return self.jobs.get(str(self.folder / "tiny-0123abcd"))

    def _job(self, code: str) -> LocalJob:
        run_folder = {"name": "LAUNCH_RUN_FOLDER", "value": str(self.folder / "tiny-0123abcd")}
        pool = {"containerSpec": {"command": ["python", "-c", code], "env": [run_folder]}}
        labels = {RUN_LABEL: "tiny-0123abcd"}
        body = {"displayName": "tiny-0123abcd", "labels": labels, "jobSpec": {"workerPoolSpecs": [pool]}}
        return LocalJob(request=body)

    def count(self) -> int:
        return len(list(self.folder.iterdir()))


class ByHost:
    def __init__(self, server: SshServer) -> None:
        self.server, self.clock = server, Clock()
        self.host = OnHost(connect_to(NAME))
        self.jobs: Jobs = self.host
        self.unknown = f"on/{NAME}/{uuid.UUID(int=7)}"

    def running(self) -> Job:
        return self._started("import time; time.sleep(100)")

    def ended(self, code: int) -> Job:
        job = self._started(f"raise SystemExit({code})")
        while not (job := self.jobs.get(job.name)).is_over:
            time.sleep(0.1)
        return job

    def _started(self, code: str) -> Job:
        body = host_request(code)
        return self.host.create(planned().attempts[0], body, str(uuid.uuid4()))

    def count(self) -> int:
        return len(list((self.server.home / "launch" / "jobs").iterdir()))


class InSlurm(ByHost):
    def running(self) -> Job:
        stops = "signal.signal(signal.SIGURG, lambda *_: sys.exit(75))"
        job = self._started(f"import signal, sys, time; {stops}; time.sleep(100)")
        while (job := self.jobs.get(job.name)).started is None:
            time.sleep(0.1)
        return job

    def _started(self, code: str) -> Job:
        script = '#!/bin/bash\n#SBATCH --job-name=launch-tiny-0123abcd --ntasks-per-node=1\nexec "$1/run" batch\n'
        return self.host.create(planned().attempts[0], host_request(code, script=script), str(uuid.uuid4()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with a_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(
    params=["vertex", "compute", "local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("host", "slurm"))]
)
def service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    if request.param == "local":
        here = Here(tmp_path / "runs")
        yield here
        for thread in here.threads:
            here.jobs.cancel(str(here.folder / "tiny-0123abcd"))
            thread.join(60)
            assert not thread.is_alive()
        return
    if request.param == "host":
        with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
            yield ByHost(server)
        return
    if request.param == "slurm":
        cluster: SlurmCluster = request.getfixturevalue("cluster")
        with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
            cluster.let_in(server)
            yield InSlurm(server)
            cluster.run("scancel", "--user=root")
        return
    clock = FakeClock()
    with GoogleCloud(clock=clock) as cloud:
        for name, value in cloud.environ().items():
            monkeypatch.setenv(name, value)
        yield VertexAI(cloud, clock) if request.param == "vertex" else ComputeEngine(cloud, clock)


def cancelled(service: Service, job: Job) -> Job:
    return cancel_and_confirm(service.jobs, job, service.clock, lambda _text: None)


# --- A job that runs --------------------------------------------------------------------------------------------------


def test_a_running_job_names_its_run_and_its_times(service: Service) -> None:
    job = service.running()
    assert (job.state, job.is_over, job.is_waiting, job.ended) == ("RUNNING", False, False, None)
    assert job.run
    assert job.handle
    assert job.started is not None
    assert 0 < job.created <= job.started


def test_the_state_is_the_same_each_time(service: Service) -> None:
    job = service.running()
    assert service.jobs.get(job.name) == service.jobs.get(job.name) == job


def test_a_running_job_has_a_place_and_a_target_with_a_command(service: Service) -> None:
    job = service.running()
    assert job.place
    on_host = f"launch slurm SPEC --on {job.region}" if "script" in job.request else f"launch on {job.region} SPEC"
    commands = {"vm": "launch vm SPEC --run", "on": on_host}
    assert job.command == commands.get(job.target, f"launch {job.target} SPEC")


def test_a_running_job_is_shown_as_running(service: Service) -> None:
    live = live_of(service.running(), 1, None, time.time())
    assert (live.state, live.kind) == ("running", "")


# --- Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "state", "kind"), [(0, "SUCCEEDED", "succeeded"), (1, "FAILED", "user")])
def test_an_end_has_a_state_a_time_and_a_diagnosis(service: Service, code: int, state: str, kind: str) -> None:
    job = service.ended(code)
    assert (job.state, job.is_over, job.has_ended) == (state, True, True)
    assert job.started is not None
    assert job.ended is not None
    assert job.started <= job.ended
    if service.jobs.outlives_client:  # else the run folder's end has the exit codes
        assert diagnose_end(job, context_of_job(job, service.jobs.project)).kind == kind


def test_an_end_is_final(service: Service) -> None:
    job = service.ended(0)
    service.clock.sleep(0.1)
    assert service.jobs.get(job.name) == job


# --- Cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancelled_job_ends_in_time(service: Service) -> None:
    job, begun = service.running(), service.clock.now()
    ended = cancelled(service, job)
    assert (ended.state, ended.name, ended.run) == ("CANCELLED", job.name, job.run)
    assert service.clock.now() - begun < service.jobs.stop_seconds
    assert ended.ended is not None


def test_a_cancelled_job_is_diagnosed_as_cancelled(service: Service) -> None:
    ended = cancelled(service, service.running())
    assert diagnose_end(ended, context_of_job(ended, service.jobs.project)).kind == "cancelled"


def test_cancelling_twice_is_cancelling_once(service: Service) -> None:
    job = service.running()
    service.jobs.cancel(job.name)
    service.jobs.cancel(job.name)
    assert cancelled(service, job).state == "CANCELLED"
    service.jobs.cancel(job.name)
    assert service.jobs.get(job.name).state == "CANCELLED"


@pytest.mark.parametrize("code", [0, 1])
def test_cancelling_a_job_that_has_ended_changes_nothing(service: Service, code: int) -> None:
    job = service.ended(code)
    service.jobs.cancel(job.name)
    assert service.jobs.get(job.name).state == job.state


def test_the_run_of_a_cancelled_job_is_cancelled(service: Service) -> None:
    job = service.running()
    run = FoundRun(id=job.run, jobs=(job,), context=Context(service))
    result = cancel_run(run, lambda _text: None)
    assert (result.done, result.errors, [each.state for each in result.jobs]) == (True, (), ["CANCELLED"])


class Context:
    """The context of a run without a folder."""

    def __init__(self, service: Service) -> None:
        self.project, self.clock, self._jobs = service.jobs.project, service.clock, service.jobs

    def with_notice(self, say: Callable[[str], None]) -> Context:
        return self

    def of_run(self, folder: Any) -> Jobs:
        return self._jobs

    def attempts(self, folder: Any) -> tuple[()]:
        return ()

    def open_log(self, *_: Any, **__: Any) -> Any:
        raise LaunchError("no log")


# --- What is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["get", "cancel"])
def test_an_unknown_job_is_gone(service: Service, method: str) -> None:
    with pytest.raises(GoneError):
        getattr(service.jobs, method)(service.unknown)


def test_get_creates_nothing(service: Service) -> None:
    job = service.ended(0)
    count = service.count()
    service.jobs.get(job.name)
    with pytest.raises(GoneError):
        service.jobs.get(service.unknown)
    assert service.count() == count


# --- After the end ----------------------------------------------------------------------------------------------------


def test_release_and_forget_can_be_repeated(service: Service) -> None:
    job = service.ended(0)
    service.jobs.release(job)
    service.jobs.forget(job)
    count = service.count()
    service.jobs.release(job)
    service.jobs.forget(job)
    assert service.count() == count


def test_a_released_job_still_says_how_it_ended(service: Service) -> None:
    job = service.ended(0)
    service.jobs.release(job)
    assert service.jobs.get(job.name).state in ("SUCCEEDED", GONE)


def test_only_jobs_on_this_machine_end_with_their_launch(service: Service) -> None:
    jobs = service.jobs
    assert (jobs.outlives_client, jobs.poll_seconds is None) == (jobs.project != "local", jobs.project == "my-project")
    assert 30 <= jobs.stop_seconds <= 600
