"""Does a run fit its GPUs, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from launch_train.common.config import Checkpointing, Config
from launcher.catalog import Catalog, MachineType
from launcher.errors import PlanRefused
from launcher.plan.memory.need import Need, Setup, largest_micro_batch, memory_setup, need
from launcher.plan.memory.sizes import ModelSizes, sizes_of
from launcher.plan.model import Chosen, Context
from launcher.plan.placement import SERVICE
from launcher.spec.checks import config_of
from launcher.spec.models import JobSpec
from launcher.text import either, size_text

CHECKPOINTING = "run.config.activation_checkpointing"
PARALLEL = "run.config.parallel"


class Fit(Struct, frozen=True):
    """A model on a GPU. `need` is at the micro-batch of the spec, else at the largest that fits, else at 1; `fits`
    says whether it is within the memory."""

    model: ModelSizes
    setup: Setup
    need: Need
    fits: bool

    @property
    def cannot(self) -> bool:
        """Return whether not even one sample fits, whatever the error of the formulas."""
        return need(self.model, self.setup, 1).sure > self.setup.available_at_most


def fit_of(spec: JobSpec, chosen: Chosen) -> Fit | None:
    """Return how the built-in trainer's model fits; None if it runs another program, or the model is unknown."""
    if not spec.run.is_builtin or chosen.gpus < 1:
        return None
    config = config_of(spec.run)
    model = sizes_of(config)
    return fit(model, setup_on(spec, config, chosen)) if model else None


def fit(model: ModelSizes, setup: Setup) -> Fit:
    size = setup.micro_batch or largest_micro_batch(model, setup)
    needed = need(model, setup, size or 1)
    return Fit(model, setup, needed, needed.total <= setup.available)


def setup_on(spec: JobSpec, config: Config, chosen: Chosen) -> Setup:
    """Return the setup on a spec's machine."""
    return memory_setup(
        config,
        chosen.gpu,
        world=chosen.gpus * spec.machine.nodes,
        memory_gb=gpu_memory_gb(chosen),
        limit_gb=spec.machine.gpu_memory_gb,
    )


def gpu_memory_gb(chosen: Chosen) -> float:
    """Return the memory of a GPU as sold, or of a fractional machine's part of it."""
    share = chosen.machine.share if chosen.machine else None  # 1/8
    return chosen.gpu.memory_gb / int(share.rpartition("/")[2]) if share else float(chosen.gpu.memory_gb)


# --- The refusal ------------------------------------------------------------------------------------------------------


def check_memory(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """Check that one sample fits into the GPU's memory. Unknown models pass.

    Raises PlanRefused, with the smallest change that makes it fit.
    """
    fit = fit_of(spec, chosen) if context.target != "local" else None
    if fit is None or not fit.cannot:
        return
    least = need(fit.model, fit.setup, 1)
    parts = ", ".join(
        f"{part.name} {size_text(part.size)}" for part in sorted(least.parts, key=lambda part: -part.size)[:3]
    )
    changes = [*fixes(spec, catalog, context, chosen, fit.model)]  # smallest first
    raise PlanRefused(
        f"run.config.model: {fit.model.name} needs {size_text(least.total)} per GPU for one sample ({parts}); "
        f"{chosen.gpu.title} has {gpu_memory_gb(chosen):g} GB",
        f"Use {either(changes[:3])}." if changes else "No machine in the catalog can train it: use a smaller model.",
        field="run.config.model",
    )


def fixes(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, model: ModelSizes) -> Iterator[str]:
    """Yield the flags that make a model fit: first on this machine, then the smallest GPU that holds it, then more
    GPUs."""
    config = config_of(spec.run)
    setup = setup_on(spec, config, chosen)
    here = next((flags for flags, changed in variants(setup) if fits(model, changed)), None)
    if here is not None:
        yield here
    machines = offered(catalog, context)
    for machine in machines:
        other = Chosen(machine=machine, gpu=catalog.gpu(machine.gpu), gpus=machine.gpus)
        is_bigger = machine.share is None and other.gpu.memory_gb > gpu_memory_gb(chosen)
        if other.gpus == chosen.gpus and is_bigger and fits(model, setup_on(spec, config, other)):
            yield f"--type {machine.gpu}"
            break
    for machine in sorted(machines, key=lambda machine: machine.gpus):
        other = Chosen(machine=machine, gpu=chosen.gpu, gpus=machine.gpus)
        has_more = machine.gpu == chosen.gpu.name and machine.gpus > chosen.gpus
        if has_more and fits(model, replace(setup_on(spec, config, other), sharded=True)):
            yield f"--gpus {machine.gpus} --set {PARALLEL}=fsdp"
            break


def variants(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield changes of a setup that need less memory on the same machine, those that cost least speed first."""
    cheaper: dict[Checkpointing, tuple[Checkpointing, ...]]
    cheaper = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
    modes = cheaper[setup.checkpointing]
    for mode in modes:
        yield f"--set {CHECKPOINTING}={mode}", replace(setup, checkpointing=mode)
    if setup.world > 1 and not setup.sharded:
        sharded = replace(setup, sharded=True)
        yield f"--set {PARALLEL}=fsdp", sharded
        for mode in modes:
            changed = replace(sharded, checkpointing=mode)
            yield f"--set {PARALLEL}=fsdp --set {CHECKPOINTING}={mode}", changed


def fits(model: ModelSizes, setup: Setup) -> bool:
    return need(model, setup, 1).total <= setup.available


def offered(catalog: Catalog, context: Context) -> list[MachineType]:
    """Return the machines that a GPU's name selects on this service, by the memory of a GPU, then of all."""
    service = SERVICE[context.target]
    usable = [
        machine
        for machine in catalog.shapes
        if machine.default and machine.provisioning_default(service) and (service == "compute" or machine.on_vertex)
    ]
    return sorted(usable, key=lambda machine: (catalog.gpu(machine.gpu).memory_gb, machine.gpus, machine.name))


# --- For a page -------------------------------------------------------------------------------------------------------


def memory_line(spec: JobSpec, chosen: Chosen, *, brief: bool = False) -> str:
    """Return the memory that a run needs of what its GPU has, with the largest part if it may not fit, or unless
    `brief`."""
    fit = fit_of(spec, chosen)
    if fit is None:
        if not spec.run.is_builtin:
            return "unknown: the program is not the built-in trainer"
        return "unknown: no formula for this model (launch estimate may measure it)"
    part, size = fit.need.largest, fit.need.micro_batch
    largest = "" if brief and fit.fits else f"; largest: {part.name}, {size_text(part.size)}"
    memory = f"{size_text(fit.need.total)} of {gpu_memory_gb(chosen):g} GB per GPU"
    text = f"about {memory}, micro-batch {size}{largest}"
    if fit.fits:
        return text
    smaller = fit.setup.micro_batch and largest_micro_batch(fit.model, fit.setup)
    return f"{text}. May not fit" + (f"; {smaller} does" if smaller else "")
