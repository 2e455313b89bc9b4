"""Measure the start-up cost of commands: CPU time (user + system) of fresh processes.

    python -m benchmarks.startup [--runs 9] [--write]

The commands alternate, so that a slow moment of the machine affects all of them; medians are compared. All modules have
bytecode, as in an installation.
"""

from __future__ import annotations

import compileall
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "job_specs" / "vertex-2xh100.yaml"
PACKAGES = ("launcher", "train/launch_train")
LIMIT = 1.5
"""Upper bound of the ratio between `launch` and the bare command."""


class Command(NamedTuple):
    """A command line, and the title of its baseline ("" if it has none)."""

    title: str
    line: tuple[str, ...]
    against: str = ""


class Row(NamedTuple):
    """CPU seconds of all runs of a command."""

    command: Command
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median in seconds."""
        return median(self.seconds)


def commands() -> list[Command]:
    """Return all commands to measure; gcloud only if it is installed."""
    bare, launch = (sys.executable, str(Path(__file__).with_name("bare.py"))), _launch()
    gcloud = shutil.which("gcloud")
    return [
        Command("python -c pass", (sys.executable, "-c", "pass")),
        Command("bare Typer command, reads the spec", (*bare, str(SPEC))),
        Command("bare Typer command, --help", (*bare, "--help")),
        Command("launch --help", (*launch, "--help"), "bare Typer command, --help"),
        Command(
            "launch vertex SPEC --dry-run",
            (*launch, "vertex", str(SPEC), "--dry-run"),
            "bare Typer command, reads the spec",
        ),
        Command("launch gpus", (*launch, "gpus"), "bare Typer command, reads the spec"),
        Command("launch check SPEC", (*launch, "check", str(SPEC)), "bare Typer command, reads the spec"),
        Command("launch estimate SPEC", (*launch, "estimate", str(SPEC)), "bare Typer command, reads the spec"),
        *([Command("gcloud ai custom-jobs create --help", _gcloud_help(gcloud))] if gcloud else []),
    ]


def _launch() -> tuple[str, ...]:
    """Return the installed command next to this Python, else the module."""
    script = Path(sys.executable).with_name("launch")
    return (str(script),) if script.exists() else (sys.executable, "-m", "launcher")


def _gcloud_help(gcloud: str) -> tuple[str, ...]:
    return (gcloud, "ai", "custom-jobs", "create", "--help")


def measure(runs: int) -> list[Row]:
    """Run each command `runs` times, alternating, after one round that is not counted."""
    everything = commands()
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=1)
    with tempfile.TemporaryDirectory() as config:
        turns = [[cpu_seconds(command, config) for command in everything] for _ in range(runs + 1)]
    return [Row(command, seconds) for command, seconds in zip(everything, zip(*turns[1:], strict=True), strict=True)]


def cpu_seconds(command: Command, config: str) -> float:
    """Return the user and system time of one run in seconds. Raises CalledProcessError if it fails."""
    environment = {**os.environ, "CLOUDSDK_CORE_PROJECT": "my-project", "CLOUDSDK_CONFIG": config}
    environment["XDG_CONFIG_HOME"] = config
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command.line, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of medians, spread and ratios."""
    medians = {row.command.title: row.median for row in rows}
    reading = medians["bare Typer command, reads the spec"]
    lines = ["| command | CPU ms, median | least to most | × bare, reads the spec | × its own bare |"]
    lines.append("|---|---:|---:|---:|---:|")
    for row in rows:
        spread = f"{min(row.seconds) * 1000:.0f} to {max(row.seconds) * 1000:.0f}"
        own = f"{row.median / medians[row.command.against]:.2f}" if row.command.against else ""
        name, middle = row.command.title, f"{row.median * 1000:.0f}"
        lines.append(f"| {name} | {middle} | {spread} | {row.median / reading:.2f} | {own} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print; with --write, save the table in benchmarks/results/."""
    parser = parser_of("startup", __doc__)
    parser.add_argument("--runs", type=int, default=9, help="runs of each command")
    options = parser.parse_args()
    rows = measure(options.runs)
    head = f"# Start-up, {today()}\n\nMedians of {options.runs} runs in turns. "
    head += f"{described('typer', 'pyyaml', 'msgspec')}.\n"
    limit = f"\nThe `launch` rows should stay at or below {LIMIT} × bare."
    text = f"{head}\n{table(rows)}\n{limit}\n"
    publish("startup", text, write=options.write)


if __name__ == "__main__":
    main()
