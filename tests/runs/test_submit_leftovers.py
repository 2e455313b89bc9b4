"""One job for one run, on loopback: what somebody has left behind, and what has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from launch_train import runfolder
from launcher.clock import Clock
from launcher.diagnosis import Diagnosis
from launcher.errors import StillRunning
from launcher.jobs.job import Job
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.runs.attempts import AttemptFacts
from launcher.runs.driver import AttemptStarted
from launcher.runs.endings import RunEnded, RunSucceeded, cancel_and_confirm, settle
from launcher.runs.ledger import Ledger
from launcher.services import request
from launcher.services.local import attempts
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Stage, Status
from tests.runs.submitting import CANCEL, DIGEST, GET, LONG, Site, plan_of, submit

DONE = (Stage("JOB_STATE_RUNNING", 0), Stage("JOB_STATE_SUCCEEDED", 5))
BROKEN = (3, "The replica workerpool0-0 exited with a non-zero status of 1.")
FAILED = (Stage("JOB_STATE_RUNNING", 0), Stage("JOB_STATE_FAILED", 5, BROKEN))
NO_MACHINES = (8, "Resources are insufficient in region: us-central1. Please try a different region.")
STOCKOUT = (Stage("JOB_STATE_PENDING", 0), Stage("JOB_STATE_FAILED", 5, NO_MACHINES))


class KilledError(BaseException):
    """The command is killed at once: nothing of it catches this."""


class Dying(Vertex):
    """Dies before a create is sent."""

    def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
        raise KilledError


class DyingLate(Vertex):
    """Dies between a create and its answer."""

    def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
        super().create_in(region, body)
        raise KilledError


@pytest.fixture
def site(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    cloud.jobs.script = LONG
    return Site(cloud, clock)


def dying(site: Site, kind: type[Vertex], ledger: Any = None) -> None:
    with pytest.raises(KilledError):
        site.launch(ledger, vertex=kind("my-project", site.cloud.environ(), site.time))


def ends(site: Site) -> list[tuple[int, int, str | None]]:
    """Round, number and end of each attempt."""
    return [(one.round, one.number, one.end.kind if one.end else None) for one in site.ledger().entries()]


# --- An attempt that somebody has left --------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [True, False])
def test_killed_before_the_answer(site: Site, bucket: bool) -> None:
    dying(site, DyingLate, None if bucket else site.without())
    got = site.launch(None if bucket else site.without())
    assert (got.number, got.created, len(site.jobs)) == (1, False, 1)
    if bucket:
        assert site.ledger().entries()[0].job == got.job.name, "now it is noted"


def test_killed_before_the_create(site: Site) -> None:
    """Who has a lock may be creating: it is waited for, a minute by the bucket's clock."""
    dying(site, Dying)
    began = site.clock()
    got = site.launch()
    assert (got.number, got.created) == (2, True)
    assert 60 <= site.clock() - began <= 66
    assert sum("is submitting attempt 1" in line for line in site.said) == 1
    assert ends(site) == [(1, 1, "lost"), (1, 2, None)]


def test_a_lock_that_is_old_is_not_waited_for(site: Site) -> None:
    dying(site, Dying)
    site.clock.advance(3600)
    began = site.clock()
    assert site.launch().number == 2
    assert site.clock() - began < 3, "but for the pause before the same place is tried again"


@pytest.mark.parametrize(("script", "error"), [(DONE, RunSucceeded), (FAILED, RunEnded)])
def test_what_becomes_of_an_attempt_that_is_waited_for_is_the_runs(
    site: Site, script: tuple[Stage, ...], error: type[RunEnded]
) -> None:
    """Also for who has come to resume it: that has been done by now."""
    dying(site, Dying)
    site.cloud.jobs.script = script

    def sleep(seconds: float) -> None:
        if not site.cloud.jobs.jobs:
            site.vertex.create_in("us-central1", site.plan.attempts[0].request)
        site.clock.advance(10 * seconds)

    with pytest.raises(error) as told:
        submit_with(site, Clock(site.clock, sleep))
    assert type(told.value) is error
    assert len(site.jobs) == 1


def submit_with(site: Site, clock: Clock) -> AttemptStarted:
    """`launch vertex --resume`, where this happens while it waits."""
    options: dict[str, Any] = {"fresh": True, "resume": True, "ready": lambda plan: plan, "wall_clock": clock.now}
    return submit(site.plan, site.vertex, site.ledger(), clock, site.said.append, **options)


