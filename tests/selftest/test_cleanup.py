"""What a selftest leaves, and that nothing else is ever touched."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud import artifactregistry_v1

from launcher.selftest.cleanup import clean, stop
from launcher.selftest.kit import LABEL, Kit
from launcher.selftest.steps import argv
from tests.cli.cloudjobs import RUNS
from tests.cli.vms import body
from tests.googlecloud import Bucket, Fault, Status
from tests.googlecloud.artifactregistry import Made
from tests.googlecloud.cloudbuild import Outcome
from tests.selftest.world import World

REPOSITORIES = "projects/my-project/locations/us/repositories"


def others(world: World) -> None:
    """What belongs to somebody else, however like a selftest's it is called."""
    for name, labels in (("launch-selftest-mine", {}), ("other", {LABEL: "0a1b2c"}), ("launch-runs", {})):
        world.cloud.objects.add(name, Bucket(name, labels=labels))
        world.cloud.objects.put(name, "a", b"1")
    for name, labels in (("launch-selftest-vm", {"launch-run": "x"}), ("dev", {LABEL: "x"})):
        world.cloud.compute.put(body(name, "us-central1-a", labels=labels))
    for name in ("launch-selftest", "launch"):
        repository(world, name)
    plain = {"displayName": "launch-selftest-0a1b2c-cpu", "jobSpec": JOB}
    world._submit("us-central1", {**plain, "labels": {"launch-run": "launch-selftest-0a1b2c-cpu"}})
    world._submit("us-central1", {**plain, "labels": {"launch-run": "other", LABEL: "0a1b2c"}})


POOL = {
    "machineSpec": {"machineType": "n1-standard-4"},
    "replicaCount": "1",
    "containerSpec": {"imageUri": "us-docker.pkg.dev/my-project/launch/train:x"},
}
JOB = {"workerPoolSpecs": [POOL]}


def repository(world: World, name: str) -> None:
    message = artifactregistry_v1.Repository.pb()(name=f"{REPOSITORIES}/{name}", format_="DOCKER")
    world.cloud.artifacts.repositories[message.name] = Made(message, 0.0)


def everything(world: World) -> dict[str, Any]:
    """All that there is."""
    return {
        "buckets": {name: sorted(blobs) for name, blobs in world.cloud.objects.buckets.items()},
        "VMs": sorted(world.cloud.compute.names()),
        "repositories": sorted(world.cloud.artifacts.repositories),
        "jobs": sorted(job.id for job in world.cloud.jobs.jobs.values() if "CANCEL" not in str(job.stages)),
    }


def test_nothing_of_anybody_elses_is_touched(world: World) -> None:
    world.lives["cpu"] = RUNS
    with world.kit(bucket=False, image=False):
        pass
    world.cloud.jobs.script = RUNS
    others(world)
    before = everything(world)
    ran = world.launch("--clean", "--region", "us-central1")
    assert (ran.code, everything(world)) == (0, before)
    assert "removed" not in ran.err


def test_a_killed_one_leaves_nothing_that_clean_does_not_find(world: World) -> None:
    """In any region; its build, job, VM, repository and bucket."""
    others(world)
    before = everything(world)
    world.lives = {"cpu": RUNS, "gpu": RUNS}
    world.watchdog = False
    world.cloud.builds.play = lambda *_: Outcome((), 7200.0)
    with world.kit() as kit:
        for step in ("cpu", "gpu"):
            kit.must(*argv(kit, step), "--detach")
        kit.must("vm", *argv(kit, "spot-vm")[1:], "--detach")
        begin_build(kit)
        repository(world, kit.prefix)
    assert len(world.left()) > 6
    ran = world.launch("--clean")
    assert (ran.code, everything(world)) == (0, before), ran.err
    for what in ("job", "VM", "build", "repository", "bucket"):
        assert f"removed {what} " in ran.err
    assert "removed" not in world.launch("--clean").err


def begin_build(kit: Kit) -> None:
    source = {"storage_source": {"bucket": kit.prefix, "object_": "source/x.tgz"}}
    build = {"source": source, "steps": [{"name": "docker", "args": ["build"]}], "tags": ["launch"]}
    build |= {"logs_bucket": f"gs://{kit.prefix}/logs"}
    kit.cloud_build().once("create_build", parent=kit.builds_of, build=build)


def test_what_cannot_be_removed_keeps_nothing_else_alive(world: World) -> None:
    world.lives["cpu"] = RUNS
    with world.kit() as kit:
        kit.must(*argv(kit, "cpu"), "--detach")
        world.cloud.faults.add(Fault("aiplatform.*", Status(403), times=None))
        found = clean(kit, kit.prefix)
        assert found.removed == (f"bucket {kit.prefix}",)
        (problem,) = found.problems
        assert problem.startswith("jobs: Vertex AI: ")
        world.cloud.faults.clear()
        assert len(clean(kit, kit.prefix).removed) == 1
        assert world.left() == []


def test_a_region_that_cannot_be_read_is_told(world: World) -> None:
    """There may be a job in it; those in others are removed all the same."""
    world.lives["cpu"] = RUNS
    with world.kit() as kit:
        kit.must(*argv(kit, "cpu"), "--detach")
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
            kit.must(*argv(kit, step), "--detach")
        assert len(stop(kit, kit.name("cpu")).removed) == 1
        assert len(world.left()) == 2  # the other's job, and the bucket


@pytest.mark.parametrize("step", ["access", "bucket", "cpu", "preempt"])
def test_ctrl_c_in_a_step(world: World, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: everything is removed, the table and the bundle are there, and the exit code is 130."""
    from launcher.selftest import steps

    def interrupted(kit: Kit) -> str:
        steps.BY_NAME[step].check(kit)
        raise KeyboardInterrupt

    changed = tuple(one._replace(check=interrupted) if one.name == step else one for one in steps.ALL)
    monkeypatch.setattr(steps, "ALL", changed)
    ran = world.selftest("--only", "cpu,preempt")
    assert ran.code == 130
    assert world.left() == []
    shown = ran.out.splitlines()
    assert any(line.split()[:2] == ["–", step] and "interrupted" in line for line in shown)
    assert list(world.folder.glob("launch-selftest-*.zip"))
