"""Worker processes that prepare batches in advance: their start, the order of batches, and their shutdown."""

from __future__ import annotations

import os
import signal
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children, forkserver, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from launch_train.common.errors import OutOfMemoryError, TrainError
from launch_train.common.text import one_line
from launch_train.data.batch import Tree, map_tensors
from launch_train.data.source import Batch, Source

PATIENCE = 1.0
"""Seconds that worker processes have to exit before they are killed."""


class BatchKey(NamedTuple):
    """Identifies a batch: the batch of step `number` (`of` is 0), or held-out batch `number` of `of`."""

    number: int
    of: int = 0


def prepare_batch(source: Source, key: BatchKey, share: slice) -> Batch:
    """Return the batch for a key. A pure function: the result doesn't depend on the process or the time."""
    return source.held_out(key.number, key.of, share) if key.of else source.train(key.number, share)


class PreparedBatch:
    """A batch from a worker process, or the error raised while preparing it."""

    def __init__(self, key: BatchKey, batch: Tree = None, error: TrainError | None = None) -> None:
        self.key, self.batch, self.error = key, batch, error

    def pin_memory(self) -> PreparedBatch:
        """Return a copy in pinned memory, for asynchronous transfer to a GPU. Called by the DataLoader."""
        return PreparedBatch(self.key, map_tensors(self.batch, lambda tensor: tensor.pin_memory()), self.error)


Wanted = Callable[[BatchKey], bool]


class BatchOrder:
    """The order in which batches are prepared: consecutive steps, interrupted by the batches of a requested evaluation.

    The DataLoader's sampler: it draws keys several batches ahead.
    """

    def __init__(self, step: int = 1) -> None:
        self._step, self._evaluation, self._lock = step, deque[BatchKey](), Lock()
        self._issued = set[BatchKey]()

    def __iter__(self) -> Iterator[BatchKey]:
        return self

    def __next__(self) -> BatchKey:
        with self._lock:
            key = self._evaluation.popleft() if self._evaluation else BatchKey(self._step)
            self._step += not key.of
            self._issued.add(key)
            return key

    def wants(self, key: BatchKey) -> bool:
        """Return whether a received batch is still needed, and remove its key from the pending ones."""
        with self._lock:
            mine = key in self._issued
            self._issued.discard(key)
            return mine

    def ensure(self, key: BatchKey) -> bool:
        """Schedule a batch unless it is pending: continue from its step, or start the evaluation at its number.

        Return True if training jumped to another step: batches prepared for other steps are then obsolete.
        """
        with self._lock:
            if key in self._issued or key in self._evaluation:
                return False
            if key.of:
                self._evaluation = deque(BatchKey(number, key.of) for number in range(key.number, key.of))
                return False
            self._step = key.number
            self._issued = {issued for issued in self._issued if issued.of}
            return True


class WorkerDataset(Dataset[PreparedBatch]):
    """The dataset that worker processes index by key."""

    def __init__(self, source: Source, share: slice) -> None:
        self._source, self._share = source, share

    def __getitem__(self, key: BatchKey) -> PreparedBatch:
        try:
            return PreparedBatch(key, prepare_batch(self._source, key, self._share))
        except TrainError as error:
            return PreparedBatch(key, error=error)


