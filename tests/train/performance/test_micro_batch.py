"""How many samples go through the model at a time, with a model that runs out of memory where it is told to."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from launch_train import models
from launch_train.common.config import parse
from launch_train.common.decisions import Choice
from launch_train.common.errors import OutOfMemoryError
from launch_train.common.storage import LocalFolder
from launch_train.distributed.process_group import Ranks
from launch_train.performance import compile as compiling
from launch_train.performance import micro_batch as memory
from launch_train.performance import prepare_model
from launch_train.performance.micro_batch import LIMIT_FILE, largest_that_fits, split_evenly
from launch_train.trainer import build, train, warmup
from tests.train.forked import Forked
from tests.train.trainer.test_determinism import environment
from tests.train.trainer.test_train import TINY, events, read, run, steps

pytestmark = pytest.mark.usefixtures("one_thread")


class Small(nn.Module):
    """A model in a memory of so many samples; from `begins` on, in passes that were made."""

    def __init__(self, inner: nn.Module, fits: Callable[[int], int]) -> None:
        super().__init__()
        self.inner, self.fits, self.passes = inner, fits, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if len(x) > self.fits(self.passes):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore words")
        loss: Tensor = self.inner(x, y)
        return loss


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], None]:
    """Sets how many samples fit, by the number of the pass."""
    build = models.build_model

    def set_(fits: Callable[[int], int]) -> None:
        monkeypatch.setattr(models, "build_model", lambda config, source: Small(build(config, source), fits))

    return set_


def test_the_ranks_meet_before_they_agree_on_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may compile for longer than a collective waits."""
    store, met = HashStore(), list[bool]()
    ranks = Ranks(world=2, store=store)
    for number in range(2):
        store.set(f"meeting/{number}/1", "")

    def agreed(_ranks: Ranks, mine: bool) -> bool:
        met.append(store.check([f"meeting/{len(met)}/0"]))
        return mine

    monkeypatch.setattr(memory, "true_on_all_ranks", agreed)
    memory.probe(ranks, 1, lambda size: None, 0, lambda size: None)
    assert met == [True, True]


@pytest.mark.parametrize("fitting", [0, 1, 2, 5, 8, 16, 40])
def test_the_largest_that_fits_by_a_few_tries(fitting: int) -> None:
    sizes, tried = [1, 2, 4, 5, 8, 10, 20, 40], list[int]()

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= fitting

    assert largest_that_fits(sizes, fits) == max((size for size in sizes if size <= fitting), default=None)
    assert len(tried) <= 4
    assert tried[0] == 40
    assert len(set(tried)) == len(tried)


