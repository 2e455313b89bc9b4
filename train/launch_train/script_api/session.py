"""Checkpoints of a custom script: the implementation of `launch_train.checkpoint`.

Saver, lease, interval and format are the built-in trainer's; only the loop belongs to the script.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FrameType
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from launch_train import metrics
from launch_train.checkpointing import interval, rng_state
from launch_train.checkpointing.async_saver import LIMIT_SECONDS, Saver, Snapshot
from launch_train.checkpointing.resume_loader import FIXED, describe_changes, resume, scratch_folder, take_over
from launch_train.common import contract, faults
from launch_train.common.config import Checkpoint
from launch_train.common.console import say
from launch_train.common.errors import OutputError, PreemptedError, SupersededError, TrainError, UsageError
from launch_train.common.process_exit import exit_process
from launch_train.common.shutdown_signal import PEER_SECONDS, ShutdownSignal, catch_sigterm
from launch_train.common.signal_registry import register_for_signals
from launch_train.common.storage import Storage, open_storage
from launch_train.distributed.consensus import VOTE_SECONDS, Agreement, StepVote, seconds_to_save
from launch_train.distributed.process_group import Ranks, barrier, gather, joined, should_report
from launch_train.script_api import state_dict
from launch_train.script_api.state_comparison import ComparedValue, Comparison, Layout
from launch_train.telemetry.metric_sink import Sink

P = ParamSpec("P")
T = TypeVar("T")
Prepared = tuple[Snapshot, Layout]

END_SECONDS, FAILED_SECONDS = 600.0, 5.0
"""Time for the running save when a script ends, and when it has failed."""

ROWS_SECONDS = 1.5
"""Seconds for the last rows when this process exits."""

POLL_SECONDS = 0.1

CUSTOM_SCRIPT: Final = "your own script's"
"""Stands in a manifest for the trainer's settings, so that neither kind of run resumes from the other's checkpoints."""


@dataclass
class Script:
    """One start of a script. `saver` is None where nothing is saved: without torchrun, on nodes other than node 0."""

    ranks: Ranks
    storage: Storage
    shutdown: ShutdownSignal
    agreement: Agreement
    state: Mapping[str, Any]
    """The argument of `restore`: the objects that the script trains."""
    handlers: ExitStack
    comparison: Comparison
    saver: Saver | None = None
    step: int = 0
    """The newest step that was restored or saved."""
    seconds: float = 0.0
    """Seconds of training before this start."""
    interruptions: int = 0
    began: float = field(default_factory=time.monotonic)
    stop: bool = False
    """The ranks have agreed to leave."""
    call_seconds: float = 0.0
    """Mean seconds between two calls of `due`; the same on all ranks."""
    calls: int = 0
    first_call: float = 0.0
    """time.monotonic() of the first call of `due`."""

    def due(self, step: int) -> bool:
        if self.saver is None:
            return False
        self._measure_interval()
        self.saver.estimate(partial(state_dict.content, self.state))
        vote = StepVote(self.shutdown.preempted, save=self.saver.due(), leave=self.saver.superseded is not None)
        # Vote at each call: `call_seconds` is measured too seldom to notice that steps become longer. The first call
        # comes before it was measured.
        agreed = self.agreement.vote(vote, max(self.call_seconds, VOTE_SECONDS) if self.call_seconds else math.inf)
        if agreed.leave:
            raise self.saver.superseded or SupersededError("another start of this run has taken over")
        self.saver.after_step(step, self.call_seconds, self.trained, self.interruptions)
        self.stop = self.stop or agreed.stop
        return self.stop or agreed.save

    def save(self, step: int, state: Mapping[str, Any], own: Mapping[str, Any], *, wait: bool) -> None:
        """Start a checkpoint. With `wait`, or before leaving, wait until it is durable.

        Raises UsageError for a step before the newest and for a state that can't be saved, SupersededError, and with
        `wait` OutputError.
        """
        if self.saver is None:
            return
        snapshot, layout = self.comparison.agree(partial(self._prepare, self.saver, step, state, own, wait))
        first_only = state_dict.rank_0_paths(state, layout, self.comparison.settled)
        self.step, snapshot = step, snapshot._replace(first_only=first_only)
        if self.stop:
            self._save_before_exit(self.saver, snapshot)
        elif wait:
            self.saver.save(step, snapshot)
            self.saver.prune()
        else:
            self.finish(LIMIT_SECONDS)  # a save in each step would otherwise cancel the previous one each time
            barrier(self.ranks)  # else other nodes would wait for rank 0 in training, which has a shorter hang limit
            self.saver.begin(step, snapshot)

    @property
    def trained(self) -> float:
        """Seconds of training over all starts of the run."""
        return self.seconds + time.monotonic() - self.began

    def finish(self, seconds: float) -> None:
        if self.saver:
            self.saver.finish(seconds)

    def _measure_interval(self) -> None:
        """Measure the interval of calls at the second, fourth, eighth … call; the ranks must agree on it."""
        self.calls += 1
        if self.calls == 1:
            self.first_call = time.monotonic()
        elif self.calls & (self.calls - 1) == 0:
            self.call_seconds = max(gather(self.ranks, (time.monotonic() - self.first_call) / (self.calls - 1)))

    def _prepare(
        self, saver: Saver, step: int, state: Mapping[str, Any], own: Mapping[str, Any], wait: bool
    ) -> tuple[Prepared, Layout]:
        """Return what this rank would save, and what the ranks must agree on."""
        if saver.superseded:
            raise saver.superseded
        if step < self.step:
            raise UsageError(f"checkpoint.save: step {step} comes after step {self.step}: steps must increase")
        past = {"seconds": self.trained, "interruptions": self.interruptions}
        mine = {"random": rng_state.read_generators(self.ranks.device), "own": state_dict.own_content(own)}
        snapshot = Snapshot(
            state_dict.content(state), mine, {**_manifest_fields(self.ranks), "script": past}, frozenset()
        )
        layout = state_dict.layout(state, snapshot.shared) if self.ranks.world > 1 else {}
        call = {"step": ComparedValue(str(step), "", plain=False), "wait": ComparedValue(str(wait), "", plain=False)}
        return (snapshot, layout), {**layout, **{f"checkpoint.save({name}=…)": entry for name, entry in call.items()}}

    def _save_before_exit(self, saver: Saver, snapshot: Snapshot) -> None:
        """Raises SystemExit if the checkpoint isn't durable in time."""
        metrics.event("preempted", step=self.step)
        try:
            saver.save(self.step, snapshot, limit=seconds_to_save(self.ranks, self.shutdown))
        except OutputError as error:
            if self.ranks.rank == 0:
                say(f"preempted at step {self.step}; checkpoint not saved in time: {error}")
            close_rows()
            exit_process(128 + signal.SIGTERM, rank=self.ranks.rank)


