"""Save checkpoints while training continues: a snapshot in host memory, then a thread that writes it.

Every rank writes its share. Rank 0 collects the lists of written parts, writes the manifest and moves the pointer. The
threads communicate through torchrun's store and never by a collective, which would interfere with those of the
training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._C._distributed_c10d import HashStore, PrefixStore  # torch.distributed re-exports them, untyped

from launch_train import runfolder
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import retention
from launch_train.checkpointing.interval import Interval
from launch_train.checkpointing.lease import Lease
from launch_train.checkpointing.manifest import Manifest
from launch_train.checkpointing.multipart_writer import CancelledError, CheckpointPart, time_writing, write_shard
from launch_train.checkpointing.partition import HostCopies, State, coverage_checksum, rank_share, split
from launch_train.common.config import Checkpoint
from launch_train.common.console import say
from launch_train.common.errors import OutputError, SupersededError, TrainError
from launch_train.common.storage import Storage
from launch_train.common.text import format_duration
from launch_train.distributed.process_group import Ranks, use_device
from launch_train.telemetry.metric_sink import Sink

LIMIT_SECONDS = 1800.0
"""Time limit of one save: a bucket that is away for longer costs this checkpoint, not the run."""

ROWS_SECONDS = 300.0
"""Time for the metrics of a checkpoint to become durable before it."""

PRUNE_SECONDS = 20.0
"""Time limit of deleting one old object: the next save tries again."""

FIRST_SECONDS = 3.0
"""Expected duration of a save until `estimate` has one."""

TEST_SECONDS = 5.0
"""Time limit of the write test."""

COMMIT_REQUESTS = 5
"""Requests, one after the other, that commit a checkpoint."""

CANCEL_SECONDS = 2.0
"""Time for a cancelled save to end."""

POLL_SECONDS = 0.02
"""Poll interval for another rank's message."""


class Snapshot(NamedTuple):
    """The input of a save: the state that all ranks share, this rank's own, and fields of the manifest.

    `first_only`: tensors that rank 0 saves for all ranks.
    """

    shared: State
    own: State
    about: Mapping[str, Any]
    first_only: frozenset[str]


@dataclass
class Save:
    """One save: its step, deadline and result."""

    serial: int
    step: int
    deadline: float
    content: dict[str, Any]
    about: Mapping[str, Any]
    began: float
    expected: int
    """Coverage checksum of this rank's state: those of all ranks' shares must add up to it."""
    waits: bool = False
    """The other ranks wait until rank 0 has finished."""
    blocked: float = 0.0
    """Seconds that training waited for the snapshot."""
    ended: float = 0.0
    evaluated: bool = False
    """An evaluation ran during the save."""
    accounted: bool = False
    """The cost of the save has been used for the interval."""
    manifest: str = ""
    error: Exception | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())


