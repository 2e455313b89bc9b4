"""Requirements as one text, without what the image can't have; and what they ask of PyTorch's build."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.inputs.content import of_text
from launcher.inputs.requirements import read_requirements
from launcher.plan.model import Packages


def requirements(path: Path, names: tuple[str, ...] = ()) -> str:
    return read_requirements(path, names).text


def packages(folder: Path, text: str, name: str = "requirements.txt") -> Packages:
    if name == "uv.lock":
        (folder / "pyproject.toml").write_text("")
    return read_requirements(written(folder, text, name)).packages


def written(folder: Path, text: str, name: str = "requirements.txt") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_a_file_with_what_it_includes(tmp_path: Path) -> None:
    written(tmp_path, "einops\n-r deeper.txt\n", "more/base.txt")
    written(tmp_path, "rich==15.0\n", "more/deeper.txt")
    path = written(
        tmp_path, "\ufeffnumpy>=2  # ours\n--requirement=more/base.txt\n--extra-index-url https://e.com/simple\n"
    )
    assert requirements(path) == "numpy>=2  # ours\neinops\nrich==15.0\n--extra-index-url https://e.com/simple\n"


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("requirements.txt", "numpy\ntorch>>2\n", "requirements.txt:2"),
        ("requirements.txt", "# ours\n\neinops 0.8\n", "requirements.txt:3"),
        ("requirements.txt", "numpy ==\n", "requirements.txt:1"),
        ("requirements.txt", "numpy=1.2\n", "requirements.txt:1"),
        ("requirements.txt", "rich[\n", "requirements.txt:1"),
        ("requirements.txt", "rich; python_versoin > '3'\n", "requirements.txt:1"),
        ("requirements.txt", "einops \\\n  >>1\n", "requirements.txt:1"),
        ("requirements.txt", "<<<<<<< HEAD\n", "requirements.txt:1"),
        ("requirements.txt", "pip install numpy\n", "requirements.txt:1"),
        ("pyproject.toml", "[project]\ndependencies = [\n'numpy',\n'torch>>2']\n", "pyproject.toml:4"),
    ],
)
def test_what_pip_can_not_read(tmp_path: Path, name: str, text: str, place: str) -> None:
    with pytest.raises(UsageError) as refused:
        requirements(written(tmp_path, text, name))
    assert f"{tmp_path}/{place}: " in refused.value.problem
    assert refused.value.field == "image.requirements"


@pytest.mark.parametrize(
    "text",
    [
        "numpy==2.1 --hash=sha256:aa \\\n    --hash=sha256:bb\n",
        "numpy \\\n  >=2\n",
        "--index-url https://e.com/simple\n--pre\n--only-binary :all:\n-i https://e.com\n",
        "git+https://github.com/a/b@main#egg=b\n",
        "git+https://${TOKEN}@github.com/a/b\n",
        "mine @ git+https://github.com/a/b@main\n",
        "jax[cuda12]~=0.5,!=0.5.1 ; sys_platform == 'linux'  # GPUs\n",
        "zope.interface\n\n   # nothing\n\t\n",
        "torch===2.13.0+cpu\nnumpy == 2.*\n",
        "${NAME}==1\n",
        "numpy\\",
    ],
)
def test_what_pip_can_read(tmp_path: Path, text: str) -> None:
    requirements(written(tmp_path, text))


@pytest.mark.parametrize(
    "line",
    [
        "-f https://data.pyg.org/whl/torch-2.13.0+cpu.html",
        "--find-links=https://data.pyg.org/whl/torch.html",
        "-c https://example.com/limits.txt",
        "-e git+https://github.com/a/b#egg=b",
        "mine @ https://example.com/mine-1.0-py3-none-any.whl",
        "https://example.com/mine-1.0.tar.gz",
        "zipp  # not a .zip",
        "e3nn[dev]>=0.5; python_version > '3'",
    ],
)
def test_addresses_are_no_files_of_this_machine(tmp_path: Path, line: str) -> None:
    assert requirements(written(tmp_path, f"{line}\n")) == f"{line}\n"


def test_a_password_is_reported_with_its_line(tmp_path: Path) -> None:
    base = written(tmp_path, "rich\n--index-url https://me:hunter22@pypi.example/simple\n", "base.txt")
    path = written(tmp_path, "numpy\nscipy\n-r base.txt\n")
    with pytest.raises(UsageError) as refused:
        requirements(path)
    assert f"{base}: line 2 contains a password" in refused.value.problem
    assert "hunter22" not in str(refused.value)


PYPROJECT = """
[project]
name = "My.Lib"
dynamic = ["dependencies"]
[project.optional-dependencies]
gpu = ["flash-attn"]
train = ["my_lib[gpu]", "accelerate>=1", "core[fast]>=2 ; python_version > '3.9'"]
[dependency-groups]
log = ["wandb", {include-group = "more"}]
more = ["rich"]
cycle = [{include-group = "cycle"}]
[tool.setuptools.dynamic]
dependencies = {file = ["requirements/base.txt"]}
[tool.setuptools.dynamic.optional-dependencies]
docs = {file = "requirements/docs.txt"}
[tool.uv.sources]
core = {git = "https://example.com/core", tag = "v2", subdirectory = "py"}
accelerate = {index = "pytorch-cpu"}
"""


def test_extras_and_groups_of_a_pyproject_with_its_uv_sources(tmp_path: Path) -> None:
    written(tmp_path, "numpy  # arrays\n", "requirements/base.txt")
    written(tmp_path, "sphinx\n", "requirements/docs.txt")
    path = written(tmp_path, PYPROJECT, "pyproject.toml")
    assert requirements(path) == "numpy  # arrays\n"
    assert requirements(path, ("train", "log", "docs")).splitlines()[1:] == [
        "flash-attn",
        "accelerate>=1",
        'core[fast] @ git+https://example.com/core@v2#subdirectory=py ; python_version > "3.9"',
        "wandb",
        "rich",
        "sphinx",
    ]
    for name, problem in (("trian", "no extra or dependency group trian"), ("cycle", "cycle includes itself")):
        with pytest.raises(UsageError, match=problem):
            requirements(path, (name,))


def test_the_dependencies_of_a_pyproject_and_nothing_else_of_it(tmp_path: Path) -> None:
    text = '[project]\nname = "x"\nversion = "1"\ndependencies = ["einops>=0.8", "rich; python_version > \'3\'"]\n'
    one = requirements(written(tmp_path, text, "pyproject.toml"))
    assert one == "einops>=0.8\nrich; python_version > '3'\n"
    other = requirements(written(tmp_path, text.replace('"1"', '"2"'), "pyproject.toml"))
    assert of_text(one) == of_text(other) != of_text(one + "x\n")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("requirements.txt", "numpy\n-e .\n", "requirements.txt:2: '-e .' names something on this machine"),
        ("requirements.txt", "./wheels/x.whl", "names something on this machine"),
        ("requirements.txt", "mine @ file:///home/x", "names something on this machine"),
        ("requirements.txt", "--find-links=wheels", "names something on this machine"),
        ("requirements.txt", "-e git+file:///home/x", "names something on this machine"),
        ("requirements.txt", "mine-1.0-py3-none-any.whl", "names something on this machine"),
        ("requirements.txt", "wheels/mine-1.0.tar.gz ; python_version > '3'", "names something on this machine"),
        ("requirements.txt", "-c limits.txt", "names something on this machine"),
        ("requirements.txt", "-r gone.txt", "gone.txt can't be read: No such file"),
        ("requirements.txt", "-r requirements.txt", "includes itself"),
        ("requirements.txt", "--index-url https://me:hunter22@pypi.example/simple", "line 1 contains a password"),
        ("requirements.txt", "git+https://ghp_" + "a" * 20 + "@github.com/a/b", "line 1 contains a password"),
        ("pyproject.toml", "[project", "isn't TOML"),
        ("pyproject.toml", "[project]\nname = 'x'\n", r"has no \[project\] dependencies"),
        ("pyproject.toml", "project = 1\n", r"has no \[project\] dependencies"),
        ("pyproject.toml", "[project]\ndependencies = ['x @ file:///a']\n", "names something on this machine"),
    ],
)
def test_unsupported_requirements(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        requirements(written(tmp_path, text, name))


def test_a_binary_requirements_file(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="can't be read"):
        requirements(tmp_path / "requirements.txt")
    with pytest.raises(UsageError, match="can't be read"):
        requirements(tmp_path / ("x" * 300))


# --- PyTorch's build and the clients of loggers ----------------------------------------------------------------------


def test_a_requirement_has_its_place_even_in_an_included_file(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("# GPU\ntorch==2.9.1+cu128 \\\n  --hash=sha256:00\n")
    found = packages(tmp_path, "einops\n-r more.txt\nTorchVision>=0.24\n")
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
    assert packages(tmp_path, f"{line}\nnumpy\n").index_build == build


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
    assert packages(tmp_path, f"{line}\n").git is git


def test_a_marker_for_another_system_does_not_count(tmp_path: Path) -> None:
    found = packages(tmp_path, "torch==2.8 ; sys_platform == 'darwin'\ntorch==2.9.1 ; python_version >= '3.11'\n")
    assert [one.specifier for one in found.named] == ["==2.9.1"]


def test_a_uv_lock_has_exact_versions_and_indexes(tmp_path: Path) -> None:
    text = (
        'version = 1\n\n[[package]]\nname = "torch"\nversion = "2.9.1"\n'
        'source = { registry = "https://download.pytorch.org/whl/cu128" }\n\n'
        '[[package]]\nname = "mine"\nversion = "1"\nsource = { git = "https://e.com/mine" }\n'
    )
    found = packages(tmp_path, text, "uv.lock")
    (torch,) = found.named
    assert (torch.specifier, torch.build, torch.where) == ("==2.9.1", "cu128", f"{tmp_path}/uv.lock:4")
    assert (found.tool, found.hashed, found.git) == ("uv", True, True)


def test_a_uv_lock_with_a_folder_of_this_machine_is_refused(tmp_path: Path) -> None:
    text = '[[package]]\nname = "other"\nversion = "1"\nsource = { editable = "../other" }\n'
    with pytest.raises(UsageError, match=r"other is at \.\./other"):
        packages(tmp_path, text, "uv.lock")


def test_a_conda_environment_has_its_pip_packages(tmp_path: Path) -> None:
    found = packages(tmp_path, "dependencies:\n- python=3.12\n- pip:\n  - torch==2.9.1\n", "environment.yml")
    assert (found.tool, [one.where for one in found.named]) == ("conda", [f"{tmp_path}/environment.yml:4"])
    with pytest.raises(UsageError, match=r"environment\.yml:4"):
        packages(tmp_path, "dependencies:\n- python=3.12\n- pip:\n  - ./mine\n", "environment.yml")
    with pytest.raises(UsageError, match="has no dependencies"):
        packages(tmp_path, "[]\n", "environment.yml")


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
    assert packages(tmp_path, text, name).loggers == ("wandb", "mlflow-skinny")


def test_a_logger_for_another_system_does_not_count(tmp_path: Path) -> None:
    assert packages(tmp_path, "wandb ; sys_platform == 'win32'\n# mlflow\n").loggers == ()
