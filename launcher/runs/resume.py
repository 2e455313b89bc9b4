"""Resume a run: what may change, or a fresh run beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from msgspec.structs import replace

from launch_train.common import contract
from launch_train.common.config import is_resumable
from launcher.errors import UsageError
from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL
from launcher.plan.model import Plan
from launcher.plan.names import compute_identity
from launcher.runs.find import here_instead, searched
from launcher.runs.identity_check import AllowedChange, comparable_request, identity_of
from launcher.runs.ledger import Ledger
from launcher.services import request

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs
    from launcher.runs.context import LaunchContext


def with_fresh_id(plan: Plan, inputs: Inputs, cloud: LaunchContext, say: Callable[[str], None]) -> Inputs:
    """Return the inputs with the next free run ID, or with that of the plan's newest fresh run while it is active."""
    identity = identity_of(plan.attempts[0])
    listing = cloud.find_jobs(f'labels.{IDENTITY_LABEL}="{identity}"', searched(None))
    newest = {}
    for job in reversed(listing.jobs):
        match = re.fullmatch(rf"{re.escape(plan.run)}(?:-(\d+))?", job.run)
        if match and job.labels.get(IDENTITY_LABEL) == identity:
            newest[int(match[1] or 1)] = job
    newest.pop(0, None)  # set by --run-id
    number = max(newest, default=0)
    if number < 2 or newest[number].is_over:
        beside = [job for job in newest.values() if not job.is_over]
        for job in beside:
            say(f"{job.run} is {job.state} in {job.place}; starting another run")
        number = next(
            candidate for candidate in count(number + 1) if is_free(plan, numbered_id(plan.run, candidate), cloud)
        )
    run_id = numbered_id(plan.run, number)
    return replace(inputs, context=replace(inputs.context, run_id=run_id))


def is_free(plan: Plan, run: str, cloud: LaunchContext) -> bool:
    """Return whether the folder of run `run`, beside the plan's, has no attempts."""
    beside = (plan.run_folder or "").rpartition("/")[0]
    folder = f"{beside}/{run}"
    region = plan.attempts[0].region
    return not beside or not Ledger.open(folder, cloud.clock, project=cloud.project, region=region).entries()


def numbered_id(run: str, number: int) -> str:
    """Return RUN, RUN-2, RUN-3 …"""
    return run if number == 1 else f"{run}-{number}"


def check_run_exists(plan: Plan, cloud: LaunchContext) -> None:
    """Check that the run to resume was launched before. Raises UsageError."""
    listing = cloud.find_jobs(f'labels.{RUN_LABEL}="{plan.run}"', searched(None))
    if not listing.jobs and is_free(plan, plan.run, cloud):
        raise UsageError(f"no run {plan.run} to resume", f"{here_instead(plan.run)}launch runs lists the runs.")


def allowed_change(plan: Plan, inputs: Inputs, cloud: LaunchContext) -> AllowedChange | None:
    """Return the change with which the plan may resume its run: another machine or place, more steps, or settings that
    alter no past step. Return None if there is nothing to resume, or if the submission must refuse the change.

    The run's earlier settings come from its newest job. With them, the spec must have the run's identity: then nothing
    else has changed.
    """
    jobs = cloud.find_jobs(f'labels.{RUN_LABEL}="{plan.run}"', searched(None)).jobs
    stored = Ledger.open(plan.run_folder).stored() if plan.run_folder and not jobs else None
    before = jobs[0].request if jobs else stored.plan.attempts[0].request if stored else {}
    had, spec = request.read(before), inputs.spec
    try:
        config = json.loads(had.env.get(contract.CONFIG, "{}"))
    except ValueError:
        return None
    if config != spec.run.config and not (spec.run.is_builtin and is_resumable(config, spec.run.config)):
        return None
    with_its_settings = replace(
        spec, run=replace(spec.run, config=config), machine=replace(spec.machine, nodes=had.nodes)
    )
    identity = request.labels(before).get(IDENTITY_LABEL, "")
    if identity != compute_identity(with_its_settings, inputs.context, had.gpus):
        return None
    if identity == identity_of(plan.attempts[0]) and not all(job.is_over for job in jobs):
        return None  # its job is followed where it is
    places = [(had.machine_type, had.provisioning, jobs[0].place)] if jobs else places_of(stored.plan) if stored else []
    computed = request.differences(before, comparable_request(plan, before))
    return AllowedChange(identity=identity, lines=(*computed, *placement_changes(places, plan)))


def places_of(plan: Plan) -> list[tuple[str, str, str]]:
    """Return machine type, provisioning model, and region or zone of each attempt."""
    return [(attempt.machine_type, attempt.provisioning, attempt.where) for attempt in plan.attempts]


def placement_changes(before: Sequence[tuple[str, str, str]], plan: Plan) -> Iterator[str]:
    """Yield a line for each of machine type, provisioning model and place whose earlier value no attempt of the plan
    has: `provisioning: spot → standard`."""
    fields = ("machine type", "provisioning", "zone" if plan.attempts[0].zone else "region")
    for name, old, new in zip(fields, zip(*before, strict=True), zip(*places_of(plan), strict=True), strict=True):
        if not {*old} & {*new}:
            yield f"{name}: {', '.join(dict.fromkeys(old))} → {', '.join(dict.fromkeys(new))}"


def report_change(allowed: AllowedChange | None, inputs: Inputs, say: Callable[[str], None]) -> None:
    if allowed is None:
        return
    for line in allowed.lines:
        say(f"resuming with {line.removeprefix('run.config.')}")
    changed = {line.partition(":")[0] for line in allowed.lines}
    if "run.config.steps" in changed:
        say("from here on the learning-rate schedule follows the new end")
    if changed & {"gpus", "nodes"} and not inputs.spec.run.is_builtin:
        say("your program must be able to load checkpoints of another number of processes")
