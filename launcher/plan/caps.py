"""Check a plan against the caps of the settings files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.catalog import Catalog
from launcher.errors import PlanRefused, Problem
from launcher.plan.model import Plan
from launcher.spec.models import JobSpec
from launcher.spec.project_file import Settings
from launcher.text import usd_text

MIN_HOURS = 0.05
"""Shorter runs are not suggested."""


def check_caps(plan: Plan, spec: JobSpec, files: Sequence[Settings], catalog: Catalog) -> None:
    """Check a plan for the cloud against the caps of the settings files and `limits.usd`: the lowest one wins.

    Raises PlanRefused, with every cap that the plan exceeds and its line.
    """
    if plan.target == "local":
        return
    if problems := [problem for file in files for problem in exceeded(plan, spec, file, catalog)]:
        refused = PlanRefused("\n".join(map(str, problems)))
        refused.problems = tuple(problems)
        raise refused


def exceeded(plan: Plan, spec: JobSpec, file: Settings, catalog: Catalog) -> Iterator[Problem]:
    """Yield each cap that the plan exceeds, with what to change."""
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
