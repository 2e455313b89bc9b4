"""Which of a uv.lock's packages `uv sync` installs on a job's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.inputs.requirements import read_requirements
from launcher.plan.model import Packages

CPU, GPU, PYPI = (
    "https://download.pytorch.org/whl/cpu",
    "https://download.pytorch.org/whl/cu128",
    "https://pypi.org/simple",
)
LOCK = f"""
version = 1
revision = 3
requires-python = ">=3.10"
conflicts = [[
    {{ package = "my-gpt", extra = "cpu" }},
    {{ package = "my-gpt", extra = "gpu" }},
]]

[[package]]
name = "my-gpt"
version = "0.1.0"
source = {{ virtual = "." }}
dependencies = [
    {{ name = "torch", version = "2.9.1", source = {{ registry = "{CPU}" }}, marker = "(sys_platform == 'darwin' and extra == 'extra-6-my-gpt-cpu') or (extra == 'extra-6-my-gpt-cpu' and extra == 'extra-6-my-gpt-gpu')" }},
    {{ name = "torch", version = "2.9.1", source = {{ registry = "{PYPI}" }}, marker = "extra != 'extra-6-my-gpt-cpu' and extra != 'extra-6-my-gpt-gpu'" }},
    {{ name = "torch", version = "2.9.1+cpu", source = {{ registry = "{CPU}" }}, marker = "sys_platform != 'darwin' and extra == 'extra-6-my-gpt-cpu'" }},
    {{ name = "torch", version = "2.9.1+cu128", source = {{ registry = "{GPU}" }}, marker = "extra == 'extra-6-my-gpt-gpu'" }},
    {{ name = "tracker", extra = ["online"] }},
]

[package.optional-dependencies]
cpu = [{{ name = "setuptools" }}]
gpu = []

[package.dev-dependencies]
dev = [{{ name = "checkout" }}]
logging = [{{ name = "mlflow" }}]

[[package]]
name = "torch"
version = "2.9.1"
source = {{ registry = "{CPU}" }}
resolution-markers = ["sys_platform == 'darwin'"]

[[package]]
name = "torch"
version = "2.9.1"
source = {{ registry = "{PYPI}" }}
dependencies = [
    {{ name = "triton", marker = "platform_machine == 'x86_64' and sys_platform == 'linux'" }},
]

[[package]]
name = "torch"
version = "2.9.1+cpu"
source = {{ registry = "{CPU}" }}

[[package]]
name = "torch"
version = "2.9.1+cu128"
source = {{ registry = "{GPU}" }}

[[package]]
name = "triton"
version = "3.5.1"
source = {{ registry = "{PYPI}" }}

[[package]]
name = "tracker"
version = "1"
source = {{ registry = "{PYPI}" }}

[package.optional-dependencies]
online = [{{ name = "wandb", marker = "python_full_version >= '3.12'" }}, {{ name = "old-http", marker = "python_full_version < '3.12'" }}]

[[package]]
name = "wandb"
version = "0.21.3"
source = {{ registry = "{PYPI}" }}

[[package]]
name = "old-http"
version = "1"
source = {{ git = "https://example.com/old-http#abc" }}

[[package]]
name = "mlflow"
version = "3.5"
source = {{ registry = "{PYPI}" }}

[[package]]
name = "checkout"
version = "1"
source = {{ directory = "../checkout" }}
"""  # noqa: E501 - as uv writes it


def locked(folder: Path, *extras: str, python: str = "3.12", text: str = LOCK, project: str = "") -> Packages:
    (folder / "uv.lock").write_text(text)
    (folder / "pyproject.toml").write_text(project)
    return read_requirements(folder / "uv.lock", extras, python).packages


def torch_on(packages: Packages, arch: str = "amd64") -> list[tuple[str, str]]:
    return [(one.specifier, one.build) for one in packages.named if one.name == "torch" and one.arch in ("", arch)]


@pytest.mark.parametrize(
    ("extras", "build"), [((), ""), (("gpu",), "cu128"), (("cpu",), "cpu"), (("GPU", "logging"), "cu128")]
)
def test_an_entry_for_macos_alone_is_not_installed(tmp_path: Path, extras: tuple[str, ...], build: str) -> None:
    packages = locked(tmp_path, *extras)
    assert torch_on(packages) == torch_on(packages, "arm64") == [("==2.9.1", build)]


def test_a_package_for_one_processor_counts_on_such_machines_alone(tmp_path: Path) -> None:
    assert [(one.name, one.arch) for one in locked(tmp_path).named] == [("torch", ""), ("triton", "amd64")]


def test_the_images_python_and_the_dependencies_own_extras_decide(tmp_path: Path) -> None:
    assert (locked(tmp_path).loggers, locked(tmp_path).git) == (("wandb",), False)
    older = locked(tmp_path, python="3.11")
    assert (older.loggers, older.git) == ((), True)


def test_groups_are_installed_by_name_or_by_default_and_development_tools_are_not(tmp_path: Path) -> None:
    named = locked(tmp_path, "logging", "gpu")
    assert (named.extras, named.groups, named.loggers) == (("gpu",), ("logging",), ("wandb", "mlflow"))
    default = locked(tmp_path, project="[tool.uv]\ndefault-groups = ['dev', 'logging']\n")
    assert (default.groups, default.loggers) == ((), ("wandb", "mlflow"))
    with pytest.raises(UsageError, match=r"checkout is at \.\./checkout"):
        locked(tmp_path, "dev")


@pytest.mark.parametrize(
    ("extras", "problem", "hint"),
    [
        (("train",), r"has no extra or dependency group train", "cpu, dev, gpu, logging"),
        (("cpu", "gpu"), r"cpu and gpu conflict", "[cpu]"),
    ],
)
def test_extras_that_cannot_be_installed_are_refused(
    tmp_path: Path, extras: tuple[str, ...], problem: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        locked(tmp_path, *extras)
    assert hint in error.value.hint


def test_a_workspace_without_a_project_at_its_root_installs_its_members_dependencies(tmp_path: Path) -> None:
    text = (
        'requires-python = ">=3.11"\n[manifest]\nmembers = ["a"]\n'
        '[[package]]\nname = "a"\nversion = "1"\nsource = { virtual = "packages/a" }\n'
        'dependencies = [{ name = "wandb" }]\n'
        '[[package]]\nname = "wandb"\nversion = "1"\n[[package]]\nname = "mlflow"\nversion = "1"\n'
    )
    packages = locked(tmp_path, text=text)
    assert (packages.loggers, packages.requires_python) == (("wandb",), ">=3.11")
