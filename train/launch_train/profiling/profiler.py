"""Record some steps with torch's profiler (the setting `profile`), and report what limits the run's speed.

Only rank 0 records. All ranks do the same work, and rank 0's trace includes its waits for the others; recording on more
ranks would slow down their nodes, and thereby all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.config import Config, Profile
from launch_train.common.errors import OutputError, PreemptedError
from launch_train.common.scratch import temporary_folder
from launch_train.common.storage import open_storage
from launch_train.distributed.process_group import Ranks, use_device
from launch_train.profiling.__main__ import pack
from launch_train.profiling.advice import WIDTH, Setup, format_verdict
from launch_train.telemetry.metric_sink import Sink
from launch_train.telemetry.rows import Row
from launch_train.telemetry.upload_queue import open_outbox

END_SECONDS = 600.0
"""Time limit at the end of a run for the verdict and the upload of the trace."""

FAILED_SECONDS = 0.5
"""Time limit after an error or a preemption; the node uploads the rest."""

JUDGE_SECONDS = 300.0
"""Time limit for reading a trace; a trace of three steps takes a second or two."""

SEND_SECONDS = 300.0
"""Time limit for the upload to the run folder, if the run ends first."""

MOST_BYTES = 1 << 29
"""A larger trace is stored but not analysed: in Python it takes about ten times its size in memory."""

_NOTHING = nullcontext()


class Profiler:
    """The profiler of the training loop. This one records nothing."""

    @property
    def records(self) -> bool:
        """Return whether profiling slows down the current step, so that its duration must not be counted."""
        return False

    def start(self) -> None:
        """Called before the first step."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """Mark a part of the step in the trace, with a name from launch_train.profiling.trace."""
        return _NOTHING

    def stepped(self, step: int) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Stop recording and wait for the verdict."""


def open_profiler(
    config: Config, ranks: Ranks, env: Mapping[str, str], sink: Sink, facts: Mapping[str, Any], *, accumulates: bool
) -> Profiler:
    """Open the profiler of this process.

    `facts` are those of the start event; `accumulates`: a step has several micro-batches.
    """
    if config.profile is None or ranks.rank:
        return Profiler()
    import torch._inductor.config  # noqa: F401 - takes 2 s; else the profiler imports it in a step

    report = ProfileReport(env, sink, setup_of(config, ranks, env, facts, accumulates=accumulates))
    return Recording(config.profile, ranks.device, report)


def setup_of(
    config: Config, ranks: Ranks, env: Mapping[str, str], facts: Mapping[str, Any], *, accumulates: bool
) -> Setup:
    """Return the settings of the run that advice depends on."""
    chosen = {choice["what"]: str(choice["chosen"]) for choice in facts.get("choices", ())}
    gpu = ranks.device.type == "cuda"
    tensor_cores = gpu and torch.cuda.get_device_capability(ranks.device) >= (7, 0)
    loader = chosen.get("loader", "").split()
    return Setup(
        gpu=gpu,
        nodes=max(1, ranks.world // int(env.get("LOCAL_WORLD_SIZE") or ranks.world)),
        compiled=chosen.get("compile", "false") not in ("false", "off", "eager"),
        cuda_graphs=config.cuda_graphs,
        workers=int(loader[0]) if loader and loader[0].isdecimal() else config.loader.workers,
        checkpointing=config.activation_checkpointing,
        parallel=config.parallel,
        log_every=config.log_every,
        accumulates=accumulates,
        bf16=tensor_cores and facts.get("precision", "fp32") in ("fp32", "tf32"),
    )


class Recording(Profiler):
    """Skips `wait` steps, warms up torch's profiler, records, and reports from a thread.

    Steps after the recording run at full speed. Errors are reported and do not end the run.
    """

    def __init__(self, wanted: Profile, device: torch.device, report: ProfileReport) -> None:
        self._wanted, self._device, self._report = wanted, device, report
        self._profile: profile | None = None
        self._thread: Thread | None = None
        self._steps = self._last = 0
        """Steps completed in this process, and the number of the last one."""
        self._over = self._exporting = False

    @property
    def records(self) -> bool:
        return self._profile is not None or self._exporting

    def start(self) -> None:
        if not self._wanted.wait:
            self._attempt(self._begin)

    def range(self, name: str) -> AbstractContextManager[object]:
        return record_function(name) if self._profile else _NOTHING

    def stepped(self, step: int) -> None:
        if self._over:
            return
        self._steps, self._last = self._steps + 1, step
        if self._profile:
            self._attempt(self._profile.step)
            if self._steps == sum(self._wanted):
                self._attempt(self._finish)
        elif self._steps == self._wanted.wait:
            self._attempt(self._begin)

    def close(self) -> None:
        """Stop. After an error, do not wait for a GPU that may never respond."""
        error = sys.exc_info()[1]
        if error is None and not self._over:
            if self._profile and self._recorded > 0:  # the run ended before the recording was complete
                self._attempt(self._finish)
            else:
                self._drop()
                if self._steps:  # else the run had no steps left
                    needed = f"wait + warmup + active are {sum(self._wanted)}"
                    self._report.no_verdict(f"no step was recorded: {self._steps} steps remained, but {needed}")
        elif self._profile and (isinstance(error, PreemptedError) or self._device.type != "cuda"):
            self._drop()
        self._over = True
        if self._thread:
            self._thread.join(END_SECONDS if error is None else FAILED_SECONDS)

    @property
    def _recorded(self) -> int:
        return self._steps - self._wanted.wait - self._wanted.warmup

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - profiling is optional; training continues without it
            self._drop()
            self._report.no_verdict(error)

    def _begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else Kineto writes two lines to stderr
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a skewed profile without warm-up, which the user chose
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=self._wanted.warmup, active=self._wanted.active, repeat=1),
            )
            self._profile.start()

    def _finish(self) -> None:
        """Stop recording and hand the profile to a thread, which exports and releases it."""
        held, self._profile, self._over = self._profile, None, True
        if held is None:
            return
        held.stop()
        self._exporting = True
        args = (partial(self._export, held), self._recorded, self._last)
        self._thread = Thread(target=self._report.send, args=args, name="profile", daemon=True)
        self._thread.start()

    def _export(self, held: profile, path: str) -> None:
        """Export the trace; after that, steps run at full speed because another process analyses it."""
        use_device(self._device)
        try:
            held.export_chrome_trace(path)
        finally:
            self._exporting = False

    def _drop(self) -> None:
        held, self._profile, self._over = self._profile, None, True
        if held:
            with suppress(Exception):
                held.stop()


