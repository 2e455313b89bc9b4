"""Compute the maximum cost of a run, and compare it with limits.usd and the caps of the settings files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from launcher.catalog import Catalog, Component, Price
from launcher.errors import PlanRefused, Problem
from launcher.plan.model import Attempt, Context, Placement, Plan
from launcher.plan.mounts import new_disk_type
from launcher.plan.validate import LOCAL_SSD_GIB
from launcher.plan.vertex_request import disk_spec
from launcher.plan.vm_request import boot_disk_of, on_stop
from launcher.spec.models import JobSpec, Mount
from launcher.spec.project_file import Settings
from launcher.text import hourly_price, parse_duration, plural, usd_text

MONTH_HOURS = 730
"""Hours of an average month, as in Google's price lists."""
BUCKET = "storage in the bucket (including soft-deleted checkpoints)"


def with_local_ssds(price: Price, disks: int, rate: Component | None, *, spot: bool) -> Price:
    """Return the price with the requested local SSDs at the region's rate; unknown if that rate is unknown."""
    if not disks:
        return price
    each = None if rate is None else rate.spot if spot else rate.listed
    if rate is None or each is None:
        rule = "the price of local SSDs is unknown in this region"
        return replace(price, usd=None, approx=True, rule=rule, ceiling=None, hard_bound=None)
    size = disks * LOCAL_SSD_GIB
    return replace(
        price,
        usd=None if price.usd is None else price.usd + size * each,
        rule=f"{price.rule}, plus {disks} local SSDs",
        excludes=tuple(item for item in price.excludes if item != "local SSD"),
        ceiling=None if price.ceiling is None else price.ceiling + size * rate.listed,
        hard_bound=None if price.hard_bound is None else price.hard_bound + size * rate.listed,
    )


def extras(spec: JobSpec, catalog: Catalog, context: Context, placement: Placement) -> dict[str, float]:
    """Return the USD per node and hour of additional resources whose price is known: boot disk, new disks, external
    address."""
    machine = placement.chosen.machine
    if context.target == "local" or machine is None:
        return {}
    on_vertex = context.target == "vertex"
    disk = disk_spec(spec, machine) if on_vertex else boot_disk_of(spec, machine)
    month = catalog.disk_price_at_most(disk["bootDiskType"], placement.region)
    fee = 1 + catalog.rates["vertex-fee"] if on_vertex else 1.0
    by_part = {} if month is None else {"boot disk": disk["bootDiskSizeGb"] * month / MONTH_HOURS * fee}
    if context.target == "vm" and context.training and (disks := new_disks(spec)):
        months = [catalog.disk_price_at_most(new_disk_type(mount, machine), placement.region) for mount in disks]
        if None not in months:
            sizes = [mount.new_disk_gb or 0 for mount in disks]
            total = sum(size * (usd or 0.0) for size, usd in zip(sizes, months, strict=True))
            by_part["new disks"] = total / MONTH_HOURS
    if context.target == "vm" and spec.vm.external_ip:
        by_part["external address"] = catalog.rates["external-ip"]
    return by_part


def new_disks(spec: JobSpec) -> list[Mount]:
    return [mount for mount in spec.mounts if mount.new_disk_gb]


def excluded(price: Price, known: dict[str, float], spec: JobSpec, context: Context) -> tuple[str, ...]:
    """Return the billed items that the estimate excludes."""
    if context.target == "local":
        return ()
    has_new = context.training and new_disks(spec) and "new disks" not in known
    has_others = context.training and len(new_disks(spec)) < len(spec.mounts)
    kept = context.target == "vm" and on_stop(spec, training=context.training) == "stop"
    return (
        *(item for item in price.excludes if item not in known),
        *(["new disks"] if has_new else ()),
        *(["mounted buckets, shares and disks"] if has_others else ()),
        *(["the boot disk after a stop"] if kept else ()),
        *([BUCKET] if context.training else ()),
    )


