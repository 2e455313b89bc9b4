"""`launch bench`: measure this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from launch_train.bench.figures import PARTS
from launch_train.common import contract
from launcher.cli.help_page import MACHINE, OUTPUT, RUN, option
from launcher.cli.options import Output, OutputFormat
from launcher.errors import JobFailed, LaunchError, UsageError

TORCHRUN = str(Path(contract.__file__).parents[1] / "node" / "torchrun_wrapper.py")


def bench(
    *,
    gpus: Annotated[
        int | None,
        option(
            MACHINE, "--gpus", min=1, max=16, help="Number of processes, one for each GPU; default: 1.", metavar="N"
        ),
    ] = None,
    quick: Annotated[bool, option(RUN, "--quick", help="Finish in half a minute by measuring less.")] = False,
    only: Annotated[
        str | None,
        option(RUN, "--only", help="Some of matmul,memory,host,allreduce,amp,loader.", metavar="PARTS"),
    ] = None,
    strict: Annotated[bool, option(OUTPUT, "--strict", help="Exit with code 3 if a result is far too slow.")] = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Measure this machine's compute, memory, links and data loading.

    Reports results that are far below what its GPUs should reach. To measure a cloud machine: launch vertex
    job_specs/bench.yaml.
    """

    if output_format is Output.yaml:
        raise UsageError("-o yaml is not available for the benchmark", "Use -o text or -o json.")
    if find_spec("torch") is None:
        raise LaunchError("launch bench needs PyTorch, which is not installed here", 'pip install "gcp-launch[train]"')
    for part in [] if only is None else only.split(","):  # before torch is loaded
        if part.strip() not in PARTS:
            raise UsageError(f"unknown part {part.strip()!r} in --only", f"Use some of {','.join(PARTS)}.")
    words = [*(["--quick"] if quick else []), *(["--strict"] if strict else []), *(["--only", only] if only else [])]
    if output_format is Output.json:
        words += ["--json", "-"]
    rendezvous = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    ranks = [] if gpus is None else [TORCHRUN, f"--nproc-per-node={gpus}", *rendezvous]
    line = [sys.executable, "-P", *ranks, "-m", "launch_train.bench", *words]
    print(run_benchmark(line, output_format), end="")


def run_benchmark(argv: Sequence[str], output: Output) -> str:
    """Run the benchmark and return its stdout. Raises UsageError, JobFailed or LaunchError."""
    # One thread per process, as on a node. PYTHONSAFEPATH: modules in the current folder are not imported.
    env = {"OMP_NUM_THREADS": "1", **os.environ} if TORCHRUN in argv else os.environ
    done = subprocess.run(argv, stdout=subprocess.PIPE, env={**env, "PYTHONSAFEPATH": "1"}, text=True, check=False)
    if done.returncode == contract.Exit.USAGE:
        raise UsageError("the benchmark did not start", "See the error above.")
    if done.returncode == contract.Exit.UNFIT:
        error = JobFailed("this machine is far slower than it should be", "See the slow results above.")
        if output is Output.json:
            error.data = json.loads(done.stdout)
        else:
            print(done.stdout, end="")
        raise error
    if done.returncode:
        raise LaunchError(f"the benchmark failed with exit code {done.returncode}", "See its output above.")
    return done.stdout
