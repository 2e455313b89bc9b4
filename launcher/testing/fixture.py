"""The fixture `google_cloud`: an environment in which `launcher.api` and Google's clients reach the loopback cloud.

FAILED and the other constants are simulated lives of jobs: states, each with its begin in seconds after the creation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from launch_train.common.contract import Exit
from launcher import api
from launcher.clock import Clock
from launcher.plan.model import Target
from launcher.testing.googlecloud import FakeClock, GoogleCloud, Stage
from launcher.testing.googlecloud.compute.service import YOU
from launcher.testing.googlecloud.protobufs import parse, to_json
from launcher.testing.registry import OciRegistry, put_image

if TYPE_CHECKING:
    from launcher.runs.run import OnEvent

BUCKET = re.compile(r"(?:gs://|/gcs/)([a-z0-9][a-z0-9_.-]*[a-z0-9])")
WAITING: Final = (Stage("JOB_STATE_QUEUED", 0), Stage("JOB_STATE_PENDING", 5))
RUNNING: Final = (*WAITING, Stage("JOB_STATE_RUNNING", 10))
SUCCEEDED: Final = (*RUNNING, Stage("JOB_STATE_SUCCEEDED", 30))


def _exited(code: int) -> tuple[Stage, ...]:
    # Vertex AI's message for a container that exits with a code other than 0.
    said = f"The replica workerpool0-0 exited with a non-zero status of {int(code)}."
    return (*RUNNING, Stage("JOB_STATE_FAILED", 30, (3, said)))


FAILED: Final = _exited(Exit.FAILED)
PREEMPTED: Final = _exited(Exit.PREEMPTED)
"""The container saved a checkpoint and exited with the code of a preemption (docs/reliability.md)."""
NO_CAPACITY: Final = (
    *WAITING,
    Stage(
        "JOB_STATE_FAILED",
        20,
        (8, "Resources are insufficient in region: us-central1. Please try a different region."),
    ),
)


class LoopbackCloud:
    """A project on loopback. Nothing leaves this machine, nothing costs, and waiting takes no time.

    Jobs don't run: each has the states that `next_jobs` planned for it, and by default it succeeds. The network default
    has Cloud NAT everywhere, as VMs without an external address need it. `google` is the cloud itself:
    `google.requests` has all that arrived, `google.faults` plans faults, `google.compute.capacity` limits VMs.
    """

    def __init__(self, google: GoogleCloud, registry: OciRegistry, clock: FakeClock) -> None:
        self.google, self.clock = google, clock
        self._registry = registry
        self._planned: list[tuple[Stage, ...]] = [SUCCEEDED]
        google.jobs.play = self._next_job
        for region, _ in [*google.compute.zones.subnetworks]:
            google.compute.zones.open_out(region)

    def next_jobs(self, *lives: tuple[Stage, ...]) -> None:
        """Plan the lives of the next jobs on Vertex AI, in order; the last is that of all later ones too."""
        self._planned = list(lives)

    def plan(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        target: Target = "vertex",
        changes: Mapping[str, Any] | None = None,
    ) -> api.Plan:
        """Plan `spec` as `launcher.api.plan` does, with an image of this cloud, and create the buckets that it names.

        The spec's image is replaced by one in the loopback registry, so nothing is built. All else is the spec's.
        Raises what `launcher.api.plan` raises.
        """
        plan = api.plan(spec, target=target, changes=changes)
        host, settings = self._registry.host, dict(changes or {})
        if (image := plan.data.image) and image.dependencies:
            plan = api.plan(spec, target=target, changes={**settings, "image.repository": f"{host}/job"})
            put_image(self._registry, "job/dependencies", image.dependencies.rpartition(":")[2])
        elif image:
            uri = f"{host}/job/train@{put_image(self._registry, 'job/train')}"
            plan = api.plan(spec, target=target, changes={**settings, "image.uri": uri})
        for bucket in BUCKET.findall(json.dumps([*plan.requests, plan.folder])):
            if bucket not in self.google.objects.settings:
                self.google.objects.add(bucket)
        return plan

    def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        target: Target = "vertex",
        changes: Mapping[str, Any] | None = None,
        on_event: OnEvent | None = None,
    ) -> api.Run:
        """Plan and submit `spec`, which needs no limit of its cost here. Raises what `launcher.api.plan` and
        `launcher.api.submit` raise."""
        return api.submit(self.plan(spec, target=target, changes=changes), yes=True, on_event=on_event)

    @property
    def job_requests(self) -> list[dict[str, Any]]:
        """Return the bodies of the create requests for Vertex AI jobs, in the order of their arrival, as a dry run has
        them: enums by name, which Google's client sends as numbers."""
        from google.cloud.aiplatform_v1 import CustomJob

        return [
            to_json(parse({**request.body}, CustomJob.pb()(), "custom_job"))
            for request in self.google.requests
            if request.method == "POST" and request.path.endswith("/customJobs") and isinstance(request.body, Mapping)
        ]

    def _next_job(self, region: str, message: object) -> tuple[Stage, ...]:
        return self._planned.pop(0) if len(self._planned) > 1 else self._planned[0]


@pytest.fixture
def google_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackCloud]:
    """Start a cloud, and point gcloud, Google's clients and launch to it for one test.

    The project is my-project, the account you@example.com. launch's own settings, gcloud's and Docker's are hidden, and
    prices are those shipped with launch.
    """
    clock = FakeClock()
    with GoogleCloud(clock=clock) as google, OciRegistry() as registry:
        world = {
            **google.environ(),
            "CLOUDSDK_CORE_ACCOUNT": YOU,
            "DOCKER_CONFIG": str(tmp_path / "docker"),
            "LAUNCH_OFFLINE": "1",
            "NO_GCE_CHECK": "true",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "no_proxy": "127.0.0.1",
        }
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.advance))
        yield LoopbackCloud(google, registry, clock)
