"""Waiting until a new VM's GPUs answer, against a Compute Engine on loopback and a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.jobs.vm import VmInstance
from launcher.services.compute import workstation as ready
from launcher.services.compute.client import Compute
from launcher.services.compute.workstation import wait_ready
from launcher.ssh.errors import Explained, explain
from launcher.ssh.session import Answer
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Status
from tests.cli.vms import body
from tests.ssh.vms import machine as some_machine

ZONE = "us-central1-a"
ME = "me@example.com"
GPUS = "GPU 0: NVIDIA L4 (UUID: GPU-1)\n"


def fault(log: str) -> Explained:
    found = explain(
        log, some_machine(), {"user": "me", "port": "22", "account": "me@example.com", "member": "user:me@example.com"}
    )
    assert found
    return found


REFUSED = Answer(255, fault=fault("ssh: connect to host x port 22: Connection refused"))
BACKEND = Answer(255, fault=fault("Error while connecting [4003: 'failed to connect to backend']"))
DENIED = Answer(255, fault=fault("me@compute.1: Permission denied (publickey)."))
NOT_AUTHORIZED = Answer(255, fault=fault("Error while connecting [4033: 'not authorized']"))
NO_DRIVER = Answer(9, err="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMore.")
WORKS = Answer(0, out=GPUS)


class World:
    """A VM that was just asked for, and what becomes of it: `plan` is by the seconds since then."""

    def __init__(self, cloud: GoogleCloud, clock: FakeClock) -> None:
        self.cloud, self.clock = cloud, clock
        self.compute = Compute("my-project", cloud.environ(), Clock(clock, self.sleep))
        self.plan: list[tuple[float, Callable[[], object]]] = []
        self.answer = WORKS
        self.told: list[str] = []
        self.asked: list[VmInstance] = []
        self.compute.insert(ZONE, body("dev", ZONE), str(uuid4()))
        self.begun = clock()
        self.machine = self.compute.instance(ZONE, "dev")

    def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for due in [one for one in self.plan if self.clock() >= self.begun + one[0]]:
            self.plan.remove(due)
            due[1]()

    def at(self, seconds: float, do: Callable[[], object]) -> None:
        self.plan.append((seconds, do))

    def say(self, state: str, reason: str = "") -> Callable[[], None]:
        def said() -> None:
            self.cloud.compute.set_guest("dev", "launch/state", state)
            self.cloud.compute.set_guest("dev", "launch/reason", reason)

        return said

    def becomes(self, answer: Answer) -> Callable[[], None]:
        return lambda: setattr(self, "answer", answer)

    def ask(self, machine: VmInstance) -> Answer:
        self.asked.append(machine)
        return self.answer

    def wait(self) -> tuple[VmInstance, str]:
        return wait_ready(self.machine, self.compute, self.ask, self.told.append, Clock(self.clock, self.sleep))

    @property
    def seconds(self) -> float:
        return self.clock() - self.begun


@pytest.fixture
def world(cloud: GoogleCloud, clock: FakeClock) -> World:
    return World(cloud, clock)


def test_each_step_is_reported_once(world: World) -> None:
    world.answer = BACKEND
    world.at(40, world.say("booting"))
    world.at(60, world.say("driver"))
    world.at(90, world.becomes(NO_DRIVER))
    world.at(180, world.becomes(WORKS))
    machine, out = world.wait()
    assert (machine.status, out) == ("RUNNING", GPUS)
    assert 180 <= world.seconds < 190
    assert world.told == [
        "dev is PROVISIONING",
        "dev is STAGING",
        "booting; waiting for SSH",
        "installing the NVIDIA driver; waiting for SSH",
        "connected by SSH; installing the NVIDIA driver",
    ]
    assert {one.status for one in world.asked} == {"RUNNING"}, "nobody knocks before it runs"


def test_the_startup_script_gave_up(world: World) -> None:
    world.answer = NO_DRIVER
    world.at(90, world.say("failed", "the driver's installer ended with 1"))
    with pytest.raises(LaunchError, match="dev did not become ready: the driver's installer ended with 1") as caught:
        world.wait()
    assert caught.value.hint == "To investigate: launch ssh dev"
    assert world.seconds < 100


def test_waiting_has_a_timeout(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "MAX_SECONDS", 120.0)
    world.answer = REFUSED
    lines = "".join(f"line {n}\r\n" for n in range(30)) + "\x1b[31mKernel panic\n\n"
    world.at(60, lambda: world.cloud.compute.write_serial("dev", lines))
    with pytest.raises(LaunchError) as caught:
        world.wait()
    problem, hint = caught.value.problem, caught.value.hint
    assert problem.startswith(
        "dev is not ready after 2 minutes: dev refuses SSH connections\nLast lines of its serial console:\n"
    )
    assert problem.splitlines()[-1] == "  [31mKernel panic"
    assert len(problem.splitlines()) == 14
    assert "launch vm status dev" in hint
    assert 120 <= world.seconds < 180


def test_a_driver_that_never_works(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "MAX_SECONDS", 120.0)
    world.answer = NO_DRIVER
    with pytest.raises(LaunchError, match="is not ready after 2 minutes: nvidia-smi failed: NVIDIA-SMI has failed"):
        world.wait()


def test_permanent_errors_are_not_waited_for(world: World) -> None:
    world.answer = NOT_AUTHORIZED
    with pytest.raises(NotAuthorised, match="4033"):
        world.wait()
    assert world.seconds < 30


def test_keys_may_be_refused_while_it_boots(world: World) -> None:
    world.answer = DENIED
    world.at(20, world.say("booting"))
    world.at(100, world.becomes(WORKS))
    assert world.wait()[1] == GPUS


def test_permanently_refused_keys_are_reported(world: World) -> None:
    world.answer = DENIED
    world.at(20, world.say("ready"))
    with pytest.raises(NotAuthorised, match="refused the SSH key of me"):
        world.wait()
    assert 120 < world.seconds < 200


def test_a_vm_stopped_while_waiting(world: World) -> None:
    world.answer = REFUSED
    world.at(60, lambda: world.cloud.compute.power_off("dev"))
    with pytest.raises(LaunchError, match="it was stopped before it was ready"):
        world.wait()


def test_a_vm_deleted_while_waiting(world: World) -> None:
    world.answer = REFUSED
    world.at(60, lambda: world.compute.delete(world.machine))
    with pytest.raises(LaunchError, match=r"dev (is STOPPING|was deleted)"):
        world.wait()


def test_an_outage_passes(world: World) -> None:
    world.answer = REFUSED
    world.at(60, lambda: world.cloud.faults.add(Fault("compute.instances.get", Status(503), times=20)))
    world.at(300, world.becomes(WORKS))
    assert world.wait()[1] == GPUS
    assert any("Compute Engine" in line for line in world.told)


def test_an_outage_of_os_login_passes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(machine: VmInstance) -> Answer:
        if world.seconds < 100:
            raise UnreachableError("OS Login does not respond")
        return WORKS

    monkeypatch.setattr(world, "ask", ask)
    assert world.wait()[1] == GPUS
    assert "OS Login does not respond" in world.told
