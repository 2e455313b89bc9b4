"""Provide a run's batches in order, on the device."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import torch

from launch_train.common.cgroup import cores, find_cgroup, free_memory_bytes
from launch_train.common.config import Loader
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError
from launch_train.common.text import one_line, plural, si
from launch_train.data.batch import count_samples, map_tensors, move_to, tensors_of
from launch_train.data.source import Batch, Source
from launch_train.data.workers import BatchKey, Pool, WorkerDataset, prepare_batch, start_server

SHM, SHM_PART = "/dev/shm", 0.8  # noqa: S108 - where processes share memory
"""Workers pass batches through shared memory. The rest of it is left for NCCL."""

WORKER_BYTES, MEMORY_PART = 100 << 20, 0.5
"""Memory of a worker's own besides its copy of the dataset (22 MB measured, without the user's modules), and the share
of a node's free memory that the default number of workers may take."""


class BatchLoader:
    """Provides this rank's share of each global batch. Slow data is prepared ahead by worker processes."""

    def __init__(self, source: Source, share: slice, device: torch.device, loader: Loader) -> None:
        """Raises UsageError if the first sample can't be prepared."""
        self._source, self._share, self._device = source, share, device
        self._waited = 0.0
        self._pool: Pool | None = None
        self._once: tuple[int, Batch] | None = None
        self._workers = self._prefetch = 0
        self.choice = Choice("loader", "main process", "batches are cheap to prepare")
        if source.slow:
            self._open(loader)

    def train(self, step: int) -> Batch:
        """Return the batch of a step (from 1). Fast for consecutive steps."""
        began = time.perf_counter()
        try:
            return self._get(BatchKey(step))
        finally:
            self._waited += time.perf_counter() - began

    def once(self, step: int) -> Batch:
        """Return the batch of any step, prepared in this process. The last one is cached: several passes before the
        first step use one batch."""
        if self._once is None or self._once[0] != step:
            self._once = step, self._source.train(step, self._share)
        return self._finished(self._once[1])

    def held_out(self, index: int, count: int) -> Batch:
        """Return batch `index` (from 0) of `count` held-out batches."""
        return self._get(BatchKey(index, count))

    def waited(self) -> float:
        """Return the seconds that the training loop has waited for batches since the last call."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def close(self) -> None:
        self._workers = 0
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _get(self, key: BatchKey) -> Batch:
        self._once = None
        if not self._workers:
            return self._finished(prepare_batch(self._source, key, self._share))
        if self._pool is None:
            self._pool = self._started(1 if key.of else key.number)
        return self._finished(self._pool.get(key))

    def _finished(self, batch: Batch) -> Batch:
        return self._source.finish(move_to(batch, self._device))

    def _open(self, loader: Loader) -> None:
        """Decide on worker processes. They start with the first batch; the server that forks them starts now."""
        first = self._share.start
        sample = self._source.train(1, slice(first, first + 1))
        _check_sample(sample)
        need = sum(tensor.nbytes for tensor in tensors_of(sample)) * (self._share.stop - first)
        dataset, problem = 0, ""
        if loader.workers != 0:
            try:
                dataset = len(ForkingPickler.dumps(WorkerDataset(self._source, self._share)))  # each worker has a copy
            except Exception as error:  # noqa: BLE001 - custom __reduce__ may raise anything; shared memory may be full
                problem = one_line(error)
        shm = shutil.disk_usage(SHM).free if Path(SHM).is_dir() else float("inf")
        here = Resources(cores(), int(os.environ.get("LOCAL_WORLD_SIZE") or 1), shm, free_memory_bytes(find_cgroup()))
        self._workers, self._prefetch, self.choice = choose_workers(loader, here, need, dataset)
        if self._workers and problem:
            self._workers, self.choice = 0, Choice("loader", "main process", "the dataset can't be pickled")
            if first == 0:
                print(f"loader: the dataset can't be sent to a worker process: {problem}", flush=True)
        elif self._workers:
            start_server()

    def _started(self, step: int) -> Pool:
        plan = WorkerDataset(self._source, self._share), self._workers, self._prefetch, step
        if self._device.type != "cuda":
            return Pool(*plan)
        from launch_train.data.cuda_prefetcher import CudaPrefetcher

        return Pool(*plan, pin=True, ahead=lambda batches, wanted: CudaPrefetcher(batches, self._device, wanted))


def _check_sample(sample: Batch) -> None:
    """Raise UsageError unless the batch holds a tensor and can be sent between processes."""
    try:
        count_samples(sample)
        pickle.dumps(map_tensors(sample, lambda tensor: torch.empty(0)))
    except ValueError as error:
        raise UsageError(f"data: {error}") from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"data: a sample can't be sent between processes: {error}") from error


class Resources(NamedTuple):
    """Resources of a node for worker processes: cores, ranks that share them, free bytes of shared memory and of all
    memory."""

    cores: int
    ranks: int
    shm: float
    memory: float


class WorkerPlan(NamedTuple):
    workers: int
    prefetch: int
    choice: Choice


def choose_workers(loader: Loader, here: Resources, need: int, dataset: int = 0) -> WorkerPlan:
    """Choose the number of workers: as set in the spec, else the rank's cores minus one for training, and no more than
    the memory has room for.

    At most as many batches as fit into shared memory are prepared ahead: a worker that finds it full dies silently.
    `need`: bytes of a rank's batch; `dataset`: bytes of the pickled dataset.
    """
    workers, why = loader.workers, "set in the spec"
    if workers is None:
        workers, why = max(0, here.cores // here.ranks - 1), f"{here.cores} cores for {plural(here.ranks, 'rank')}"
        fitting = MEMORY_PART * here.memory / here.ranks / (WORKER_BYTES + dataset)
        if fitting < workers:
            workers, why = int(fitting), f"{si(here.memory)}B of memory free, {si(WORKER_BYTES + dataset)}B per worker"
    room = SHM_PART * here.shm / here.ranks / max(1, need)  # inf where a machine has no shared memory of its own
    prefetch = loader.prefetch
    if workers * prefetch > room:
        workers, prefetch = (int(room) // prefetch, prefetch) if room >= prefetch else (min(1, int(room)), 1)
        why = f"{SHM} has only {si(here.shm)}B free"
    chosen = plural(workers, "process") if workers else "main process"
    return WorkerPlan(workers, prefetch, Choice("loader", chosen, why))
