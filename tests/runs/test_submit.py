"""One job for one run, on loopback: what a command does with what it finds."""

from __future__ import annotations

import json

import grpc
import pytest

from launch_train import runfolder
from launcher.diagnosis import Diagnosis
from launcher.errors import UsageError
from launcher.jobs.job import PLAN_LABEL, Job
from launcher.plan.model import Plan
from launcher.runs.driver import AttemptStarted
from launcher.runs.endings import RunSucceeded, settle
from launcher.services import request
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Stage, Status
from tests.googlecloud.rpc import serve_grpc
from tests.runs.submitting import CANCEL, CREATE, DIGEST, LONG, Site, plan_of, ready

DONE = (Stage("JOB_STATE_RUNNING", 0), Stage("JOB_STATE_SUCCEEDED", 5))
NO_MACHINES = (8, "Resources are insufficient in region: us-central1. Please try a different region.")


@pytest.fixture
def site(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    cloud.jobs.script = LONG
    return Site(cloud, clock)


def ends(site: Site) -> list[tuple[int, int, str | None]]:
    """Round, number and end of each attempt."""
    return [(one.round, one.number, one.end.kind if one.end else None) for one in site.ledger().entries()]


# --- A run gets one job -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [0.0, 86_400.0, -86_400.0])
def test_a_run_gets_one_job(site: Site, off: float) -> None:
    """Whatever this machine's clock says."""
    site.off = off
    got = site.launch()
    assert (got.number, got.created, got.job.region, got.job.state) == (1, True, "us-central1", "QUEUED")
    [entry] = site.ledger().entries()
    assert (entry.job, entry.round, entry.region, entry.provisioning) == (got.job.name, 1, "us-central1", "spot")
    assert entry.identity == got.job.labels["launch-identity"]
    again = site.launch()
    assert again == AttemptStarted(job=again.job, number=1, created=False)
    assert again.job.name == got.job.name
    assert len(site.jobs) == 1


def test_without_a_ledger_too(site: Site) -> None:
    got = site.launch(site.without())
    assert (got.number, got.created) == (1, True)
    again = site.launch(site.without())
    assert (again.job.name, again.created) == (got.job.name, False)
    assert len(site.jobs) == 1


def test_over_grpc_too(site: Site) -> None:
    with serve_grpc(site.cloud) as address, grpc.insecure_channel(address) as channel:
        vertex = Vertex("my-project", {}, site.time, channel)
        site.cloud.faults.add(Fault(CREATE, Reset("after")))
        got = site.launch(vertex=vertex)
        assert site.launch(vertex=vertex).job.name == got.job.name
    assert len(site.jobs) == 1


def test_the_plan_is_there_before_the_job_and_is_that_of_the_lock(site: Site) -> None:
    site.launch()
    lock, plan, spec, job = (
        int(site.folder.read_version(name)[1])
        for name in (runfolder.attempt_lock(1), runfolder.PLAN, runfolder.SPEC, runfolder.attempt_job(1))
    )
    assert lock < spec < plan < job, "generations grow with time"
    stored = site.ledger().stored()
    assert stored is not None
    assert stored.plan.image is not None
    assert stored.plan.image.uri == DIGEST
    assert DIGEST in json.dumps(stored.plan.attempts[0].request)
    assert stored.plan.attempts[0].request["labels"][PLAN_LABEL] == stored.digest
    assert [one for one in site.folder.list() if "/" not in one] == ["plan.json", "spec.yaml"]


def test_a_launch_that_comes_too_late_leaves_the_plan_of_the_job(site: Site) -> None:
    """Both had the same run in view, in other regions; nothing must look as if somebody had changed the plan."""
    winners: list[AttemptStarted] = []

    def slow(plan: Plan) -> Plan:
        winners.append(site.launch(plan=plan_of(regions=["us-east4"])))
        return ready(plan)

    got = site.launch(ready=slow)
    assert [one.job.name for one in winners] == [got.job.name]
    stored = site.ledger().stored()
    assert stored is not None
    assert stored.digest == got.job.labels[PLAN_LABEL]


def test_the_image_is_made_ready_once_and_not_for_a_run_that_goes_on(site: Site) -> None:
    made: list[Plan] = []

    def slow(plan: Plan) -> Plan:
        site.clock.advance(1800)
        made.append(plan)
        return plan

    refused = Status(429, message="The following quota metrics exceed quota limits: aiplatform.googleapis.com/x_gpus")
    site.cloud.faults.add(Fault(CREATE, refused))
    got = site.launch(ready=slow)
    assert (got.number, got.job.region, len(made)) == (2, "us-east5", 1)
    site.launch(ready=slow)
    assert len(made) == 1


def test_the_image_of_another_machine_type_of_the_run_stays(site: Site) -> None:
    """The first job had an A100; the next one, with an H100, gets its image."""
    made: list[Plan] = []

    def prepare(plan: Plan) -> Plan:
        made.append(plan)
        return ready(plan)

    site.plan = plan_of(machine={"type": ["h100", "a100-80gb"], "gpus": 1}, regions=["us-central1"])
    refused = Status(429, message="The following quota metrics exceed quota limits: aiplatform.googleapis.com/x_gpus")
    site.cloud.faults.add(Fault(CREATE, refused))
    first = site.launch(ready=prepare)
    assert request.read(first.job.request).machine_type == "a2-ultragpu-1g"
    preempted = Diagnosis(scope="transient", kind="preempted", cause="")
    site.vertex.cancel(first.job.name)
    site.clock.advance(30)
    settle(site.ledger(), first.number, site.vertex.get(first.job.name), preempted)
    second = site.launch(ready=prepare)
    assert (request.read(second.job.request).machine_type, len(made)) == ("a3-highgpu-1g", 1)
    assert request.read(second.job.request).image == request.read(first.job.request).image


def test_another_launch_submitted_while_the_image_was_built(site: Site) -> None:
    other: list[AttemptStarted] = []

    def slow(plan: Plan) -> Plan:
        other.append(site.launch())
        return plan

    got = site.launch(ready=slow)
    assert (got.job.name, got.created) == (other[0].job.name, False)
    assert len(site.jobs) == 1


# --- Whose run it is --------------------------------------------------------------------------------------------------


def test_a_run_id_belongs_to_one_computation(site: Site) -> None:
    mine = plan_of(world={"run_id": "mine"}, env={"A": "1"})
    other = plan_of(world={"run_id": "mine"}, env={"A": "2"}, regions=["us-east5"])
    site.plan = mine
    site.launch()
    with pytest.raises(UsageError, match=r"env\.A: 1 → 2") as told:
        site.launch(plan=other)
    assert "run mine has another" in told.value.problem
    assert "--run-id" in told.value.hint
    site.cloud.jobs.jobs.clear()
    with pytest.raises(UsageError, match=r"env\.A: 1 → 2"):
        site.launch(plan=other)
    assert not site.cloud.jobs.jobs, "the ledger knows it too"


def test_an_other_one_by_its_code_alone(site: Site) -> None:
    site.plan = plan_of(world={"run_id": "mine", "owner": "me@example.com"})
    site.launch(site.without())
    with pytest.raises(UsageError, match="different code, requirements or user"):
        site.launch(site.without(), plan=plan_of(world={"run_id": "mine", "owner": "you@example.com"}))


def test_another_users_job_with_the_same_label_is_not_touched(site: Site) -> None:
    request = dict(site.plan.attempts[0].request)
    labels = {name: value for name, value in request["labels"].items() if name != "launch-identity"}
    foreign = site.vertex.create_in("us-central1", {**request, "labels": labels})
    with pytest.raises(UsageError, match="has another spec"):
        site.launch()
    assert site.vertex.get(foreign.name).state == "QUEUED"


def test_an_ended_job_that_no_attempt_names_is_not_the_runs(site: Site) -> None:
    """A resume may change settings, so that attempts have several identities: those in the ledger, and no others."""
    site.launch()
    request = dict(site.plan.attempts[0].request)
    foreign = site.vertex.create_in(
        "us-central1", {**request, "labels": {**request["labels"], "launch-identity": "01234567"}}
    )
    site.vertex.cancel(foreign.name)
    while not site.vertex.get(foreign.name).is_over:
        site.clock.advance(10)
    with pytest.raises(UsageError, match="has another spec"):
        site.launch()


def test_what_a_service_lists_beside_the_filter_is_let_alone(site: Site) -> None:
    other = site.launch(site.without(), plan=plan_of(world={"run_id": "other"})).job
    careless = site.vertex
    find = careless.find
    careless.find = lambda _filter, *asked, **options: find("", *asked, **options)  # type: ignore[method-assign]  # ignores the filter
    got = site.launch(vertex=careless)
    assert (got.created, site.vertex.get(other.name).state) == (True, "QUEUED")


# --- Several at once --------------------------------------------------------------------------------------------------


def twice(site: Site, *, apart: float = 1.0) -> tuple[Job, Job]:
    """Two jobs of one run, the second by somebody who knew nothing of the first, or by a request that landed late."""
    first = site.launch().job
    site.clock.advance(apart)
    second = site.vertex.create_in("us-east5", dict(first.request))
    return first, second


def test_of_two_the_one_stays_that_an_attempt_is_open_for(site: Site) -> None:
    first, second = twice(site)
    got = site.launch()
    assert (got.job.name, got.number) == (first.name, 1)
    assert site.vertex.get(second.name).state == "CANCELLING"
    assert any(second.name in line and "duplicate job of this run" in line for line in site.said)
    site.clock.advance(30)
    assert site.launch().job.name == first.name
    assert len(ends(site)) == 1, "one that was too many is no attempt"


def test_one_that_was_too_many_is_not_the_runs_end(site: Site) -> None:
    first, second = twice(site)
    site.launch()
    settle(site.ledger(), 1, site.vertex.get(first.name), Diagnosis(scope="region", kind="stockout", cause="none"))
    site.vertex.cancel(first.name)
    site.clock.advance(30)
    assert site.vertex.get(second.name).state == "CANCELLED"
    assert site.launch(fresh=False).number == 2


def test_one_too_many_that_is_gone_already(site: Site) -> None:
    first, _ = twice(site)
    site.cloud.faults.add(Fault(CANCEL, Status(404)))
    assert site.launch().job.name == first.name


def test_of_two_the_one_stays_that_has_claimed_the_run(site: Site) -> None:
    first, second = twice(site)
    site.folder.write(runfolder.claim(1), json.dumps({"job": second.id}).encode())
    got = site.launch()
    assert (got.job.name, got.number) == (second.name, 2), "it gets an attempt of its own"
    assert site.vertex.get(first.name).state == "CANCELLING"
    assert ends(site) == [(1, 1, "lost"), (1, 2, None)]


def test_without_a_ledger_the_oldest_stays(site: Site) -> None:
    first = site.launch(site.without()).job
    site.clock.advance(1)
    second = site.vertex.create_in("us-east5", dict(first.request))
    assert site.launch(site.without()).job.name == first.name
    assert site.vertex.get(second.name).state == "CANCELLING"


def test_of_two_jobs_a_cancelling_one_is_not_followed(site: Site) -> None:
    first, second = twice(site)
    site.vertex.cancel(first.name)
    assert site.launch().job.name == second.name


def test_a_job_that_appears_late_is_followed(site: Site) -> None:
    """The answer was lost, nobody saw the job, all other places refused; then it was there."""
    site.cloud.faults.add(Fault(CREATE, Reset()))
    got = site.launch()
    site.vertex.cancel(got.job.name)
    site.clock.advance(30)
    settle(site.ledger(), 2, site.vertex.get(got.job.name), Diagnosis(scope="region", kind="waited", cause="long"))
    late = site.vertex.create_in("us-central1", dict(got.job.request))
    found = site.launch()
    assert (found.job.name, found.number, found.created) == (late.name, 3, False)
    assert ends(site) == [(1, 1, "lost"), (1, 2, "waited"), (1, 3, None)]


def test_a_late_job_that_succeeded_ends_the_run(site: Site) -> None:
    site.cloud.faults.add(Fault(CREATE, Reset()))
    got = site.launch()
    settle(site.ledger(), 2, got.job, Diagnosis(scope="region", kind="waited", cause="long"))
    site.vertex.cancel(got.job.name)
    site.cloud.jobs.script = DONE
    site.vertex.create_in("us-central1", dict(got.job.request))
    site.clock.advance(20)
    with pytest.raises(RunSucceeded):
        site.launch()
    assert len(site.jobs) == 2
