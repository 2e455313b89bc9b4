"""Read the packages that a job needs: from a requirements file, a pyproject.toml, a uv.lock or an environment.yml.

An image is built from the text of the first two alone, so references to files on this machine are rejected before the
build. Of all four, the plan needs what they ask of PyTorch's build: versions, indexes, hashes, and the packages that
are built for a release of it. uv and conda are not needed here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from launcher.images.source_files import File
from launcher.inputs.python_files import normalised
from launcher.inputs.python_project import dependency_lists, invalid, read_project, read_text, read_toml
from launcher.plan.model import LocalProject, Packages, Requirement
from launcher.plan.recipe import BASE_PYTHON, nearest_python
from launcher.plan.validate import PACKAGES
from launcher.spec.secret_detection import known_secret

NAMED: Final = ("torch", "torchvision", "torchaudio", "triton", "xformers", "flash-attn")
"""PyTorch and the packages whose binaries fit one release of it."""
LOGGERS: Final = frozenset(name for names in PACKAGES.values() for name in names)
COMMENT = re.compile(r"(^|\s+)#.*$")
"""pip's own syntax of a requirements file (pip, req_file.py), as is OPTION."""
OPTION = re.compile(r"(^|\s)-")
ADDRESS = re.compile(r"[\w.+-]+://")
VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
LOCAL = re.compile(r"(?P<editable>-e|--editable)?[\s=]*(?:file:)?(?P<folder>[^\s\[:]+)(?:\[(?P<extras>[^\]]*)\])?")
"""A project of this machine: `-e .`, `.[train]`, `-e libs/core`."""
INCLUDE = re.compile(r"(?:-r|--requirement)[\s=]*(\S+)")
NOT_SENT = re.compile(
    r"(-e|--editable|-c|--constraint|-f|--find-links)(?![\w-])[\s=]*+(?!([\w.]+\+)?(https?|ssh|git)://)"
    r"|\.{0,2}/|([\w.]+\+)?file:|.+@\s*([\w.]+\+)?file:|[^:\s]+\.(whl|zip|tar\.gz|tar\.bz2|tgz)(\s|;|\[|$)"
)
"""A file or folder on this machine, with or without an option before it. URLs don't match."""
INDEX = re.compile(r"(?:-i|--(?:extra-)?index-url)[\s=]+\S*download\.pytorch\.org/whl/(cpu|cu\d+)\b")
CONDA_CUDA = re.compile(
    r"(?:(?:pytorch-cuda|cudatoolkit|cuda-version)\s*=+\s*|pytorch(?:-gpu)?[\s=].*[=_]cuda)(\d\d)\.?(\d)(?!\d)"
)
"""Matches what pins the CUDA of conda's PyTorch: a package, or the name of a build (py3.11_cuda12.4_cudnn9.1)."""
CONDA_CPU = re.compile(r"cpuonly|pytorch-cpu|pytorch[\s=].*[=_]\s*cpu")
GIT = re.compile(r"(^|\s|@)\s*git\+")


class Requirements(NamedTuple):
    """The content of `image.requirements`."""

    packages: Packages = Packages()
    """What it asks of the image's recipe."""
    text: str = ""
    """What pip installs: a requirements file with its includes, or the dependencies of a pyproject.toml."""
    files: tuple[File, ...] = ()
    """What uv or conda installs: uv.lock with its pyproject.toml, or environment.yml."""


class Line(NamedTuple):
    """A line, and the file and number where it stands."""

    path: Path
    number: int
    text: str
    project: Path | None = None
    """A folder with a project that the line installs (`-e .`); the lines after it are its dependencies."""

    @property
    def place(self) -> str:
        """Return FILE:LINE."""
        return f"{self.path}:{self.number}"


