"""A target that launch does not know, in one class: its runs are followed, cancelled, listed, shown and reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch_train.common import contract
from launch_train.common.storage import LocalFolder, Storage
from launcher.cli.commands.status import show_run
from launcher.cli.flows.launch import follow_run
from launcher.cli.flows.report import write_report
from launcher.cli.options import Output
from launcher.clock import Clock
from launcher.errors import JobFailed
from launcher.jobs.job import RUN_LABEL, Job
from launcher.runs.attempts import AttemptEntry
from launcher.runs.cancelling import cancel_run
from launcher.runs.context import LineReader
from launcher.runs.find import FoundRun
from launcher.runs.logs.folder_logs import TextLogReader
from launcher.runs.run_list import entry_of
from launcher.services.base import GoneError
from launcher.testing.googlecloud import FakeClock
from tests.train.report.folders import preempted

RUN = "tiny-0123abcd"


class Garage:
    """Machines in a garage. It is the service and the context of its runs."""

    project: str = "garage"
    outlives_client: bool = True
    poll_seconds: float | None = 1.0
    stop_seconds: float = 60.0
    stuck_fix: str = "Pull the plug."

    def __init__(self, job: Job) -> None:
        self.job, self.ends_as = job, "SUCCEEDED"
        self._clock = FakeClock()
        self.clock = Clock(self._clock, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self._clock.advance(seconds)
        if not self.job.is_over:
            self.job = replace(self.job, state=self.ends_as, ended=1000.0)

    def with_notice(self, say: Callable[[str], None]) -> Garage:
        return self

    def of_run(self, folder: Storage | None) -> Garage:
        return self

    def get(self, name: str) -> Job:
        if name != self.job.name:
            raise GoneError(name)
        return self.job

    def cancel(self, name: str) -> None:
        self.ends_as = "CANCELLED"

    def release(self, job: Job) -> None:
        pass

    def forget(self, job: Job) -> None:
        pass

    def attempts(self, folder: Storage) -> tuple[AttemptEntry, ...]:
        return ()

    def open_log(
        self, job: Job, folder: Storage | None, say: Callable[[str], None], *, attempt: int = 0, tail: int | None = None
    ) -> LineReader:
        assert folder
        return TextLogReader(folder, attempt or None, tail=tail)


@pytest.fixture
def run(tmp_path: Path) -> FoundRun:
    """A run of two attempts whose job is running in the garage."""
    folder = preempted(tmp_path / RUN)
    env = [{"name": contract.RUN_FOLDER, "value": str(folder)}]
    pool = {"machineSpec": {"machineType": "bench-4x4090", "acceleratorCount": 4}, "replicaCount": 1}
    request = {"jobSpec": {"workerPoolSpecs": [{**pool, "containerSpec": {"env": env}}]}}
    job = Job(
        name=f"garage/{RUN}",
        region="cellar",
        state="RUNNING",
        created=1.0,
        started=2.0,
        labels={RUN_LABEL: RUN},
        request=request,
    )
    return FoundRun(id=RUN, jobs=(job,), context=Garage(job))


def test_it_is_followed_to_its_end(run: FoundRun, capsys: pytest.CaptureFixture[str]) -> None:
    follow_run(run, Output.json)
    assert json.loads(capsys.readouterr().out)["state"] == "SUCCEEDED"


def test_a_failure_names_the_command_that_resumes_it(run: FoundRun) -> None:
    run.context.of_run(None).cancel(run.job.name)
    with pytest.raises(JobFailed) as error:
        follow_run(run, Output.text)
    assert f"launch garage SPEC --resume {RUN}" in error.value.hint


def test_it_is_cancelled_and_the_end_is_confirmed(run: FoundRun) -> None:
    cancelled = cancel_run(run, lambda _text: None)
    assert (cancelled.done, [job.state for job in cancelled.jobs], cancelled.errors) == (True, ["CANCELLED"], ())


def test_it_is_shown_with_its_place_and_without_a_console(run: FoundRun, capsys: pytest.CaptureFixture[str]) -> None:
    show_run(run, Output.text)
    page = capsys.readouterr().out
    assert page.startswith(f"{RUN}  running")
    assert "bench-4x4090, standard in cellar" in page
    assert "console" not in page
    show_run(run, Output.json)
    data = json.loads(capsys.readouterr().out)
    assert (data["job"], data["console"], data["region"]) == (f"garage/{RUN}", None, "cellar")


def test_it_is_listed_by_its_target(run: FoundRun) -> None:
    entry = entry_of(run, "", 0.0)
    assert (entry.run, entry.target, entry.state, entry.folder) == (RUN, "garage", "RUNNING", run.folder)


def test_its_report_is_written(run: FoundRun, tmp_path: Path) -> None:
    assert run.folder
    page = write_report({run.id: LocalFolder(Path(run.folder))}, tmp_path / "page.html")
    assert RUN in page.read_text()
