"""Ranks of the trainer, without the start of Python and the import of torch: most of what a short run costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from launch_train.common import contract

ROOT = Path(contract.__file__).parents[2]
PRELOADED = ("launch_train.trainer.train", "torch._dynamo", "torch.utils.flop_counter", "pytest")
LIMIT_S = 900.0
"""After which a job is given up: far more than the longest takes on a busy machine."""


class Ended(NamedTuple):
    """How the ranks of a job ended, and what they wrote, by rank."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]

    @property
    def stdout(self) -> str:
        return "".join(self.outputs)

    @property
    def stderr(self) -> str:
        return "".join(self.errors)

    @property
    def returncode(self) -> int:
        """0 only if every rank has ended well."""
        return next((code for code in self.codes if code), 0)


class Forked:
    """A process of tests.train.forking, which has torch and forks the ranks."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server, self._folder, self._count = server, folder, 0

    def __call__(
        self, env: Mapping[str, str], ranks: int = 1, *, argv: Sequence[str] = (), hook: str = "", apart: bool = False
    ) -> Ended:
        """Run `python -m launch_train` on `ranks` ranks, or the module and arguments in `argv`.

        Each rank first runs the code in `hook`. As under torchrun, a rank that fails ends the others, unless `apart`.
        """
        return self.together((env, ranks), argv=argv, hook=hook, apart=apart)[0]

    def together(self, *jobs: tuple[Mapping[str, str], int], **common: Any) -> list[Ended]:
        """The same for several jobs side by side."""
        told = dict[int, Ended]()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        for number, (env, ranks) in enumerate(jobs):
            self._count += 1
            out = self._folder / str(self._count)
            out.mkdir()
            job = {"number": number, "out": str(out), "ranks": ranks, "env": dict(env), "limit": LIMIT_S, **common}
            self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        while len(told) < len(jobs):
            line = self._server.stdout.readline()
            assert line, "tests.train.forking has ended"
            end = json.loads(line)
            told[end["number"]] = Ended(end["codes"], end["outputs"], end["errors"])
        return [told[number] for number in range(len(jobs))]


@contextmanager
def forking() -> Iterator[Forked]:
    """Start the process, and end it."""
    command = [sys.executable, "-m", "tests.train.forking", *PRELOADED]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryDirectory(prefix="forked-") as folder,
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
    ):
        yield Forked(server, Path(folder))
