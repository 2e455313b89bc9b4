"""Part 1: compare a small run with each technique of the trainer with a run without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from benchmarks.gpu_acceptance.running import program
from benchmarks.gpu_acceptance.small import (
    TINY_GPT,
    all_of,
    check,
    chosen,
    config,
    learns_alike,
    limited,
    read,
    replaced,
    trained,
)
from benchmarks.gpu_acceptance.tasks import Measured, Place, SkipRow, Task, Verdict

KEPT: Final = ("losses", "precision", "choices", "reasons", "skipped", "micro", "memory_gb", "peak_gb", "out_of_memory")


def _kept(found: Measured, **more: Any) -> dict[str, Any]:
    return {name: found[name] for name in KEPT} | more


# --- Numbers ----------------------------------------------------------------------------------------------------------


def _numbers(place: Place, kind: str) -> Measured:
    """Train the same run in fp32 and in `kind`."""
    _capable(place, kind)
    reference = trained(place, "reference", precision="fp32")
    found = trained(place, kind, precision=kind) if kind != "fp32" else trained(place, "again", precision="fp32")
    return _kept(found, reference=reference["losses"], kind=kind)


def _capable(place: Place, kind: str) -> None:
    import torch

    if place.gpus and kind in ("bf16", "tf32") and torch.cuda.get_device_capability(place.device) < (8, 0):
        raise SkipRow("needs an Ampere GPU or newer")


def judge_numbers(measured: Measured) -> Verdict:
    """Check that this precision was used: the losses are close to those of fp32, but not identical."""
    kind = measured["kind"]
    same = measured["losses"] == measured["reference"]
    told = check(measured["precision"] == kind, f"the run says {measured['precision']}, not {kind}")
    rounded = check(kind == "fp32" or not same, f"the losses are fp32's to the last bit: {kind} was not in use")
    return all_of(told, rounded, learns_alike(measured))


def _fp16(place: Place) -> Measured:
    """Train from a loss scale at which gradients overflow."""
    import torch

    from launch_train.performance import precision

    reference = trained(place, "reference", precision="fp32")
    high = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    with replaced(precision, scaler=lambda *_: high):
        found = trained(place, "fp16", precision="fp16")
    return _kept(found, reference=reference["losses"], scale=high.get_scale())


def judge_fp16(measured: Measured) -> Verdict:
    """Check that only the first steps are skipped, each halves the scale, and the run learns."""
    skipped, losses = measured["skipped"], measured["losses"]
    count, scale = len(skipped), measured["scale"]
    return all_of(
        check(measured["precision"] == "fp16", f"the run says {measured['precision']}"),
        check(0 < count < 12 and skipped == list(range(1, count + 1)), f"skipped steps: {skipped}"),
        check(scale == 2.0 ** (24 - count), f"the scale is {scale:g} after {count} skipped steps"),
        check(losses[-1] < 0.97 * losses[0], f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}"),
        Verdict(True, f"{count} steps skipped until the scale was {scale:g}; loss {losses[0]:.3f} to {losses[-1]:.3f}"),
    )


# --- Attention, compiler ----------------------------------------------------------------------------------------------


def _attention(place: Place, kernel: str) -> Measured:
    _capable(place, "bf16" if kernel in ("flash", "cudnn") else "")
    reference = trained(place, "reference", attention="math" if kernel != "math" else "auto", precision="bf16")
    found = trained(place, kernel, attention=kernel, precision="bf16")
    return _kept(found, reference=reference["losses"], kernel=kernel)


def judge_attention(measured: Measured) -> Verdict:
    return all_of(chosen(measured, "attention", measured["kernel"]), learns_alike(measured))


def _compiled(place: Place, mode: str, **more: Any) -> Measured:
    """Train compiled; on a CPU, skip the compiler's last stage, which takes a minute there."""
    from launch_train.performance import compile as compiling

    backend = nullcontext() if place.gpus else replaced(compiling, BACKEND="aot_eager")
    reference = trained(place, "eager")
    with backend:
        found = trained(place, mode, compile="whole" if mode == "whole" else True, **more)
    return _kept(found, reference=reference["losses"], mode=mode)


def judge_compiled(measured: Measured) -> Verdict:
    return all_of(chosen(measured, "compile", measured["mode"]), learns_alike(measured))