class Saver:
    """Saves the checkpoints of one process. Only rank 0 has a `lease`."""

    def __init__(
        self,
        ranks: Ranks,
        storage: Storage,
        settings: Checkpoint,
        sink: Sink,
        *,
        start: str,
        lease: Lease | None,
        interval: Interval,
    ) -> None:
        self._ranks, self._storage, self._settings, self._sink = ranks, storage, settings, sink
        self._start, self._lease, self._interval = start, lease, interval
        self._messages = Messages(ranks)
        self._copies = HostCopies()
        self._current: Save | None = None
        self._serial = 0
        self._last = time.monotonic()
        self._requested = False
        self._metrics: dict[int, float] | None = None
        """`keep_metric` by step, once it is known (rank 0, with `keep_best`)."""
        self.best: list[float] = []
        """The lowest values of `keep_metric`, `keep_best` at most, the lowest first. The same on all ranks."""
        self.postponed = False
        """A save that the ranks have agreed on waits for the evaluation of this step. The same on all ranks."""
        self.seconds = FIRST_SECONDS
        """Duration of the last save until it was durable; an estimate before the first one."""
        self._write_test: threading.Event | None = None
        """Set it to cancel the write test."""
        self.superseded: SupersededError | None = None
        """Set if another start has taken over the run, so that this one must exit."""

    def due(self) -> bool:
        """Return whether this rank wants a save: only rank 0 does, once per save."""
        if self._ranks.rank or self._requested or self._is_saving():
            return False
        self._requested = time.monotonic() - self._last >= self._interval.seconds
        return self._requested

    def estimate(self, read_state: Callable[[], State]) -> None:
        """Estimate once, before the first save, how long it will take: by the state's size and a short write test in a
        thread. Call it after a step: the optimizer has no state before."""
        if self._write_test or self._current:
            return
        self._write_test = threading.Event()
        try:
            tensors = split(read_state()).tensors
        except TrainError:  # it will be raised by the save
            return
        share = rank_share(tensors, self._ranks.rank, self._ranks.world, frozenset())
        size = sum(tensor.nbytes for tensor in share.tensors.values())
        args = (size, self._write_test)
        threading.Thread(target=self._test_writing, args=args, name="write test", daemon=True).start()

    def _test_writing(self, size: int, cancelled: threading.Event) -> None:
        began = time.monotonic()
        deadline = began + TEST_SECONDS
        with suppress(OSError, TrainError):  # a save would fail too, and be reported
            seconds = time_writing(self._storage, self._ranks.rank, size, deadline=deadline, cancelled=cancelled)
            if self._lease:
                began = time.monotonic()
                self._lease.check(self._storage.within(TEST_SECONDS))
                seconds += COMMIT_REQUESTS * (time.monotonic() - began)
            if not self._current:
                self.seconds = self._interval.save_seconds = seconds

    def begin(self, step: int, snapshot: Snapshot) -> None:
        """Take a snapshot of this rank's share and write it in a thread. All ranks must call it at the same step."""
        self._requested = False
        if self._current and self._current.step == step:  # an evaluation ends in a step boundary too
            return
        save = self._snapshot(step, snapshot, LIMIT_SECONDS)

        def run() -> None:
            use_device(self._ranks.device)
            self._run(save)

        save.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        save.thread.start()

    def finish(self, seconds: float = LIMIT_SECONDS) -> None:
        """Wait for this rank's part of the running save."""
        if self._current and self._current.thread:
            self._current.thread.join(seconds)

    def finish_best(self, seconds: float = LIMIT_SECONDS) -> None:
        """Wait for this rank's part of the running save if it has a metric: no later save could replace it."""
        if self._settings.keep_best and self._current and self._settings.keep_metric in self._current.about:
            self.finish(max(0.0, seconds))

    def save(self, step: int, snapshot: Snapshot, *, limit: float = LIMIT_SECONDS) -> None:
        """Save now and wait. A running save of this step is awaited instead; one of an older step is cancelled.

        Raises, on all ranks alike, OutputError if it isn't durable within `limit` seconds, and SupersededError.
        """
        deadline = time.monotonic() + limit
        if self._current and self._current.step == step:
            return self._finish(self._current, deadline)
        self._cancel_current(min(limit / 4, CANCEL_SECONDS))
        save = self._snapshot(step, snapshot, deadline - time.monotonic())
        save.waits = True
        self._run(save)
        if save.error:
            raise save.error
        return None

    def after_step(self, step: int, step_seconds: float, trained: float, interruptions: int) -> None:
        """Call it after each step: once a save has ended, update the interval by its cost.

        `step_seconds` is the usual length of a step; the rest as in Interval.update.
        """
        save = self._current
        if save is None or self._ranks.rank or save.accounted or self._is_saving():
            return
        save.accounted = True
        if save.error is None:
            slowdown = time.monotonic() - save.began - save.blocked - (step - save.step) * step_seconds
            cost = save.blocked + (0.0 if save.evaluated else max(0.0, slowdown))
            if line := self._interval.update(cost, save.ended - save.began, trained, interruptions):
                print(line, flush=True)

    def note_evaluation(self) -> None:
        """Note that an evaluation runs: its time is not a slowdown by the running save."""
        if self._current:
            self._current.evaluated = True

    def _finish(self, save: Save, deadline: float) -> None:
        """Wait for the running save, on all ranks alike."""
        save.deadline = min(save.deadline, deadline)
        self._messages.wait(f"{save.serial}/done", save.deadline, save.cancelled)

    def _is_saving(self) -> bool:
        return bool(self._current and self._current.thread and self._current.thread.is_alive())

    def _cancel_current(self, seconds: float) -> None:
        """Cancel the running save. Buffers that a hung upload still reads are replaced."""
        if self._current and self._current.thread and not self._current.cancelled.is_set():
            self._current.cancelled.set()
            self._current.thread.join(seconds)
            if self._current.thread.is_alive():
                self._copies = HostCopies()

    def _snapshot(self, step: int, snapshot: Snapshot, limit: float) -> Save:
        """Copy this rank's share of the tensors; the rest is small, and rank 0's."""
        began = time.monotonic()
        self._cancel_current(CANCEL_SECONDS)  # it can only still run here if it has failed on rank 0
        if self._write_test:
            self._write_test.set()
        tensors, rest = split(snapshot.shared)
        mine = rank_share(tensors, self._ranks.rank, self._ranks.world, snapshot.first_only)
        content = {"tensors": self._copies.take(mine.tensors), "own": snapshot.own}
        if mine.parts:
            content["parts"] = mine.parts
        if self._ranks.rank == 0:
            content["rest"] = rest
        self._serial += 1
        self._last = began
        self._current = Save(
            self._serial, step, began + limit, content, snapshot.about, began, coverage_checksum(tensors)
        )
        self._current.blocked = time.monotonic() - began
        return self._current

    def _run(self, save: Save) -> None:
        """Write this rank's share; rank 0 then commits the checkpoint."""
        rank, folder = self._ranks.rank, runfolder.checkpoint_folder(save.step, self._start)
        try:
            self._copies.ready()
            parts = write_shard(
                self._storage, folder, rank, save.content, deadline=save.deadline, cancelled=save.cancelled
            )
            if rank == 0:
                self._commit(save, parts)
            else:
                self._messages.post(f"{save.serial}/{rank}", [coverage_checksum(save.content["tensors"]), [*parts]])
                if save.waits:
                    self._messages.wait(f"{save.serial}/done", save.deadline, save.cancelled)
                self.seconds = time.monotonic() - save.began
        except Exception as error:  # noqa: BLE001 - reported by rank 0, and raised to callers that wait
            self._report_failure(save, error)
        finally:
            save.ended = time.monotonic()

    def _commit(self, save: Save, own: tuple[CheckpointPart, ...]) -> None:
        """Collect the other ranks' parts, then make durable, in this order: metrics, manifest, pointer."""
        assert self._lease is not None  # noqa: S101 - rank 0 has one
        others = [
            self._messages.wait(f"{save.serial}/{rank}", save.deadline, save.cancelled)
            for rank in range(1, self._ranks.world)
        ]
        if coverage_checksum(save.content["tensors"]) + sum(theirs for theirs, _ in others) != save.expected:
            raise TrainError(
                f"step {save.step}: no checkpoint written: the ranks' states differ "
                "(their saved parts don't add up to rank 0's state)"
            )
        shards = (own, *(tuple(CheckpointPart(*part) for part in parts) for _, parts in others))
        manifest = Manifest(save.step, self._start, shards, {**save.about, "time": time.time()})
        # The state matters more than its rows: they are on the local disk, so the manifest doesn't wait forever.
        if not self._sink.flush(min(ROWS_SECONDS, save.left / 2)):
            say(
                f"the metrics up to step {save.step} are not in the run folder yet; "
                "its checkpoint does not wait for them"
            )
        self._lease.check(self._storage.within(save.left))
        if save.cancelled.is_set():
            raise CancelledError("cancelled for another save")
        try:
            manifests.commit(self._storage.within(save.left), manifest)
        except FileExistsError as error:
            raise SupersededError(f"another process has written {manifest.folder}; exiting") from error
        save.manifest = runfolder.manifest(save.step, self._start)
        self._lease.advance(save.step, save.manifest, self._storage.within(save.left))
        self._messages.post(f"{save.serial}/done", [])
        self.seconds = time.monotonic() - save.began
        event = {"event": "checkpoint", "time": time.time(), "step": manifest.step, "path": manifest.folder}
        event |= {"mb": round(manifest.bytes / 1e6, 3), "seconds": round(self.seconds, 3)}
        with suppress(OutputError):  # the checkpoint is durable; the loop sees the sink's error
            self._sink.put([{**event, "blocked": round(save.blocked, 4)}])
        if not save.waits:
            self._prune(save)

    def _prune(self, save: Save) -> None:
        """Remove old checkpoints. What can't be removed now is removed after the next save."""
        try:
            retention.prune(
                self._storage.within(PRUNE_SECONDS),
                save.step,
                self._start,
                last=self._settings.keep_last,
                every=self._settings.keep_every,
                best=self._best_steps(save),
                cancelled=save.cancelled.is_set,
            )
        except (OSError, TrainError) as error:
            say(f"old checkpoints can't be removed: {error}")

    def _best_steps(self, save: Save) -> list[int]:
        """Return the steps up to this one that `keep_best` keeps. Other starts' are known from their manifests."""
        count, metric = self._settings.keep_best, self._settings.keep_metric
        if not count:
            return []
        if self._metrics is None:
            self._metrics = manifests.metrics(self._storage.within(PRUNE_SECONDS), metric)
        elif metric in save.about:
            self._metrics[save.step] = save.about[metric]
        else:
            self._metrics.pop(save.step, None)  # of an earlier start
        past = {step: value for step, value in self._metrics.items() if step <= save.step}
        return retention.best_steps(past, count)

    def cancel(self) -> None:
        """Cancel the running save after an error elsewhere: it ends at the next part."""
        if self._current:
            self._current.cancelled.set()

    def prune(self) -> None:
        """Remove old checkpoints at the end of the run: a save that was awaited has left them."""
        if self._ranks.rank == 0 and self._current:
            self._prune(self._current)

    def _report_failure(self, save: Save, error: Exception) -> None:
        save.error = error
        key = "done" if self._ranks.rank == 0 else str(self._ranks.rank)
        try:
            self._messages.post_error(f"{save.serial}/{key}", error)
        except Exception as lost:  # noqa: BLE001 - the store has exited, and with it the reader
            say(f"checkpoint of step {save.step}: {lost}")
        self.superseded = error if isinstance(error, SupersededError) else None
        if self._ranks.rank or save.waits or self.superseded or isinstance(error, CancelledError):
            return
        say(f"checkpoint of step {save.step} failed: {error}")
        say(f"training continues; next checkpoint attempt in {format_duration(self._interval.seconds)}")
        try:  # the parts would fill the disk, or be billed
            folder = runfolder.checkpoint_folder(save.step, self._start)
            for name in [] if save.manifest else self._storage.list(f"{folder}/"):
                if not save.cancelled.is_set():
                    self._storage.delete(name)
        except (OSError, TrainError) as failure:
            say(f"its parts can't be removed: {failure}")


