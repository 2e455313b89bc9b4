"""Write the Dockerfile of an image that containers/train.Dockerfile cannot build: another PyTorch, the base's own
PyTorch, packages locked by uv or conda, git repositories, private indexes, a base without Python, lines of setup.

The text is part of the plan and of the image's tag, so a dry run shows what will be built. It has the same stages as
containers/train.Dockerfile: `dependencies`, and `train` with launch_train and the code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile

from msgspec import Struct

from launcher.catalog import Catalog
from launcher.errors import PlanRefused
from launcher.plan.model import Context, Packages, Requirement, Torch
from launcher.plan.torch_build import (
    BASE_PYTHON,
    INDEX,
    PINNED,
    allowed,
    first,
    image_python,
    nearest_python,
    uses_base_torch,
)
from launcher.spec.models import JobSpec

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
    def has_constraints(self) -> bool:
        """Return whether constraints keep PyTorch: not where a lock or conda chooses it."""
        locked = self.packages.hashed and first(self.packages, "torch")
        return self.packages.tool != "conda" and not locked


def recipe_of(spec: JobSpec, catalog: Catalog, context: Context, torch: Torch | None, wheel: str) -> Recipe | None:
    """Return what a spec's own Dockerfile must do; None if containers/train.Dockerfile does it.

    Raises:
        PlanRefused: a package can't be built in the image.
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
            field="image.requirements",
        )
    if spec.image.torch not in (None, "base"):
        raise PlanRefused(
            f"image.torch: a custom wheel can't be combined with {reason(packages, spec, python)}",
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


def reason(packages: Packages, spec: JobSpec, python: str) -> str:
    """Return the setting that needs another recipe than containers/train.Dockerfile."""
    if packages.tool != "pip":
        return {"uv": "uv.lock", "conda": "environment.yml"}[packages.tool]
    if spec.image.build_secrets:
        return "image.build_secrets"
    if spec.image.setup:
        return "image.setup"
    return f"Python {python}" if python else "packages that are built from source (git+https, flash-attn)"


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
                field="image.requirements",
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
            field="image.requirements",
        )
    if python and has and f"3.{python[1]}" != has:
        raise PlanRefused(
            f"{requirement.where}: {name} is for Python 3.{python[1]}, but the image has Python {has}",
            f"Name the wheel for cp{has.replace('.', '')}, or: --set image.python=3.{python[1]}",
            field="image.requirements",
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
    yield from environment(recipe)
    yield "COPY *.lock ./"
    if recipe.packages.tool != "conda":
        yield f"RUN /opt/venv/bin/pip install --require-hashes --requirement {lock_file(recipe)}"
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
    yield (
        "RUN python3 -m venv /opt/venv \\\n"
        ' && python3 -c \'import sys; [print(f"import site; site.addsitedir({path!r})") for path in sys.path '
        'if path.endswith("-packages")]\' > base.pth \\\n'
        " && mv base.pth /opt/venv/lib/python3.*/site-packages/"
    )
    yield "COPY *.lock ./"
    yield (
        "RUN /opt/venv/bin/pip install --ignore-installed --target /opt/launch/packages --require-hashes "
        f"--requirement {lock_file(recipe)}"
    )
    yield (
        "RUN /opt/venv/bin/python -c 'import re, importlib.metadata as m; "
        f'[print(f"{{d.name}}=={{d.version}}") for d in m.distributions() '
        f'if re.fullmatch("{TORCH_FAMILY}", re.sub("[-_.]+", "-", d.name).lower())]\' > /opt/venv/constraints.txt \\\n'
        " && grep '^torch==' /opt/venv/constraints.txt"
    )
    yield from requirements_lines(recipe)
    yield (
        "RUN test ! -e /opt/venv/lib/python3.*/site-packages/torch || "
        '{ echo "the requirements bring another PyTorch than the base\'s; remove it from them"; exit 1; }'
    )
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


def environment(recipe: Recipe) -> Iterator[str]:
    """Yield the steps that make /opt/venv, with pip in it."""
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


def lock_file(recipe: Recipe) -> str:
    """Return the lock file of launch's own packages."""
    return "requirements.lock" if recipe.full else "node.lock"


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
