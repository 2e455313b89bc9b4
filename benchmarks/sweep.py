"""Measure how long `launch sweep --detach` takes to submit its jobs, if the cloud answers each request after 200 ms.

    python -m benchmarks.sweep [--points 100] [--latency 0.2] [--runs 3] [--write]

The loopback cloud (tests/googlecloud) takes the requests in a process of its own; the image is known. Measured from the
start of the command to its exit.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from benchmarks.submit import LAUNCH, SPEC, pinned
from launcher.testing.registry import OciRegistry

CREATE = "/customJobs"
WALL_SECONDS = 5.0
"""What the submission of 100 points should take at most, at 200 ms."""


class Taken(NamedTuple):
    """One sweep: wall and CPU seconds of the command, CPU seconds of the server meanwhile, and requests by kind."""

    wall: float
    cpu: float
    server: float
    requests: Counter[str]


def measure(points: int, latency: float) -> Taken:
    """Submit a sweep once to a fresh cloud. Raises RuntimeError: it failed, or a job is missing."""
    with tempfile.TemporaryDirectory() as name, OciRegistry() as registry:
        folder = Path(name)
        record = folder / "requests.jsonl"
        (folder / "job.yaml").write_text(SPEC.replace("IMAGE", pinned(registry)))
        server = [sys.executable, "-m", "launcher.testing.googlecloud", "--port", "0", "--bucket", "my-bucket"]
        server += ["--latency", str(latency), "--record", str(record)]
        with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as cloud:
            try:
                environ = {**os.environ, **variables(cloud), "HOME": name, "DOCKER_CONFIG": name}
                environ["no_proxy"] = "127.0.0.1"  # as in the tests: else requests reads all variables twice a request
                seeds = ",".join(map(str, range(points)))
                line = [str(LAUNCH), "sweep", "job.yaml", "--set", f"run.config.seed={seeds}", "--detach", "--yes"]
                began, before, served = time.perf_counter(), os.times(), cpu_seconds(cloud.pid)
                ran = subprocess.run(line, env=environ, cwd=folder, capture_output=True, text=True, check=False)
                wall, after, served = time.perf_counter() - began, os.times(), cpu_seconds(cloud.pid) - served
            finally:
                cloud.terminate()
        asked = [json.loads(text) for text in record.read_text().splitlines()]
    created = [one for one in asked if one["method"] == "POST" and one["path"].endswith(CREATE)]
    if ran.returncode or len(created) != points:
        raise RuntimeError(f"{len(created)} of {points} jobs: {ran.stdout}{ran.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    kinds = Counter(f"{one['method']} {one['path'].partition('/v1/')[0] or 'Vertex AI'}" for one in asked)
    return Taken(wall, cpu, served, kinds)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a running process, user and system (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def variables(cloud: subprocess.Popen[str]) -> dict[str, str]:
    """Return the environment that the cloud's first lines name."""
    found = {}
    for line in cloud.stdout or ():
        if not line.startswith("export "):
            break
        name, _, value = line.removeprefix("export ").partition("=")
        found[name] = shlex.split(value)[0] if value.strip() else ""
    return found


def main() -> None:
    """Measure and print."""
    parser = parser_of("sweep", __doc__)
    parser.add_argument("--points", type=int, default=100, help="points of the sweep")
    parser.add_argument("--latency", type=float, default=0.2, help="seconds before each answer")
    parser.add_argument("--runs", type=int, default=3, help="sweeps, each to a fresh cloud")
    options = parser.parse_args()
    taken = [measure(options.points, options.latency) for _ in range(options.runs)]
    head = f"# Submission of {options.points} points at {options.latency * 1000:g} ms latency, {today()}\n\n"
    head += f"{options.runs} sweeps, each to a fresh cloud. {described('google-cloud-aiplatform')}.\n\n"
    table = "| wall s (each run) | CPU s | CPU s of the server, on the same cores | requests |\n|---|---:|---:|---:|\n"
    walls = ", ".join(f"{one.wall:.1f}" for one in taken)
    cpu, server = (median(getattr(one, name) for one in taken) for name in ("cpu", "server"))
    table += f"| {walls} | {cpu:.1f} | {server:.1f} | {taken[0].requests.total()} |"
    publish("sweep", f"{head}{table}\n\nAt most {WALL_SECONDS:g} s for 100 points.\n", write=options.write)


if __name__ == "__main__":
    main()
