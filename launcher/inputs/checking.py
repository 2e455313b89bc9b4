"""Check specs offline: plan each as a dry run does, collect its problems, and compare it with a commit's version."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError, UsageError
from launcher.inputs import git
from launcher.inputs.code_files import NEVER, CodeCache, is_run_folder
from launcher.inputs.gather import GatherOptions, collect_context, folder_of, refuse_python, with_defaults
from launcher.inputs.planning import planned
from launcher.plan.changes import PlanChanges, compare_plans
from launcher.plan.model import Plan, Target
from launcher.spec.models import JobSpec, Run, Vertex, Vm
from launcher.spec.project_file import NAME as PROJECT_FILE
from launcher.spec.reader import Located, Override, read_located

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
            (specs if file == path or has_spec_section(file) else others)[file] = None
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


def has_spec_section(file: Path) -> bool:
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
        bucket = Override("output", f"gs://{project or STAND_IN}-launch/runs", located.place("output"))
        cloud = check_in_cloud(located.changed([bucket]), path, project, cache)
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
        file, line = split_position(f"{problem.where}: ", source)[:2]
        yield SpecFinding(file=file, line=line, text=problem.what, hint=problem.fix)
    if not error.problems:
        file, line, text = split_position(error.problem, source)
        yield SpecFinding(file=file, line=line, text=text, hint=error.hint)


def warning(text: str, located: Located) -> SpecFinding:
    """Return a warning with its position. The text begins with the position, or with a field, whose position counts."""
    file, line, rest = split_position(text, located.source)
    if line is None and (field := FIELD.match(text)):
        file, line, _ = split_position(f"{located.place(field[0])}: ", located.source)
    return SpecFinding(file=file, line=line, text=rest)


def split_position(text: str, source: str) -> tuple[str, int | None, str]:
    """Split `FILE:LINE: TEXT`; without a position, the file is `source` and the line None."""
    match = POSITION.match(text)
    return (match["file"], int(match["line"]), text[match.end() :]) if match else (source, None, text)


# --- Against a commit -------------------------------------------------------------------------------------------------


Kind = Literal["new", "removed", "changed", "unchanged"]


class SpecChange(Struct, frozen=True, kw_only=True):
    """A spec that exists in the working tree, in the commit, or in both."""

    path: str
    """Relative to the repository; of a removed spec, its former path."""
    kind: Kind
    renamed_from: str = ""
    before: CheckedSpec | None = None
    """None: a new spec."""
    after: CheckedSpec | None = None
    """None: a removed spec."""
    changes: PlanChanges = PlanChanges()
    """Empty if either side is refused."""


def compare_specs(
    paths: Sequence[Path], ref: str, *, target: Target | None = None, project: str | None = None
) -> list[SpecChange]:
    """Compare the specs that `paths` name with those of a commit; the working tree is not touched.

    Raises UsageError: `paths` are not in one git repository, `ref` is not a commit of it, or there is no spec.
    """
    top = common_checkout(paths)
    with temporary_folder("check") as folder:
        copy = Path(os.path.realpath(folder))
        git.export_commit(top, ref, copy)
        former = [copy / path_in_repository(path, top) for path in paths]
        there = [path for path in former if path.exists()]
        here = [path for path, old in zip(paths, former, strict=True) if path.exists() or not old.exists()]
        before = check_by_path(find_specs(there).specs if there else (), copy, target, project)
        after = check_by_path(find_specs(here).specs if here else (), top, target, project)
    if not before and not after:
        raise UsageError(f"no spec found in {', '.join(map(str, paths))}", "Name spec files or a folder.")
    return pair_and_compare(before, after)


def common_checkout(paths: Sequence[Path]) -> Path:
    """Return the root of the git repository that has all paths. Raises UsageError."""
    tops = {git.checkout_of(os.path.realpath(path if path.is_dir() else path.parent)) for path in paths}
    if len(tops) != 1 or None in tops:
        raise UsageError(
            f"{', '.join(map(str, paths))}: not in one git repository, whose commit --against compares with",
            "Run it in a clone of your repository, or without --against.",
        )
    return Path(str(tops.pop()))


def path_in_repository(path: Path, top: Path) -> str:
    """Return a path relative to the repository; the last part may be a link."""
    real = Path(os.path.realpath(path)) if path.is_dir() else Path(os.path.realpath(path.parent), path.name)
    return real.relative_to(top).as_posix()


def check_by_path(
    specs: Iterable[Path], top: Path, target: Target | None, project: str | None
) -> dict[str, CheckedSpec]:
    """Check specs and return the results by path. All paths, also in findings, are relative to the repository."""

    def shown(text: str) -> str:
        return text.replace(f"{top}/", "").replace(str(top), ".")

    def finding(problem: SpecFinding) -> SpecFinding:
        return replace(problem, file=shown(problem.file), text=shown(problem.text), hint=shown(problem.hint))

    inside = [path_in_repository(path, top) for path in specs]
    results = check_specs([top / name for name in inside], target=target, project=project)
    return {
        name: replace(
            spec, path=name, problems=tuple(map(finding, spec.problems)), warnings=tuple(map(finding, spec.warnings))
        )
        for name, spec in zip(inside, results, strict=True)
    }


def pair_and_compare(before: Mapping[str, CheckedSpec], after: Mapping[str, CheckedSpec]) -> list[SpecChange]:
    """Pair the specs of both sides, by path and then by name, and compare them. The order is that of the working tree;
    removed specs follow."""
    renamed = find_renames(before, after)
    changes = []
    for path, now in after.items():
        was = before.get(renamed.get(path, path))
        changes.append(
            compare_versions(path, was, now, renamed.get(path, ""))
            if was
            else SpecChange(path=path, kind="new", after=now)
        )
    gone = [path for path in before if path not in after and path not in renamed.values()]
    return [*changes, *(SpecChange(path=path, kind="removed", before=before[path]) for path in gone)]


def find_renames(before: Mapping[str, CheckedSpec], after: Mapping[str, CheckedSpec]) -> dict[str, str]:
    """Return new path -> former path for each `name` that exactly one new and one removed spec have."""
    paths: list[dict[str, list[str]]] = []
    for specs, others in ((before, after), (after, before)):
        paths.append({})
        for path, checked in specs.items():
            if path not in others and checked.plan:
                paths[-1].setdefault(checked.plan.spec["name"], []).append(path)
    removed, added = paths
    return {added[name][0]: removed[name][0] for name in added if len(added[name]) == len(removed.get(name, ())) == 1}


def compare_versions(path: str, before: CheckedSpec, after: CheckedSpec, renamed_from: str) -> SpecChange:
    both = compare_plans(before.plan, after.plan) if before.plan and after.plan else PlanChanges()
    refusals = (before.problems, after.problems)
    is_changed = (
        both or (before.plan is None) != (after.plan is None) or (not after.plan and refusals[0] != refusals[1])
    )
    return SpecChange(
        path=path,
        kind="changed" if is_changed else "unchanged",
        renamed_from=renamed_from,
        before=before,
        after=after,
        changes=both,
    )
