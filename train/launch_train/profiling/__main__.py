"""Analyse a trace of torch.profiler, and print what limits the run's speed.

python -m launch_train.profiling.__main__ TRACE.json.gz

The trainer runs this program on its own traces. It is a separate process because a trace has some 100,000 events, and
reading them on a thread would slow down training. Standard library only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from launch_train.profiling import trace as traces
from launch_train.profiling.advice import Setup, explain_analysis, format_verdict
from launch_train.profiling.bottleneck import analyse

NO_DEVICE = (
    "the trace has no GPU activity: the driver may allow profiling to administrators only "
    "(NVreg_RestrictProfilingToAdminUsers)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the verdict; return 0, 2 if the trace is unusable, or 141 (SIGPIPE) if stdout is closed."""
    about = "What bounds a run, from a trace of it."
    parser = argparse.ArgumentParser("python -m launch_train.profiling.__main__", description=about)
    parser.add_argument("trace", type=Path, help="TRACE.json or TRACE.json.gz, of torch.profiler")
    parser.add_argument("--steps", type=int, metavar="N", help="analyse only the first N steps")
    parser.add_argument("--setup", type=_setup, default=Setup(), help="the run's settings, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--pack", action="store_true", help="compress the trace, too")
    parser.add_argument("--nice", type=int, default=0, choices=range(20), metavar="0…19", help="make way for others")
    options = parser.parse_args(arguments)
    os.nice(options.nice)
    try:
        trace = traces.read(options.trace)
        if options.setup.gpu and not trace.device:
            raise ValueError(NO_DEVICE)
        analysis = analyse(trace, options.steps)
        if analysis is None:
            raise ValueError("no whole step is in the trace")
        verdict = explain_analysis(analysis, options.setup)
    except (OSError, ValueError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"{options.trace.name} can't be used: {reason or type(error).__name__}", file=sys.stderr)
        return 2
    finally:
        if options.pack and options.trace.exists():
            pack(options.trace)
    try:
        print(json.dumps(verdict) if options.json else format_verdict(verdict), flush=True)
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        return 128 + signal.SIGPIPE
    return 0


def _setup(text: str) -> Setup:
    try:
        return Setup(**json.loads(text))
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pack(trace: Path) -> None:
    """Replace TRACE.json by TRACE.json.gz."""
    with trace.open("rb") as source, gzip.open(f"{trace}.gz", "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    trace.unlink()


if __name__ == "__main__":
    sys.exit(main())
