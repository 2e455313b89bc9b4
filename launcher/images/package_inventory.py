"""Which packages an image holds: asked of the image itself, or else read from what it is built by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from launcher.errors import LaunchError
from launcher.images.source_files import Source
from launcher.plan.model import Image

Run = Callable[[Sequence[str]], str]
"""Runs a command in a container of the image, in place of its entrypoint, and answers its stdout."""


class Package(Struct, frozen=True, order=True):
    """A package. An empty version is not known; `license` is an SPDX expression, or the package's own words."""

    name: str
    version: str = ""
    license: str = ""
    architecture: str = ""
    """Debian's; empty for Python's."""


class Inventory(Struct, frozen=True, kw_only=True):
    """All packages, sorted by name."""

    python: tuple[Package, ...] = ()
    debian: tuple[Package, ...] = ()
    distribution: str = ""
    """Such as debian-12."""
    found_in: str
    """Where this comes from, for who reads it: the image, or lock files."""


# --- From the image -------------------------------------------------------------------------------------------------

SCRIPT = r"""
import importlib.metadata, json, pathlib, sys

def text(*names):
    files = [file for name in names for file in sorted(pathlib.Path("/").glob(name))]
    return "\n\n".join(file.read_text("utf-8", "replace") for file in files if file.is_file())

own = f"{sys.base_prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
packages = [
    {
        "name": one.metadata["Name"],
        "version": one.metadata["Version"],
        "expression": one.metadata["License-Expression"],
        "license": one.metadata["License"],
        "classifiers": one.metadata.get_all("Classifier") or [],
    }
    for one in importlib.metadata.distributions(path=[*sys.path, own])
]
status = text("var/lib/dpkg/status", "var/lib/dpkg/status.d/*")
print(json.dumps({"packages": packages, "status": status, "release": text("etc/os-release")}))
"""
"""Standard library only: any base's Python runs it. Distroless images have status.d; what lies beside a virtual
environment's Python is in `own`."""

LONGEST_LICENSE = 80
"""Characters of a license's name; what is longer is its text."""


def inventory(run: Run) -> Inventory:
    """What an image holds. Raises LaunchError: its Python doesn't answer; and what `run` raises."""
    said = run(("python", "-c", SCRIPT))
    try:
        found = json.loads(said)
    except ValueError as error:
        raise LaunchError(f"the image's packages can't be listed: its Python says {said[:200]!r}") from error
    named = [one for one in found["packages"] if one["name"]]
    python = {(normal(one["name"]), one["version"]): one for one in reversed(named)}  # the first on the path wins
    return Inventory(
        python=tuple(sorted(Package(name, version or "", license_of(one)) for (name, version), one in python.items())),
        debian=tuple(sorted(set(installed(found["status"])))),
        distribution=distribution(found["release"]),
        found_in="the image",
    )


def normal(name: str) -> str:
    """A Python package's name as indexes write it (https://packaging.python.org/en/latest/specifications/
    name-normalization/)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def license_of(metadata: dict[str, Any]) -> str:
    """An SPDX expression (PEP 639), else the field's words unless they are a license's whole text, else the
    classifiers'."""
    field = (metadata["license"] or "").strip()
    if len(field) > LONGEST_LICENSE or "\n" in field or field.upper() == "UNKNOWN":
        field = ""
    words = [one.rpartition(" :: ")[2] for one in metadata["classifiers"] if one.startswith("License :: ")]
    return str(metadata["expression"] or field or " AND ".join(sorted({*words} - {"OSI Approved"})))


def installed(status: str) -> Iterator[Package]:
    """The packages of a dpkg status file that are installed (its stanzas: deb822(5))."""
    for stanza in re.split(r"\n\s*\n", status):
        fields = dict(re.findall(r"(?m)^([A-Za-z][\w-]*):[ \t]*(.*)$", stanza))
        state = fields.get("Status", "installed").split()[-1:]  # distroless images leave it out
        if "Package" in fields and state == ["installed"]:
            yield Package(fields["Package"], fields.get("Version", ""), architecture=fields.get("Architecture", ""))