def judge_graphs(measured: Measured) -> Verdict:
    return all_of(chosen(measured, "cuda graphs", "true"), judge_compiled(measured))


# --- Memory -----------------------------------------------------------------------------------------------------------


def _activations(place: Place, kind: str) -> Measured:
    """Measure memory with and without activation checkpointing; on a CPU, count the bytes that autograd keeps."""
    wide = TINY_GPT if place.tiny else {**TINY_GPT, "n_layer": 12, "n_embd": 256, "n_head": 4, "block_size": 512}
    held, losses = list[float](), list[list[float]]()
    for asked in ("none", kind):
        with _counted(place) as kept:
            found = trained(place, asked, model=wide, activation_checkpointing=asked, steps=6)
        held.append(found["peak_gb"] if place.gpus else kept[0] / 1e9)
        losses.append(found["losses"])
    return {"losses": losses[1], "reference": losses[0], "without_gb": held[0], "with_gb": held[1]}


@contextmanager
def _counted(place: Place) -> Iterator[list[int]]:
    """Count the bytes that autograd keeps for backward passes, on a CPU, which has no memory statistics."""
    import torch

    kept = [0]

    def keep(tensor: Any) -> Any:
        kept[0] += tensor.numel() * tensor.element_size()
        return tensor

    hooks = nullcontext() if place.gpus else torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks:
        yield kept


def judge_activations(measured: Measured) -> Verdict:
    without, held = measured["without_gb"], measured["with_gb"]
    less = check(
        held < 0.9 * without,
        f"{held:.3g} GB, {without:.3g} GB without it",
        f"{without:.3g} GB come down to {held:.3g} GB",
    )
    return all_of(less, _same(measured, 1e-3))


def _same(measured: Measured, most: float) -> Verdict:
    from benchmarks.gpu_acceptance.small import apart

    found = apart(measured["losses"], measured["reference"])
    return check(found <= most, f"losses differ by {found:.3%}", f"losses within {found:.2g}")


@contextmanager
def forced_fsdp(place: Place) -> Iterator[None]:
    """Inside, `parallel: fsdp` shards on one rank, where the trainer would not use it."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from launch_train.performance import fsdp

    device = place.device

    def place_model(model: Any, _config: Any, ranks: Any, numbers: Any, blocks: Any) -> Any:
        return model, fsdp.shard_model(model, ranks, numbers, blocks, moments=2)

    given: dict[str, Any] = {"device_id": device} if place.gpus else {}
    dist.init_process_group("nccl" if place.gpus else "gloo", store=HashStore(), rank=0, world_size=1, **given)
    try:
        with replaced(fsdp, place_model=place_model):
            yield
    finally:
        dist.destroy_process_group()


def _fsdp(place: Place) -> Measured:
    reference = trained(place, "reference", precision="fp32")
    with forced_fsdp(place):
        found = trained(place, "fsdp", parallel="fsdp", precision="fp32")
    return _kept(found, reference=reference["losses"])


def judge_fsdp(measured: Measured) -> Verdict:
    return all_of(chosen(measured, "parallel", "fsdp"), learns_alike(measured, 1e-3))


LIMIT_GB: Final = 3.0
ROOM: Final = 0.9
"""Share of the memory that the probe may fill (launch_train.performance.micro_batch)."""


def _probe(place: Place) -> Measured:
    """Train with `micro_batch_size: auto` in 3 GB of the card: return the peaks of the probe and of training."""
    import torch

    from launch_train.performance import micro_batch

    real, peaks = micro_batch.probe, dict[int, float]()

    def probe(ranks: Any, share: int, attempt: Callable[[int], None], reserved: int) -> Any:
        def noted(size: int) -> None:
            torch.cuda.reset_peak_memory_stats(ranks.device)
            attempt(size)
            peaks[size] = torch.cuda.max_memory_allocated(ranks.device) / 1e9

        return real(ranks, share, noted, reserved)

    with limited(place, LIMIT_GB * 1e9), replaced(micro_batch, probe=probe):
        found = trained(place, "probed", batch_size=4096, micro_batch_size="auto", steps=6)
    size = int(found["choices"]["micro-batch"])
    return {"chosen": size, "share": 4096, "tried": len(peaks), "predicted_gb": peaks.get(size), **_kept(found)}


def judge_probe(measured: Measured) -> Verdict:
    """Check that training uses as much memory as the probe's pass, and neither too much nor too little of the GPU."""
    predicted, peak, size = measured["predicted_gb"] or 0.0, measured["memory_gb"], measured["chosen"]
    off = peak / predicted - 1 if predicted else float("inf")
    return all_of(
        check(1 <= size < measured["share"], f"micro-batch {size} of {measured['share']}: the limit did not matter"),
        check(abs(off) <= 0.15, f"predicted {predicted:.2f} GB, but training took {peak:.2f} GB ({off:+.0%})"),
        check(peak <= LIMIT_GB, f"{peak:.2f} GB of {LIMIT_GB} GB"),
        check(peak >= 0.45 * ROOM * LIMIT_GB, f"only {peak:.2f} GB of {LIMIT_GB} GB are used"),
        Verdict(True, f"micro-batch {size}: predicted {predicted:.2f} GB, measured {peak:.2f} GB ({off:+.1%})"),
    )