class Pool:
    """The worker processes of a rank. Each keeps `prefetch` batches ready or in preparation."""

    def __init__(
        self,
        dataset: WorkerDataset,
        workers: int,
        prefetch: int,
        step: int = 1,
        *,
        pin: bool = False,
        ahead: Callable[[Iterator[PreparedBatch], Wanted], Iterator[PreparedBatch]] = lambda batches, wanted: batches,
    ) -> None:
        """Start the processes at the batch of `step`.

        `ahead` may wrap the iterator over received batches. Its second argument is a predicate: is this key of the kind
        (training or held-out) that was requested last?
        """
        self._plan, self._ready = BatchOrder(step), dict[BatchKey, PreparedBatch]()
        before = set(active_children())
        start_server()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the spec may ask for more processes than cores
            iterator: Iterator[PreparedBatch] = iter(  # serves the whole run with the same processes
                DataLoader(
                    dataset,
                    batch_size=None,
                    sampler=self._plan,
                    num_workers=workers,
                    prefetch_factor=prefetch,
                    pin_memory=pin,
                    collate_fn=_unchanged,
                    worker_init_fn=leave_with_rank,
                    multiprocessing_context=get_context("forkserver"),
                    generator=torch.Generator(),  # the default generator is training's
                )
            )
        self._box: list[Any] = [iterator]
        self._workers: list[BaseProcess] = sorted(set(active_children()) - before, key=lambda process: process.pid or 0)
        self._evaluates = False
        self._received = ahead(iterator, lambda key: bool(key.of) == self._evaluates)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid]

    def get(self, key: BatchKey) -> Batch:
        """Return a batch; without delay if it is next in order and already prepared.

        Raises the error that preparing it raised, OutOfMemoryError if it doesn't fit on the GPU, and TrainError if a
        worker process died.
        """
        self._evaluates = bool(key.of)
        if key not in self._ready and self._plan.ensure(key):
            self._ready = {pending: batch for pending, batch in self._ready.items() if pending.of}
        while key not in self._ready:
            try:
                received = next(self._received)
            except torch.OutOfMemoryError as error:  # a subclass of RuntimeError
                raise OutOfMemoryError(f"data: no memory for the next batch on the GPU: {one_line(error)}") from error
            except (RuntimeError, EOFError, OSError) as error:  # EOFError, OSError: died while sending a batch
                raise TrainError(
                    f"data: a loader process exited unexpectedly ({str(error).partition('.')[0]}): possibly "
                    "killed for lack of memory; loader: {workers: 0} uses no loader processes"
                ) from error
            if self._plan.wants(received.key):
                self._ready[received.key] = received
        prepared = self._ready.pop(key)
        if prepared.error is not None:
            raise prepared.error
        batch: Batch = prepared.batch
        return batch

    def close(self) -> None:
        """Stop the processes, by force if necessary, within about twice PATIENCE."""
        if stop := getattr(self._received, "stop", None):
            stop()
        self._received = iter(())
        self._ready.clear()
        # Dropping the last reference to the iterator stops its processes. A traceback may hold another reference.
        ender = Thread(target=self._box.clear, name="loader's end", daemon=True)
        ender.start()
        ender.join(PATIENCE)
        for worker in self._workers:
            with suppress(ValueError, OSError):
                if worker.is_alive():
                    worker.kill()
        ender.join(PATIENCE)


def _unchanged(batch: Any) -> Any:
    return batch


def leave_with_rank(_worker: int = 0) -> None:
    """Initialise a worker process: leave the rank's process group, ignore Ctrl-C, which the rank handles, and exit when
    the rank exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.setpgid(0, 0)

    def exit_with_rank() -> None:
        # torch's own watchdog checks the parent process: that is the fork server, which lives as long as its workers.
        if rank := parent_process():
            wait([rank.sentinel])
            os._exit(1)

    Thread(target=exit_with_rank, name="the rank's end", daemon=True).start()


def start_server() -> None:
    """Start the fork server in the background. It imports torch once for all worker processes.

    Forking the rank itself would copy its threads, CUDA state and connections in an undefined state.
    """
    forkserver.set_forkserver_preload(["launch_train.data.forkserver_preload"])
    root = str(Path(__file__).parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*paths, sysconfig.get_paths()["purelib"]):
        paths.append(root)
    # Suppress the resource tracker's warning about semaphores that a killed rank leaves behind.
    quiet = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning")))
    with _environ(PYTHONPATH=os.pathsep.join(paths), PYTHONWARNINGS=quiet):
        forkserver.ensure_running()


@contextmanager
def _environ(**values: str) -> Iterator[None]:
    """Set environment variables for processes started inside the context. Empty values are skipped."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
