"""A VM to work on, from its boot until its watchdog stops it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import Fault, Status
from tests.plan.planning import request
from tests.startup.world import ZONE, World, ended, in_own_network, wait_until, world

HOUR = 3600


@contextmanager
def up(folder: Path, **fields: Any) -> Iterator[World]:
    """A VM to work on that is ready, with a lease of four hours unless `vm` says something else."""
    known: dict[str, Any] = {"machine": {"type": "l4", "gpus": 2}, "vm": {"lease": "4h"}, "zones": [ZONE]}
    body = request("vm", world={"training": False}, **{**known, **fields})
    with world(folder, body) as vm, ended(process := vm.start()):
        assert process.wait(120) == 0, vm.serial
        assert vm.states == ["booting", "driver", "ready"]
        wait_until(lambda: looks(vm) > 0)
        yield vm


def later(vm: World, hours: float) -> None:
    """So many hours after the boot."""
    vm.write("later", str(int(hours * HOUR)))


def stays(vm: World) -> bool:
    """Whether it is on after a few more looks of its watchdog."""
    before = looks(vm)
    wait_until(lambda: looks(vm) >= before + 3)
    return not vm.is_off and not vm.is_gone


def looks(vm: World) -> int:
    """How often the watchdog has looked whether its lease was moved."""
    return len([one for one in vm.server.requests if one.path.endswith("/launch-lease-until")])


@in_own_network
def test_the_vm_stops_at_the_end_of_its_lease(tmp_path: Path) -> None:
    with up(tmp_path) as vm:
        later(vm, 3.9)
        assert stays(vm)
        later(vm, 4.1)
        wait_until(lambda: vm.is_off)
        assert vm.reason == "its lease is over"
        assert not vm.is_gone
        assert vm.docker("run") == []


@in_own_network
def test_the_vm_is_deleted_if_the_spec_says_so(tmp_path: Path) -> None:
    with up(tmp_path, vm={"lease": "4h", "on_stop": "delete"}) as vm:
        later(vm, 4.1)
        wait_until(lambda: vm.is_gone)
        assert not vm.is_off


@in_own_network
def test_a_vm_that_cannot_be_deleted_is_stopped(tmp_path: Path) -> None:
    with up(tmp_path, vm={"lease": "4h", "on_stop": "delete"}) as vm:
        vm.cloud.compute.deny("compute.instances.delete", vm.email)
        later(vm, 4.1)
        wait_until(lambda: vm.is_off)
        assert not vm.is_gone


@in_own_network
def test_a_lease_that_was_moved_holds_to_the_new_time(tmp_path: Path) -> None:
    with up(tmp_path) as vm:
        set_item(vm, "launch-lease-until", str(int(time.time()) + 6 * HOUR))
        assert stays(vm)
        later(vm, 5)
        assert stays(vm)
        later(vm, 6.1)
        wait_until(lambda: vm.is_off)


@in_own_network
def test_a_lease_is_counted_from_googles_own_start(tmp_path: Path) -> None:
    """This machine has been up for long; the VM was started just now."""
    with up(tmp_path, vm={"lease": "5m"}) as vm:
        assert stays(vm)
        later(vm, 0.1)
        wait_until(lambda: vm.is_off)


@in_own_network
def test_the_vm_stops_after_an_idle_hour(tmp_path: Path) -> None:
    with up(tmp_path, vm={"idle_stop": "60m"}) as vm:
        later(vm, 0.9)
        assert stays(vm)
        later(vm, 1.1)
        wait_until(lambda: vm.is_off)
        assert vm.reason == "idle for 60 minutes"


@pytest.mark.parametrize(("name", "used"), [("ss", "ESTAB 0 0 10.0.0.2:22 10.0.0.9:5000\n"), ("gpus", "0\n90\n")])
@in_own_network
def test_activity_keeps_the_vm_running(tmp_path: Path, name: str, used: str) -> None:
    with up(tmp_path, vm={"idle_stop": "60m"}) as vm:
        vm.write(name, used)
        assert stays(vm)
        later(vm, 5)
        assert stays(vm)
        vm.write(name, "")
        assert stays(vm)
        later(vm, 6.1)
        wait_until(lambda: vm.is_off)


@in_own_network
def test_without_a_lease_it_stays_until_google_ends_it(tmp_path: Path) -> None:
    with up(tmp_path, vm={}) as vm:
        later(vm, 11)
        assert stays(vm)


@in_own_network
def test_a_driver_that_never_comes_leaves_the_vm_to_the_person(tmp_path: Path) -> None:
    body = request("vm", world={"training": False}, machine={"type": "l4"}, vm={"lease": "4h"}, zones=[ZONE])
    with world(tmp_path, body) as vm:
        vm.write("no-driver", "")
        with ended(process := vm.start()):
            assert process.wait(120) == 0
            assert vm.states == ["booting", "driver", "failed"]
            assert "nvidia-smi gives no answer" in vm.reason
            assert stays(vm)
            later(vm, 4.1)
            wait_until(lambda: vm.is_off)


@in_own_network
def test_the_api_away_the_lease_counts_from_the_boot(tmp_path: Path) -> None:
    """Which here was hours ago, so it ends at once: nothing waits for an answer that may never come."""
    body = request("vm", world={"training": False}, machine={"type": "l4"}, vm={"lease": "5m"}, zones=[ZONE])
    with world(tmp_path, body) as vm:
        vm.cloud.faults.add(Fault("compute.*", Status(503), times=None))
        vm.write("uptime", "7200.00 0.00\n")
        with ended(process := vm.start()):
            process.wait(120)
            wait_until(lambda: vm.is_off)


def set_item(vm: World, key: str, value: str) -> None:
    """What `launch vm extend` does: one more metadata item."""
    items = vm.cloud.compute.vm(vm.number).body["metadata"].setdefault("items", [])
    items[:] = [item for item in items if item["key"] != key] + [{"key": key, "value": value}]
