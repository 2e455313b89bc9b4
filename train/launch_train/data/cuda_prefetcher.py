"""Copy batches to the GPU on a separate stream, one batch ahead of the step that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import torch

from launch_train.data.batch import map_tensors, move_to
from launch_train.data.workers import BatchKey, PreparedBatch
from launch_train.distributed.process_group import use_device

POLL_SECONDS = 0.1


class CudaPrefetcher:
    """An iterator over batches that are on the GPU, or being copied there while it computes.

    Batches that `wanted` rejects stay in host memory: training batches that arrive during an evaluation, possibly all
    that the workers have prefetched.
    """

    def __init__(
        self, source: Iterator[PreparedBatch], device: torch.device, wanted: Callable[[BatchKey], bool]
    ) -> None:
        self._source, self._device, self._wanted, self._stop = source, device, wanted, Event()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ready: Queue[tuple[PreparedBatch, Any] | BaseException] = Queue(maxsize=1)
        self._thread = Thread(target=self._copy, name="batches to the GPU", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[PreparedBatch]:
        return self

    def __next__(self) -> PreparedBatch:
        """Return the next batch without blocking this thread on its copy; the GPU stream waits instead.

        Tensors on the GPU are recorded on the computing stream, so that their memory is not reused before it is done.
        """
        received = self._ready.get()
        if isinstance(received, BaseException):
            raise received
        prepared, copied = received
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        map_tensors(prepared.batch, record)
        return prepared

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5 * POLL_SECONDS)

    def _copy(self) -> None:
        use_device(self._device)
        while not self._stop.is_set():
            try:
                prepared = next(self._source)
                if self._wanted(prepared.key):
                    with torch.cuda.stream(self._stream):
                        batch = move_to(prepared.batch, self._device)
                    prepared = PreparedBatch(prepared.key, batch, prepared.error)
                self._put((prepared, self._stream.record_event()))
            except BaseException as error:  # noqa: BLE001 - re-raised in the training thread
                self._put(error)
                return

    def _put(self, item: tuple[PreparedBatch, Any] | BaseException) -> None:
        while not self._stop.is_set():
            with suppress(Full):
                self._ready.put(item, timeout=POLL_SECONDS)
                return
