"""`launch build` and `launch push` against a registry on loopback; no engine takes part."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import catalog
from launcher.cli.options import Flags, gather
from launcher.errors import LaunchError
from launcher.images import pipeline
from launcher.images.pipeline import Report
from launcher.plan.build import image
from launcher.runs.image import image_build_request
from tests.command import WORLD, Ran, launch
from tests.images.test_append import manifest_of, put
from tests.registry import Bearer, OciRegistry, put_image

NO_ENGINE = {"DOCKER_HOST": "unix:///no/such/socket", "DOCKER_CONFIG": "/no/such/folder"}
CANARY = "canary-7d3f2c"


@pytest.fixture
def registry() -> Iterator[OciRegistry]:
    with OciRegistry() as running:
        yield running


@pytest.fixture
def job(tmp_path: Path, registry: OciRegistry) -> Path:
    """A spec with code beside it, and its dependency image in the registry."""
    spec = tmp_path / "job.yaml"
    spec.write_text(
        f"name: job\nmachine: {{type: l4, gpus: 2}}\nimage: {{repository: '{registry.host}/p/r', code: .}}\n"
        "run: {script: mine.py}\n"
    )
    (tmp_path / "mine.py").write_text("print(1)\n")
    with_base(registry, spec)
    return spec


def with_base(registry: OciRegistry, spec: Path) -> str:
    """Put the dependency image of a spec into the registry; its tag."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WORLD.items():
            patch.setenv(name, value)
        inputs = gather("vertex", spec, Flags(), image_only=True)
    tag = image(inputs.spec, catalog.load(), inputs.context).dependencies.rpartition(":")[2]
    put_image(registry, "p/r/dependencies", tag)
    return tag


def pushed(spec: Path, *more: str, command: str = "push") -> dict[str, object]:
    ran = launch(command, spec, "-o", "json", *more, env=NO_ENGINE)
    assert ran.code == 0, ran.shown
    found: dict[str, object] = json.loads(ran.out)
    return found


def refused(spec: Path, *more: str, command: str = "push") -> Ran:
    ran = launch(command, spec, *more, env=NO_ENGINE)
    assert ran.code != 0
    assert not ran.out
    return ran


def files(registry: OciRegistry, digest: str) -> dict[str, bytes]:
    """What the appended layers hold."""
    found: dict[str, bytes] = {}
    name = "p/r/train"
    manifest = manifest_of(registry, name, digest)
    for one in manifest.body["layers"][2:]:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(registry.store.blob(name, one["digest"])))) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member) if member.isfile() else None
                found[member.name] = content.read() if content else b""
    return found


@pytest.mark.parametrize("command", ["build", "push"])
def test_an_edit_is_appended_and_an_unchanged_image_is_reused(job: Path, registry: OciRegistry, command: str) -> None:
    first = pushed(job, command=command)
    assert (first["how"], first["pushed"]) == ("appended", True)
    assert first["reference"] == f"{registry.host}/p/r/train@{registry.tag('p/r/train', str(first['image'])[-16:])}"
    steps = len(registry.steps)
    again = pushed(job, command=command)
    assert (again["how"], again["sent"], again["reference"]) == ("there", 0, first["reference"])
    assert registry.steps[steps:] == ["manifest.head"]
    (job.parent / "mine.py").write_text("print(2)\n")
    second = pushed(job, command=command)
    assert second["how"] == "appended"
    assert second["dependencies"] == first["dependencies"]
    assert second["reference"] != first["reference"]
    assert isinstance(second["sent"], int)
    assert second["sent"] < 4000


