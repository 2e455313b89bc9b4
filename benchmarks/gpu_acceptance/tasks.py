"""Rows of the acceptance: work for a separate process, and a pure judgement of what it measured."""

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
"""Environment variable of programs that a row starts: the row's folder."""

Measured = Mapping[str, Any]
"""Plain data that JSON can represent."""


class Verdict(NamedTuple):
    """Result of a judgement: passed or not, and its figures in one line."""

    ok: bool
    why: str


@dataclass(frozen=True)
class Place:
    """Conditions of a row's work. `folder` is an empty scratch folder; `known` has earlier measurements by row name."""

    folder: Path
    tiny: bool = False
    gpus: int = 0
    known: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return this process's GPU, or the CPU."""
        import torch

        if not self.gpus:
            return torch.device("cpu")
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    @property
    def env(self) -> dict[str, str]:
        """Return the environment for programs that a row starts: with our code, without another run's variables."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCH_")}
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "train"), os.environ.get("PYTHONPATH"))))
        return {**ours, "PYTHONPATH": path, MARK: str(self.folder), **({} if self.gpus else {"OMP_NUM_THREADS": "1"})}

    def within(self, seconds: float) -> float:
        """Return a time limit for work of at most so many seconds; longer with --tiny, which runs on a busy machine."""
        return 10 * seconds if self.tiny else seconds


class SkipRow(Exception):
    """Raised by a row's work if the machine lacks something, for example "needs 2 GPUs"."""


@dataclass(frozen=True)
class Task:
    """A row of the acceptance.

    `seconds` is its estimated time on a GPU: it starts only if that much is left. Its processes are killed after
    `limit` seconds.
    """

    part: int
    name: str
    about: str
    work: Callable[[Place], Measured]
    judge: Callable[[Measured], Verdict]
    seconds: float = 12
    limit: float = 120
    on_cpu: str | None = None
    """Description of what --tiny runs on a CPU instead; None if the row needs a GPU."""
    alone: bool = False
    """True if the row measures time: no other row may run at the same time."""
    needs: tuple[str, ...] = ()
    """Rows that must run first, because this one uses their measurements."""

    @property
    def key(self) -> str:
        return f"{self.part} {self.name}"
