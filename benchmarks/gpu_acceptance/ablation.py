"""Part 3: look for speed-ups of GPT-2, in a plain loop with one change at a time, then the best ones together.

It includes changes for which the trainer has no setting: a chunked loss, a residual stream in bf16, and an optimizer
that is not fused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Final

from benchmarks import jobs
from benchmarks.gpu_acceptance.sizes import flops_per_token, peak, sizes
from benchmarks.gpu_acceptance.small import all_of, check
from benchmarks.gpu_acceptance.tasks import Measured, Place, SkipRow, Task, Verdict
from launch_train.common.config import Attention


@dataclass(frozen=True)
class Variant:
    """A way to train; the default is the trainer's."""

    attention: Attention = "auto"
    compile: str = "regional"
    loss: str = "whole"
    """whole: all logits at once; chunked: some rows at a time, computed again in the backward pass."""
    optimizer: str = "fused"
    residual: str = "fp32"
    micro_batch: int = 16

    @property
    def name(self) -> str:
        """Return what differs from the default."""
        changed = [
            f"{one.name} {getattr(self, one.name)}" for one in fields(self) if getattr(self, one.name) != one.default
        ]
        return ", ".join(changed) or "default"


GLOBAL: Final = 64
"""Sequences per step, whatever the micro-batch (see `batch_of`), so that losses are comparable."""

FACTORS: Final[dict[str, tuple[Any, ...]]] = {
    "attention": ("flash", "cudnn", "efficient", "math"),
    "compile": ("whole", "autotune", "off", "graphs"),
    "loss": ("chunked",),
    "micro_batch": (32, 64, 8),
    "residual": ("bf16",),
    "optimizer": ("foreach", "single"),
}
"""Values to try for each factor, the most informative first."""

BLOCK: Final = 10
"""Steps that are timed together."""


def variants() -> list[Variant]:
    """Return the default, and variants with one change each."""
    return [
        Variant(),
        *(replace(Variant(), **{factor: value}) for factor, values in FACTORS.items() for value in values),
    ]


def _tried(place: Place, variant: Variant) -> Measured:
    """Train 50 steps; the reference is the default's loss if it was measured before."""
    if not place.gpus and (variant.attention in ("efficient", "cudnn") or variant.compile in ("graphs", "autotune")):
        raise SkipRow("needs a GPU")
    from launch_train.performance import micro_batch as memory

    try:
        with memory.unify_out_of_memory():
            found = train(place, variant, batch_of(variant))
            reference = _reference(place, variant, found)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        if "out of memory" not in str(error):
            raise
        return {"fits": False, "said": str(error), "variant": asdict(variant)}
    compared = {"reference": None, "beside": None}
    if reference:
        compared = {"reference": reference["loss"], "beside": found["per_s"] / reference["per_s"]}
    return {**found, "variant": asdict(variant), **compared}


def batch_of(variant: Variant) -> int:
    """Return the number of sequences per step.

    With CUDA graphs a step has one pass: a second one overwrites the gradients of the first
    (https://github.com/pytorch/pytorch/issues/169545).
    """
    return variant.micro_batch if variant.compile == "graphs" else GLOBAL


def _reference(place: Place, variant: Variant, found: Measured) -> Measured | None:
    """Return the default's result with the same batch; None if it was not measured."""
    if variant == Variant():
        return found
    if batch_of(variant) != GLOBAL:
        return train(place, Variant(micro_batch=variant.micro_batch), batch_of(variant))
    known = place.known.get("ablation default", {})
    return known if "per_s" in known else None


def _together(place: Place) -> Measured:
    """Train with the best value of each factor: more than 1 % faster than the default, and learning the same."""
    rows = [row for name, row in place.known.items() if name.startswith("ablation ") and "per_s" in row]
    return _tried(place, best_of(rows))


def best_of(rows: Sequence[Measured]) -> Variant:
    """Return the fastest value of each factor among those that learn as the default does."""
    found: dict[str, Any] = {}
    for factor in FACTORS:
        usual = getattr(Variant(), factor)
        alone = [row for row in rows if _only(row["variant"], factor) and _learns(row)]
        good = [row for row in alone if row["beside"] and row["beside"] > 1.01]
        if good:
            found[factor] = max(good, key=lambda row: row["beside"])["variant"][factor]
        else:
            found[factor] = usual
    return Variant(**found)