def cost_bounds(attempts: tuple[Attempt, ...], *, nodes: int, hours: float) -> dict[str, float | None]:
    """Return the upper bounds of the cost of any attempt on all nodes, in USD; None if a price is unknown."""
    highest: dict[str, float | None] = {"usd_at_most": 0.0, "usd_hard_bound": 0.0}
    for attempt in attempts:
        billed = nodes * billed_hours(attempt, hours)
        for bound, usd in (
            ("usd_at_most", with_extras(attempt, attempt.usd_ceiling, billed)),
            ("usd_hard_bound", with_extras(attempt, attempt.usd_hard_bound, billed * (1 + attempt.service_restarts))),
        ):
            known = highest[bound]
            highest[bound] = None if usd is None or known is None else max(usd, known)
    return highest


def billed_hours(attempt: Attempt, hours: float) -> float:
    """Return the time limit plus the shutdown."""
    return hours + attempt.shutdown_seconds / 3600


def with_extras(attempt: Attempt, usd: float | None, hours: float) -> float | None:
    """Return the USD for `hours` of a node at `usd` per hour, with its extras; None if `usd` is unknown."""
    return None if usd is None else (usd + sum(attempt.usd_extras.values())) * hours


def hourly_ceiling(attempt: Attempt) -> float:
    """Return the USD per node and hour by the expected ceiling, with extras; 0 if unknown."""
    return with_extras(attempt, attempt.usd_ceiling, 1.0) or 0.0


def check_usd_limit(attempts: tuple[Attempt, ...], spec: JobSpec, *, hours: float) -> None:
    """Check that the plan cannot cost more than `limits.usd`.

    Raises PlanRefused: it could, or its cost is unknown. Says how many hours the cap pays for.
    """
    cap, nodes = spec.limits.usd, spec.machine.nodes
    if cap is None:
        return
    check_prices_known(attempts, spec, cap)
    dearest = max(attempts, key=lambda attempt: hourly_ceiling(attempt) * billed_hours(attempt, hours))
    rate, billed = hourly_ceiling(dearest), billed_hours(dearest, hours)
    total = rate * nodes * billed
    if total > cap:
        affordable = int((cap / (rate * nodes) - (billed - hours)) * 100) / 100
        shorter = f"--hours {affordable:g} (which {usd_text(cap)} pays for), " if affordable >= 0.1 else ""
        raise PlanRefused(
            f"limits.usd: this run could cost {usd_text(total)}, more than {usd_text(cap)}:\n"
            f"  at most {ceiling_in_hours(dearest, nodes, hours)}\n"
            f"  price ceiling, {dearest.provisioning} in {dearest.where}: {dearest.usd_ceiling_rule}",
            f"Use {shorter}a higher --usd, or cheaper regions or provisioning.",
            field="limits.usd",
        )


def ceiling_in_hours(attempt: Attempt, nodes: int, hours: float) -> str:
    """Return `$25.49/h (with boot disk) × 1 node × 24.04 h (24 h + 150 s of shutdown)`: `hourly_ceiling` has extras."""
    extras = f" (with {', '.join(attempt.usd_extras)})" if attempt.usd_extras else ""
    billed = f"{billed_hours(attempt, hours):.4g} h ({hours:g} h + {attempt.shutdown_seconds} s of shutdown)"
    return f"{hourly_price(hourly_ceiling(attempt))}{extras} × {plural(nodes, 'node')} × {billed}"


def check_lease(attempts: tuple[Attempt, ...], spec: JobSpec, *, hours: float) -> None:
    """Check that the lease ends before limits.hours, when Google itself ends the VM.

    Raises PlanRefused: it does not. Says what the longer time could cost.
    """
    lease = parse_duration(spec.vm.lease) / 3600 if spec.vm.lease else 0.0
    if lease <= hours:
        return
    usd = cost_bounds(attempts, nodes=spec.machine.nodes, hours=lease)["usd_at_most"]
    costs = f"costs at most {usd_text(usd)}" if usd is not None else "the cost is unknown"
    raise PlanRefused(
        f"vm.lease: {spec.vm.lease} is longer than limits.hours ({hours:g}), after which Google ends the VM",
        f"Raise the limit: --hours {lease:g} ({costs}); or shorten the lease: --lease {int(hours * 60)}m",
        field="vm.lease",
    )


