"""One generation on one node: start what the order says, watch it, end it, and say how it ended."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from train.cluster import Cluster
from train.command import Task, child_env, command
from train.control import Member, Order, Timing
from train.outcome import Outcome
from train.process import Child


@dataclass(frozen=True)
class Plan:
    """What this node starts in every generation: `env` is its environment, `processes` how many torchrun starts, `gpus`
    how many GPUs they can see, and `code` the folder of the user's code."""

    task: Task
    cluster: Cluster
    env: Mapping[str, str]
    processes: int
    gpus: int
    code: Path
    run: str
    restarts: int | None = None


@dataclass
class Stop:
    """What the platform or the user wants: `signum` is the first signal, 0 for none; `hurry`: Ctrl-C came twice."""

    signum: int = 0
    hurry: bool = False


def run_generation(plan: Plan, order: Order, member: Member, timing: Timing, stop: Stop) -> Outcome:
    """Start the order's processes and wait until they are all gone."""
    node = plan.cluster.node
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        exit_file = Path(folder) / "exit"
        inner = timing.grace - timing.report
        argv = command(plan.task, plan.cluster, order, processes=plan.processes, run=plan.run, grace=inner)
        child = Child(argv, child_env(plan.env, order, node, gpus=plan.gpus, code=plan.code, exit_file=exit_file))
        code, note = _watch(child, order, member, timing, stop)
        return Outcome(node, code, _marks(exit_file), stop.signum, note)


def _watch(child: Child, order: Order, member: Member, timing: Timing, stop: Stop) -> tuple[int, str]:
    """The command's exit code, and why we ended it (empty if it ended by itself)."""
    while (code := child.poll()) is None:
        if stop.signum:
            return child.stop(timing.grace, stop.signum, hurry=lambda: stop.hurry), ""
        state = member.state()
        if state.phase != "run" or state.generation != order.generation:
            return child.stop(timing.grace, hurry=lambda: stop.hurry), "stopped with the others"
        time.sleep(timing.tick)
    child.kill()  # what it left behind
    return code, ""


def _marks(exit_file: Path) -> tuple[int, ...]:
    """The exit codes that the processes wrote; a line that isn't a number is none."""
    try:
        lines = exit_file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(int(line) for line in lines if line.isdecimal())
