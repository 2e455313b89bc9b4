"""The cloud as commands have it: what runs jobs, in which project, by which clock."""

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
    """The cloud, as seen from here."""

    vertex: Vertex
    vms: Vms
    project: str
    clock: Clock

    @property
    def service(self) -> Services:
        """Whatever runs jobs."""
        return Services(self.vertex, self.vms)

    @property
    def compute(self) -> Compute:
        """Compute Engine's VMs."""
        return self.vms.compute

    def of_run(self, folder: Storage | None) -> Services:
        """The same, where a run's folder tells of VMs that are gone."""
        return Services(self.vertex, self.vms.for_run(folder))


def of_project(name: str) -> CloudContext:
    """That of a project. Endpoints and credentials are those of the environment."""
    gc.enable()  # from here on this process may live for days
    clock = launcher.clock.REAL

    def notice(text: str) -> None:
        print(f"launch: {text}", file=sys.stderr, flush=True)

    vertex = Vertex(name, os.environ, clock, notice=notice)
    vms = Vms(name, os.environ, clock, notice, account=account(os.environ))
    return CloudContext(vertex=vertex, vms=vms, project=name, clock=clock)


def here() -> CloudContext:
    """That of gcloud's own project. Raises UsageError: none is set."""
    return of_project(project("vertex", os.environ))