def read_requirements(path: Path, names: Sequence[str] = (), python: str | None = None) -> Requirements:
    """Read a file, with the extras and dependency groups `names`.

    `python` is that of a custom base, or empty if it is unknown; None: launch's own base.

    Raises UsageError: it can't be read, contains a password, or refers to a file on this machine.
    """
    if path.suffix in (".yml", ".yaml"):
        return Requirements(of_conda(path), files=(File("environment.yml", path),))
    if path.name == "uv.lock":
        packages, project = of_uv_lock(path, names, python), path.with_name("pyproject.toml")
        if not project.is_file():
            raise invalid(
                f"uv sync needs a pyproject.toml beside {path}",
                f"For packages without a project: uv export --frozen > {path.with_name('requirements.txt')}",
            )
        return Requirements(packages, files=(File("pyproject.toml", project), File("uv.lock", path)))
    requires: Any = ""
    if path.name == "pyproject.toml":
        lines, project_table = [*of_pyproject(path, names)], read_toml(path).get("project", {})
        requires = project_table.get("requires-python", "")
        requires = requires if isinstance(requires, str) else ""
    else:
        lines = [*with_included(path, ())]
    packages = of_lines(lines, nearest_python(requires) if python is None else python)
    return Requirements(replace(packages, requires_python=requires), "".join(f"{line.text}\n" for line in lines))


