"""Copies of a state in host memory: where they lie in segments of pinned memory, and what of it a checkpoint holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch_train.checkpointing.partition import HostCopies


class OnGpu(torch.Tensor):
    """A stand-in: there is no GPU here."""

    is_cuda = True


class PinnedMemory:
    """Counts what is allocated, as torch's allocator of pinned memory takes it: each request a power of two."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.limit, self.segments, self.pageable = limit, list[int](), list[int]()
        self._empty = torch.empty

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        tensor = self._empty(*shape, **options)
        if pin_memory and sum(self.segments) + tensor.nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        if tensor.nbytes:
            (self.segments if pin_memory else self.pageable).append(1 << (tensor.nbytes - 1).bit_length())
        return tensor


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    pinned = PinnedMemory()
    monkeypatch.setattr(torch, "empty", pinned.empty)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    return pinned


def on_gpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: tensor.as_subclass(OnGpu) for path, tensor in state.items()}


def adam(*sizes: int) -> dict[str, Tensor]:
    """Return parameters of these sizes with two moments each."""
    return {f"{size}/{number}/{part}": torch.zeros(size) for number, size in enumerate(sizes) for part in "pmv"}


MIXED = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "every second": torch.arange(10, dtype=torch.int64)[::2],
    "expanded": torch.tensor([7.0]).expand(5),
    "bf16": torch.linspace(0, 1, 7).to(torch.bfloat16),
    "int8": torch.tensor([-128, 0, 127], dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "none of float64": torch.zeros(0, dtype=torch.float64),
    "none of int8": torch.zeros((3, 0), dtype=torch.int8),
    "step": torch.tensor(12.0),
}


def test_copies_of_all_kinds_of_tensors_are_aligned_contiguous_and_equal(memory: PinnedMemory) -> None:
    copies = HostCopies().take(on_gpu(MIXED))
    ends = 0
    for copy in sorted(copies.values(), key=lambda copy: copy.data_ptr()):
        assert copy.is_contiguous()
        if copy.nbytes:
            assert copy.data_ptr() % 64 == 0
            assert copy.data_ptr() >= ends
            ends = copy.data_ptr() + copy.nbytes
    assert list(copies) == list(MIXED)
    for path, tensor in MIXED.items():
        assert (copies[path].dtype, copies[path].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copies[path], tensor)
    assert memory.segments == [512, 128]
    assert not memory.pageable


def test_a_tensor_that_is_larger_than_the_rest_together_takes_one_segment_with_them(memory: PinnedMemory) -> None:
    HostCopies().take(on_gpu({"table": torch.zeros(300_000), "bias": torch.zeros(20_000)}))
    assert memory.segments == [1 << 21]


def test_the_next_snapshot_reuses_the_memory_and_one_of_a_larger_state_adds_to_it(memory: PinnedMemory) -> None:
    copies, state = HostCopies(), adam(1000, 20, 3000)
    first = copies.take(on_gpu(state))
    segments = [*memory.segments]
    second = copies.take(on_gpu({path: tensor + 1 for path, tensor in state.items()}))
    assert [copy.data_ptr() for copy in second.values()] == [copy.data_ptr() for copy in first.values()]
    assert all((copy == 1).all() for copy in second.values())
    copies.take(on_gpu({path: tensor.to(torch.bfloat16) for path, tensor in state.items()}))  # smaller
    assert memory.segments == segments

    larger = {**state, **{f"new {path}": torch.full_like(tensor, 5) for path, tensor in adam(700).items()}}
    third = copies.take(on_gpu(larger))
    assert all(torch.equal(third[path], tensor) for path, tensor in larger.items())
    assert memory.segments[: len(segments)] == segments
    assert sum(memory.segments[len(segments) :]) <= 16384  # 8,448 bytes are new
    assert HostCopies().take({}) == {}


def test_copies_outlive_the_buffers_that_a_cancelled_save_has_left(memory: PinnedMemory) -> None:
    """A hung upload still reads them, after the saver has new ones."""
    copies = HostCopies().take(on_gpu(MIXED))
    for _ in range(20):
        HostCopies().take(on_gpu({path: torch.zeros_like(tensor) for path, tensor in MIXED.items()}))
    assert all(torch.equal(copies[path], tensor) for path, tensor in MIXED.items())


def test_without_pinned_memory_the_copies_are_pageable_and_one_line_says_so(
    memory: PinnedMemory, capsys: pytest.CaptureFixture[str]
) -> None:
    memory.limit = 16384  # so the first segment is pinned, and no other
    copies, state = HostCopies(), {name: torch.full((1024,), float(number)) for number, name in enumerate("abcde")}
    for _ in range(2):
        assert all(torch.equal(copy, state[path]) for path, copy in copies.take(on_gpu(state)).items())
    state["f"] = torch.full((9000,), 7.0)
    assert all(torch.equal(copy, state[path]) for path, copy in copies.take(on_gpu(state)).items())
    assert (memory.segments, memory.pageable) == ([16384], [4096, 65536])
    assert capsys.readouterr().err.count("pinned host memory is not available (CUDA error: out of memory)") == 1
