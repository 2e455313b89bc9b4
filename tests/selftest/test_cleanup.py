"""What a selftest leaves, and that nothing else is ever touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.cloud import artifactregistry_v1

from launcher.gcp.api import Api
from launcher.images import cloud_build
from launcher.images.artifact_registry import create
from launcher.selftest import steps
from launcher.selftest.cleanup import clean
from launcher.selftest.kit import LABEL, Kit
from launcher.selftest.steps import BY_NAME, create_command
from launcher.testing.googlecloud import Bucket, Fault, Status
from launcher.testing.googlecloud.images.artifact_registry import RepositoryRecord
from launcher.testing.googlecloud.images.cloud_build import Outcome
from tests.cli.cloudjobs import RUNS
from tests.cli.vms import body
from tests.selftest.world import BUILDING, World

REPOSITORIES = "projects/my-project/locations/us/repositories"


def others(world: World) -> None:
    """What belongs to somebody else, however like a selftest's it is called."""
    for name, labels in (("launch-selftest-mine", {}), ("other", {LABEL: "0a1b2c"}), ("launch-runs", {})):
        world.cloud.objects.add(name, Bucket(name, labels=labels))
        world.cloud.objects.put(name, "a", b"1")
    for name, labels in (("launch-selftest-vm", {"launch-run": "x"}), ("dev", {LABEL: "x"})):
        world.cloud.compute.put(body(name, "us-central1-a", labels=labels))
    for name, labels in (
        ("launch-selftest", {LABEL: "0a1b2c"}),
        ("launch", {LABEL: "0a1b2c"}),
        ("launch-selftest-images", {}),
        ("launch-selftest-0a1b2c", {}),
        ("launch-selftest-results", {LABEL: "x"}),
    ):
        repository(world, name, labels)
    begin_build(world, "launch-selftest-mine")
    plain = {"displayName": "launch-selftest-0a1b2c-cpu", "jobSpec": JOB}
    world._submit("us-central1", {**plain, "labels": {"launch-run": "launch-selftest-0a1b2c-cpu"}})
    world._submit("us-central1", {**plain, "labels": {"launch-run": "other", LABEL: "0a1b2c"}})


POOL = {
    "machineSpec": {"machineType": "n1-standard-4"},
    "replicaCount": "1",
    "containerSpec": {"imageUri": "us-docker.pkg.dev/my-project/launch/train:x"},
}
JOB = {"workerPoolSpecs": [POOL]}


def repository(world: World, name: str, labels: dict[str, str]) -> None:
    message = artifactregistry_v1.Repository.pb()(name=f"{REPOSITORIES}/{name}", format_="DOCKER", labels=labels)
    world.cloud.artifacts.repositories[message.name] = RepositoryRecord(message, 0.0)


def everything(world: World) -> dict[str, Any]:
    """All that there is."""
    return {
        "buckets": {name: sorted(blobs) for name, blobs in world.cloud.objects.buckets.items()},
        "VMs": sorted(world.cloud.compute.names()),
        "repositories": sorted(world.cloud.artifacts.repositories),
        "builds": sorted(
            name for name in world.cloud.builds.builds if world.cloud.builds._shown(name).status in BUILDING
        ),
        "jobs": sorted(job.id for job in world.cloud.jobs.jobs.values() if "CANCEL" not in str(job.stages)),
    }


def test_resources_of_others_are_not_touched(world: World) -> None:
    world.lives["cpu"] = RUNS
    with world.kit(bucket=False, image=False):
        pass
    world.cloud.jobs.script = RUNS
    others(world)
    before = everything(world)
    ran = world.launch("--clean", "--region", "us-central1")
    assert (ran.code, everything(world)) == (0, before)
    assert "removed" not in ran.err


@pytest.mark.slow
def test_a_killed_one_leaves_nothing_that_clean_does_not_find(world: World) -> None:
    """In any region; its build, job, VM, repository and bucket."""
    world.cloud.builds.play = lambda *_: Outcome((), 1e6)
    others(world)
    before = everything(world)
    world.lives = {"cpu": RUNS, "gpu": RUNS}
    world.watchdog = False
    world.env["CLOUDSDK_COMPUTE_REGION"] = "us-east4"  # where gcloud's default region is doesn't matter
    with world.kit() as kit:
        for step in ("cpu", "gpu"):
            kit.launch(*create_command(kit, BY_NAME[step]), "--detach").checked()
        kit.launch(*create_command(kit, BY_NAME["spot-vm"]), "--detach").checked()
        begin_build(world, kit.prefix)
        create(kit.images if not kit.repository else images(kit), kit.environ, kit.clock, {LABEL: kit.id})
    assert len(world.left()) > 6
    ran = world.launch("--clean")
    assert (ran.code, everything(world)) == (0, before), ran.err
    for what in ("job", "VM", "build", "repository", "bucket"):
        assert f"removed {what} " in ran.err
    assert "removed" not in world.launch("--clean").err


def images(kit: Kit) -> str:
    return replace(kit, repository="").images