def test_a_probe_before_training_leaves_no_trace(
    tmp_path: Path, room: Callable[[Callable[[int], int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "is_memory_bounded", lambda device: True)
    config = {"data": "synthetic", "steps": 3, "batch_size": 12}
    plain = run(tmp_path / "plain", {**config, "micro_batch_size": 3})
    room(lambda number: 3)
    probed = run(tmp_path / "probed", config)
    (start,) = events(probed, "start")
    (chosen,) = [one for one in start["choices"] if one["what"] == "micro-batch"]
    assert chosen["chosen"] == "3"
    assert "largest of" in chosen["why"]
    assert [row["loss"] for row in steps(probed)] == [row["loss"] for row in steps(plain)]


def test_not_even_one_sample(
    tmp_path: Path, room: Callable[[Callable[[int], int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "is_memory_bounded", lambda device: True)
    room(lambda number: 0)
    with pytest.raises(OutOfMemoryError, match=r"not even one sample fits into .*: use a smaller model"):
        run(tmp_path / "run", {"data": "synthetic"})


def test_memory_that_runs_out_later_loses_no_step(
    tmp_path: Path, room: Callable[[Callable[[int], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    room(lambda number: 8 if number < 4 else 3)
    config = {"data": "synthetic", "steps": 6, "batch_size": 8}
    rows = run(tmp_path / "run", config)
    assert [row["step"] for row in steps(rows)] == [1, 2, 3, 4, 5, 6]
    assert [(event["step"], event["micro_batch"]) for event in events(rows, "out_of_memory")] == [(4, 2)]
    assert [row.get("micro_batch") for row in steps(rows)] == [None, None, None, 2, 2, 2]
    said = capsys.readouterr().out
    assert (
        "step 4: out of memory with micro-batch 8; retrying with 4: CUDA out of memory. Tried to allocate 2.00" in said
    )
    assert "step 4: out of memory with micro-batch 4; retrying with 2" in said
    room(lambda number: 8)
    plain = run(tmp_path / "plain", config)
    assert [row["loss"] for row in steps(rows)] == pytest.approx([row["loss"] for row in steps(plain)], rel=1e-5)
    assert memory.load_limit(LocalFolder(tmp_path / "run")) == 2


def test_out_of_memory_with_cuda_graphs_ends_with_the_size_to_set(
    tmp_path: Path, room: Callable[[Callable[[int], int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second pass of a step would overwrite the gradients of the first (pytorch issue 169545)."""
    room(lambda number: 8 if number < 4 else 3)
    prepare = prepare_model.prepare

    def prepared_with_graphs(*args: Any, **options: Any) -> Any:
        found = prepare(*args, **options)
        return found._replace(choices=(*found.choices, Choice("cuda graphs", "true", "set in the spec")))

    monkeypatch.setattr(build, "prepare", prepared_with_graphs)
    with pytest.raises(OutOfMemoryError) as error:
        run(tmp_path / "run", {"data": "synthetic", "steps": 6, "batch_size": 8})
    assert str(error.value) == (
        "rank 0 is out of memory with micro_batch_size 8, and cuda_graphs: true allows no smaller ones: a CUDA graph "
        "overwrites the gradients of the pass before; set run.config.micro_batch_size: 4, which trains without CUDA "
        "graphs, or run.config.batch_size: 4"
    )
    assert [row["step"] for row in steps(read(tmp_path / "run"))] == [1, 2, 3]
    assert memory.load_limit(LocalFolder(tmp_path / "run")) is None


@pytest.mark.slow
def test_a_halved_micro_batch_is_compiled_with_static_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the probe and a resumed run compile it: kernels for any size are slower and round differently."""
    compiled, forward_backward = list[list[Any]](), train.forward_backward

    def note_dynamic_sizes(graph: Any, inputs: Any) -> Any:
        compiled.append([size for size in inputs if not isinstance(size, Tensor)])
        return graph.forward

    def full_from_step_4(run: Any, batch: Any) -> Tensor:
        if run.state["step"] >= 3 and run.micro_batches.size == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward_backward(run, batch)

    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "BACKEND", note_dynamic_sizes)
    monkeypatch.setattr(train, "forward_backward", full_from_step_4)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):  # monkeypatch would remove the setting
        rows = run(tmp_path / "run", {"data": "synthetic", "steps": 5, "batch_size": 8, "compile": "whole"})
    torch._dynamo.reset()
    assert [row.get("micro_batch") for row in steps(rows)] == [None, None, None, 4, 4]
    assert len(compiled) >= 2
    assert not any(compiled)


@pytest.mark.parametrize("asked", ["auto", 4])
def test_a_start_begins_with_what_an_earlier_one_came_down_to(tmp_path: Path, asked: Any) -> None:
    """Whatever the spec asks for: it would run out of memory again. Perhaps the share is another one now."""
    folder = tmp_path / "run"
    memory.lower_limit(LocalFolder(folder), 3)
    config = {"data": "synthetic", "steps": 2, "batch_size": 8, "micro_batch_size": asked}
    (start,) = events(run(folder, config), "start")
    chosen = {one["what"]: (one["chosen"], one["why"]) for one in start["choices"]}
    assert chosen["micro-batch"] == ("2", "an earlier start ran out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "asked", "expected"),
    [
        ({}, {}, "3"),
        ({"log_every": 2}, {}, "3"),
        ({}, {"device_memory": 160_000_000_000}, "12"),
        ({}, {"device": "NVIDIA H200"}, "12"),
        ({"precision": "bf16"}, {}, "12"),
    ],
)
def test_a_resumed_run_keeps_its_micro_batch(
    tmp_path: Path,
    room: Callable[[Callable[[int], int]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    asked: dict[str, Any],
    expected: str,
) -> None:
    """On the same machine: another one adds in another order. On another machine, or with settings that take another
    amount of memory, it is probed again, and the log says why."""
    monkeypatch.setattr(memory, "is_memory_bounded", lambda device: True)
    config = {"data": "synthetic", "steps": 2, "batch_size": 12}
    room(lambda number: 3)
    run(tmp_path / "run", config)
    room(lambda number: 12)
    machine = warmup.device_facts
    monkeypatch.setattr(warmup, "device_facts", lambda ranks: machine(ranks) | asked)
    capsys.readouterr()
    _, start = events(run(tmp_path / "run", {**config, **changed}), "start")
    assert {one["what"]: one["chosen"] for one in start["choices"]}["micro-batch"] == expected
    said = capsys.readouterr().out
    assert ("probing again" in said) == (expected == "12")
    assert all(name in said for name in asked)


def test_after_a_try_nothing_holds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the driver is given back what is free, neither what was reserved nor what the try had is in the way."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    monkeypatch.setattr(memory, "free_memory", lambda device: alive.append(sum(ref() is not None for ref in held)))
    empty = torch.empty

    def noted(*args: Any, **more: Any) -> Tensor:
        made: Tensor = empty(*args, **more)
        held.append(weakref.ref(made))
        return made

    def attempt() -> None:
        taken = noted(3)
        raise torch.OutOfMemoryError(str(len(taken)))

    monkeypatch.setattr(torch, "empty", noted)
    assert not memory.fits_in_memory(torch.device("cpu"), attempt, 5)
    assert (len(held), alive) == (2, [0])


def test_a_probe_leaves_a_part_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GB, of which CUDA and another process have 4, and torch's tensors 6."""
    said: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 6_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _device: said.append(part))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: said.append("peak forgotten"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=8e10))
    monkeypatch.setattr(memory, "fits_in_memory", lambda *asked: not said.append(asked[2]))  # type: ignore[func-returns-value]  # append returns None
    assert memory.probe(Ranks(device=torch.device("cuda", 0)), 4, lambda size: None, 10).size == 4
    assert said == [pytest.approx(0.85), 10, 1.0, "peak forgotten"]


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_memory_that_runs_out_in_a_library_is_the_same(said: str) -> None:
    def attempt() -> None:
        raise RuntimeError(said)

    assert not memory.fits_in_memory(torch.device("cpu"), attempt, 0)
    with pytest.raises(OutOfMemoryError, match="rank 0 is out of memory: "), memory.explain_out_of_memory(Ranks()):
        attempt()


def test_memory_that_runs_out_elsewhere_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(_run: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore words")

    monkeypatch.setattr(train, "optimizer_step", update)
    with pytest.raises(OutOfMemoryError, match=r"rank 0 is out of memory: CUDA out .* 2.00 GiB: use a smaller model"):
        run(tmp_path / "run", {"data": "synthetic"})


def test_a_second_try_that_ddp_refuses_names_both_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(f"{train.DDP_UNFINISHED} in the prior iteration"),
    ]

    def gradients(*_: Any) -> Tensor:
        raise errors.pop(0)

    monkeypatch.setattr(train, "forward_backward", gradients)
    monkeypatch.setattr(train, "set_deadline", lambda *_: None)
    model = nn.Linear(2, 2)
    own = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "state": {"step": 4}, "is_compiled": False}
    run_: Any = SimpleNamespace(micro_batches=split_evenly(18, 9, 2), storage=None, ranks=Ranks(1, 2), **own)
    with pytest.raises(OutOfMemoryError, match=r"with micro_batch_size 9, and .*micro_batch_size 3"):
        train.forward_backward_with_retry(run_, (torch.zeros(9), torch.zeros(9)))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"size": "2"}', b'{"size": 0}'])
def test_what_was_learned_may_be_damaged(tmp_path: Path, content: bytes) -> None:
    LocalFolder(tmp_path).write(LIMIT_FILE, content)
    assert memory.load_limit(LocalFolder(tmp_path)) is None


def test_one_sample_that_does_not_fit_any_more_ends_the_run(
    tmp_path: Path, room: Callable[[Callable[[int], int]], None]
) -> None:
    room(lambda number: 8 if number < 3 else 0)
    with pytest.raises(
        OutOfMemoryError, match=r"rank 0 is out of memory with micro_batch_size 1, which can.t be reduced"
    ):
        run(tmp_path / "run", {"data": "synthetic", "batch_size": 8})
    assert [row["step"] for row in steps(read(tmp_path / "run"))] == [1, 2]


def test_with_peers_a_model_with_buffers_starts_again() -> None:
    """DDP sends buffers round in a forward pass that the peers have made already."""
    alone, two = Ranks(), Ranks(0, 2)
    plain, normed = nn.Linear(2, 2), nn.BatchNorm1d(2)
    assert memory.halve_for_retry(split_evenly(8, None, 2), plain, two)
    assert memory.halve_for_retry(split_evenly(8, None, 1), normed, alone)
    assert not memory.halve_for_retry(split_evenly(8, None, 2), normed, two)
    assert not memory.halve_for_retry(split_evenly(2, 1, 2), plain, two)
    assert parse(TINY).micro_batch_size is None


# --- Two ranks --------------------------------------------------------------------------------------------------------

SMALL = """
import os, torch
from torch import nn
from launch_train import models

build = models.build_model

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if os.environ["RANK"] == "1" and ctx.model.passes > 6 and ctx.model.samples > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grad, None

class Small(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.passes, self.samples = inner, 0, 0
        self.inner.tokens.register_forward_hook(lambda module, args, out: Late.apply(out, self))

    def forward(self, x, y):
        self.passes, self.samples = self.passes + 1, len(x)
        return self.inner(x, y)

models.build_model = lambda config, source: Small(build(config, source))
"""


@pytest.mark.slow(turn=0)
def test_two_ranks_of_which_one_runs_out_of_memory_go_on(switches: Path) -> None:
    rows = read(switches / "scarce")
    assert [row["step"] for row in steps(rows)] == list(range(1, 9))
    assert [(event["step"], event["micro_batch"]) for event in events(rows, "out_of_memory")] == [(5, 2)]
    assert (switches / "stdout").read_text().count("step 5: out of memory with micro-batch 4; retrying with 2") == 1
    plain = [row["loss"] for row in steps(read(switches / "enough"))]
    assert [row["loss"] for row in steps(rows)] == pytest.approx(plain, rel=1e-4)


def test_in_the_middle_of_what_all_ranks_do_another_start_goes_on(tmp_path: Path, forked: Forked) -> None:
    """The embedding's gradient is the last one: the others' are with the peer already."""
    env = environment(tmp_path / "run", {**TINY, "data": "synthetic", "steps": 8, "eval": {"every": 0}})
    began = time.monotonic()
    done = forked(env, 2, hook=SMALL)
    assert 1 in done.codes
    assert "rank 1 is out of memory with micro_batch_size 4, and" in done.stderr
    assert "micro_batch_size 2" in done.stderr
    assert time.monotonic() - began < 60
    assert memory.load_limit(LocalFolder(tmp_path / "run")) == 2
