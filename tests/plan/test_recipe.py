"""Dockerfiles made for one spec: they keep the rules of the recipe, and each case has its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from launcher.cli.ui.plan_page import plan_lines
from launcher.errors import PlanRefused
from launcher.inputs.requirements import read_requirements
from launcher.plan.build import image
from tests.containers.lint import RULES
from tests.containers.lint import parsed as parsed_dockerfile
from tests.plan.planning import CATALOG, context, planned, spec

NGC = "nvcr.io/nvidia/pytorch:25.10-py3"
UV_LOCK = """\
version = 1

[[package]]
name = "mine"
version = "0.1.0"
source = { virtual = "." }

[[package]]
name = "torch"
version = "2.9.1+cu128"
source = { registry = "https://download.pytorch.org/whl/cu128" }
"""
CONDA = "name: x\ndependencies:\n  - python=3.12\n  - pip:\n    - einops\n"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torch": ("requirements.txt", "torch==2.9.1+cu128\ntorchvision\n", {}),
    "git": ("requirements.txt", "mine @ git+https://example.com/a/b@main\n", {}),
    "hashes": ("requirements.txt", "torch==2.9.1 --hash=sha256:00\n", {}),
    "secret": ("requirements.txt", "mine\n", {"build_secrets": ["INDEX_TOKEN"]}),
    "uv": ("uv.lock", UV_LOCK, {}),
    "conda": ("environment.yml", CONDA, {}),
    "base torch": ("requirements.txt", "einops\n", {"base": NGC}),
    "no python": ("requirements.txt", "torch==2.9.1\n", {"base": "nvidia/cuda:12.6.3-devel-ubuntu20.04"}),
    "source build": (
        "requirements.txt",
        "torch==2.9.1\nflash-attn==2.8.3\n",
        {"base": "nvidia/cuda:12.8.1-devel-ubuntu24.04"},
    ),
    "setup": (
        "requirements.txt",
        "torchvision\n",
        {"setup": ["apt-get install --yes --no-install-recommends ffmpeg", "pip install 'apex<1' --no-build-isolation",
                   "git clone https://example.com/a"]},
    ),
}  # fmt: skip


def dockerfile(folder: Path, name: str, text: str, fields: dict[str, Any], **other: Any) -> str:
    (folder / name).write_text(text)
    (folder / "pyproject.toml").touch()
    found = image(spec(image=fields, **other), CATALOG, context(packages=read_requirements(folder / name).packages))
    assert isinstance(found.dockerfile, str)
    return found.dockerfile


@pytest.mark.parametrize("case", CASES)
def test_a_made_recipe_keeps_the_recipes_rules(tmp_path: Path, case: str) -> None:
    file = parsed_dockerfile(dockerfile(tmp_path, *CASES[case]))
    skipped = "only_the_environment_leaves_the_build"
    found = [f"{rule.__name__}: {one}" for rule in RULES if rule.__name__ != skipped for one in rule(file)]
    assert found == []
    assert [stage.name for stage in file.stages][-2:] == ["dependencies", "train"]


@pytest.mark.parametrize(
    ("case", "words", "absent"),
    [
        ("torch", ['"torch==2.9.1+cu128" --index-url https://download.pytorch.org/whl/cu128',
                   '"torchvision==0.24.1+cu128"', "node.lock"], ["requirements.lock", "git", "uv"]),
        ("git", ["install --yes --no-install-recommends git", "requirements.lock", 'torch-cu126.lock'], ["node.lock"]),
        ("hashes", ["pip install --requirement /opt/venv/requirements.txt"], ["--constraint", "torch=="]),
        ("secret", ["--mount=type=secret,id=INDEX_TOKEN"], ["ARG INDEX_TOKEN", "ENV INDEX_TOKEN"]),
        ("uv", ["uv sync --frozen", "COPY pyproject.toml uv.lock"], ["pip install --requirement"]),
        ("conda", ["micromamba create", "node.lock"], ["python3 -m venv"]),
        ("base torch", ["site.addsitedir", "--target /opt/launch/packages"], ["torch==2", "gcc"]),
        ("no python", ["uv python install 3.12", "COPY --from=build /opt/python"], ["RUN python3 -m venv"]),
        ("source build", ["--no-build-isolation", '"flash-attn==2.8.3"'], []),
        ("setup", ["torch-cu126.lock", "--extra-index-url https://download.pytorch.org/whl/cu126"], ["node.lock"]),
    ],
)  # fmt: skip
def test_each_case_has_its_steps(tmp_path: Path, case: str, words: list[str], absent: list[str]) -> None:
    text = dockerfile(tmp_path, *CASES[case])
    assert [word for word in words if word not in text] == []
    assert [word for word in absent if word in text] == []


def test_each_case_has_a_tag_of_its_own_which_follows_the_locks(tmp_path: Path) -> None:
    def tag(case: str, **world: Any) -> str:
        name, text, fields = CASES[case]
        (tmp_path / name).write_text(text)
        (tmp_path / "pyproject.toml").touch()
        packages = read_requirements(tmp_path / name).packages
        return image(spec(image=fields), CATALOG, context(packages=packages, base="python:3.12", **world)).dependencies

    assert len({tag(case) for case in CASES}) == len(CASES)
    from launcher.plan.model import Content

    assert tag("torch") != tag("torch", locks=Content(digest="new"))
    assert tag("torch") == tag("torch", recipe=Content(digest="new"))


def test_the_trainer_keeps_its_own_torch_on_a_base_that_has_one() -> None:
    found = image(spec(image={"base": NGC}, run={"config": {}}), CATALOG, context())
    assert (found.dockerfile, found.wheel) == (UNSET, "cu126")
    with pytest.raises(PlanRefused, match=r"run\.script"):
        image(spec(image={"base": NGC, "torch": "base"}, run={"config": {}}), CATALOG, context())


def test_the_bases_torch_is_used_on_request_and_by_default_where_the_base_is_known_for_it() -> None:
    assert image(spec(image={"base": NGC}), CATALOG, context()).wheel == "base"
    mine = "us-docker.pkg.dev/p/r/mine:1"
    assert image(spec(image={"base": mine}), CATALOG, context()).wheel == "cu126"
    assert image(spec(image={"base": mine, "torch": "base"}), CATALOG, context()).wheel == "base"


def test_a_uv_lock_is_synchronised_with_the_extras_and_groups_of_the_spec(tmp_path: Path) -> None:
    lock = UV_LOCK.replace(
        'source = { virtual = "." }\n',
        'source = { virtual = "." }\noptional-dependencies = { train = [] }\ndev-dependencies = { dev = [] }\n',
    )
    (tmp_path / "uv.lock").write_text(lock)
    (tmp_path / "pyproject.toml").touch()
    packages = read_requirements(tmp_path / "uv.lock", ("train", "dev")).packages
    text = image(spec(), CATALOG, context(packages=packages)).dockerfile
    assert isinstance(text, str)
    assert "uv sync --frozen --no-install-project --inexact" in text
    assert "--python /opt/venv/bin/python --extra train --group dev\n" in text


def test_a_uv_lock_without_torch_gets_the_pinned_one(tmp_path: Path) -> None:
    text = dockerfile(tmp_path, "uv.lock", UV_LOCK.partition('[[package]]\nname = "torch"')[0], {})
    assert "torch-cu126.lock" in text
    assert "requirements.lock" in text


def test_the_trainer_and_conda_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match="conda"):
        dockerfile(tmp_path, "environment.yml", CONDA, {}, run={"config": {}})


@pytest.mark.parametrize("base", [{}, {"base": NGC}, {"build_secrets": ["INDEX_TOKEN"]}], ids=str)
def test_apt_lines_of_the_setup_come_before_the_packages_and_other_lines_after_them(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    name, text, fields = CASES["setup"]
    stages = {stage.name: stage for stage in parsed_dockerfile(dockerfile(tmp_path, name, text, fields | base)).stages}

    def position(words: str, stage: str = "dependencies") -> int:
        (number,) = [n for n, step in enumerate(stages[stage].steps) if words in step.text]
        return number

    if "build" in stages:
        assert position("recommends ffmpeg", "build") < position("--requirement /opt/venv/requirements.txt", "build")
        packages = position("--from=build /opt/torch")
    else:
        packages = position("pip install --requirement /opt/venv/requirements.txt")
    apt, pip, clone = map(position, ("recommends ffmpeg", "--no-build-isolation", "git clone"))
    steps = [step.text for step in stages["dependencies"].steps]
    assert apt < packages < pip < clone
    assert max(position("PATH=/opt/venv/bin"), steps.index("/workspace")) < pip
    assert clone < steps.index("1000:1000")
    assert all(("--mount=type=secret" in steps[n]) == ("build_secrets" in base) for n in (apt, pip, clone))
    assert "PIP_CONSTRAINT=/opt/venv/constraints.txt" in steps[pip]


def test_the_setup_is_in_the_tag_and_in_the_run_id_only_where_it_is_set() -> None:
    lines = [(), ("true",), ("true", "false"), ("false", "true")]
    plans = [planned(image={"setup": setup} if setup else {}) for setup in lines]
    assert len({plan.run for plan in plans}) == len({plan.image and plan.image.dependencies for plan in plans}) == 4
    assert plans[0].run == planned().run
    assert plans[0].image == planned(image={"setup": []}).image


def test_setup_may_install_what_a_requirements_file_lacks() -> None:
    planned(run={"module": "mine", "loggers": ["wandb"]}, image={"setup": ["pip install wandb"]})


def test_a_plan_names_the_builders_that_can_run_the_setup() -> None:
    def setup(**fields: Any) -> list[str]:
        image = {"setup": ["apt-get install -y git", "true"], **fields}
        lines = [*plan_lines(planned(image=image), spec(image=image))]
        return lines[next(n for n, line in enumerate(lines) if line.startswith("setup ")) :][:4]

    lines = setup()
    assert lines[:2] == ["setup     apt-get install -y git", "          true"]
    assert "Docker engine or Cloud Build" in " ".join(lines)
    assert "Cloud Build" not in " ".join(setup(build_secrets=["TOKEN"]))


def test_a_custom_wheel_and_setup_do_not_go_together() -> None:
    with pytest.raises(PlanRefused, match=r"image\.torch: .* image\.setup"):
        image(spec(image={"torch": "mine.whl", "setup": ["true"]}), CATALOG, context())