class Messages:
    """Messages by key between the ranks' checkpoint threads, in torchrun's store: independent of the training's
    collectives. A list is a message, a dict an error."""

    def __init__(self, ranks: Ranks) -> None:
        self._store = PrefixStore("save", ranks.store or HashStore())

    def post(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def post_error(self, key: str, error: Exception) -> None:
        """Post an error: the waiting ranks raise it, as the nearest kind that can be sent."""
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), TrainError.__name__)
        self.post(key, {"error": str(error), "kind": kind})

    def wait(self, key: str, deadline: float, cancelled: threading.Event) -> Any:
        """Return what another rank posted.

        Raises the error it posted, OutputError at `deadline` (a time.monotonic()), and CancelledError once `cancelled`
        is set.
        """
        while not self._store.check([key]):
            if cancelled.is_set():
                raise CancelledError("cancelled for another save")
            if time.monotonic() > deadline:
                raise OutputError("timed out waiting for the other ranks' shares")
            time.sleep(POLL_SECONDS)
        value = json.loads(self._store.get(key))
        if isinstance(value, dict):
            raise _KINDS[value["kind"]](value["error"])
        return value


_KINDS: dict[str, type[TrainError]] = {
    kind.__name__: kind for kind in (OutputError, SupersededError, CancelledError, TrainError)
}
