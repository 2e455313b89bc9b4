"""The dependency image by Cloud Build, on loopback, through Google's own client."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.cloud.devtools import cloudbuild_v1
from msgspec.structs import replace

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.images.cloud_build import Sent, build, build_request
from launcher.images.source_files import File, Source
from launcher.plan.model import Image
from launcher.testing.clock import FakeClock
from launcher.testing.googlecloud import Fault, GoogleCloud, Reset, Status
from launcher.testing.googlecloud.images.cloud_build import Outcome
from launcher.testing.googlecloud.protobufs import parse, to_json
from launcher.testing.googlecloud.storage import objects as cloud_objects
from tests.plan.planning import planned

CONTAINERS = Path(__file__).parents[2] / "containers"
CREATE, GET, LIST = (f"cloudbuild.projects.locations.builds.{verb}" for verb in ("create", "get", "list"))
BUCKET = "my-project-launch"
IMAGE = Image(
    uri="us-docker.pkg.dev/my-project/launch/train:0123",
    pinned=False,
    dependencies="us-docker.pkg.dev/my-project/launch/dependencies:4567",
    base="docker.io/library/python:3.12-slim-bookworm",
    platform="linux/amd64",
    wheel="cu126",
    min_driver=None,
)
SENT = Sent("source/89.tgz", "7")
TAG = "launch-bf644ac1cec2e858"


@pytest.fixture
def cloud(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    with GoogleCloud(clock=clock, buckets=(BUCKET,)) as running:
        for name, value in running.environ().items():
            monkeypatch.setenv(name, value)  # Cloud Storage's client takes them from there
        yield running


@dataclass
class Launch:
    """One `launch` on the cloud's clock, and what it says."""

    clock: FakeClock
    source: Source
    said: list[str] = field(default_factory=list)
    interrupted_at: str = ""

    def build(self, image: Image = IMAGE, bucket: str = "") -> str:
        return build(
            self.source,
            image,
            project="my-project",
            environ=os.environ,
            bucket=bucket,
            on_line=self.on_line,
            clock=Clock(self.clock, self.clock.advance),
        )

    def on_line(self, line: str) -> None:
        self.said.append(line)
        if self.interrupted_at and self.interrupted_at in line:
            raise KeyboardInterrupt


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "code.py").write_text("print()\n")
    recipe = tuple(File(path.name, path) for path in CONTAINERS.iterdir() if path.is_file())
    code = tmp_path / "code.py"
    return Source(recipe, (File("train/launch_train/node/__main__.py", code),), (File("code.py", code),))


@pytest.fixture
def launch(clock: FakeClock, source: Source) -> Launch:
    return Launch(clock, source)


def sent(cloud: GoogleCloud, method: str, path: str) -> list[Any]:
    return [one.body for one in cloud.requests if one.method == method and one.path.endswith(path)]


def test_an_image_is_built_and_its_log_passed_on(cloud: GoogleCloud, launch: Launch) -> None:
    digest = launch.build()
    [made] = cloud.builds.builds.values()
    shown = cloud.builds._shown(made.message.id)
    assert digest == shown.results.images[0].digest
    begun, *told = launch.said[1:]
    assert begun == f"Cloud Build {made.message.id}: {made.message.log_url}"
    states = [f"Cloud Build {made.message.id}: {state}" for state in ("queued", "working", "success")]
    assert told == [*states[:2], "Step 1/9 : ARG BASE", "Step 2/9 : FROM python", "DONE", states[2]]


def test_the_context_is_sent_once_without_the_code(cloud: GoogleCloud, launch: Launch) -> None:
    launch.build()
    launch.build(replace(IMAGE, base="docker.io/library/python:3.13"))
    sources = [name for name in cloud.objects.buckets[BUCKET] if name.startswith("source/")]
    assert len(sources) == 1
    assert len([line for line in launch.said if line == f"gs://{BUCKET}/{sources[0]} exists already"]) == 1
    with tarfile.open(fileobj=io.BytesIO(cloud.objects.buckets[BUCKET][sources[0]].data), mode="r:gz") as tar:
        names = set(tar.getnames())
    assert {"train.Dockerfile", "requirements.lock", "requirements.txt"} <= names
    assert not [name for name in names if name.endswith(("code.py", "node.py"))]


