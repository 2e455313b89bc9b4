"""Measure the CPU time (user + system) from the command to its create request, with the image already in the registry.

    python -m benchmarks.submit [--runs 7] [--write]

Loopback servers (launcher/testing) take the requests. The commands alternate; each is measured up to
the arrival of its `customJobs.create`, and up to its exit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from launcher.testing.googlecloud import Fault, GoogleCloud
from launcher.testing.googlecloud.faults import Step
from launcher.testing.googlecloud.wire import Call, Request, Response
from launcher.testing.registry import OciRegistry

LAUNCH = Path(sys.executable).with_name("launch")
LIMIT = 2.0
"""Upper bound of the CPU time of `launch vertex --detach` up to its create, relative to importing the client alone."""
IMPORT = "from google.cloud import aiplatform_v1"
SDK = """
import json, sys
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
url, spec, name = sys.argv[1:]
aiplatform.init(project="my-project", location="us-central1", staging_bucket="gs://my-bucket",
                credentials=AnonymousCredentials(), api_endpoint=url, api_transport="rest")
request = json.load(open(spec))
pools = request["jobSpec"]["workerPoolSpecs"]
def snake(value):
    import re
    if isinstance(value, dict):
        return {re.sub("([A-Z])", lambda m: "_" + m[1].lower(), key): snake(item) for key, item in value.items()}
    return [snake(item) for item in value] if isinstance(value, list) else value
aiplatform.CustomJob(display_name=name, worker_pool_specs=snake(pools)).submit()
"""
SPEC = """\
name: bench
machine: {type: l4, gpus: 2}
provisioning: standard
regions: [us-central1]
image: {uri: "IMAGE"}
run: {config: {steps: 10}}
output: gs://my-bucket/runs
"""


class Taken(NamedTuple):
    """One run of a command: seconds of CPU and wall time, up to the create (None: it sends none) and in total."""

    cpu_to_create: float | None
    cpu: float
    wall_to_create: float | None
    wall: float


class Witness:
    """Records when a create arrives, and the CPU time of the command so far."""

    step: ClassVar[Step | None] = None

    def __init__(self) -> None:
        self.pid = 0
        self.seen: tuple[float, float] | None = None

    def __call__(self, call: Call, serve: Callable[[Request], Response]) -> Response:
        """Record the first create, and return the cloud's own response."""
        self.seen = self.seen or (cpu_of(self.pid), time.perf_counter())
        return serve(call.request)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have exited."""
    parents, used = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(entry.parent.name)
        parents[number] = int(fields[1])
        used[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(one, 0.0) for one in family)


def run(line: Sequence[str], environ: Mapping[str, str], folder: Path, witness: Witness) -> Taken:
    """Run a command once. Raises RuntimeError with its output if it fails."""
    witness.seen = None
    began = time.perf_counter()
    process = subprocess.Popen(line, env=dict(environ), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    witness.pid = process.pid
    output = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{line}: {output.decode(errors='replace')}")
    cpu, seen = usage.ru_utime + usage.ru_stime, witness.seen
    return Taken(seen[0] if seen else None, cpu, seen[1] - began if seen else None, wall)


def commands(folder: Path, url: str) -> dict[str, Callable[[int], list[str]]]:
    """Return functions from the number of a run to the command line; every run submits a different job."""
    python, spec = sys.executable, str(folder / "job.yaml")

    def gcloud(number: int) -> list[str]:
        line = ["gcloud", "ai", "custom-jobs", "create", "--region=us-central1", f"--display-name=bench-{number}"]
        return [*line, f"--config={folder / 'config.yaml'}"]

    found: dict[str, Callable[[int], list[str]]] = {
        f'python -c "{IMPORT}"': lambda _: [python, "-c", IMPORT],
        "launch vertex SPEC --detach": lambda n: [
            *(str(LAUNCH), "vertex", spec, "--detach", "--run-id", f"bench-{n:08x}", "-o", "json")
        ],
        "aiplatform.CustomJob(…).submit()": lambda n: [
            *(python, "-c", SDK, url, str(folder / "request.json"), f"bench-{n}")
        ],
    }
    return {**found, **({"gcloud ai custom-jobs create": gcloud} if shutil.which("gcloud") else {})}


def prepare(folder: Path, image: str, environ: Mapping[str, str]) -> None:
    """Write the spec, and its request in the forms that the other commands take."""
    (folder / "job.yaml").write_text(SPEC.replace("IMAGE", image))

    def plan(form: str) -> str:
        line = [str(LAUNCH), "vertex", "job.yaml", "--dry-run", "-o", form]
        return subprocess.run(line, env=dict(environ), cwd=folder, check=True, capture_output=True, text=True).stdout

    (folder / "config.yaml").write_text(plan("yaml"))
    (folder / "request.json").write_text(json.dumps(json.loads(plan("json"))["attempts"][0]["request"]))


def measure(runs: int) -> dict[str, list[Taken]]:
    """Run each command `runs` times, alternating, after one round that is not counted."""
    with tempfile.TemporaryDirectory() as name, GoogleCloud() as cloud, OciRegistry() as registry:
        folder, witness = Path(name), Witness()
        cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.create", witness, times=None))
        environ = {**os.environ, **cloud.environ(), "HOME": name, "NO_GCE_CHECK": "true", "DOCKER_CONFIG": name}
        prepare(folder, pinned(registry), environ)
        everything = commands(folder, cloud.url)
        taken: dict[str, list[Taken]] = {title: [] for title in everything}
        for number in range(runs + 1):
            for title, line in everything.items():
                one = run(line(number), environ, folder, witness)
                if number:
                    taken[title].append(one)
    return taken


def table(taken: Mapping[str, list[Taken]]) -> str:
    """Return a Markdown table of medians and ratios."""
    base = median(one.cpu for one in next(iter(taken.values())))
    lines = ["| command | CPU s to the create | × the import | CPU s in all | wall s to the create | wall s in all |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for title, runs in taken.items():
        sends = runs[0].cpu_to_create is not None
        cpu = median((one.cpu_to_create if one.cpu_to_create is not None else one.cpu) for one in runs)
        wall = f"{median(one.wall_to_create or 0.0 for one in runs):.2f}" if sends else "–"
        shown = f"{cpu:.2f}" if sends else f"({cpu:.2f})"
        all_cpu, all_wall = median(one.cpu for one in runs), median(one.wall for one in runs)
        lines.append(f"| {title} | {shown} | {cpu / base:.2f} | {all_cpu:.2f} | {wall} | {all_wall:.2f} |")
    return "\n".join(lines)


def pinned(registry: OciRegistry) -> str:
    """Put a small image into the registry, and return its reference with digest."""
    from launcher.testing.registry import put_image

    return f"{registry.host}/p/train@{put_image(registry, 'p/train')}"


def main() -> None:
    """Measure and print; with --write, save the table in benchmarks/results/."""
    parser = parser_of("submit", __doc__)
    parser.add_argument("--runs", type=int, default=7, help="runs of each command")
    options = parser.parse_args()
    taken = measure(options.runs)
    head = f"# To the create request, {today()}\n\nMedians of {options.runs} runs in turns. "
    head += f"{described('google-cloud-aiplatform', 'grpcio')}.\n"
    limit = f"`launch vertex SPEC --detach` should stay at or below {LIMIT:g} × the import; in brackets: to its end."
    text = f"{head}\n{table(taken)}\n\n{limit}\n"
    publish("submit", text, write=options.write)


if __name__ == "__main__":
    main()
