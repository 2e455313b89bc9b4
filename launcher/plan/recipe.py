"""Plan what an image's recipe installs: the PyTorch that it gets, and the Dockerfile of images that
containers/train.Dockerfile cannot build.

The recipe pins one release of PyTorch (PINNED), which the built-in trainer needs. If the requirements allow it, nothing
else is chosen. Otherwise the newest release of the catalog that they allow is taken, in the build that the machine
runs: by its GPU and driver.

A Dockerfile is written for another PyTorch, the base's own PyTorch, packages locked by uv or conda, git repositories,
private indexes, a base without Python, and lines of setup. The text is part of the plan and of the image's tag, so a
dry run shows what will be built. It has the same stages as containers/train.Dockerfile: `dependencies`, and `train`
with launch_train and the code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from launcher.catalog import Catalog, Gpu, TorchRelease
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Context, Packages, Requirement, Torch
from launcher.spec.models import Image, JobSpec

PINNED = "2.13.0"
"""The release in containers/train.Dockerfile."""
BASE_PYTHON = "3.12"
"""Of the recipe's own base."""
INDEX = "https://download.pytorch.org/whl"
FIELD = "image.requirements"
USE_A_SCRIPT = (
    "The built-in trainer runs on its pinned PyTorch only. For your own version, start your program: run.script"
)
UV = "ghcr.io/astral-sh/uv:0.9"
MICROMAMBA = "docker.io/mambaorg/micromamba:2"
TORCH_FAMILY = (
    "torch|torchvision|torchaudio|triton|pytorch-triton|xformers|flash-attn|transformer-engine|apex|nvidia-.*"
)
"""Packages of a base that requirements must not replace: they belong to the base's PyTorch."""
APT = re.compile(r"\s*(\w+=\S*\s+)*apt(-get)?\s")
"""A line of image.setup that installs Debian packages, which need no Python packages but may be needed by them."""
FROM_SOURCE = ("flash-attn",)
"""Packages without wheels on PyPI, whose build needs the installed PyTorch and nvcc."""


# --- PyTorch --------------------------------------------------------------------------------------------------------


