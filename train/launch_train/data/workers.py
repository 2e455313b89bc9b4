"""Processes that make batches ahead of their use: how many, in which order, and how they end."""

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
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from launch_train.common.errors import OutOfMemoryError, TrainError
from launch_train.data.batch import Tree, map_tensors
from launch_train.data.source import Batch, Source

PATIENCE = 1.0
"""Seconds that processes have to end by themselves, before they are killed."""


class Key(NamedTuple):
    """Which batch: that of a step (`of` is 0), or held-out number so and so of so many."""

    number: int
    of: int = 0


def made(source: Source, key: Key, share: slice) -> Batch:
    """The batch of a key. A pure function: who makes it, and when, changes nothing."""
    return source.held_out(key.number, key.of, share) if key.of else source.train(key.number, share)


class Made:
    """A batch on its way, or what went wrong with it."""

    def __init__(self, key: Key, batch: Tree = None, error: TrainError | None = None) -> None:
        self.key, self.batch, self.error = key, batch, error

    def pin_memory(self) -> Made:
        """What the loader's own thread calls: from pinned memory a GPU takes it without waiting."""
        return Made(self.key, map_tensors(self.batch, lambda tensor: tensor.pin_memory()), self.error)

    def got(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.batch


Wanted = Callable[[Key], bool]


class Plan:
    """In which order batches are made: step after step, in between an evaluation's when it is asked for. The loader
    takes its keys from here some batches ahead."""

    def __init__(self, step: int = 1) -> None:
        self._step, self._evaluation, self._lock = step, deque[Key](), Lock()
        self._issued = set[Key]()

    def __iter__(self) -> Iterator[Key]:
        return self

    def __next__(self) -> Key:
        with self._lock:
            key = self._evaluation.popleft() if self._evaluation else Key(self._step)
            self._step += not key.of
            self._issued.add(key)
            return key

    def wants(self, key: Key) -> bool:
        """Whether a batch that has come is for somebody; it is then no longer under way."""
        with self._lock:
            mine = key in self._issued
            self._issued.discard(key)
            return mine

    def ensure(self, key: Key) -> bool:
        """Have this one made, if it isn't under way: go to its step, or begin the evaluation there. Whether that was a
        jump in training: what was made for other steps is then of no use."""
        with self._lock:
            if key in self._issued or key in self._evaluation:
                return False
            if key.of:
                self._evaluation = deque(Key(number, key.of) for number in range(key.number, key.of))
                return False
            self._step = key.number
            self._issued = {one for one in self._issued if one.of}
            return True


class Job(Dataset[Made]):
    """What a loader process does."""

    def __init__(self, source: Source, share: slice) -> None:
        self._source, self._share = source, share

    def __getitem__(self, key: Key) -> Made:
        try:
            return Made(key, made(self._source, key, self._share))
        except TrainError as error:
            return Made(key, error=error)


class Pool:
    """The processes of a rank. Each has `prefetch` batches ready, or under way."""

    def __init__(
        self,
        job: Job,
        workers: int,
        prefetch: int,
        step: int = 1,
        *,
        pin: bool = False,
        ahead: Callable[[Iterator[Made], Wanted], Iterator[Made]] = lambda batches, wanted: batches,
    ) -> None:
        """They begin with the batch of `step`. `ahead` may stand between: it takes batches as they come, and gives them
        on; it is told how to find out whether one is of the kind that is asked for now."""
        self._plan, self._ready = Plan(step), dict[Key, Made]()
        before = set(active_children())
        start_server()
        iterator = _started(job, self._plan, workers, prefetch, pin)
        self._box: list[Any] = [iterator]
        self._workers: list[BaseProcess] = sorted(set(active_children()) - before, key=lambda one: one.pid or 0)
        self._evaluates = False
        self._came = ahead(iterator, lambda key: bool(key.of) == self._evaluates)

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self._workers if one.pid]

    def get(self, key: Key) -> Batch:
        """A batch: at once, if it is the next one and the processes are quick enough. Raises what went wrong with it,
        and TrainError if a process has gone."""
        self._evaluates = bool(key.of)
        if key not in self._ready and self._plan.ensure(key):
            self._ready = {one: batch for one, batch in self._ready.items() if one.of}
        while key not in self._ready:
            try:
                came = next(self._came)
            except torch.OutOfMemoryError as error:  # a RuntimeError, too
                raise OutOfMemoryError(f"data: no memory for the next batch on the GPU: {_line(error)}") from error
            except (RuntimeError, EOFError, OSError) as error:  # also if it died while it handed over a batch
                raise TrainError(
                    f"data: a loader process has ended by itself ({str(error).partition('.')[0]}): killed, perhaps as "
                    "memory ran out; loader: {workers: 0} does without"
                ) from error
            if self._plan.wants(came.key):
                self._ready[came.key] = came
        batch: Batch = self._ready.pop(key).got()
        return batch

    def close(self) -> None:
        """End the processes, whatever they do, within about twice PATIENCE."""
        if stop := getattr(self._came, "stop", None):
            stop()
        self._came = iter(())
        self._ready.clear()
        # With its last reference goes the iterator, which ends its processes. An error's traceback may hold another.
        ender = Thread(target=self._box.clear, name="loader's end", daemon=True)
        ender.start()
        ender.join(PATIENCE)
        for worker in self._workers:
            with suppress(ValueError, OSError):
                if worker.is_alive():
                    worker.kill()
        ender.join(PATIENCE)


def _started(job: Job, plan: Plan, workers: int, prefetch: int, pin: bool) -> Iterator[Made]:
    """One iterator for the whole run: its processes stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more processes than cores may be what was asked for
        return iter(
            DataLoader(
                job,
                batch_size=None,
                sampler=plan,
                num_workers=workers,
                prefetch_factor=prefetch,
                pin_memory=pin,
                collate_fn=_as_it_is,
                worker_init_fn=_alone,
                multiprocessing_context=get_context("forkserver"),
                generator=torch.Generator(),  # else it draws from training's
            )
        )


def untravelled(job: Job) -> str:
    """Why it can't be sent to another process; "" if it can."""
    try:
        ForkingPickler.dumps(job)
    except Exception as error:  # noqa: BLE001 - the user's classes say how they travel; shared memory may be full
        return _line(error) or type(error).__name__
    return ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _as_it_is(batch: Any) -> Any:
    return batch


def _alone(worker: int) -> None:
    """Of a loader process, at its start. Its group is not the rank's, and Ctrl-C is the rank's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.setpgid(0, 0)
    Thread(target=_end_with_the_rank, name="the rank's end", daemon=True).start()


def _end_with_the_rank() -> None:
    """torch looks whether a loader process's parent lives. Here that is the server, which lives as long as they do."""
    if rank := parent_process():
        wait([rank.sentinel])
        os._exit(1)


def start_server() -> None:
    """Start the process that the loader's are forked from, in the background: it imports torch once for all of them.
    Forking this one instead would copy threads, CUDA and connections in the middle of their work."""
    forkserver.set_forkserver_preload(["launch_train.data.forkserver_preload"])
    root = str(Path(__file__).parents[2])
    paths = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    if root not in (*paths, sysconfig.get_paths()["purelib"]):
        paths.append(root)
    # A rank that is killed leaves semaphores behind; the process that then removes them needn't tell.
    quiet = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning")))
    with _environ(PYTHONPATH=os.pathsep.join(paths), PYTHONWARNINGS=quiet):
        forkserver.ensure_running()


@contextmanager
def _environ(**values: str) -> Iterator[None]:
    """Inside, the environment that a process inherits has these values; empty ones are left out."""
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
