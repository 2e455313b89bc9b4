"""The way from a spec to a plan, as one story."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.catalog import AfterLimit, Catalog, MachineType, Nccl, Price
from launcher.errors import PlanRefused
from launcher.plan import cost, names, validate, vertex_request, vm_request, waiting
from launcher.plan.binding import bound
from launcher.plan.container import container
from launcher.plan.image import plan_image
from launcher.plan.machine import choose, figures, has_many_networks
from launcher.plan.model import Attempt, Chosen, Context, Image, Place, Plan, PlannedLimits, Shared
from launcher.plan.placement import SERVICE, places, provisioning
from launcher.plan.trained_model import check_model
from launcher.plan.warnings import warnings
from launcher.spec.models import JobSpec
from launcher.text import parse_duration

HOURS = 24.0
HOURS_OF_A_WORKPLACE = 12.0
REHEARSAL = Place(provisioning="standard", region="local")
FREE = Price(
    usd=0.0, approx=False, rule="on this machine", source="", date="", excludes=(), ceiling=0.0, hard_bound=0.0
)


NOTHING = AfterLimit(seconds=0, restarts=0)


def plan(spec: JobSpec, catalog: Catalog, context: Context) -> Plan:
    """Everything that a launch will do.

    Raises:
        PlanRefused: the spec can't work, or could cost more than its cap.
    """
    validate.of_spec(spec, context)
    chosen = choose(spec, catalog, context.target)
    validate.of_machine(spec, catalog, context, chosen)
    if context.training:
        validate.of_processes(spec, chosen)
        validate.of_precision(spec, context, chosen)
        validate.of_attention(spec, context, chosen)
        validate.of_image(spec, catalog, context, chosen)
        check_model(spec, catalog)
    where = tried(spec, catalog, context, chosen)
    shared = in_common(spec, catalog, context, chosen, where)
    validate.of_places(spec, context, where)
    attempts = tuple(attempt(spec, catalog, context, chosen, shared, place) for place in where)
    nodes, total = spec.machine.nodes, parse_duration(spec.limits.wait_total) if spec.limits.wait_total else None
    cost.check_lease(attempts, spec, hours=shared.hours)
    cost.check_cap(attempts, spec, hours=shared.hours)
    made = Plan(
        run=shared.run,
        target=context.target,
        project=context.project,
        run_folder=shared.run_folder,
        machine=figures(chosen, nodes),
        image=shared.image,
        command=(*shared.container.command, *shared.container.args) if shared.container else (),
        attempts=attempts,
        limits=PlannedLimits(
            hours=shared.hours,
            usd=spec.limits.usd,
            **cost.sums(attempts, nodes=nodes, hours=shared.hours),
            restarts=spec.limits.restarts,
            wait_seconds=max((one.wait_seconds for one in attempts if one.wait_seconds), default=None),
            wait_total_seconds=total,
            wait_at_most_seconds=waiting.in_total(attempts, total),
        ),
        warnings=warnings(spec, catalog, context, chosen, attempts),
        spec=msgspec.to_builtins(spec),
    )
    return bound(made)


def image(spec: JobSpec, catalog: Catalog, context: Context) -> Image:
    """The image alone, which needs no place to run in.

    Raises:
        PlanRefused: there is no such machine, or it can't run this image.
    """
    chosen = choose(spec, catalog, context.target)
    validate.of_image(spec, catalog, msgspec.structs.replace(context, target="local"), chosen)  # nothing is rented
    return plan_image(spec, catalog, context, chosen)


def with_digest(made: Plan, uri: str) -> Plan:
    """The plan once its image is in the registry: `uri` names it by its digest, in the plan and in every request."""
    if made.image is None or made.image.uri == uri:
        return made
    requests = [replaced(attempt.request, made.image.uri, uri) for attempt in made.attempts]
    attempts = (msgspec.structs.replace(one, request=new) for one, new in zip(made.attempts, requests, strict=True))
    image = msgspec.structs.replace(made.image, uri=uri, pinned=True)
    return msgspec.structs.replace(made, image=image, attempts=tuple(attempts))


def replaced(data: Any, old: str, new: str) -> Any:
    """Plain data with one text in the place of another, wherever it stands: a tag is too long to be anything else."""
    if isinstance(data, str):
        return data.replace(old, new)
    if isinstance(data, dict):
        return {key: replaced(value, old, new) for key, value in data.items()}
    return [replaced(value, old, new) for value in data] if isinstance(data, list) else data


def in_common(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, where: tuple[Place, ...]) -> Shared:
    """Run id, image, container and limits. A VM to work on has its name for a run id, and no image."""
    run = names.run_id(spec, context, chosen.gpus) if context.training else spec.name
    identity = names.identity(spec, context, chosen.gpus) if context.training else ""
    shared = Shared(
        run=run,
        run_folder=run_folder(spec, context, run),
        labels=names.labels(spec, context, run, identity),
        image=plan_image(spec, catalog, context, chosen) if context.training else None,
        container=None,
        hours=spec.limits.hours or (HOURS if context.training else HOURS_OF_A_WORKPLACE),
        mtbf_hours=mtbf_hours(catalog, where, spec.machine.nodes),
    )
    if not context.training:
        return shared
    made = container(spec, chosen, shared, nccl(spec, catalog, context, chosen.machine))
    validate.of_environment(spec, context, made)
    return msgspec.structs.replace(shared, container=made)


def mtbf_hours(catalog: Catalog, where: tuple[Place, ...], nodes: int) -> float | None:
    """Hours between two interruptions of the whole run, which stops with each of its nodes, in the worst attempt."""
    known = [found.hours for place in where if (found := catalog.interruptions(place.provisioning))]
    return min(known) / nodes if len(known) == len(where) else None


def run_folder(spec: JobSpec, context: Context, run: str) -> str | None:
    """`<output>/<run>`; a VM to work on has none."""
    if not context.training:
        return None
    return f"{(spec.output or names.default_output(context.project)).rstrip('/')}/{run}"


def nccl(spec: JobSpec, catalog: Catalog, context: Context, machine: MachineType | None) -> Nccl | None:
    """The network's settings: needed where several nodes talk, unless this is a rehearsal on one machine, or a VM
    that has one of its machine's several network interfaces: those settings are for the others."""
    if machine is None or spec.machine.nodes == 1 or context.target == "local":
        return None
    if context.target == "vm" and has_many_networks(machine):
        return None
    return catalog.nccl(machine, SERVICE[context.target])


