"""Check specs offline: plan each one as a dry run does, and collect what is wrong with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.errors import LaunchError, UsageError
from launcher.inputs.code_files import NEVER, CodeCache, is_run_folder
from launcher.inputs.gather import GatherOptions, collect_context, folder_of, refuse_python, with_defaults
from launcher.inputs.planning import planned
from launcher.plan.model import Plan, Target
from launcher.spec.models import JobSpec, Run
from launcher.spec.project_file import NAME as PROJECT_FILE
from launcher.spec.reader import Located, read_located
from launcher.spec.services import Vertex, Vm

STAND_IN: Final = "unset-project"
"""Project ID used if none is set."""
SPEC: Final = re.compile(rb"""^["']?machine["']?\s*:""", re.MULTILINE)
"""Matches the section that every spec has, even in a file that is not valid YAML."""
POSITION: Final = re.compile(r"(?P<file>[^\n]+?):(?P<line>\d+): ")
FIELD: Final = re.compile(r"[a-z_]+(\.[a-z_]+)*")


class SpecFinding(Struct, frozen=True, kw_only=True):
    """A warning or a problem, with its position."""

    file: str
    line: int | None
    """None: the finding is about the file as a whole."""
    text: str
    hint: str = ""


class CheckedSpec(Struct, frozen=True, kw_only=True):
    """The result of checking one spec."""

    path: str
    target: Target | None
    """None: the spec could not be read."""
    plan: Plan | None = None
    """None: the spec is refused."""
    problems: tuple[SpecFinding, ...] = ()
    warnings: tuple[SpecFinding, ...] = ()


class FoundSpecs(Struct, frozen=True, kw_only=True):
    """The spec files that the arguments name, and the YAML files in the same folders that are not specs."""

    specs: tuple[Path, ...]
    other_files: tuple[Path, ...] = ()


def find_specs(paths: Sequence[Path]) -> FoundSpecs:
    """Return the named files, and the specs below the named folders. A YAML file in a folder is a spec if it has a
    section `machine`.

    Raises UsageError: there is no spec.
    """
    specs: dict[Path, None] = {}
    others: dict[Path, None] = {}
    for path in paths:
        for file in spec_candidates(path) if path.is_dir() else (path,):
            (specs if file == path or is_spec(file) else others)[file] = None
    if not specs:
        raise UsageError(
            f"no spec found in {', '.join(map(str, paths))}",
            "Name spec files or a folder: launch check job_specs/\nlaunch init creates a spec.",
        )
    return FoundSpecs(specs=tuple(specs), other_files=tuple(file for file in others if file not in specs))


def spec_candidates(folder: Path) -> Iterator[Path]:
    """Yield the YAML files below a folder, sorted; not launch.yaml, and none in hidden folders, virtual environments
    and run folders."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not (
                name.startswith(".")
                or name in NEVER
                or os.path.lexists(f"{path}/{name}/pyvenv.cfg")
                or is_run_folder(f"{path}/{name}")
            )
        )
        yield from (
            Path(path) / name for name in sorted(names) if name.endswith((".yaml", ".yml")) and name != PROJECT_FILE
        )


def is_spec(file: Path) -> bool:
    """Return whether a YAML file is meant as a spec. An unreadable file counts as one, so that it is reported."""
    try:
        return SPEC.search(file.read_bytes()) is not None
    except OSError:
        return True


def check_specs(
    paths: Iterable[Path], *, target: Target | None = None, project: str | None = None
) -> list[CheckedSpec]:
    """Plan specs and return what was found; problems are data, not errors.

    `target` is by default what each spec is written for (`target_of`), and also this machine if its output is a folder
    here; a spec that Vertex AI cannot run is also tried as a run on VMs. `project` takes precedence over gcloud's;
    without either, STAND_IN is used.
    """
    cache = CodeCache()
    return [check_one_spec(path, target, project, cache) for path in paths]


def check_one_spec(path: Path, target: Target | None, project: str | None, cache: CodeCache) -> CheckedSpec:
    """Plan a spec; see `check_specs`."""
    try:
        refuse_python(path)
        located = read_located(path)
    except LaunchError as error:
        return CheckedSpec(path=str(path), target=target, problems=tuple(findings_of(error, str(path))))
    if target:
        return check_target(located, path, target, project, cache)
    output = located.spec.output
    if output and not output.startswith("gs://"):
        here = check_target(located, path, "local", project, cache)
        if here.plan is None:
            return here
        cloud_spec = replace(located.spec, output=f"gs://{project or STAND_IN}-launch/runs")
        cloud = check_in_cloud(replace(located, spec=cloud_spec), path, project, cache)
        text = f"output: {output} is a folder on this machine; a launch in the cloud needs --output gs://BUCKET/PATH"
        return replace(cloud, warnings=(warning(text, located), *cloud.warnings))
    return check_in_cloud(located, path, project, cache)


def check_in_cloud(located: Located, path: Path, project: str | None, cache: CodeCache) -> CheckedSpec:
    """Plan a spec for what it is written for, and on VMs what Vertex AI refuses, unless it only lacks an account."""
    spec, wanted = located.spec, target_of(located.spec)
    checked = check_target(located, path, wanted, project, cache)
    lacks_account = bool(spec.secrets or spec.vertex.tensorboard) and not spec.identity.service_account
    if checked.plan or wanted != "vertex" or lacks_account:
        return checked
    on_vms = check_target(located, path, "vm", project, cache)
    if on_vms.plan is None:
        return checked
    refused = tuple(replace(problem, text=f"runs on VMs only: {problem.text}", hint="") for problem in checked.problems)
    return replace(on_vms, warnings=(*refused, *on_vms.warnings))


def target_of(spec: JobSpec) -> Target:
    """Return the target of a spec in the cloud: vm if it has settings that only VMs have, else vertex."""
    of_vms = spec.vm != Vm() or spec.zones or spec.machine.local_ssds or spec.identity.subnetwork
    return "vm" if of_vms and spec.vertex == Vertex() else "vertex"


def check_target(located: Located, path: Path, target: Target, project: str | None, cache: CodeCache) -> CheckedSpec:
    """Plan a spec for one target."""
    spec = located.spec
    training = target != "vm" or spec.run != Run() or bool(spec.output or spec.secrets)  # else a workplace VM
    options = GatherOptions(training=training, project_id=project, stand_in=STAND_IN, cache=cache)
    beside = folder_of(path)
    try:
        located, settings = with_defaults(located, target, path, beside, training=training)
        with located.naming_places():
            inputs = collect_context(located, target, path, beside, settings, options)
        spec = inputs.spec
        has_place = bool(spec.regions is not None or spec.zones or inputs.context.default_regions)
        missing_region = target != "local" and not has_place  # a launch from here would be refused
        if missing_region:
            inputs = replace(inputs, spec=replace(spec, regions="any"))
        plan = planned(inputs)
    except LaunchError as error:
        return CheckedSpec(path=str(path), target=target, problems=tuple(findings_of(error, located.source)))
    texts = (*(["no region is set; checked for all regions that have the machine"] * missing_region), *plan.warnings)
    return CheckedSpec(
        path=str(path), target=target, plan=plan, warnings=tuple(warning(text, located) for text in texts)
    )


def findings_of(error: LaunchError, source: str) -> Iterator[SpecFinding]:
    """Yield the problems of an error, each with its position; `source` is the spec."""
    for problem in error.problems:
        file, line = split(f"{problem.where}: ", source)[:2]
        yield SpecFinding(file=file, line=line, text=problem.what, hint=problem.fix)
    if not error.problems:
        file, line, text = split(error.problem, source)
        yield SpecFinding(file=file, line=line, text=text, hint=error.hint)


def warning(text: str, located: Located) -> SpecFinding:
    """Return a warning with its position. The text begins with the position, or with a field, whose position counts."""
    file, line, rest = split(text, located.source)
    if line is None and (field := FIELD.match(text)):
        file, line, _ = split(f"{located.place(field[0])}: ", located.source)
    return SpecFinding(file=file, line=line, text=rest)


def split(text: str, source: str) -> tuple[str, int | None, str]:
    """Split `FILE:LINE: TEXT`; without a position, the file is `source` and the line None."""
    match = POSITION.match(text)
    return (match["file"], int(match["line"]), text[match.end() :]) if match else (source, None, text)
