"""Choose the machine of a run and its placements: regions, zones and provisioning models, in fallback order, and how
long each attempt waits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from launcher.catalog import Catalog, MachineType, Service, region_of
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Context, Gpus, Placement, Target
from launcher.spec.models import JobSpec, Limits
from launcher.text import did_you_mean, hourly_price, listed, near, parse_duration

SERVICE: dict[Target, Service] = {"vertex": "vertex", "vm": "compute", "local": "vertex", "on": "vertex"}
RESTART_HOURS = 0.25
"""Assumed loss of an interruption: a new machine, the image, and the work since the newest checkpoint."""
NAMED = 6
"""Number of candidates that an error message lists."""


def provisioning(spec: JobSpec, machine: MachineType, target: Target) -> tuple[str, ...]:
    """Return the provisioning models, in fallback order.

    Raises PlanRefused: the service does not offer the machine with one of the models.
    """
    allowed, default = machine.provisioning(SERVICE[target]), machine.provisioning_default(SERVICE[target])
    if spec.vertex.persistent_resource and target == "vertex":
        return ("standard",)
    for index, model in enumerate(spec.provisioning or ()):
        if model.partition(":")[0] not in allowed:
            raise PlanRefused(
                f"{machine.name} is not available as {model} on {'Compute Engine' if target == 'vm' else 'Vertex AI'}",
                f"Use {' or '.join(allowed)}." if allowed else "Use another machine: --type l4",
                field=f"provisioning.{index}",
            )
    if not spec.provisioning and not default:
        raise PlanRefused(
            f"{machine.name} is available only with a reservation",
            "Set it: --provisioning reservation:projects/PROJECT/zones/ZONE/reservations/NAME",
            field="machine.type",
        )
    if spec.provisioning:
        return spec.provisioning
    # Flex-start needs the same machine type in all worker pools, and reduction servers have another (Vertex AI,
    # flex-start VMs). On Compute Engine it is for single VMs: bulkInsert has no requestValidForDuration.
    without_flex_start = spec.machine.nodes > 1 if target == "vm" else spec.vertex.reduction_server
    return tuple(model for model in default if model != "flex-start" or not without_flex_start)


def fallback_order(
    spec: JobSpec, catalog: Catalog, target: Target, placements: Sequence[Placement], hours: Mapping[str, float]
) -> tuple[Placement, ...]:
    """Sort the placements of all attempts. A list of regions or provisioning models in the spec keeps its order;
    otherwise the lowest expected cost of the run's work comes first, and unknown prices last. With `regions: any`,
    zones that may lack the machine come last of all.

    `hours`: machine type -> expected hours of the work, or a figure in proportion; empty for a single type.
    """
    firsts = {(placement.chosen.name, placement.provisioning): placement for placement in reversed(placements)}
    listed_models = list(spec.provisioning or ())

    def key(placement: Placement) -> tuple[bool, int, bool, float, str]:
        place = placement if spec.regions == "any" else firsts[placement.chosen.name, placement.provisioning]
        machine, model = place.chosen.machine, place.provisioning
        if machine is None:
            raise ValueError("a placement in the cloud needs a machine type")
        is_doubtful = spec.regions == "any" and target == "vm" and bool(catalog.doubt(machine, place.name))
        rank = listed_models.index(model) if model in listed_models else 0
        is_unknown, usd, name = expected_rate(catalog, target, machine, model, place.name, spec.machine.nodes)
        return is_doubtful, rank, is_unknown, usd * hours.get(place.chosen.name, 1.0), name

    return tuple(sorted(placements, key=key))


def placements_of(spec: JobSpec, context: Context, catalog: Catalog, chosen: Chosen) -> tuple[Placement, ...]:
    """Return the placements of a machine type, by provisioning model.

    Raises PlanRefused: no region is set, or the machine is not available in one.
    """
    machine = chosen.machine
    if context.target == "local" or machine is None:
        return (Placement(chosen=chosen, provisioning="standard", region="local"),)
    placements = []
    for model in provisioning(spec, machine, context.target):
        reserved = model.split("/")[3] if model.startswith("reservation:") else ""
        regions = (region_of(reserved),) if reserved else chosen_regions(spec, context, catalog, machine, model)
        for region in regions:
            places: tuple[str | None, ...] = (None,)
            if context.target == "vm":
                places = (reserved,) if reserved else zones(spec, catalog, machine, region)
            placements += [Placement(chosen=chosen, provisioning=model, region=region, zone=zone) for zone in places]
    if not placements:
        raise PlanRefused(
            f"the zones that have {machine.name} are unknown",
            f"Set them: --zone ZONE (its regions: {listed(machine_regions(catalog, machine, context.target), NAMED)})",
            field="regions",
        )
    return tuple(placements)


def chosen_regions(
    spec: JobSpec, context: Context, catalog: Catalog, machine: MachineType, model: str
) -> tuple[str, ...]:
    """Return the spec's regions, otherwise those of its zones, otherwise gcloud's setting. Raises PlanRefused."""
    with_machine = known = machine_regions(catalog, machine, context.target)
    servers = spec.vertex.reduction_server if context.target == "vertex" else None
    if servers and servers.machine_type.startswith("n1-"):
        known = tuple(region for region in known if region in catalog.n1_regions)
    if spec.regions == "any":
        if not known:
            raise PlanRefused(
                f"regions: any cannot be used, as the regions that have {machine.name} are unknown",
                "Set them: --region us-central1",
                field="regions",
            )
        return known
    named = spec.regions or tuple(dict.fromkeys(map(region_of, spec.zones or ()))) or context.default_regions
    if not named:
        raise PlanRefused(
            "no region is set",
            f"Set --region REGION, or gcloud config set compute/region REGION. {machine.name} ({model}) is in:\n"
            + candidates(catalog, machine, model, context.target),
        )
    if len(spec.machine.types) > 1:  # a region may have some of the types
        lacking = {*catalog.training_regions} - {*known}
        named = tuple(region for region in named if region not in lacking) or named
    for region in named:
        if context.target == "vertex" and region not in catalog.training_regions:
            available = f"Available: {listed(catalog.training_regions, NAMED)}."
            hint = similar_place(region, catalog.training_regions) + available
            raise PlanRefused(f"Vertex AI training is not available in {region}", hint, field=field_of(spec, region))
        if known and region not in known:
            hint = f"{similar_place(region, known)}Available: {listed(known, NAMED)}."
            missing = servers.machine_type if servers and region in with_machine else machine.name
            raise PlanRefused(f"{missing} is not available in {region}", hint, field=field_of(spec, region))
    return named


def field_of(spec: JobSpec, region: str) -> str:
    """Return the setting that names a region, or a zone in it; empty if it comes from gcloud's settings."""
    if spec.regions:
        return f"regions.{spec.regions.index(region)}"
    zones = [region_of(zone) for zone in spec.zones or ()]
    return f"zones.{zones.index(region)}" if region in zones else ""


