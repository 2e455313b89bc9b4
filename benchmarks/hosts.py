"""Measure `launch on` with OpenSSH's server on the loopback interface: from an edit to the first row, and a status.

    python -m benchmarks.hosts [--runs 5] [--write]

The script has no PyTorch, so what is measured is launch and the connection. The host is warm: the connection is open
and launch_train is there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from tests.remote.hosts import NAME, a_host

LAUNCH = Path(sys.executable).with_name("launch")
FIRST_ROW_SECONDS = 10.0
"""What an edit should take until the first row."""
SPEC = "name: job\nmachine: {type: l4, gpus: 1}\nrun: {script: work.py, launcher: python}\n"
WORK = "import launch_train.metrics, time\nlaunch_train.metrics.log(1, loss=VALUE)\ntime.sleep(2)\n"


def measure(runs: int, folder: Path, home: Path) -> list[tuple[str, list[float]]]:
    """Return the seconds of each run, by what is measured."""
    rows: list[float] = []
    ends: list[float] = []
    statuses: list[float] = []
    trips: list[float] = []
    for number in range(runs + 1):  # the first one opens the connection and sends launch_train
        (folder / "work.py").write_text(WORK.replace("VALUE", f"{number + 1}.0"))
        begun = time.monotonic()
        command = [str(LAUNCH), "on", NAME, "job.yaml", "--cpu"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            while len(list(home.glob("launch/runs/*/metrics/*"))) <= number and client.poll() is None:
                time.sleep(0.01)
            rows.append(time.monotonic() - begun)
            _, errors = client.communicate()
            if client.returncode:
                raise SystemExit(errors.decode())
            ends.append(time.monotonic() - begun)
        for times, words in ((statuses, [str(LAUNCH), "status", f"{NAME}:job"]), (trips, ["ssh", NAME, "true"])):
            begun = time.monotonic()
            subprocess.run(words, cwd=folder, check=True, capture_output=True)
            times.append(time.monotonic() - begun)
    return [
        ("edit → first row in the run folder", rows[1:]),
        ("edit → launch has ended, of a script that takes 2 s", ends[1:]),
        ("`launch status HOST:RUN`", statuses[1:]),
        ("`ssh HOST true`, a connection of its own", trips[1:]),
    ]


def main() -> None:
    """Measure and print; with --write, save the table in benchmarks/results/."""
    parser = parser_of("hosts", __doc__)
    parser.add_argument("--runs", type=int, default=5, help="edits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        folder = Path(place, "project")
        folder.mkdir()
        (folder / "job.yaml").write_text(SPEC)
        patch.setenv("XDG_STATE_HOME", f"{place}/state")
        with a_host(Path(place), patch, python=sys.executable, sends_trainer=True) as server:
            table = measure(options.runs, folder, server.home)
    lines = [f"# A host by SSH, {today()}", "", f"{options.runs} edits. {described('msgspec')}.", ""]
    lines += ["| what | median, s | least to most |", "|---|---:|---:|"]
    lines += [f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} |" for name, values in table]
    lines += ["", f"The first row should come within {FIRST_ROW_SECONDS:g} s."]
    publish("hosts", "\n".join(lines) + "\n", write=options.write)


if __name__ == "__main__":
    main()
