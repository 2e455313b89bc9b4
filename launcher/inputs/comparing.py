"""Compare specs and their code with those of a git commit: changes of the requests and the costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from launch_train.common.scratch import temporary_folder
from launcher.errors import UsageError
from launcher.inputs import git
from launcher.inputs.checking import CheckedSpec, SpecFinding, check_specs, find_specs
from launcher.plan.changes import PlanChanges, compare_plans
from launcher.plan.model import Target

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
    inside = [path_in_repository(path, top) for path in specs]

    def shown(text: str) -> str:
        return text.replace(f"{top}/", "").replace(str(top), ".")

    checked = check_specs([top / name for name in inside], target=target, project=project)
    return {name: with_paths(spec, name, shown) for name, spec in zip(inside, checked, strict=True)}


def with_paths(spec: CheckedSpec, path: str, shown: Callable[[str], str]) -> CheckedSpec:
    """Return a result with the spec's path in the repository, and with `shown` applied to its texts."""

    def finding(problem: SpecFinding) -> SpecFinding:
        return replace(problem, file=shown(problem.file), text=shown(problem.text), hint=shown(problem.hint))

    return replace(
        spec, path=path, problems=tuple(map(finding, spec.problems)), warnings=tuple(map(finding, spec.warnings))
    )


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
    """Compare both versions of a spec."""
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