def similar_place(name: str, known: tuple[str, ...]) -> str:
    """`Did you mean us-central1? `, or nothing."""
    return f"{did_you_mean(close)} " if (close := near(name, known, 0.85)) else ""


def zones(spec: JobSpec, catalog: Catalog, machine: MachineType, region: str) -> tuple[str, ...]:
    """Return the zones of one region in which a VM may be created. Raises PlanRefused."""
    known = catalog.zones(machine, region)
    wanted = tuple(zone for zone in spec.zones or () if region_of(zone) == region)
    for zone in wanted:
        if known and zone not in known and not is_ai_zone(zone):
            field = f"zones.{(spec.zones or ()).index(zone)}"
            hint = f"Available in {region}: {listed(known, NAMED)}."
            raise PlanRefused(f"{machine.name} is not available in {zone}", hint, field=field)
    if not wanted and not spec.zones and not known and spec.regions != "any":
        raise PlanRefused(
            f"the zones of {region} that have {machine.name} are unknown",
            f"Set them: --zone {region}-a (gcloud compute accelerator-types list shows them)",
            field=field_of(spec, region),
        )
    return wanted or (() if spec.zones else known)


def is_ai_zone(zone: str) -> bool:
    """Return whether it is an AI zone (us-central1-ai1a). The catalog lists none; the preflight checks cover them."""
    return len(zone.rpartition("-")[2]) > 1


def machine_regions(catalog: Catalog, machine: MachineType, target: Target) -> tuple[str, ...]:
    """Return the regions that have the machine; () if unknown."""
    return catalog.regions(machine) if target == "vm" else catalog.vertex_regions(machine)


def expected_rate(
    catalog: Catalog, target: Target, machine: MachineType, model: str, place: str, nodes: int = 1
) -> tuple[bool, float, str]:
    """Return a key that sorts places by the expected cost of an hour of training: the price, and the time that
    interruptions take. Places with only an upper bound come last; equal ones by name, so that the order is
    deterministic."""
    price = catalog.price(machine, SERVICE[target], model, place)
    usd = price.ceiling if price.usd is None else price.usd
    rate = catalog.interruptions(model)
    lost = RESTART_HOURS * nodes / rate.hours if rate else 0.0
    return price.usd is None, float("inf") if usd is None else usd * (1 + lost), place


def candidates(catalog: Catalog, machine: MachineType, model: str, target: Target) -> str:
    """The cheapest regions with their prices, a line each."""
    regions = machine_regions(catalog, machine, target)
    lines = []
    for region in sorted(regions, key=partial(expected_rate, catalog, target, machine, model))[:NAMED]:
        price = catalog.price(machine, SERVICE[target], model, region)
        lines.append(f"  {region:<24}" + hourly_price(price.usd, price.ceiling, bound=price.bound))
    more = len(regions) - len(lines)
    return "\n".join(lines) + (f"\n  and {more} more" if more > 0 else "")