def test_what_is_in_the_image(job: Path, registry: OciRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our package and the code, and no canary: not from the folder, not from the environment."""
    folder = job.parent
    (folder / ".env").write_text(f"KEY={CANARY}\n")
    (folder / "key.json").write_text(json.dumps({"type": "service_account", "private_key": CANARY}))
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text(CANARY)
    (folder / "pkg").mkdir()
    (folder / "pkg" / "m.py").write_text("x = 1\n")
    (folder / "scratch.log").write_text(CANARY)
    (folder / ".gitignore").write_text("*.log\n")
    ran = launch("push", job, "-o", "json", env={**NO_ENGINE, "HF_TOKEN": CANARY, "LAUNCH_SECRET": CANARY})
    assert ran.code == 0, ran.shown
    assert "excluded from the image, as they look like secrets: .env, key.json." in ran.err
    found = files(registry, json.loads(ran.out)["reference"].partition("@")[2])
    code = {name for name in found if name.startswith("workspace")}
    assert code == {"workspace", "workspace/mine.py", "workspace/.gitignore", "workspace/pkg", "workspace/pkg/m.py"}
    assert "opt/launch/launch_train/node/__main__.py" in found
    assert not [name for name in found if "__pycache__" in name or "launcher" in name]
    everything = [*registry.store.data.values(), *found.values()]
    everything += [raw for _, raw in registry.store.repository("p/r/train").manifests.values()]
    assert not [data for data in everything if CANARY.encode() in data]


def test_the_build_plan(job: Path, registry: OciRegistry) -> None:
    ran = launch("push", job, env=NO_ENGINE)
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"image     {registry.host}/p/r/train:")
    assert lines[1].startswith("digest    sha256:")
    assert lines[2] == "code      1 file, 9 B; linux/amd64, cu126"
    assert lines[4].startswith("The code was appended in the registry: ")
    assert max(map(len, lines)) <= 88
    assert "launch: appending the code to" in ran.err
    assert "launch: uploaded the code (" in ran.err
    again = launch("push", job, env=NO_ENGINE)
    assert "Nothing to do: the registry already has the image" in again.out
    assert not again.err


def test_each_builder_explains_a_missing_dependency_image(job: Path, registry: OciRegistry) -> None:
    (job.parent / "requirements.txt").write_text("einops\n")
    job.write_text(job.read_text().replace("code: .", "code: ., requirements: requirements.txt"))
    alone = refused(job, "--builder", "append")
    assert "the registry has no dependency image" in alone.err
    assert "launch push --builder docker" in alone.err
    for command in ("build", "push"):
        ran = refused(job, command=command)
        assert "no/such/socket" in ran.err
        assert "--builder cloud-build" not in ran.err  # it can't reach a registry on this machine
    assert not registry.store.repository("p/r/train").tags
    with_base(registry, job)
    assert pushed(job)["how"] == "appended"


def test_a_custom_image_is_not_built(job: Path, registry: OciRegistry) -> None:
    reference = str(pushed(job)["reference"])
    own = pushed(job, "--image", reference)
    assert (own["how"], own["reference"], own["dependencies"]) == ("own", reference, None)
    gone = refused(job, "--image", reference[:-4] + "0000")
    assert "launch doesn't build that one" in gone.err


def test_an_unknown_builder_is_refused(job: Path) -> None:
    ran = refused(job, "--builder", "kaniko")
    assert ran.code == 2
    assert "Use one of auto, docker, append, cloud-build." in ran.err


def test_a_project_is_needed_only_for_the_default_repository(job: Path, tmp_path: Path) -> None:
    none = {**NO_ENGINE, "CLOUDSDK_CORE_PROJECT": ""}
    assert launch("push", job, env=none).code == 0
    ran = launch("push", env=none)
    assert ran.code == 2
    assert "no Google Cloud project is set" in ran.err


def test_wrong_and_missing_credentials(tmp_path: Path) -> None:
    with OciRegistry(access=Bearer({"me": "right"})) as registry:
        spec = tmp_path / "job.yaml"
        spec.write_text(f"name: job\nmachine: {{type: l4}}\nimage: {{repository: '{registry.host}/p/r'}}\n")
        ran = refused(spec)
        assert ran.code == 4
        (tmp_path / "config.json").write_text(
            json.dumps({"auths": {registry.host: {"auth": "bWU6d3Jvbmc="}}})  # me:wrong
        )
        ran = launch("push", spec, env={**NO_ENGINE, "DOCKER_CONFIG": str(tmp_path)})
        assert ran.code == 4
        assert "wrong" not in ran.err.replace("wrong or", "")
        assert registry.host in ran.err


def test_code_changed_during_the_build_gets_no_tag(job: Path, registry: OciRegistry) -> None:
    """The tag is that of the content that was hashed: under it, another one would be taken for it for good."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WORLD.items():
            patch.setenv(name, value)
        made = image_build_request(gather("vertex", job, Flags(), image_only=True))
    (job.parent / "mine.py").write_text("print(2)\n")
    with pytest.raises(LaunchError, match="the code was changed while its image was built"):
        pipeline.push(made, NO_ENGINE, Report())
    assert not registry.store.repository("p/r/train").tags
    (job.parent / "mine.py").write_text("print(1)\n")
    assert pipeline.push(made, NO_ENGINE, Report()).how == "appended"


@pytest.mark.parametrize("builder", ["auto", "docker", "cloud-build"])
def test_a_missing_repository_is_reported_before_the_build(tmp_path: Path, builder: str) -> None:
    with OciRegistry(repositories=["p/other"]) as registry:
        spec = tmp_path / "job.yaml"
        spec.write_text(f"name: job\nmachine: {{type: l4}}\nimage: {{repository: '{registry.host}/p/r'}}\n")
        ran = refused(spec, "--builder", builder)
    assert f"{registry.host}/p/r/dependencies: the repository does not exist" in ran.err
    assert "socket" not in ran.err


def test_credentials_come_from_dockers_configuration(
    job: Path, registry: OciRegistry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry.access = Bearer({"me": "right"})
    folder = tmp_path_factory.mktemp("docker")
    auth = base64.b64encode(b"me:right").decode()
    (folder / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    steps = len(registry.steps)
    ran = launch("push", job, "-o", "json", env={**NO_ENGINE, "DOCKER_CONFIG": str(folder)})
    assert ran.code == 0, ran.shown
    found = json.loads(ran.out)
    assert found["how"] == "appended"
    assert "token" in registry.steps[steps:]
    assert registry.tag("p/r/train", found["image"].rpartition(":")[2]) == found["reference"].partition("@")[2]
    assert "right" not in ran.shown
    assert auth not in ran.shown


def test_a_moved_tag_does_not_change_the_digest(job: Path, registry: OciRegistry) -> None:
    first = pushed(job)
    tag = str(first["image"]).rpartition(":")[2]
    other = manifest_of(registry, "p/r/train", tag)
    put(registry, "p/r/train", {**other.body, "layers": other.body["layers"][:2]}, other.media_type, tag)
    digest = str(first["reference"]).partition("@")[2]
    assert registry.tag("p/r/train", tag) != digest
    assert files(registry, digest)["workspace/mine.py"] == b"print(1)\n"
    assert pushed(job, "--image", str(first["reference"]))["reference"] == first["reference"]