def test_the_dockerfile_of_the_request_has_the_setup_lines(cloud: GoogleCloud, launch: Launch) -> None:
    lines = ("apt-get install -y tini", "printf '%s' \"$HOME\" '$$' >note.txt")
    image = planned(image={"setup": lines}).image
    assert image
    launch.source = replace(launch.source, dockerfile=str(image.dockerfile))
    launch.build(image)
    [made] = cloud.builds.builds.values()
    (file,) = (arg.partition("=")[2] for arg in made.message.steps[0].args if arg.startswith("--file="))
    stored = cloud.objects.buckets[BUCKET][made.message.source.storage_source.object_]
    with tarfile.open(fileobj=io.BytesIO(stored.data), mode="r:gz") as tar:
        text = (tar.extractfile(file) or io.BytesIO()).read().decode()
    assert [text.count(f"sh -c {shlex.quote(line)}") for line in lines] == [2, 1], (
        "apt before the packages are built too"
    )


@pytest.mark.parametrize("same_size", [True, False])
def test_a_planted_source_is_not_built(cloud: GoogleCloud, launch: Launch, same_size: bool) -> None:
    """Its name is no secret, and others can write to the bucket."""
    launch.build()
    [name] = [name for name in cloud.objects.buckets[BUCKET] if name.startswith("source/")]
    ours = cloud.objects.buckets[BUCKET][name]
    cloud.objects.put(BUCKET, name, b"x" * (len(ours.data) if same_size else 10))
    launch.build(replace(IMAGE, base="docker.io/library/python:3.13"))
    now = cloud.objects.buckets[BUCKET][name]
    assert (now.data, now.generation > ours.generation) == (ours.data, True)
    generations = [made.message.source.storage_source.generation for made in cloud.builds.builds.values()]
    assert generations == [ours.generation, now.generation]


def test_equal_checksums_are_not_enough(cloud: GoogleCloud, launch: Launch) -> None:
    """Anybody can make bytes of a given length and CRC32C."""
    launch.build()
    [name] = [name for name in cloud.objects.buckets[BUCKET] if name.startswith("source/")]
    ours = cloud.objects.buckets[BUCKET][name]
    other = cloud_objects.draft(name, b"x" * len(ours.data), {})
    cloud.objects.buckets[BUCKET][name] = dataclasses.replace(other, crc=ours.crc, generation=ours.generation + 1)
    launch.build()
    assert cloud.objects.buckets[BUCKET][name].data == ours.data