def choose(spec: JobSpec, catalog: Catalog, target: Target) -> tuple[Chosen, ...]:
    """Return the machine for each of the spec's types, with the same number of GPUs; a rehearsal has the first alone.

    Raises PlanRefused: the service has no such machine (`launch local` accepts any number of GPUs), or the types cannot
    be combined.
    """
    machines = tuple(machine_of_type(spec, catalog, target, name) for name in spec.machine.types)
    if target == "local" or len(machines) == 1:
        return machines[:1]
    if target == "vm":
        raise PlanRefused(
            f"machine.type: VMs take one type, and the spec lists {', '.join(spec.machine.types)}",
            f"Name one: --type {spec.machine.types[0]}; or use Vertex AI: launch vertex SPEC",
            field="machine.type",
        )
    counts = {name: chosen.gpus for name, chosen in zip(spec.machine.types, machines, strict=True)}
    if len({*counts.values()}) > 1:
        shown = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise PlanRefused(
            f"machine.type: the types have different numbers of GPUs: {shown}",
            "Set the number, so that each type computes the same run: --gpus N",
            field="machine.type",
        )
    names = [chosen.name for chosen in machines]
    if len({*names}) < len(names):  # a run's attempts are told apart by their machine type
        twice = next(name for name in names if names.count(name) > 1)
        same = [name for name, chosen in zip(spec.machine.types, machines, strict=True) if chosen.name == twice]
        raise PlanRefused(
            f"machine.type: {' and '.join(same)} have the same machine type, {twice}", "Keep one.", field="machine.type"
        )
    return machines


def machine_of_type(spec: JobSpec, catalog: Catalog, target: Target, name: str) -> Chosen:
    """Return the machine for one type. Raises PlanRefused: the service has none, or the GPU is unknown."""
    wanted = spec.machine
    try:
        machine = catalog.find(name, wanted.gpus, wanted.accelerator, SERVICE[target])
    except PlanRefused:
        if target != "local":
            raise
        # A rehearsal runs any number of processes.
        kind = wanted.accelerator or name
        gpu = catalog.gpu(kind if kind.lower() in catalog.gpus else catalog.find(kind, None, None, "compute").gpu)
        return Chosen(machine=None, gpu=gpu, gpus=wanted.gpus or 1)
    return Chosen(machine=machine, gpu=catalog.gpu(machine.gpu), gpus=machine.gpus)


def has_many_networks(machine: MachineType) -> bool:
    """Return whether the machine's fast network has several interfaces, each in its own VPC network."""
    return (machine.nics or 1) > 1


def figures(chosen: Chosen, nodes: int) -> Gpus:
    """Return the machine for display."""
    machine = chosen.machine
    return Gpus(
        machine_type=machine.name if machine else "no matching machine type",
        gpu=chosen.gpu.title,
        gpus=chosen.gpus,
        gpu_memory_gb=chosen.gpu.memory_gb,
        vcpus=machine.vcpus if machine else None,
        memory_gb=machine.memory_gb if machine else None,
        nodes=nodes,
    )


DEFAULT_FLEX_START_WAIT: Final = 6 * 3600
"""Default for flex-start, whose purpose is to queue. Vertex AI's own default is 24 h (Scheduling.max_wait_duration),
which in 17 regions is more than two weeks."""
DEFAULT_WAIT: Final = 3600
"""Default for spot, standard and reservations. Google grants or refuses these within minutes (Vertex AI retries a
stockout 3 times for standard, 6 times for Spot); a job that still waits after an hour lacks quota or capacity."""
MIN_WAIT: Final = 90
"""Seconds: the shortest wait that Compute Engine accepts for flex-start, and the shortest for which launch makes an
attempt."""
MAX_FLEX_START_VM_WAIT: Final = 7200
"""Seconds: the longest wait that Compute Engine accepts for flex-start (params.requestValidForDuration)."""


def attempt_wait(limits: Limits, target: Target, provisioning: str) -> int | None:
    """Return the seconds that one attempt may wait for machines; None for a rehearsal."""
    if target == "local":
        return None
    kind = provisioning.partition(":")[0]
    default = DEFAULT_FLEX_START_WAIT if kind == "flex-start" else DEFAULT_WAIT
    wanted = parse_duration(limits.wait) if limits.wait else default
    wait = min(wanted, parse_duration(limits.wait_total)) if limits.wait_total else wanted
    return clamp_flex_start_vm_wait(wait) if target == "vm" and kind == "flex-start" else wait


def clamp_flex_start_vm_wait(wait: int) -> int:
    """Return the nearest wait, in seconds, that Compute Engine accepts for flex-start."""
    return min(max(wait, MIN_WAIT), MAX_FLEX_START_VM_WAIT)
