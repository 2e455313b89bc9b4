"""The selftest's project, resource names, and launch's own commands."""

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


class Ran(NamedTuple):
    """Result of a launch command."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Return its -o json output (of `launch logs`, a list of its lines), or its text without -o json.

        Raises LaunchError: it printed something else.
        """
        if "json" not in self.argv:
            return self.out
        try:
            return (
                [json.loads(line) for line in self.out.splitlines()] if self.argv[0] == "logs" else json.loads(self.out)
            )
        except ValueError as error:
            raise LaunchError(f"launch {self.argv[0]} printed no JSON: {self.out[:200]!r}") from error

    @property
    def problem(self) -> str:
        """Return its error message with the hint, in one line."""
        text = self.err.rpartition("error: ")[2] or self.err[-400:] or f"exit code {self.code}"
        return " ".join(text.split())

    def checked(self) -> Ran:
        """Return it if it succeeded.

        Raises:
            NoCapacity: no machine or quota was available, which is no failure of launch.
            LaunchError: the command failed.
        """
        if self.code == NoCapacity.exit_code:
            raise NoCapacity(self.problem)
        if self.code:
            raise LaunchError(f"launch {self.argv[0]} ended with exit code {self.code}: {self.problem}")
        return self


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
    poll_seconds: float = 10.0
    notes: dict[str, str] = field(default_factory=dict)
    """The newest `run` and `output` that a command printed, for the commands after it."""

    @property
    def prefix(self) -> str:
        """Return the prefix of this selftest's names."""
        return f"{PREFIX}-{self.id}"

    @property
    def images(self) -> str:
        return self.repository or f"us-docker.pkg.dev/{self.project.replace(':', '/')}/{self.prefix}"

    def name(self, step: str) -> str:
        """Return the name of a step's job or VM."""
        return f"{self.prefix}-{step}"