def test_a_job_that_came_while_the_lock_grew_old(site: Site) -> None:
    """The look that finds no job must have begun when the lock was old already."""
    dying(site, Dying)
    site.clock.advance(59)
    slow = site.vertex
    find = slow.find

    def late(*asked: Any, **options: Any) -> Any:
        found = find(*asked, **options)
        if not site.cloud.jobs.jobs:
            site.vertex.create_in("us-central1", {**site.plan.attempts[0].request})
            site.clock.advance(2)
        return found

    slow.find = late  # type: ignore[method-assign]  # one call comes late
    assert site.launch(vertex=slow).number == 1
    assert len(site.jobs) == 1


@pytest.mark.parametrize(("script", "ended"), [(LONG, False), (DONE, True)])
def test_a_job_whose_attempt_was_given_up_for_lost(site: Site, script: tuple[Stage, ...], ended: bool) -> None:
    """Its maker was so slow that others gave the lock up, and has noted the job all the same."""
    dying(site, Dying)
    settled = Diagnosis(scope="transient", kind="lost", cause="no job was created")
    site.ledger().note_end(1, settled, None)
    site.cloud.jobs.script = script
    job = site.vertex.create_in("us-central1", site.plan.attempts[0].request)
    site.ledger().note_job(1, job.name)
    if ended:
        site.clock.advance(60)
        with pytest.raises(RunSucceeded):
            site.launch()
    else:
        assert (site.launch().job.name, site.launch().number) == (job.name, 1)
    assert len(site.jobs) == 1


def test_an_old_job_is_not_the_new_attempts(site: Site) -> None:
    """Of a job that nobody noted, long before."""
    site.cloud.jobs.script = STOCKOUT
    site.vertex.create_in("us-central1", site.plan.attempts[0].request)
    site.clock.advance(3600)
    refused(site, 1)
    dying(site, Dying)
    site.clock.advance(3600)
    site.cloud.jobs.script = LONG
    assert site.launch().number == 3
    assert [kind for _, _, kind in ends(site)] == ["quota", "lost", None]


def test_an_old_success_ends_no_run_that_was_resumed(site: Site) -> None:
    site.cloud.jobs.script = DONE
    site.vertex.create_in("us-central1", site.plan.attempts[0].request)
    site.clock.advance(3600)
    refused(site, 1)
    site.cloud.jobs.script = LONG
    assert site.launch().created


def refused(site: Site, number: int) -> None:
    """An attempt of a place that isn't the plan's, by somebody who is gone."""
    facts = AttemptFacts(round=1, region="europe-west4", zone=None, provisioning="spot", machine="m", identity="")
    site.ledger().lock(number, facts)
    site.ledger().note_end(number, Diagnosis(scope="region", kind="quota", cause="none"), None)


def test_without_a_ledger_the_newest_job_counts(site: Site) -> None:
    site.cloud.jobs.script = FAILED
    site.launch(site.without())
    site.clock.advance(60)
    site.cloud.jobs.script = STOCKOUT
    site.launch(site.without(), resume=True)
    site.clock.advance(60)
    site.cloud.jobs.script = LONG
    assert site.launch(site.without()).created


def test_an_end_that_nobody_saw(site: Site) -> None:
    site.cloud.jobs.script = STOCKOUT
    site.launch()
    site.clock.advance(60)
    site.cloud.jobs.script = LONG
    got = site.launch()
    assert (got.number, got.job.region) == (2, "us-east5")
    assert ends(site) == [(1, 1, "stockout"), (1, 2, None)]


def test_a_list_that_is_late_hides_no_job(site: Site) -> None:
    got = site.launch()
    blind = site.vertex
    find = blind.find
    blind.find = lambda *asked, **options: find(*asked, **options)._replace(jobs=())  # type: ignore[method-assign]  # lists no job
    assert site.launch(vertex=blind).job.name == got.job.name
    assert len(site.jobs) == 1


def test_a_job_that_somebody_deleted(site: Site) -> None:
    site.launch()
    site.cloud.jobs.jobs.clear()
    with pytest.raises(RunEnded, match="deleted"):
        site.launch()
    assert site.launch(resume=True).number == 2


