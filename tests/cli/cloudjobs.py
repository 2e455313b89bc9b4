"""A job's spec and the loopback cloud that it goes to, with lives for its jobs on a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.testing.googlecloud import GoogleCloud, Stage
from launcher.testing.googlecloud.compute.service import YOU
from tests.command import Ran, launch

QUEUED, PENDING, RUNNING = (
    Stage(f"JOB_STATE_{name}", after) for name, after in (("QUEUED", 0), ("PENDING", 5), ("RUNNING", 10))
)
WELL = (QUEUED, PENDING, RUNNING, Stage("JOB_STATE_SUCCEEDED", 30))
FAILED = (
    QUEUED,
    PENDING,
    RUNNING,
    Stage("JOB_STATE_FAILED", 30, (3, "The replica workerpool0-0 exited with a non-zero status of 1.")),
)
NO_ROOM = "Resources are insufficient in region: us-central1. Please try a different region."
FULL = (QUEUED, PENDING, Stage("JOB_STATE_FAILED", 20, (8, NO_ROOM)))
WAITS = (QUEUED, PENDING)
RUNS = (QUEUED, PENDING, RUNNING)
CREATE = "aiplatform.projects.locations.customJobs.create"


class Job:
    """A spec, and the cloud it goes to."""

    def __init__(self, folder: Path, cloud: GoogleCloud, image: str) -> None:
        self.folder, self.cloud, self.image = folder, cloud, image
        self.env = {**cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": YOU, "DOCKER_CONFIG": "/nonexistent"}
        self.write()

    def write(self, **changes: Any) -> None:
        spec = {
            "name": "job",
            "machine": {"type": "l4", "gpus": 2},
            "provisioning": ["standard", "spot"],
            "regions": ["us-central1", "us-east4"],
            "image": {"uri": self.image},
            "run": {"config": {"steps": 10}},
            "output": "gs://my-bucket/runs",
            **changes,
        }
        (self.folder / "job.yaml").write_text(json.dumps(spec))

    def launch(self, *argv: str, code: int = 0) -> Ran:
        ran = launch(*argv, env=self.env, cwd=self.folder)
        assert ran.code == code, ran.shown
        return ran

    def data(self, *argv: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.launch(*argv, "-o", "json", code=code).out)
        return found

    @property
    def created(self) -> list[Any]:
        """The creates that arrived: region and body."""
        asked = [one for one in self.cloud.requests if one.method == "POST" and one.path.endswith("/customJobs")]
        return [(one.path.split("/")[5], one.body) for one in asked]


def scripts(cloud: GoogleCloud, *lives: tuple[Stage, ...]) -> None:
    """The lives of the jobs to come, one after the other; the last goes on."""
    planned = list(lives)
    cloud.jobs.play = lambda region, message: planned.pop(0) if len(planned) > 1 else planned[0]