def _only(variant: Mapping[str, Any], factor: str) -> bool:
    """Return whether this is the only factor that differs from the default."""
    return [name for name, value in asdict(Variant()).items() if variant[name] != value] == [factor]


SAME: Final = 0.02
"""Largest relative difference from the default's loss after 50 steps; bf16's rounding causes some thousandths."""


def _learns(measured: Measured) -> bool:
    reference = measured["reference"]
    return reference is None or bool(abs(measured["loss"] - reference) <= SAME * reference)


def judge(measured: Measured) -> Verdict:
    if measured.get("fits") is False:
        return Verdict(True, f"does not fit: {measured['said'][:80]}")
    rate, beside, loss = measured["per_s"], measured["beside"], measured["loss"]
    mfu = f", MFU {100 * measured['mfu']:.1f} %" if measured["mfu"] else ""
    ms, least, most = measured["ms"]
    times, default = "–" if beside is None else f"{beside:.3f}", _shown(measured["reference"])
    speed = f"{rate:,.0f} tokens/s ({times} ×){mfu}, {ms:.1f} ms ({least:.1f} to {most:.1f})"
    return all_of(
        check(0 < rate < float("inf"), "no speed"),
        check(measured["steps"] >= 5, f"only {measured['steps']} steps"),
        check(_learns(measured), f"loss {loss:.3f}, {default} by default"),
        check(loss < 0.98 * measured["first"], f"the loss did not fall: {measured['first']:.3f} to {loss:.3f}"),
        Verdict(True, f"{speed}, {measured['memory_gb']:.1f} GB; loss {loss:.4f} (default: {default})"),
    )


def _shown(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


# --- The loop ---------------------------------------------------------------------------------------------------------


def train(place: Place, variant: Variant, batch: int) -> dict[str, Any]:
    """Train with `batch` sequences per step. Return tokens/s, the loss after all steps, and the peak memory."""
    import torch

    from benchmarks import plain_loop
    from benchmarks.loops import job as as_job
    from launch_train.performance import attention

    of = sizes(tiny=place.tiny)
    steps, batch = (10, 8) if place.tiny else (50, batch)
    micro = min(variant.micro_batch, 4) if place.tiny else variant.micro_batch
    with jobs.text() as text:
        told = {
            "text": str(text),
            "shape": dict(of.gpt),
            "steps": steps,
            "batch_size": batch,
            "warmup_steps": steps // 5,
        }
        job = as_job({**told, "lr": 1e-3 if place.tiny else 6e-4, "min_lr": 1e-4})
        device = place.device
        torch.set_float32_matmul_precision("high")
        model = plain_loop.build(job).to(device)
        optimizer = _optimizer(model, job, variant)
        forward = _compiled(model, _forward(model, variant), variant, gpu=place.gpus > 0)
        tokens = plain_loop.training_part(job)
        losses, times = list[Any](), [time.perf_counter()]
        with attention.use_kernel(variant.attention, device.type):  # also separates the compile cache
            for step in range(1, steps + 1):
                for group in optimizer.param_groups:
                    group["lr"] = plain_loop.rate(step, job)
                x, y = plain_loop.batch(tokens, step, job, 0, 1)
                losses.append(_gradients(forward, x, y, micro, device))
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if step % (2 if place.tiny else BLOCK) == 0:
                    _wait(place)
                    times.append(time.perf_counter())
        values = [float(loss) for loss in losses]
    per_step = sorted((b - a) / (2 if place.tiny else BLOCK) for a, b in pairwise(times[1:]))
    rate = batch * of.gpt["block_size"] / median(per_step)
    top = peak(torch.cuda.get_device_name(device)) if place.gpus else None
    return {
        "steps": len(values),
        "first": values[0],
        "loss": sum(values[-3:]) / 3,
        "per_s": rate,
        "ms": [1e3 * one for one in (median(per_step), per_step[0], per_step[-1])],
        "mfu": rate * flops_per_token(of.gpt) / top if top else None,
        "memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if place.gpus else 0.0,
        "first_block_s": times[1] - times[0],
    }


def _wait(place: Place) -> None:
    import torch

    if place.gpus:
        torch.cuda.synchronize()


def _gradients(forward: Callable[..., Any], x: Any, y: Any, micro: int, device: Any) -> Any:
    """Accumulate the gradients of all micro-batches. Return the mean loss, on the device."""
    import torch

    parts = len(x) // micro
    total = torch.zeros((), device=device)
    for number in range(parts):
        rows = slice(number * micro, (number + 1) * micro)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(_there(x[rows], device), _there(y[rows], device)) / parts
        loss.backward()
        total += loss.detach()
    return total


def _there(tokens: Any, device: Any) -> Any:
    from benchmarks.plain_loop import there

    return there(tokens, device)


def _optimizer(model: Any, job: Any, variant: Variant) -> Any:
    import torch

    from benchmarks.plain_loop import adamw

    built = adamw(model, job)
    how = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False, "fused": False}}
    return torch.optim.AdamW(_bare(built.param_groups), lr=job.lr, betas=(0.9, 0.95), **how[variant.optimizer])