# --- The trace in the run folder, and its verdict ---------------------------------------------------------------------


class ProfileReport:
    def __init__(self, env: Mapping[str, str], sink: Sink, setup: Setup) -> None:
        self._env, self._sink, self._setup = env, sink, setup

    def send(self, export: Callable[[str], object], count: int, last: int) -> None:
        """Analyse, store and report a trace, in a separate thread. A failure is printed and doesn't end the run.

        `export` writes the trace to a path; it has `count` steps up to step `last`.
        """
        try:
            with temporary_folder("profile") as folder:
                self._send(export, count, last, Path(folder))
        except Exception as error:  # noqa: BLE001 - training continues without a profile
            self.no_verdict(error)

    def _send(self, export: Callable[[str], object], count: int, last: int, folder: Path) -> None:
        env = self._env
        start = runfolder.start_name(int(env.get(contract.ATTEMPT) or 1), int(env.get(contract.GENERATION) or 0))
        # Named as TensorBoard's profiler plugin expects (torch.profiler.tensorboard_trace_handler).
        name = f"{runfolder.PROFILE}/{start}/rank0.{time.time_ns()}.pt.trace.json.gz"
        trace = folder / Path(name).name.removesuffix(".gz")
        export(str(trace))
        steps = f"{last - count + 1}-{last}" if count > 1 else f"{last}"
        files = {name: Path(f"{trace}.gz")}
        try:
            event = judge(trace, self._setup, count)
            text = format_verdict(event, steps)
            verdict = json.dumps({**event, "which": steps, "trace": name}, indent=2)
            for file, content in (("verdict.json", verdict), ("verdict.txt", text)):  # a later start overwrites them
                (folder / file).write_text(f"{content}\n", encoding="utf-8")
                files[f"{runfolder.PROFILE}/{file}"] = folder / file
        except ValueError as error:
            event = {"error": str(error)}
            text = textwrap.fill(f"profile of steps {steps}: {error}", WIDTH, subsequent_indent="  ")
        if trace.exists():
            pack(trace)
        kept = self._keep(files)
        self._log({"step": last, **event, **({"trace": name} if kept else {})})
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

    def no_verdict(self, reason: Exception | str) -> None:
        """Report that there is no verdict, and why: the profiler failed, or nothing was recorded."""
        reason = f"no verdict: {reason}".partition("\n")[0] if isinstance(reason, Exception) else reason
        print(textwrap.fill(f"profile: {reason}", WIDTH, subsequent_indent="  "), flush=True)
        self._log({"error": reason})

    def _log(self, fields: Mapping[str, Any]) -> None:
        row: Row = {"event": "profile", "time": time.time(), **fields}
        try:
            self._sink.put([row])
        except Exception as error:  # noqa: BLE001 - the training thread meets the same error and handles it
            print(f"profile: {error}", file=sys.stderr, flush=True)


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
            check=False,
            timeout=JUDGE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        limit = f"{JUDGE_SECONDS:.0f} s: record fewer steps"
        raise ValueError(f"the trace could not be analysed within {limit}") from error
    if done.returncode:
        raise ValueError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict
