"""The VMs of a loopback cloud really boot: each runs the startup script of its own metadata, as root, in a mount
namespace of its own, with its metadata server; what it is told to do to the machine is done to the VM in the cloud.

    with Park(cloud, folder):            # containers are processes of this machine
    with Park(cloud, folder, engine):    # or those of a Docker engine
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launcher.testing.googlecloud import GoogleCloud
from launcher.testing.googlecloud.compute.vms import Vm
from tests.startup.metadata import MetadataServer
from tests.startup.world import World, end_all

LOOK = 0.05


class Park:
    """Looks for VMs that have begun to run, and boots them. `engine` is what a Docker client needs in its environment
    to find the engine; None: there is none."""

    def __init__(self, cloud: GoogleCloud, folder: Path, engine: dict[str, str] | None = None) -> None:
        self.cloud, self.folder, self.engine = cloud, folder, engine
        self.booted: dict[str, Booted] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def _start(self, what: Any, *words: Any) -> None:
        thread = threading.Thread(target=what, args=words)
        self._threads.append(thread)
        thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            for vm in running(self.cloud):
                if vm.number not in self.booted:
                    self.booted[vm.number] = Booted(self, vm)
                    self._start(self.booted[vm.number].live, self._over)


class Booted:
    """One VM from its boot to its end."""

    def __init__(self, park: Park, vm: Vm) -> None:
        self._park, self._vm = park, vm
        self.serial = ""

    def live(self, over: threading.Event) -> None:
        """Until it is gone, or the park is closed."""
        cloud, vm = self._park.cloud, self._vm
        with MetadataServer(cloud, vm.zone, vm.name) as server:
            world = World(self._park.folder / vm.number, cloud, server, vm.body)
            self._equip(world, server)
            process = world.start()
            try:
                self._attend(world, process, over)
            finally:
                end_all(world.folder)  # the script, its watchdog, its container
                process.wait()
                if engine := world.environ.get("ENGINE"):  # a VM's engine goes with it
                    command = [engine, "--host", world.environ["DOCKER_HOST"], "rm", "--force", "launch"]
                    subprocess.run(command, check=False, capture_output=True, timeout=60)
                self.serial = world.serial

    def _equip(self, world: World, server: MetadataServer) -> None:
        here = Path(__file__).with_name("docker_here.py")
        shutil.copy(here, world.folder)
        world.program("docker", 'exec python3 "$WORLD/docker_here.py" "$@"')
        site = {**self._park.cloud.environ(), **server.environ(), "NO_GCE_CHECK": "true"}
        world.environ |= {"SITE": json.dumps(site), "LAUNCH_POLL_SECONDS": "0.1", "PYTHON_HERE": sys.executable}
        if self._park.engine is not None:
            program = shutil.which("docker", path=f"{os.environ['PATH']}:/usr/bin")
            world.environ |= {"ENGINE": str(program), "DOCKER_HOST": self._park.engine["DOCKER_HOST"]}

    def _attend(self, world: World, process: Any, over: threading.Event) -> None:
        """A VM that goes down gets SIGTERM, as its systemd sends it; one that switches itself off is off."""
        told = False
        while not over.wait(LOOK):
            status = next(
                (vm.status for vm in running(self._park.cloud, every=True) if vm.number == self._vm.number), ""
            )
            if not status or status == "TERMINATED":
                return
            if status == "STOPPING" and not told:
                told = True
                process.terminate()
            if world.is_off:
                self._park.cloud.compute.power_off(self._vm.number)
                return


def running(cloud: GoogleCloud, *, every: bool = False) -> list[Vm]:
    """The VMs that run now."""
    with cloud.compute.lock:
        cloud.compute.life.settle()
        return [vm for vm in cloud.compute.park.vms.values() if every or vm.status == "RUNNING"]