# --- Called by launch_train.checkpoint --------------------------------------------------------------------------------

_script: Script | None = None
_ranks: Ranks | None = None


def _exit_on_error(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function: a TrainError, which all ranks raise alike, exits with one line and its exit code."""

    @wraps(work)
    def done(*args: P.args, **options: P.kwargs) -> T:
        try:
            return work(*args, **options)
        except TrainError as error:
            _leave(error)

    return done


@contextmanager
def _hang_limit_extended() -> Iterator[None]:
    """Extend the hang limit by the duration of a save: hang detection is for the script's own work.

    As in the trainer, the first process of a node sets it for all.
    """
    silence = float(os.environ.get(contract.HANG_AFTER) or 0)
    if not silence or int(os.environ.get("LOCAL_RANK") or 0):
        yield
        return
    beat = metrics._heartbeat()
    beat.expect(silence + LIMIT_SECONDS)
    try:
        yield
    finally:
        beat.expect(silence)


@_exit_on_error
@_hang_limit_extended()
def restore(state: state_dict.State, own: state_dict.State, settings: Checkpoint) -> int:
    """Open the run folder and load its newest checkpoint into `state`. Returns its step, or 0."""
    global _script  # noqa: PLW0603 - of the process, as its ranks and signals are
    if _script:
        raise UsageError("call checkpoint.restore once, before the first checkpoint.due and checkpoint.save")
    _script = _open_script(state, own, settings, os.environ)
    return _script.step


@_exit_on_error
def due(step: int) -> bool:
    faults.record_step(step)
    return _current_script().due(step)


@_exit_on_error
@_hang_limit_extended()
def save(step: int, state: Mapping[str, Any], own: Mapping[str, Any], *, wait: bool) -> None:
    _current_script().save(step, state, own, wait=wait)


def preempted() -> bool:
    return _script is not None and _script.stop


def leave_preempted() -> NoReturn:
    step = _script.step if _script else 0
    saved = f"checkpoint saved at step {step}; the next start resumes from there" if step else "nothing saved yet"
    _leave(PreemptedError(f"preempted: {saved}"))


def _current_script() -> Script:
    """Return the script. Raises UsageError before `restore`: without it the script would ignore saved checkpoints."""
    if _script is None:
        raise UsageError("call checkpoint.restore first: it claims the run folder and returns the step to resume from")
    return _script


def _leave(error: TrainError) -> NoReturn:
    if should_report(_ranks, error):
        say(str(error))
    close_rows()
    exit_process(int(error.exit), rank=_ranks.rank if _ranks else int(os.environ.get("RANK") or 0))


# --- Opening --------------------------------------------------------------------------------------------------------


def _open_script(
    state: state_dict.State, own: state_dict.State, settings: Checkpoint, env: Mapping[str, str]
) -> Script:
    """Open the run folder. Raises, on all ranks alike, UsageError (the checkpoint doesn't match the state),
    SupersededError and OutputError."""
    global _ranks  # noqa: PLW0603 - of the process, for its error
    if not dist.is_initialized() and "RANK" in env and int(env.get("WORLD_SIZE") or 1) > 1:
        raise UsageError(
            "call checkpoint.restore after torch.distributed.init_process_group: it synchronises the ranks"
        )
    ranks = _ranks = joined(env)
    comparison = Comparison(ranks)
    comparison.agree(lambda: (None, state_dict.check(state, own)))
    storage = open_storage(env[contract.RUN_FOLDER])
    saver = None
    if "RANK" in env or int(env.get(contract.NODE) or 0) == 0:
        claim = take_over(ranks, storage, _manifest_fields(ranks), env)  # raises if it is of another kind of run
        sink, every = metrics._default() if ranks.rank == 0 else Sink(), interval.from_settings(settings, env)
        saver = Saver(ranks, storage, settings, sink, start=claim.start, lease=claim.lease, interval=every)
    resumed = resume(
        ranks,
        storage,
        _manifest_fields(ranks),
        partial(state_dict.load_resumed, state, own, ranks),
        scratch_folder(env),
    )
    handlers = ExitStack()
    shutdown = listen_for_shutdown(env, handlers)
    script = Script(ranks, storage, shutdown, Agreement(ranks), state, handlers, comparison, saver)
    if resumed:
        past = resumed.about["script"]
        script.step, script.seconds, script.interruptions = resumed.step, past["seconds"], past["interruptions"] + 1
        metrics.event("resumed", step=resumed.step, path=resumed.folder)
        if ranks.rank == 0:
            print(f"resumed from step {resumed.step} ({resumed.folder})", flush=True)
            for line in describe_changes(resumed.about, _manifest_fields(ranks)):
                print(f"since the checkpoint was written: {line}", flush=True)
    threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # before the thread pools close, which save
    return script


def _manifest_fields(ranks: Ranks) -> dict[str, Any]:
    """Return what a manifest records of a script: nothing that could pass for the trainer's settings."""
    config = dict.fromkeys((*FIXED, "data"), CUSTOM_SCRIPT)
    return {"config": config, "world_size": ranks.world, "torch": torch.__version__}


# --- Shutdown signals: SIGTERM, which a script survives, and the node's preemption notice -----------------------------


def listen_for_shutdown(env: Mapping[str, str], handlers: ExitStack) -> ShutdownSignal:
    """Record SIGTERM from now on. A handler of the script's own stays installed; then only the node's notice counts."""
    register_for_signals(env)
    before = signal.getsignal(signal.SIGTERM)
    ours = isinstance(before, partial) and before.func is metrics._write_rows_and_die
    if not ours and before is not signal.SIG_DFL:
        return ShutdownSignal(env)
    shutdown = handlers.enter_context(catch_sigterm(env, _exit_if_stuck))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, partial(handle_sigterm, shutdown))
    return shutdown


def handle_sigterm(shutdown: ShutdownSignal, signum: int, frame: FrameType | None) -> None:
    """Record a preemption for `due`. Any other SIGTERM means that a peer has failed: exit."""
    shutdown.note(signum, frame)
    if not shutdown.preempted:
        raise SystemExit(128 + signum)


def _exit_if_stuck(shutdown: ShutdownSignal) -> None:
    """Exit from a thread once a peer has failed: the main thread may wait for that peer in native code.

    A preemption may turn into that later, when the node withdraws its notice.
    """
    shutdown.note(signal.SIGTERM, None)
    while shutdown.preempted:
        time.sleep(POLL_SECONDS)
    time.sleep(PEER_SECONDS)
    close_rows()
    exit_process(128 + signal.SIGTERM)


def close_rows() -> None:
    with suppress(Exception):  # the node sends what is left on the local disk
        metrics._default().close(ROWS_SECONDS)


# --- Process exit and fork --------------------------------------------------------------------------------------------


def _at_exit() -> None:
    """Finish the running save, unless the script has failed."""
    if _script:
        with _hang_limit_extended():
            _script.finish(FAILED_SECONDS if hasattr(sys, "last_value") else END_SECONDS)


def _detach_child() -> None:
    """Detach a forked child: it is no rank, handles signals itself, and must not save as its parent."""
    global _script  # noqa: PLW0603 - of the process
    if _script:
        _script = None
        signal.set_wakeup_fd(-1)
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, partial) and handler.func is handle_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_detach_child)
