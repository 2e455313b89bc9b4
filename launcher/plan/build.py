"""Build a plan from a spec: validate, choose machine and placements, price each attempt, write its request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from launcher.catalog import AfterLimit, Catalog, MachineType, Nccl, Price
from launcher.errors import PlanRefused
from launcher.plan import cost, names, validate, vertex_request, vm_request
from launcher.plan.binding import bound
from launcher.plan.container import container
from launcher.plan.estimate import TrainingTime, billed_time, relative_hours, training_time
from launcher.plan.image import plan_image
from launcher.plan.memory.fit import check_memory
from launcher.plan.model import Attempt, Chosen, Context, Image, Placement, Plan, PlannedLimits, Shared, UsedPrices
from launcher.plan.names import compute_identity, run_id
from launcher.plan.placement import (
    SERVICE,
    attempt_wait,
    choose,
    fallback_order,
    figures,
    has_many_networks,
    placements_of,
)
from launcher.plan.validate import check_loggers, check_model
from launcher.plan.warnings import warnings
from launcher.spec.models import JobSpec
from launcher.text import parse_duration

DEFAULT_HOURS = 24.0
DEFAULT_WORKSTATION_HOURS = 12.0
FREE = Price(usd=0.0, approx=False, rule="on this machine", excludes=(), ceiling=0.0, hard_bound=0.0)
NOTHING_AFTER_LIMIT = AfterLimit(seconds=0, restarts=0)


def plan(spec: JobSpec, catalog: Catalog, context: Context) -> Plan:
    """Return everything that a launch will do.

    Raises PlanRefused: the spec cannot work, or could cost more than limits.usd.
    """
    validate.check_spec(spec, context)
    placements, refused = usable_placements(spec, catalog, context)
    machines = tuple({place.chosen.name: place.chosen for place in placements}.values())
    context = on_machine(context, machines[0])
    is_local, nodes = context.target == "local", spec.machine.nodes
    is_estimated = context.training and not is_local
    times = {chosen.name: training_time(spec, chosen, catalog) for chosen in machines} if is_estimated else {}
    if not is_local:
        hours = relative_hours(spec, machines, times) if len(machines) > 1 else {}
        placements = fallback_order(spec, catalog, context.target, placements, hours)
    shared = shared_by_attempts(spec, catalog, context, machines, placements)
    validate.check_regions(spec, context, placements)
    by_machine = {chosen.name: shared for chosen in machines}  # the attempts on a machine type have the same container
    for chosen in machines if context.training else ():
        node_container = container(spec, chosen, shared, nccl_settings(spec, catalog, context, chosen.machine))
        validate.check_environment(spec, context, node_container)
        by_machine[chosen.name] = msgspec.structs.replace(shared, container=node_container)
    chosen = placements[0].chosen
    attempts = tuple(
        plan_attempt(spec, catalog, context, by_machine[place.chosen.name], place, of_plan=chosen)
        for place in placements
    )
    wait_total = parse_duration(spec.limits.wait_total) if spec.limits.wait_total else None
    first = attempts[0]
    training, basis = times.get(chosen.name, (None, ""))
    expected = 0.0 if is_local else None
    if training is not None:
        billed = billed_time(catalog, first.provisioning, training, nodes)
        expected = cost.with_extras(first, first.usd_per_hour, nodes * min(billed, shared.hours))
    cost.check_lease(attempts, spec, hours=shared.hours)
    cost.check_usd_limit(attempts, spec, hours=shared.hours)
    started = by_machine[chosen.name].container
    waits = [attempt.wait_seconds for attempt in attempts if attempt.wait_seconds is not None]
    table = catalog.price_table
    unbound = Plan(
        run=shared.run,
        target=context.target,
        project=context.project,
        run_folder=shared.run_folder,
        machine=figures(chosen, nodes),
        image=shared.image,
        command=(*started.command, *started.args) if started else (),
        attempts=attempts,
        limits=PlannedLimits(
            hours=shared.hours,
            usd=spec.limits.usd,
            hours_expected=training,
            hours_basis=basis,
            usd_expected=expected,
            **cost.cost_bounds(attempts, nodes=nodes, hours=shared.hours),
            restarts=spec.limits.restarts,
            wait_seconds=max(filter(None, waits), default=None),
            wait_total_seconds=wait_total,
            wait_at_most_seconds=min(sum(waits), wait_total or sum(waits)) if waits else None,
        ),
        warnings=(
            *refused,
            *too_long(catalog, placements, times, nodes=nodes, limit=shared.hours),
            *warnings(spec, catalog, context, machines, attempts),
        ),
        spec=msgspec.to_builtins(spec),
        prices=UNSET if is_local else UsedPrices(date=table.date, digest=table.digest, shipped=table.shipped),
    )
    return bound(unbound)


def usable_placements(
    spec: JobSpec, catalog: Catalog, context: Context
) -> tuple[tuple[Placement, ...], tuple[str, ...]]:
    """Return the placements of each machine type that can run the spec, and a warning for each other one.

    Raises PlanRefused: none can.
    """
    usable: list[Placement] = []
    refused: list[tuple[Chosen, PlanRefused]] = []
    for chosen in choose(spec, catalog, context.target):
        try:
            check_usable(spec, catalog, on_machine(context, chosen), chosen)
            usable += placements_of(spec, context, catalog, chosen)
        except PlanRefused as error:
            refused.append((chosen, error))
    problems = [f"{chosen.gpu.name} ({chosen.name}): {error.problem}" for chosen, error in refused]
    if usable:
        if len(spec.machine.types) > 1 and context.target != "local":
            check_regions_used(spec, usable)
        return tuple(usable), tuple(f"machine.type: skipped: {problem}" for problem in problems)
    first = refused[0][1]
    if len({error.problem for _, error in refused}) == 1:
        raise first
    raise PlanRefused(
        "\n  ".join(["machine.type: no type can run this job:", *problems]), first.hint, field="machine.type"
    )


def check_regions_used(spec: JobSpec, placements: Sequence[Placement]) -> None:
    """Check that each region of the spec has one of the machine types. Raises PlanRefused."""
    used = {place.region for place in placements}
    for index, region in enumerate(spec.regions if isinstance(spec.regions, tuple) else ()):
        if region not in used:
            raise PlanRefused(
                f"no type of machine.type can be used in {region}",
                "Remove the region, or add a type that it has: launch gpus --region " + region,
                field=f"regions.{index}",
            )


def check_usable(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """Check that a machine can run the spec. Raises PlanRefused."""
    validate.check_machine(spec, catalog, context, chosen)
    validate.check_gpu_memory(spec, chosen)
    if context.training:
        validate.check_processes(spec, chosen)
        validate.check_precision(spec, context, chosen)
        validate.check_attention(spec, context, chosen)
        validate.check_image(spec, catalog, context, chosen)
        check_loggers(spec, catalog, context)
        check_model(spec, catalog)
        check_memory(spec, catalog, context, chosen)


def too_long(
    catalog: Catalog, placements: Sequence[Placement], times: Mapping[str, TrainingTime], *, nodes: int, limit: float
) -> Iterator[str]:
    """Yield a warning for each machine type on which the run is expected to exceed the limit of hours."""
    firsts = {place.chosen.name: place for place in reversed(placements)}
    for name, (training, basis) in times.items():
        billed = training and billed_time(catalog, firsts[name].provisioning, training, nodes)
        if billed and billed > limit:
            needs = f"this run needs about {billed:,.0f} h{f' on {name}' if len(times) > 1 else ''} ({basis})"
            yield (
                f"limits.hours is {limit:g} h, but {needs} and would end unfinished: "
                f"--hours {math.ceil(billed * 1.1)}, or more GPUs"
            )


def image(spec: JobSpec, catalog: Catalog, context: Context) -> Image:
    """Return the image alone, which needs no placement.

    Raises PlanRefused: the machine does not exist, or cannot run this image.
    """
    machines = choose(spec, catalog, context.target)
    for chosen in machines:  # nothing is billed
        local = msgspec.structs.replace(on_machine(context, chosen), target="local")
        validate.check_image(spec, catalog, local, chosen)
    return image_of_machines(spec, catalog, context, machines)


def image_of_machines(spec: JobSpec, catalog: Catalog, context: Context, machines: Sequence[Chosen]) -> Image:
    """Return the image that all machines of a run use. Raises PlanRefused: they need different ones."""
    images = [plan_image(spec, catalog, on_machine(context, chosen), chosen) for chosen in machines]
    if images.count(images[0]) < len(images):
        pairs = zip(machines, images, strict=True)
        needs = ", ".join(f"{chosen.gpu.name} needs {image.platform} with {image.wheel}" for chosen, image in pairs)
        wheel = max(image.wheel for image in images)
        is_common = len({image.platform for image in images}) == 1 and not spec.image.wheel
        fix = f"Set a build for all: --set image.wheel={wheel}; or list" if is_common else "List"
        raise PlanRefused(
            f"machine.type: all types use one image, but {needs}",
            f"{fix} types that need the same one.",
            field="machine.type",
        )
    return images[0]


def on_machine(context: Context, chosen: Chosen) -> Context:
    """Return the context without the requirements of other architectures than the machine's."""
    arch, packages = chosen.machine.arch if chosen.machine else "amd64", context.packages
    named = tuple(package for package in packages.named if package.arch in ("", arch))
    return msgspec.structs.replace(context, packages=msgspec.structs.replace(packages, named=named))


