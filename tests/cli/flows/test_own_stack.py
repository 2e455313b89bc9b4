"""Commands with a custom PyTorch, lock file, Dockerfile or image: what a dry run shows, and what is refused where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.cloudjobs import Job
from tests.command import launch
from tests.images.test_inspect import packed, put_image
from tests.registry import OciRegistry

SPEC = "name: mine\nmachine: {type: l4}\nregions: [us-central1]\noutput: gs://my-bucket/runs\n"


def spec(folder: Path, image: str, run: str = "{script: mine.py}") -> Path:
    (folder / "mine.py").write_text("print(1)\n")
    file = folder / "job.yaml"
    file.write_text(f"{SPEC}image: {image}\nrun: {run}\n")
    return file


def dry_run(file: Path) -> dict[str, Any]:
    ran = launch("vertex", file, "--dry-run", "-o", "json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_a_dry_run_shows_the_release_and_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==2.9.1\n")
    file = spec(tmp_path, "{requirements: requirements.txt}")
    image = dry_run(file)["image"]
    assert (image["torch"]["version"], image["torch"]["build"], image["wheel"]) == ("2.9.1", "cu126", "cu126")
    assert "torch==2.9.1+cu126" in image["dockerfile"]
    assert "torch 2.9.1+cu126" in launch("vertex", file, "--dry-run").out


def test_a_plan_without_any_of_this_has_none_of_its_fields(tmp_path: Path) -> None:
    image = dry_run(spec(tmp_path, "{code: .}"))["image"]
    assert set(image) == {
        "uri", "pinned", "dependencies", "base", "platform", "wheel", "min_driver", "files", "size",
    }  # fmt: skip


def test_a_uv_lock_is_installed_by_uv_and_counts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '0'\n")
    (tmp_path / "uv.lock").write_text("version = 1\n")
    file = spec(tmp_path, "{requirements: uv.lock}")
    first = dry_run(file)
    assert "uv sync --frozen" in first["image"]["dockerfile"]
    (tmp_path / "uv.lock").write_text("version = 1\nrevision = 3\n")
    assert dry_run(file)["image"]["dependencies"] != first["image"]["dependencies"]


def test_a_dockerfile_that_copies_code_is_built_again_after_an_edit(tmp_path: Path) -> None:
    file = spec(tmp_path, "{dockerfile: Own.Dockerfile, code: .}")
    for text, again in (("FROM x\nRUN true\n", False), ("FROM x\nCOPY mine.py /\n", True)):
        (tmp_path / "Own.Dockerfile").write_text(text)
        (tmp_path / "mine.py").write_text("print(1)\n")
        before = dry_run(file)["image"]
        (tmp_path / "mine.py").write_text("print(2)\n")
        after = dry_run(file)["image"]
        # the Dockerfile itself lies in the code folder
        assert (before["base"] != after["base"]) is again
        assert before["uri"] != after["uri"]


@pytest.mark.parametrize(
    ("image", "files", "words"),
    [
        ("{requirements: r.txt}", {"r.txt": "rich\ntorch==3.0\n"}, ["job.yaml:5", "r.txt:2", "torch==3.0"]),
        ("{requirements: uv.lock}", {"uv.lock": "version = 1\n"}, ["job.yaml:5", "needs a pyproject.toml"]),
        ("{requirements: uv.lock}", {"uv.lock": "[", "pyproject.toml": ""}, ["job.yaml:5", "isn't TOML"]),
        ("{dockerfile: No.Dockerfile}", {}, ["job.yaml:5", "No.Dockerfile"]),
        ("{base: 'x:1', dockerfile: D}", {}, ["job.yaml:5", "cannot be combined with image.base"]),
        ("{base: x}", {}, ["job.yaml:5", "image.base"]),
    ],
)
def test_what_can_not_work_is_refused_at_its_line(
    tmp_path: Path, image: str, files: dict[str, str], words: list[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ran = launch("vertex", spec(tmp_path, image), "--dry-run")
    assert ran.code == 2
    assert all(word in ran.err for word in words), ran.err


def test_an_image_without_the_node_is_refused_before_anything_is_sent(job: Job) -> None:
    with OciRegistry() as registry:
        digest = put_image(registry, [packed({"app/train.py": b""})], ["PYTHON_VERSION=3.12.1"])
        job.write(image={"uri": f"{registry.host}/p/i@{digest}"}, run={"script": "train.py"})
        refused = job.launch("vertex", "job.yaml", code=2)
        assert "job.yaml:1: image.uri" in refused.err
        assert "run.node=append" in refused.err
        assert not job.created
        job.write(image={"uri": f"{registry.host}/p/i@{digest}"}, run={"node": "none", "args": ["1"]})
        job.launch("vertex", "job.yaml")
    ((_, body),) = job.created
    container = body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    assert (container.get("command", []), container["args"]) == ([], ["1"])


def test_what_can_not_be_read_refuses_nothing(job: Job) -> None:
    """The fixture's image has layers that are no archives."""
    ran = job.launch("vertex", "job.yaml")
    assert len(job.created) == 1
    assert "succeeded" in ran.out
