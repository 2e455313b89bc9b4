"""Vertex AI's custom jobs on loopback, by Google's own client: over REST, and over gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.jobs.job import Failure
from launcher.services import vertex as module
from launcher.services.base import CreateRefused, GoneError
from launcher.services.vertex import Vertex, console_url, endpoint_of, job_of
from launcher.testing.googlecloud import (
    FakeClock,
    Fault,
    GoogleCloud,
    Meanwhile,
    Reset,
    Stage,
    Status,
    Torn,
    Truncated,
    parse_custom_job,
)
from tests.googlecloud.effects import PageGone
from tests.googlecloud.rpc import serve_grpc
from tests.plan.planning import request
from tests.runs.submitting import CANCEL, CREATE, GET, LIST, LONG

BODY = request()
RUN = BODY["labels"]["launch-run"]
MINE = f"labels.launch-run={RUN}"


@pytest.fixture
def time(clock: FakeClock) -> Clock:
    """The cloud's clock: waiting moves it."""
    return Clock(clock, clock.advance)


@pytest.fixture(params=["rest", "grpc"])
def vertex(request: pytest.FixtureRequest, cloud: GoogleCloud, time: Clock) -> Iterator[Vertex]:
    """The same tests for both ways to the service."""
    if request.param == "rest":
        yield Vertex("my-project", cloud.environ(), time)
        return
    with serve_grpc(cloud) as address, grpc.insecure_channel(address) as channel:
        yield Vertex("my-project", {}, time, channel)


def sent(cloud: GoogleCloud, method: str) -> int:
    return sum(one.method == method for one in cloud.requests)


def test_the_request_is_the_plans(cloud: GoogleCloud, vertex: Vertex) -> None:
    job = vertex.create_in("us-central1", BODY)
    [arrived] = cloud.requests
    assert arrived.path == "/v1/projects/my-project/locations/us-central1/customJobs"
    assert parse_custom_job(arrived.body) == parse_custom_job(BODY)
    assert (job.state, job.region, job.run, job.error, job.started) == ("QUEUED", "us-central1", RUN, None, None)
    assert job.created == 1_700_000_000
    assert parse_custom_job(dict(job.request)) == parse_custom_job(BODY)
    assert set(job.request) == {"displayName", "jobSpec", "labels"}
    assert vertex.get(job.name) == job


def test_the_vertex_logger_is_the_jobs_tensorboard_and_experiment(cloud: GoogleCloud, vertex: Vertex) -> None:
    board = "projects/my-project/locations/us-central1/tensorboards/1"
    body = request(
        run={"script": "a.py", "loggers": ["vertex"]},
        identity={"service_account": "trainer@my-project.iam.gserviceaccount.com"},
        vertex={"tensorboard": board, "experiment": "vision", "experiment_run": "first"},
    )
    job = parse_custom_job(dict(vertex.create_in("us-central1", body).request)).job_spec
    context = "projects/my-project/locations/us-central1/metadataStores/default/contexts/vision"
    assert (job.tensorboard, job.experiment, job.experiment_run) == (board, context, f"{context}-first")
    # Vertex AI reads the events in logs/ of this folder, where the run writes them.
    folder = next(one.value for one in job.worker_pool_specs[0].container_spec.env if one.name == "LAUNCH_RUN_FOLDER")
    assert job.base_output_directory.output_uri_prefix == folder


def test_a_job_says_how_it_went(cloud: GoogleCloud, vertex: Vertex, clock: FakeClock) -> None:
    cloud.jobs.script = (Stage("JOB_STATE_RUNNING", 1), Stage("JOB_STATE_FAILED", 3.5, (3, "it broke")))
    cloud.jobs.script = (Stage("JOB_STATE_PENDING", 0), *cloud.jobs.script)
    name = vertex.create_in("us-central1", BODY).name
    clock.advance(10)
    job = vertex.get(name)
    assert (job.state, job.error) == ("FAILED", Failure(code=3, message="it broke"))
    assert (job.started, job.ended) == (1_700_000_001, 1_700_000_003.5)


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 429])
def test_a_refusal_is_reported(cloud: GoogleCloud, vertex: Vertex, code: int) -> None:
    """Also 429: for a create it is a quota, and nothing is sent again."""
    cloud.faults.add(Fault(CREATE, Status(code, message="Google's words", info="WHY", metadata={"a": "b"})))
    with pytest.raises(CreateRefused) as told:
        vertex.create_in("us-central1", BODY)
    refusal = told.value.refusal
    assert (refusal.code, len(cloud.jobs.jobs)) == (code, 0)
    assert sent(cloud, "POST") == 1
    if "cannot be refreshed" in refusal.message:
        return  # google-auth tries to renew a token that was refused, and tells of that
    assert (refusal.message, refusal.reason) == ("Google's words", "WHY")
    assert (dict(refusal.metadata), refusal.service) == ({"a": "b"}, "aiplatform")


