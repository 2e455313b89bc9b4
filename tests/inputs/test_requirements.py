"""Requirements as one text: what is included is there, and what the image can't have is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.inputs.content import of_text
from launcher.inputs.requirements import requirements


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