def check_prices_known(attempts: tuple[Attempt, ...], spec: JobSpec, cap: float) -> None:
    """Check that every price has an upper bound, which a cap needs.

    Raises PlanRefused: names the first attempt without one.
    """
    unknown = next((attempt for attempt in attempts if attempt.usd_ceiling is None), None)
    if unknown:
        raise PlanRefused(
            f"limits.usd is {usd_text(cap)}, but the price of {unknown.machine_type} ({unknown.provisioning}) "
            f"in {unknown.where} is unknown",
            "Set the price with --price USD (per hour and node), use another region, or remove limits.usd.",
            field="limits.usd",
        )
    if spec.vertex.reduction_server:
        raise PlanRefused(
            f"limits.usd is {usd_text(cap)}, but the price of the reduction servers "
            f"({spec.vertex.reduction_server.machine_type}) is unknown",
            "Remove limits.usd or vertex.reduction_server.",
            field="limits.usd",
        )


MIN_HOURS = 0.05
"""Shorter runs are not suggested."""


def check_caps(plan: Plan, spec: JobSpec, files: Sequence[Settings], catalog: Catalog) -> None:
    """Check a plan for the cloud against the caps of the settings files and `limits.usd`: the lowest one wins.

    Raises PlanRefused, with every cap that the plan exceeds and its line.
    """
    if plan.target == "local":
        return
    if problems := [problem for file in files for problem in exceeded_caps(plan, spec, file, catalog)]:
        refused = PlanRefused("\n".join(map(str, problems)))
        refused.problems = tuple(problems)
        raise refused


def exceeded_caps(plan: Plan, spec: JobSpec, file: Settings, catalog: Catalog) -> Iterator[Problem]:
    project = file.project
    regions = sorted({attempt.region for attempt in plan.attempts})
    if project.regions and (outside := [region for region in regions if region not in project.regions]):
        fix = f"use {' '.join(f'--region {region}' for region in project.regions)}"
        yield Problem(file.place("regions"), f"region {', '.join(outside)} is not allowed", fix)
    names = {gpu.title: name for name, gpu in catalog.gpus.items()}
    for machine in plan.machines if project.machines else ():
        gpu = names.get(machine.gpu, "")
        if not {machine.machine_type, gpu} & set(project.machines):
            fix = f"allowed: {', '.join(project.machines)} (--type)"
            yield Problem(file.place("machines"), f"machine {machine.machine_type} ({gpu}) is not allowed", fix)
    if missing := [name for name in project.required_labels if name not in spec.labels]:
        fix = "add to the spec: labels: {" + ", ".join(f"{name}: …" for name in missing) + "}"
        yield Problem(file.place("required_labels"), f"required label {', '.join(missing)} is missing", fix)
    cap, usd = project.max_usd_per_run, plan.limits.usd_at_most
    if cap is not None and usd is None:
        what = f"the cost of this run is unknown; the cap is {usd_text(cap)}"
        yield Problem(file.place("max_usd_per_run"), what, "set the price per hour and node: --price USD")
    elif cap is not None and usd is not None and usd > cap:
        shutdown = max(attempt.shutdown_seconds for attempt in plan.attempts) / 3600  # is paid too
        hours = int(((plan.limits.hours + shutdown) * cap / usd - shutdown) * 100) / 100
        fix = f"{hours:g} hours would fit: --hours {hours:g}" if hours >= MIN_HOURS else "use a cheaper machine"
        what = f"this run could cost {usd_text(usd)}, more than {usd_text(cap)}"
        yield Problem(file.place("max_usd_per_run"), what, fix)