@pytest.mark.parametrize(
    "effect", [Status(500), Status(503), Status(504), Status(502), Reset(), Reset("after"), Truncated()]
)
def test_what_is_not_known_is_said_to_be(cloud: GoogleCloud, vertex: Vertex, effect: Any) -> None:
    cloud.faults.add(Fault(CREATE, effect))
    with pytest.raises(UnreachableError):
        vertex.create_in("us-central1", BODY)
    assert sent(cloud, "POST") == 1


def test_a_torn_answer_says_nothing(cloud: GoogleCloud, time: Clock) -> None:
    rest = Vertex("my-project", cloud.environ(), time)
    cloud.faults.add(Fault(CREATE, Torn(0)))
    with pytest.raises(UnreachableError):
        rest.create_in("us-central1", BODY)
    cloud.faults.add(Fault(LIST, Torn(0)))
    assert len(rest.find(MINE, ["us-central1"]).jobs) == 1, "asked again"


def test_an_answer_about_another_job_says_nothing(cloud: GoogleCloud, vertex: Vertex, monkeypatch: Any) -> None:
    def other(made: Any) -> Any:
        made = job_of(made)
        return type(made)(name=made.name, region=made.region, state="QUEUED", created=0.0, labels={"launch-run": "x"})

    monkeypatch.setattr(module, "job_of", other)
    with pytest.raises(UnreachableError, match="another job"):
        vertex.create_in("us-central1", BODY)


def test_a_request_that_the_client_does_not_know_is_not_sent(cloud: GoogleCloud, vertex: Vertex) -> None:
    with pytest.raises(LaunchError, match="newField"):
        vertex.create_in("us-central1", {**BODY, "newField": 1})
    assert not cloud.requests


def test_reading_is_tried_again(cloud: GoogleCloud, vertex: Vertex) -> None:
    cloud.jobs.script = LONG
    name = vertex.create_in("us-central1", BODY).name
    for operation in (GET, LIST, CANCEL):
        cloud.faults.add(Fault(operation, Status(503)))
        cloud.faults.add(Fault(operation, Reset()))
        cloud.faults.add(Fault(operation, Status(429)))
    assert vertex.get(name).name == name
    assert [job.name for job in vertex.find(MINE, ["us-central1"]).jobs] == [name]
    vertex.cancel(name)
    assert vertex.get(name).state in ("CANCELLING", "CANCELLED")
    assert sum(cloud.faults.used.values()) == 9


def test_a_lasting_outage_is_reported(cloud: GoogleCloud, vertex: Vertex, clock: FakeClock) -> None:
    cloud.faults.down(clock() + 3600, Status(503))
    with pytest.raises(UnreachableError):
        vertex.find(MINE, ["us-central1"])
    assert clock() <= 1_700_000_000 + 60


@pytest.mark.parametrize("ask", ["get", "cancel"])
def test_an_error_is_never_its_own_cause(cloud: GoogleCloud, vertex: Vertex, ask: str) -> None:
    """Whoever follows causes would never come to an end."""
    name = vertex.create_in("us-central1", BODY).name
    cloud.faults.add(Fault(GET if ask == "get" else CANCEL, Status(403), times=None))
    with pytest.raises(LaunchError) as refused:
        getattr(vertex, ask)(name)
    assert refused.value.__cause__ is not refused.value
    assert getattr(refused.value.__cause__, "code", 0) == 403


def test_a_deleted_job(cloud: GoogleCloud, vertex: Vertex) -> None:
    name = vertex.create_in("us-central1", BODY).name
    cloud.jobs.jobs.clear()
    with pytest.raises(GoneError):
        vertex.get(name)
    with pytest.raises(GoneError):
        vertex.cancel(name)
    with pytest.raises(LaunchError, match="not the name of a custom job"):
        vertex.get("projects/p/jobs/1")


def test_to_cancel_what_is_being_cancelled_is_fine(cloud: GoogleCloud, vertex: Vertex) -> None:
    """Two launches give the same job up."""
    name = vertex.create_in("us-central1", BODY).name
    vertex.cancel(name)
    cloud.faults.add(Fault(CANCEL, Status(400, message="It is being cancelled.")))
    vertex.cancel(name)


def test_to_cancel_what_has_ended_is_fine(cloud: GoogleCloud, vertex: Vertex, clock: FakeClock) -> None:
    name = vertex.create_in("us-central1", BODY).name
    cloud.faults.add(Fault(CANCEL, Status(400, message="the job is in a terminal state")))
    with pytest.raises(LaunchError, match="terminal state"):
        vertex.cancel(name)
    clock.advance(100)
    cloud.faults.add(Fault(CANCEL, Status(400, message="the job is in a terminal state")))
    vertex.cancel(name)
    assert vertex.get(name).state == "SUCCEEDED"


