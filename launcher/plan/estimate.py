"""What a training run needs, how fast it is and what it costs, before anything is created. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from launch_train.common.config import Config, parse
from launcher.catalog import UNKNOWN, Catalog, Gpu, MachineType
from launcher.errors import PlanRefused
from launcher.plan.memory.fit import Fit, fit, fit_of, fits, gpu_memory_gb, offered, setup_on, variants
from launcher.plan.memory.need import Setup, largest_micro_batch
from launcher.plan.memory.sizes import ModelSizes, sizes_of
from launcher.plan.model import Chosen, Context, Frozen, Gpus
from launcher.plan.placement import RESTART_HOURS, SERVICE, choose, chosen_regions, figures
from launcher.spec.checks import config_of
from launcher.spec.models import JobSpec

MFU = {"tokens": 0.4, "images": 0.2}
"""Assumed share of the GPU's peak. Transformers reach 29 to 60 % (docs/estimate.md), ResNet-50 19 % of an A100's."""
SMALLEST = 20e6
"""Parameters below which no share of the peak is assumed: the GPU waits for the CPU."""
SMALL = ("nanogpt-char", "a100-40gb", 6, 16_384, 71.0e6)
"""A measured small model (throughput.csv): its GPU, blocks, tokens a step and FLOPs a token (6 x 10.65 M parameters and
attention). A step of another small model takes no longer; with more FLOPs or blocks, in proportion."""
START_HOURS = 1 / 6
"""Assumed time from the machine to the first step: boot, image, imports. Not measured on Google Cloud yet."""
RECOMPUTES = 4 / 3
"""FLOPs of activation_checkpointing: full, which computes the forward pass twice."""


class MemoryPart(Frozen, frozen=True, kw_only=True):
    """A part of a GPU's memory, in bytes."""

    name: str
    bytes: int
    what: str


class Choice(Frozen, frozen=True, kw_only=True):
    """A way to train on the spec's machine: the flags, and the largest micro-batch that fits (None: none does), which
    the GPU's share of batch_size may limit instead of its memory."""

    flags: str
    micro_batch: int | None
    limited_by: Literal["memory", "batch_size"]


class Smallest(Frozen, frozen=True, kw_only=True):
    """The machine with the least GPU memory that holds the model, and the flags that it needs besides."""

    machine_type: str
    gpu: str
    gpus: int
    flags: str


class Speed(Frozen, frozen=True, kw_only=True):
    """Units (tokens, images, samples) per second on all GPUs. `basis`: how that is known."""

    per_second: float
    unit: str
    basis: str


class Offer(Frozen, frozen=True, kw_only=True):
    """A run by provisioning model, in the cheapest of the spec's regions. None: unknown.

    `interruptions` are expected in the run; `lost_hours` is what they cost, which `hours` and `usd` include.
    """

    provisioning: str
    region: str
    usd_per_hour: float | None
    interruptions: float | None
    lost_hours: float | None
    hours: float | None
    usd: float | None


class Estimate(Frozen, frozen=True, kw_only=True):
    """All that `launch estimate` says of a spec. `note`: why the rest is missing."""

    name: str
    machine: Gpus
    gpu_memory_gb: float
    parameters: int | None = None
    model: str = ""
    parts: tuple[MemoryPart, ...] = ()
    bytes: int | None = None
    micro_batch: int | None = None
    fits: bool | None = None
    compiles: bool | None = None
    """The trainer compiles the model there, which needs less memory than the parts say."""
    choices: tuple[Choice, ...] = ()
    smallest: Smallest | None = None
    steps: int | None = None
    batch_size: int | None = None
    sample_units: int | None = None
    """Units of `speed` in one sample, such as its tokens."""
    speed: Speed | None = None
    offers: tuple[Offer, ...] = ()
    note: str = ""


