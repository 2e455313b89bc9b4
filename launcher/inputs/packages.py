"""Find what a requirements file asks of PyTorch's build: versions, indexes, hashes, packages that are built for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from launcher.errors import UsageError
from launcher.inputs.image_modules import normalised
from launcher.inputs.markers import ARCHES, Arch, fitting_arches
from launcher.inputs.python_project import FIELD, read
from launcher.inputs.requirements import Line, check, located, packages, requires_python
from launcher.plan.model import LocalProject, Packages, Requirement
from launcher.plan.torch_build import first, nearest_python
from launcher.plan.validate import PACKAGES

if TYPE_CHECKING:
    from packaging.requirements import Requirement as Parsed

NAMED = ("torch", "torchvision", "torchaudio", "triton", "xformers", "flash-attn")
"""PyTorch and the packages whose binaries fit one release of it."""
LOGGERS = frozenset(name for names in PACKAGES.values() for name in names)
INDEX = re.compile(r"(?:-i|--(?:extra-)?index-url)[\s=]+\S*download\.pytorch\.org/whl/(cpu|cu\d+)\b")
CONDA_CUDA = re.compile(
    r"(?:(?:pytorch-cuda|cudatoolkit|cuda-version)\s*=+\s*|pytorch(?:-gpu)?[\s=].*[=_]cuda)(\d\d)\.?(\d)(?!\d)"
)
"""Matches what pins the CUDA of conda's PyTorch: a package, or the name of a build (py3.11_cuda12.4_cudnn9.1)."""
CONDA_CPU = re.compile(r"cpuonly|pytorch-cpu|pytorch[\s=].*[=_]\s*cpu")
GIT = re.compile(r"(^|\s|@)\s*git\+")


def required_packages(path: Path, names: Sequence[str] = (), python: str | None = None) -> Packages:
    """Return what the file asks of the image's recipe. `names` are extras and dependency groups.

    `python` is that of a custom base, or empty if it is unknown; None: launch's own base. Raises UsageError: the file
    can't be read.
    """
    if path.name == "uv.lock":
        return of_uv_lock(path, names, python)
    if path.suffix in (".yml", ".yaml"):
        return of_conda(path)
    requires = requires_python(path)
    python = nearest_python(requires) if python is None else python
    return replace(of_lines(located(path, names), python), requires_python=requires)


def of_lines(lines: Sequence[Line], python: str) -> Packages:
    """Return what requirements ask for. An index counts wherever it stands, as for pip; the last one wins."""
    indexes = [(match[1], place(line)) for line in lines if (match := INDEX.match(line.text.strip()))]
    index = indexes[-1] if indexes else ("", "")
    bare = [line.text.partition("#")[0] for line in lines]
    return Packages(
        named=tuple(torch_requirements(lines, python)),
        index_build=index[0],
        index_where=index[1],
        hashed=any("--hash=" in text or text.strip() == "--require-hashes" for text in bare),
        git=any(GIT.search(text) for text in bare),
        loggers=tuple(name for parsed, *_ in applied(lines, python) if (name := normalised(parsed.name)) in LOGGERS),
        projects=tuple(
            LocalProject(folder=str(line.project.resolve()), where=place(line)) for line in lines if line.project
        ),
    )


def place(line: Line) -> str:
    """Return FILE:LINE."""
    return f"{line.path}:{line.number}"


def torch_requirements(lines: Sequence[Line], python: str) -> Iterator[Requirement]:
    """Yield the requirements that concern PyTorch's build on Linux."""
    for parsed, text, line, arch in applied(lines, python):
        if normalised(parsed.name) in NAMED:
            yield replace(requirement(parsed, text, place(line)), arch=arch)


def applied(lines: Sequence[Line], python: str) -> Iterator[tuple[Parsed, str, Line, Arch]]:
    """Yield the requirements that an image installs, with their text, line, and the one architecture that they are for
    (empty: every one)."""
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Parsed

    for number, text in packages("".join(f"{line.text}\n" for line in lines)):
        try:
            parsed = Parsed(text)
        except InvalidRequirement:  # a URL without a name, or variables that pip expands
            continue
        if arches := fitting_arches(str(parsed.marker or ""), python):
            yield parsed, text, lines[number - 1], "" if len(arches) == len(ARCHES) else arches[0]


def requirement(parsed: Parsed, text: str, where: str) -> Requirement:
    """Return a requirement with its build apart: a release has no build (2.9.1), a wheel of PyTorch's index has one
    (2.9.1+cu128)."""
    builds = [version.version.partition("+")[2] for version in parsed.specifier if "+" in version.version]
    return Requirement(
        name=normalised(parsed.name),
        specifier=",".join(f"{version.operator}{version.version.partition('+')[0]}" for version in parsed.specifier),
        build=builds[0] if builds else "",
        url=parsed.url or "",
        text=text,
        where=where,
    )


# --- Locked projects ------------------------------------------------------------------------------------------------


def of_uv_lock(path: Path, names: Sequence[str], python: str | None) -> Packages:
    """Return what a uv.lock has for an image: exact versions, and each package's index. Raises UsageError."""
    from launcher.inputs.uv_lock import read_lock

    lock = read_lock(path, names, python)
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    requirements = []
    for package, arch in lock.packages:
        if package["name"] in NAMED:
            version, _, build = package.get("version", "").partition("+")
            index = re.search(r"/whl/(cpu|cu\d+)", package.get("source", {}).get("registry", ""))
            places = [n for n, line in enumerate(lines, 1) if line == f'name = "{package["name"]}"']
            its_own = (n for n in places if lines[n : n + 1] == [f'version = "{package.get("version")}"'])
            requirements.append(
                Requirement(
                    name=package["name"],
                    specifier=f"=={version}",
                    build=build or (index[1] if index else ""),
                    text=f"{package['name']} {package.get('version', '')}",
                    where=f"{path}:{next(its_own, 1)}",
                    arch=arch,
                )
            )
    return Packages(
        tool="uv",
        named=tuple(requirements),
        hashed=True,
        git=any("git" in package.get("source", {}) for package, _ in lock.packages),
        loggers=tuple(package["name"] for package, _ in lock.packages if package["name"] in LOGGERS),
        extras=lock.extras,
        groups=lock.groups,
        projects=tuple(lock.projects),
        requires_python=lock.requires_python,
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
    pip = [line for entry in entries if isinstance(entry, dict) for line in entry.get("pip", [])]
    lines = [Line(path, numbers.get(requirement, 1), requirement) for requirement in pip]
    for line in lines:
        check(*line[:3])
    pip_packages, builds, loggers = of_lines(lines, ""), [], []
    for entry in (entry for entry in entries if isinstance(entry, str)):
        package = entry.rpartition("::")[2].strip()
        if (name := normalised(re.split(r"[\s=<>!~\[]", package)[0])) in LOGGERS:
            loggers.append(name)
        cuda = CONDA_CUDA.match(package)
        if cuda or CONDA_CPU.match(package):
            builds.append((f"cu{cuda[1]}{cuda[2]}" if cuda else "cpu", f"{path}:{numbers.get(entry, 1)}: {entry}"))
    index = (
        builds[0]
        if builds and not first(pip_packages, "torch")
        else (pip_packages.index_build, pip_packages.index_where)
    )
    return replace(
        pip_packages,
        tool="conda",
        loggers=(*loggers, *pip_packages.loggers),
        index_build=index[0],
        index_where=index[1],
    )
