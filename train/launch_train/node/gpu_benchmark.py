"""The node's check before a long run: are its GPUs, and the links between them, as fast as they should be?

Standard library only: the node runs the bench as torchrun's processes, and reads what they wrote.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from launch_train.common import contract
from launch_train.common.errors import UnfitError, UsageError
from launch_train.node.cluster import Cluster
from launch_train.node.command import Task, command
from launch_train.node.control_store import Order
from launch_train.node.process import Child

LIMIT: Final = 180.0
"""Seconds after which a machine that still measures is given up. It takes some 30, and torch's start comes on top."""

GRACE: Final = 5.0
TICK: Final = 0.1

PARTS: Final = "matmul,memory,host,allreduce"
"""What says something about the machine, and not about the program."""


class Result(NamedTuple):
    """`problem`: why the machine is unfit, in a line; empty if it isn't. `report`: the JSON that the bench wrote."""

    problem: str = ""
    report: bytes = b""


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the request asks for it. Raises UsageError."""
    asked = environ.get(contract.PREFLIGHT) or "off"
    if asked not in ("off", "bench"):
        raise UsageError(f"{contract.PREFLIGHT}={asked!r} must be off or bench")
    return asked == "bench"


def check(
    env: Mapping[str, str],
    node: int,
    processes: int,
    gpus: int,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    keep: Callable[[bytes], None],
) -> None:
    """Measure this node if the request wants that; `keep` gets the figures. Raises UnfitError, UsageError."""
    if not wanted(env):
        return
    if problem := impossible(gpus):
        say(f"preflight: {problem}; going on without")
        return
    say(f"preflight: measuring {processes} GPUs" if processes > 1 else "preflight: measuring the GPU")
    done = measured(env, node, processes=processes, gpus=gpus, stopped=stopped)
    if done.report:
        keep(done.report)
    if done.problem:
        raise UnfitError(f"preflight: {done.problem}")
    if stopped():
        return
    say("preflight: the GPUs are as fast as they should be")


def impossible(gpus: int) -> str:
    """Why there is nothing to measure, or nothing to measure with; empty if there is."""
    if not gpus:
        return "no GPU here, so there is nothing to measure"
    return "" if importlib.util.find_spec("torch") else "no torch here to measure with"


def measured(
    env: Mapping[str, str],
    node: int,
    *,
    processes: int,
    gpus: int,
    stopped: Callable[[], bool],
    limit: float = LIMIT,
    parts: str = PARTS,
) -> Result:
    """Run the bench, and read what it found. It is ended after `limit` seconds, or when `stopped` says so."""
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "bench.json"
        task = Task(
            "torchrun", "module", "launch_train.bench", ("--quick", "--strict", f"--only={parts}", f"--json={file}")
        )
        alone = Cluster(("localhost:0",), 0)
        argv = command(task, alone, Order(0, 1, 0, ()), processes=processes, run="preflight", grace=GRACE)
        code = _ended(Child(argv, _env(env, node, gpus)), stopped, limit)
        report = file.read_bytes() if file.is_file() else b""
    return Result("" if code == 0 or stopped() else _problem(code, report, limit), report)


def _env(env: Mapping[str, str], node: int, gpus: int) -> dict[str, str]:
    """Without what would have the bench write into the run folder, or be taken for the run's own processes; and without
    the user's folder, where a train.py may lie."""
    left_out = (contract.RUN_FOLDER, contract.EXIT_FILE, contract.NOTICE, contract.SPOOL)
    kept = {name: value for name, value in env.items() if name not in left_out}
    ours = {contract.NODE: str(node), contract.VISIBLE_GPUS: str(gpus)}
    return {**kept, **ours, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


def _ended(child: Child, stopped: Callable[[], bool], limit: float) -> int | None:
    """Its exit code; None if it had to be ended."""
    deadline = time.monotonic() + limit
    while (code := child.poll()) is None:
        if stopped() or time.monotonic() > deadline:
            child.stop(GRACE)
            return None
        time.sleep(TICK)
    child.kill()  # what it left behind
    return code


def _problem(code: int | None, report: bytes, limit: float) -> str:
    if code is None:
        return f"the measuring did not end within {limit:.0f} s"
    found = [one["text"] for one in json.loads(report)["findings"] if one["unfit"]] if report else []
    return "; ".join(found) or f"the measuring failed with exit code {code}; its lines stand above"
