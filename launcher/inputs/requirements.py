"""Read the packages that a job needs, from a requirements file or a pyproject.toml, as one text.

The image is built from that text alone. References to files on this machine are therefore rejected before the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import UsageError
from launcher.inputs.image_modules import normalised
from launcher.inputs.python_project import FIELD, dependency_lists, read, read_project, read_toml

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


class Line(NamedTuple):
    """A line, and the file and number where it stands."""

    path: Path
    number: int
    text: str
    project: Path | None = None
    """A folder with a project that the line installs (`-e .`); the lines after it are its dependencies."""


def split_names(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the file and the extras or dependency groups of image.requirements: uv.lock[train,gpu]."""
    match = re.fullmatch(r"(.*?(?:uv\.lock|pyproject\.toml))\[([^\[\]]+)\]", text)
    return (match[1], tuple(name.strip() for name in match[2].split(","))) if match else (text, ())


def requirements(path: Path, names: Sequence[str] = ()) -> str:
    """Return the text of a requirements file with its includes, or of a pyproject.toml's dependencies with those of
    the extras and dependency groups `names`.

    Raises:
        UsageError: it can't be read, contains a password, or refers to a file on this machine.
    """
    return "".join(f"{line.text}\n" for line in located(path, names))


def located(path: Path, names: Sequence[str] = ()) -> list[Line]:
    """Return the same text as lines. Raises UsageError."""
    return list(of_pyproject(path, names) if path.name == "pyproject.toml" else with_included(path, ()))


def requires_python(path: Path) -> str:
    """Return `[project] requires-python` of a pyproject.toml; empty if the file has none. Raises UsageError."""
    project = read_toml(path).get("project", {}) if path.name == "pyproject.toml" else {}
    requires = project.get("requires-python", "")
    return requires if isinstance(requires, str) else ""


def of_pyproject(path: Path, names: Sequence[str], *, own: bool = True) -> Iterator[Line]:
    """Yield `[project] dependencies` (unless `own` is false) and those of the extras and dependency groups `names`, one
    per line, from where `[tool.uv.sources]` says. Raises UsageError."""
    from packaging.requirements import Requirement

    data = read_toml(path)
    tool, lines = data.get("tool", {}), read(path).splitlines()
    named = tool.get("uv", {}).get("sources", {}).items()
    sources = {normalised(name): entry for name, entry in named if isinstance(entry, dict)}
    listed, files = dependency_lists(data)

    def of_name(name: str, above: tuple[str, ...]) -> Iterator[Line]:
        if name in above:
            raise UsageError(f"{FIELD}: {path}: {name} includes itself", "Remove the cycle.", field=FIELD)
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
                check(path, number, text)
                yield Line(path, number, text)

    project = data.get("project")
    own_name = normalised(str(project.get("name", ""))) if isinstance(project, dict) else ""
    if own and "" not in listed and "" not in files:
        problem = f"{FIELD}: {path} has no [project] dependencies"
        raise UsageError(problem, "Name a requirements file instead.", field=FIELD)
    for name in (*([""] if own else []), *map(normalised, names)):
        if name not in listed and name not in files:
            known = ", ".join(sorted({*listed, *files} - {""})) or "none"
            problem = f"{FIELD}: {path} has no extra or dependency group {name}"
            raise UsageError(problem, f"It has: {known}", field=FIELD)
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
    problem = f"{FIELD}: {path}: [tool.uv.sources] has {need} on this machine, but no folder is that project"
    raise UsageError(problem, "Remove the source, or put the project into the code.", field=FIELD)


def with_included(path: Path, above: tuple[Path, ...]) -> Iterator[Line]:
    """Yield the file's lines. `-r OTHER` is replaced with that file's lines. Raises UsageError."""
    if path.resolve() in above:
        raise UsageError(f"{FIELD}: {path} includes itself", "Remove one of the -r lines.", field=FIELD)
    text = read(path)
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
            check(path, number, bare)
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
    where, folder = f"{FIELD}: {line.path}:{line.number}", line.project or Path()
    project = read_project(folder)
    if project is None:
        raise UsageError(f"{where}: {folder} says no name of a project", "Name its packages instead.", field=FIELD)
    if project.compiled:
        raise UsageError(
            f"{where}: {project.name} has modules to compile ({', '.join(project.compiled[:3])}), and the image's code "
            "is not compiled",
            "Name a release of it that has wheels, or its repository (git+https://…); or its packages alone, if your "
            "run doesn't import these modules.",
            field=FIELD,
        )
    yield line
    pyproject = folder / "pyproject.toml"
    if pyproject.is_file() and "project" in read_toml(pyproject):
        yield from of_pyproject(pyproject, extras, own=project.requires != ())
        return
    needs, computed = project.requires, folder / "requirements.txt"
    if needs is None and computed.is_file() and computed.name in read(folder / "setup.py"):
        yield from with_included(computed, above) if computed.resolve() not in above else ()
        needs = ()
    if needs is None or not {*extras} <= project.extras.keys():
        what = "computes its dependencies" if needs is None else f"has no extra {', '.join(extras)}"
        raise UsageError(f"{where}: {project.name} {what}", "Name the packages instead.", field=FIELD)
    for need in (*needs, *(need for extra in extras for need in project.extras[extra])):
        check_requirement(line.path, line.number, need)
        check(line.path, line.number, need)
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


def names_and_markers(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each package that a requirements file's text asks for, and its marker, which may be empty."""
    from packaging.requirements import InvalidRequirement, Requirement

    for _, named in packages(text):
        with suppress(InvalidRequirement):  # a URL without a name
            need = Requirement(named)
            yield need.name, str(need.marker or "")


def check_requirement(path: Path, number: int, named: str) -> None:
    """Check that pip can read a requirement. Raises UsageError."""
    from packaging.requirements import InvalidRequirement, Requirement

    if ADDRESS.match(named) or VARIABLE.search(named):  # pip fetches the URL and expands the build's variables
        return
    try:
        Requirement(named)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{FIELD}: {path}:{number}: {named!r} can't be read by pip: {reason}",
            "Write NAME, NAME==1.2 or NAME @ https://…",
            field=FIELD,
        ) from error


def check(path: Path, number: int, line: str) -> None:
    """Reject references to this machine, and secrets: everyone who can pull the image can read the file.

    Raises UsageError.
    """
    from launcher.spec.secret_detection import known_secret

    if known_secret(line):
        raise UsageError(
            f"{FIELD}: {path}: line {number} contains a password or a token, which would stay in the image",
            "Take it out. A private package can travel as a wheel within image.code.",
            field=FIELD,
        )
    if NOT_SENT.match(line):
        raise UsageError(
            f"{FIELD}: {path}:{number}: {line!r} names something on this machine, which the image doesn't have",
            "Put your own code in image.code. Packages must come from an index, or from git+https://…",
            field=FIELD,
        )
