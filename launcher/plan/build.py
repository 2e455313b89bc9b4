"""The way from a spec to a plan, as one story."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from launcher.catalog import Catalog, MachineType, Nccl, Price
from launcher.errors import PlanRefused
from launcher.plan import compute, cost, names, vertex
from launcher.plan.container import container
from launcher.plan.image import plan_image
from launcher.plan.machines import choose, figures
from launcher.plan.model import Attempt, Chosen, Context, Place, Plan, PlannedLimits, Shared
from launcher.plan.notes import warnings
from launcher.plan.places import SERVICE, places, provisioning
from launcher.spec.models import JobSpec

HOURS = 24.0
HOURS_OF_A_WORKPLACE = 12.0
RUN_ID = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
MAX_ENV = 100
"""Of one container on Vertex AI (facts 1.3)."""
REHEARSAL = Place(provisioning="standard", region="local")
FREE = Price(usd=0.0, approx=False, rule="on this machine", source="", date="", excludes=(), zone=None)


def plan(spec: JobSpec, catalog: Catalog, context: Context) -> Plan:
    """Everything that a launch will do.

    Raises:
        PlanRefused: the spec can't work, or could cost more than its cap.
    """
    check(spec, context)
    chosen = choose(spec, catalog, context.target)
    shared = in_common(spec, catalog, context, chosen)
    where = tried(spec, catalog, context, chosen)
    attempts = tuple(attempt(spec, catalog, context, chosen, shared, place) for place in where)
    nodes = spec.machine.nodes
    cost.check_cap(attempts, spec.limits, nodes=nodes, hours=shared.hours)
    return Plan(
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
            usd_at_most=cost.at_most(attempts, nodes=nodes, hours=shared.hours),
            restarts=spec.limits.restarts,
            wait_seconds=shared.wait_seconds,
        ),
        warnings=warnings(spec, catalog, context, chosen, attempts),
        spec=msgspec.to_builtins(spec),
    )


def check(spec: JobSpec, context: Context) -> None:
    """What can't work on this target, whatever the machine."""
    vm, output = context.target == "vm", spec.output or "gs://"
    if vm and spec.machine.nodes > 1:
        raise PlanRefused(
            f"launch vm makes one VM; the spec asks for {spec.machine.nodes} nodes",
            "Several nodes run on Vertex AI: launch vertex.",
        )
    if context.target != "local" and context.training and not output.startswith("gs://"):
        raise PlanRefused(
            f"output is a local folder ({output}), which a machine in the cloud can't write to",
            "Set output (or --output) to gs://BUCKET/PATH.",
        )
    if context.run_id and not re.fullmatch(RUN_ID, context.run_id):
        raise PlanRefused(
            f"--run-id {context.run_id!r} can't be taken",
            "It becomes a label and a VM's name: a-z, 0-9 and -, at most 63, starting with a letter.",
        )
    if vm and spec.name.endswith("-"):
        raise PlanRefused(f"name {spec.name!r} ends with -, which a VM's name can't", "Set another --name.")
    empty = sorted(name for name, value in spec.env.items() if not value)
    if empty and context.target == "vertex":
        raise PlanRefused(
            f"env: {', '.join(empty)} is empty, and Vertex AI refuses an empty environment variable",
            "Leave it out, or give it a value.",
        )
    if vm and (spec.identity.service_account or "").endswith("-compute@developer.gserviceaccount.com"):
        raise PlanRefused(
            "the VM would run as the default compute service account, which can change the whole project",
            f"Use an account of its own, such as {names.default_service_account(context.project)}:\n"
            f"  gcloud iam service-accounts create launch --project={context.project}",
        )
    if spec.vertex.tensorboard and not spec.identity.service_account and context.target == "vertex":
        raise PlanRefused(
            "vertex.tensorboard needs identity.service_account (Vertex AI refuses the job without one)",
            "Name an account that may write to the TensorBoard and to the output's bucket.",
        )


def in_common(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> Shared:
    """Run id, image, container and limits. A VM to work on has its name for a run id, and no image."""
    run = names.run_id(spec, context, chosen.gpus) if context.training else spec.name
    shared = Shared(
        run=run,
        run_folder=run_folder(spec, context, run),
        labels=names.labels(spec, context, run),
        image=plan_image(spec, context, chosen.machine, chosen.gpu) if context.training else None,
        container=None,
        hours=spec.limits.hours or (HOURS if context.training else HOURS_OF_A_WORKPLACE),
        wait_seconds=names.seconds(spec.limits.wait) if spec.limits.wait else None,
    )
    if not context.training:
        return shared
    made = container(spec, chosen, shared, nccl(spec, catalog, context, chosen.machine))
    if len(made.env) > MAX_ENV and context.target == "vertex":
        raise PlanRefused(
            f"the container would have {len(made.env)} environment variables, and Vertex AI takes {MAX_ENV}",
            f"launch itself needs {len(made.env) - len(spec.env)} for this machine: shorten env.",
        )
    return msgspec.structs.replace(shared, container=made)


def run_folder(spec: JobSpec, context: Context, run: str) -> str | None:
    """`<output>/<run>`; a VM to work on has none."""
    if not context.training:
        return None
    return f"{(spec.output or names.default_output(context.project)).rstrip('/')}/{run}"


def nccl(spec: JobSpec, catalog: Catalog, context: Context, machine: MachineType | None) -> Nccl | None:
    """The network's settings: needed where several nodes talk, unless this is a rehearsal on one machine.

    Raises:
        PlanRefused: a reduction server on a machine with a fast fabric of its own, which it would only slow down.
    """
    if machine is None or spec.machine.nodes == 1 or context.target == "local":
        return None
    settings = catalog.nccl(machine, SERVICE[context.target])
    if spec.vertex.reduction_server and (settings.env or settings.script):
        raise PlanRefused(
            f"a reduction server doesn't go with {machine.name}, which has a fast network of its own",
            "Leave vertex.reduction_server out.",
        )
    return settings


def tried(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> tuple[Place, ...]:
    """The places of all attempts; a rehearsal has one, here."""
    if context.target == "local" or chosen.machine is None:
        return (REHEARSAL,)
    models = provisioning(spec, chosen.machine, context.target)
    return places(spec, context, catalog, chosen.machine, models)


def attempt(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, shared: Shared, place: Place) -> Attempt:
    """One request, with its price."""
    cost_of_node = price(spec, catalog, context, chosen, place)
    return Attempt(
        region=place.region,
        zone=place.zone,
        machine_type=chosen.machine.name if chosen.machine else "this machine",
        provisioning=place.provisioning,
        usd_per_hour=cost_of_node.usd,
        usd_approx=cost_of_node.approx,
        usd_rule=cost_of_node.rule,
        usd_excludes=cost_of_node.excludes,
        request=request(spec, catalog, context, chosen, shared, place),
    )


def price(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, place: Place) -> Price:
    """USD per node and hour; a rehearsal costs nothing."""
    if context.target == "local" or chosen.machine is None:
        return FREE
    return cost.priced(
        catalog.price(chosen.machine, SERVICE[context.target], place.provisioning, place.name), spec.limits
    )


def request(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, shared: Shared, place: Place
) -> dict[str, Any]:
    """The JSON body that goes over the wire."""
    if context.target != "vm":
        return vertex.custom_job(spec, chosen, shared, place)
    return compute.instance(
        spec, chosen, shared, place, project=context.project, family=image_family(spec, catalog, chosen)
    )


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
        )
    return found.family
