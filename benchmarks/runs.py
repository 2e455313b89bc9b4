"""Measure `launch runs` over a thousand runs on this machine, and a thousand in a cloud on loopback.

    python -m benchmarks.runs [--runs 5] [--write]

Wall and CPU time (user + system) of fresh processes. The local runs have a plan, two attempts and ten parts of metrics;
30 of the cloud's are running, in three regions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from launch_train import runfolder
from launcher.testing.googlecloud import FakeClock, GoogleCloud, Stage

LAUNCH = Path(sys.executable).with_name("launch")
COUNT = 1000
ACTIVE = 30
PARTS, ROWS = 10, 100
LOCAL_SECONDS, CLOUD_SECONDS = 1.0, 3.0
"""What the two lists should take at most."""
REGIONS = ("us-central1", "us-east4", "europe-west4")
SPEC = {
    "name": "job",
    "machine": {"type": "l4"},
    "image": {"uri": f"us-docker.pkg.dev/my-project/launch/train@sha256:{'0' * 64}"},
    "run": {"config": {"steps": 1000}},
    "output": "gs://my-bucket/runs",
}


class Taken(NamedTuple):
    """Seconds of one run of a command, and the requests that it sent: lists of jobs and VMs, reads of progress."""

    wall: float
    cpu: float
    lists: int
    reads: int


def planned(folder: Path, target: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the plan of the spec."""
    spec = {**SPEC, **({"output": str(folder / "runs")} if target == "local" else {"regions": [*REGIONS]})}
    (folder / "job.yaml").write_text(json.dumps(spec))
    line = [str(LAUNCH), target, "job.yaml", "--dry-run", "-o", "json"]
    ran = subprocess.run(line, cwd=folder, env=dict(environ), check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def make_local_runs(folder: Path, environ: Mapping[str, str]) -> None:
    """Write the run folders."""
    plan, began = planned(folder, "local", environ), time.time() - COUNT * 60
    rows = [{"step": step, "loss": 9.0 / step, "tokens_per_s": 9e4, "time": began} for step in range(1, ROWS + 1)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for number in range(COUNT):
        run = folder / "runs" / f"job-{number:08x}"
        for name in (runfolder.ATTEMPTS, runfolder.METRICS):
            (run / name).mkdir(parents=True)
        (run / runfolder.PLAN).write_text(json.dumps({**plan, "run": run.name}, indent=2))
        for attempt in (1, 2):
            facts = {"time": began + number * 60, "machine": "g2-standard-12", "labels": {"launch-run": run.name}}
            (run / runfolder.attempt_lock(attempt)).write_text(json.dumps(facts))
            end = {"exit_codes": {"workerpool0-0": 0}, "seconds": 9.0, "time": began}
            (run / runfolder.attempt_end(attempt)).write_text(json.dumps(end))
            for part in range(PARTS):
                start = json.dumps({"event": "start", "config": {"steps": 1000}}) + "\n" if not part else ""
                (run / runfolder.metrics_part(attempt, 0, 0, part)).write_text(start + text)


def make_cloud_runs(cloud: GoogleCloud, clock: FakeClock, body: Mapping[str, Any]) -> None:
    """Create the jobs, of which the newest are running, with the newest rows of these."""
    running = tuple(Stage(f"JOB_STATE_{name}", after) for name, after in (("PENDING", 0), ("RUNNING", 5)))
    for number in range(COUNT):
        if number == COUNT - ACTIVE:
            clock.advance(1000)
        cloud.jobs.script = running if number >= COUNT - ACTIVE else (*running, Stage("JOB_STATE_SUCCEEDED", 30))
        run = f"job-{number:08x}"
        text = json.dumps(body).replace(body["labels"]["launch-run"], run)
        cloud.jobs.submit(REGIONS[number % len(REGIONS)], json.loads(text))
        row = json.dumps({"attempt": 1, "steps": 1000, "row": {"step": number, "loss": 1.0, "time": clock()}})
        cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.PROGRESS}", row.encode())
    clock.advance(10)


def take(line: Sequence[str], folder: Path, environ: Mapping[str, str], cloud: GoogleCloud) -> Taken:
    """Run a command once. Raises RuntimeError: it does not list all runs."""
    before, began = len(cloud.requests), time.perf_counter()
    process = subprocess.Popen([str(LAUNCH), *line], cwd=folder, env=dict(environ), stdout=subprocess.PIPE)
    output = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or f"{COUNT:,} runs".encode() not in output:
        raise RuntimeError(output.decode(errors="replace"))
    reads = sum(one.path.startswith("/download/") for one in cloud.requests[before:])
    return Taken(wall, usage.ru_utime + usage.ru_stime, len(cloud.requests) - before - reads, reads)


def measure(runs: int) -> dict[str, list[Taken]]:
    """Run each command `runs` times, after one that is not counted."""
    clock = FakeClock()
    with tempfile.TemporaryDirectory() as name, GoogleCloud(clock=clock) as cloud:
        folder = Path(name)
        environ = {**os.environ, **cloud.environ(), "HOME": name, "NO_GCE_CHECK": "true", "LAUNCH_OFFLINE": "1"}
        make_local_runs(folder, environ)
        make_cloud_runs(cloud, clock, planned(folder, "vertex", environ)["attempts"][0]["request"])
        taken: dict[str, list[Taken]] = {}
        for number in range(runs + 1):
            for line in (("runs", "--local"), ("runs", "--cloud")):
                one = take(line, folder, environ, cloud)
                if number:
                    taken.setdefault(f"launch {' '.join(line)}", []).append(one)
    return taken


def table(taken: Mapping[str, list[Taken]]) -> str:
    """Return a Markdown table of medians."""
    lines = ["| command | wall s, median | least to most | CPU s | lists | reads |", "|---|---:|---:|---:|---:|---:|"]
    for title, runs in taken.items():
        walls = [one.wall for one in runs]
        spread, cpu = f"{min(walls):.2f} to {max(walls):.2f}", median(one.cpu for one in runs)
        lines.append(f"| {title} | {median(walls):.2f} | {spread} | {cpu:.2f} | {runs[0].lists} | {runs[0].reads} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print; with --write, save the table in benchmarks/results/."""
    parser = parser_of("runs", __doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each command")
    options = parser.parse_args()
    taken = measure(options.runs)
    head = f"# Lists of {COUNT:,} runs, {today()}\n\nMedians of {options.runs} runs in turns. "
    head += f"{described('google-cloud-aiplatform', 'msgspec')}.\n"
    limit = f"At most {LOCAL_SECONDS:g} s on this machine and {CLOUD_SECONDS:g} s in the cloud."
    text = f"{head}\n{table(taken)}\n\n{limit}\n"
    publish("runs", text, write=options.write)


if __name__ == "__main__":
    main()