FULL_AT: Final = 4


def _out_of_memory(place: Place) -> Measured:
    """Train with memory for three quarters of a micro-batch from step 4 on; simulated on a CPU."""
    plain = trained(place, "plain", steps=8)
    full = _filled if place.gpus else _pretended
    with full(place):
        found = trained(place, "full", steps=8)
    return _kept(found, reference=plain["losses"], steps=8)


@contextmanager
def _filled(place: Place) -> Iterator[None]:
    import torch

    from launch_train.performance import micro_batch
    from launch_train.trainer import train

    real, taken = train.train_step, list[Any]()

    def step(run: Any) -> None:
        if run.state["step"] == FULL_AT - 1:
            pass_takes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            micro_batch.free_memory(place.device)
            left = int(1e9) - torch.cuda.memory_reserved() - pass_takes * 3 // 4
            taken.append(torch.empty(left, dtype=torch.uint8, device=place.device))
        real(run)

    with limited(place, 1e9), replaced(train, train_step=step):
        torch.cuda.reset_peak_memory_stats()
        yield
    taken.clear()


@contextmanager
def _pretended(place: Place) -> Iterator[None]:
    import torch

    from launch_train.trainer import train

    real, whole = train.forward_backward, config(place)["micro_batch_size"]

    def forward_backward(run: Any, batch: Any) -> Any:
        if run.state["step"] >= FULL_AT - 1 and run.micro_batches.size == whole:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return real(run, batch)

    with replaced(train, forward_backward=forward_backward):
        yield


def _sanitized(place: Place) -> Measured:
    """Train with torch's sanitizer of CUDA streams, with loader processes and asynchronous checkpoints."""
    slow = {"count": 1000, "width": TINY_GPT["block_size"], "seconds": 0.001}
    data = {"path": "benchmarks.gpu_acceptance.runs:slow_data", "settings": slow}
    settings = config(place, model=TINY_GPT, data=data, loader={"workers": 2}, checkpoint={"minutes": 0.005}, steps=60)
    env = {"LAUNCH_CONFIG": json.dumps(settings), "LAUNCH_RUN_FOLDER": str(place.folder / "sanitized")}
    if place.gpus:
        env["TORCH_CUDA_SANITIZER"] = "1"
    done = program([sys.executable, "-m", "launch_train"], place, 200, **env)
    found = read(place.folder / "sanitized")
    return {"races": done.stdout.count("CSAN detected"), "steps": len(found["steps"]), "gpus": place.gpus}


def judge_sanitized(measured: Measured) -> Verdict:
    return all_of(
        check(measured["races"] == 0, f"{measured['races']} possible data races between streams"),
        check(measured["steps"] == 60, f"{measured['steps']} of 60 steps", "60 steps, no data race"),
    )