# --- A run that has ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize(("script", "error", "code"), [(DONE, RunSucceeded, 0), (FAILED, RunEnded, 3)])
def test_a_run_that_ended_is_reported_and_resumed_on_request(
    site: Site, bucket: bool, script: tuple[Stage, ...], error: type[RunEnded], code: int
) -> None:
    site.cloud.jobs.script = script
    first = site.launch(None if bucket else site.without()).job
    site.clock.advance(60)
    for fresh in (True, False):
        with pytest.raises(error) as told:
            site.launch(None if bucket else site.without(), fresh=fresh)
        assert (told.value.exit_code, told.value.job and told.value.job.name) == (code, first.name)
        assert "--new" in told.value.hint
        hint = told.value.hint
        assert f"--resume {site.plan.run}" in hint
        assert "checkpoint" not in hint or "if it has one" in hint
    site.cloud.jobs.script = LONG
    if bucket:
        site.folder.write(runfolder.TERMINAL, b"it can't work")
    got = site.launch(None if bucket else site.without(), resume=True)
    assert (got.created, len(site.jobs)) == (True, 2)
    assert runfolder.TERMINAL not in site.folder.list()
    if bucket:
        assert [(in_round, number) for in_round, number, _ in ends(site)] == [(1, 1), (2, 2)]
    again = site.launch(None if bucket else site.without(), resume=True)
    assert (again.job.name, again.created) == (got.job.name, False)


def test_a_run_that_goes_on_has_the_same_image(site: Site) -> None:
    site.cloud.jobs.script = FAILED
    site.launch()
    site.clock.advance(60)

    def never(plan: Plan) -> Plan:
        raise AssertionError("the image is there")

    got = site.launch(resume=True, ready=never)
    assert DIGEST in json.dumps(got.job.request)
    site.clock.advance(60)
    site.cloud.jobs.jobs.clear()
    with pytest.raises(RunEnded):
        site.launch()
    stored = site.ledger().stored()
    assert stored is not None
    site.ledger().write_plan(with_digest(stored.plan, DIGEST.replace("0", "e")))
    got = site.launch(resume=True)
    assert request.read(got.job.request).image == DIGEST, (
        "made ready: when its jobs are gone, nobody vouches for the plan's"
    )


def test_a_job_of_another_account_gives_no_image(site: Site) -> None:
    """Its labels can be copied by whoever may create jobs."""
    site.cloud.jobs.script = FAILED
    site.launch()
    site.clock.advance(60)
    other = DIGEST.replace("0", "e")
    plan = plan_of(identity={"service_account": "trainer@my-project.iam.gserviceaccount.com"})
    got = site.launch(plan=plan, resume=True, ready=lambda made: with_digest(made, other))
    assert request.read(got.job.request).image == other


def test_a_job_on_another_kind_of_gpu_gives_no_image(site: Site) -> None:
    """Its build of PyTorch may have no kernels for this one."""
    site.cloud.jobs.script = FAILED
    site.launch(plan=plan_of(machine={"type": "a100-40gb", "gpus": 8}, regions=["us-central1"]))
    other, plan = DIGEST.replace("0", "e"), plan_of(machine={"type": "h100", "gpus": 8}, regions=["us-central1"])
    site.clock.advance(60)
    got = site.launch(plan=plan, resume=True, ready=lambda made: with_digest(made, other))
    assert request.read(got.job.request).image == other
    site.clock.advance(60)
    got = site.launch(plan=plan, resume=True, ready=lambda made: with_digest(made, DIGEST))
    assert (got.created, request.read(got.job.request).image) == (True, other), "the image of its own kind of GPU"


def test_a_job_that_was_cancelled_ends_the_run(site: Site) -> None:
    site.vertex.cancel(site.launch().job.name)
    site.clock.advance(30)
    with pytest.raises(RunEnded, match="cancelled"):
        site.launch()


def test_a_job_that_a_launch_gave_up_does_not(site: Site) -> None:
    """It notes why before it cancels; who finds the job cancelled goes on with the next place."""
    got = site.launch()
    waited = Diagnosis(scope="region+provisioning", kind="waited", cause="QUEUED for 6 h")
    assert settle(site.ledger(), 1, got.job, waited).cause == waited.cause
    site.vertex.cancel(got.job.name)
    site.clock.advance(30)
    cancelled = Diagnosis(scope="permanent", kind="cancelled", cause="it was cancelled")
    assert settle(site.ledger(), 1, site.vertex.get(got.job.name), cancelled).cause == waited.cause
    assert site.launch(fresh=False).job.region == "us-east5"