def distribution(release: str) -> str:
    """ID-VERSION_ID of an os-release file, such as debian-12; empty without an ID."""
    fields = {name: value.strip("\"'") for name, value in re.findall(r"(?m)^(\w+)=(.*)$", release)}
    return "-".join(filter(None, (fields.get("ID", ""), fields.get("VERSION_ID", "")))) if fields.get("ID") else ""


# --- From what it is built by ---------------------------------------------------------------------------------------

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Of Python, where the base doesn't say which it has: what any of them would get is listed."""
REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*(?:==\s*(?P<version>[^\s;,*]+)(?=[\s;,]|$))?[^;]*(?:;\s*(?P<marker>.+))?"
)


def of_source(source: Source, image: Image) -> Inventory:
    """What the dependency image is told to install. The base's own packages aren't known, nor the versions of what
    the user hasn't pinned. Raises LaunchError."""
    texts = {file.name: file.path.read_text(encoding="utf-8") for file in source.recipe}
    locks = ["requirements.lock", *([] if source.torch else [f"torch-{image.wheel}.lock"])]
    found = {*torch(source, texts, image.wheel)}
    for text in (*(texts.get(name, "") for name in locks), source.requirements):
        found.update(required(text, python_of(image.base), image.platform))
    pinned = {one.name for one in found if one.version}
    # The user's open wish for what a lock pins adds nothing.
    kept = sorted(one for one in found if one.version or one.name not in pinned)
    return Inventory(python=tuple(kept), found_in="lock files")


def torch(source: Source, texts: dict[str, str], wheel: str) -> Iterator[Package]:
    """PyTorch where no lock names it: by the name of the user's wheel, or the Dockerfile's version."""
    if source.torch:
        yield Package("torch", source.torch.name.split("-")[1])
    elif f"torch-{wheel}.lock" not in texts:
        version = re.search(r"(?m)^ARG TORCH=(\S+)$", texts.get("train.Dockerfile", ""))
        yield Package("torch", f"{version[1]}+{wheel}" if version else "")


def python_of(base: str) -> str | None:
    """The version in the name of an image of Python's own, such as python:3.12-slim; None for other images."""
    found = re.search(r"(?:^|/)python:(\d+\.\d+)", base)
    return found[1] if found else None


def required(text: str, python: str | None, platform: str) -> Iterator[Package]:
    """The packages of a requirements file that apply there. Raises LaunchError."""
    worlds = [world(version, platform) for version in ((python,) if python else VERSIONS)]
    for line in re.sub(r"\\\n", " ", text).splitlines():
        requirement = re.split(r"(?:^|\s)(?:#|--)", line, maxsplit=1)[0].strip()
        found = REQUIREMENT.fullmatch(requirement)
        if found and applies(found["marker"], worlds):
            yield Package(normal(found["name"]), found["version"] or "")


def world(python: str, platform: str) -> dict[str, str]:
    """What markers ask for (https://packaging.python.org/en/latest/specifications/dependency-specifiers/)."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "aarch64" if platform.endswith("arm64") else "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def applies(marker: str | None, worlds: Iterable[dict[str, str]]) -> bool:
    """Whether a marker is true in any of the worlds; one that can't be read may be."""
    if not marker:
        return True
    from packaging.markers import InvalidMarker, Marker

    try:
        read = Marker(marker)
    except InvalidMarker:
        return True
    return any(read.evaluate(dict(one)) for one in worlds)


# --- In a container -------------------------------------------------------------------------------------------------


def in_container(api: Any, image: str) -> Run:
    """A Run by a Docker engine (the SDK's low-level client), without a network. What it raises is the SDK's."""

    def run(argv: Sequence[str]) -> str:
        container = api.create_container(image, entrypoint=[argv[0]], command=list(argv[1:]), network_disabled=True)
        try:
            api.start(container)
            ended = int(api.wait(container)["StatusCode"])
            stdout, stderr = (str(api.logs(container, stdout=out, stderr=not out), "utf-8") for out in (True, False))
        finally:
            api.remove_container(container, force=True, v=True)
        if ended:
            raise LaunchError(f"{image}: {argv[0]} ended with {ended}: {stderr.strip()[-500:]}")
        return stdout

    return run
