"""Plan a spec; errors name the line of the spec, or the flag, that caused them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from launcher import catalog
from launcher.inputs.gather import GatherOptions, Inputs, gather, gather_data
from launcher.inputs.price_table import priced_catalog
from launcher.plan import build, model
from launcher.plan.cost import check_caps
from launcher.plan.model import Image, Target
from launcher.spec.models import JobSpec
from launcher.spec.reader import Override

SPEC = "spec"
"""The position that errors name for the values of a spec that is not a file."""


class Plan(Struct, frozen=True, kw_only=True):
    """A planned run: the requests of all attempts, and the files that its image will contain."""

    data: model.Plan
    """Everything that a launch does, as plain data: machine, image, attempts with requests and prices, limits."""
    inputs: Inputs

    @property
    def run(self) -> str:
        """Return the run ID: the spec's name and a hash of the computation and its owner."""
        return self.data.run

    @property
    def project(self) -> str:
        """Return the Google Cloud project; `local` for a run on this machine."""
        return self.data.project

    @property
    def target(self) -> Target:
        """Return vertex, vm or local."""
        return self.data.target

    @property
    def folder(self) -> str | None:
        """Return the run folder, where checkpoints and metrics go."""
        return self.data.run_folder

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what may not work as intended, one sentence for each."""
        return self.data.warnings

    @property
    def usd_at_most(self) -> float | None:
        """Return the upper bound of the cost that `limits.usd` is compared with, in USD; None: a price is unknown."""
        return self.data.limits.usd_at_most

    @property
    def requests(self) -> tuple[dict[str, Any], ...]:
        """Return the JSON body of each attempt's create request, in fallback order."""
        return tuple(attempt.request for attempt in self.data.attempts)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `launch vertex --dry-run -o json` prints it."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.data))
        return fields


def plan(
    spec: str | os.PathLike[str] | Mapping[str, Any] | JobSpec | None = None,
    *,
    target: Target = "vertex",
    changes: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
) -> Plan:
    """Plan a run. Reads files and gcloud's settings; sends no request.

    `spec` is the path of a YAML file, the spec's fields as a dict (such as parsed YAML text), a JobSpec, or None for
    the built-in job. `target` is vertex, vm (a run on Compute Engine VMs) or local. `changes` sets single fields by
    their dotted names: {"machine.gpus": 8, "run.config.steps": 100}. `folder` is what the paths of a dict or JobSpec
    are relative to; a file's paths are relative to its own folder. `run_id` replaces the computed run ID.

    Raises:
        SpecError: the spec or a change is invalid; `problems` has all of them, each with its place.
        PlanRefused: the spec cannot work on its target, or could cost more than its limit.
        UsageError: no project is set, or a file that the spec names does not exist.
    """
    own = [Override(path, value, f"changes[{path!r}]") for path, value in (changes or {}).items()]
    options = GatherOptions(run_id=run_id)
    if isinstance(spec, Mapping | JobSpec):
        fields = msgspec.to_builtins(spec)
        inputs = gather_data(target, fields, SPEC, own, folder=Path(folder) if folder else None, options=options)
    else:
        inputs = gather(target, Path(spec) if spec else None, own, options)
    return Plan(data=planned(inputs), inputs=inputs)


def planned(inputs: Inputs, *, offline: bool = False) -> model.Plan:
    """Return the plan of a launch, with the prices of the newest table; `offline`: of the shipped one. Raises
    PlanRefused."""
    known = priced_catalog(offline=offline)
    with inputs.located.naming_places():
        planned_run = build.plan(inputs.spec, known, inputs.context)
    check_caps(planned_run, inputs.spec, inputs.settings.files, known)
    return planned_run


def planned_image(inputs: Inputs) -> Image:
    """Return the plan of the image only. Raises PlanRefused."""
    with inputs.located.naming_places():
        return build.image(inputs.spec, catalog.load(), inputs.context)
