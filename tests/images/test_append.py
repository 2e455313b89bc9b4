"""An image by appending, in a registry on loopback: what is mounted, what is sent, and what is left when it fails."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from random import Random
from threading import Event, Timer
from time import sleep
from typing import Any, NamedTuple

import pytest

from launcher.errors import LaunchError
from launcher.images.append import INDEX_TYPES, LAYER_TYPES, Stamp, append, new_config
from launcher.images.archives import Layer, Tree, layer
from launcher.images.registry import Manifest, Registry, parse
from launcher.images.source_files import File
from launcher.testing.httpserver import Response
from launcher.testing.registry.api import Request, error
from tests.registry import Fault, OciRegistry, Refuse, Reset, put_image
from tests.registry.faults import Serve

DOCKER, OCI = LAYER_TYPES
STAMP = Stamp({"org.opencontainers.image.revision": "abc"}, "2026-01-02T03:04:05Z")
AMD = "linux/amd64"


def put(registry: OciRegistry, name: str, body: dict[str, Any], media_type: str, tag: str = "t") -> str:
    with Registry(registry.host, {}) as client:
        return client.put_manifest(name, tag, json.dumps(body).encode(), media_type)


def manifest_of(registry: OciRegistry, name: str, tag: str) -> Manifest:
    with Registry(registry.host, {}) as client:
        found = client.manifest(name, tag)
    assert found
    return found


def config_of(registry: OciRegistry) -> dict[str, Any]:
    digest = manifest_of(registry, "p/train", "new").body["config"]["digest"]
    found: dict[str, Any] = json.loads(registry.store.blob("p/train", digest))
    return found


@pytest.fixture
def layers(tmp_path: Path) -> list[Layer]:
    (tmp_path / "a.py").write_text("print(1)\n" * 100)
    (tmp_path / "b.py").write_text("print(2)\n")
    made = []
    for name, owner in (("a.py", 0), ("b.py", 1000)):
        made.append(layer([Tree("workspace", (File(name, tmp_path / name),), owner)], tmp_path / f"{name}.gz", name))
    return made


def appended(registry: OciRegistry, layers: list[Layer], platform: str = AMD, tag: str = "new") -> str:
    base, target = (parse(f"{registry.host}/p/{name}") for name in ("dependencies:t", f"train:{tag}"))
    with Registry(registry.host, {}) as client:
        return append(client, base, target, layers, STAMP, platform)


@pytest.mark.parametrize("media_type", [DOCKER, OCI])
def test_the_image_is_the_base_with_the_layers_on_top(media_type: str, layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        base = put_image(registry, "p/dependencies", media_type=media_type)
        digest = appended(registry, layers)
        manifest, old = manifest_of(registry, "p/train", "new"), manifest_of(registry, "p/dependencies", "t")
        config = config_of(registry)
        assert (manifest.digest, manifest.media_type) == (digest, media_type)
        assert manifest.body["layers"][:2] == old.body["layers"]
        assert [(one["digest"], one["size"], one["mediaType"]) for one in manifest.body["layers"][2:]] == [
            (one.digest, one.size, LAYER_TYPES[media_type]) for one in layers
        ]
        assert config["rootfs"]["diff_ids"][2:] == [one.diff_id for one in layers]
        assert [one["created_by"] for one in config["history"]] == ["one", "two", "a.py", "b.py"]
        assert config["config"] == {
            "Env": ["A=1"],
            "User": "1000:1000",
            "Entrypoint": ["python"],
            "Labels": {
                "kept": "yes",
                "org.opencontainers.image.revision": "abc",
                "org.opencontainers.image.base.name": f"{registry.host}/p/dependencies:t",
                "org.opencontainers.image.base.digest": base,
            },
        }
        assert config["created"] == STAMP.created


def test_only_the_new_bytes_travel(layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        before = registry.received
        appended(registry, layers)
        sent = registry.received - before
        assert sum(one.size for one in layers) < sent < sum(one.size for one in layers) + 4000  # config, manifest
        assert registry.steps.count("mount") == 2
        assert "blob.get" in registry.steps  # the base's config
        assert registry.steps.count("blob.get") == 1
        before, steps = registry.received, len(registry.steps)
        appended(registry, layers, tag="again")
        assert registry.received - before < 2000  # the manifest alone
        assert "mount" not in registry.steps[steps:]
        assert "upload.begin" not in registry.steps[steps:]


def test_the_same_content_twice_at_once_is_one_image(layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        with ThreadPoolExecutor(4) as pool:
            digests = set(pool.map(lambda _: appended(registry, layers), range(4)))
        assert digests == {registry.tag("p/train", "new")}


def test_an_index_gives_its_image_for_the_machine(layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        entries = []
        for arch in ("arm64", "amd64"):
            digest = put_image(registry, "p/dependencies", media_type=OCI, architecture=arch)
            entries.append({"digest": digest, "size": 1, "platform": {"os": "linux", "architecture": arch}})
        (index,) = [kind for kind in INDEX_TYPES if "oci" in kind]
        put(registry, "p/dependencies", {"schemaVersion": 2, "mediaType": index, "manifests": entries}, index)
        appended(registry, layers, "linux/arm64")
        assert config_of(registry)["architecture"] == "arm64"
        with pytest.raises(LaunchError, match="has no image for linux/riscv64"):
            appended(registry, layers, "linux/riscv64")


def test_a_base_for_another_platform_is_refused_before_anything_is_sent(layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies", architecture="arm64")
        before = registry.received
        with pytest.raises(LaunchError, match=r"is for linux/arm64, but the machine is linux/amd64"):
            appended(registry, layers)
        assert registry.received == before


def test_a_base_that_is_gone_and_one_of_another_kind(layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        with pytest.raises(LaunchError, match="the registry no longer has"):
            appended(registry, layers)
        put_image(registry, "p/dependencies")
        manifest = manifest_of(registry, "p/dependencies", "t")
        other = {**manifest.body, "mediaType": "application/vnd.example"}
        registry.store.repository("p/dependencies").manifests[manifest.digest] = (
            "application/vnd.example",
            json.dumps(other).encode(),
        )
        with pytest.raises(LaunchError):
            appended(registry, layers)
        assert registry.tag("p/train", "new") is None


def test_a_registry_that_does_not_mount_is_told(layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        config = manifest_of(registry, "p/dependencies", "t").body["config"]["digest"]
        registry.store.repository("p/dependencies").blobs.intersection_update({config})
        with pytest.raises(LaunchError, match="can't mount layers") as refused:
            appended(registry, layers)
        assert "--builder docker" in refused.value.hint
        assert registry.tag("p/train", "new") is None


@pytest.mark.parametrize("step", ["mount", "upload.begin", "upload.*", "manifest.put"])
def test_a_permanent_failure_leaves_no_image(step: str, layers: list[Layer]) -> None:
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        registry.faults.add(Fault(step, Refuse(403), times=None))
        with pytest.raises(LaunchError):
            appended(registry, layers)
        assert registry.tag("p/train", "new") is None


def test_occasional_connection_errors_are_retried(layers: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        for step in ("mount", "upload.begin", "upload.finish", "manifest.put"):
            registry.faults.add(Fault(step, Reset()))
        assert appended(registry, layers) == registry.tag("p/train", "new")


@pytest.mark.slow
def test_a_failure_and_a_ctrl_c_do_not_wait_for_what_is_still_being_sent(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(Random(1).randbytes(40 << 20))
    made = layer([Tree("workspace", (File("big", tmp_path / "big"),))], tmp_path / "big.gz", "big")
    refused = Event()

    class Slow(BytesIO):
        """Bytes that wait, after the first, until the mount has failed."""

        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                assert refused.wait(20)
                sleep(0.002)
            return super().read(size)

    class Waits(NamedTuple):
        reads: int | None = 0

        def __call__(self, request: Request, serve: Serve) -> Response:
            Timer(0.1, refused.set).start()
            return error(403, "DENIED")

    whole = made.path.read_bytes()
    slow = type("SlowLayer", (Layer,), {"open": lambda self: Slow(whole)})(*made)
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        before = registry.received
        registry.faults.add(Fault("mount", Waits(), times=None))
        with pytest.raises(LaunchError, match="DENIED"):
            appended(registry, [slow])
        assert registry.received - before < len(whole) / 2
        assert registry.tag("p/train", "new") is None


def test_an_image_whose_config_tells_no_history(layers: list[Layer]) -> None:
    config = {"rootfs": {"type": "layers", "diff_ids": []}, "history": None}
    assert [one["created_by"] for one in new_config(config, layers, STAMP)["history"]] == ["a.py", "b.py"]
