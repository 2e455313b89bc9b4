"""Each step against the loopback cloud: it passes, and its check is seen to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from launcher.selftest import steps
from launcher.selftest.cleanup import clean
from launcher.selftest.kit import LABEL, Kit
from launcher.selftest.steps import ALL, BY_NAME, GROUPS, chosen
from launcher.testing.googlecloud import Fault, Status
from launcher.testing.googlecloud.images.cloud_build import Outcome
from launcher.testing.googlecloud.project.billing import sku
from tests.cli.cloudjobs import FAILED, FULL
from tests.cli.vms import body
from tests.registry import Fault as RegistryFault
from tests.registry import Refuse
from tests.selftest.world import World


class Red(NamedTuple):
    """What is wrong with the cloud, and what a step says of it. `ok`: None where it is no fault of launch's."""

    step: str
    breaks: Callable[[World, Kit], object]
    why: str
    ok: bool | None = False


def twin(world: World, kit: Kit) -> None:
    """Each create makes two jobs."""
    submit = world.cloud.jobs.submit

    def twice(region: str, request: dict[str, object]) -> object:
        submit(region, request)
        return submit(region, request)

    world.cloud.jobs.submit = twice  # type: ignore[method-assign, assignment]


def replace_price(world: World, description: str, usd: float) -> None:
    rows = world.cloud.billing.rows
    rows[:] = [sku(description, usd) if row["description"] == description else row for row in rows]


def no_vm(world: World, kit: Kit) -> None:
    world.watchdog = False
    world.cloud.compute.put(body(kit.name("vm"), "us-central1-a", labels={LABEL: kit.id, "launch-run": kit.name("vm")}))
    world.clock.advance(60)


REDS = (
    Red("access", lambda world, _: world.cloud.projects.denied.add("compute.instances.create"), "compute.instances.c"),
    Red(
        "access",
        lambda world, _: world.cloud.services.disabled.add("logging.googleapis.com"),
        "disabled: logging.googleapis.com",
    ),
    Red("tables", lambda world, _: world.cloud.compute.zones.families.clear(), "image family pytorch"),
    Red(
        "tables",
        lambda world, _: world.cloud.faults.add(Fault("compute.machineTypes.get", Status(404), times=None)),
        "machine type g2-standard-4 is not available in us-central1-",
    ),
    Red(
        "prices",
        lambda world, _: replace_price(world, "Nvidia L4 GPU running in Americas", 0.6),
        "standard $0.7468/h, shipped $0.70",
    ),
    Red("prices", lambda world, _: world.cloud.billing.rows.clear(), "Google's list has no"),
    Red(
        "prices",
        lambda world, _: world.cloud.faults.add(Fault("cloudbilling.*", Status(403, info="SERVICE_DISABLED"))),
        "not tried: the Cloud Billing API is disabled",
        ok=None,
    ),
    Red("bucket", lambda world, _: world.cloud.faults.add(Fault("storage.buckets.insert", Status(403))), "Forbidden"),
    Red(
        "build",
        lambda world, _: setattr(
            world.cloud.builds, "play", lambda *_: Outcome(((1.0, "no space left\n"),), 2.0, "FAILURE")
        ),
        "ended as FAILURE",
    ),
    Red(
        "append",
        lambda world, _: world.registry.faults.add(RegistryFault("manifest.put", Refuse(403), times=None)),
        "403",
    ),
    Red("cpu", lambda world, _: world.lives.update(cpu=FAILED), "exit code 3"),
    Red("cpu", lambda world, _: world.steps.update(cpu=19), "expected metrics of steps 1 to 20, not 19 rows"),
    Red(
        "logs",
        lambda world, _: setattr(world, "lines", False),
        "after 5 min: expected the line of the last step, not []",
    ),
    Red("once", twin, "expected "),  # which of its two commands sees the second job is a matter of time
    Red("preempt", lambda world, _: setattr(world, "resumes", False), "from step 0"),
    Red(
        "preempt",
        lambda world, _: setattr(world, "loss", lambda attempt, step: 2.0 * attempt),
        "the loss is 2.000 before step 60 and 4.000 after it",
    ),
    Red("preempt", lambda world, _: world.lives.update(preempt=FAILED), "expected step 40 reached, not FAILED"),
    Red("gpu", lambda world, _: world.lives.update(gpu=FAILED), "exit code 3"),
    Red("gpu", lambda world, _: world.lives.update(gpu=FULL), "no capacity", ok=None),
    Red("lease", no_vm, "after 15 min: expected stopped, not RUNNING"),
    Red(
        "spot-vm", lambda world, _: world.steps.update({"spot-vm": 7}), "expected metrics of steps 1 to 20, not 7 rows"
    ),
    Red("spot-vm", lambda world, _: world.cloud.compute.capacity.out("*"), "no capacity", ok=None),
)
BEFORE = {"append": ("build",), "logs": ("cpu",)}
"""Steps that leave something that another needs, and that pass before the cloud breaks."""
BROKEN_BEFORE = ("logs",)
"""Those whose fault happens in the step before."""


@pytest.mark.slow
def test_a_good_project(world: World) -> None:
    ran = world.selftest("--only", "push,cpu,preempt,vertex")
    assert ran.code == 0, ran.shown
    marks = [line[0] for line in ran.out.splitlines() if line[0] != " "]
    assert marks == ["✓"] * 11
    assert max(map(len, ran.out.splitlines())) <= 80
    assert world.left() == []
    assert "my-bucket" in world.cloud.objects.settings


@pytest.mark.slow
@pytest.mark.parametrize("red", REDS, ids=[f"{one.step}: {one.why}"[:40] for one in REDS])
def test_a_step_is_seen_to_fail(world: World, red: Red) -> None:
    """It says why, what needs it isn't run, and nothing that it made costs anything afterwards."""
    with world.kit(bucket=red.step != "bucket", image=red.step not in ("build", "append")) as kit:
        outcomes: list[steps.Outcome] = []
        before = [BY_NAME[name]._replace(needs=()) for name in BEFORE.get(red.step, ())]
        if red.step in BROKEN_BEFORE:
            red.breaks(world, kit)
        steps.run_steps(kit, before, outcomes, lambda _step: None)
        assert all(one.ok for one in outcomes), outcomes
        if red.step not in BROKEN_BEFORE:
            red.breaks(world, kit)
        later = [step._replace(needs=(red.step,)) for step in ALL if red.step in step.needs]
        steps.run_steps(kit, [BY_NAME[red.step]._replace(needs=()), *later], outcomes, lambda _step: None)
        failed, *others = outcomes[len(before) :]
        assert (failed.ok, red.why in failed.why) == (red.ok, True), failed
        assert {(one.ok, one.why) for one in others} <= {(None, f"not run: {red.step} did not pass")}
        assert [name for name in world.left() if kit.name(red.step) in name] == [] or red.step == "once"
        world.cloud.faults.clear()
        clean(kit, kit.prefix)
        assert world.left() == []


def test_each_step_is_seen_to_fail() -> None:
    assert {red.step for red in REDS if red.ok is False} | {"vm"} == {step.name for step in ALL}  # vm: test_vms.py


def test_a_part_brings_what_it_needs() -> None:
    assert [step.name for step in chosen(["cpu"])] == [
        "access", "tables", "prices", "bucket", "build", "cpu", "logs", "once",
    ]  # fmt: skip
    assert chosen([]) == chosen(GROUPS) == ALL
