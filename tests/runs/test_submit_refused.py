"""Attempt after attempt: what is refused, what passes, what isn't known, and when nothing may be created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.diagnosis import Diagnosis
from launcher.errors import LaunchError, NoCapacity, NotAuthorised, UnreachableError, UsageError
from launcher.jobs.job import Job
from launcher.runs.attempts import AttemptFacts
from launcher.runs.endings import settle
from launcher.runs.ledger import Ledger
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import Bucket, FakeClock, Fault, GoogleCloud, Reset, Status
from tests.runs.submitting import CREATE, LIST, LONG, Site, plan_of

METRIC = "aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_h100_gpus"
QUOTA = Status(429, message=f"The following quota metrics exceed quota limits: {METRIC}")
BUSY = Status(429, message="Quota exceeded for quota metric 'Resource management (CRUD) requests' and limit 'x'")
DENIED = Status(
    403, message="Permission 'aiplatform.customJobs.create' denied on resource '//aiplatform.googleapis.com/p'"
)


@pytest.fixture
def site(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    cloud.jobs.script = LONG
    return Site(cloud, clock)


def refuse(site: Site, effect: Status, times: int | None = 1) -> None:
    site.cloud.faults.add(Fault(CREATE, effect, times=times))


def creates(site: Site) -> int:
    return sum(one.method == "POST" and one.path.endswith("/customJobs") for one in site.cloud.requests)


def kinds(site: Site) -> list[tuple[int, str, str | None]]:
    """Round, region and end of each attempt."""
    return [(one.round, one.region, one.end.kind if one.end else None) for one in site.ledger().entries()]


# --- One place after the other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [True, False])
def test_a_quota_error_moves_on_to_the_next_placement(site: Site, bucket: bool) -> None:
    refuse(site, QUOTA)
    got = site.launch(None if bucket else site.without())
    assert (got.number, got.job.region, creates(site)) == (2, "us-east5", 2)
    assert any(line.startswith("attempt 1 (us-central1, ") and "was refused" in line for line in site.said)
    if bucket:
        assert kinds(site) == [(1, "us-central1", "quota"), (1, "us-east5", None)]


@pytest.mark.parametrize("bucket", [True, False])
def test_when_all_placements_failed_all_attempts_are_listed(site: Site, bucket: bool) -> None:
    refuse(site, QUOTA, times=2)
    with pytest.raises(NoCapacity) as told:
        site.launch(None if bucket else site.without())
    assert "1. us-central1, spot: " in told.value.problem
    assert "2. us-east5, spot: " in told.value.problem
    assert "custom_model_training_preemptible_nvidia_h100_gpus" in str(told.value)
    assert not site.cloud.jobs.jobs


def test_typed_again_it_is_another_round(site: Site) -> None:
    refuse(site, QUOTA, times=3)
    with pytest.raises(NoCapacity):
        site.launch()
    with pytest.raises(NoCapacity) as told:
        site.launch(fresh=False)
    assert creates(site) == 2, "who only follows begins no round"
    assert "2. us-east5" in told.value.problem
    got = site.launch()
    assert (got.number, got.job.region) == (4, "us-east5")
    assert [one[0] for one in kinds(site)] == [1, 1, 2, 2]


def test_another_launch_takes_up_where_one_left(site: Site) -> None:
    site.launch()
    waited = Diagnosis(scope="region+provisioning", kind="waited", cause="QUEUED for 6 h")
    [entry] = site.ledger().entries()
    job = site.vertex.get(str(entry.job))
    settle(site.ledger(), 1, job, waited)
    site.vertex.cancel(job.name)
    site.clock.advance(30)
    assert site.launch(fresh=False).job.region == "us-east5"


@pytest.mark.parametrize(
    ("effect", "error", "code"),
    [
        (DENIED, NotAuthorised, 4),
        (Status(403, message="Vertex AI API has not been used", info="SERVICE_DISABLED"), LaunchError, 1),
        (Status(400, message="Invalid value at 'x'"), UsageError, 2),
    ],
)
def test_a_permanent_refusal_stops(site: Site, effect: Status, error: type[LaunchError], code: int) -> None:
    refuse(site, effect)
    with pytest.raises(error) as told:
        site.launch()
    assert (told.value.exit_code, creates(site)) == (code, 1)
    assert bool(told.value.hint) == (code != 2)
    with pytest.raises(error):
        site.launch(fresh=False)
    assert creates(site) == 1
    assert site.launch().number == 2, "who types it again has changed something"


def test_a_busy_placement_is_retried(site: Site) -> None:
    refuse(site, BUSY, times=3)
    began = site.clock()
    got = site.launch()
    assert (got.number, got.job.region) == (4, "us-central1")
    assert site.clock() - began == pytest.approx(1 + 2 + 4), "half of 2, 4 and 8 s"


def test_retries_of_a_busy_placement_are_bounded(site: Site) -> None:
    refuse(site, BUSY, times=6)
    assert site.launch().job.region == "us-east5"


def test_google_says_how_long_to_wait(site: Site) -> None:
    refuse(site, Status(429, retry_after=45, message=BUSY.message))
    began = site.clock()
    assert site.launch().number == 2
    assert site.clock() - began >= 45


def test_a_refusal_of_long_ago_asks_for_no_pause(site: Site) -> None:
    refuse(site, BUSY, times=1)
    with pytest.raises(KeyboardInterrupt):
        site.launch(jitter=_interrupted())
    began = site.clock()
    assert site.launch().number == 2
    assert site.clock() == began


def _interrupted() -> Any:
    """Ctrl-C when the second attempt is about to be chosen."""
    calls = iter([0.5, 0.5])

    def jitter() -> float:
        for value in calls:
            return value
        raise KeyboardInterrupt

    return jitter


# --- What isn't known -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [Reset("after"), Reset(), Status(503), Status(500)])
@pytest.mark.parametrize("bucket", [True, False])
def test_a_lost_answer_is_looked_for(site: Site, effect: Status | Reset, bucket: bool) -> None:
    site.cloud.faults.add(Fault(CREATE, effect))
    began = site.clock()
    got = site.launch(None if bucket else site.without())
    made = effect == Reset("after")
    assert (len(site.jobs), got.created) == (1, True)
    assert got.number == (1 if made else 2)
    assert site.clock() - began >= (0 if made else 20)


def test_a_job_that_shows_up_late_is_found(site: Site) -> None:
    """A list may lag behind: the job is looked for again and again."""
    site.cloud.faults.add(Fault(CREATE, Reset("after")))
    vertex = site.vertex
    find = vertex.find

    def late(*asked: Any, **options: Any) -> Any:
        found = find(*asked, **options)
        return found if site.clock() >= 1_700_000_018 else found._replace(jobs=())

    vertex.find = late  # type: ignore[method-assign]  # one call comes late
    got = site.launch(vertex=vertex)
    assert (got.number, got.created, len(site.jobs)) == (1, True, 1)


@pytest.mark.parametrize("bucket", [True, False])
def test_while_a_region_can_not_be_read_nothing_is_created(site: Site, bucket: bool) -> None:
    site.cloud.faults.add(Fault(LIST, Status(503), times=None, name="us-east5"))
    with pytest.raises(UnreachableError):
        site.launch(None if bucket else site.without())
    assert creates(site) == 0
    site.cloud.faults.clear()
    assert site.launch(None if bucket else site.without()).created


def test_a_region_of_an_earlier_attempt_counts_too(site: Site) -> None:
    site.launch(plan=plan_of(regions=["europe-west4"]))
    site.cloud.faults.add(Fault(LIST, Status(503), times=None, name="europe-west4"))
    with pytest.raises(UnreachableError):
        site.launch()
    site.cloud.faults.clear()
    assert site.launch().job.region == "europe-west4"
    assert creates(site) == 1


def test_regions_beside_them_need_not_be_read(site: Site) -> None:
    there = site.launch(site.without(), plan=plan_of(regions=["europe-west4"])).job
    site.cloud.faults.add(Fault(LIST, Status(403, message="no"), times=None, name="asia-east1"))
    got = site.launch(site.without(), extra_regions=["asia-east1", "europe-west4"])
    assert got.job.name == there.name


def test_what_can_not_be_seen_after_a_lost_answer_is_told(site: Site) -> None:
    """The lock stays open: the same command, typed again, finds the job."""
    site.cloud.faults.add(Fault(CREATE, Reset("after")))
    site.cloud.faults.add(Fault(LIST, Status(503), times=None, after=2))
    with pytest.raises(UnreachableError, match="unknown whether attempt 1 created a job") as told:
        site.launch()
    assert "Repeat the command" in told.value.hint
    site.cloud.faults.clear()
    got = site.launch()
    assert (got.number, len(site.jobs)) == (1, 1)


class Sleepy(Ledger):
    """The machine is suspended while a lock is written: its monotonic clock stands still."""

    asleep = 0.0

    def lock(self, number: int, facts: AttemptFacts) -> Any:
        type(self).asleep += 100.0
        return super().lock(number, facts)


def test_a_machine_that_slept_sends_nothing(site: Site) -> None:
    """Others may have given the lock up meanwhile."""
    ledger = Sleepy(site.folder, site.time)
    got = None
    with pytest.raises(NoCapacity) as told:
        got = site.launch(ledger, wall_clock=lambda: site.clock() + Sleepy.asleep)
    assert got is None
    assert creates(site) == 0
    assert "no job was created" in told.value.problem


def test_a_request_that_can_not_be_written_down_holds_nobody_up(site: Site) -> None:
    body = {**site.plan.attempts[0].request, "newField": 1}
    plan = replace(site.plan, attempts=(replace(site.plan.attempts[0], request=body),))
    with pytest.raises(LaunchError, match="newField"):
        site.launch(plan=plan)
    began = site.clock()
    assert site.launch().number == 2
    assert site.clock() - began < 3


def test_an_old_snapshot_is_read_again(site: Site) -> None:
    vertex = site.vertex
    find, looks = vertex.find, []

    def slow(*asked: Any, **options: Any) -> Any:
        looks.append(site.clock())
        found = find(*asked, **options)
        site.clock.advance(25 if len(looks) == 1 else 0)
        return found

    vertex.find = slow  # type: ignore[method-assign]  # one call is slow
    assert site.launch(vertex=vertex).created
    assert len(looks) == 2
    assert site.launch(vertex=vertex).number == 1


def test_usually_one_snapshot_is_enough(site: Site) -> None:
    site.launch()
    lists = [one for one in site.cloud.requests if one.method == "GET" and one.path.endswith("/customJobs")]
    assert len(lists) == 2, "one for each region"
    assert len(site.cloud.requests) <= 9, "names, jobs twice, plan, spec, plan, lock, create, job"


# --- The bucket -------------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there(site: Site) -> None:
    site.plan = plan_of(output="gs://not-there/runs")
    with pytest.raises(UsageError) as told:
        site.launch()
    assert told.value.hint == "gcloud storage buckets create gs://not-there --location=us-central1 --project=my-project"
    assert creates(site) == 0


def test_who_may_not_write_there_is_kept_apart_by_labels_alone(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Bucket("my-bucket", denied=frozenset({"storage.objects.create"}))
    with GoogleCloud(clock=clock, buckets=(mine,), script=LONG) as cloud:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
        site = Site(cloud, clock)
        first = site.launch()
        assert site.launch().job.name == first.job.name
        assert len(site.jobs) == 1
    assert sum("only the look-up of jobs by their label" in line for line in site.said) == 2, "once a command"


def test_a_bucket_that_goes_away_loses_no_job(site: Site) -> None:
    """The job is made, and can't be noted: its label says whose it is."""

    class Gone(Vertex):
        def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
            job = super().create_in(region, body)
            site.cloud.faults.add(Fault("storage.*", Status(503), times=None))
            return job

    got = site.launch(vertex=Gone("my-project", site.cloud.environ(), site.time))
    assert got.created
    assert any(f"{got.job.name} was created, but" in line for line in site.said)
    site.cloud.faults.clear()
    again = site.launch()
    assert (again.job.name, again.number) == (got.job.name, 1)
    assert site.ledger().entries()[0].job == got.job.name


def test_a_bucket_that_stays_away_lets_nothing_be_created(site: Site) -> None:
    site.cloud.faults.add(Fault("storage.*", Status(503), times=None))
    with pytest.raises(UnreachableError):
        site.launch()
    assert creates(site) == 0


def test_after_a_lost_response_another_snapshot_is_read(site: Site) -> None:
    """Attempt 1 lands just when attempt 2 is made: the one that an attempt is open for stays."""
    site.cloud.faults.add(Fault(CREATE, Reset()))

    class Late(Vertex):
        tries = 0

        def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
            self.tries += 1
            if self.tries == 2:
                super().create_in(region, body)
            return super().create_in(region, body)

    got = site.launch(vertex=Late("my-project", site.cloud.environ(), site.time))
    states = [state for _, state in site.jobs]
    assert sorted(states) == ["CANCELLING", "QUEUED"]
    assert site.vertex.get(got.job.name).state == "QUEUED"
    assert site.launch().job.name == got.job.name
