"""The step that goes to a VM by SSH: an OpenSSH server on loopback, reached by gcloud's own tunnel through a relay."""

from __future__ import annotations

import getpass
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.selftest import steps
from launcher.selftest.cleanup import clean
from launcher.selftest.kit import Kit
from launcher.selftest.steps import BY_NAME
from launcher.ssh.command import TUNNEL_URL
from launcher.testing.googlecloud import Fault, Status
from tests.command import WORLD
from tests.selftest.world import World
from tests.ssh import Relay, SshServer
from tests.ssh.server import make_key

ME = WORLD["CLOUDSDK_CORE_ACCOUNT"]


@pytest.fixture
def server(world: World, tmp_path: Path, gcloud: str) -> Iterator[SshServer]:
    """A person's home folder, and what answers on every VM's port 22."""
    (tmp_path / ".ssh").mkdir()
    world.cloud.let_in("a token")  # gcloud's client can't do without one
    world.cloud.oslogin.names[ME] = getpass.getuser()
    with SshServer(tmp_path / "server") as server, Relay(tmp_path) as relay:
        server.let_in(make_key(tmp_path / ".ssh" / "google_compute_engine").with_name("google_compute_engine.pub"))
        del world.env["CLOUDSDK_AUTH_DISABLE_CREDENTIALS"]
        world.env |= {
            **world.cloud.environ(),
            TUNNEL_URL: relay.url,
            "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": str(relay.authority),
            "PATH": f"{os.environ['PATH']}:{Path(shutil.which('gcloud') or '/').parent}",
        }
        world.relay = relay
        yield server


def run(kit: Kit, *names: str) -> list[steps.Outcome]:
    outcomes: list[steps.Outcome] = []
    steps.run_steps(kit, [BY_NAME[name] for name in names], outcomes, lambda _step: None)
    return outcomes


@pytest.mark.gcloud
def test_a_vm_and_its_lease(world: World, server: SshServer) -> None:
    server.program("nvidia-smi", "echo 'GPU 0: NVIDIA L4 (UUID: GPU-0)'")
    with world.kit(bucket=False, image=False) as kit:
        world.relay.backends[kit.name("vm"), 22] = server.port
        vm, lease = run(kit, "vm", "lease")
        assert (vm.ok, vm.found) == (True, "ready; an L4"), vm
        assert lease.ok, lease
        assert 120 <= lease.seconds < 200
        clean(kit, kit.prefix)
    assert world.left() == []


@pytest.mark.gcloud
def test_another_gpu_fails(world: World, server: SshServer) -> None:
    server.program("nvidia-smi", "echo 'GPU 0: Tesla T4 (UUID: GPU-0)'")
    with world.kit(bucket=False, image=False) as kit:
        world.relay.backends[kit.name("vm"), 22] = server.port
        vm, lease = run(kit, "vm", "lease")
        assert (vm.ok, "expected an L4, not" in vm.why) == (False, True), vm
        assert (lease.ok, lease.why) == (None, "not run: vm did not pass")
        assert world.left() == []


def test_a_vm_that_cannot_be_made(world: World) -> None:
    with world.kit(bucket=False, image=False) as kit:
        world.cloud.faults.add(Fault("compute.instances.insert", Status(400), times=None))
        (vm,) = run(kit, "vm")
        assert vm.ok is False, vm
        assert world.left() == []
