"""Checkpoints of a script of your own. `launch_train.checkpoint` has the functions that a script calls; this is behind
them.

The same saver, fence, interval and format as the built-in trainer's: what differs is who holds the loop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it, untyped

from launch_train import metrics
from launch_train.api import state_dict
from launch_train.api.signals import close_rows, heard, listening
from launch_train.api.state_comparison import Comparison, Entry, Layout
from launch_train.checkpointing import interval, rng_state
from launch_train.checkpointing.async_saver import LIMIT_SECONDS, Saver, Snapshot
from launch_train.checkpointing.loader import FIXED, changes, resume, scratch, take_over
from launch_train.common import contract, faults
from launch_train.common.config import Checkpoint
from launch_train.common.errors import OutputError, PreemptedError, SupersededError, TrainError, UsageError
from launch_train.common.process_exit import NOTICE_SECONDS, Told, leave
from launch_train.common.storage import Storage, open_storage
from launch_train.distributed.consensus import APART_SECONDS, Agreement, Wish
from launch_train.distributed.process_group import Ranks, gather, meet, speaks

P = ParamSpec("P")
T = TypeVar("T")
Prepared = tuple[Snapshot, Layout]

END_SECONDS, FAILED_SECONDS = 600.0, 5.0
"""How long a script that has ended, or failed, waits for the save that is under way."""

OWN: Final = "your own script's"
"""In place of the settings that the built-in trainer notes: the two never go on from each other."""


@dataclass
class Script:
    """One start of a script. `saver` is None where nothing is saved: on nodes behind the first, without torchrun."""

    ranks: Ranks
    storage: Storage
    told: Told
    agreement: Agreement
    notice: str | None
    handlers: ExitStack
    comparison: Comparison
    saver: Saver | None = None
    step: int = 0
    """The newest one that was restored or saved."""
    seconds: float = 0.0
    """Of training before this start."""
    interruptions: int = 0
    began: float = field(default_factory=time.monotonic)
    stop: bool = False
    """The ranks have agreed to leave."""
    usual: float = 0.0
    """Seconds from one call of `due` to the next, as all ranks know it."""
    calls: int = 0
    first: float = 0.0
    """When `due` was called first."""

    def due(self, step: int) -> bool:
        """Whether all ranks are to save now."""
        if self.saver is None:
            return False
        self._look_at_the_clock()
        told = self.told.preempted or bool(self.notice and os.path.exists(self.notice))  # noqa: PTH110 - each step
        wish = Wish(stop=told, save=self.saver.due(), leave=self.saver.superseded is not None)
        # A word at each call: `usual` is looked at too seldom to notice a script whose steps become longer.
        agreed = self.agreement.turn(wish, max(self.usual, APART_SECONDS))
        if agreed.leave:
            raise self.saver.superseded or SupersededError("another start of this run has taken it over")
        self.saver.stepped(step, self.usual, self.trained, self.interruptions)
        self.stop = self.stop or agreed.stop
        return self.stop or agreed.save

    def save(self, step: int, state: Mapping[str, Any], own: Mapping[str, Any], *, wait: bool) -> None:
        """Begin a checkpoint; with `wait`, or before leaving, until it is durable. Raises UsageError for a step behind
        the newest and a state that can't be saved, SupersededError, and with `wait` OutputError."""
        if self.saver is None:
            return
        snapshot, layout = self.comparison.agree(partial(self._prepared, self.saver, step, state, own, wait))
        first_only = state_dict.of_rank_0(state, layout, self.comparison.settled)
        self.step, snapshot = step, snapshot._replace(first_only=first_only)
        if self.stop:
            self._last_save(self.saver, snapshot)
        elif wait:
            self.saver.save(step, snapshot)
            self.saver.prune()
        else:
            self.finish(LIMIT_SECONDS)  # a save in each step would give up the one before each time
            meet(self.ranks)  # else other nodes would wait for rank 0 in training, where they are hung sooner
            self.saver.begin(step, snapshot)

    @property
    def trained(self) -> float:
        """Seconds over all starts of the run."""
        return self.seconds + time.monotonic() - self.began

    def finish(self, seconds: float) -> None:
        """Wait for this rank's part of the save that is under way."""
        if self.saver and (save := self.saver._current) and save.thread:
            save.thread.join(seconds)

    def _look_at_the_clock(self) -> None:
        """What a step takes, at the second, fourth, eighth … call: the ranks must agree on it."""
        self.calls += 1
        if self.calls == 1:
            self.first = time.monotonic()
        elif self.calls & (self.calls - 1) == 0:
            self.usual = max(gather(self.ranks, (time.monotonic() - self.first) / (self.calls - 1)))

    def _prepared(
        self, saver: Saver, step: int, state: Mapping[str, Any], own: Mapping[str, Any], wait: bool
    ) -> tuple[Prepared, Layout]:
        """Return what this rank would save, and what the ranks must agree on."""
        if saver.superseded:
            raise saver.superseded
        if step < self.step:
            raise UsageError(f"checkpoint.save: step {step} comes after step {self.step}: steps must increase")
        past = {"seconds": self.trained, "interruptions": self.interruptions}
        mine = {"random": rng_state.read(self.ranks.device), "own": state_dict.own_content(own)}
        snapshot = Snapshot(state_dict.content(state), mine, {**_about(self.ranks), "script": past}, frozenset())
        layout = state_dict.layout(state, snapshot.shared) if self.ranks.world > 1 else {}
        call = {"step": Entry(str(step), "", plain=False), "wait": Entry(str(wait), "", plain=False)}
        return (snapshot, layout), {**layout, **{f"checkpoint.save({name}=…)": entry for name, entry in call.items()}}

    def _last_save(self, saver: Saver, snapshot: Snapshot) -> None:
        """Raises SystemExit if the checkpoint isn't durable in time."""
        metrics.event("preempted", step=self.step)
        left = NOTICE_SECONDS - (time.monotonic() - self.told.at if self.told.signum else 0.0)
        try:
            saver.save(self.step, snapshot, limit=left)
        except OutputError as error:
            if self.ranks.rank == 0:
                _say(f"preempted at step {self.step}, and not saved in time: {error}")
            close_rows()
            leave(128 + signal.SIGTERM, rank=self.ranks.rank)


