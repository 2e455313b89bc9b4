"""The recipe, a real engine and a real registry: what gets into an image, and what doesn't."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from launcher.images.docker_engine import Engine, EngineError
from launcher.images.source_files import File, Source
from launcher.inputs import code_files, content
from launcher.plan.model import Image
from tests import user_repository
from tests.e2e.engine import Running

pytestmark = [pytest.mark.e2e, pytest.mark.slow(turn=0)]

CANARY = "canary-9f1c27d0-never-in-a-layer"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CODE = {
    "train.py": "print('mine')\n",
    "pkg/__init__.py": "",
    ".env": f"TOKEN={CANARY}\n",
    ".git/config": f"[remote]\nurl = https://me:{CANARY}@example.com\n",
    "key.json": json.dumps({"type": "service_account", "private_key": CANARY}),
    ".dockerignore": "ignored\n",
    "ignored/notes.txt": CANARY,
}


class Built(NamedTuple):
    """An image in the engine and in the registry."""

    engine: Engine
    image: Image
    source: Source
    digest: str
    said: list[str]


@pytest.fixture(scope="module")
def built(containers: Running, torch_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("code")
    for name, text in CODE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = code_files.without_secrets(code_files.collect_code(folder))
    source = Source(tuple(content.recipe()), tuple(content.trainer()), tuple(found.files), torch=torch_wheel)
    image = wanted(containers, "whole")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_TOKEN", CANARY)
        patch.setenv("HTTPS_PROXY", f"http://{CANARY}@127.0.0.1:9")
        engine = Engine.connect({**containers.environ, "SECRET_TOKEN": CANARY})
        engine.build(source, image, target="train", tag=image.uri, labels={"who": "me"}, on_line=said.append)
    layers: dict[str, tuple[int, int]] = {}
    digest = engine.push(image.uri, lambda name, done, size: layers.update({name: (done, size)}))
    assert layers
    assert all(done == size for done, size in layers.values())
    yield Built(engine, image, source, digest, said)
    engine.api.close()


def wanted(containers: Running, tag: str, **changes: Any) -> Image:
    known = {
        "uri": f"{containers.registry}/team/train:{tag}",
        "pinned": False,
        "dependencies": f"{containers.registry}/team/dependencies:{tag}",
        "base": containers.base,
        "platform": containers.platform,
        "wheel": "cpu",
        "min_driver": None,
    }
    return Image(**{**known, **changes})


def get(containers: Running, path: str) -> bytes:
    request = urllib.request.Request(f"http://{containers.registry}/v2/{path}", headers={"Accept": MANIFEST})
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def test_no_secret_is_in_any_layer_nor_in_what_the_image_says_of_itself(containers: Running, built: Built) -> None:
    manifest = json.loads(get(containers, f"team/train/manifests/{built.digest}"))
    config = get(containers, f"team/train/blobs/{manifest['config']['digest']}")
    assert CANARY.encode() not in config
    names = set()
    for layer in manifest["layers"]:
        plain = gzip.decompress(get(containers, f"team/train/blobs/{layer['digest']}"))
        assert CANARY.encode() not in plain
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            names.update(tar.getnames())
    assert {
        "workspace/train.py",
        "workspace/pkg/__init__.py",
        "opt/launch/launch_train/node/__main__.py",
    } <= names
    assert not {name for name in names if name.startswith("workspace/") and Path(name).name in (".env", "key.json")}
    assert not {name for name in names if Path(name).name.startswith("torch-") and name.endswith((".whl", ".lock"))}
    assert not [line for line in built.said if CANARY in line]


def test_the_image_runs_as_nobody_in_particular_and_has_all_it_needs(built: Built) -> None:
    config = built.engine.api.inspect_image(built.image.uri)["Config"]
    assert config["Labels"]["who"] == "me"
    assert (config["User"], config["WorkingDir"]) == ("1000:1000", "/workspace")
    assert config["Entrypoint"] == ["python", "-m", "launch_train.node"]
    script = (
        "import os, sys, torch, tensorboard, google_crc32c, google.cloud.storage, launch_train\n"
        "open('/workspace/mine', 'w'); open('/tmp/scratch', 'w')\n"
        "try: open('/opt/launch/launch_train/node/__main__.py', 'a'); print('may write our package')\n"
        "except PermissionError: pass\n"
        "print(os.getuid(), torch.__version__, launch_train.__file__, sys.executable, os.environ.get('SECRET_TOKEN'))"
    )
    said = run(built, "python", "-c", script)
    assert said.split() == [
        "1000",
        "2.13.0+cpu",
        "/opt/launch/launch_train/__init__.py",
        "/opt/venv/bin/python",
        "None",
    ]


def test_a_user_with_another_id_writes_beside_the_code(built: Built) -> None:
    """`launch local --docker` runs the containers as whoever asked; on Vertex AI the script may write there too."""
    script = "open('train.py', 'a'); open('new', 'w'); open('pkg/new', 'w'); import os; print(os.getuid())"
    assert run(built, "python", "-c", script, user="501:20", group="1000") == "501\n"


def test_a_users_modules_win_over_ours(built: Built, tmp_path: Path) -> None:
    """Nothing of ours but launch_train is importable in the image."""
    folder = user_repository.write(tmp_path / "code", is_package=False)
    node = ("python", "-m", "launch_train.node", "--launcher", "python", "--script", "main.py")  # needs no network
    said = run(built, *node, code=folder)
    assert said.count(user_repository.SAYS) == 1, said
    ours = ("launcher", "tests", "benchmarks", "containers", "tools", "train")
    find = f"from importlib.util import find_spec; print([name for name in {ours} if find_spec(name)])"
    assert run(built, "python", "-c", find) == "[]\n"


def run(
    built: Built,
    *command: str,
    user: str | None = None,
    group: str = "",
    code: Path | None = None,
) -> str:
    """What a container prints, with another folder of code if one is given; it must end with 0."""
    api = built.engine.api
    binds = [f"{code}:/workspace"] if code else []
    made = api.create_container(
        built.image.uri,
        list(command[1:]),
        entrypoint=list(command[:1]),
        user=user,
        network_disabled=True,
        host_config=api.create_host_config(group_add=[group] if group else None, binds=binds),
    )
    try:
        api.start(made)
        status = api.wait(made)["StatusCode"]
        said = api.logs(made).decode()
    finally:
        api.remove_container(made, force=True)
    assert status == 0, said
    return str(said)


def test_the_dependency_image_is_what_the_train_image_stands_upon(built: Built) -> None:
    engine, image = built.engine, built.image
    said: list[str] = []
    made = engine.build(
        built.source, image, target="dependencies", tag=image.dependencies, labels={}, on_line=said.append
    )
    assert engine.has(image.dependencies) == made
    assert len(said) < 30, said  # the engine has done it before
    below = engine.api.inspect_image(made)["RootFS"]["Layers"]
    above = engine.api.inspect_image(image.uri)["RootFS"]["Layers"]
    assert above[: len(below)] == below
    assert len(above) == len(below) + 2  # our package, and the code


def test_an_edit_touches_the_last_layer_only(built: Built, tmp_path: Path) -> None:
    engine, image = built.engine, built.image
    edited = tmp_path / "train.py"
    edited.write_text("print('edited')\n")
    source = replace(
        built.source,
        code=tuple(one._replace(path=edited) if one.name == "train.py" else one for one in built.source.code),
    )
    tag = f"{image.uri}-edited"
    engine.build(source, image, target="train", tag=tag, labels={"who": "me"})
    before, after = (engine.api.inspect_image(one)["RootFS"]["Layers"] for one in (image.uri, tag))
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


def test_requirements_that_cannot_be_met(built: Built) -> None:
    source = replace(built.source, requirements="torch==2.12.0\n")
    said: list[str] = []
    with pytest.raises(EngineError, match=r"Step \d+/\d+ : RUN .*requirements.txt") as error:
        built.engine.build(
            source,
            built.image,
            target="dependencies",
            tag=f"{built.image.dependencies}-bad",
            labels={},
            on_line=said.append,
        )
    (indexes,) = {line for line in said if "Looking in indexes" in line}
    assert indexes.endswith("https://download.pytorch.org/whl/cpu"), "PyPI's torchvision is built for CUDA 13"
    assert "image.requirements" in error.value.hint
    assert "torch==2.12.0" in error.value.problem  # pip's own words
    assert built.engine.has(f"{built.image.dependencies}-bad") is None


def test_a_base_for_another_machine(containers: Running, built: Built) -> None:
    """The engine has the name, and for this machine: taking it would end as an exec format error, elsewhere."""
    image = wanted(containers, "foreign", platform="linux/s390x")
    with pytest.raises(EngineError, match=f"is for {containers.platform}, but the machine is linux/s390x"):
        built.engine.build(built.source, image, target="train", tag=image.uri, labels={})


def test_a_wheel_for_another_python(built: Built, tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp38-cp38-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"")
    lock = tmp_path / "requirements.lock"
    lock.touch()  # nothing else to install: it would take its time before the wheel's turn
    recipe = tuple(one._replace(path=lock) if one.name == lock.name else one for one in built.source.recipe)
    source = replace(built.source, torch=wheel, recipe=recipe)
    with pytest.raises(EngineError, match="is not a supported wheel on this platform") as error:
        built.engine.build(source, built.image, target="dependencies", tag=f"{built.image.dependencies}-bad", labels={})
    assert "image.torch" in error.value.hint


def test_a_disk_that_is_full(containers: Running, built: Built, tmp_path: Path) -> None:
    """The kernel's own words, from a device that is always full."""
    image = wanted(containers, "full")
    source = replace(built.source, recipe=(recipe(tmp_path, "RUN python3 -c 'print(1)' > /dev/full"),))
    with pytest.raises(EngineError, match=r"Step 3/\d : RUN python3 .*(\n.*)*No space left on device") as error:
        built.engine.build(source, image, target="train", tag=image.uri, labels={})
    assert "docker system df" in error.value.hint


def recipe(folder: Path, *steps: str) -> File:
    """A Dockerfile with these steps."""
    path = folder / "train.Dockerfile"
    path.write_text("\n".join(("ARG BASE", "FROM ${BASE} AS train", *steps, "")))
    return File(path.name, path)


def test_a_dockerfile_that_is_none(containers: Running, built: Built, tmp_path: Path) -> None:
    source = replace(built.source, recipe=(recipe(tmp_path, "RUNN true"),))
    with pytest.raises(EngineError, match=r"can't be built: .*(?i:unknown instruction).*RUNN"):
        built.engine.build(source, wanted(containers, "x"), target="train", tag=f"{built.image.uri}-x", labels={})


def test_a_registry_that_has_gone(built: Built) -> None:
    """A push to nobody's port: an error in the stream, of a request that was answered with 200."""
    name = "localhost:9/team/train:gone"
    built.engine.tag(built.image.uri, name)
    with pytest.raises(EngineError, match=r"localhost:9/team/train:gone can't be pushed: .*connection refused"):
        built.engine.push(name)
