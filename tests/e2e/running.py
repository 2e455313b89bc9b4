"""`launch` as a separate process, the way a person starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.command import ROOT, WORLD

LAUNCH = Path(sys.executable).parent / "launch"
TINY = """\
name: tiny
machine: {type: l4, gpus: 2}
env: {OMP_NUM_THREADS: "1"}
run:
  config:
    model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 32, block_size: 32}
    data: python-stdlib
    steps: 12
    batch_size: 8
    optimizer: {lr: 1e-2, warmup_steps: 2}
    eval: {every: 6, batches: 2}
    log_every: 4
"""
"""One thread for each process: two wait for each other by spinning, for ten times as long on a machine that is busy."""


def started(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`launch ARGV` with both streams as pipes."""
    return subprocess.Popen(
        [LAUNCH, *map(str, argv)],
        cwd=cwd,
        env={**WORLD, "XDG_CACHE_HOME": str(ROOT / ".launch" / "cache"), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`launch ARGV` to its end."""
    process = started(*argv, cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def succeeded(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same, and it must end with 0."""
    ran = run(*argv, cwd=cwd)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def records(folder: Path) -> list[dict[str, Any]]:
    """All records of all metrics parts below a run folder, in the order of their names."""
    parts = sorted((folder / "metrics").glob("*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """The loss of each step."""
    return [record["loss"] for record in records(folder) if "event" not in record]


def only_run(output: Path) -> Path:
    """The one run folder below an output."""
    (folder,) = output.iterdir()
    return folder
