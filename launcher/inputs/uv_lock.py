"""Read which of a uv.lock's packages `uv sync` installs on a job's machine. uv itself is not needed here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher.errors import UsageError
from launcher.inputs.image_modules import normalised
from launcher.inputs.markers import ARCHES, Arch, holds
from launcher.inputs.python_project import FIELD, read_toml
from launcher.plan.model import LocalProject
from launcher.plan.torch_build import BASE_PYTHON, nearest_python

Package = dict[str, Any]
LOCAL: Final = ("virtual", "editable", "directory", "path")
"""Kinds of sources that are on this machine."""
EXTRA: Final = re.compile(r"extra (==|!=) '([^']+)'")
"""A condition on the project's own extras and groups: uv writes their names as extra-6-my-gpt-cpu."""
TRUE, FALSE = "os_name == 'posix'", "os_name == ''"


class Sync(NamedTuple):
    """The projects that `uv sync` installs, with their extras and dependency groups."""

    roots: Sequence[Package]
    extras: tuple[str, ...]
    groups: tuple[str, ...]
    """Named by the spec."""
    default_groups: tuple[str, ...]


class Locked(NamedTuple):
    """The packages of a lock that an image gets."""

    packages: list[tuple[Package, Arch]]
    """Each package, and the one architecture that it is for; empty: every one."""
    projects: list[LocalProject]
    """Of this machine, besides the one beside the lock."""
    requires_python: str
    extras: tuple[str, ...]
    groups: tuple[str, ...]


def read_lock(path: Path, names: Sequence[str], python: str | None) -> Locked:
    """Return what a uv.lock installs in an image. `names` are extras and dependency groups; `python` is the image's,
    or empty or None if it is unknown or launch's own. Raises UsageError."""
    lock = read_toml(path, "Create it with uv lock.")
    packages: list[Package] = lock.get("package", [])
    requires = lock.get("requires-python", "")
    sync = selected(path, lock, packages, names)
    python = python or nearest_python(requires) or BASE_PYTHON
    by_arch = {arch: reached(packages, sync, python, arch) for arch in ARCHES}
    installed: list[tuple[Package, Arch]] = []
    projects: list[LocalProject] = []
    for package in packages:
        arches = [arch for arch, ids in by_arch.items() if id(package) in ids]
        if arches:
            projects += local_projects(path, package)
            installed.append((package, "" if len(arches) == len(ARCHES) else arches[0]))
    return Locked(installed, projects, requires, sync.extras, sync.groups)


def selected(path: Path, lock: dict[str, Any], packages: Sequence[Package], names: Sequence[str]) -> Sync:
    """Return the projects to install: the one beside the lock, else the workspace's members, else every package.

    Raises UsageError: a name is neither an extra nor a group, or two of them conflict.
    """
    members = lock.get("manifest", {}).get("members", [])
    roots = [package for package in packages if "." in [package.get("source", {}).get(kind) for kind in LOCAL]]
    roots = roots or [package for package in packages if package["name"] in members] or list(packages)
    known_extras = {name for root in roots for name in root.get("optional-dependencies", {})}
    known_extras |= {name for root in roots for name in root.get("metadata", {}).get("provides-extras", [])}
    known_groups = {name for root in roots for name in root.get("dev-dependencies", {})}
    wanted = [normalised(name) for name in names]
    for name in wanted:
        if name not in known_extras | known_groups:
            raise UsageError(
                f"{FIELD}: {path} has no extra or dependency group {name}",
                f"It has: {', '.join(sorted(known_extras | known_groups)) or 'none'}",
                field=FIELD,
            )
    for conflict in lock.get("conflicts", []):
        both = [item.get("extra", item.get("group")) for item in conflict]
        if len(clash := [name for name in wanted if name in both]) > 1:
            raise UsageError(
                f"{FIELD}: {' and '.join(clash)} conflict ([tool.uv] conflicts)",
                f"Use one of them: {path.name}[{clash[0]}]",
                field=FIELD,
            )
    project = path.with_name("pyproject.toml")
    default = read_toml(project).get("tool", {}).get("uv", {}).get("default-groups", ()) if project.is_file() else ()
    return Sync(
        roots,
        tuple(name for name in wanted if name in known_extras),
        tuple(name for name in wanted if name not in known_extras),
        tuple(sorted((known_groups if default == "all" else known_groups & {*map(normalised, default)}) - {"dev"})),
    )


def reached(packages: Sequence[Package], sync: Sync, python: str, arch: Arch) -> set[int]:
    """Return the ids of the packages that the projects need on Linux, directly or through others."""
    by_name = defaultdict[str, list[Package]](list)
    for package in packages:
        by_name[package["name"]].append(package)
    groups = (*sync.groups, *sync.default_groups)
    active = {
        f"{kind}-{len(root['name'])}-{root['name']}-{name}"
        for root in sync.roots
        for kind, names in (("extra", sync.extras), ("group", groups))
        for name in names
    }

    @cache
    def applies(marker: str) -> bool:
        def decided(match: re.Match[str]) -> str:
            return TRUE if (match[2] in active) == (match[1] == "==") else FALSE

        return holds(EXTRA.sub(decided, marker), python, arch)

    waiting: list[tuple[Package, str, str]] = []
    for root in sync.roots:
        waiting += [(root, "dependencies", "")]
        waiting += [(root, "optional-dependencies", name) for name in sync.extras]
        waiting += [(root, "dev-dependencies", name) for name in groups]
    seen = set[tuple[int, str, str]]()
    while waiting:
        package, kind, part = waiting.pop()
        if (id(package), kind, part) in seen:
            continue
        seen.add((id(package), kind, part))
        needs = package.get(kind, ()) if kind == "dependencies" else package.get(kind, {}).get(part, ())
        for need in needs:
            if not applies(need.get("marker", TRUE)):
                continue
            for target in by_name[need["name"]]:
                if all(need.get(key, target.get(key)) == target.get(key) for key in ("version", "source")):
                    waiting.append((target, "dependencies", ""))
                    waiting += [(target, "optional-dependencies", extra) for extra in need.get("extra", ())]
    return {key for key, _, _ in seen}


def local_projects(path: Path, package: Package) -> Iterator[LocalProject]:
    """Yield the project that a locked package is, if it is a folder of this machine: its files are the image's code.

    Raises UsageError: it is a file, or does not exist.
    """
    source = package.get("source", {})
    local = next((source[kind] for kind in LOCAL if kind in source and kind != "virtual"), None)
    if local in (None, "."):
        return
    folder = (path.parent / local).resolve()
    if not folder.is_dir():
        raise UsageError(
            f"{FIELD}: {path}: {package['name']} is at {local} on this machine, which the image doesn't have",
            "Put your own code into image.code; packages come from an index, or from git+https://…",
            field=FIELD,
        )
    yield LocalProject(folder=str(folder), where=f"{path}: {package['name']}", name=package["name"])