# --- What launch_train.checkpoint calls
# ------------------------------------------------------------------------------------

_script: Script | None = None
_ranks: Ranks | None = None


def _deliberately(work: Callable[P, T]) -> Callable[P, T]:
    """An error of ours ends the process, in one line and with its exit code: all ranks have it alike."""

    @wraps(work)
    def done(*args: P.args, **options: P.kwargs) -> T:
        try:
            return work(*args, **options)
        except TrainError as error:
            _leave(error)

    return done


@contextmanager
def _our_work() -> Iterator[None]:
    """Inside, the script may be silent for as much longer as a save may take: the hang detection is for its own work.
    As in the trainer, the first process of a node speaks for all."""
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


@_deliberately
@_our_work()
def restore(state: state_dict.State, own: state_dict.State, settings: Checkpoint) -> int:
    """Open the run folder and put its newest checkpoint into `state`; its step, or 0."""
    global _script  # noqa: PLW0603 - of the process, as its ranks and signals are
    if _script:
        raise UsageError("checkpoint.restore comes once, before the first checkpoint.due and checkpoint.save")
    _script = _opened(state, own, settings, os.environ)
    return _script.step


@_deliberately
def due(step: int) -> bool:
    faults.reached(step)
    return _here().due(step)


@_deliberately
@_our_work()
def save(step: int, state: Mapping[str, Any], own: Mapping[str, Any], *, wait: bool) -> None:
    _here().save(step, state, own, wait=wait)


def preempted() -> bool:
    return _script is not None and _script.stop


def go() -> NoReturn:
    step = _script.step if _script else 0
    _leave(PreemptedError(f"preempted; another start goes on behind step {step}"))


