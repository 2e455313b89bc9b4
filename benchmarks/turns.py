"""Training loops that take turns: each in processes of its own, so many steps at a time, while the others wait.

A slow moment of the machine hits all of them alike, and no loop's threads share an interpreter with another's. Where a
process's memory happens to lie makes its steps some percent faster or slower for as long as it lives: in each round all
loops are started anew.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from benchmarks.tables import Loop, Measured, Turn

ROOT = Path(__file__).parent.parent
LINE = "BENCHMARK_LINE"
"""The number of the descriptor by which a rank hears from whoever measures."""

Some = TypeVar("Some")


class Turns:
    """In the loop's process: `step` is called before each step, and returns when it may be done."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._left, self._wall, self._cpu = line, 0, 0.0, 0.0

    def step(self) -> None:
        if self._left == 0:
            self._next()
        self._left -= 1

    def _next(self) -> None:
        """All ranks wait here: one that waited for the others inside a step would measure a long step."""
        if self._wall:
            _finished()
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._line.sendall(f"{wall} {cpu}\n".encode())
        else:
            self._line.sendall(b"ready\n")
        word = self._line.recv(64)
        if not word:
            os._exit(0)
        self._left, self._wall, self._cpu = int(word), time.perf_counter(), time.process_time()


def here() -> Turns:
    """This process's."""
    return Turns(socket.socket(fileno=int(os.environ[LINE])))


def _finished() -> None:
    """A GPU has queued what it was told to do: wait until it's done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- Whoever measures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """How much is measured: in each of `rounds` each loop, started anew, has `turns` of `steps` steps, after a few that
    don't count. `together`: all loops of a round live at once, and take turns; else one after the other has all its
    turns, as on a GPU, whose memory has room for one."""

    rounds: int
    turns: int
    steps: int
    warm_up: int = 10
    together: bool = True


def measure(loops: Sequence[Loop], amount: Amount) -> list[Measured]:
    """Raises RuntimeError if a loop ends by itself. Of loops that don't live together the others go on, and it is left
    out, unless it is the first, which they are measured against."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = [_round(loops, amount, number, Path(folder)) for number in range(amount.rounds)]
        said = [_output(loop, Path(folder)).read_text(encoding="utf-8", errors="replace") for loop in loops]
    found = [Measured(*each) for each in zip(loops, zip(*rounds, strict=True), said, strict=True)]
    return [one for one in found if all(one.rounds)]


def _round(loops: Sequence[Loop], amount: Amount, number: int, folder: Path) -> list[list[Turn]]:
    """The turns of each loop, which are started in another order each time."""
    found: list[list[Turn]] = [[] for _ in loops]
    groups = [list(range(len(loops)))] if amount.together else [[place] for place in range(len(loops))]
    for group in turned(groups, number):
        try:
            with started([loops[place] for place in group], folder) as running:
                _take_turns(list(zip([found[place] for place in group], running, strict=True)), amount, number)
        except RuntimeError as error:
            if 0 in group:
                raise
            print(error, file=sys.stderr, flush=True)
            found[group[0]].clear()
    return found


def _take_turns(pairs: Sequence[tuple[list[Turn], Running]], amount: Amount, number: int) -> None:
    """Add the turns of a round to the lists of those who take them."""
    for _, one in pairs:
        one.take(amount.warm_up)
    for turn in range(amount.turns):
        for found, one in turned(pairs, number + turn):
            found.append(one.take(amount.steps))


def _output(loop: Loop, folder: Path) -> Path:
    """The file for what its rank 0 prints."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', loop.title.lower())}.out"


def turned(items: Sequence[Some], by: int) -> list[Some]:
    """Begun with another one, and every second time backwards: to be the first, or behind a certain one, may be an
    advantage."""
    start = by // 2 % len(items)
    found = [*items[start:], *items[:start]]
    return found[::-1] if by % 2 else found


@contextmanager
def started(loops: Sequence[Loop], folder: Path) -> Iterator[list[Running]]:
    """All of them, ready for their first step, until the block ends. They start at the same time."""
    with ExitStack() as stack:
        running = [stack.enter_context(closing(Running(loop, folder))) for loop in loops]
        for one in running:
            one.heard(_ready)
        yield running


def _ready(line: str) -> None:
    if line != "ready\n":
        raise ValueError


def _numbers(line: str) -> tuple[float, float]:
    wall, cpu = line.split()
    return float(wall), float(cpu)


class Running:
    """The processes of a loop. A run folder, where it is told to write, and all caches are in `folder`."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self._loop = loop
        self._lines: list[TextIO] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        shared = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        if loop.told.get("writes"):
            shared["LAUNCH_RUN_FOLDER"] = tempfile.mkdtemp(prefix="run-", dir=folder)
        for rank in range(loop.ranks):
            env = {**os.environ, **shared, **_as_torchrun(rank, loop.ranks, port)}
            self._start(env, Path(os.devnull) if rank else _output(loop, folder))

    def _start(self, env: Mapping[str, str], output: Path) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.loops", self._loop.program, json.dumps(self._loop.told)]
        with ours, theirs, output.open("wb") as file:
            line, told = theirs.fileno(), {**env, LINE: str(theirs.fileno())}
            process = subprocess.Popen(command, cwd=ROOT, env=told, pass_fds=(line,), stdout=file)
            self._processes.append(process)
            self._lines.append(ours.makefile("rw"))

    def take(self, steps: int) -> Turn:
        """One turn of so many steps. The slowest rank's time counts, and the CPU time of all."""
        for line in self._lines:
            line.write(f"{steps}\n")
            line.flush()
        walls, cpus = zip(*self.heard(_numbers), strict=True)
        return Turn(max(walls) / steps, sum(cpus) / steps)

    def heard(self, read: Callable[[str], Some]) -> list[Some]:
        """What each rank says next. Raises RuntimeError if one says nothing more."""
        try:
            return [read(line.readline()) for line in self._lines]
        except (ValueError, ConnectionError) as error:
            raise RuntimeError(f"{self._loop.title} ended while it was measured; its messages are above") from error

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for line in self._lines:
            line.close()


def _free_port() -> int:
    """Below those that Linux gives to connections (32768 and up), which could take it before rank 0 listens there."""
    while True:
        port = random.randrange(20000, 30000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _as_torchrun(rank: int, world: int, port: int) -> dict[str, Any]:
    """What torchrun sets, for several ranks."""
    if world == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}
    return {name: str(number) for name, number in numbers.items()} | names