def estimate(
    spec: JobSpec, catalog: Catalog, context: Context, measured: ModelSizes | None = None, note: str = ""
) -> Estimate:
    """Return the estimate of a spec with one machine type. `measured`: the sizes of a model without a formula; `note`:
    why there are none.

    Raises PlanRefused: the machine does not exist, or is not offered.
    """
    (chosen,) = choose(spec, catalog, context.target)
    plain = Estimate(
        name=spec.name, machine=figures(chosen, spec.machine.nodes), gpu_memory_gb=gpu_memory_gb(chosen), note=note
    )
    if not spec.run.is_builtin:
        return plain
    config = config_of(spec.run)
    model = measured or sizes_of(config)
    if model is None:
        return plain
    setup = setup_on(spec, config, chosen)
    memory = fit(model, setup)
    speed = speed_of(model, config, setup, chosen.gpu, catalog) if memory.fits else None
    hours = training_hours(config, model, speed) if speed else None
    machine = chosen.machine
    kinds = spec.provisioning or (machine.provisioning(SERVICE[context.target]) if machine else ())
    return replace(
        plain,
        parameters=model.parameters,
        model=model.name,
        parts=tuple(MemoryPart(name=part.name, bytes=part.size, what=part.what) for part in memory.need.parts),
        bytes=memory.need.total,
        micro_batch=memory.need.micro_batch,
        fits=memory.fits,
        compiles=setup.compiles,
        choices=choices(memory),
        smallest=smallest(spec, config, catalog, context, model),
        steps=config.steps,
        batch_size=config.batch_size,
        sample_units=model.units,
        speed=speed,
        offers=tuple(offer(spec, catalog, context, machine, kind, hours) for kind in kinds) if machine else (),
    )


def choices(memory: Fit) -> tuple[Choice, ...]:
    """Return the ways to train on this machine: as in the spec, then with less memory."""
    automatic = replace(memory.setup, micro_batch=None)
    ways = [("", automatic), *variants(automatic)]
    sizes = [(flags, largest_micro_batch(memory.model, setup)) for flags, setup in ways]
    return tuple(
        Choice(flags=flags, micro_batch=size, limited_by="batch_size" if size == automatic.share else "memory")
        for flags, size in sizes
    )


def smallest(spec: JobSpec, config: Config, catalog: Catalog, context: Context, model: ModelSizes) -> Smallest | None:
    """Return the machine with the least GPU memory that holds one sample on each GPU, or None: no machine does."""
    by_memory = sorted(
        offered(catalog, context),
        key=lambda shape: (catalog.gpu(shape.gpu).memory_gb * shape.gpus, shape.gpus, shape.name),
    )
    for machine in by_memory:
        gpu = catalog.gpu(machine.gpu)
        setup = setup_on(spec, config, Chosen(machine=machine, gpu=gpu, gpus=machine.gpus))
        ways = [("", setup), *variants(setup)]
        if (flags := next((flags for flags, changed in ways if fits(model, changed)), None)) is not None:
            return Smallest(machine_type=machine.name, gpu=gpu.title, gpus=machine.gpus, flags=flags)
    return None


# --- Time and money ---------------------------------------------------------------------------------------------------


TrainingTime = tuple[float | None, str]
"""Hours of training without start and interruptions, and how that is known; None and why it is not."""


def training_time(spec: JobSpec, chosen: Chosen, catalog: Catalog) -> TrainingTime:
    if not spec.run.is_builtin:
        return None, "the program is not the built-in trainer"
    memory = fit_of(spec, chosen)
    if memory is None:
        return None, "no formula for this model"
    config = config_of(spec.run)
    speed = speed_of(memory.model, config, memory.setup, chosen.gpu, catalog) if memory.fits else None
    if speed is None:
        return None, no_speed(memory.model.parameters, fits=memory.fits)
    return training_hours(config, memory.model, speed), speed.basis


def relative_hours(spec: JobSpec, machines: Sequence[Chosen], times: Mapping[str, TrainingTime]) -> dict[str, float]:
    """Return the hours of the run on each machine type: by the estimate or, where that is unknown, figures in
    proportion to them, by the GPUs' peaks. Empty: nothing is known."""
    hours = {name: START_HOURS + training for name, (training, _) in times.items() if training is not None}
    config = config_of(spec.run)
    peaks = {chosen.name: chosen.gpu.peak_tflops.get(precision(config, chosen.gpu)) for chosen in machines}
    by_peak = {name: 1 / peak for name, peak in peaks.items() if peak}
    return next((known for known in (hours, by_peak) if len(known) == len(machines)), {})


def no_speed(parameters: int | None, *, fits: bool | None) -> str:
    """Return why the speed of a model with a formula is unknown."""
    if not fits:
        return "the model does not fit"
    if (parameters or SMALLEST) < SMALLEST:
        return f"a model of fewer than {SMALLEST / 1e6:.0f} M parameters does not keep a GPU busy"
    return "this GPU's peak is not in the catalog"