def begin_build(world: World, bucket: str) -> None:
    source = {"storage_source": {"bucket": bucket, "object_": "source/x.tgz"}}
    build = {"source": source, "steps": [{"name": "docker", "args": ["build"]}], "tags": ["launch"]}
    api = Api(cloud_build.SERVICE, "my-project", cloud_build.client(world.cloud.environ()), world.time)
    build |= {"logs_bucket": f"gs://{bucket}/logs"}
    api.once("create_build", parent="projects/my-project/locations/global", build=build)


def test_one_that_cannot_be_removed_keeps_no_other_of_its_kind(world: World) -> None:
    """Jobs, VMs, repositories and buckets: each is tried by itself."""
    world.lives = {"cpu": RUNS, "once": RUNS, "preempt": RUNS}
    world.watchdog = False
    world.cloud.builds.play = lambda *_: Outcome((), 1e6)
    with world.kit() as kit:
        for step in ("cpu", "once", "preempt"):
            kit.launch(*create_command(kit, BY_NAME[step]), "--detach").checked()
        for name in ("a", "b", "c"):
            labels = {LABEL: kit.id, "launch-run": kit.name(name)}
            world.cloud.compute.put(body(kit.name(name), "us-central1-a", labels=labels))
            world.cloud.objects.add(kit.name(name), Bucket(kit.name(name), labels=labels))
            repository(world, kit.name(name), labels)
        begin_build(world, kit.prefix)
        numbers = {vm.name: vm.number for vm in world.cloud.compute.park.vms.values()}
        world.cloud.faults.add(Fault("compute.instances.delete", Status(403), name=numbers[kit.name("b")], times=None))
        world.cloud.faults.add(Fault("aiplatform.*.cancel", Status(403), times=4))
        for kind in ("storage.buckets", "artifactregistry.projects.locations.repositories"):
            world.cloud.faults.add(Fault(f"{kind}.delete", Status(403), name=kit.name("b"), times=None))
        found = clean(kit, kit.prefix)
        assert [one.partition(" ")[0] for one in found.removed].count("VM") == 2
        assert [one.partition(" ")[0] for one in found.removed].count("bucket") == 3
        assert [one.partition(" ")[0] for one in found.removed].count("repository") == 2
        assert [one.partition(" ")[0] for one in found.removed].count("build") == 1
        assert {problem.partition(": ")[0] for problem in found.problems} >= {
            f"{kind} {kit.name('b')}" for kind in ("VM", "bucket", "repository")
        }
        world.cloud.faults.clear()
        assert clean(kit, kit.prefix).problems == ()
        assert world.left() == []


def test_a_selftest_that_leaves_something_fails(world: World) -> None:
    world.cloud.faults.add(Fault("storage.buckets.delete", Status(403), times=None))
    ran = world.selftest("--only", "push")
    assert ran.code == 1, ran.shown
    assert "launch selftest --clean --project my-project" in ran.err
    assert "✗" not in ran.out


def test_a_region_that_cannot_be_read_is_told(world: World) -> None:
    """There may be a job in it; those in others are removed all the same."""
    world.lives["cpu"] = RUNS
    with world.kit() as kit:
        kit.launch(*create_command(kit, BY_NAME["cpu"]), "--detach").checked()
    name = "aiplatform.projects.locations.customJobs.list"
    world.cloud.faults.add(Fault(name, Status(403), name="us-east4", times=None))
    ran = world.launch("--clean")
    assert (ran.code, world.left()) == (1, []), ran.err
    assert "jobs: us-east4 can't be read" in ran.err


def test_an_error_that_nobody_foresaw_keeps_nothing_else_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AttributeError("find")

    with world.kit() as kit:
        monkeypatch.setattr(kit.vertex, "find", broken)
        assert clean(kit, kit.prefix) == ((f"bucket {kit.prefix}",), ("jobs: AttributeError: find",))


def test_after_a_failed_step_its_job_alone_is_removed(world: World) -> None:
    world.lives = {"cpu": RUNS, "once": RUNS}
    with world.kit() as kit:
        for step in ("cpu", "once"):
            kit.launch(*create_command(kit, BY_NAME[step]), "--detach").checked()
        assert len(clean(kit, kit.name("cpu"), machines_only=True).removed) == 1
        assert len(world.left()) == 2  # the other's job, and the bucket


@pytest.mark.slow
@pytest.mark.parametrize("step", ["access", "bucket", "cpu", "preempt"])
def test_ctrl_c_in_a_step(world: World, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: everything is removed, the table and the bundle are there, and the exit code is 130."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    last = steps.Command("doctor -o json", "interrupted", interrupted)
    changed = tuple(each._replace(commands=(*each.commands, last)) if each.name == step else each for each in steps.ALL)
    monkeypatch.setattr(steps, "ALL", changed)
    ran = world.selftest("--only", "cpu,preempt")
    assert ran.code == 130
    assert world.left() == []
    shown = ran.out.splitlines()
    assert any(line.split()[:2] == ["–", step] and "interrupted" in line for line in shown)
    assert list(world.folder.glob("launch-selftest-*.zip"))
