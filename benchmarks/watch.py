"""What `launch watch` costs: CPU time of its process on a terminal of 80 × 24, beside a run that logs all the time.

    python3 -m benchmarks.watch [--runs 1 4] [--seconds 30]

The run is a folder that gets a block of ten steps and a line of output each second, as the trainer writes them. The
time to start is not counted. The aim is at most 2 % of one core.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import psutil

from launch_train import runfolder
from launch_train.common.storage import LocalFolder
from launcher.services.local.attempts import lock
from launcher.services.local.folder_lock import lock_run_folder

BEFORE = 5.0
"""Seconds before the measurement: the start."""


def write(folder: Path, second: int) -> None:
    """Write what a run writes in a second."""
    rows = [
        {"step": second * 10 + n, "loss": 3 / (second + 1), "tokens_per_s": 1e4, "step_s": 0.1, "time": time.time()}
        for n in range(1, 11)
    ]
    storage = LocalFolder(folder)
    storage.write(runfolder.metrics_part(1, 0, 0, second), b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    storage.write(runfolder.text_part(1, 0, second), f"step {second * 10} of 10000  loss 3.1\n".encode())
    samples = [{"gpu": gpu, "util": 0.9, "memory_gb": 60.0, "temp_c": 60, "power_w": 600.0} for gpu in range(8)]
    sample = {"time": time.time(), "gpus": samples, "host": {"cpu": 0.3, "ram_gb": 100.0}}
    storage.write(runfolder.monitor_part(1, 0, 0, second), json.dumps(sample).encode() + b"\n")


def watch(folders: list[Path], seconds: float) -> float:
    """Return the share of a core that a watch of these runs takes."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-m", "launcher", "watch", *map(str, folders)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    found, began, second, before, drawn = psutil.Process(process), time.monotonic(), 1, 0.0, b""
    while (at := time.monotonic() - began) < BEFORE + seconds:
        if at >= second:
            for folder in folders:
                write(folder, second)
            second += 1
        if at >= BEFORE and not before:
            before = sum(found.cpu_times()[:2])
        if select.select([terminal], [], [], 0.1)[0]:
            drawn += os.read(terminal, 1 << 16)
    if b"tokens/s" not in drawn[-40_000:]:
        sys.exit(f"nothing was drawn: {drawn[-2000:].decode(errors='replace')}")
    used: float = sum(found.cpu_times()[:2]) - before
    os.write(terminal, b"q")
    os.waitpid(process, 0)
    return used / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    for count in options.runs:
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name, f"run-{number:08d}") for number in range(count)]
            for folder in folders:
                folder.mkdir()
                lock(LocalFolder(folder), {"region": "local", "machine": "g2-standard-24", "provisioning": "standard"})
                write(folder, 0)
            held = [lock_run_folder(folder) for folder in folders]
            for one in held:
                one.__enter__()
            print(f"{count} run{'s' if count > 1 else ''}: {watch(folders, options.seconds):.1%} of a core")


if __name__ == "__main__":
    main()