def tried(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> tuple[Place, ...]:
    """The places of all attempts; a rehearsal has one, here."""
    if context.target == "local" or chosen.machine is None:
        return (REHEARSAL,)
    models = provisioning(spec, chosen.machine, context.target)
    return places(spec, context, catalog, chosen.machine, models)


def attempt(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, shared: Shared, place: Place) -> Attempt:
    """One request, with its price."""
    cost_of_node = price(spec, catalog, context, chosen, place)
    extras = cost.extras(spec, catalog, context, chosen, place)
    after = NOTHING if context.target == "local" else catalog.after_limit(SERVICE[context.target], place.provisioning)
    return Attempt(
        region=place.region,
        zone=place.zone,
        machine_type=chosen.machine.name if chosen.machine else "this machine",
        provisioning=place.provisioning,
        usd_per_hour=cost_of_node.usd,
        usd_approx=cost_of_node.approx,
        usd_is_bound=cost_of_node.bound,
        usd_rule=cost_of_node.rule,
        usd_excludes=cost.excluded(cost_of_node, extras, spec, context),
        usd_ceiling=cost_of_node.ceiling,
        usd_ceiling_rule=cost_of_node.ceiling_rule,
        usd_hard_bound=cost_of_node.hard_bound,
        usd_extras=extras,
        shutdown_seconds=after.seconds,
        service_restarts=after.restarts if spec.limits.restarts else 0,
        wait_seconds=waiting.of_attempt(spec.limits, context.target, place.provisioning),
        request=request(spec, catalog, context, chosen, shared, place),
    )


def price(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, place: Place) -> Price:
    """USD per node and hour; a rehearsal costs nothing."""
    if context.target == "local" or chosen.machine is None:
        return FREE
    known = catalog.price(chosen.machine, SERVICE[context.target], place.provisioning, place.name)
    listed = 0 if chosen.machine.local_ssd_auto or context.target != "vm" else spec.machine.local_ssds or 0
    rate = catalog.component("local-ssd-gib", place.region) if listed else None
    return cost.priced(cost.with_local_ssds(known, listed, rate, spot=place.provisioning == "spot"), spec.limits)


def request(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, shared: Shared, place: Place
) -> dict[str, Any]:
    """The JSON body that goes over the wire."""
    if context.target != "vm":
        return vertex_request.custom_job(spec, chosen, shared, place, project=context.project)
    return vm_request.request(spec, context, chosen, shared, place, family=image_family(spec, catalog, chosen))


def image_family(spec: JobSpec, catalog: Catalog, chosen: Chosen) -> str:
    """The Deep Learning VM image family to boot.

    Raises:
        PlanRefused: the catalog knows none whose driver reaches the machine's GPU.
    """
    if spec.vm.image_family or spec.vm.image:
        return spec.vm.image_family or ""
    found = catalog.image_family(chosen.machine) if chosen.machine else None
    if found is None:
        raise PlanRefused(
            f"the catalog knows no Deep Learning VM image whose driver runs {chosen.gpu.title}",
            "Name one: --set vm.image_family=FAMILY or --set vm.image=projects/P/global/images/I",
            field="machine.type",
        )
    return found.family
