"""Choose the release and CUDA build of PyTorch that an image gets, from its requirements, the GPU and the driver.

The recipe pins one release (PINNED), which the built-in trainer needs. If the requirements allow it, nothing else is
chosen. Otherwise the newest release of the catalog that they allow is taken, in the build that the machine runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.catalog import Catalog, Gpu, TorchRelease
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Context, Packages, Requirement, Torch
from launcher.spec.models import JobSpec

PINNED = "2.13.0"
"""The release in containers/train.Dockerfile."""
BASE_PYTHON = "3.12"
"""Of the recipe's own base."""
INDEX = "https://download.pytorch.org/whl"
FIELD = "image.requirements"
USE_A_SCRIPT = (
    "The built-in trainer runs on its pinned PyTorch only. For your own version, start your program: run.script"
)


def torch_of(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> Torch | None:
    """Return the PyTorch that the requirements ask for; None if the recipe's own serves them.

    Raises:
        PlanRefused: no release that they allow has a build for the machine. The error names what would work.
    """
    packages = context.packages
    check_urls(packages)
    check_image_python(spec, packages)
    if serves(spec, catalog, packages, chosen):
        if packages.tool != "conda":
            check_pinned_build(spec, catalog, context, chosen)
        return None
    demand = first(packages, "torch") or next(
        (requirement for requirement in packages.named if requirement.name != "flash-attn"), None
    )
    where = (
        f"{demand.where}: {demand.text}"
        if demand
        else f"{packages.index_where}: PyTorch's index {packages.index_build}"
    )
    if spec.run.is_builtin and (
        packages.tool == "pip" or not release_fits(known_release(catalog, PINNED), packages, catalog)
    ):
        raise PlanRefused(f"{where}: the built-in trainer needs torch {PINNED}", USE_A_SCRIPT, field=FIELD)
    releases = [release for release in reversed(catalog.torch_releases) if release_fits(release, packages, catalog)]
    if not releases:
        raise PlanRefused(f"{where}: {conflict(catalog, packages)}", what_fits(catalog, packages), field=FIELD)
    python = image_python(spec, packages)
    with_python = [release for release in releases if not python or python in release.python]
    if not with_python:
        raise PlanRefused(
            f"{where}: torch {releases[0].version} has no wheel for the image's Python {python}",
            f"It has wheels for Python {', '.join(releases[0].python)}. Choose one: --set image.python="
            f"{releases[0].python[-1]}",
            field=FIELD,
        )
    wanted = wanted_build(spec, packages)
    for release in with_python:
        from_pypi = packages.hashed or packages.tool == "conda"  # whose pip reads no index but those of the file
        exact = wanted or (pypi_build(release, chosen) if from_pypi else "")
        if build := best_build(release, exact, spec, catalog, context, chosen):
            torch = first(packages, "torch")
            is_named = packages.index_build or (torch and torch.build)
            return Torch(
                version=release.version,
                build=build,
                # Other tools have the hashes of PyPI's files.
                index="" if build == pypi_build(release, chosen) and not is_named else f"{INDEX}/{build}",
                companions={name: versions[-1] for name, versions in release.companions.items()},
            )
    raise no_build(where, with_python[0], wanted, spec, catalog, context, chosen)


def uses_base_torch(spec: JobSpec, catalog: Catalog) -> bool:
    """Return whether the base's PyTorch is used: on request, or if the base is known for it and a custom program
    runs."""
    image = spec.image
    if image.torch or not image.base:
        return image.torch == "base"
    known = catalog.base_image(image.base)
    return not spec.run.is_builtin and known is not None and known.torch


def image_python(spec: JobSpec, packages: Packages = Packages()) -> str:  # noqa: B008 - immutable
    """Return the Python version of the image; empty: that of a custom base, which is unknown here."""
    if spec.image.python or spec.image.base or spec.image.dockerfile:
        return spec.image.python or ""
    return nearest_python(packages.requires_python) or BASE_PYTHON


PYTHONS = (BASE_PYTHON, "3.13", "3.14", "3.11", "3.10")
"""Versions of an image's Python, by preference: the recipe's own, else the nearest newer one. launch's node needs
3.10."""


def nearest_python(requires: str) -> str:
    """Return the Python of PYTHONS to use under a requires-python; empty: it excludes all of them."""
    return next((python for python in PYTHONS if admits_python(requires, python)), "")


def admits_python(requires: str, python: str) -> bool:
    """Return whether a requires-python admits a release of a minor version of Python."""
    if not requires:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        specifier = SpecifierSet(requires)
    except InvalidSpecifier:  # uv or the backend reports it
        return True
    return any(specifier.contains(f"{python}.{patch}") for patch in range(30))


def python_of_tag(base: str) -> str:
    """Return the Python version in the tag of an image from Docker's `python` repository. Empty for any other image."""
    match = re.search(r"(?:^|/)python:(3\.\d+)\b", base)
    return match[1] if match else ""


def check_image_python(spec: JobSpec, packages: Packages) -> None:
    """Check that the project's requires-python admits the image's Python. Raises PlanRefused."""
    requires, image = packages.requires_python, spec.image
    nearest = nearest_python(requires)
    python = image.python or (python_of_tag(image.base) if image.base else "") or nearest
    if not requires or image.uri or (python and admits_python(requires, python)):
        return
    field = "image.python" if image.python else "image.base" if image.base else "image.requirements"
    raise PlanRefused(
        f"{field}: the project's requires-python is {requires}, and "
        + (f"the image would have Python {python}" if python else f"an image may have Python {', '.join(PYTHONS)}"),
        f"Use another Python: --set image.python={nearest}"
        if nearest
        else "Change requires-python, and lock it again.",
        field=field,
    )


def serves(spec: JobSpec, catalog: Catalog, packages: Packages, chosen: Chosen) -> bool:
    """Return whether the recipe's own PyTorch is what the requirements allow."""
    torch = first(packages, "torch")
    if spec.image.torch or spec.image.uri or uses_base_torch(spec, catalog):
        return True
    if packages.tool != "pip":
        return torch is None
    if packages.hashed and torch:
        return False
    build = wanted_build(spec, packages)
    return release_fits(known_release(catalog, PINNED), packages, catalog) and build in (
        "",
        spec.image.wheel or chosen.gpu.wheel,
    )


def known_release(catalog: Catalog, version: str) -> TorchRelease:
    """Return a release of the catalog."""
    return next(release for release in catalog.torch_releases if release.version == version)


def first(packages: Packages, name: str) -> Requirement | None:
    """Return the first requirement of a package."""
    return next((requirement for requirement in packages.named if requirement.name == name), None)


def wanted_build(spec: JobSpec, packages: Packages) -> str:
    """Return the build that the spec or the requirements name: image.wheel, torch==2.9.1+cu128, or an index."""
    torch = first(packages, "torch")
    return (torch.build if torch else "") or packages.index_build or spec.image.wheel or ""


def release_fits(release: TorchRelease, packages: Packages, catalog: Catalog) -> bool:
    """Return whether the requirements allow a release of PyTorch, with the packages that are built for it."""
    # A version of a package that the catalog does not know is left to pip.
    return all(
        goes_with(release, requirement) or not (requirement.name == "torch" or is_known(requirement, catalog))
        for requirement in packages.named
    )


def goes_with(release: TorchRelease, requirement: Requirement) -> bool:
    """Return whether a requirement allows PyTorch's release, or one of its package's releases for it."""
    return allowed(
        requirement, (release.version,) if requirement.name == "torch" else release.companions.get(requirement.name, ())
    )


def is_known(requirement: Requirement, catalog: Catalog) -> bool:
    """Return whether the catalog knows the PyTorch of a version that a requirement allows, or knows that all such
    versions are for an older PyTorch than its first."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    known = [each for release in catalog.torch_releases for each in release.companions.get(requirement.name, ())]
    if not known or allowed(requirement, known):
        return bool(known)
    most = [
        Version(each.version.removesuffix(".*"))
        for each in SpecifierSet(requirement.specifier)
        if each.operator in UPPER
    ]
    return bool(most) and min(most) <= min(map(Version, known))


UPPER = ("==", "~=", "<", "<=")
"""Operators that exclude newer versions."""


def allowed(requirement: Requirement, versions: Sequence[str], *, prereleases: bool | None = None) -> bool:
    """Return whether a requirement allows one of some versions."""
    from packaging.specifiers import SpecifierSet

    specifier = SpecifierSet(requirement.specifier)
    return any(specifier.contains(version, prereleases) for version in versions)


def best_build(
    release: TorchRelease, wanted: str, spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen
) -> str:
    """Return the build of a release to install; empty if none runs on the machine.

    Where the driver is unknown (Vertex AI), a build that any current driver runs comes first. If xformers is wanted,
    one for CUDA 12 comes next, PyPI's first; then the GPU's default, then PyPI's, then the newest.
    """
    if context.target == "local" and wanted == "cpu":
        return "cpu"
    driver = known_driver(spec, catalog, context, chosen)
    builds = [
        build
        for build in release.builds
        if wanted in ("", build) and not build_problem(release, build, driver, catalog, chosen)
    ]
    own = pypi_build(release, chosen)
    xformers = first(context.packages, "xformers") is not None

    def rank(build: str) -> tuple[bool, bool, bool, bool, bool, str]:
        risky = driver is None and int(catalog.wheels.get(build) or 0) >= NEW_DRIVER
        runtime = xformers and build.startswith(XFORMERS_CUDA)
        return not risky, runtime, runtime and build == own, build == chosen.gpu.wheel, build == own, build

    return max(builds, key=rank, default="")


XFORMERS_CUDA = "cu12"
"""The CUDA of xformers' wheels on PyPI: of PyPI's torch up to 2.10, and 0.0.35 (for torch 2.10 and later) links
libcudart.so.12."""
NEW_DRIVER = 580
"""Driver branch of CUDA 13, which a service whose driver is unknown may not have."""


def pypi_build(release: TorchRelease, chosen: Chosen) -> str:
    """Return the build that PyPI has for the machine's CPU."""
    arm = chosen.machine is not None and chosen.machine.arch == "arm64"
    return release.pypi_arm64 if arm else release.pypi


def build_problem(release: TorchRelease, build: str, driver: int | None, catalog: Catalog, chosen: Chosen) -> str:
    """Return why a build does not run on the machine; empty if it does, as far as is known."""
    gpu, needed = chosen.gpu, int(catalog.wheels.get(build) or 0)
    if not release.has_kernels(build, gpu):
        return f"{build} has no kernels for {gpu.title}"
    if needed > int(gpu.max_driver or 9999):
        return f"{build} needs driver {needed}, and the last one for {gpu.title} is {gpu.max_driver}"
    if driver is not None and needed > driver:
        return f"{build} needs driver {needed}, and the VM's boot image has {driver}"
    return ""


def known_driver(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> int | None:
    """Return the driver branch of the machine, which a VM's boot image has. None: unknown, as on Vertex AI."""
    if context.target != "vm" or spec.vm.image or chosen.machine is None:
        return None
    family = catalog.image_family(chosen.machine)
    name = spec.vm.image_family or (family.family if family else "")
    match = re.search(r"-nvidia-(\d+)$", name)
    return int(match[1]) if match else None


def cuda_problem(catalog: Catalog, gpu: Gpu, build: str, torch: str = "") -> str:
    """Return why PyTorch's build for a CUDA does not run on the GPU; empty if it does, as far as is known."""
    match = re.fullmatch(r"cu(\d+)(\d)", build)
    release = next(
        (release for release in catalog.torch_releases if release.version == torch and build in release.builds), None
    )
    if match is None or release:
        lacks = release is not None and not release.has_kernels(build, gpu)
        return f"its torch {torch}+{build} has no kernels for {gpu.title}" if lacks else ""
    version = (int(match[1]), int(match[2]))
    for capability, needed in FIRST_CUDA:
        if gpu.sm >= capability and version < needed:
            wanted = ".".join(map(str, needed))
            return f"its CUDA {version[0]}.{version[1]} does not support {gpu.title}, which needs {wanted} or later"
    if gpu.sm < TURING and version >= (13, 0):
        return f"its CUDA {version[0]}.{version[1]} no longer supports {gpu.title}; the last one is 12.9"
    return ""


FIRST_CUDA = ((10.0, (12, 8)), (9.0, (11, 8)))
"""The compute capabilities of Blackwell and Hopper, and the CUDA that added them; TURING is the oldest that CUDA 13
supports (NVIDIA's release notes of CUDA 11.8, 12.8 and 13.0)."""
TURING = 7.5


# --- Refusals -------------------------------------------------------------------------------------------------------


def check_urls(packages: Packages) -> None:
    """Refuse a wheel of PyTorch by URL, whose build the plan can't know. Raises PlanRefused."""
    torch = first(packages, "torch")
    if torch and torch.url:
        raise PlanRefused(
            f"{torch.where}: {torch.text}: PyTorch by URL",
            "Name its version, and its build if it matters: torch==2.9.1 or torch==2.9.1+cu128. For a wheel of your "
            "own: image.torch",
            field=FIELD,
        )


def check_pinned_build(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """Check that the recipe's own PyTorch has the build of image.wheel, and that the driver runs it. Raises
    PlanRefused."""
    wheel, pinned = spec.image.wheel or chosen.gpu.wheel, known_release(catalog, PINNED)
    if wheel == "cpu" or spec.image.torch or spec.image.uri or uses_base_torch(spec, catalog):
        return
    if wheel not in pinned.builds:
        newest = next(release.version for release in reversed(catalog.torch_releases) if wheel in release.builds)
        raise PlanRefused(
            f"image.wheel: torch {PINNED} has no build {wheel}",
            f"Use {' or '.join(pinned.builds)}, or name a release that has it in image.requirements: torch=={newest}",
            field="image.wheel",
        )
    driver = known_driver(spec, catalog, context, chosen)
    if driver is not None and int(catalog.wheels[wheel] or 0) > driver:
        raise PlanRefused(
            f"vm.image_family: {spec.vm.image_family or 'the default'} has driver {driver}, but PyTorch's build "
            f"{wheel} needs {catalog.wheels[wheel]}",
            "Remove vm.image_family: the default has a newer driver. Or use an older build: image.wheel",
            field="vm.image_family" if spec.vm.image_family else "image.wheel",
        )


def no_build(
    where: str, newest: TorchRelease, wanted: str, spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen
) -> PlanRefused:
    """Return the error if no allowed release runs on the machine: why the newest doesn't, and what does."""
    driver = known_driver(spec, catalog, context, chosen)
    if wanted and wanted not in newest.builds:
        why = f"torch {newest.version} has no build {wanted}; it has {', '.join(newest.builds)}"
    else:
        reasons = [
            build_problem(newest, build, driver, catalog, chosen) for build in ([wanted] if wanted else newest.builds)
        ]
        why = f"torch {newest.version}: {'; '.join(reasons)}"
    return PlanRefused(
        f"{where}: {why}", f"On {chosen.gpu.title}: {working(newest, spec, catalog, context, chosen)}", field=FIELD
    )


def working(allowed: TorchRelease, spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> str:
    """Return what runs on the machine: another build of the allowed release, or else the newest release."""
    for release in (allowed, *reversed(catalog.torch_releases)):
        if image_python(spec, context.packages) in ("", *release.python) and (
            build := best_build(release, "", spec, catalog, context, chosen)
        ):
            return f"torch=={release.version}+{build} works."
    return "no known release works."


def conflict(catalog: Catalog, packages: Packages) -> str:
    """Return why no release fits: none is known, or the versions conflict."""
    torch = first(packages, "torch")
    if torch and newest_release(catalog, torch) is None:
        return "no such release of torch is known"
    others = (requirement.text for requirement in packages.named if requirement.name != "torch")
    return f"no known release of torch is compatible with {' and '.join(others)}"


def what_fits(catalog: Catalog, packages: Packages) -> str:
    """Return what to write instead: the packages' versions for the named torch, and the torch for the named
    packages."""
    torch = first(packages, "torch")
    release = newest_release(catalog, torch) if torch else None
    companions = release.companions if release else {}
    built = [
        f"{requirement.name}=={companions[requirement.name][-1]}"
        for requirement in packages.named
        if requirement.name in companions
    ]
    lines = [f"torch {release.version} is compatible with {', '.join(built)}."] if release and built else []
    for requirement in packages.named:
        if requirement.name != "torch" and (newest := newest_release(catalog, requirement)):
            lines.append(f"{requirement.text} is compatible with torch {newest.version}.")
    if lines and (release or not torch):
        return "\n".join(lines)
    known = catalog.torch_releases
    return f"Known releases: {known[0].version} to {known[-1].version} (launcher/catalog/data/torch.csv)."


def newest_release(catalog: Catalog, requirement: Requirement) -> TorchRelease | None:
    """Return the newest release that a requirement allows: of PyTorch, or of a package that is built for it."""
    for release in reversed(catalog.torch_releases):
        if goes_with(release, requirement):
            return release
    return None