def with_digest(plan: Plan, uri: str, base: str = "") -> Plan:
    """Return the plan with its pushed image (`uri`, by digest) in the plan and in every request.

    `base` is the base image that it was built on, by digest; empty if that is unknown.
    """
    if plan.image is None or plan.image.uri == uri:
        return plan
    requests = [replace_text(attempt.request, plan.image.uri, uri) for attempt in plan.attempts]
    attempts = (
        msgspec.structs.replace(attempt, request=new) for attempt, new in zip(plan.attempts, requests, strict=True)
    )
    image = msgspec.structs.replace(plan.image, uri=uri, pinned=True, base=base or plan.image.base)
    return msgspec.structs.replace(plan, image=image, attempts=tuple(attempts))


def with_hidden_webhook(plan: Plan) -> Plan:
    """Return the plan to show: without a webhook's URL, which only a plan for this machine has."""
    url = plan.spec.get("notify", {}).get("webhook", "")
    if not url or url.startswith(validate.STORED):
        return plan
    attempts = tuple(
        msgspec.structs.replace(attempt, request=replace_text(attempt.request, url, HIDDEN))
        for attempt in plan.attempts
    )
    return msgspec.structs.replace(plan, attempts=attempts, spec=replace_text(plan.spec, url, HIDDEN))


