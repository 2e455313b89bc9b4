"""Which PyTorch an image gets, by its requirements, the GPU and the driver; what can't work is refused at its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from launcher import catalog
from launcher.errors import PlanRefused
from launcher.inputs.content import base_image, data_folder
from launcher.inputs.requirements import read_requirements
from launcher.plan.build import image
from launcher.plan.model import Image, Torch
from launcher.plan.recipe import BASE_PYTHON, PINNED
from tests.plan.planning import CATALOG, context, env_of, planned, spec

FILE = "requirements.txt"


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def plan(text: str, target: str = "vertex", name: str = FILE, **fields: Any) -> Image:
        (tmp_path / name).write_text(text)
        (tmp_path / "pyproject.toml").touch()
        world = {"packages": read_requirements(tmp_path / name).packages, "base": "python:3.12"}
        if target == "image":
            return image(spec(**fields), CATALOG, context("vertex", **world))
        found = planned(target, world=world, **fields).image
        assert found
        return found

    return plan


def test_the_plans_constants_are_the_recipes() -> None:
    recipe = (data_folder("containers") / "train.Dockerfile").read_text(encoding="utf-8")
    assert f"ARG TORCH={PINNED}\n" in recipe
    assert f"python:{BASE_PYTHON}-" in base_image()
    assert PINNED in {one.version for one in catalog.load().torch_releases}


def test_each_release_has_pypis_build_and_a_driver_for_each_build() -> None:
    for one in CATALOG.torch_releases:
        assert one.pypi in one.builds
        assert set(one.builds) <= set(CATALOG.wheels)


@pytest.mark.parametrize(
    "text", ["", "torch\n", "torch>=2.6\n", f"torch=={PINNED}\n", "torchvision\n", "xformers\n", "einops\n"]
)
def test_requirements_that_the_pinned_torch_serves_change_nothing(made: Any, text: str) -> None:
    found = made(text)
    assert (found.torch, found.dockerfile, found.wheel) == (UNSET, UNSET, "cu126")
    assert found.dependencies == made("einops\n").dependencies


@pytest.mark.parametrize(
    ("text", "machine", "version", "build", "index"),
    [
        ("torch==2.9.1\n", "h100", "2.9.1", "cu126", "https://download.pytorch.org/whl/cu126"),
        ("torch==2.9.1+cu128\n", "h100", "2.9.1", "cu128", "https://download.pytorch.org/whl/cu128"),
        ("torch>=2.8,<2.10\n", "h100", "2.9.1", "cu126", "https://download.pytorch.org/whl/cu126"),
        ("--index-url https://download.pytorch.org/whl/cu128\ntorch==2.8.0\n", "h100", "2.8.0", "cu128", "…"),
        ("torch==2.5.1\n", "h100", "2.5.1", "cu124", ""),
        ("torch==2.9.1\n", "b200", "2.9.1", "cu128", ""),
        ("torch==2.7.1\n", "v100", "2.7.1", "cu126", ""),
        ("torchvision==0.24.1\n", "h100", "2.9.1", "cu126", "https://download.pytorch.org/whl/cu126"),
        ("torch==2.9.1\nxformers\n", "h100", "2.9.1", "cu128", ""),
        ("xformers==0.0.28\n", "h100", "2.4.1", "cu121", ""),
        ("triton==3.4.0\n", "h100", "2.8.0", "cu126", "…"),
        (
            "torch==2.9.1 ; sys_platform == 'linux'\ntorch==2.8 ; sys_platform == 'darwin'\n",
            "h100",
            "2.9.1",
            "cu126",
            "…",
        ),
        ("torch==2.9.1 --hash=sha256:00\n", "h100", "2.9.1", "cu128", ""),
    ],
)
def test_version_build_and_index(made: Any, text: str, machine: str, version: str, build: str, index: str) -> None:
    gpus = {"b200": 8}.get(machine, 2)
    found = made(text, "image", machine={"type": machine, "gpus": gpus})
    assert isinstance(found.torch, Torch)
    assert (found.torch.version, found.torch.build, found.wheel) == (version, build, build)
    assert found.min_driver == CATALOG.wheels[build]
    assert index == "…" or found.torch.index == index


@pytest.mark.parametrize(
    ("text", "fields", "words"),
    [
        ("rich\ntorch==2.9.1\n", {"run": {"config": {}}}, [f"{FILE}:2", "torch 2.13.0", "run.script"]),
        ("torch==2.9.1+cu126\n", {"machine": {"type": "b200", "gpus": 8}}, ["B200", "2.9.1+cu128 works"]),
        ("torch==2.9.1+cu130\n", {"machine": {"type": "v100", "gpus": 2}}, ["V100", "2.9.1+cu126 works"]),
        ("torch==2.6.0\n", {"machine": {"type": "b200", "gpus": 8}}, ["no kernels for NVIDIA B200", "works"]),
        ("torch==2.9.1+cu118\n", {}, ["has no build cu118", "cu126, cu128, cu130"]),
        ("torch==3.0\n", {}, ["no such release", "2.1.0 to "]),
        ("torch==2.9.1\ntorchvision==0.20.1\n", {}, ["torchvision==0.24.1"]),
        (
            "torch==2.9.1\nxformers==0.0.28\n",
            {},
            [f"{FILE}:1", "2.9.1 is compatible with xformers==0.0.33.post2", "torch 2.4.1"],
        ),
        ("torch==2.12.1\nxformers==0.0.34\n", {}, ["2.12.1 is compatible with xformers==0.0.35", "torch 2.10.0"]),
        ("torch==2.9.1\ntriton==3.2.0\n", {}, ["triton==3.5.1", "torch 2.6.0"]),
        ("triton==3.7.1\nxformers==0.0.28\n", {}, [f"{FILE}:1", "torch 2.13.0", "torch 2.4.1"]),
        ("torch==2.15.0\ntorchvision==0.29.0\n", {}, ["torchvision==0.29.0 is compatible with torch 2.14.0"]),
        ("xformers==0.0.20\n", {}, [f"{FILE}:1", "2.1.0 to "]),
        ("torch==2.9.1\ntorchvision==0.15.0\n", {}, ["torchvision==0.24.1"]),
        ("torch==2.1.2\n", {}, ["Python 3.12", "image.python=3.11"]),
        ("torch @ https://e.com/torch-2.9.1-cp312-cp312-linux_x86_64.whl\n", {}, ["by URL", "image.torch"]),
        ("flash-attn==2.8.3\n", {}, [f"{FILE}:1", "nvcc", "nvcr.io/nvidia/pytorch"]),
        (
            "torch==2.9.1\nflash-attn @ https://e.com/flash_attn-2.8.3+cu12torch2.8-cp312-cp312-linux_x86_64.whl\n",
            {},
            [f"{FILE}:2", "for torch 2.8", "gets torch 2.9.1"],
        ),
        (
            "torch==2.9.1\nflash-attn @ https://e.com/flash_attn-2.8.3+cu12torch2.9-cp311-cp311-linux_x86_64.whl\n",
            {},
            ["Python 3.11", "image.python=3.11"],
        ),
    ],
)
def test_what_can_not_work_is_refused_at_its_line(made: Any, text: str, fields: Any, words: list[str]) -> None:
    with pytest.raises(PlanRefused) as refused:
        made(text, "image", **fields)
    assert refused.value.field == "image.requirements"
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.9.1\nxformers==0.0.33.post9\n",
        "torch==2.9.1\nxformers>=0.0.36\n",
        "torch==2.9.1\ntorchvision==0.24.7\n",
        "torch==2.9.1\ntorchao==0.14.0\nbitsandbytes==0.50.2\n",
        "xformers==0.0.35\ntorch==2.14.1\n",
    ],
)
def test_an_unknown_pair_is_left_to_pip(made: Any, text: str) -> None:
    found = made(text, "image")
    assert found.torch.version in text
    assert "torchvision==" not in found.dockerfile


def test_xformers_gets_a_build_with_its_cuda_runtime(made: Any) -> None:
    """Up to torch 2.10 PyPI's build; since then PyPI's torch has CUDA 13, but xformers links CUDA 12."""
    for torch, build in (("2.10.0", "cu128"), ("2.12.1", "cu126")):
        assert made(f"torch=={torch}\nxformers\n", "vm", provisioning=["spot"]).wheel == build


def test_a_driver_that_is_too_old_is_refused_where_it_is_known(made: Any) -> None:
    family = {"image_family": "pytorch-2-7-cu128-ubuntu-2204-nvidia-570"}
    with pytest.raises(PlanRefused, match="570"):
        made("torch==2.15.0\n", "vm", vm=family, provisioning=["spot"])
    with pytest.raises(PlanRefused, match="570"):
        made("", "vm", vm=family, provisioning=["spot"], image={"wheel": "cu130"})
    assert made("torch==2.15.0\n", "vm", provisioning=["spot"]).wheel == "cu132"
    assert made("torch==2.15.0\n").wheel == "cu132"  # Vertex AI's driver is unknown, which never refuses


def test_the_machine_is_held_against_the_driver_of_the_images_own_torch(made: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("torch==2.15.0\n")
    body = planned(world={"packages": read_requirements(tmp_path / FILE).packages}).attempts[0].request
    assert '"min_driver":"580"' in env_of(body)["LAUNCH_GPU"]
    assert '"min_driver":"525"' in env_of(planned().attempts[0].request)["LAUNCH_GPU"]


@pytest.mark.parametrize(("wheel", "word"), [("cu118", "torch==2.7.1"), ("cu128", "torch==2.11.0")])
def test_a_build_that_the_pinned_release_lacks_is_refused_with_one_that_has_it(wheel: str, word: str) -> None:
    with pytest.raises(PlanRefused, match=word) as refused:
        image(spec(image={"wheel": wheel}), CATALOG, context())
    assert refused.value.field == "image.wheel"


def test_a_wheel_and_a_version_together(made: Any) -> None:
    assert made("torch==2.7.1\n", "image", image={"wheel": "cu118"}).torch.build == "cu118"


UV_LOCK = """
requires-python = "REQUIRES"
[[package]]
name = "mine"
source = { virtual = "." }
dependencies = [
    { name = "torch", version = "2.9.1+cu126", marker = "platform_machine != 'aarch64'" },
    { name = "torch", version = "2.9.1+cu130", marker = "platform_machine == 'aarch64'" },
]
optional-dependencies = { train = [{ name = "torch" }] }
[[package]]
name = "torch"
version = "2.9.1+cu126"
[[package]]
name = "torch"
version = "2.9.1+cu130"
"""


def test_a_lock_gives_the_build_for_the_machines_processor(made: Any) -> None:
    lock = UV_LOCK.replace("REQUIRES", ">=3.10")
    assert made(lock, name="uv.lock").wheel == "cu126"
    arm = made(lock, "image", "uv.lock", machine={"type": "gb200", "gpus": 4})
    assert (arm.platform, arm.wheel) == ("linux/arm64", "cu130")


@pytest.mark.parametrize(
    ("requires", "python"), [(">=3.13", "3.13"), (">=3.10,<3.12", "3.11"), ("==3.12.*", ""), (">=3.12.4", "")]
)
def test_a_project_that_excludes_the_bases_python_gets_the_nearest_one(made: Any, requires: str, python: str) -> None:
    texts = [made(UV_LOCK.replace("REQUIRES", requires), name="uv.lock").dockerfile]
    pyproject = f'[project]\ndependencies = ["torch==2.9.1"]\nrequires-python = "{requires}"\n'
    for text in (*texts, made(pyproject, name="pyproject.toml").dockerfile):
        assert (f"uv python install {python}" in text) is bool(python)


@pytest.mark.parametrize(
    ("requires", "image", "problem", "hint"),
    [
        (">=3.13", {"python": "3.12"}, "image.python: the project's requires-python is >=3.13", "image.python=3.13"),
        (">=3.12", {"base": "python:3.11-slim"}, "image.base: the project's requires-python", "image.python=3.12"),
        ("<3.10", {}, "an image may have Python 3.12, 3.13, 3.14, 3.11, 3.10", "Change requires-python"),
    ],
)
def test_a_python_that_the_project_excludes_is_refused(
    made: Any, requires: str, image: dict[str, str], problem: str, hint: str
) -> None:
    with pytest.raises(PlanRefused, match=problem) as refused:
        made(UV_LOCK.replace("REQUIRES", requires), name="uv.lock", image=image)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("entries", "build", "driver"),
    [
        (["pytorch=2.0.1", "pytorch-cuda=11.7"], "cu117", None),
        (["pytorch::pytorch=2.1.0", "pytorch::pytorch-cuda = 11.8.*"], "cu118", "450"),
        (["pytorch=1.12.1", "cudatoolkit=11.3.1"], "cu113", None),
        (["conda-forge::pytorch-gpu", "cuda-version==12.8"], "cu128", "525"),
        (["pytorch=2.5.1=py3.11_cuda12.4_cudnn9.1.0_0"], "cu124", "525"),
        (["pytorch=2.4=cuda120_py311h25b6552_0"], "cu120", None),
        (["pytorch", "cpuonly"], "cpu", None),
        (["pytorch=2.4=cpu_generic*"], "cpu", None),
        (["pytorch", "cuda-version>=12.4"], "conda", None),
        (["pytorch"], "conda", None),
        (["numpy", "cuda-nvcc=12.4"], "conda", None),
        ([{"pip": ["torch==2.9.1"]}], "cu128", "525"),
        ([{"pip": ["--extra-index-url https://download.pytorch.org/whl/cu118", "torch==2.5.1"]}], "cu118", "450"),
    ],
    ids=str,
)
def test_a_conda_environment_gets_the_cuda_that_it_names(
    made: Any, entries: list[Any], build: str, driver: str | None
) -> None:
    """conda installs it, so the plan shows that build or, where the file pins none, that conda chooses; never launch's
    default."""
    text = json.dumps({"dependencies": ["python=3.11", *entries]})
    found = made(text, "image", "environment.yml", machine={"type": "a100-80gb", "gpus": 8})
    assert (found.wheel, found.min_driver) == (build, driver)


@pytest.mark.parametrize(
    ("machine", "entry", "words"),
    [
        ("h100", "pytorch-cuda=11.7", ["environment.yml:3: pytorch-cuda=11.7", "CUDA 11.7", "H100", "11.8 or later"]),
        ("b200", "cudatoolkit=11.3", ["environment.yml:3: cudatoolkit=11.3", "B200", "12.8 or later"]),
        ("v100", "cuda-version=13.0", ["V100", "the last one is 12.9"]),
        ("h100", "cpuonly", ["no CUDA", "H100"]),
    ],
)
def test_a_conda_environment_whose_cuda_lacks_the_gpu_is_refused_at_its_line(
    made: Any, machine: str, entry: str, words: list[str]
) -> None:
    text = f"dependencies:\n- pytorch\n- {entry}\n"
    with pytest.raises(PlanRefused) as refused:
        made(text, name="environment.yml", machine={"type": machine, "gpus": 8})
    assert [word for word in words if word not in str(refused.value)] == []