def _here() -> Script:
    """A script that saves and never asked for what was saved begins behind it."""
    if _script is None:
        raise UsageError("checkpoint.restore comes first: it takes the run folder over, and says where to go on")
    return _script


def _leave(error: TrainError) -> NoReturn:
    if speaks(_ranks, error):
        _say(str(error))
    close_rows()
    leave(int(error.exit), rank=_ranks.rank if _ranks else int(os.environ.get("RANK") or 0))


def _say(line: str) -> None:
    print(f"train: {line}", file=sys.stderr, flush=True)


# --- Opening --------------------------------------------------------------------------------------------------------


def _opened(state: state_dict.State, own: state_dict.State, settings: Checkpoint, env: Mapping[str, str]) -> Script:
    """Raises, on all ranks alike, UsageError (the state isn't that of the checkpoint), SupersededError, OutputError."""
    global _ranks  # noqa: PLW0603 - for the last words
    ranks = _ranks = _joined(env)
    comparison = Comparison(ranks)
    comparison.agree(lambda: (None, state_dict.check(state, own)))
    storage = open_storage(env[contract.RUN_FOLDER])
    saver = _saver(ranks, storage, settings, env) if "RANK" in env or int(env.get(contract.NODE) or 0) == 0 else None
    found = resume(ranks, storage, _about(ranks), partial(state_dict.put_back, state, own, ranks), scratch(env))
    handlers = ExitStack()
    script = Script(
        ranks, storage, listening(env, handlers), Agreement(ranks), env.get(contract.NOTICE), handlers, comparison
    )
    script.saver = saver
    if found:
        past = found.about["script"]
        script.step, script.seconds, script.interruptions = found.step, past["seconds"], past["interruptions"] + 1
        _tell(ranks, found.step, found.folder, changes(found.about, _about(ranks)))
    threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # before the pools of threads, which save, close
    return script


def _joined(env: Mapping[str, str]) -> Ranks:
    """This process among those of the script's own process group."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if dist.is_initialized():
        if (world := dist.get_world_size()) > 1:
            store = PrefixStore("launch", dist.distributed_c10d._get_default_store())
            return Ranks(dist.get_rank(), world, int(env.get("LOCAL_RANK") or 0), device, dist.get_backend(), store)
    elif "RANK" in env and int(env.get("WORLD_SIZE") or 1) > 1:
        raise UsageError("checkpoint.restore comes after torch.distributed.init_process_group: the ranks agree in it")
    return Ranks(device=device)


def _saver(ranks: Ranks, storage: Storage, settings: Checkpoint, env: Mapping[str, str]) -> Saver:
    """Takes the run folder over, unless it belongs to another kind of run."""
    claim = take_over(ranks, storage, _about(ranks), env)
    sink, often = metrics._default() if ranks.rank == 0 else metrics.Null(), interval.chosen(settings, env)
    return Saver(ranks, storage, settings, sink, start=claim.start, fence=claim.fence, interval=often)


def _about(ranks: Ranks) -> dict[str, Any]:
    """What a manifest says of a script: nothing that the trainer's settings could be taken for."""
    config = dict.fromkeys((*FIXED, "data"), OWN)
    return {"config": config, "world_size": ranks.world, "torch": torch.__version__}


def _tell(ranks: Ranks, step: int, folder: str, changed: list[str]) -> None:
    metrics.event("resumed", step=step, path=folder)
    if ranks.rank == 0:
        print(f"resumed at step {step} from {folder}", flush=True)
        for line in changed:
            print(f"since the checkpoint was written: {line}", flush=True)


# --- The end ----------------------------------------------------------------------------------------------------------


def _at_exit() -> None:
    """A save that is under way is finished, unless the script has failed."""
    if _script:
        with _our_work():
            _script.finish(FAILED_SECONDS if hasattr(sys, "last_value") else END_SECONDS)


def _after_fork() -> None:
    """A child is no rank: signals are its own affair, and what it saved would be taken for its parent's."""
    global _script  # noqa: PLW0603 - of the process
    if _script:
        _script = None
        signal.set_wakeup_fd(-1)
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, partial) and handler.func is heard:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
