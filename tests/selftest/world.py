"""A loopback cloud in which jobs and VMs do what a selftest asks of them, on a clock of its own.

Training is played: when a job or VM runs, its metrics and lines are what the trainer writes (in
tests/e2e/test_selftest.py jobs really train). Images go to a registry on loopback, where a build by Cloud Build puts
its own.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launcher.cli.commands.selftest import kit_of
from launcher.clock import Clock
from launcher.images.registry import parse
from launcher.jobs.vm import of_instance
from launcher.selftest.kit import LABEL, PREFIX, Kit
from launcher.selftest.steps import BY_NAME, create_command
from launcher.testing.googlecloud import Bucket, FakeClock, GoogleCloud, Stage
from launcher.testing.googlecloud.compute.vms import Vm
from launcher.testing.googlecloud.images.cloud_build import Outcome, played
from tests.cli.cloudjobs import RUNS, WELL
from tests.command import WORLD, Ran, as_process, launch
from tests.registry import OciRegistry, put_image

Record = dict[str, Any]
BUILDING = (1, 2)
"""Build.Status: QUEUED, WORKING."""
UNTIL = 60
"""The last step of a long run before it is cancelled."""


class World:
    """The cloud, and what is played in it. `lives` are the lives of the jobs of a step ("gpu") in place of a good one;
    `steps` how many steps a run makes in place of those asked for."""

    def __init__(self, cloud: GoogleCloud, clock: FakeClock, registry: OciRegistry, folder: Path) -> None:
        self.cloud, self.clock, self.registry, self.folder = cloud, clock, registry, folder
        self.relay: Any = None
        self.lives: dict[str, tuple[Stage, ...]] = {}
        self.steps: dict[str, int] = {}
        self.lines = True
        self.watchdog = True
        """Whether a VM stops itself when its lease is over, or after its training."""
        self.resumes = True
        self.loss: Callable[[int, int], float] = lambda _attempt, step: 4.0 - step / 2000
        self.env = {
            **cloud.environ(),
            "DOCKER_CONFIG": "/nonexistent",
            "HOME": str(folder),
            "XDG_CONFIG_HOME": "",
            "GOOGLE_CLOUD_PROJECT": cloud.project,
        }
        self.attempts: Counter[str] = Counter()
        self._trained: set[str] = set()
        self._submit, cloud.jobs.submit = cloud.jobs.submit, self.submit  # type: ignore[method-assign]  # wraps the double's own
        cloud.builds.play = self.build

    @property
    def time(self) -> Clock:
        """The cloud's clock, by which its VMs live too."""
        return Clock(self.clock, self.sleep)

    @property
    def repository(self) -> str:
        """Where images are pushed."""
        return f"{self.registry.host}/p/r"

    def selftest(self, *argv: str) -> Ran:
        """`launch selftest` of the whole way, without a question."""
        return self.launch("--region", "us-central1", "--repository", self.repository, "--yes", *argv)

    def launch(self, *argv: str) -> Ran:
        """`launch selftest` in this process."""
        return launch("selftest", "--project", self.cloud.project, *argv, env=self.env, cwd=self.folder)

    @contextmanager
    def kit(self, *, bucket: bool = True, image: bool = True) -> Iterator[Kit]:
        """What steps work with, where a bucket and a dependency image are there already."""
        folder = self.folder / "specs"
        folder.mkdir()
        with as_process(["launch"], {**WORLD, **self.env}, self.folder):
            kit = kit_of(self.cloud.project, "us-central1", folder, self.repository, needs_region=True)
            if bucket:
                self.cloud.objects.add(kit.prefix, Bucket(kit.prefix, labels={LABEL: kit.id}))
            if image:
                planned = kit.launch(*create_command(kit, BY_NAME["gpu"]), "--dry-run").checked().data
                self.push(planned["image"]["dependencies"])
            yield kit

    def left(self) -> list[str]:
        """What of a selftest's is still in the cloud."""
        builds = self.cloud.builds
        active = [name for name in builds.builds if builds._shown(name).status in BUILDING]
        jobs = [job.message.display_name for job in self.cloud.jobs.jobs.values()]
        repositories = [name.rpartition("/")[2] for name in self.cloud.artifacts.repositories]
        named = [*jobs, *self.cloud.compute.names(), *self.cloud.objects.settings, *repositories]
        return [*active, *(name for name in named if name.startswith(PREFIX))]

    # --- Images -------------------------------------------------------------------------------------------------------

    def build(self, message: Any, source: bytes | None) -> Outcome:
        """Cloud Build's usual life, at whose end the image is in the registry."""
        for image in message.images:
            self.push(image)
        return played(message, source)

    def push(self, image: str) -> None:
        """A dependency image, under its tag."""
        target = parse(image)
        put_image(self.registry, target.repository, target.tag or "")

    # --- Jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, region: str, body: dict[str, Any]) -> Any:
        """A job that trains, if it has an image of ours."""
        env = {one["name"]: one["value"] for one in body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"]}
        step = step_of(body["displayName"])
        self.attempts[step] += 1
        attempt = self.attempts[step]
        is_first = step == "preempt" and attempt == 1
        self.cloud.jobs.script = self.lives.get(step) or (RUNS if is_first else WELL)
        job = self._submit(region, body)
        if self.cloud.runs:
            return job
        if self.cloud.jobs.script[-1].state in ("JOB_STATE_SUCCEEDED", "JOB_STATE_RUNNING"):
            self.train(env, step, attempt, until=UNTIL if is_first else None)
            if self.lines:
                self.cloud.logs.write(job.id, "workerpool0-0", f"step {steps_of(env)}/{steps_of(env)}  loss 2.0000")
        return job

    def train(self, env: dict[str, str], step: str, attempt: int, until: int | None = None) -> None:
        """The metrics of a run, or of its next attempt."""
        last = until or self.steps.get(step) or steps_of(env)
        first = UNTIL if attempt > 1 and self.resumes else 0
        rows: list[Record] = [{"event": "resumed", "step": first}] if first else []
        steps = range(first + 1, last + 1)
        rows += [{"step": number, "loss": self.loss(attempt, number), "time": self.clock()} for number in steps]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        bucket, _, folder = env[contract.RUN_FOLDER].removeprefix("gs://").partition("/")
        self.cloud.objects.put(bucket, f"{folder}/{runfolder.metrics_part(attempt, 0, 0, 0)}", text.encode())

    # --- VMs ----------------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Time passes, also for the VMs."""
        self.clock.advance(seconds)
        compute = self.cloud.compute
        with compute.lock:
            compute.life.settle()
            running = [vm for vm in compute.park.vms.values() if vm.status == "RUNNING"]
        for vm in running:
            self.live(vm)

    def live(self, vm: Vm) -> None:
        """What a VM's startup script does."""
        told = json.loads(vm.items["launch"])
        if told["kind"] == "work":
            self.cloud.compute.set_guest(vm.name, "launch/state", "ready")
            until = of_instance(vm.body, self.cloud.project).lease_until
            if until is not None and until < self.clock() and self.watchdog:
                self.cloud.compute.power_off(vm.name)
        elif vm.number not in self._trained and self.watchdog:
            self._trained.add(vm.number)
            folder = told["run_folder"]
            container = told.get("env") or told.get("container", {}).get("env", {})
            self.train({contract.RUN_FOLDER: folder, **container}, step_of(vm.name), 1)
            ended = {"exit": 0, "reason": "", "name": vm.name, "zone": vm.zone, "started": self.clock() - 60}
            bucket, _, path = folder.removeprefix("gs://").partition("/")
            record = json.dumps({**ended, "ended": self.clock()}).encode()
            self.cloud.objects.put(bucket, f"{path}/{runfolder.machine_end(vm.number)}", record)
            begun = self.cloud.compute.operations.begin("delete", vm.zone, vm.email, targetId=vm.number)
            self.cloud.compute.life.delete(vm, begun)


def steps_of(env: dict[str, str]) -> int:
    """How many a run is asked for."""
    return int(json.loads(env[contract.CONFIG])["steps"])


def step_of(name: str) -> str:
    """The selftest's step in `launch-selftest-0a1b2c-spot-vm-01234567`."""
    return "-".join(name.split("-")[3:]).removesuffix(f"-{name.rpartition('-')[2]}" if name.count("-") > 3 else "")


@contextmanager
def opened(folder: Path, **cloud_is: Any) -> Iterator[World]:
    """A world from `with` to its end."""
    clock = FakeClock(time.time())
    with ExitStack() as stack:
        cloud = stack.enter_context(GoogleCloud(clock=clock, **cloud_is))
        registry = stack.enter_context(OciRegistry())
        cloud.compute.zones.open_out("us-central1")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # The base is on Docker Hub, which no test asks.
        patch.setattr("launcher.images.pipeline.pinned_base", lambda image, *_: image)
        yield World(cloud, clock, registry, folder)