def test_a_duplicate_has_done_nothing(site: Site) -> None:
    """Its node found the attempt claimed, and ended with 0: the other job's end is the run's."""
    site.cloud.jobs.script = DONE
    duplicate = site.launch().job
    site.cloud.jobs.script = LONG
    claimed_by = site.vertex.create_in("us-central1", dict(duplicate.request))
    site.folder.write(runfolder.claim(1), json.dumps({"job": claimed_by.id}).encode())
    site.clock.advance(10)
    end = settle(
        site.ledger(), 1, site.vertex.get(duplicate.name), Diagnosis(scope="permanent", kind="succeeded", cause="")
    )
    assert (end.kind, end.stops) == ("lost", False)
    got = site.launch(fresh=False)
    assert got.job.name == claimed_by.name


def test_a_duplicate_that_landed_late_is_not_the_runs_end(site: Site) -> None:
    """No attempt is known of it, and none was claimed by it: its 0 says nothing of a run that failed."""
    site.cloud.jobs.script = FAILED
    worked = site.launch().job
    site.folder.write(runfolder.claim(1), json.dumps({"job": worked.id}).encode())
    site.cloud.jobs.script = DONE
    site.vertex.create_in("us-central1", dict(worked.request))
    site.clock.advance(60)
    site.cloud.jobs.script = LONG
    with pytest.raises(RunEnded, match="exited with 1"):
        site.launch()
    with pytest.raises(RunEnded, match="exited with 1"):
        site.launch()
    assert [kind for _, _, kind in ends(site)] == ["user"]


def test_a_duplicate_that_is_taken_up_does_not_start_a_failed_run_again(site: Site) -> None:
    site.cloud.jobs.script = FAILED
    worked = site.launch().job
    site.folder.write(runfolder.claim(1), json.dumps({"job": worked.id}).encode())
    site.clock.advance(60)
    with pytest.raises(RunEnded):
        site.launch()
    site.cloud.jobs.script = DONE
    late = site.vertex.create_in("us-central1", dict(worked.request))
    assert site.launch().job.name == late.name
    site.clock.advance(60)
    done = Diagnosis(scope="permanent", kind="succeeded", cause="done")
    assert settle(site.ledger(), 2, site.vertex.get(late.name), done).kind == "lost"
    with pytest.raises(RunEnded, match="exited with 1"):
        site.launch(fresh=False)
    assert site.launch(resume=True).number == 3


def test_a_rehearsal_in_the_same_folder_hides_no_lock(site: Site) -> None:
    dying(site, Dying)
    attempts.lock(site.folder, {"by": "launch local"})
    began = site.clock()
    assert site.launch().number == 3
    assert site.clock() - began >= 60


def test_a_resume_that_died_before_it_forgave_forgives_later(site: Site) -> None:
    site.cloud.jobs.script = FAILED
    site.launch()
    site.clock.advance(60)
    site.folder.write(runfolder.TERMINAL, b"it can't work")

    class Dies(Ledger):
        def allow_restart(self) -> None:
            raise KilledError

    with pytest.raises(KilledError):
        site.launch(Dies(site.folder, site.time), resume=True)
    assert site.launch(resume=True).created
    assert runfolder.TERMINAL not in site.folder.list()


# --- To cancel ---

# --- To cancel --------------------------------------------------------------------------------------------------------


def test_a_cancellation_is_confirmed(site: Site) -> None:
    job = site.launch().job
    site.cloud.faults.add(Fault(CANCEL, Status(503), times=8))
    site.cloud.faults.add(Fault(GET, Reset()))
    assert cancel_and_confirm(site.vertex, job, site.time, site.said.append).state == "CANCELLED"
    assert cancel_and_confirm(site.vertex, job, site.time, site.said.append).state == "CANCELLED"
    site.cloud.jobs.jobs.clear()
    assert cancel_and_confirm(site.vertex, job, site.time, site.said.append).state == "DELETED"


def test_an_unconfirmed_cancellation_is_reported(site: Site) -> None:
    job = site.launch().job
    site.cloud.faults.down(site.clock() + 600, Status(503))
    with pytest.raises(StillRunning, match="nothing was created"):
        cancel_and_confirm(site.vertex, job, site.time, site.said.append)
    assert site.clock() - 1_700_000_000 <= 420