HIDDEN = "https://•••"
"""Still a valid webhook, as the plan is read again where it is shown."""


def replace_text(data: Any, old: str, new: str) -> Any:
    """Replace a text wherever it occurs in plain data; an image tag is too long to match anything else."""
    if isinstance(data, str):
        return data.replace(old, new)
    if isinstance(data, dict):
        return {key: replace_text(value, old, new) for key, value in data.items()}
    return [replace_text(value, old, new) for value in data] if isinstance(data, list) else data


def shared_by_attempts(
    spec: JobSpec, catalog: Catalog, context: Context, machines: Sequence[Chosen], placements: Sequence[Placement]
) -> Shared:
    """Return run id, image and limits. The run id of a VM to work on is its name; it has no image."""
    gpus = machines[0].gpus
    run = run_id(spec, context, gpus) if context.training else spec.name
    identity = compute_identity(spec, context, gpus) if context.training else ""
    return Shared(
        run=run,
        run_folder=folder_of_run(spec, context, run),
        labels=names.labels(spec, context, run, identity),
        image=image_of_machines(spec, catalog, context, machines) if context.training else None,
        container=None,
        hours=spec.limits.hours or (DEFAULT_HOURS if context.training else DEFAULT_WORKSTATION_HOURS),
        mtbf_hours=mtbf_hours(catalog, placements, spec.machine.nodes),
    )


def mtbf_hours(catalog: Catalog, placements: Sequence[Placement], nodes: int) -> float | None:
    """Return the mean hours between two interruptions of the run, which any of its nodes interrupts, in the worst
    attempt."""
    known = [
        interruptions.hours
        for placement in placements
        if (interruptions := catalog.interruptions(placement.provisioning))
    ]
    return min(known) / nodes if len(known) == len(placements) else None


