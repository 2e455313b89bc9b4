"""Find what a requirements file asks of PyTorch's build: versions, indexes, hashes, packages that are built for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import UsageError
from launcher.plan.loggers import PACKAGES
from launcher.plan.model import Packages, Requirement
from launcher.workspace.requirements import FIELD, Line, located, packages, read

if TYPE_CHECKING:
    from packaging.requirements import Requirement as Parsed

NAMED = ("torch", "torchvision", "torchaudio", "triton", "xformers", "flash-attn")
"""PyTorch and the packages whose binaries fit one release of it."""
LOGGERS = frozenset(name for names in PACKAGES.values() for name in names)
INDEX = re.compile(r"(?:-i|--(?:extra-)?index-url)[\s=]+\S*download\.pytorch\.org/whl/(cpu|cu\d+)\b")
GIT = re.compile(r"(^|\s|@)\s*git\+")
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
"""The part of a marker's environment that is the same in every image."""


def wanted_packages(path: Path) -> Packages:
    """Return what the file asks of the image's recipe. Raises UsageError: it can't be read."""
    if path.name == "uv.lock":
        return of_uv_lock(path)
    if path.suffix in (".yml", ".yaml"):
        return of_conda(path)
    return of_lines(located(path))


def of_lines(lines: Sequence[Line]) -> Packages:
    """Return what requirements ask for. An index counts wherever it stands, as for pip; the last one wins."""
    indexes = [(found[1], place(line)) for line in lines if (found := INDEX.match(line.text.strip()))]
    index = indexes[-1] if indexes else ("", "")
    bare = [line.text.partition("#")[0] for line in lines]
    return Packages(
        named=tuple(named(lines)),
        index_build=index[0],
        index_where=index[1],
        hashed=any("--hash=" in text or text.strip() == "--require-hashes" for text in bare),
        git=any(GIT.search(text) for text in bare),
        loggers=logger_packages(lines),
    )


def logger_packages(lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the clients of loggers among the requirements."""
    return tuple(name for parsed, _, _ in applied(lines) if (name := normalised(parsed.name)) in LOGGERS)


def place(line: Line) -> str:
    """Return FILE:LINE."""
    return f"{line.path}:{line.number}"


def named(lines: Sequence[Line]) -> Iterator[Requirement]:
    """Yield the requirements that concern PyTorch's build on Linux."""
    for parsed, text, line in applied(lines):
        if normalised(parsed.name) in NAMED:
            yield requirement(parsed, text, place(line))


def applied(lines: Sequence[Line]) -> Iterator[tuple[Parsed, str, Line]]:
    """Yield the requirements that an image installs, with their text and line."""
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Parsed

    for number, text in packages("".join(f"{line.text}\n" for line in lines)):
        try:
            parsed = Parsed(text)
        except InvalidRequirement:  # a URL without a name, or variables that pip expands
            continue
        if applies(parsed):
            yield parsed, text, lines[number - 1]


def requirement(parsed: Parsed, text: str, where: str) -> Requirement:
    """Return a requirement with its build apart: a release has no build (2.9.1), a wheel of PyTorch's index has one
    (2.9.1+cu128)."""
    builds = [one.version.partition("+")[2] for one in parsed.specifier if "+" in one.version]
    return Requirement(
        name=normalised(parsed.name),
        specifier=",".join(f"{one.operator}{one.version.partition('+')[0]}" for one in parsed.specifier),
        build=builds[0] if builds else "",
        url=parsed.url or "",
        text=text,
        where=where,
    )


def normalised(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def applies(parsed: Parsed) -> bool:
    """Return whether a requirement's marker holds in an image. Other Python versions than the base's are not known
    here, so a marker that depends on them holds."""
    if parsed.marker is None:
        return True
    from packaging.markers import default_environment

    environment: dict[str, Any] = {**default_environment(), **LINUX}
    minors = (f"3.{minor}" for minor in range(10, 16))
    return any(
        parsed.marker.evaluate({**environment, "python_version": minor, "python_full_version": f"{minor}.0"})
        for minor in minors
    )


# --- Locked projects ------------------------------------------------------------------------------------------------


def of_uv_lock(path: Path) -> Packages:
    """Return what a uv.lock has: exact versions, and each package's index. Raises UsageError."""
    import tomllib

    text = read(path)
    try:
        locked = tomllib.loads(text).get("package", [])
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{FIELD}: {path} isn't TOML: {error}", "Create it with uv lock.", field=FIELD) from error
    lines = text.splitlines()
    found, git = [], False
    for one in locked:
        source = one.get("source", {})
        git = git or "git" in source
        check_source(path, one)
        if one["name"] in NAMED:
            version, _, build = one.get("version", "").partition("+")
            index = re.search(r"/whl/(cpu|cu\d+)", source.get("registry", ""))
            number = next((n for n, line in enumerate(lines, 1) if line == f'name = "{one["name"]}"'), 1)
            found.append(
                Requirement(
                    name=one["name"],
                    specifier=f"=={version}",
                    build=build or (index[1] if index else ""),
                    text=f"{one['name']} {one.get('version', '')}",
                    where=f"{path}:{number}",
                )
            )
    loggers = tuple(one["name"] for one in locked if one["name"] in LOGGERS)
    return Packages(tool="uv", named=tuple(found), hashed=True, git=git, loggers=loggers)


def check_source(path: Path, package: dict[str, Any]) -> None:
    """Check that a locked package comes from an index or a repository. The project itself isn't installed: its files
    are the image's code. Raises UsageError."""
    source = package.get("source", {})
    local = next((source[kind] for kind in ("path", "directory", "editable") if kind in source), None)
    if local not in (None, "."):
        raise UsageError(
            f"{FIELD}: {path}: {package['name']} is at {local} on this machine, which the image doesn't have",
            "Put your own code into image.code; packages come from an index, or from git+https://…",
            field=FIELD,
        )


def of_conda(path: Path) -> Packages:
    """Return what an environment.yml names, in `dependencies` and its `pip` list. Raises UsageError."""
    import yaml

    text = read(path)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{FIELD}: {path} isn't YAML: {error}", field=FIELD) from error
    entries = data.get("dependencies") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{FIELD}: {path} has no dependencies", "Name a conda environment.yml.", field=FIELD)
    numbers = {line.strip().removeprefix("- ").strip("\"'"): n for n, line in enumerate(text.splitlines(), 1)}
    pip = [one for entry in entries if isinstance(entry, dict) for one in entry.get("pip", [])]
    from launcher.workspace.requirements import check

    for one in pip:
        check(path, numbers.get(one, 1), one)
    lines = [Line(path, numbers.get(one, 1), one) for one in pip]
    names = (re.split(r"[\s=<>!~\[]", entry.rpartition("::")[2])[0] for entry in entries if isinstance(entry, str))
    return Packages(
        tool="conda",
        named=tuple(named(lines)),
        git=any(GIT.search(one) for one in pip),
        loggers=(*(name for name in map(normalised, names) if name in LOGGERS), *logger_packages(lines)),
    )
