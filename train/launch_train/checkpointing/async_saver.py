"""Saving beside training: a snapshot in the host's memory, then a thread that writes it.

Every rank writes its share; rank 0 collects what they wrote, writes the manifest and moves the pointer. The threads
meet through torchrun's store and never through a collective: the training beside them has its own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import retention
from launch_train.checkpointing.interval import Interval
from launch_train.checkpointing.lease import Fence
from launch_train.checkpointing.manifest import Manifest
from launch_train.checkpointing.multipart_writer import CancelledError, Part, write_shard
from launch_train.checkpointing.partition import HostCopies, State, covered, share, split
from launch_train.checkpointing.store_messages import Notes
from launch_train.common import contract
from launch_train.common.config import Checkpoint
from launch_train.common.errors import OutputError, SupersededError, TrainError
from launch_train.common.storage import Storage
from launch_train.common.text import span
from launch_train.distributed.process_group import Ranks, use_device
from launch_train.metrics import Sink

LIMIT_SECONDS = 1800.0
"""For one save: a bucket that is away for longer costs this checkpoint, not the run."""

ROWS_SECONDS = 300.0
"""For the rows of a checkpoint to arrive before it."""

PRUNE_SECONDS = 20.0
"""For one old object to go: the next save tries again."""

FIRST_SECONDS = 3.0
"""Expected duration of a save until one was measured."""

GIVE_UP_SECONDS = 2.0
"""For the save before to end, once it was given up."""


class Snapshot(NamedTuple):
    """What the loop gives to be saved: the state that all ranks have alike, this rank's own, and what goes into the
    manifest beside them. `first_only`: tensors of which rank 0's count."""

    shared: State
    own: State
    about: Mapping[str, Any]
    first_only: frozenset[str]


@dataclass
class Save:
    """One save: of which step, until when, and how it went."""

    serial: int
    step: int
    deadline: float
    content: dict[str, Any]
    about: Mapping[str, Any]
    began: float
    expected: int
    """Checksum that all ranks' shares must add up to, by this rank's state."""
    waits: bool = False
    """Whether the other ranks wait for rank 0's word."""
    blocked: float = 0.0
    """Seconds for which training waited: the snapshot."""
    ended: float = 0.0
    evaluated: bool = False
    """Whether an evaluation went on beside it."""
    accounted: bool = False
    """Whether what it cost has been learnt."""
    manifest: str = ""
    error: Exception | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())