def folder_of_run(spec: JobSpec, context: Context, run: str) -> str | None:
    """Return `<output>/<run>`; None for a VM to work on."""
    if not context.training:
        return None
    return f"{(spec.output or names.default_output(context.project)).rstrip('/')}/{run}"


def nccl_settings(spec: JobSpec, catalog: Catalog, context: Context, machine: MachineType | None) -> Nccl | None:
    """Return the NCCL settings of the machine's network, or None.

    They are needed between several nodes, but not in a rehearsal on one machine, and not on a VM that has one of its
    machine's several network interfaces: the settings are for the others.
    """
    if machine is None or spec.machine.nodes == 1 or context.target == "local":
        return None
    if context.target == "vm" and has_many_networks(machine):
        return None
    return catalog.nccl(machine, SERVICE[context.target])


def plan_attempt(
    spec: JobSpec, catalog: Catalog, context: Context, shared: Shared, placement: Placement, *, of_plan: Chosen
) -> Attempt:
    """Return one attempt: a request with its price. `of_plan`: the plan's machine."""
    price = node_price(spec, catalog, context, placement)
    extras = cost.extras(spec, catalog, context, placement)
    after = (
        NOTHING_AFTER_LIMIT
        if context.target == "local"
        else catalog.after_limit(SERVICE[context.target], placement.provisioning)
    )
    chosen = placement.chosen
    return Attempt(
        region=placement.region,
        zone=placement.zone,
        machine_type=chosen.name,
        machine=UNSET if chosen == of_plan else figures(chosen, spec.machine.nodes),
        provisioning=placement.provisioning,
        usd_per_hour=price.usd,
        usd_approx=price.approx,
        usd_is_bound=price.bound,
        usd_rule=price.rule,
        usd_excludes=cost.excluded(price, extras, spec, context),
        usd_ceiling=price.ceiling,
        usd_ceiling_rule=price.ceiling_rule,
        usd_hard_bound=price.hard_bound,
        usd_extras=extras,
        shutdown_seconds=after.seconds,
        service_restarts=after.restarts if spec.limits.restarts else 0,
        wait_seconds=attempt_wait(spec.limits, context.target, placement.provisioning),
        request=request_body(spec, catalog, context, shared, placement),
    )


def node_price(spec: JobSpec, catalog: Catalog, context: Context, placement: Placement) -> Price:
    """Return the catalog's price per node and hour, or that of --price if it is unknown; a rehearsal costs nothing."""
    machine = placement.chosen.machine
    if context.target == "local" or machine is None:
        return FREE
    machine_price = catalog.price(machine, SERVICE[context.target], placement.provisioning, placement.name)
    disks = 0 if machine.local_ssd_auto or context.target != "vm" else spec.machine.local_ssds or 0
    rate = catalog.component("local-ssd-gib", placement.region) if disks else None
    with_disks = cost.with_local_ssds(machine_price, disks, rate, spot=placement.provisioning == "spot")
    if with_disks.usd is not None or (usd := spec.limits.price) is None:
        return with_disks
    rule = "set by --price"
    return msgspec.structs.replace(
        with_disks, usd=usd, approx=False, rule=rule, ceiling=usd, ceiling_rule=rule, hard_bound=usd
    )


def request_body(
    spec: JobSpec, catalog: Catalog, context: Context, shared: Shared, placement: Placement
) -> dict[str, Any]:
    if context.target != "vm":
        return vertex_request.custom_job(spec, shared, placement, project=context.project)
    family = image_family(spec, catalog, placement.chosen)
    return vm_request.request(spec, context, shared, placement, family=family)


def image_family(spec: JobSpec, catalog: Catalog, chosen: Chosen) -> str:
    """Return the Deep Learning VM image family to boot; empty if the spec names an image.

    Raises PlanRefused: the catalog has no image family whose driver supports the GPU.
    """
    if spec.vm.image_family or spec.vm.image:
        return spec.vm.image_family or ""
    family = catalog.image_family(chosen.machine) if chosen.machine else None
    if family is None:
        raise PlanRefused(
            f"no Deep Learning VM image with a driver for {chosen.gpu.title} is known",
            "Set one: --set vm.image_family=FAMILY or --set vm.image=projects/P/global/images/I",
            field="machine.type",
        )
    return family.family
