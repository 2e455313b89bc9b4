"""Repositories of Artifact Registry, made on loopback through Google's own client."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.gcp.api import Api, ApiDisabledError
from launcher.images.artifact_registry import SERVICE, client, create, listed, parse_repository
from launcher.testing.clock import FakeClock
from launcher.testing.googlecloud import Fault, GoogleCloud, Reset, Status
from launcher.testing.googlecloud.faults import Serve, Step
from launcher.testing.googlecloud.wire import Call, Response

REPOSITORY = "us-docker.pkg.dev/my-project/launch"
CREATE = "artifactregistry.projects.locations.repositories.create"
GET = "artifactregistry.projects.locations.repositories.get"


@pytest.fixture
def time(clock: FakeClock) -> Clock:
    """The cloud's clock: waiting moves it."""
    return Clock(clock, clock.advance)


def sent(cloud: GoogleCloud) -> list[str]:
    return [f"{request.method} {request.path.rpartition('/')[2]}" for request in cloud.requests]


def test_a_repository_is_made_once(cloud: GoogleCloud, time: Clock) -> None:
    assert create(f"{REPOSITORY}/train:0123", cloud.environ(), time) is True
    assert create(REPOSITORY, cloud.environ(), time) is False
    [(name, made)] = cloud.artifacts.repositories.items()
    assert name == "projects/my-project/locations/us/repositories/launch"
    assert made.message.format_ == 1  # DOCKER
    made_in_time = ["GET launch", "POST repositories", *["GET ar-1"] * 2]
    assert sent(cloud) == [*made_in_time, "GET launch"]


def test_labels_are_stored_and_listed(cloud: GoogleCloud, time: Clock) -> None:
    create(REPOSITORY, cloud.environ(), time, {"team": "red"})
    api = Api(SERVICE, "my-project", client(cloud.environ()), time)
    assert [(one.name.rpartition("/")[2], dict(one.labels)) for one in listed(api, "us")] == [
        ("launch", {"team": "red"})
    ]


def test_a_lost_answer_makes_no_second_one(cloud: GoogleCloud, time: Clock) -> None:
    cloud.faults.add(Fault(CREATE, Reset("after")))
    assert create(REPOSITORY, cloud.environ(), time) is True
    assert len(cloud.artifacts.repositories) == 1
    assert sent(cloud)[-1] == "GET launch", "it must be there when create returns"


@pytest.mark.parametrize("effect", [Reset(), Status(503), Status(429, retry_after=7)])
def test_transient_errors_are_retried(cloud: GoogleCloud, time: Clock, effect: Status | Reset) -> None:
    cloud.faults.add(Fault(GET, effect))
    cloud.faults.add(Fault(CREATE, effect))
    cloud.faults.add(Fault("artifactregistry.projects.locations.operations.get", effect))
    began = time.now()
    assert create(REPOSITORY, cloud.environ(), time) is True
    if effect == Status(429, retry_after=7):
        assert time.now() - began >= 14


def test_another_launch_created_it_first(cloud: GoogleCloud, time: Clock) -> None:
    create(REPOSITORY, cloud.environ(), time)
    cloud.faults.add(Fault(GET, Status(404), times=3))
    assert create(REPOSITORY, cloud.environ(), time) is False
    assert sent(cloud)[-5:] == ["GET launch", "POST repositories", *["GET launch"] * 3], "it is waited for"


def test_an_outage_ends_the_wait(cloud: GoogleCloud, time: Clock) -> None:
    cloud.faults.down(until=time.now() + 1000)
    with pytest.raises(LaunchError, match="Artifact Registry does not respond: "):
        create(REPOSITORY, cloud.environ(), time)
    assert time.now() < 1_700_000_000 + 61


REFUSALS = [
    (
        Status(403, message="Artifact Registry API has not been used …", info="SERVICE_DISABLED"),
        ApiDisabledError,
        "the Artifact Registry API is disabled in project my-project\n"
        "gcloud services enable artifactregistry.googleapis.com --project=my-project; then wait a minute",
    ),
    (
        Status(403, message="Permission 'artifactregistry.repositories.create' denied on resource …"),
        NotAuthorised,
        "Artifact Registry: Permission 'artifactregistry.repositories.create' denied on resource …\n"
        "gcloud projects add-iam-policy-binding my-project --member=user:YOU@EXAMPLE.COM "
        "--role=roles/artifactregistry.admin",
    ),
]


