"""What bounds a run, from traces that were built, each with one bottleneck; test_profile.py records real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_train.profiling.advice import Setup, explain_analysis, format_verdict
from launch_train.profiling.bottleneck import CAUSES, Analysis, analyse
from launch_train.profiling.trace import parse, read
from tests.train.profiling import chrome
from tests.train.profiling.chrome import ADAM, ADD, ALL_REDUCE, GEMM, Event, call, host, launched, phases, steps

One = Callable[[float], list[Event]]


def analysed(one: One, number: int = 4) -> Analysis:
    found = analyse(parse(steps(one, number)))
    assert found is not None
    assert sum(found.shares.values()) == pytest.approx(1)
    return found


# --- A step of 10 ms for each cause -----------------------------------------------------------------------------------


def input_bound(at: float) -> list[Event]:
    return [*phases(at, 7000, 8000, 9000, 9500), *launched(GEMM, at + 7000, at + 7010, at + 10_000)]


def late_copies(at: float) -> list[Event]:
    copy = launched(chrome.TO_DEVICE, at + 50, at + 60, at + 6000, chrome.SIDE)
    return [*phases(at, 100, 300, 500, 900), *copy, *launched(GEMM, at + 200, at + 6000, at + 10_050)]


def compute_bound(at: float) -> list[Event]:
    return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 10_190)]


def a_host_that_runs_ahead(at: float) -> list[Event]:
    """It waits for data most of the time; but the device has work for longer than that."""
    return [*phases(at, 8000, 9000, 9500, 9900), *launched(GEMM, at + 8100, at + 30_000, at + 40_000)]


def exposed_communication(at: float) -> list[Event]:
    talk = launched(ALL_REDUCE, at + 400, at + 3000, at + 9900, chrome.NCCL, chrome.AUTOGRAD)
    return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 3000), *talk]


def overlapped_communication(at: float) -> list[Event]:
    talk = launched(ALL_REDUCE, at + 400, at + 300, at + 9900, chrome.NCCL, chrome.AUTOGRAD)
    return [*compute_bound(at), *talk]


def memory_bound(at: float) -> list[Event]:
    kernels = [launched(ADD, at + 150 + 5 * i, at + 200 + 100 * i, at + 299 + 100 * i) for i in range(90)]
    return [*phases(at, 100, 700, 800, 900), *(event for each in kernels for event in each)]


def launch_bound(at: float) -> list[Event]:
    kernels = [launched(ADD, at + 130 + 50 * i, at + 140 + 50 * i, at + 146 + 50 * i) for i in range(190)]
    return [*phases(at, 100, 5000, 9600, 9700), *(event for each in kernels for event in each)]


def sync_in_the_model(at: float) -> list[Event]:
    """Twice a step the device runs dry, and the host has to begin again."""
    events = phases(at, 100, 7000, 9000, 9900)
    for begin in (100, 4000):
        events += launched(GEMM, at + begin + 10, at + begin + 500, at + begin + 1500)
        events += [call("cudaStreamSynchronize", at + begin + 50, at + begin + 1520)]
    return events


def sync_of_the_logging(at: float) -> list[Event]:
    wait = call("cudaStreamSynchronize", at + 950, at + 3020)
    return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 3000), wait]


def short_of_memory(at: float) -> list[Event]:
    gone = [call("cudaFree", at + 3000, at + 5000), call("cudaMalloc", at + 5000, at + 9000)]
    return [*phases(at, 100, 9500, 9700, 9900), *launched(GEMM, at + 150, at + 200, at + 3000), *gone]


def optimizer_bound(at: float) -> list[Event]:
    update = launched(ADAM, at + 600, at + 2000, at + 9900)
    return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 2000), *update]


def slow_between_the_steps(at: float) -> list[Event]:
    return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 2000)]


@pytest.mark.parametrize(
    ("one", "bound", "share", "change"),
    [
        (input_bound, "input", 0.70, "loader.workers"),
        (late_copies, "input", 0.59, "loader.workers"),
        (compute_bound, "compute", 0.99, "compile"),
        (a_host_that_runs_ahead, "compute", 1.0, "compile"),
        (exposed_communication, "communication", 0.69, "batch_size"),
        (overlapped_communication, "compute", 1.0, "compile"),
        (memory_bound, "memory", 0.89, "compile"),
        (launch_bound, "launch_overhead", 0.83, "compile"),
        (sync_in_the_model, "host_sync", 0.79, ""),
        (sync_of_the_logging, "host_sync", 0.71, "log_every"),
        (short_of_memory, "allocation", 0.60, "micro_batch_size"),
        (optimizer_bound, "optimizer", 0.79, "batch_size"),
        (slow_between_the_steps, "other", 0.82, "log_every"),
    ],
)
def test_each_bottleneck_is_found(one: One, bound: str, share: float, change: str) -> None:
    found = analysed(one)
    assert found.bound == bound
    assert found.shares[found.bound] == pytest.approx(share, abs=0.021)
    assert found.seconds == pytest.approx(0.01)
    assert found.gpu
    verdict = explain_analysis(found, Setup(gpu=True))
    assert (verdict["bound"], verdict["change"]) == (bound, change)
    assert verdict["sentences"][0].startswith(f"{found.shares[found.bound]:.0%} ")
    assert max(map(len, format_verdict(verdict).splitlines())) <= 60


def test_communication_behind_computing_is_not_blamed() -> None:
    assert analysed(overlapped_communication).shares["communication"] == pytest.approx(0, abs=0.001)
    assert analysed(a_host_that_runs_ahead).shares["input"] == 0


# --- On a CPU ---------------------------------------------------------------------------------------------------------


def operators(at: float, name: str, length: float) -> list[Event]:
    """One operator after the other, for 8 ms."""
    own = [host(name, at + 1000 + i, at + 1000 + i + 0.9 * length, kind="cpu_op") for i in _every(length, 8000)]
    return [*phases(at, 1000, 9000, 9100, 9200), *own]


def _every(length: float, until: float) -> Iterable[float]:
    return (length * i for i in range(int(until / length)))


@pytest.mark.parametrize(
    ("one", "bound"),
    [
        (lambda at: operators(at, "aten::addmm", 1000), "compute"),
        (lambda at: operators(at, "aten::convolution_backward", 1000), "compute"),
        (lambda at: operators(at, "aten::_scaled_dot_product_flash_attention_for_cpu", 1000), "compute"),
        (lambda at: operators(at, "Torch-Compiled Region: 0/0", 1000), "compute"),
        (lambda at: operators(at, "aten::native_layer_norm", 1000), "memory"),
        (lambda at: operators(at, "aten::mul", 5), "launch_overhead"),
        (lambda at: operators(at, "aten::unbind", 1000), "launch_overhead"),
        (lambda at: operators(at, "aten::item", 5), "host_sync"),
        (lambda at: operators(at, "c10d::allreduce_", 1000), "communication"),
        (lambda at: phases(at, 8000, 9000, 9500, 9900), "input"),
        (lambda at: phases(at, 100, 1000, 2000, 9900), "optimizer"),
        (lambda at: phases(at, 100, 1000, 2000, 2100), "other"),
        (
            lambda at: [*phases(at, 100, 200, 9000, 9100), host("gloo:all_reduce", at + 100, at + 9000, 7)],
            "communication",
        ),
        (lambda at: [*operators(at, "aten::mm", 1000), host("gloo:all_reduce", at + 100, at + 9000, 7)], "compute"),
    ],
)
def test_each_bottleneck_is_found_without_a_gpu(one: One, bound: str) -> None:
    found = analysed(one)
    assert (found.bound, found.gpu) == (bound, False)
    assert found.shares[found.bound] > 0.6
    assert found.seconds == pytest.approx(0.01)


def test_a_recorded_trace() -> None:
    """One step of tests/train/profiling/talking.py on two ranks, its threads renumbered and arguments left out."""
    found = analyse(read(Path(__file__).with_name("traces") / "gloo-2-ranks.json.gz"))
    assert found is not None
    assert found.bound == "communication"
    assert {cause for cause, share in found.shares.items() if share > 0.05} == {"communication", "memory"}


# --- Whatever comes ---------------------------------------------------------------------------------------------------

moments = st.floats(0, 40_000, allow_nan=False)
names = st.sampled_from(
    [
        *(GEMM, ADD, ADAM, ALL_REDUCE, chrome.TO_DEVICE, chrome.TO_HOST, "void mine(float*)", "data", "forward"),
        *("backward", "optimizer", "evaluation", "aten::mul", "aten::item", "cudaMalloc", "cudaStreamSynchronize"),
    ]
)
kinds = st.sampled_from(["kernel", "gpu_memcpy", "cpu_op", "user_annotation", "cuda_runtime", "python_function"])
events = st.builds(
    lambda kind, name, begin, length, tid, number: {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": 1_000_000 + begin,
        "dur": length,
        "args": {"correlation": number},
    },
    *(kinds, names, moments, st.floats(0, 9000), st.sampled_from([chrome.MAIN, 7]), st.integers(0, 9)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=40), st.integers(1, 4))
def test_the_shares_are_a_whole(drawn: list[Event], number: int) -> None:
    found = analyse(parse([*drawn, *steps(lambda at: [], number)]))
    assert found is not None
    assert set(found.shares) == set(CAUSES)
    assert min(found.shares.values()) >= 0
    assert sum(found.shares.values()) == pytest.approx(1)
    assert 0 <= found.sync_outside <= 1
    assert 0 <= found.copying <= 1
    verdict = explain_analysis(found, Setup())
    assert verdict["advice"]
    assert max(map(len, format_verdict(verdict).splitlines())) <= 60


# --- Names and words --------------------------------------------------------------------------------------------------


def made(**shares: float) -> Analysis:
    whole: dict[Any, float] = dict.fromkeys(CAUSES, 0.0) | shares
    return Analysis(whole, 3, 0.1, gpu=True, launches=1234)


@pytest.mark.parametrize(
    ("shares", "setup", "change", "words"),
    [
        ({"input": 1.0}, {"workers": 2}, "loader.workers", "loader.workers: 4 instead of 2"),
        ({"compute": 1.0}, {"compiled": True}, "", "a faster GPU"),
        ({"compute": 1.0}, {"compiled": True, "bf16": True}, "precision", "precision: auto"),
        ({"compute": 0.8, "input": 0.2}, {}, "loader.workers", "loader.workers"),
        ({"compute": 0.9, "input": 0.1}, {}, "compile", "compile: true"),
        ({"communication": 1.0}, {"nodes": 2}, "batch_size", "fewer, larger machines"),
        ({"communication": 1.0}, {}, "batch_size", "NVLink"),
        ({"communication": 1.0}, {"parallel": "fsdp"}, "parallel", "parallel: ddp"),
        ({"memory": 1.0}, {"compiled": True, "checkpointing": "full"}, "activation_checkpointing", "none"),
        ({"memory": 1.0}, {"compiled": True}, "", "fused operators"),
        ({"memory": 1.0}, {"compiled": True, "bf16": True}, "precision", "half as many"),
        ({"launch_overhead": 1.0}, {"compiled": True}, "cuda_graphs", "cuda_graphs: true"),
        ({"launch_overhead": 1.0}, {"compiled": True, "cuda_graphs": True}, "batch_size", "larger operators"),
        ({"launch_overhead": 1.0}, {"accumulates": True}, "micro_batch_size", "larger micro_batch_size"),
        ({"other": 0.9, "host_sync": 0.1}, {}, "log_every", "larger log_every"),
    ],
)
def test_what_is_changed_already_is_not_advised(
    shares: dict[str, float], setup: dict[str, Any], change: str, words: str
) -> None:
    verdict = explain_analysis(made(**shares), Setup(gpu=True, **setup))
    assert verdict["change"] == change
    assert words in verdict["advice"]


@pytest.mark.parametrize(
    ("shares", "setup", "change", "words"),
    [
        ({"input": 1.0}, {"workers": 0}, "loader.workers", "if cores are free"),
        ({"launch_overhead": 1.0}, {}, "batch_size", "larger batch_size"),
        ({"launch_overhead": 1.0}, {"accumulates": True}, "micro_batch_size", "larger micro_batch_size"),
        ({"memory": 1.0}, {}, "", "a machine with a GPU"),
        ({"memory": 1.0}, {"checkpointing": "full"}, "activation_checkpointing", "none"),
        ({"compute": 1.0}, {}, "", "a machine with a GPU"),
    ],
)
def test_on_a_cpu_nothing_is_advised_that_pays_on_gpus_alone(
    shares: dict[str, float], setup: dict[str, Any], change: str, words: str
) -> None:
    verdict = explain_analysis(made(**shares)._replace(gpu=False), Setup(**setup))
    assert verdict["change"] == change
    assert words in verdict["advice"]
    assert "compile" not in verdict["advice"]