def split_names(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the file and the extras or dependency groups of image.requirements: uv.lock[train,gpu]."""
    match = re.fullmatch(r"(.*?(?:uv\.lock|pyproject\.toml))\[([^\[\]]+)\]", text)
    return (match[1], tuple(name.strip() for name in match[2].split(","))) if match else (text, ())


# --- The text that pip installs -------------------------------------------------------------------------------------


def of_pyproject(path: Path, names: Sequence[str], *, own: bool = True) -> Iterator[Line]:
    """Yield `[project] dependencies` (unless `own` is false) and those of the extras and dependency groups `names`, one
    per line, from where `[tool.uv.sources]` says. Raises UsageError."""
    from packaging.requirements import Requirement

    data = read_toml(path)
    tool, lines = data.get("tool", {}), read_text(path).splitlines()
    named = tool.get("uv", {}).get("sources", {}).items()
    sources = {normalised(name): entry for name, entry in named if isinstance(entry, dict)}
    listed, files = dependency_lists(data)

    def of_name(name: str, above: tuple[str, ...]) -> Iterator[Line]:
        if name in above:
            raise invalid(f"{path}: {name} includes itself", "Remove the cycle.")
        for file in files.get(name, ()):
            yield from with_included(path.parent / file, ())
        for need in listed.get(name, ()):
            if isinstance(need, dict):  # of a dependency group
                yield from of_name(normalised(need["include-group"]), (*above, name))
            elif (extras := re.fullmatch(r"([\w.-]+)\s*\[([^\]]+)\]", need)) and normalised(extras[1]) == own_name:
                for extra in extras[2].split(","):
                    yield from of_name(normalised(extra.strip()), (*above, name))
            else:
                number = next((number for number, line in enumerate(lines, 1) if need in line), 1)
                check_requirement(path, number, need)
                package = normalised(Requirement(need).name)
                entry = sources.get(package, {})
                if entry.get("workspace") or "path" in entry:
                    folder = source_folder(path, package, entry, tool.get("uv", {}).get("workspace", {}))
                    yield from of_local_project(Line(path, number, "", folder), (), ())
                    continue
                text = with_source(need, entry)
                check_line(path, number, text)
                yield Line(path, number, text)

    project = data.get("project")
    own_name = normalised(str(project.get("name", ""))) if isinstance(project, dict) else ""
    if own and "" not in listed and "" not in files:
        problem = f"{path} has no [project] dependencies"
        raise invalid(problem, "Name a requirements file instead.")
    for name in (*([""] if own else []), *map(normalised, names)):
        if name not in listed and name not in files:
            known = ", ".join(sorted({*listed, *files} - {""})) or "none"
            problem = f"{path} has no extra or dependency group {name}"
            raise invalid(problem, f"It has: {known}")
        yield from of_name(name, ())


def with_source(text: str, entry: dict[str, Any]) -> str:
    """Return a requirement with its entry of [tool.uv.sources], which pip does not read: a repository or a URL.

    A source that only chooses PyTorch's index is left out: the plan chooses the build for the machine.
    """
    from packaging.requirements import Requirement

    if not entry.keys() & {"git", "url"}:
        return text
    need = Requirement(text)
    revision = next((f"@{entry[key]}" for key in ("rev", "tag", "branch") if key in entry), "")
    folder = f"#subdirectory={entry['subdirectory']}" if "subdirectory" in entry else ""
    address = f"git+{entry['git']}{revision}{folder}" if "git" in entry else entry["url"]
    extras = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
    return f"{need.name}{extras} @ {address}" + (f" ; {need.marker}" if need.marker else "")


def source_folder(path: Path, need: str, entry: dict[str, Any], workspace: dict[str, Any]) -> Path:
    """Return the folder of a package that [tool.uv.sources] finds on this machine: a path, or a member of the
    workspace. Raises UsageError: there is no such folder."""
    members = workspace.get("members", ()) if entry.get("workspace") else ()
    folders: list[Path] = [path.parent / entry["path"]] if "path" in entry else []
    folders += [folder for pattern in members for folder in sorted(path.parent.glob(pattern))]
    for folder in folders:
        project = folder / "pyproject.toml"
        if project.is_file() and normalised(read_toml(project).get("project", {}).get("name", "")) == need:
            return folder
    problem = f"{path}: [tool.uv.sources] has {need} on this machine, but no folder is that project"
    raise invalid(problem, "Remove the source, or put the project into the code.")


def with_included(path: Path, above: tuple[Path, ...]) -> Iterator[Line]:
    """Yield the file's lines. `-r OTHER` is replaced with that file's lines. Raises UsageError."""
    if path.resolve() in above:
        raise invalid(f"{path} includes itself", "Remove one of the -r lines.")
    text = read_text(path)
    lines = text.splitlines()
    for number, line in enumerate(lines.copy(), 1):
        bare = line.strip()
        if included := INCLUDE.match(bare):
            yield from with_included(path.parent / included[1], (*above, path.resolve()))
        elif (local := LOCAL.fullmatch(bare.partition(" #")[0].strip())) and (folder := project_at(path, local)):
            extras = [name.strip() for name in (local["extras"] or "").split(",") if name.strip()]
            yield from of_local_project(Line(path, number, "", folder), extras, (*above, path.resolve()))
            lines[number - 1] = ""
        else:
            check_line(path, number, bare)
            yield Line(path, number, line)
    for number, named in packages("\n".join(lines)):
        check_requirement(path, number, named)


def project_at(path: Path, local: re.Match[str]) -> Path | None:
    """Return the folder of a line that installs a project: relative to the file, else to the folder above it."""
    if not (local["editable"] or local["folder"].startswith(".")):
        return None
    folders = (parent / local["folder"] for parent in (path.parent, path.parent.parent))
    return next((f for f in folders if any((f / name).is_file() for name in ("pyproject.toml", "setup.py"))), None)


def of_local_project(line: Line, extras: Sequence[str], above: tuple[Path, ...]) -> Iterator[Line]:
    """Yield the line of a project of this machine, then its dependencies with those of its extras.

    Raises UsageError: it has no project that can be read, computes its dependencies, or must be compiled.
    """
    where, folder = line.place, line.project or Path()
    project = read_project(folder)
    if project is None:
        raise invalid(f"{where}: {folder} says no name of a project", "Name its packages instead.")
    if project.compiled:
        raise invalid(
            f"{where}: {project.name} has modules to compile ({', '.join(project.compiled[:3])}), and the image's code "
            "is not compiled",
            "Name a release of it that has wheels, or its repository (git+https://…); or its packages alone, if your "
            "run doesn't import these modules.",
        )
    yield line
    pyproject = folder / "pyproject.toml"
    if pyproject.is_file() and "project" in read_toml(pyproject):
        yield from of_pyproject(pyproject, extras, own=project.requires != ())
        return
    needs, computed = project.requires, folder / "requirements.txt"
    if needs is None and computed.is_file() and computed.name in read_text(folder / "setup.py"):
        yield from with_included(computed, above) if computed.resolve() not in above else ()
        needs = ()
    if needs is None or not {*extras} <= project.extras.keys():
        what = "computes its dependencies" if needs is None else f"has no extra {', '.join(extras)}"
        raise invalid(f"{where}: {project.name} {what}", "Name the packages instead.")
    for need in (*needs, *(need for extra in extras for need in project.extras[extra])):
        check_requirement(line.path, line.number, need)
        check_line(line.path, line.number, need)
        yield Line(line.path, line.number, need)


def packages(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, requirement) as pip parses a file's text, without comments and options."""
    joined, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        first = first or number
        bare = COMMENT.sub("", line)
        joined += bare.removesuffix("\\")
        if bare.endswith("\\"):
            continue
        if named := OPTION.split(joined, maxsplit=1)[0].strip():
            yield first, named
        joined, first = "", 0


def check_requirement(path: Path, number: int, named: str) -> None:
    """Check that pip can read a requirement. Raises UsageError."""
    from packaging.requirements import InvalidRequirement, Requirement

    if ADDRESS.match(named) or VARIABLE.search(named):  # pip fetches the URL and expands the build's variables
        return
    try:
        Requirement(named)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise invalid(
            f"{path}:{number}: {named!r} can't be read by pip: {reason}", "Write NAME, NAME==1.2 or NAME @ https://…"
        ) from error


def check_line(path: Path, number: int, line: str) -> None:
    """Reject references to this machine, and secrets: everyone who can pull the image can read the file.

    Raises UsageError.
    """
    if known_secret(line):
        raise invalid(
            f"{path}: line {number} contains a password or a token, which would stay in the image",
            "Take it out. A private package can travel as a wheel within image.code.",
        )
    if NOT_SENT.match(line):
        raise invalid(
            f"{path}:{number}: {line!r} names something on this machine, which the image doesn't have",
            "Put your own code in image.code. Packages must come from an index, or from git+https://…",
        )


# --- What it asks of the image --------------------------------------------------------------------------------------


def of_lines(lines: Sequence[Line], python: str) -> Packages:
    """Return what requirements ask for. An index counts wherever it stands, as for pip; the last one wins."""
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Parsed

    named, loggers = list[Requirement](), list[str]()
    for number, text in packages("".join(f"{line.text}\n" for line in lines)):
        try:
            parsed = Parsed(text)
        except InvalidRequirement:  # a URL without a name, or variables that pip expands
            continue
        name, marker = normalised(parsed.name), str(parsed.marker or "")
        # Where the image's Python is unknown, a marker that depends on it holds.
        pythons = [python] if python else [f"3.{minor}" for minor in range(10, 16)]
        arches = [arch for arch in ARCHES if not marker or any(holds(marker, each, arch) for each in pythons)]
        if arches and name in LOGGERS:
            loggers.append(name)
        if arches and name in NAMED:
            # A release has no build (2.9.1), a wheel of PyTorch's index has one (2.9.1+cu128).
            versions = [(each.operator, *each.version.partition("+")) for each in parsed.specifier]
            named.append(
                Requirement(
                    name=name,
                    specifier=",".join(f"{operator}{release}" for operator, release, *_ in versions),
                    build=next((build for *_, plus, build in versions if plus), ""),
                    url=parsed.url or "",
                    text=text,
                    where=lines[number - 1].place,
                    arch="" if len(arches) == len(ARCHES) else arches[0],
                )
            )
    indexes = [(match[1], line.place) for line in lines if (match := INDEX.match(line.text.strip()))]
    index_build, index_where = indexes[-1] if indexes else ("", "")
    bare = [line.text.partition("#")[0] for line in lines]
    return Packages(
        named=tuple(named),
        index_build=index_build,
        index_where=index_where,
        hashed=any("--hash=" in text or text.strip() == "--require-hashes" for text in bare),
        git=any(GIT.search(text) for text in bare),
        loggers=tuple(loggers),
        projects=tuple(
            LocalProject(folder=str(line.project.resolve()), where=line.place) for line in lines if line.project
        ),
    )


def names_and_markers(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each package that a requirements file's text asks for, and its marker, which may be empty."""
    from packaging.requirements import InvalidRequirement, Requirement

    for _, named in packages(text):
        with suppress(InvalidRequirement):  # a URL without a name
            need = Requirement(named)
            yield need.name, str(need.marker or "")


Arch = Literal["", "amd64", "arm64"]
"""An architecture of machines; empty: every one."""
ARCHES: Final[dict[Arch, str]] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures of machines as images name them, and as Linux does (platform_machine)."""


def holds_here(marker: str, version: Sequence[int]) -> bool:
    """Return whether a marker (maybe empty) holds for a Python of this machine, (3, 12, 1). Raises packaging's
    InvalidMarker."""
    from packaging.markers import Marker

    major, minor, *_ = version
    release = ".".join(map(str, version))
    return not marker or Marker(marker).evaluate(
        {"python_version": f"{major}.{minor}", "python_full_version": release, "implementation_version": release}
    )


def holds(marker: str, python: str, arch: Arch) -> bool:
    """Return whether a marker (`sys_platform == 'linux'`) holds in an image with a Python (`3.12`) and an architecture
    (`amd64`). Raises packaging's InvalidMarker."""
    from packaging.markers import Marker

    full = f"{python}.99"  # the newest patch release, whichever it is
    return Marker(marker).evaluate(
        {
            "implementation_name": "cpython",
            "implementation_version": full,
            "os_name": "posix",
            "platform_machine": ARCHES[arch],
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": full,
            "python_version": python,
            "sys_platform": "linux",
            "extra": "",
        }
    )


# --- uv.lock --------------------------------------------------------------------------------------------------------


Package = dict[str, Any]
LOCAL_SOURCES: Final = ("virtual", "editable", "directory", "path")
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


def of_uv_lock(path: Path, names: Sequence[str], python: str | None) -> Packages:
    """Return what `uv sync` installs in an image: exact versions, and each package's index. `names` are extras and
    dependency groups; `python` is the image's, or empty or None if it is unknown or launch's own. Raises UsageError."""
    lock = read_toml(path, "Create it with uv lock.")
    locked: list[Package] = lock.get("package", [])
    requires = lock.get("requires-python", "")
    sync = selected(path, lock, locked, names)
    python = python or nearest_python(requires) or BASE_PYTHON
    by_arch = {arch: reached(locked, sync, python, arch) for arch in ARCHES}
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    installed, named, projects = list[Package](), list[Requirement](), list[LocalProject]()
    for package in locked:
        arches = [arch for arch, ids in by_arch.items() if id(package) in ids]
        if not arches:
            continue
        installed.append(package)
        projects += local_projects(path, package)
        if package["name"] in NAMED:
            version, _, build = package.get("version", "").partition("+")
            index = re.search(r"/whl/(cpu|cu\d+)", package.get("source", {}).get("registry", ""))
            places = [n for n, line in enumerate(lines, 1) if line == f'name = "{package["name"]}"']
            its_own = (n for n in places if lines[n : n + 1] == [f'version = "{package.get("version")}"'])
            named.append(
                Requirement(
                    name=package["name"],
                    specifier=f"=={version}",
                    build=build or (index[1] if index else ""),
                    text=f"{package['name']} {package.get('version', '')}",
                    where=f"{path}:{next(its_own, 1)}",
                    arch="" if len(arches) == len(ARCHES) else arches[0],
                )
            )
    return Packages(
        tool="uv",
        named=tuple(named),
        hashed=True,
        git=any("git" in package.get("source", {}) for package in installed),
        loggers=tuple(package["name"] for package in installed if package["name"] in LOGGERS),
        extras=sync.extras,
        groups=sync.groups,
        projects=tuple(projects),
        requires_python=requires,
    )


def selected(path: Path, lock: dict[str, Any], packages: Sequence[Package], names: Sequence[str]) -> Sync:
    """Return the projects to install: the one beside the lock, else the workspace's members, else every package.

    Raises UsageError: a name is neither an extra nor a group, or two of them conflict.
    """
    members = lock.get("manifest", {}).get("members", [])
    roots = [package for package in packages if "." in [package.get("source", {}).get(kind) for kind in LOCAL_SOURCES]]
    roots = roots or [package for package in packages if package["name"] in members] or list(packages)
    known_extras = {name for root in roots for name in root.get("optional-dependencies", {})}
    known_extras |= {name for root in roots for name in root.get("metadata", {}).get("provides-extras", [])}
    known_groups = {name for root in roots for name in root.get("dev-dependencies", {})}
    wanted = [normalised(name) for name in names]
    for name in wanted:
        if name not in known_extras | known_groups:
            raise invalid(
                f"{path} has no extra or dependency group {name}",
                f"It has: {', '.join(sorted(known_extras | known_groups)) or 'none'}",
            )
    for conflict in lock.get("conflicts", []):
        both = [item.get("extra", item.get("group")) for item in conflict]
        if len(clash := [name for name in wanted if name in both]) > 1:
            raise invalid(
                f"{' and '.join(clash)} conflict ([tool.uv] conflicts)", f"Use one of them: {path.name}[{clash[0]}]"
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
    local = next((source[kind] for kind in LOCAL_SOURCES if kind in source and kind != "virtual"), None)
    if local in (None, "."):
        return
    folder = (path.parent / local).resolve()
    if not folder.is_dir():
        raise invalid(
            f"{path}: {package['name']} is at {local} on this machine, which the image doesn't have",
            "Put your own code into image.code; packages come from an index, or from git+https://…",
        )
    yield LocalProject(folder=str(folder), where=f"{path}: {package['name']}", name=package["name"])


# --- environment.yml ------------------------------------------------------------------------------------------------


def of_conda(path: Path) -> Packages:
    """Return what an environment.yml names, in `dependencies` and its `pip` list. Raises UsageError."""
    import yaml

    text = read_text(path)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise invalid(f"{path} isn't YAML: {error}") from error
    entries = data.get("dependencies") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise invalid(f"{path} has no dependencies", "Name a conda environment.yml.")
    numbers = {line.strip().removeprefix("- ").strip("\"'"): n for n, line in enumerate(text.splitlines(), 1)}
    pip = [line for entry in entries if isinstance(entry, dict) for line in entry.get("pip", [])]
    lines = [Line(path, numbers.get(requirement, 1), requirement) for requirement in pip]
    for line in lines:
        check_line(*line[:3])
    pip_packages, builds, loggers = of_lines(lines, ""), [], []
    for entry in (entry for entry in entries if isinstance(entry, str)):
        package = entry.rpartition("::")[2].strip()
        if (name := normalised(re.split(r"[\s=<>!~\[]", package)[0])) in LOGGERS:
            loggers.append(name)
        cuda = CONDA_CUDA.match(package)
        if cuda or CONDA_CPU.match(package):
            builds.append((f"cu{cuda[1]}{cuda[2]}" if cuda else "cpu", f"{path}:{numbers.get(entry, 1)}: {entry}"))
    index_build, index_where = pip_packages.index_build, pip_packages.index_where
    if builds and not any(requirement.name == "torch" for requirement in pip_packages.named):
        index_build, index_where = builds[0]
    return replace(
        pip_packages,
        tool="conda",
        loggers=(*loggers, *pip_packages.loggers),
        index_build=index_build,
        index_where=index_where,
    )