@pytest.mark.parametrize("operation", [GET, CREATE])
@pytest.mark.parametrize(("effect", "kind", "text"), REFUSALS)
def test_a_refusal_says_what_to_do(
    cloud: GoogleCloud, time: Clock, operation: str, effect: Status, kind: type[LaunchError], text: str
) -> None:
    cloud.faults.add(Fault(operation, effect))
    with pytest.raises(LaunchError) as raised:
        create(REPOSITORY, cloud.environ(), time)
    assert type(raised.value) is kind
    assert str(raised.value) == text


def test_credentials_that_are_not_accepted(cloud: GoogleCloud, time: Clock, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("ya29.old\n")
    environ = {**cloud.environ(), "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(tmp_path / "token")}
    for each in (environ, {**environ, "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": ""}):
        cloud.faults.add(Fault(GET, Status(401), times=1))
        with pytest.raises(NotAuthorised, match="gcloud auth application-default login"):
            create(REPOSITORY, each, time)
        cloud.faults.clear()


def test_the_token_travels(cloud: GoogleCloud, time: Clock, tmp_path: Path) -> None:
    environ = {**cloud.environ(), "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "", "CLOUDSDK_AUTH_ACCESS_TOKEN": "ya29.x"}
    kept: list[str] = []
    cloud.faults.add(Fault(GET, _Keep(kept)))
    create(REPOSITORY, environ, time)
    assert kept == ["Bearer ya29.x"]
    missing = {**environ, "CLOUDSDK_AUTH_ACCESS_TOKEN": "", "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(tmp_path / "none")}
    with pytest.raises(NotAuthorised, match="the access token can't be read from"):
        create(REPOSITORY, missing, time)


def test_another_project_and_a_wrong_location(cloud: GoogleCloud, time: Clock) -> None:
    with pytest.raises(NotAuthorised, match=r"Check that project not-mine exists"):
        create("us-docker.pkg.dev/not-mine/launch", cloud.environ(), time)
    with pytest.raises(UsageError, match=r"is us-central-1 one of its locations\?"):
        create("us-central-1-docker.pkg.dev/my-project/launch", cloud.environ(), time)


def test_a_repository_of_another_format_is_refused(cloud: GoogleCloud, time: Clock) -> None:
    create(REPOSITORY, cloud.environ(), time)
    cloud.artifacts.repositories["projects/my-project/locations/us/repositories/launch"].message.format_ = 5
    with pytest.raises(UsageError, match="holds APT packages, not containers"):
        create(REPOSITORY, cloud.environ(), time)


@pytest.mark.parametrize(
    "text", ["localhost:5000/launch", "gcr.io/p/launch", "us-docker.pkg.dev/p", "us-docker.pkg.dev/p/a", "x"]
)
def test_invalid_repository_names(text: str) -> None:
    with pytest.raises(UsageError, match=r"us-docker.pkg.dev/my-project/launch"):
        parse_repository(text)


@pytest.mark.gcloud
def test_gcloud_makes_and_shows_one_too(gcloud: str) -> None:
    with GoogleCloud() as cloud:  # on real time: gcloud waits for the operation
        cloud.artifacts.seconds = 0.5
        repositories = [gcloud, "artifacts", "repositories"]
        run(cloud, *repositories, "create", "launch", "--repository-format=docker", "--location=us")
        assert create(REPOSITORY, cloud.environ()) is False
        shown = json.loads(run(cloud, *repositories, "describe", "launch", "--location=us", "--format=json"))
        assert (shown["format"], shown["name"].rpartition("/")[2]) == ("DOCKER", "launch")


def run(cloud: GoogleCloud, *command: str) -> str:
    environ = {**os.environ, **cloud.environ()}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Keep:
    """No fault: the request's credentials are kept."""

    step: ClassVar[Step | None] = None

    def __init__(self, kept: list[str]) -> None:
        self.kept = kept

    def __call__(self, call: Call, serve: Serve) -> Response:
        self.kept.append(call.request.headers.get("authorization", ""))
        return serve(call.request)
