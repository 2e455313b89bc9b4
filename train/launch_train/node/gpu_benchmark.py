"""Benchmark the node's GPUs before a long run: are they, and the links between them, as fast as they should be?

Standard library only: the node runs launch_train.bench under torchrun, and reads its report.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from launch_train.common import contract
from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.scratch import temporary_folder
from launch_train.node.cluster import Cluster
from launch_train.node.command import Task, command_line
from launch_train.node.control_store import GenerationSpec
from launch_train.node.process import Child

LIMIT: Final = 180.0
"""Time limit in seconds. The benchmark takes some 30, plus torch's import."""

GRACE: Final = 5.0
TICK: Final = 0.1

PARTS: Final = "matmul,memory,host,allreduce"
"""Benchmarks of the machine rather than of the program."""


def check_gpu_speed(
    env: Mapping[str, str],
    node: int,
    processes: int,
    gpus: int,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    keep: Callable[[bytes], None],
) -> None:
    """Benchmark this node if the request asks for it, and pass the report (JSON) to `keep`.

    The benchmark is ended after LIMIT seconds, or once `stopped` returns true. Raises UnfitError, UsageError.
    """
    mode = env.get(contract.PREFLIGHT) or "off"
    if mode not in ("off", "bench"):
        raise UsageError(f"{contract.PREFLIGHT}={mode!r} must be off or bench")
    if mode == "off":
        return
    if reason := "no GPU found" if not gpus else "" if importlib.util.find_spec("torch") else "torch is not installed":
        say(f"preflight: skipped, {reason}")
        return
    say(f"preflight: benchmarking {processes} GPUs" if processes > 1 else "preflight: benchmarking the GPU")
    with temporary_folder("bench") as folder:
        file = Path(folder) / "bench.json"
        options = ("--quick", "--strict", f"--only={PARTS}", f"--json={file}")
        task = Task("torchrun", "module", "launch_train.bench", options)
        single, order = Cluster(("localhost:0",), 0), GenerationSpec(0, 1, 0, ())
        argv = command_line(task, single, order, processes=processes, run="preflight", grace=GRACE)
        # Nothing may make it write into the run folder or pass for one of the run's processes, and the user's folder is
        # not imported from, as its modules could hide the library's.
        excluded = (contract.RUN_FOLDER, contract.EXIT_FILE, contract.NOTICE, contract.SPOOL)
        variables = {name: value for name, value in env.items() if name not in excluded}
        variables |= {contract.NODE: str(node), contract.VISIBLE_GPUS: str(gpus)}
        variables |= {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        child, deadline = Child(argv, variables), time.monotonic() + LIMIT
        while (code := child.poll()) is None and not stopped() and time.monotonic() < deadline:
            time.sleep(TICK)
        if code is None:
            child.stop(GRACE)
        else:
            child.kill()  # its subprocesses
        report = file.read_bytes() if file.is_file() else b""
    if report:
        keep(report)
    if code == 0 and not stopped():
        say("preflight: passed, GPU speed is as expected")
    if code == 0 or stopped():
        return
    if code is None:
        raise UnfitError(f"preflight: the benchmark did not finish within {LIMIT:.0f} s")
    problems = [finding["text"] for finding in json.loads(report)["findings"] if finding["unfit"]] if report else []
    reason = "; ".join(problems) or f"the benchmark failed with exit code {code}; see the output above"
    raise UnfitError(f"preflight: {reason}")