def test_all_regions_and_pages_the_newest_first(
    cloud: GoogleCloud, vertex: Vertex, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    made = []
    for number in range(7):
        made.append(vertex.create_in(("us-central1", "us-east5")[number % 2], BODY).name)
        clock.advance(1)
    vertex.create_in("us-central1", request(env={"A": "other"}))
    vertex.create_in("europe-west4", BODY)
    found = vertex.find(MINE, ["us-central1", "us-east5", "us-central1"])
    assert [job.name for job in found.jobs] == made[::-1]
    assert not found.unread


def test_pages_that_change_while_they_are_read(
    cloud: GoogleCloud, vertex: Vertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    names = {vertex.create_in("us-central1", BODY).name for _ in range(5)}
    cloud.faults.add(Fault(LIST, PageGone()))
    cloud.faults.add(Fault(LIST, Meanwhile(lambda: names.add(vertex.create_in("us-central1", BODY).name)), after=3))
    found = [job.name for job in vertex.find(MINE, ["us-central1"]).jobs]
    assert len(found) == len(set(found))
    assert names - set(found) <= {max(names)}, "none but the one that came later may be missing"


def test_a_page_size_that_is_refused_is_made_smaller(cloud: GoogleCloud, vertex: Vertex) -> None:
    for _ in range(3):
        vertex.create_in("us-central1", BODY)
    refused = Status(400, message="Request contains an invalid argument.")
    cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.list", refused, times=1))
    assert len(vertex.find(MINE, ["us-central1"]).jobs) == 3
    sizes = [one.query["pageSize"] for one in cloud.requests if one.method == "GET" and "pageSize" in one.query]
    assert sizes == ["1000", "100"]
    cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.list", refused, times=None))
    with pytest.raises(LaunchError, match="invalid argument"):
        vertex.find(MINE, ["us-central1"])


def test_a_token_that_goes_again_and_again(cloud: GoogleCloud, vertex: Vertex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 1)
    for _ in range(2):
        vertex.create_in("us-central1", BODY)
    cloud.faults.add(Fault(LIST, PageGone(), times=3))
    with pytest.raises(LaunchError, match="page token"):
        vertex.find(MINE, ["us-central1"])
    assert len(vertex.find(MINE, ["us-central1"]).jobs) == 2


def test_regions_that_can_not_be_read(cloud: GoogleCloud, time: Clock) -> None:
    rest = Vertex("my-project", cloud.environ(), time)
    name = rest.create_in("us-central1", BODY).name
    cloud.faults.add(Fault(LIST, Status(403, message="Permission denied."), times=None, name="us-east5"))
    found = rest.find(MINE, ["us-central1", "us-east5"], partly=True)
    assert ([job.name for job in found.jobs], set(found.unread)) == ([name], {"us-east5"})
    with pytest.raises(NotAuthorised, match="Permission denied"):
        rest.find(MINE, ["us-central1", "us-east5"])


def test_no_region_has_no_job(cloud: GoogleCloud, vertex: Vertex) -> None:
    assert vertex.find(MINE, []) == ((), {})
    assert not cloud.requests


def test_a_state_that_is_new(cloud: GoogleCloud, time: Clock) -> None:
    from google.cloud.aiplatform_v1 import CustomJob

    message = CustomJob.pb()()
    message.state = 99
    job = job_of(CustomJob.wrap(message))
    assert (job.state, job.has_ended) == ("STATE 99", False)


def test_wrong_project_and_no_credentials(cloud: GoogleCloud, time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotAuthorised, match="other-project"):
        Vertex("other-project", cloud.environ(), time).find(MINE, ["us-central1"])
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(NotAuthorised, match="no credentials for Vertex AI") as raised:
        Vertex("my-project", {"CLOUDSDK_CONFIG": "/nonexistent"}, time).find(MINE, ["us-central1"])
    assert max(map(len, f"error: {raised.value}".splitlines())) <= 80
    assert "gcloud auth application-default login" in raised.value.hint


@pytest.mark.parametrize(
    ("override", "endpoint"),
    [
        ("", "https://us-east5-aiplatform.googleapis.com"),
        ("http://127.0.0.1:80/", "http://127.0.0.1:80"),
        ("https://aiplatform.googleapis.com/", "https://us-east5-aiplatform.googleapis.com"),
        ("https://aiplatform.restricted.example/", "https://us-east5-aiplatform.restricted.example"),
        ("https://us-east5-aiplatform.p.googleapis.com/", "https://us-east5-aiplatform.p.googleapis.com"),
    ],
)
def test_the_endpoint_of_a_region(override: str, endpoint: str) -> None:
    assert endpoint_of("us-east5", {"CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": override}) == endpoint


def test_the_console_page(cloud: GoogleCloud, time: Clock) -> None:
    job = Vertex("my-project", cloud.environ(), time).create_in("us-east5", BODY)
    shape = r"https://console\.cloud\.google\.com/agent-platform/locations/us-east5/training/\d+\?project=123456789012"
    assert re.fullmatch(shape, console_url(job))


def test_retrying_is_reported_once(cloud: GoogleCloud, time: Clock, clock: FakeClock) -> None:
    said: list[str] = []
    vertex = Vertex("my-project", cloud.environ(), time, notice=said.append)
    cloud.faults.down(until=clock() + 20, effect=Status(503))
    assert vertex.find(MINE, ["us-central1", "us-east5"]).jobs == ()
    assert said == ["Vertex AI does not respond; retrying"]
