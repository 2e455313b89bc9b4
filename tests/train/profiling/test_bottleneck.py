"""What bounds a run, from traces that were built, each with one bottleneck; test_profile.py records real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_train.profiling import kernel_categories
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


def test_the_costliest_kernels() -> None:
    def one(at: float) -> list[Event]:
        adds = [
            event
            for place in range(3)
            for event in launched(ADD, at + 300, at + 8000 + place * 500, at + 8400 + place * 500)
        ]
        return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 7800), *adds]

    matrix, add = analysed(one).kernels
    assert (matrix.name, matrix.calls, add.name, add.calls) == (GEMM, 1, ADD, 3)
    assert [matrix.seconds, add.seconds] == pytest.approx([0.0076, 0.0012])


def test_the_costliest_operators_without_a_gpu() -> None:
    def one(at: float) -> list[Event]:
        outer = host("aten::linear", at + 1000, at + 6000, kind="cpu_op")
        inner = host("aten::addmm", at + 1500, at + 5500, kind="cpu_op")
        other = host("aten::relu", at + 6000, at + 6500, kind="cpu_op")
        return [*phases(at, 100, 8000, 9000, 9500), outer, inner, other]

    found = {kernel.name: (round(kernel.seconds * 1e6), kernel.calls) for kernel in analysed(one).kernels}
    assert found == {"aten::addmm": (4000, 1), "aten::linear": (1000, 1), "aten::relu": (500, 1)}


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


def test_one_step_alone_is_judged_to_its_end() -> None:
    assert analysed(input_bound, number=1).bound == "input"
    assert analyse(parse([])) is None
    assert analyse(parse(steps(input_bound)), steps=0) is None


def test_copies_are_told_from_waiting() -> None:
    assert analysed(late_copies).copying == pytest.approx(1, abs=0.02)
    assert analysed(input_bound).copying == 0
    words = explain_analysis(analysed(late_copies), Setup(gpu=True))["sentences"][0]
    assert "copying batches" in words


def test_an_evaluation_is_left_out() -> None:
    def one(at: float) -> list[Event]:
        own = launched(GEMM, at + 1010, at + 1020, at + 9000)
        train = [*phases(at, 700, 800, 900, 950), *launched(GEMM, at + 700, at + 710, at + 1010)]
        return [*train, host("evaluation", at + 1000, at + 9000), *own]

    found = analysed(one)
    assert found.seconds == pytest.approx(0.00202, abs=1e-4)
    assert found.shares["compute"] < 0.2


def test_a_graph_is_one_call_of_many_kernels() -> None:
    def one(at: float) -> list[Event]:
        graph = [call("cudaGraphLaunch", at + 150, at + 160, correlation=int(at))]
        for i in range(90):
            (_, kernel) = launched(GEMM, 0, at + 200 + 100 * i, at + 299 + 100 * i)
            graph.append(kernel | {"args": {"correlation": int(at), "stream": 7}})
        return [*phases(at, 100, 300, 500, 900), *graph]

    assert analysed(one).bound == "compute"
    assert analysed(one).launches == 90


def test_what_the_optimizers_range_launches_is_its_own() -> None:
    """Clipping, too, though it is made of elementwise kernels."""

    def one(at: float) -> list[Event]:
        clip = launched(ADD, at + 600, at + 2000, at + 9900)
        return [*phases(at, 100, 300, 500, 900), *launched(GEMM, at + 150, at + 200, at + 2000), *clip]

    assert analysed(one).bound == "optimizer"


def test_what_a_loaders_thread_does_holds_nobody_up() -> None:
    def one(at: float) -> list[Event]:
        pins = call("cudaHostAlloc", at + 200, at + 9000, chrome.LOADER)
        waits = call("cudaEventSynchronize", at + 150, at + 9000, chrome.LOADER)
        return [*sync_of_the_logging(at)[:-1], pins, waits]

    assert analysed(one).shares["allocation"] == analysed(one).shares["host_sync"] == 0


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM, "compute"),
        ("nvjet_hsh_192x192_64x4_1x2_h_bz_coopB_TNT", "compute"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "compute"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "compute"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "compute"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "compute"),
        ("cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>", "compute"),
        ("triton_tem_fused_addmm_3", "compute"),
        ("my_kernel(float*)", "compute"),
        (ADD, "memory"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, {lambda(float)#1}>>", "memory"),
        ("void at::native::unrolled_elementwise_kernel<at::native::convert_functor>", "memory"),
        ("triton_poi_fused_gelu_7", "memory"),
        ("triton_red_fused__softmax_1", "memory"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_3", "memory"),
        ("triton_poi_fused__native_batch_norm_legit_functional_convolution_relu_0", "memory"),
        ("triton_per_fused__to_copy_mm_native_layer_norm_backward_12", "memory"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "memory"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("Memset (Device)", "memory"),
        (ADAM, "optimizer"),
        (ALL_REDUCE, "communication"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "communication"),
        (chrome.TO_DEVICE, "to_device"),
        (chrome.TO_HOST, "to_host"),
    ],
)
def test_kernels_by_name(name: str, kind: str) -> None:
    assert kernel_categories.kernel(name) == kind


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


def test_the_words() -> None:
    verdict = explain_analysis(made(launch_overhead=0.62, compute=0.3, input=0.04, memory=0.04), Setup(gpu=True))
    assert format_verdict(verdict, "8-10").splitlines() == [
        "profile of steps 8-10: bound by launch overhead",
        "  62% launch overhead: the GPU waits for Python to call the",
        "      next small operator (1,234 kernels per step).",
        "  30% computing: matrix products, convolutions, attention.",
        "  First: compile: true, which fuses small operators into few",
        "      large ones.",
    ]
