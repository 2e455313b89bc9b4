"""The node's packages as one layer for all Python versions, from an index on this machine; the image that gets it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.images.append import Stamp
from launcher.images.node_packages import PYTHONS, for_python, node_packages
from launcher.images.pipeline import ImageBuildRequest, Report, push, with_launch
from launcher.images.source_files import File, Source
from launcher.inputs.content import data_folder
from launcher.plan.model import Image
from tests.images.test_append import manifest_of
from tests.registry import OciRegistry, put_image


def wheel(folder: Path, name: str, tag: str, files: dict[str, str]) -> str:
    """A wheel; its line in a lock."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {
            **files,
            f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        }.items():
            archive.writestr(path, text)
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return f"    --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A package of Python files, and one that is compiled for each Python version."""
    index = tmp_path / "index"
    pure = wheel(index, "pure", "py3-none-any", {"pure/__init__.py": "x = 1\n"})
    compiled = [
        wheel(
            index,
            "fast",
            f"cp{v.replace('.', '')}-cp{v.replace('.', '')}-manylinux_2_17_x86_64",
            {"fast/__init__.py": f"made = '{v}'\n", f"fast/_c.cpython-{v.replace('.', '')}.so": v},
        )
        for v in PYTHONS
    ]
    lines = [f"numpy==9.9 \\\n{pure}", f"pure==1.0 \\\n{pure}", "fast==1.0 \\\n" + " \\\n".join(compiled)]
    file = tmp_path / "node.lock"
    file.write_text("\n".join(lines) + "\n")
    return file


def offline(tmp_path: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": "/dev/null", "PATH": ""}


@pytest.mark.slow
def test_compiled_modules_of_all_versions_lie_side_by_side(lock: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    found = node_packages(lock, "linux/amd64", tmp_path / "work", offline(tmp_path))
    texts = {one.name: one.path.read_text() for one in found if "dist-info" not in one.name}
    assert texts == {
        "pure/__init__.py": "x = 1\n",
        "fast/__init__.py": "made = '3.10'\n",
        **{f"fast/_c.cpython-{version.replace('.', '')}.so": version for version in PYTHONS},
    }
    assert any(one.name == "fast-1.0.dist-info/METADATA" for one in found)


def test_a_package_with_another_hash_is_refused(lock: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    lock.write_text(lock.read_text().replace("sha256:", "sha256:0000", 2).replace("0000", "", 1))
    with pytest.raises(LaunchError, match=r"Python 3\.10"):
        node_packages(lock, "linux/amd64", tmp_path / "work", offline(tmp_path))


def test_each_python_gets_its_versions_of_the_real_lock() -> None:
    text = (data_folder("containers") / "node.lock").read_text(encoding="utf-8")
    for python in PYTHONS:
        names = [block.partition("==")[0] for block in for_python(text, python)]
        assert {"google-cloud-storage", "google-crc32c", "psutil", "nvidia-ml-py", "protobuf"} <= set(names)
        assert len(names) == len(set(names))
        assert not {"numpy", "torch", "grpcio"} & set(names)


def test_an_images_settings_stay_but_for_what_launch_train_needs() -> None:
    own = {"Env": ["PATH=/opt/conda/bin", "PYTHONPATH=/app"], "User": "me", "Entrypoint": ["/x"], "WorkingDir": "/app"}
    found = with_launch(own, has_code=False)
    assert set(found["Env"]) == {"PATH=/opt/conda/bin", "PYTHONPATH=/opt/launch:/app", "PYTHONUNBUFFERED=1"}
    assert {name: found[name] for name in ("User", "Entrypoint", "WorkingDir")} == {
        name: own[name] for name in ("User", "Entrypoint", "WorkingDir")
    }
    assert with_launch({}, has_code=False)["Env"][0] == "PYTHONPATH=/opt/launch"
    assert with_launch(own, has_code=True)["WorkingDir"] == "/workspace"


def wanted(host: str, base: str, lock: Path, code: Path) -> ImageBuildRequest:
    image = Image(
        uri=f"{host}/p/train:new",
        pinned=False,
        dependencies=f"{host}/p/nodes:new",
        base=base,
        platform="linux/amd64",
        wheel="base",
        min_driver=None,
        appends_node=True,
    )
    source = Source(
        locks=(File("node.lock", lock),), code=(File("a.py", code),), trainer=(File("launch_train/x.py", code),)
    )
    return ImageBuildRequest(image=image, source=source, stamp=Stamp({}, "1980-01-01T00:00:00Z"))


@pytest.mark.slow
def test_the_node_is_appended_to_a_finished_image_without_an_engine(lock: Path, tmp_path: Path) -> None:
    code = tmp_path / "a.py"
    code.write_text("print(1)\n")
    environ = {**offline(tmp_path), "DOCKER_HOST": "unix:///no/such/socket"}
    with OciRegistry() as registry:
        digest = put_image(registry, "theirs/image")
        job = wanted(registry.host, f"{registry.host}/theirs/image@{digest}", lock, code)
        made = push(job, environ, Report())
        again = push(job, environ, Report())
        found = manifest_of(registry, "p/train", "new")
        config: dict[str, Any] = json.loads(registry.store.blob("p/train", found.body["config"]["digest"]))
    assert (made.how, made.dependencies, again.how) == ("appended", True, "there")
    assert len(found.body["layers"]) == 2 + 3
    assert config["config"]["Entrypoint"] == ["python"]
    assert "PYTHONPATH=/opt/launch" in config["config"]["Env"]
    assert config["config"]["WorkingDir"] == "/workspace"
    assert [one["created_by"] for one in config["history"]][2:] == [
        "launch: packages of launch_train.node",
        "launch: COPY launch_train /opt/launch",
        "launch: COPY code /workspace",
    ]


def test_an_image_of_another_registry_is_refused_with_what_to_do(lock: Path, tmp_path: Path) -> None:
    with OciRegistry() as registry:
        job = wanted(registry.host, f"nvcr.io/nvidia/x@sha256:{'1' * 64}", lock, lock)
        with pytest.raises(LaunchError, match=r"nvcr\.io") as refused:
            push(job, offline(tmp_path), Report())
    assert "image.base: nvcr.io/nvidia/x" in refused.value.hint
