"""What a requirements file, a uv.lock and an environment.yml say about PyTorch's build."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.inputs.packages import required_packages
from launcher.plan.model import Packages


def read(folder: Path, text: str, name: str = "requirements.txt") -> Packages:
    (folder / name).write_text(text)
    return required_packages(folder / name)


def test_a_requirement_has_its_place_even_in_an_included_file(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("# GPU\ntorch==2.9.1+cu128 \\\n  --hash=sha256:00\n")
    found = read(tmp_path, "einops\n-r more.txt\nTorchVision>=0.24\n")
    assert [(one.name, one.specifier, one.build) for one in found.named] == [
        ("torch", "==2.9.1", "cu128"),
        ("torchvision", ">=0.24", ""),
    ]
    assert [one.where.removeprefix(f"{tmp_path}/") for one in found.named] == ["more.txt:2", "requirements.txt:3"]
    assert (found.hashed, found.git, found.tool) == (True, False, "pip")


@pytest.mark.parametrize(
    ("line", "build"),
    [
        ("--index-url https://download.pytorch.org/whl/cu128", "cu128"),
        ("--extra-index-url=https://download.pytorch.org/whl/cpu/", "cpu"),
        ("-i https://pypi.org/simple", ""),
        ("# --index-url https://download.pytorch.org/whl/cu128", ""),
        ("--extra-index-url https://download.pytorch.org/whl/nightly/cu130", ""),
    ],
)
def test_an_index_of_pytorch_names_a_build(tmp_path: Path, line: str, build: str) -> None:
    assert read(tmp_path, f"{line}\nnumpy\n").index_build == build


@pytest.mark.parametrize(
    ("line", "git"),
    [
        ("a @ git+https://e.com/a@main", True),
        ("git+ssh://git@e.com/a", True),
        ("-e git+https://e.com/a#egg=a", True),
        ("gitpython", False),
        ("# git+https://e.com/a", False),
    ],
)
def test_packages_of_repositories_need_git(tmp_path: Path, line: str, git: bool) -> None:
    assert read(tmp_path, f"{line}\n").git is git


def test_a_marker_for_another_system_does_not_count(tmp_path: Path) -> None:
    found = read(tmp_path, "torch==2.8 ; sys_platform == 'darwin'\ntorch==2.9.1 ; python_version >= '3.11'\n")
    assert [one.specifier for one in found.named] == ["==2.9.1"]


def test_a_uv_lock_has_exact_versions_and_indexes(tmp_path: Path) -> None:
    text = (
        'version = 1\n\n[[package]]\nname = "torch"\nversion = "2.9.1"\n'
        'source = { registry = "https://download.pytorch.org/whl/cu128" }\n\n'
        '[[package]]\nname = "mine"\nversion = "1"\nsource = { git = "https://e.com/mine" }\n'
    )
    found = read(tmp_path, text, "uv.lock")
    (torch,) = found.named
    assert (torch.specifier, torch.build, torch.where) == ("==2.9.1", "cu128", f"{tmp_path}/uv.lock:4")
    assert (found.tool, found.hashed, found.git) == ("uv", True, True)


def test_a_uv_lock_with_a_folder_of_this_machine_is_refused(tmp_path: Path) -> None:
    text = '[[package]]\nname = "other"\nversion = "1"\nsource = { editable = "../other" }\n'
    with pytest.raises(UsageError, match=r"other is at \.\./other"):
        read(tmp_path, text, "uv.lock")


def test_a_conda_environment_has_its_pip_packages(tmp_path: Path) -> None:
    found = read(tmp_path, "dependencies:\n- python=3.12\n- pip:\n  - torch==2.9.1\n", "environment.yml")
    assert (found.tool, [one.where for one in found.named]) == ("conda", [f"{tmp_path}/environment.yml:4"])
    with pytest.raises(UsageError, match=r"environment\.yml:4"):
        read(tmp_path, "dependencies:\n- python=3.12\n- pip:\n  - ./mine\n", "environment.yml")
    with pytest.raises(UsageError, match="has no dependencies"):
        read(tmp_path, "[]\n", "environment.yml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("requirements.txt", "einops\nWandB[media]>=0.20 ; sys_platform == 'linux'\nmlflow_skinny==3.5\n"),
        ("pyproject.toml", "[project]\ndependencies = ['wandb', 'mlflow-skinny', 'einops']\n"),
        ("uv.lock", "".join(f'[[package]]\nname = "{one}"\nversion = "1"\n' for one in ("wandb", "mlflow-skinny"))),
        ("environment.yml", "dependencies:\n- conda-forge::wandb>=0.20\n- pip:\n  - mlflow-skinny\n"),
    ],
)
def test_clients_of_loggers_are_found_in_any_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path, text, name).loggers == ("wandb", "mlflow-skinny")


def test_a_logger_for_another_system_does_not_count(tmp_path: Path) -> None:
    assert read(tmp_path, "wandb ; sys_platform == 'win32'\n# mlflow\n").loggers == ()
