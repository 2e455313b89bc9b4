"""What is read of a project without running it, and what installing it for the image writes."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch_train.common import contract
from launcher.errors import UsageError
from launcher.images.pipeline import code_layers
from launcher.images.source_files import Source
from launcher.inputs import content
from launcher.inputs.code_files import collect_code
from launcher.inputs.python_project import UNKNOWN, installed_files, read_project, read_projects
from launcher.inputs.requirements import read_requirements

BACKEND = "[build-system]\nbuild-backend = '{}'\n"
PROJECT = "[project]\nname = 'My.Lib'\n"
DYNAMIC = f"{PROJECT}dynamic = ['version']\n"
SETUP_PY = """
from setuptools import Extension, setup, find_packages
needs = ["torch>=2", "einops"]
name = "my-lib"
def version():
    return open("version.txt").read()
setup(
    name=name, version=version(), packages=find_packages("lib"), package_dir={"": "lib"}, install_requires=needs,
    extras_require={"dev": ["pytest"]}, entry_points={"console_scripts": ["my-train = my_lib.main:run"]},
    EXTENSIONS
)
"""


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "version", "roots"),
    [
        ({"pyproject.toml": f"{PROJECT}version = 'v1.2'", "my_lib/__init__.py": ""}, "1.2", ("",)),
        (
            {
                "pyproject.toml": f"{DYNAMIC}[tool.setuptools.dynamic]\nversion = {{attr = 'my_lib.__version__'}}",
                "src/my_lib/__init__.py": "from .about import number as __version__",
                "src/my_lib/about.py": "number: str = '2.0rc1'",
            },
            "2.0rc1",
            ("src",),
        ),
        (
            {
                "pyproject.toml": f"{DYNAMIC}[tool.setuptools.dynamic]\nversion = {{file = 'NUMBER'}}\n"
                "[tool.setuptools.packages.find]\nwhere = ['python']",
                "NUMBER": "3\n",
            },
            "3",
            ("python",),
        ),
        (
            {
                "pyproject.toml": BACKEND.format("hatchling.build")
                + DYNAMIC
                + "[tool.hatch.version]\npath = 'code/a.py'\n"
                "[tool.hatch.build.targets.wheel]\npackages = ['code/my_lib']",
                "code/a.py": "VERSION = '4.1'",
            },
            "4.1",
            ("code",),
        ),
        (
            {
                "pyproject.toml": BACKEND.format("pdm.backend")
                + DYNAMIC
                + "[tool.pdm.version]\npath = 'src/a/v.py'\n[tool.pdm.build]\npackage-dir = 'src'",
                "src/a/v.py": "__version__ = '5'",
            },
            "5",
            ("src",),
        ),
        (
            {
                "pyproject.toml": BACKEND.format("poetry.core.masonry.api")
                + "[tool.poetry]\nname = 'my-lib'\nversion = '6'\npackages = [{include = 'a', from = 'lib'}]"
            },
            "6",
            ("lib",),
        ),
        (
            {"pyproject.toml": BACKEND.format("flit_core.buildapi") + DYNAMIC, "my_lib.py": "__version__ = '7'"},
            "7",
            ("",),
        ),
        (
            {"pyproject.toml": BACKEND.format("uv_build") + f"{PROJECT}version = '8'", "src/my_lib/__init__.py": ""},
            "8",
            ("src",),
        ),
        (
            {"setup.cfg": "[metadata]\nname = a\nversion = file: V\n[options]\npackage_dir =\n  =src", "V": "9"},
            "9",
            ("src",),
        ),
        ({"setup.py": SETUP_PY.replace("EXTENSIONS", ""), "lib/my_lib/version.txt": "10"}, "10", ("lib",)),
        ({"pyproject.toml": DYNAMIC, "src/__init__.py": "", "src/my_lib/__init__.py": ""}, UNKNOWN, ("",)),
    ],
)
def test_name_version_and_folders_are_read_for_each_backend(
    tmp_path: Path, files: dict[str, str], version: str, roots: tuple[str, ...]
) -> None:
    project = read_project(written(tmp_path, files))
    assert project
    assert (project.version, project.roots) == (version, roots)


@pytest.mark.parametrize(("commits", "version"), [(0, "1.2"), (2, "1.3.dev2+g")])
def test_a_version_of_the_repository_is_its_newest_tag(tmp_path: Path, commits: int, version: str) -> None:
    written(tmp_path, {"pyproject.toml": DYNAMIC})
    words = ["-c", "user.name=me", "-c", "user.email=me@e.com"]
    for step in (["init", "-q"], *(["commit", "-q", "--allow-empty", "-m", str(n)] for n in range(commits + 1))):
        subprocess.run(["git", *words, *step], cwd=tmp_path, check=True)
        if step[-1] == "0":
            subprocess.run(["git", *words, "tag", "v1.2"], cwd=tmp_path, check=True)
    project = read_project(tmp_path)
    assert project
    assert project.version.startswith(version)


def test_what_the_folder_lacks_of_compiled_modules(tmp_path: Path) -> None:
    listed = SETUP_PY.replace(
        "EXTENSIONS", "ext_modules=[Extension('my_lib.fast', ['a.c']), Extension(name='my_lib.more')]"
    )
    project = read_project(
        written(tmp_path, {"setup.py": listed, "lib/my_lib/fast.cpython-312-x86_64-linux-gnu.so": ""})
    )
    assert project
    assert (project.compiled, project.requires) == (("my_lib.more",), ("torch>=2", "einops"))
    computed = SETUP_PY.replace("EXTENSIONS", "ext_modules=everything()")
    project = read_project(written(tmp_path, {"setup.py": computed}))
    assert project
    assert project.compiled == ("what setup.py compiles",)
    rust = read_project(written(tmp_path / "rust", {"pyproject.toml": BACKEND.format("maturin") + PROJECT}))
    assert rust
    assert rust.compiled == ("what maturin builds",)


@pytest.mark.parametrize(
    "text", ["[project", "project = 1", "[project]\nname = 'a'\noptional-dependencies = 1", "[tool.black]"]
)
def test_a_file_that_describes_no_project_changes_nothing(tmp_path: Path, text: str) -> None:
    assert installed_files(read_projects(written(tmp_path, {"pyproject.toml": text}))) == {}


def test_a_line_that_installs_the_project_is_its_dependencies(tmp_path: Path) -> None:
    pyproject = f"{PROJECT}dependencies = ['torch>=2']\n[project.optional-dependencies]\n"
    pyproject += "dev = ['pytest', 'my-lib[log]']\nlog = ['wandb']\n"
    core = "[project]\nname = 'core'\nversion = '1'\n"
    folder = written(tmp_path, {"pyproject.toml": pyproject, "libs/core/pyproject.toml": core})
    written(folder, {"requirements.txt": "einops\n-e .[dev]  # ours\n-e libs/core\n", "requirements/all.txt": ".\n"})
    assert read_requirements(folder / "requirements.txt").text.split() == ["einops", "torch>=2", "pytest", "wandb"]
    projects = read_requirements(folder / "requirements.txt").packages.projects
    assert [project.folder for project in projects] == [str(folder), str(folder / "libs/core")]
    assert read_requirements(folder / "requirements/all.txt").text.split() == ["torch>=2"]
    written(folder, {"libs/old/setup.py": SETUP_PY.replace("EXTENSIONS", ""), "old.txt": "-e libs/old[dev]\n"})
    assert read_requirements(folder / "old.txt").text.split() == ["torch>=2", "einops", "pytest"]
    written(folder, {"libs/old/setup.py": SETUP_PY.replace("EXTENSIONS", "ext_modules=[Extension('a.b', [])]")})
    with pytest.raises(UsageError, match=r"old\.txt:1: my-lib has modules to compile \(a\.b\)"):
        read_requirements(folder / "old.txt")


MAIN = """
import importlib.metadata as metadata, my_lib
def run():
    names = [point.name for point in metadata.entry_points(group="console_scripts")]
    print("installed", metadata.version("my-lib"), "my-train" in names, my_lib.__file__)
