"""Measure the time from torchrun to the end of the first step, compared with simpler scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import jobs
from benchmarks.tables import start_table
from benchmarks.turns import ROOT, turned

MARK = "first step"
"""Line that rank 0 prints then; the trainer prints its own line about step 1."""

SAY = f"""
import os
if os.environ["RANK"] == "0":
    print("{MARK}", flush=True)
"""
JOIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
PLAIN = """
import json, os
from benchmarks import loops, plain_loop
import torch.distributed as dist
dist.init_process_group("gloo")
job = loops.job(json.loads(os.environ["BENCHMARK_JOB"]))
plain_loop.train(job, dist.get_rank(), dist.get_world_size())
"""
LEAVE = """
dist.barrier()
os._exit(0)
"""
TRAINER = """
from launch_train.__main__ import main
main()
"""
EMPTY, JOINS = "an empty script", "joining alone"
SCRIPTS: Mapping[str, str] = {
    EMPTY: SAY,
    JOINS: JOIN + SAY + LEAVE,
    "plain loop": PLAIN + SAY + LEAVE,
    "trainer": TRAINER,
}


def start(fields: jobs.JobFields, rounds: int) -> list[str]:
    """Measure with two ranks, alternating between the scripts.

    An extra first round is not counted, since it compiles bytecode and reads files from disk.
    """
    own = {**fields, "steps": 1, "warmup_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "train"), "XDG_CACHE_HOME": f"{folder}/cache"}
        env = {**os.environ, **env, "BENCHMARK_JOB": json.dumps(own), "LAUNCH_CONFIG": json.dumps(jobs.config(own))}
        paths = {title: Path(folder) / f"{number}.py" for number, title in enumerate(SCRIPTS)}
        for title, path in paths.items():
            path.write_text(SCRIPTS[title], encoding="utf-8")
        seconds: dict[str, list[float]] = {title: [] for title in SCRIPTS}
        for number in range(rounds + 1):
            env["LAUNCH_RUN_FOLDER"] = f"{folder}/run-{number}"
            for title in turned(list(SCRIPTS), number):
                took = _until_first_step(title, paths[title], env)
                if number:
                    seconds[title].append(took)
    return start_table(seconds, "torchrun × 2, start to the first step", against=JOINS, empty=EMPTY)


def _until_first_step(title: str, script: Path, env: Mapping[str, str]) -> float:
    """Return the seconds until the first step. Raises RuntimeError if the script does not get there."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    torchrun += ["--nproc-per-node=2", str(script)]
    began, took = time.perf_counter(), 0.0
    with subprocess.Popen(torchrun, env=dict(env), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if not took and line.startswith((MARK, "step 1/")):
                took = time.perf_counter() - began
    if not took:
        raise RuntimeError(f"{title} did not come to a first step; its messages are above")
    return took