def _graphs_out_of_memory(place: Place) -> Measured:
    """Run out of memory with CUDA graphs, which allow no smaller micro-batch; simulated on a CPU."""
    from launch_train.common.decisions import Choice
    from launch_train.common.errors import OutOfMemoryError
    from launch_train.trainer import build

    real = build.prepare  # type: ignore[attr-defined]  # the name by which build calls it

    def prepare(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        return found._replace(choices=(*found.choices, Choice("cuda graphs", "true", "pretended")))

    pretended = nullcontext() if place.gpus else replaced(build, prepare=prepare)
    graphs = {"compile": True, "cuda_graphs": True} if place.gpus else {}
    try:
        with pretended, (_filled if place.gpus else _pretended)(place):
            trained(place, "full", steps=8, **graphs)
    except OutOfMemoryError as error:
        return {"error": str(error), "half": config(place)["micro_batch_size"] // 2}
    return {"error": "", "half": config(place)["micro_batch_size"] // 2}


def judge_graphs_out_of_memory(measured: Measured) -> Verdict:
    wanted = f"run.config.micro_batch_size: {measured['half']}"
    return check(wanted in measured["error"], f"ended with {measured['error']!r}", f"ended with: set {wanted}")


def judge_out_of_memory(measured: Measured) -> Verdict:
    micro, count = measured["micro"], measured["steps"]
    return all_of(
        check(measured["out_of_memory"] == [FULL_AT], f"out of memory in the steps {measured['out_of_memory']}"),
        check(len(micro) == count, f"{len(micro)} of {count} steps"),
        check(not any(micro[: FULL_AT - 1]) and all(micro[FULL_AT - 1 :]), f"micro-batches: {micro}"),
        _same(measured, 0.03),
        Verdict(True, f"out of memory in step {FULL_AT}; all {count} steps done, micro-batch then {micro[-1:]}"),
    )


TASKS: Final = (
    Task(1, "fp32", "a run in fp32, twice", partial(_numbers, kind="fp32"), judge_numbers, on_cpu=""),
    Task(1, "bf16", "bf16 beside fp32", partial(_numbers, kind="bf16"), judge_numbers, on_cpu=""),
    Task(1, "tf32", "TF32 beside fp32", partial(_numbers, kind="tf32"), judge_numbers),
    Task(1, "fp16", "fp16 with GradScaler, from a scale that overflows", _fp16, judge_fp16),
    *(
        Task(
            *(1, f"attention {name}", f"attention by {name} beside another kernel", partial(_attention, kernel=name)),
            *(judge_attention,),
            on_cpu="" if name in ("flash", "math") else None,
        )
        for name in ("flash", "efficient", "cudnn", "math")
    ),
    *(
        Task(
            *(1, f"activation checkpointing {kind}", "memory and losses with and without"),
            *(partial(_activations, kind=kind), judge_activations),
            on_cpu="bytes that autograd keeps",
        )
        for kind in ("selective", "full")
    ),
    Task(1, "fsdp on one GPU", "fully_shard on one rank beside none", _fsdp, judge_fsdp, on_cpu="gloo"),
    Task(1, "memory probe", "the probe's prediction beside the peak of training", _probe, judge_probe, seconds=15),
    Task(
        1, "out of memory", "provoked in step 4, and survived", _out_of_memory, judge_out_of_memory, on_cpu="pretended"
    ),
    *(
        Task(
            *(1, f"compile {mode}", "torch.compile beside eager", partial(_compiled, mode=mode), judge_compiled),
            seconds=40,
            limit=240,
            on_cpu="backend aot_eager",
        )
        for mode in ("regional", "whole")
    ),
    Task(
        *(1, "cuda sanitizer", "TORCH_CUDA_SANITIZER: no data race between streams", _sanitized, judge_sanitized),
        seconds=60,
        limit=240,
        on_cpu="without the sanitizer",
    ),
    Task(
        *(1, "cuda graphs out of memory", "ends with the micro-batch to set"),
        *(_graphs_out_of_memory, judge_graphs_out_of_memory),
        seconds=40,
        limit=240,
        on_cpu="pretended",
    ),
    Task(
        *(1, "cuda graphs with evaluations", "evaluations between graphed steps, beside eager"),
        partial(_compiled, mode="whole", cuda_graphs=True, eval={"every": 10, "batches": 2}),
        judge_graphs,
        seconds=50,
        limit=240,
    ),
    Task(
        *(
            1,
            "cuda graphs",
            "CUDA graphs beside eager",
            partial(_compiled, mode="whole", cuda_graphs=True),
            judge_graphs,
        ),
        seconds=45,
        limit=240,
    ),
)
