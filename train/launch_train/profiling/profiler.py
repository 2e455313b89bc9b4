"""Record some steps with torch's profiler (the setting `profile`), and report what limits the run's speed.

Only rank 0 records. All ranks do the same work, and rank 0's trace includes its waits for the others; recording on more
ranks would slow down their nodes, and thereby all.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from launch_train.common.config import Config, Profile
from launch_train.common.errors import PreemptedError
from launch_train.distributed.process_group import Ranks, use_device
from launch_train.profiling.advice import Setup
from launch_train.profiling.report import ProfileReport, Recorded
from launch_train.telemetry.metric_sink import Sink

END_SECONDS = 600.0
"""Time limit at the end of a run for the verdict and the upload of the trace."""

FAILED_SECONDS = 0.5
"""Time limit after an error or a preemption; the node uploads the rest."""

_NOTHING = nullcontext()


class Profiler(Protocol):
    """Records steps of the training loop."""

    @property
    def records(self) -> bool:
        """Return whether profiling slows down the current step, so that its duration must not be counted."""

    def start(self) -> None:
        """Called before the first step."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """Mark a part of the step in the trace, with a name from launch_train.profiling.trace."""

    def stepped(self, step: int) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Stop recording and wait for the verdict."""


class NoProfiler:
    """Records nothing."""

    records = False

    def start(self) -> None: ...

    def range(self, name: str) -> AbstractContextManager[object]:
        return _NOTHING

    def stepped(self, step: int) -> None: ...

    def close(self) -> None: ...


def open_profiler(
    config: Config, ranks: Ranks, env: Mapping[str, str], sink: Sink, facts: Mapping[str, Any], *, accumulates: bool
) -> Profiler:
    """Open the profiler of this process.

    `facts` are those of the start event; `accumulates`: a step has several micro-batches.
    """
    if config.profile is None or ranks.rank:
        return NoProfiler()
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


class Recording:
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
        """Return the number of steps recorded completely."""
        return self._steps - self._wanted.wait - self._wanted.warmup

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - profiling is optional; training continues without it
            self._drop()
            self._report.failed(error)

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
        done = Recorded(partial(self._export, held), self._recorded, self._last, time.time())
        self._thread = Thread(target=self._report.send, args=(done,), name="profile", daemon=True)
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
