"""The steps' kit: the project, resource names, and launch's own commands."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher.clock import Clock
from launcher.errors import LaunchError, NoCapacity
from launcher.gcp.api import Api
from launcher.images import cloud_build
from launcher.services.compute.client import Compute
from launcher.services.vertex import Vertex

PREFIX: Final = "launch-selftest"
"""The prefix of all names."""
OWN: Final = re.compile(rf"{PREFIX}-[0-9a-f]{{6}}(?![0-9a-z])")
"""The pattern at the start of all names of a selftest's resources."""
LABEL: Final = "gcp-launch-selftest"
"""The label of all resources that support labels. Its value is the selftest's id.

Resources without it are never changed or removed.
"""
CPU: Final = "n1-standard-4"
GPU: Final = "g2-standard-4"
"""The smallest machine type with an L4."""
SMALL: Final = {"name": "gpt", "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32}
MEDIUM: Final = {"name": "gpt", "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
LONG: Final = {"model": MEDIUM, "steps": 2000, "batch_size": 24}
"""Trains for two or three minutes on CPU, long enough to be cancelled midway."""


class Ran(NamedTuple):
    """Result of a launch command."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Return its -o json output. Raises LaunchError: it printed something else."""
        try:
            return json.loads(self.out)
        except ValueError as error:
            raise LaunchError(f"launch {self.argv[0]} printed no JSON: {self.out[:200]!r}") from error

    @property
    def problem(self) -> str:
        """Return its error message with the hint, in one line."""
        text = self.err.rpartition("error: ")[2] or self.err[-400:] or f"exit code {self.code}"
        return " ".join(text.split())


@dataclass(frozen=True)
class Kit:
    """One selftest. `launch` runs a command in this process, `start` in a separate one."""

    id: str
    project: str
    region: str
    folder: Path
    """For specs and code; the caller removes it."""
    environ: Mapping[str, str]
    clock: Clock
    vertex: Vertex
    compute: Compute
    launch: Callable[..., Ran]
    start: Callable[..., subprocess.Popen[str]]
    repository: str = ""
    """The repository for images. Empty: one that the selftest creates and removes."""
    long_run: Mapping[str, Any] = field(default_factory=lambda: LONG)
    """run.config of the run that is cancelled midway."""
    poll_seconds: float = 10.0
    notes: dict[str, Any] = field(default_factory=dict)
    """Values that one step passes to another: run ids and names."""

    @property
    def prefix(self) -> str:
        """Return the prefix of this selftest's names."""
        return f"{PREFIX}-{self.id}"

    @property
    def bucket(self) -> str:
        """Return gs://NAME."""
        return f"gs://{self.prefix}"

    @property
    def images(self) -> str:
        """Return the repository for images."""
        return self.repository or f"us-docker.pkg.dev/{self.project.replace(':', '/')}/{self.prefix}"

    def name(self, step: str) -> str:
        """Return the name of a step's job or VM."""
        return f"{self.prefix}-{step}"

    def cloud_build(self) -> Api:
        """Open Cloud Build's API."""
        return Api(cloud_build.SERVICE, self.project, cloud_build.client(self.environ), self.clock)

    @property
    def builds_of(self) -> str:
        """Return the parent resource of its builds."""
        return f"projects/{self.project}/locations/global"

    def builds(self, scope: str) -> list[Any]:
        """Return the builds of selftests, found by the bucket of their source. Raises LaunchError."""
        tagged = self.cloud_build().ask("list_builds", parent=self.builds_of, filter='tags="launch"').builds
        return [build for build in tagged if str(build.source.storage_source.bucket).startswith(scope)]

    def must(self, *argv: str) -> Ran:
        """Run a command that must succeed.

        Raises:
            NoCapacity: no machine or quota was available, which is no failure of launch.
            LaunchError: the command failed.
        """
        return checked(self.launch(*argv))

    def wait(self, seconds: float, is_done: Callable[[], bool]) -> bool:
        """Poll until something is done. Return False if it is not done after `seconds`."""
        until = self.clock.now() + seconds
        while not is_done():
            if self.clock.now() >= until:
                return False
            self.clock.sleep(self.poll_seconds)
        return True


class NotTried(LaunchError):
    """A step could not be tried, for a reason outside launch."""


def checked(ran: Ran) -> Ran:
    """Return the command's result if it succeeded. Raises NoCapacity, LaunchError."""
    if ran.code == NoCapacity.exit_code:
        raise NoCapacity(ran.problem)
    expect(ran.code == 0, f"launch {ran.argv[0]} ended with exit code {ran.code}: {ran.problem}")
    return ran


def expect(holds: object, otherwise: str) -> None:
    """Raise LaunchError unless a check holds."""
    if not holds:
        raise LaunchError(otherwise)
