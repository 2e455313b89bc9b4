"""Store a trace in the run folder, and report its verdict to the terminal and the metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.scratch import temporary_folder
from launch_train.common.storage import open_storage
from launch_train.profiling.__main__ import pack
from launch_train.profiling.advice import WIDTH, Setup, format_verdict
from launch_train.telemetry.metric_sink import Sink
from launch_train.telemetry.rows import Row
from launch_train.telemetry.upload_queue import open_outbox

JUDGE_SECONDS = 300.0
"""Time limit for reading a trace; a trace of three steps takes a second or two."""

SEND_SECONDS = 300.0
"""Time limit for the upload to the run folder, if the run ends first."""

MOST_BYTES = 1 << 29
"""A larger trace is stored but not analysed: in Python it takes about ten times its size in memory."""


class Recorded(NamedTuple):
    """A recorded trace.

    `export` writes it to a path. `last` is the number of its last step, `seconds` the Unix time of its end.
    """

    export: Callable[[str], object]
    steps: int
    last: int
    seconds: float


class ProfileReport:
    """Reports the results of this process's profiler."""

    def __init__(self, env: Mapping[str, str], sink: Sink, setup: Setup) -> None:
        self._env, self._sink, self._setup = env, sink, setup

    def send(self, recorded: Recorded) -> None:
        """Analyse, store and report a trace, in a separate thread. A failure is printed and doesn't end the run."""
        try:
            with temporary_folder("profile") as folder:
                self._send(recorded, Path(folder))
        except Exception as error:  # noqa: BLE001 - training continues without a profile
            self.failed(error)

    def _send(self, recorded: Recorded, folder: Path) -> None:
        env = self._env
        start = runfolder.start_name(int(env.get(contract.ATTEMPT) or 1), int(env.get(contract.GENERATION) or 0))
        # Named as TensorBoard's profiler plugin expects (torch.profiler.tensorboard_trace_handler).
        name = f"{runfolder.PROFILE}/{start}/rank0.{int(recorded.seconds * 1e9)}.pt.trace.json.gz"
        trace = folder / Path(name).name.removesuffix(".gz")
        recorded.export(str(trace))
        steps = f"{recorded.last - recorded.steps + 1}-{recorded.last}" if recorded.steps > 1 else f"{recorded.last}"
        files = {name: Path(f"{trace}.gz")}
        try:
            event = judge(trace, self._setup, recorded.steps)
            text = format_verdict(event, steps)
            contents = {
                "verdict.json": json.dumps({**event, "which": steps, "trace": name}, indent=2),
                "verdict.txt": text,
            }
            for file, content in contents.items():  # a later start overwrites them
                (folder / file).write_text(f"{content}\n", encoding="utf-8")
                files[f"{runfolder.PROFILE}/{file}"] = folder / file
        except ValueError as error:
            event, text = {"error": str(error)}, _wrapped(f"profile of steps {steps}: {error}")
        if trace.exists():
            pack(trace)
        kept = self._keep(files)
        self._log({"step": recorded.last, **event, **({"trace": name} if kept else {})})
        print(f"{text}\n  The trace is in {Path(name).parent}/" if kept else text, flush=True)

    def _keep(self, files: Mapping[str, Path]) -> bool:
        """Upload the files to the run folder, if there is one. Return whether there is."""
        if not self._env.get(contract.RUN_FOLDER):
            return False
        outbox = open_outbox(open_storage(self._env[contract.RUN_FOLDER]), self._env)
        for name, path in files.items():
            outbox.put_file(name, path)
        try:
            outbox.close(SEND_SECONDS)
        except OutputError as error:
            print(f"profile: {error}", file=sys.stderr, flush=True)
        return True

    def failed(self, error: Exception) -> None:
        """Report that the profiler failed."""
        self.no_verdict(f"no verdict: {error}".partition("\n")[0])

    def no_verdict(self, reason: str) -> None:
        """Report that there is no verdict, and why."""
        print(_wrapped(f"profile: {reason}"), flush=True)
        self._log({"error": reason})

    def _log(self, fields: Mapping[str, Any]) -> None:
        row: Row = {"event": "profile", "time": time.time(), **fields}
        try:
            self._sink.put([row])
        except Exception as error:  # noqa: BLE001 - the training thread meets the same error and handles it
            print(f"profile: {error}", file=sys.stderr, flush=True)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def judge(trace: Path, setup: Setup, steps: int) -> dict[str, Any]:
    """Analyse and compress the trace in a separate process with low priority, and return the verdict.

    Raises ValueError if the trace can't be analysed.
    """
    if trace.stat().st_size > MOST_BYTES:
        raise ValueError(f"the trace has {trace.stat().st_size / 1e9:.1f} GB, too large to analyse: record fewer steps")
    command = [sys.executable, "-P", "-m", "launch_train.profiling.__main__", "--json", "--pack", "--nice", "10"]
    command += ["--steps", str(steps), "--setup", json.dumps(setup._asdict()), str(trace)]
    env = {**os.environ, "PYTHONPATH": str(Path(contract.__file__).parents[2])}
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=JUDGE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        limit = f"{JUDGE_SECONDS:.0f} s: record fewer steps"
        raise ValueError(f"the trace could not be analysed within {limit}") from error
    if done.returncode:
        raise ValueError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict
