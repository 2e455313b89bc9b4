"""The cloud that a command works with: the services that run jobs, the project, the clock."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

from msgspec import Struct

import launcher.clock
from launcher.backend.router import Services
from launcher.cli.gather import project
from launcher.clock import Clock
from launcher.compute.backend import Vms
from launcher.compute.client import Compute
from launcher.vertex.backend import Vertex
from launcher.workspace.gcloud_config import account

if TYPE_CHECKING:
    from launch_train.common.storage import Storage


class CloudContext(Struct, frozen=True, kw_only=True):
    """The services that run jobs in one project, and the clock."""

    vertex: Vertex
    vms: Vms
    project: str
    clock: Clock

    @property
    def service(self) -> Services:
        """Return the services that run jobs."""
        return Services(self.vertex, self.vms)

    @property
    def compute(self) -> Compute:
        """Return the Compute Engine client."""
        return self.vms.compute

    def of_run(self, folder: Storage | None) -> Services:
        """Return the services with a run's folder, which records how deleted VMs ended."""
        return Services(self.vertex, self.vms.for_run(folder))


def of_project(name: str) -> CloudContext:
    """Return the context of a project; endpoints and credentials come from the environment."""
    gc.enable()  # the process may run for days from here on
    clock = launcher.clock.REAL

    def notice(text: str) -> None:
        print(f"launch: {text}", file=sys.stderr, flush=True)

    vertex = Vertex(name, os.environ, clock, notice=notice)
    vms = Vms(name, os.environ, clock, notice, account=account(os.environ))
    return CloudContext(vertex=vertex, vms=vms, project=name, clock=clock)


def here() -> CloudContext:
    """Return the context of gcloud's project. Raises UsageError: none is set."""
    return of_project(project("vertex", os.environ))