"""


def test_the_codes_layer_makes_it_an_installed_package(tmp_path: Path) -> None:
    """The layers are unpacked and the image's node runs a program of the project with them."""
    pyproject = f"{DYNAMIC}[project.scripts]\nmy-train = 'my_lib.main:run'\n"
    code = written(
        tmp_path / "code",
        {"pyproject.toml": pyproject, "src/my_lib/__init__.py": "__version__ = '1.5'", "src/my_lib/main.py": MAIN},
    )
    files, root = tuple(collect_code(code)), tmp_path / "image"
    source = Source(trainer=content.trainer(), code=files, installed=installed_files(read_projects(code)))
    (tmp_path / "layers").mkdir()
    for made in code_layers(source, tmp_path / "layers"):
        with tarfile.open(made.path) as tar:
            tar.extractall(root, filter="tar")
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": python, "PYTHONPATH": f"{root}/opt/launch", "PYTHONSAFEPATH": "1", "HOME": str(tmp_path)}
    for words in (["--command", "--", "my-train"], ["--launcher", "python", "--module", "my_lib.absent"]):
        node = [sys.executable, "-m", "launch_train.node", *words]
        ran = subprocess.run(node, cwd=root / "workspace", env=env, capture_output=True, text=True, check=False)
        if "my-train" in words:
            assert f"installed 1.5 True {root}/workspace/src/my_lib/__init__.py" in ran.stdout, ran
        else:
            assert (ran.returncode, "no module my_lib.absent" in ran.stdout + ran.stderr) == (contract.Exit.USAGE, True)
