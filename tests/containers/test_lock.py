"""The locks are whole, agree with the recipe, and name no place but the packages'."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from containers import lock
from launcher.images.registry import parse
from launcher.inputs import content

HERE = Path(lock.__file__).parent
ROOT = HERE.parent
LOCKS = ("requirements.lock", "torch-cu130.lock", "node.lock")

LOCKED = """\
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:01 \\
    --hash=sha256:02
nvidia-nccl-cu13==2.29.7 ; sys_platform == 'linux' \\
    --hash=sha256:03
torch==2.13.0 \\
    --hash=sha256:04
torchmetrics==1.0 \\
    --hash=sha256:05
"""


def packages(name: str) -> dict[str, str]:
    """Name -> version of a lock's packages."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\n]+)", (HERE / name).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_each_package_has_a_version_and_hashes_and_no_address(name: str) -> None:
    text = (HERE / name).read_text(encoding="utf-8")
    blocks = [block for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if block]
    assert len(blocks) > 10
    for block in blocks:
        first, *rest = block.splitlines()
        assert re.fullmatch(r"[a-z0-9-]+==[^ ;]+( ; .+)? \\", first)
        assert rest
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in rest)
    assert not re.search(r"://|--(extra-)?index-url|--find-links|file:", text)


def test_the_locks_have_what_the_recipe_and_the_requirements_want() -> None:
    dockerfile = (HERE / "train.Dockerfile").read_text(encoding="utf-8")
    assert packages("torch-cu130.lock")["torch"] == lock.torch_version(dockerfile)
    wanted = re.findall(r"^([a-z0-9-]+)", (HERE / "requirements.in").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(wanted) >= {"numpy", "tensorboard", "google-cloud-storage", "google-crc32c", "transformers"}
    assert set(wanted) <= set(packages("requirements.lock"))
    assert {"sympy", "jinja2", "filelock", "fsspec", "networkx"} <= set(packages("requirements.lock"))  # PyTorch's
    torchs = r"torch$|triton|nvidia-(?!ml-py)|cuda-"
    assert not [name for name in packages("requirements.lock") if re.match(torchs, name)]


def test_pytorch_packages_are_separated_by_name() -> None:
    others, torch = lock.split(LOCKED)
    assert re.findall(r"^\S+?(?===)", others, re.MULTILINE) == ["numpy", "torchmetrics"]
    assert re.findall(r"^\S+?(?===)", torch, re.MULTILINE) == ["nvidia-nccl-cu13", "torch"]
    assert others.count("--hash") == 3
    assert sorted(others + torch) == sorted(LOCKED)


def test_the_first_base_is_the_recipes_own_and_no_digest_is_invented() -> None:
    rows = [row.split(",") for row in (HERE / "images.lock").read_text(encoding="utf-8").splitlines()]
    assert rows[0] == ["reference", "digest"]
    assert f"ARG BASE={rows[1][0]}\n" in (HERE / "train.Dockerfile").read_text(encoding="utf-8")
    assert parse(content.base_image()).tag == "3.12-slim-bookworm"
    assert all(not digest or re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for _, digest in rows[1:])


def test_digests_are_filled_in_where_a_registry_says_them_and_stay_where_it_does_not() -> None:
    table = "reference,digest\na/x:1,\nb/y:2,sha256:old\nc/z:3,sha256:kept\nd/w:4,\n"
    found = {"a/x:1": "sha256:new", "b/y:2": "sha256:newer"}
    renewed, problems = lock.renewed(table, found.get)
    assert renewed.splitlines() == [
        "reference,digest", "a/x:1,sha256:new", "b/y:2,sha256:newer", "c/z:3,sha256:kept", "d/w:4,",
    ]  # fmt: skip
    assert [problem.split(":")[0] for problem in problems] == ["c/z", "d/w"]


def test_a_registry_that_does_not_answer_has_no_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.digest("localhost:9/no/such:1", {"PATH": ""}) is None
    assert "localhost:9" in capsys.readouterr().err


def test_the_nodes_packages_are_locked_without_torch_and_are_not_in_the_default_recipe() -> None:
    wanted = re.findall(r"^([a-z0-9-]+)", (HERE / "node.in").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(wanted) <= set(packages("node.lock"))
    assert not [name for name in packages("node.lock") if re.match(r"torch$|triton|nvidia-(?!ml-py)|cuda-", name)]
    assert "node.lock" not in {file.name for file in content.recipe()}
    assert {"node.lock", "requirements.lock", "torch-cu130.lock"} <= {file.name for file in content.locks()}


def test_make_installs_packages_of_the_lock_alone() -> None:
    """Else a release of another project would change what the tests run."""
    installs = re.findall(r"pip .*install .*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(installs) == 3
    assert all(" -c dev.lock " in command or " --no-deps " in command for command in installs)
    assert all("==" in line for line in (ROOT / "colab.lock").read_text(encoding="utf-8").splitlines())


def test_the_tests_lock_has_what_the_project_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: [Requirement(text) for text in texts] for name, texts in project["optional-dependencies"].items()}
    own, *tools = extras["dev"]
    assert own.name == project["name"]
    wanted = [*map(Requirement, project["dependencies"]), *tools, *extras["judges"]]
    wanted += [requirement for extra in own.extras for requirement in extras[extra]]
    assert len(wanted) > 40
    locked = packages("../dev.lock")
    assert not [str(one) for one in wanted if locked[one.name.lower().replace(".", "-")] not in one.specifier]


@pytest.mark.slow
def test_an_index_that_does_not_answer_gives_no_hashes() -> None:
    """PyTorch's own; here an index that does not answer."""
    with pytest.raises(subprocess.CalledProcessError):
        lock.compiled("torch==2.13.0+cu126\n", python="3.11", index="http://127.0.0.1:9/whl/cu126")
