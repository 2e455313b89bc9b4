"""What a row of the acceptance is: work for a process of its own, and a pure judgement of what it measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]

MARK = "GPU_ACCEPTANCE_ROW"
"""In the environment of the programs that a row starts: the row's folder."""

Measured = Mapping[str, Any]
"""Plain data, as JSON holds it."""


class Verdict(NamedTuple):
    """Whether a row is in order, and the figures that say so, in one line."""

    ok: bool
    why: str


@dataclass(frozen=True)
class Place:
    """Where a row's work runs. `folder` is an empty scratch folder; `known` has what earlier rows measured, by name."""

    folder: Path
    tiny: bool = False
    gpus: int = 0
    known: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """This process's GPU, or the CPU."""
        import torch

        if not self.gpus:
            return torch.device("cpu")
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    @property
    def env(self) -> dict[str, str]:
        """The environment of the programs that a row starts: with our code, and nothing of another run."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCH_")}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {**ours, "PYTHONPATH": path, MARK: str(self.folder), **({} if self.gpus else {"OMP_NUM_THREADS": "1"})}

    def within(self, seconds: float) -> float:
        """How long to wait for what takes so many seconds at most: a rehearsal has a busy machine's spare time."""
        return 10 * seconds if self.tiny else seconds


class SkipRow(Exception):
    """Raised by a row's work: what this machine lacks, as "needs 2 GPUs"."""


@dataclass(frozen=True)
class Task:
    """One row. `seconds` is how long it takes on a GPU, roughly: none is started that can't end in time; after
    `limit` seconds its processes are killed."""

    part: int
    name: str
    about: str
    work: Callable[[Place], Measured]
    judge: Callable[[Measured], Verdict]
    seconds: float = 12
    limit: float = 120
    on_cpu: str | None = None
    """What a CPU rehearses in its place; None: nothing, the row needs a GPU."""
    alone: bool = False
    """It measures time, so nothing else may run beside it."""
    needs: tuple[str, ...] = ()
    """Rows whose measurements it uses: it comes after them."""

    @property
    def key(self) -> str:
        return f"{self.part} {self.name}"