def test_a_source_that_is_changed_before_the_build_fetches_it(
    cloud: GoogleCloud, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build fails rather than to take it."""
    create = cloud.builds._source

    def late(message: Any) -> bytes | None:
        where = message.source.storage_source
        cloud.objects.put(where.bucket, where.object_, b"planted")
        return create(message)

    monkeypatch.setattr(cloud.builds, "_source", late)
    with pytest.raises(LaunchError, match="ended as FAILURE"):
        launch.build()


def test_a_bucket_of_somebody_elses_gets_no_source(cloud: GoogleCloud, launch: Launch) -> None:
    known = cloud.objects.settings[BUCKET]
    cloud.objects.settings[BUCKET] = dataclasses.replace(known, project_number="999")
    with pytest.raises(NotAuthorised, match=BUCKET) as raised:
        launch.build()
    assert "--builder docker" in raised.value.hint
    assert not cloud.objects.buckets[BUCKET]
    assert not cloud.builds.builds


def test_the_request() -> None:
    assert build_request(IMAGE, f"gs://{BUCKET}", SENT) == {
        "source": {"storageSource": {"bucket": "my-project-launch", "object": "source/89.tgz", "generation": "7"}},
        "steps": [
            {
                "id": "dependencies",
                "name": "gcr.io/cloud-builders/docker",
                "args": [
                    "build",
                    "--file=train.Dockerfile",
                    "--target=dependencies",
                    "--tag=us-docker.pkg.dev/my-project/launch/dependencies:4567",
                    "--build-arg=BASE=docker.io/library/python:3.12-slim-bookworm",
                    "--build-arg=WHEEL=cu126",
                    ".",
                ],
            }
        ],
        "images": ["us-docker.pkg.dev/my-project/launch/dependencies:4567"],
        "timeout": "7200s",
        "tags": ["launch", TAG],
        "logsBucket": "gs://my-project-launch/logs/cloud-build",
        "options": {"logging": "GCS_ONLY"},
    }


def test_a_dollar_is_escaped() -> None:
    request = build_request(replace(IMAGE, base="localhost/$BASE"), f"gs://{BUCKET}", SENT)
    assert "--build-arg=BASE=localhost/$$BASE" in request["steps"][0]["args"], "Cloud Build would substitute $BASE"


@pytest.mark.parametrize(("when", "tries"), [("before", 2), ("after", 1)])
def test_a_lost_answer_starts_no_second_build(cloud: GoogleCloud, launch: Launch, when: Any, tries: int) -> None:
    cloud.faults.add(Fault(CREATE, Reset(when)))
    launch.build()
    assert len(cloud.builds.builds) == 1
    assert len(sent(cloud, "POST", "/builds")) == tries


def test_an_earlier_build_is_not_taken_for_the_lost_one(cloud: GoogleCloud, launch: Launch) -> None:
    first = launch.build()
    cloud.faults.add(Fault(CREATE, Reset("before")))
    assert launch.build() != first
    assert len(cloud.builds.builds) == 2


def test_a_create_that_always_fails_ends(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault(CREATE, Status(503), times=None))
    with pytest.raises(LaunchError, match="Cloud Build: We encountered an internal error"):
        launch.build()
    assert len(sent(cloud, "POST", "/builds")) == 3


def test_a_build_that_runs_is_followed(cloud: GoogleCloud, launch: Launch, clock: FakeClock, source: Source) -> None:
    digests: list[str] = []
    other = Launch(clock, source)

    def meanwhile(line: str) -> None:
        if line.endswith(": working"):
            digests.append(other.build())

    launch.on_line = meanwhile  # type: ignore[method-assign]  # called between two polls
    assert [launch.build()] == digests
    assert len(cloud.builds.builds) == 1
    assert any("(of another launch)" in line for line in other.said)


def test_ctrl_c_cancels_our_build_alone(cloud: GoogleCloud, launch: Launch, clock: FakeClock, source: Source) -> None:
    other = Launch(clock, source, interrupted_at="Step 1/9")

    def meanwhile(line: str) -> None:
        launch.said.append(line)
        if line.endswith(": working"):
            with pytest.raises(KeyboardInterrupt):
                other.build()
            assert "continues; another launch started it" in other.said[-1]
            raise KeyboardInterrupt

    launch.on_line = meanwhile  # type: ignore[method-assign]  # as above
    with pytest.raises(KeyboardInterrupt):
        launch.build()
    [build_id] = cloud.builds.builds
    assert launch.said[-1] == f"cancelled Cloud Build {build_id}"
    assert cloud.builds._shown(build_id).status == 7  # CANCELLED


def test_ctrl_c_while_it_is_submitted(cloud: GoogleCloud, launch: Launch, clock: FakeClock) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    cloud.faults.add(Fault(CREATE, Reset("before")))
    with pytest.raises(KeyboardInterrupt):
        build(
            launch.source,
            IMAGE,
            project="my-project",
            environ=os.environ,
            on_line=launch.on_line,
            clock=Clock(clock, interrupt),
        )
    assert f"gcloud builds list --filter=tags={TAG}" in launch.said[-1]


def failing(status: str, *lines: str, detail: str = "") -> Callable[[Any, bytes | None], Outcome]:
    return lambda _message, _source: Outcome(((3.0, "".join(f"{line}\n" for line in lines)),), 5.0, status, detail)


def test_a_failure_tells_the_step_and_the_last_lines(cloud: GoogleCloud, launch: Launch) -> None:
    lines = [f"line {n}" for n in range(100)]
    cloud.builds.play = failing("FAILURE", *lines, "ERROR: No matching distribution found for x", detail="exit code 1")
    with pytest.raises(LaunchError) as raised:
        launch.build()
    [build_id] = cloud.builds.builds
    told = raised.value.problem.splitlines()
    assert told[0] == f"Cloud Build {build_id} ended as FAILURE in step dependencies: exit code 1"
    assert told[1:] == [f"    {line}" for line in (*lines[-24:], "ERROR: No matching distribution found for x")]
    assert raised.value.hint == f"Full log: {cloud.builds.builds[build_id].message.log_url}"


def test_a_push_that_is_denied_names_the_account(cloud: GoogleCloud, launch: Launch) -> None:
    denied = 'denied: Permission "artifactregistry.repositories.uploadArtifacts" denied on resource "…"'
    cloud.builds.play = failing("FAILURE", denied)
    with pytest.raises(LaunchError) as raised:
        launch.build()
    assert raised.value.hint.splitlines()[0] == (
        "gcloud projects add-iam-policy-binding my-project --member=serviceAccount:"
        "123456789012-compute@developer.gserviceaccount.com --role=roles/artifactregistry.writer"
    )


@pytest.mark.parametrize("status", ["TIMEOUT", "INTERNAL_ERROR", "CANCELLED", "EXPIRED"])
def test_every_other_end_is_a_failure(cloud: GoogleCloud, launch: Launch, status: str) -> None:
    cloud.builds.play = failing(status)
    with pytest.raises(LaunchError, match=f"ended as {status} in step dependencies"):
        launch.build()


def test_a_success_without_the_image(cloud: GoogleCloud, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.testing.googlecloud.images.cloud_build.end", lambda *_: None)
    with pytest.raises(LaunchError, match="succeeded without the image us-docker"):
        launch.build()


def test_what_passes_does_not_end_the_watch(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault(LIST, Status(429, retry_after=2)))
    cloud.faults.add(Fault(GET, Status(503), times=3))
    cloud.faults.add(Fault(GET, Reset(), after=1))
    assert launch.build().startswith("sha256:")


def test_an_outage_says_that_the_build_goes_on(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault(GET, Reset(), times=None))
    with pytest.raises(LaunchError, match=r"Cloud Build 0+1-\S+ is still running\nRepeat the command"):
        launch.build()


def test_a_log_that_can_not_be_read_is_said_once(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault("storage.objects.get", Status(403), name="log-", times=None))
    assert launch.build().startswith("sha256:")
    assert len([line for line in launch.said if "the build's log can't be read" in line]) == 1


def test_no_line_is_told_twice(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault("storage.objects.get", Status(404), name="log-", after=2))
    launch.build()
    assert len([line for line in launch.said if line == "Step 1/9 : ARG BASE"]) == 1
    assert len(cloud.faults.used) == 1


def test_no_bucket(clock: FakeClock, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    with GoogleCloud(clock=clock) as cloud:
        for name, value in cloud.environ().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            LaunchError, match=r"(?s)gcloud storage buckets create gs://my-project-launch .*output:.*--builder docker"
        ):
            launch.build()
        assert not cloud.builds.builds


def test_the_api_is_disabled(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault(LIST, Status(403, message="…", info="SERVICE_DISABLED")))
    with pytest.raises(LaunchError, match=r"gcloud services enable cloudbuild.googleapis.com --project=my-project"):
        launch.build()


def test_acting_as_an_account(cloud: GoogleCloud, launch: Launch) -> None:
    said = "caller does not have permission to act as service account projects/my-project/serviceAccounts/b@c"
    cloud.faults.add(Fault(CREATE, Status(403, message=said)))
    with pytest.raises(NotAuthorised, match=r"--role=roles/iam\.serviceAccountUser"):
        launch.build()


def test_arm_is_refused_before_anything_is_sent(cloud: GoogleCloud, launch: Launch) -> None:
    with pytest.raises(UsageError, match="the image is for linux/arm64"):
        launch.build(replace(IMAGE, platform="linux/arm64"))
    assert not cloud.requests


@pytest.mark.gcloud
def test_gcloud_submits_the_same_request(gcloud: str, cloud: GoogleCloud, launch: Launch, tmp_path: Path) -> None:
    """But for the source, which gcloud would copy: it takes the rest from a file, and refuses what it doesn't know."""
    image = replace(IMAGE, base="localhost/$BASE")
    launch.build(image)
    request = build_request(image, f"gs://{BUCKET}", SENT)
    file = tmp_path / "cloudbuild.json"
    file.write_text(json.dumps({name: value for name, value in request.items() if name != "source"}))
    run(gcloud, "builds", "submit", "--no-source", "--async", f"--config={file}")
    ours, gclouds = (parse(body, cloudbuild_v1.Build.pb()(), "build") for body in sent(cloud, "POST", "/builds"))
    ours.ClearField("source")
    assert to_json(gclouds) == to_json(ours)


@pytest.mark.gcloud
def test_gcloud_sees_the_build_and_its_tag(gcloud: str, cloud: GoogleCloud, launch: Launch) -> None:
    digest = launch.build()
    [build_id] = cloud.builds.builds
    shown = json.loads(run(gcloud, "builds", "describe", build_id, "--format=json"))
    assert (shown["status"], shown["results"]["images"][0]["digest"]) == ("SUCCESS", digest)
    listed = json.loads(run(gcloud, "builds", "list", f"--filter=tags={TAG}", "--format=json"))
    assert [one["id"] for one in listed] == [build_id]
    assert json.loads(run(gcloud, "builds", "list", "--filter=tags=other", "--format=json")) == []


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("host", "endpoint"), [("ghcr.io", None), ("localhost:5000", "https://example.com/")])
def test_a_registry_that_is_not_googles_is_refused_before_anything_is_sent(
    cloud: GoogleCloud, launch: Launch, monkeypatch: pytest.MonkeyPatch, host: str, endpoint: str | None
) -> None:
    """One on this machine is for a Cloud Build that is played on this machine."""
    if endpoint:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBUILD", endpoint)
    with pytest.raises(UsageError, match=f"Cloud Build can't push to {host}"):
        launch.build(replace(IMAGE, dependencies=f"{host}/launch/dependencies:4567"))
    assert not cloud.requests


def test_the_source_may_lie_in_another_bucket(cloud: GoogleCloud, launch: Launch) -> None:
    """That of the spec's output: nobody needs the project's own then."""
    cloud.objects.add("other")
    launch.build(bucket="gs://other")
    assert not cloud.objects.buckets[BUCKET]
    assert {name.partition("/")[0] for name in cloud.objects.buckets["other"]} == {"logs", "source"}


def test_a_token_that_ends_before_the_build_does(cloud: GoogleCloud, launch: Launch) -> None:
    cloud.faults.add(Fault(GET, Status(401), after=1, times=None))
    with pytest.raises(NotAuthorised, match=r"Cloud Build 0+1-\S+ is still running") as raised:
        launch.build()
    assert raised.value.hint.startswith("gcloud auth application-default login")
    assert raised.value.hint.endswith("it continues to follow the same build.")


def test_code_that_was_hashed_does_not_travel(cloud: GoogleCloud, launch: Launch) -> None:
    """As it comes from a spec with code of its own: its digest is of files that aren't in the context."""
    launch.source = replace(launch.source, digest="0" * 64)
    launch.build()
    assert [made.outcome.status for made in cloud.builds.builds.values()] == ["SUCCESS"]
