"""One job for one run, for who may not write in its folder: no locks, and claims that can't be seen."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from launch_train.common import contract
from launcher.jobs.job import Job
from launcher.plan.model import Plan
from launcher.runs.identity_check import facts_of
from launcher.runs.ledger import Ledger
from launcher.testing.googlecloud import Bucket, FakeClock, Fault, GoogleCloud, Stage, Status
from tests.runs.submitting import LIST, LONG, Site

NO_MACHINES = (8, "Resources are insufficient in region: us-central1. Please try a different region.")
STOCKOUT = (Stage("JOB_STATE_PENDING", 0), Stage("JOB_STATE_FAILED", 5, NO_MACHINES))


@pytest.fixture
def barred(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    mine = Bucket("my-bucket", denied=frozenset({"storage.objects.create"}))
    with GoogleCloud(clock=clock, buckets=(mine,), script=LONG) as cloud:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
        yield Site(cloud, clock)


def variables(job: Job) -> dict[str, str]:
    """The environment of a job's first node."""
    return {one["name"]: one["value"] for one in job.request["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"]}


def test_its_next_job_says_which_have_ended(barred: Site) -> None:
    """Their claims are still in the folder, where the node would take itself for a duplicate, and end with 0."""
    barred.cloud.jobs.script = STOCKOUT
    first = barred.launch().job
    assert json.loads(variables(first)[contract.ENDED]) == []
    barred.clock.advance(60)
    barred.cloud.jobs.script = LONG
    second = barred.launch().job
    assert json.loads(variables(second)[contract.ENDED]) == [first.id]
    assert contract.ENDED not in json.dumps(barred.plan.attempts[0].request)


def test_a_run_with_locks_says_nothing_of_it(
    cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    assert contract.ENDED not in variables(Site(cloud, clock).launch().job)


@pytest.mark.parametrize("stored", [False, True])
def test_it_looks_wherever_vertex_trains(barred: Site, stored: bool) -> None:
    """Without a ledger nothing says that the run was launched in another region before. `stored`: only the lock is
    what tells that it can't be written."""
    there = barred.vertex.create_in("europe-west4", barred.plan.attempts[0].request)

    class Read(Ledger):
        def write_plan(self, plan: Plan) -> None:
            if not stored:
                super().write_plan(plan)

    ledger = Read(barred.folder, barred.time, barred.said.append)
    got = barred.launch(ledger, extra_regions=None)
    assert (got.job.name, got.created, len(barred.jobs)) == (there.name, False, 1)


def test_a_region_that_can_not_be_read_beside_them_is_waited_for_once(barred: Site) -> None:
    barred.cloud.faults.add(Fault(LIST, Status(503), times=None, name="asia-east1"))
    began = barred.clock()
    assert barred.launch(extra_regions=["asia-east1"]).created
    assert barred.clock() - began < 90


def test_a_lock_that_somebody_left_is_waited_for_a_minute(
    cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How old it is can't be known: the minute counts from when that was found."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    site = Site(cloud, clock)
    site.ledger().lock(1, facts_of(site.plan.attempts[0], 1))
    cloud.faults.add(Fault("storage.objects.insert", Status(403, message="no"), times=None))
    began = clock()
    assert site.launch().created
    assert 60 <= clock() - began <= 70