class Saver:
    """The checkpoints of one process. `fence` is rank 0's."""

    def __init__(
        self,
        ranks: Ranks,
        storage: Storage,
        settings: Checkpoint,
        sink: Sink,
        *,
        start: str,
        fence: Fence | None,
        interval: Interval,
    ) -> None:
        self._ranks, self._storage, self._settings, self._sink = ranks, storage, settings, sink
        self._start, self._fence, self._interval = start, fence, interval
        self._notes = Notes(ranks)
        self._copies = HostCopies()
        self._current: Save | None = None
        self._serial = 0
        self._last = time.monotonic()
        self._asked = False
        self.seconds = FIRST_SECONDS
        """Duration of the last save, until it was written."""
        self.superseded: SupersededError | None = None
        """Why this start must not go on, if another has taken the run over."""

    def due(self) -> bool:
        """Whether this rank wants a save: rank 0 says so, once until it begins."""
        if self._ranks.rank or self._asked or self._busy():
            return False
        self._asked = time.monotonic() - self._last >= self._interval.seconds
        return self._asked

    def begin(self, step: int, snapshot: Snapshot) -> None:
        """Take a snapshot of this rank's share, and write it in a thread. All ranks call it at the same step."""
        self._asked = False
        if self._current and self._current.step == step:  # an evaluation has boundaries too
            return
        save = self._snapshot(step, snapshot, LIMIT_SECONDS)
        save.thread = threading.Thread(target=self._beside, args=(save,), name="checkpoint", daemon=True)
        save.thread.start()

    def save(self, step: int, snapshot: Snapshot, *, limit: float = LIMIT_SECONDS) -> None:
        """Save now, and wait for it. One of this step that is under way will do, an older one is given up.

        Raises, on all ranks alike, OutputError if it isn't durable within `limit` seconds, and SupersededError.
        """
        deadline = time.monotonic() + limit
        if self._current and self._current.step == step:
            return self._finish(self._current, deadline)
        self._give_up(min(limit / 4, GIVE_UP_SECONDS))
        save = self._snapshot(step, snapshot, deadline - time.monotonic())
        save.waits = True
        self._run(save)
        if save.error:
            raise save.error
        return None

    def stepped(self, step: int, usual: float, trained: float, interruptions: int) -> None:
        """After each step: when a save has ended meanwhile, learn what it cost. `usual` is the length of a step in
        seconds, the rest as in Interval.learn."""
        save = self._current
        if save is None or self._ranks.rank or save.accounted or self._busy():
            return
        save.accounted = True
        if save.error is None:
            beside = time.monotonic() - save.began - save.blocked - (step - save.step) * usual
            cost = save.blocked + (0.0 if save.evaluated else max(0.0, beside))
            if line := self._interval.learn(cost, save.ended - save.began, trained, interruptions):
                print(line, flush=True)

    def evaluated(self) -> None:
        """A batch of an evaluation was done: the time beside the save is none of its steps'."""
        if self._current:
            self._current.evaluated = True

    def _finish(self, save: Save, deadline: float) -> None:
        """Wait for a save that is under way, on all ranks alike."""
        save.deadline = min(save.deadline, deadline)
        self._notes.wait(f"{save.serial}/done", save.deadline, save.cancelled)

    def _busy(self) -> bool:
        return bool(self._current and self._current.thread and self._current.thread.is_alive())

    def _give_up(self, seconds: float) -> None:
        """End what is under way. A part that hangs in the network is left behind, with the buffers that it reads."""
        if self._current and self._current.thread and not self._current.cancelled.is_set():
            self._current.cancelled.set()
            self._current.thread.join(seconds)
            if self._current.thread.is_alive():
                self._copies = HostCopies()

    def _snapshot(self, step: int, snapshot: Snapshot, limit: float) -> Save:
        """Copy this rank's share of the tensors; the rest is small, and rank 0's."""
        began = time.monotonic()
        self._give_up(GIVE_UP_SECONDS)  # rank 0 has ended that one: here it can only be one that has failed there
        tensors, rest = split(snapshot.shared)
        mine = share(tensors, self._ranks.rank, self._ranks.world, snapshot.first_only)
        content = {"tensors": self._copies.take(mine.tensors), "own": snapshot.own}
        if mine.parts:
            content["parts"] = mine.parts
        if self._ranks.rank == 0:
            content["rest"] = rest
        self._serial += 1
        self._last = began
        self._current = Save(self._serial, step, began + limit, content, snapshot.about, began, covered(tensors))
        self._current.blocked = time.monotonic() - began
        return self._current

    def _beside(self, save: Save) -> None:
        """Run a save in a background thread."""
        use_device(self._ranks.device)
        self._run(save)

    def _run(self, save: Save) -> None:
        """Write this rank's share; rank 0 makes a checkpoint of all of them."""
        rank, folder = self._ranks.rank, contract.checkpoint_folder(save.step, self._start)
        try:
            self._copies.ready()
            parts = write_shard(
                self._storage, folder, rank, save.content, deadline=save.deadline, cancelled=save.cancelled
            )
            if rank == 0:
                self._commit(save, parts)
            else:
                self._notes.post(f"{save.serial}/{rank}", [covered(save.content["tensors"]), [*parts]])
                if save.waits:
                    self._notes.wait(f"{save.serial}/done", save.deadline, save.cancelled)
        except Exception as error:  # noqa: BLE001 - told by rank 0, and raised where somebody waits
            self._failed(save, error)
        else:
            self.seconds = time.monotonic() - save.began
        finally:
            save.ended = time.monotonic()

    def _commit(self, save: Save, own: tuple[Part, ...]) -> None:
        """The other ranks' parts, the rows up to this step, the manifest, the pointer: in this order."""
        assert self._fence is not None  # noqa: S101 - rank 0 has one
        others = [
            self._notes.wait(f"{save.serial}/{rank}", save.deadline, save.cancelled)
            for rank in range(1, self._ranks.world)
        ]
        if covered(save.content["tensors"]) + sum(theirs for theirs, _ in others) != save.expected:
            raise TrainError(
                f"step {save.step}: the parts that the ranks saved don't add up to rank 0's state, so no checkpoint "
                "was written: the ranks' states differ"
            )
        shards = (own, *(tuple(Part(*part) for part in parts) for _, parts in others))
        manifest = Manifest(save.step, self._start, shards, {**save.about, "time": time.time()})
        self._rows_first(save)
        self._fence.check(self._storage.within(save.left))
        if save.cancelled.is_set():
            raise CancelledError("given up for another save")
        try:
            manifests.commit(self._storage.within(save.left), manifest)
        except FileExistsError as error:
            raise SupersededError(f"another process has written {manifest.folder}; this one leaves it alone") from error
        save.manifest = contract.manifest(save.step, self._start)
        self._fence.advance(save.step, save.manifest, self._storage.within(save.left))
        self._notes.post(f"{save.serial}/done", [])
        with suppress(OutputError):  # the checkpoint is there; a sink that is broken says so to the loop
            seconds = time.monotonic() - save.began
            self._sink.put([_event(manifest, seconds=round(seconds, 3), blocked=round(save.blocked, 4))])
        if not save.waits:
            self._prune(save)

    def _rows_first(self, save: Save) -> None:
        """A step whose row was lost is never done again, so the rows up to it come first. But the state matters more
        than they do: they lie on this machine's disk, and the manifest doesn't wait for ever."""
        if not self._sink.flush(min(ROWS_SECONDS, save.left / 2)):
            _say(
                f"the rows up to step {save.step} are not in the run folder yet; its checkpoint does not wait for them"
            )

    def _prune(self, save: Save) -> None:
        """What can't be removed now is removed after the next save."""
        try:
            retention.prune(
                self._storage.within(PRUNE_SECONDS),
                save.step,
                self._start,
                last=self._settings.keep_last,
                every=self._settings.keep_every,
                give_up=save.cancelled.is_set,
            )
        except (OSError, TrainError) as error:
            _say(f"old checkpoints can't be removed: {error}")

    def abandon(self) -> None:
        """After an error elsewhere: what is under way ends at the next part."""
        if self._current:
            self._current.cancelled.set()

    def prune(self) -> None:
        """At the end of the run: a save that was waited for has left the older ones."""
        if self._ranks.rank == 0 and self._current:
            self._prune(self._current)

    def _failed(self, save: Save, error: Exception) -> None:
        save.error = error
        key = "done" if self._ranks.rank == 0 else str(self._ranks.rank)
        try:
            self._notes.post_error(f"{save.serial}/{key}", error)
        except Exception as lost:  # noqa: BLE001 - the store is gone, and with it whoever would have read this
            _say(f"checkpoint of step {save.step}: {lost}")
        self.superseded = error if isinstance(error, SupersededError) else None
        if self._ranks.rank or save.waits or self.superseded or isinstance(error, CancelledError):
            return
        _say(f"the checkpoint of step {save.step} was not written: {error}")
        _say(f"the run goes on, and the next try comes in {span(self._interval.seconds)}")
        if not save.manifest:
            self._discard(save)

    def _discard(self, save: Save) -> None:
        """What a failed save left would fill the disk, or be billed."""
        try:
            folder = contract.checkpoint_folder(save.step, self._start)
            retention.discard(self._storage, folder, save.cancelled.is_set)
        except (OSError, TrainError) as error:
            _say(f"its parts can't be removed: {error}")


def _event(manifest: Manifest, **fields: Any) -> dict[str, Any]:
    size = round(manifest.bytes / 1e6, 3)
    known = {"event": "checkpoint", "time": time.time(), "step": manifest.step, "path": manifest.folder, "mb": size}
    return {**known, **fields}


def _say(line: str) -> None:
    print(f"train: {line}", file=sys.stderr, flush=True)