def _bare(groups: Any) -> list[dict[str, Any]]:
    return [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]


def _forward(model: Any, variant: Variant) -> Callable[[Any, Any], Any]:
    """Return the trainer's GPT as a function, with the variant's residual stream and loss."""
    import torch

    loss = partial(_chunked, model) if variant.loss == "chunked" else partial(_whole, model)

    def forward(tokens: Any, targets: Any) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = model.tokens(tokens) + model.positions(positions)
        x = x.bfloat16() if variant.residual == "bf16" else x
        for block in model.blocks:
            x = block(x)
        return loss(model.norm(x), targets)

    return forward


def _whole(model: Any, x: Any, targets: Any) -> Any:
    return model.loss(model.head(x), targets)


CHUNKS: Final = 8


def _chunked(model: Any, x: Any, targets: Any) -> Any:
    """Return the loss in chunks of logits, recomputed in the backward pass: the full logits never exist."""
    from torch.utils.checkpoint import checkpoint

    rows, wanted = x.flatten(0, 1).chunk(CHUNKS), targets.flatten().chunk(CHUNKS)
    parts = [
        checkpoint(_summed, model.head.weight, row, one, use_reentrant=False)
        for row, one in zip(rows, wanted, strict=True)
    ]
    return sum(parts) / targets.numel()


def _summed(weight: Any, rows: Any, targets: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(rows, weight).float(), targets, reduction="sum")


def _compiled(model: Any, forward: Callable[..., Any], variant: Variant, *, gpu: bool) -> Callable[..., Any]:
    """Compile blocks and loss, the whole model, or nothing. On a CPU, skip the compiler's last stage."""
    import torch
    import torch._dynamo

    torch._dynamo.reset()  # one row may train twice
    backend: Any = "inductor" if gpu else "aot_eager"
    torch._dynamo.config.recompile_limit = 64  # each block may be compiled separately
    if variant.compile == "regional":
        for block in (*model.blocks, model.loss):
            block.compile(backend=backend)
    modes = {"whole": None, "graphs": "reduce-overhead", "autotune": "max-autotune-no-cudagraphs"}
    if variant.compile in modes:
        return torch.compile(forward, backend=backend, mode=modes[variant.compile])
    return forward


def _seconds(variant: Variant) -> float:
    return (
        200
        if variant.compile == "autotune"
        else 60
        if variant.compile in ("whole", "graphs")
        else 45
        if variant.attention == "math"
        else 30
    )


def _task(variant: Variant) -> Task:
    about = f"GPT-2 124M, {batch_of(variant)} × 1024 tokens a step, bf16, 50 steps"
    work, before = partial(_tried, variant=variant), () if variant == Variant() else ("3 ablation default",)
    return Task(
        *(3, f"ablation {variant.name}", about, work, judge, _seconds(variant), 360),
        on_cpu="tiny",
        alone=True,
        needs=before,
    )


_ALONE: Final = tuple(map(_task, variants()))

TASKS: Final = (
    *_ALONE,
    Task(
        *(3, "ablation the best together", "the fastest of each that learns the same", _together, judge, 60, 300),
        on_cpu="tiny",
        alone=True,
        needs=tuple(task.key for task in _ALONE),
    ),
)