def training_hours(config: Config, model: ModelSizes, speed: Speed) -> float:
    """Return the hours of the config's steps at a speed."""
    return config.steps * config.batch_size * model.units / speed.per_second / 3600


def billed_time(catalog: Catalog, kind: str, training: float, nodes: int) -> float:
    """Return the expected billed hours: start, training, and what interruptions take."""
    return START_HOURS + training + (expected_interruptions(catalog, kind, training, nodes) or 0.0) * RESTART_HOURS


def expected_interruptions(catalog: Catalog, kind: str, hours: float, nodes: int) -> float | None:
    """Return the interruptions expected in `hours` of a run with a provisioning model; None: no rate is known."""
    rate = catalog.interruptions(kind)
    return hours * nodes / rate.hours if rate else None


def speed_of(model: ModelSizes, config: Config, setup: Setup, gpu: Gpu, catalog: Catalog) -> Speed | None:
    """Return the speed on all GPUs: as somebody measured it, or by the assumed share of the peak; None if that is
    unknown. Communication between the GPUs is not included."""
    measured = catalog.throughput(model.name, gpu.name)
    alike = setup.half and setup.checkpointing == "none" and config.compile is not False
    if measured and alike and model == sizes_of(parse({"model": model.name})):
        basis = f"measured elsewhere: {measured.rule}"
        return Speed(per_second=measured.per_second * setup.world, unit=measured.unit, basis=basis)
    kind = precision(config, gpu)
    peak, share = gpu.peak_tflops.get(kind), MFU.get(model.unit, MFU["tokens"])
    if not peak or not model.flops:
        return None
    if model.parameters < SMALLEST:
        return small_speed(model, config, setup, peak, catalog)
    flops = model.flops * (RECOMPUTES if setup.checkpointing == "full" else 1)
    per_second = share * peak * 1e12 / flops * model.units * setup.world
    return Speed(
        per_second=per_second, unit=model.unit, basis=f"assumed {100 * share:.0f} % MFU of {peak:g} TFLOP/s ({kind})"
    )


def small_speed(model: ModelSizes, config: Config, setup: Setup, peak: float, catalog: Catalog) -> Speed | None:
    """Return the least speed of a model too small to keep a GPU busy, by the time of a measured model's step. `peak`:
    TFLOP/s at the run's precision. None: the measurement says nothing about it."""
    name, reference, blocks, tokens, flops = SMALL
    measured, reference_peak = catalog.throughput(name, reference), catalog.gpu(reference).peak_tflops["bf16"]
    if measured is None or reference_peak is None or model.unit != measured.unit or config.compile is False:
        return None
    work = model.flops * config.batch_size / setup.world / (flops * tokens)
    work *= RECOMPUTES if setup.checkpointing == "full" else 1
    seconds = tokens / measured.per_second * max(1.0, work, model.full.repeats / blocks)
    seconds *= max(1.0, reference_peak / peak)
    basis = f"at most {1000 * seconds:.0f} ms a step ({measured.rule})"
    return Speed(per_second=config.batch_size * model.units / seconds, unit=model.unit, basis=basis)


def precision(config: Config, gpu: Gpu) -> str:
    """Return the precision that the trainer would choose (launch_train.performance.precision)."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if gpu.sm >= 8 else "fp16" if gpu.sm >= 7 else "fp32"


def offer(
    spec: JobSpec, catalog: Catalog, context: Context, machine: MachineType, kind: str, work: float | None
) -> Offer:
    """Return the run's time and cost with one provisioning model. `work`: hours of training; None: unknown. Where the
    regions are unknown, so is the price."""
    try:
        regions = chosen_regions(spec, context, catalog, machine, kind)
    except PlanRefused:
        regions = ()
    prices = [(catalog.price(machine, SERVICE[context.target], kind, region).usd, region) for region in regions]
    known = [(usd, region) for usd, region in prices if usd is not None]
    usd, region = min(known) if known else (spec.limits.price, regions[0] if regions else UNKNOWN)
    nodes = spec.machine.nodes
    expected = None if work is None else expected_interruptions(catalog, kind, work, nodes)
    lost = None if expected is None else expected * RESTART_HOURS
    hours = None if work is None else work + (lost or 0)
    return Offer(
        provisioning=kind,
        region=region,
        usd_per_hour=usd,
        interruptions=expected,
        lost_hours=lost,
        hours=hours,
        usd=None if hours is None or usd is None else hours * usd * nodes,
    )