def torch_of(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> Torch | None:
    """Return the PyTorch that the requirements ask for; None if the recipe's own serves them.

    Raises PlanRefused: no release that they allow has a build for the machine. The error names what would work.
    """
    packages, torch = context.packages, first(context.packages, "torch")
    if torch and torch.url:
        raise PlanRefused(
            f"{torch.where}: {torch.text}: PyTorch by URL",
            "Name its version, and its build if it matters: torch==2.9.1 or torch==2.9.1+cu128. For a wheel of your "
            "own: image.torch",
            field=FIELD,
        )
    check_image_python(spec, packages)
    if serves(spec, catalog, packages, chosen):
        if packages.tool != "conda":
            check_pinned_build(spec, catalog, context, chosen)
        return None
    demand = torch or next((requirement for requirement in packages.named if requirement.name != "flash-attn"), None)
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
        raise no_release(where, catalog, packages)
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
    return next(release for release in catalog.torch_releases if release.version == version)


def first(packages: Packages, name: str) -> Requirement | None:
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
        return f"{build} needs driver {needed}, and the machine has {driver}"
    return ""


def known_driver(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> int | None:
    """Return the driver branch of the machine: a host's, or that of a VM's boot image. None: unknown, as on Vertex
    AI."""
    if context.target != "vm" or spec.vm.image or chosen.machine is None:
        return context.driver
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


# --- Refusals of a PyTorch ------------------------------------------------------------------------------------------


def check_pinned_build(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """Check that the recipe's own PyTorch has the build of image.wheel, and that the driver runs it. Raises
    PlanRefused."""
    wheel, pinned = spec.image.wheel or chosen.gpu.wheel, known_release(catalog, PINNED)
    if wheel == "cpu" or spec.image.torch or spec.image.uri or uses_base_torch(spec, catalog) or context.driver:
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
    """Return the error if no allowed release runs on the machine: why the newest doesn't, and what does: another build
    of it, or else the newest release."""
    driver = known_driver(spec, catalog, context, chosen)
    if wanted and wanted not in newest.builds:
        why = f"torch {newest.version} has no build {wanted}; it has {', '.join(newest.builds)}"
    else:
        reasons = [
            build_problem(newest, build, driver, catalog, chosen) for build in ([wanted] if wanted else newest.builds)
        ]
        why = f"torch {newest.version}: {'; '.join(reasons)}"
    works = "no known release works."
    for release in (newest, *reversed(catalog.torch_releases)):
        has_python = image_python(spec, context.packages) in ("", *release.python)
        if has_python and (build := best_build(release, "", spec, catalog, context, chosen)):
            works = f"torch=={release.version}+{build} works."
            break
    return PlanRefused(f"{where}: {why}", f"On {chosen.gpu.title}: {works}", field=FIELD)


def no_release(where: str, catalog: Catalog, packages: Packages) -> PlanRefused:
    """Return the error if no release fits: none is known, or the versions conflict; and what to write instead: the
    packages' versions for the named torch, and the torch for the named packages."""
    torch = first(packages, "torch")
    others = [requirement for requirement in packages.named if requirement.name != "torch"]
    release = newest_release(catalog, torch) if torch else None
    if torch and release is None:
        why = "no such release of torch is known"
    else:
        texts = " and ".join(requirement.text for requirement in others)
        why = f"no known release of torch is compatible with {texts}"
    companions = release.companions if release else {}
    built = [f"{need.name}=={companions[need.name][-1]}" for need in packages.named if need.name in companions]
    lines = [f"torch {release.version} is compatible with {', '.join(built)}."] if release and built else []
    for requirement in others:
        if newest := newest_release(catalog, requirement):
            lines.append(f"{requirement.text} is compatible with torch {newest.version}.")
    if not lines or (torch and not release):
        known = catalog.torch_releases
        lines = [f"Known releases: {known[0].version} to {known[-1].version} (launcher/catalog/data/torch.csv)."]
    return PlanRefused(f"{where}: {why}", "\n".join(lines), field=FIELD)


def newest_release(catalog: Catalog, requirement: Requirement) -> TorchRelease | None:
    """Return the newest release that a requirement allows: of PyTorch, or of a package that is built for it."""
    for release in reversed(catalog.torch_releases):
        if goes_with(release, requirement):
            return release
    return None


# --- The decisions behind a Dockerfile ------------------------------------------------------------------------------


class Recipe(Struct, frozen=True, kw_only=True):
    """The decisions behind a Dockerfile."""

    packages: Packages
    torch: Torch | None
    """None: the base's own."""
    full: bool
    """All packages of containers/requirements.lock, which the built-in trainer needs; else those of node.lock."""
    python: str
    """Brought along; empty: the base's own."""
    secrets: tuple[str, ...]
    compiler: bool
    """A C compiler for Triton is added: PyTorch has CUDA, and the base may lack one."""
    setup: tuple[str, ...]

    @property
    def index(self) -> str:
        """The index with packages for the build of PyTorch; empty: PyPI's are for it, or the build is unknown."""
        if self.torch is None or not self.full:
            return self.torch.index if self.torch else ""
        return f"{INDEX}/{self.torch.build}"

    @property
    def lock(self) -> str:
        """The lock file of launch's own packages."""
        return "requirements.lock" if self.full else "node.lock"

    @property
    def has_constraints(self) -> bool:
        """Return whether constraints keep PyTorch: not where a lock or conda chooses it."""
        locked = self.packages.hashed and first(self.packages, "torch")
        return self.packages.tool != "conda" and not locked


def recipe_of(spec: JobSpec, catalog: Catalog, context: Context, torch: Torch | None, wheel: str) -> Recipe | None:
    """Return what a spec's own Dockerfile must do; None if containers/train.Dockerfile does it.

    Raises PlanRefused: a package can't be built in the image.
    """
    packages = context.packages
    check_source_builds(spec, catalog, packages, torch)
    own = uses_base_torch(spec, catalog)
    base = catalog.base_image(spec.image.base) if spec.image.base else None
    python = image_python(spec, packages)
    if base and not base.python:
        python = python or nearest_python(packages.requires_python) or BASE_PYTHON
    elif not spec.image.python and python == BASE_PYTHON:
        python = ""
    source = [requirement for requirement in packages.named if requirement.name in FROM_SOURCE and not requirement.url]
    other = packages.git or source or spec.image.build_secrets or spec.image.setup or python or own
    plain = packages.tool == "pip" and not other
    if spec.image.uri or (plain and torch is None):
        return None
    if own and spec.run.is_builtin:
        raise PlanRefused(
            "image.torch: base: the built-in trainer needs its pinned PyTorch, which the base may not have",
            "Remove it, or start your own program: run.script",
            field="image.torch",
        )
    if packages.tool == "conda" and spec.run.is_builtin:
        raise PlanRefused(
            "image.requirements: the built-in trainer's packages are locked for pip, not for conda",
            "Use a requirements file, or start your own program: run.script",
            field=FIELD,
        )
    if spec.image.torch not in (None, "base"):
        why = {"uv": "uv.lock", "conda": "environment.yml"}.get(packages.tool) or (
            "image.build_secrets"
            if spec.image.build_secrets
            else "image.setup"
            if spec.image.setup
            else f"Python {python}"
            if python
            else "packages that are built from source (git+https, flash-attn)"
        )
        raise PlanRefused(
            f"image.torch: a custom wheel can't be combined with {why}",
            "Name the version in image.requirements instead: torch==2.9.1, or torch==2.9.1+cu128.",
            field="image.torch",
        )
    return Recipe(
        packages=packages,
        torch=None if own else torch or Torch(version=PINNED, build=wheel),
        full=torch is None and not own and packages.tool != "conda",
        python=python,
        secrets=spec.image.build_secrets,
        compiler=wheel != "cpu" and not own,
        setup=spec.image.setup,
    )


def check_source_builds(spec: JobSpec, catalog: Catalog, packages: Packages, torch: Torch | None) -> None:
    """Check that packages without wheels on PyPI find nvcc in the base, or name a wheel for the image's PyTorch and
    Python. Raises PlanRefused."""
    if packages.tool != "pip" or spec.image.uri:
        return
    base = spec.image.base
    known = catalog.base_image(base) if base else None
    may_have_nvcc = (known is None or known.nvcc or "devel" in base) if base else spec.image.dockerfile is not None
    for requirement in packages.named:
        if requirement.url and not uses_base_torch(spec, catalog):
            check_wheel_url(spec, packages, requirement, torch.version if torch else PINNED)
        if requirement.name in FROM_SOURCE and not requirement.url and not may_have_nvcc:
            raise PlanRefused(
                f"{requirement.where}: {requirement.text}: it has no wheel on PyPI, and the image's base has no nvcc "
                "to compile it",
                "Name a wheel for your torch and Python (https://github.com/Dao-AILab/flash-attention/releases):\n"
                "  flash-attn @ https://…/flash_attn-2.8.3+cu12torch2.9cxx11abiTRUE-cp312-cp312-linux_x86_64.whl\n"
                "or a base that has nvcc (docker.io/nvidia/cuda:12.8.1-devel-ubuntu24.04) or flash-attn itself "
                "(nvcr.io/nvidia/pytorch).\nPyTorch's own scaled_dot_product_attention needs neither.",
                field=FIELD,
            )


def check_wheel_url(spec: JobSpec, packages: Packages, requirement: Requirement, torch: str) -> None:
    """Check that a wheel of flash-attn is for the image's PyTorch and Python. Raises PlanRefused."""
    minor = torch.rpartition(".")[0]
    name = requirement.url.rpartition("/")[2].replace("%2B", "+")
    built = re.search(r"torch(\d+\.\d+)", name)
    python = re.search(r"-cp3(\d+)-cp", name)
    has = image_python(spec, packages)
    if built and built[1] != minor:
        raise PlanRefused(
            f"{requirement.where}: {name} was built for torch {built[1]}, but the image gets torch {torch}",
            f"Name the wheel for torch {minor}, or torch=={built[1]}.* in the same file.",
            field=FIELD,
        )
    if python and has and f"3.{python[1]}" != has:
        raise PlanRefused(
            f"{requirement.where}: {name} is for Python 3.{python[1]}, but the image has Python {has}",
            f"Name the wheel for cp{has.replace('.', '')}, or: --set image.python=3.{python[1]}",
            field=FIELD,
        )


# --- The text -------------------------------------------------------------------------------------------------------


def dockerfile(recipe: Recipe) -> str:
    """Return the Dockerfile. Build arguments: BASE, and UV or MICROMAMBA where it uses them."""
    tools = [*(["UV"] if recipe.python or recipe.packages.tool == "uv" else [])]
    tools += ["MICROMAMBA"] if recipe.packages.tool == "conda" else []
    lines = [
        "# launch wrote this recipe for the packages of one spec (docs/images.md).",
        "ARG BASE",
        *(f"ARG {tool}={globals()[tool]}" for tool in tools),
        *(f"FROM ${{{tool}}} AS {tool.lower()}" for tool in tools),
        "",
        *(own_torch(recipe) if recipe.torch else base_torch(recipe)),
        "",
        *TRAIN,
    ]
    return "\n".join(lines) + "\n"


PIP_ENV = "ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_PROGRESS_BAR=off"
TRAIN = (
    "FROM dependencies AS train",
    "COPY launch_train /opt/launch/launch_train",
    "COPY --chown=1000:1000 code /workspace",
)
RUNTIME = (
    "RUN getent passwd 1000 || useradd --create-home --uid 1000 --user-group launch",
    "RUN install --directory --owner 1000 --group 1000 --mode 775 /workspace",
    "ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/launch PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1",
)
START = ("USER 1000:1000", "WORKDIR /workspace", 'ENTRYPOINT ["python", "-m", "launch_train.node"]')
CHECK_PYTHON = (
    "RUN python3 -c 'import sys; sys.version_info >= (3, 10) or "
    'sys.exit("the base has Python " + sys.version.split()[0] + "; launch needs 3.10 or later: image.python")\''
)
LARGE = "nvidia triton torch"
"""Folders that become separate layers, which are compressed, pushed and pulled in parallel."""


def own_torch(recipe: Recipe) -> Iterator[str]:
    """Yield the stages with PyTorch in a separate virtual environment."""
    yield "FROM ${BASE} AS build"
    yield PIP_ENV
    yield "WORKDIR /build"
    yield from apt_setup(recipe)
    if recipe.packages.git:
        yield apt("git ca-certificates")
    if recipe.python or recipe.packages.tool == "uv":
        yield "COPY --from=uv /uv /usr/local/bin/uv"
    if recipe.packages.tool == "conda":
        yield "COPY --from=micromamba /bin/micromamba /usr/local/bin/micromamba"
        yield "COPY environment.yml ./"
        yield secret_run(recipe, "micromamba create --yes --prefix /opt/venv --file environment.yml")
    elif recipe.python:
        yield (
            f"RUN UV_PYTHON_INSTALL_DIR=/opt/python uv python install {recipe.python} \\\n"
            f" && UV_PYTHON_INSTALL_DIR=/opt/python uv venv --seed --python {recipe.python} /opt/venv"
        )
    else:
        yield CHECK_PYTHON
        yield "RUN python3 -m venv /opt/venv"
    yield "COPY *.lock ./"
    if recipe.packages.tool != "conda":
        yield f"RUN /opt/venv/bin/pip install --require-hashes --requirement {recipe.lock}"
    yield from torch_lines(recipe)
    yield from requirements_lines(recipe)
    yield "RUN /opt/venv/bin/python -m pip check"
    yield (
        "RUN cd /opt/venv && ln -s lib/python3.*/site-packages site-packages \\\n"
        f' && for name in {LARGE}; do mkdir "/opt/${{name}}" \\\n'
        '      && if [ -d "site-packages/${name}" ]; then mv "site-packages/${name}" "/opt/${name}/"; fi; done'
    )
    yield ""
    yield "FROM ${BASE} AS dependencies"
    yield "USER root"
    yield from apt_setup(recipe)
    if recipe.compiler:
        yield f"RUN command -v gcc || {{ {apt('gcc libc6-dev').removeprefix('RUN ')}; }}"
    yield from RUNTIME
    if recipe.python:
        yield "COPY --from=build /opt/python /opt/python"
    yield "COPY --from=build /opt/venv /opt/venv"
    for name in LARGE.split():
        yield f"COPY --from=build /opt/{name} /opt/venv/site-packages"
    yield from other_setup(recipe)
    yield from START


SEE_BASE = (
    'python3 -c \'import sys; [print(f"import site; site.addsitedir({path!r})") for path in sys.path '
    'if path.endswith("-packages")]\' > base.pth \\\n'
    " && mv base.pth /opt/venv/lib/python3.*/site-packages/"
)
"""Lets the environment see the packages of the Python that it was made by."""
KEEP_TORCH = (
    "RUN /opt/venv/bin/python -c 'import re, importlib.metadata as m; "
    '[print(f"{d.name}=={d.version}") for d in m.distributions() '
    f'if re.fullmatch("{TORCH_FAMILY}", re.sub("[-_.]+", "-", d.name).lower())]\' > /opt/venv/constraints.txt'
)
NO_OTHER_TORCH = (
    "RUN test ! -e /opt/venv/lib/python3.*/site-packages/torch || "
    '{ echo "the requirements bring another PyTorch than the base\'s; remove it from them"; exit 1; }'
)


def base_torch(recipe: Recipe) -> Iterator[str]:
    """Yield the stage on a base whose own PyTorch is used.

    The environment sees the base's packages (venv's own option would not, if the base's PyTorch is in an environment
    too), and requirements may not replace those of PyTorch. Packages of the node
    go into a folder that comes last on the path, so that they replace nothing of the base either.
    """
    yield "FROM ${BASE} AS dependencies"
    yield "USER root"
    yield PIP_ENV
    yield "WORKDIR /build"
    yield from apt_setup(recipe)
    if recipe.packages.git:
        yield f"RUN command -v git || {{ {apt('git ca-certificates').removeprefix('RUN ')}; }}"
    if recipe.packages.tool == "uv":
        yield "COPY --from=uv /uv /usr/local/bin/uv"
    yield CHECK_PYTHON
    yield f"RUN python3 -m venv /opt/venv \\\n && {SEE_BASE}"
    yield "COPY *.lock ./"
    yield (
        "RUN /opt/venv/bin/pip install --ignore-installed --target /opt/launch/packages --require-hashes "
        f"--requirement {recipe.lock}"
    )
    yield f"{KEEP_TORCH} \\\n && grep '^torch==' /opt/venv/constraints.txt"
    yield from requirements_lines(recipe)
    yield NO_OTHER_TORCH
    yield from RUNTIME
    yield from other_setup(recipe)
    yield from START


def apt_setup(recipe: Recipe) -> Iterator[str]:
    """Yield the steps of the lines of apt with which image.setup begins."""
    yield from (setup_step(recipe, line) for line in takewhile(APT.match, recipe.setup))


def other_setup(recipe: Recipe) -> Iterator[str]:
    """Yield the steps of the other lines of image.setup, which start where the program starts."""
    lines = recipe.setup[len([*takewhile(APT.match, recipe.setup)]) :]
    if lines:
        yield PIP_ENV
        yield "WORKDIR /workspace"
    yield from (setup_step(recipe, line) for line in lines)


def setup_step(recipe: Recipe, line: str) -> str:
    """Return the step of one line of image.setup. Quoted, it means to Docker nothing but words for a shell."""
    command = f"sh -c {shlex.quote(line)}"
    if APT.match(line):
        command = (
            f"export DEBIAN_FRONTEND=noninteractive && apt-get update && {command} "
            "&& rm -rf /var/cache/apt/* /var/lib/apt/lists/*"
        )
    else:  # a setup.py may import modules beside it, and pip must not replace PyTorch
        kept = " PIP_CONSTRAINT=/opt/venv/constraints.txt" if recipe.has_constraints else ""
        index = f" PIP_EXTRA_INDEX_URL={recipe.index}" if recipe.index else ""
        command = f"export PYTHONSAFEPATH={kept}{index} && {command}"
    return secret_run(recipe, command)


def apt(packages: str) -> str:
    """Return the step that installs Debian packages."""
    return (
        f"RUN apt-get update && apt-get install --yes --no-install-recommends {packages}"
        " && rm -rf /var/cache/apt/* /var/lib/apt/lists/*"
    )


def torch_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the step that installs PyTorch, and the constraints that keep it and what is built for it."""
    torch, packages = recipe.torch, recipe.packages
    if torch is None or not recipe.has_constraints:
        return
    if recipe.full:
        yield (
            f'RUN if [ -e "torch-{torch.build}.lock" ]; then \\\n'
            f'      /opt/venv/bin/pip install --require-hashes --requirement "torch-{torch.build}.lock"; \\\n'
            f'    else /opt/venv/bin/pip install "torch=={torch.version}" '
            f"--index-url {recipe.index}; fi"
        )
        exact = torch.version
    elif torch.index:
        exact = f"{torch.version}+{torch.build}"
        yield f'RUN /opt/venv/bin/pip install "torch=={exact}" --index-url {torch.index}'
    else:
        exact = torch.version
        yield f'RUN /opt/venv/bin/pip install "torch=={exact}"'
    build = exact.removeprefix(torch.version)
    pinned = [f"torch=={exact}"]
    # Of those in PyTorch's indexes, the wheels of the same build, if their release is known.
    for requirement in packages.named:
        companion = torch.companions.get(requirement.name)
        if requirement.name in ("torchvision", "torchaudio") and companion and allowed(requirement, (companion,)):
            pinned.append(f"{requirement.name}=={companion}{build}")
    words = " ".join(f'"{pin}"' for pin in pinned)
    yield f"RUN printf '%s\\n' {words} > /opt/venv/constraints.txt"


def requirements_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the steps that install the user's packages."""
    packages = recipe.packages
    if packages.tool == "uv":
        yield "COPY pyproject.toml uv.lock ./"
        selected = [f" --extra {name}" for name in packages.extras] + [f" --group {name}" for name in packages.groups]
        selected += [f" --no-install-package {project.name}" for project in packages.projects]
        no_dev = "" if "dev" in packages.groups else " --no-dev"
        yield secret_run(
            recipe,
            f"UV_PROJECT_ENVIRONMENT=/opt/venv uv sync --frozen{no_dev} --no-install-project --inexact "
            f"--python /opt/venv/bin/python{''.join(selected)}",
        )
        return
    if packages.tool == "conda":
        yield "RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes --requirement node.lock"
        return
    yield "COPY requirements.txt /opt/venv/requirements.txt"
    source = [requirement for requirement in packages.named if requirement.name in FROM_SOURCE and not requirement.url]
    options = " --constraint /opt/venv/constraints.txt" if recipe.has_constraints else ""
    options += f" --extra-index-url {recipe.index}" if recipe.index else ""
    file = "/opt/venv/requirements.txt"
    if source:
        names = "|".join(requirement.name.replace("-", "[-_.]") for requirement in source)
        yield f"RUN grep -viE '^({names})' {file} > binary.txt || true"
        file = "binary.txt"
    yield secret_run(recipe, f"/opt/venv/bin/pip install --requirement {file}{options}")
    if source:
        words = " ".join(f'"{requirement.name}{requirement.specifier}"' for requirement in source)
        yield "RUN /opt/venv/bin/pip install setuptools wheel packaging ninja psutil"
        yield secret_run(recipe, f"/opt/venv/bin/pip install --no-build-isolation{options} {words}")


def secret_run(recipe: Recipe, command: str) -> str:
    """Return a step in which the build's secrets are variables. BuildKit mounts them in memory for that step alone, so
    neither a layer nor the image's history has them."""
    if not recipe.secrets:
        return f"RUN {command}"
    mounts = " ".join(f"--mount=type=secret,id={name}" for name in recipe.secrets)
    exports = " && ".join(f'export {name}="$(cat /run/secrets/{name})"' for name in recipe.secrets)
    return f"RUN {mounts} {exports} \\\n && {command}"


# --- A host without containers --------------------------------------------------------------------------------------


def host_recipe(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, python: tuple[int, ...], gpu: Gpu | None
) -> Recipe:
    """Return what a host's environment gets: the packages of the image, with the PyTorch that runs on its `gpu` (None:
    a job on processors) and driver (`context.driver`).

    `python` is the version of its Python; launch's packages for the built-in trainer need 3.11.

    Raises PlanRefused: no PyTorch that the requirements allow runs there.
    """
    packages, pinned, minor = context.packages, known_release(catalog, PINNED), f"{python[0]}.{python[1]}"
    image = Image(python=minor, wheel=spec.image.wheel if gpu else "cpu")
    spec, chosen = replace(spec, image=image), replace(chosen, machine=None)
    wanted = wanted_build(spec, packages)
    chosen = replace(chosen, gpu=replace(gpu or chosen.gpu, wheel=""))
    build = best_build(pinned, wanted, spec, catalog, context, chosen)
    chosen = replace(chosen, gpu=replace(chosen.gpu, wheel=build))
    torch = torch_of(spec, catalog, context, chosen)
    if torch is None and not build:
        raise no_build(FIELD, pinned, wanted, spec, catalog, context, chosen)
    if torch is None and minor not in pinned.python:
        raise PlanRefused(
            f"torch {PINNED} has no wheel for Python {minor}; it has wheels for {', '.join(pinned.python)}",
            "Install one of these on the host; launch takes it from the PATH, or from --python PATH.",
            field="image.python",
        )
    return Recipe(
        packages=packages,
        torch=torch or Torch(version=PINNED, build=build, index=f"{INDEX}/{build}"),
        full=torch is None and python >= (3, 11),
        python="",
        secrets=(),
        compiler=False,
        setup=(),
    )


def host_script(recipe: Recipe, *, on_base: bool, with_lock: bool) -> str:
    """Return the script of `sh` that installs a recipe's packages on a host, as the steps of a Dockerfile would: into
    the new virtual environment $VENV, in a folder that has the lock files and the user's.

    `on_base`: the packages of the Python $PYTHON are used too, and its PyTorch is kept, if the recipe has one.
    `with_lock`: launch's packages are installed; beside a base's they come last on the path.
    """
    pip, lock = "/opt/venv/bin/pip install", f"--require-hashes --requirement {recipe.lock}"
    steps = [SEE_BASE] if on_base else []
    if on_base and with_lock:
        steps += [f"{pip} --ignore-installed --target /opt/venv/launch {lock}"]
        steps += ["echo /opt/venv/launch > launch.pth && mv launch.pth /opt/venv/lib/python3.*/site-packages/"]
    elif with_lock:
        steps += [f"{pip} {lock}", *torch_lines(recipe)]
    if on_base:
        steps += [KEEP_TORCH]
    if recipe.packages.tool == "uv":
        steps += [f"command -v uv || {pip} --ignore-installed uv"]
    steps += requirements_lines(recipe)
    if on_base and recipe.torch:
        steps += [NO_OTHER_TORCH]
    text = "\n".join(step.removeprefix("RUN ") for step in steps if not step.startswith("COPY "))
    text = text.replace("/opt/venv/requirements.txt", "requirements.txt")
    text = text.replace("/opt/venv/bin/pip", '"$VENV/bin/python" -m pip').replace("/opt/venv", '"$VENV"')
    return f'set -e\npython3() {{ "$PYTHON" "$@"; }}\nPATH="$PATH:$VENV/bin"\n{text}\n'
