"""What each replica's container is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.services.local import container_settings
from launcher.services.local.container_settings import HOST, SHM, EngineHost, Image, Mount, Settings
from launcher.services.local.replicas import ImageDefaults, replica_names, replicas
from launcher.services.local.request import ParsedJob, parse_request

MACHINE = EngineHost(memory=64 << 30, user="1234:1234", gpus=("0", "1", "2"))
FOLDER = (Mount("/out/run", True),)


def job(gpus: int = 0, count: int = 1, base: str = "", **container: Any) -> ParsedJob:
    """Two pools of `count` replicas together."""
    spec = {"imageUri": "host/image:1", "command": ["work"], **container}
    pool = {"containerSpec": spec, "machineSpec": {"acceleratorCount": gpus}}
    pools = [pool] if count == 1 else [pool, {**pool, "replicaCount": count - 1}]
    body: dict[str, Any] = {"workerPoolSpecs": pools}
    if base:
        body["baseOutputDirectory"] = {"outputUriPrefix": base}
    return parse_request({"displayName": "job", "jobSpec": body})


def rendered(
    one: ParsedJob,
    machine: EngineHost = MACHINE,
    mounts: tuple[Mount, ...] = (),
    own: ImageDefaults | None = None,
    group: str = "",
) -> list[Settings]:
    image = Image(
        id="sha256:1", platform="linux/amd64", defaults=own or ImageDefaults(env={"PATH": "/bin"}), group=group
    )
    addresses = [f"{name}:2222" for name in replica_names(one.pools)]
    return container_settings.settings(
        replicas(one, addresses=addresses, job_id="7", image_defaults=lambda _: image.defaults),
        {"host/image:1": image},
        job_id="7",
        network="launch-7",
        machine=machine,
        endpoints={"STORAGE_EMULATOR_HOST": "http://s:1", "A": "outside"},
        mounts=mounts,
    )


def test_a_container_for_each_replica_under_the_name_that_cluster_spec_gives_it() -> None:
    found = rendered(job(count=3))
    assert [one.name for one in found] == ["workerpool0-0", "workerpool1-0", "workerpool1-1"]
    cluster = json.loads(found[2].env["CLUSTER_SPEC"])["cluster"]
    assert cluster == {
        "workerpool0": ["workerpool0-0:2222"],
        "workerpool1": ["workerpool1-0:2222", "workerpool1-1:2222"],
    }
    assert {one.image for one in found} == {"sha256:1"}


def test_the_environment_is_the_images_then_vertex_then_the_requests_and_the_endpoints_below() -> None:
    (one,) = rendered(job(env=[{"name": "A", "value": "$(PATH):$(CLOUD_ML_JOB_ID)"}]))
    assert one.env["A"] == "/bin:7"
    assert one.env["STORAGE_EMULATOR_HOST"] == "http://s:1"
    assert one.env.keys() == {"PATH", "CLUSTER_SPEC", "CLOUD_ML_JOB_ID", "A", *("STORAGE_EMULATOR_HOST",), *CPU}


CPU = {"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(
    ("gpus", "count", "shares"),
    [
        (1, 3, [("0",), ("1",), ("2",)]),
        (3, 1, [("0", "1", "2")]),
        (2, 2, [(), ()]),  # not enough for all: CPUs for all
        (0, 1, [()]),
    ],
)
def test_each_has_gpus_of_its_own(gpus: int, count: int, shares: list[tuple[str, ...]]) -> None:
    found = rendered(job(gpus=gpus, count=count))
    assert [one.gpus for one in found] == shares
    assert all(("CUDA_VISIBLE_DEVICES" in one.env) == (not one.gpus) for one in found)


def test_shared_memory_is_half_of_this_machine_at_most() -> None:
    assert rendered(job())[0].shm == SHM
    assert rendered(job(), EngineHost(memory=8 << 30, user="1:1"))[0].shm == 4 << 30


def test_files_on_this_machine_are_written_as_who_asked() -> None:
    assert rendered(job(), mounts=FOLDER)[0].user == "1234:1234"
    assert rendered(job())[0].user == ""


@pytest.mark.parametrize(
    ("user", "of_image", "group"),
    [
        ("501:20", "1000:1000", "1000"),
        ("1000:1000", "1000:1000", "1000"),
        ("501:20", "launch:users", "users"),
        ("501:20", "1000", ""),
        ("501:20", None, ""),
        ("", "1000:1000", ""),
    ],
)
def test_another_user_is_in_the_images_group(user: str, of_image: str | None, group: str) -> None:
    """The code's folder belongs to that group, and scripts write there."""
    inspected = {"Id": "sha256:1", "Architecture": "amd64", "Config": {"User": of_image}}
    found = container_settings.image(inspected, user)
    assert found.group == group
    assert rendered(job(), mounts=FOLDER, group=group)[0].group == group


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"command": []}, ("entry", "$(PATH)", "cmd")),
        ({"command": [], "args": ["$(PATH)"]}, ("entry", "$(PATH)", "/bin")),
        ({"command": ["own"]}, ("own",)),
        ({"command": ["own"], "args": ["$(PATH)"]}, ("own", "/bin")),
    ],
)
def test_command_and_args_are_kubernetes_own(container: dict[str, Any], expected: tuple[str, ...]) -> None:
    own = ImageDefaults(env={"PATH": "/bin"}, entrypoint=("entry", "$(PATH)"), command=("cmd",))
    assert rendered(job(**container), own=own)[0].argv == expected


@pytest.mark.parametrize(
    ("user", "of_image", "home"),
    [
        ("1234:1234", "launch", "/tmp"),
        ("1234:1234", None, "/tmp"),
        ("1000:1000", "1000:1000", "/home/launch"),
        ("1000:985", "1000", "/home/launch"),
        ("0:0", "launch", "/home/launch"),
        ("", "launch", "/home/launch"),
    ],
)
def test_a_user_whom_the_image_does_not_know_has_a_home_and_a_name(user: str, of_image: str | None, home: str) -> None:
    found = container_settings.image_defaults({"Env": ["HOME=/home/launch", "A=b=c"], "User": of_image}, user)
    assert found.env == {"HOME": home, "A": "b=c", **({"USER": "launch"} if home == "/tmp" else {})}
    assert (found.entrypoint, found.command) == ((), ())


def test_an_image_by_its_inspection() -> None:
    config = {"Env": None, "Entrypoint": ["python"], "Cmd": ["x"], "User": ""}
    found = container_settings.image(
        {"Id": "sha256:1", "Os": "linux", "Architecture": "arm64", "Variant": "v8", "Config": config}, ""
    )
    assert found == Image(
        id="sha256:1", platform="linux/arm64/v8", defaults=ImageDefaults(env={}, entrypoint=("python",), command=("x",))
    )
    assert container_settings.is_native("linux/arm64/v8", "aarch64")
    assert container_settings.is_native("linux/amd64", "x86_64")
    assert not container_settings.is_native("linux/arm64/v8", "x86_64")


def test_folders_of_this_machine() -> None:
    def of(base: str, folder: str = "") -> list[str]:
        return container_settings.output_folders(
            job(base=base, env=[{"name": "LAUNCH_RUN_FOLDER", "value": folder}] if folder else [])
        )

    assert of("gs://b/run") == []
    assert of("") == []
    assert of("/out/run/") == ["/out/run"]
    assert of("/out/run", "/out/run") == ["/out/run"]
    assert of("/out", "/out/run") == ["/out"]
    assert of("/out", "/output") == ["/out", "/output"]
    assert of("gs://b/run", "/out/run") == ["/out/run"]


@pytest.mark.parametrize(
    ("place", "loopback"),
    [
        ("http://127.0.0.1:4443", True),
        ("http://localhost:4443/storage/v1", True),
        ("localhost:4443", True),
        ("http://[::1]:1/", True),
        ("http://0.0.0.0:1", False),
        ("https://storage.googleapis.com", False),
        ("http://10.0.0.2:4443", False),
        ("/home/me/key.json", False),
        ("true", False),
        ("", False),
    ],
)
def test_an_endpoint_on_loopback_takes_the_network_of_this_machine(place: str, loopback: bool) -> None:
    assert container_settings.network("7", ["https://a", place]) == (HOST if loopback else "launch-7")


@pytest.mark.parametrize(
    ("engine", "here"),
    [
        ("http+docker://localhost", True),  # a Unix socket
        ("http+docker://localnpipe", True),
        ("http://127.0.0.1:2375", True),
        ("https://10.0.0.2:2376", False),
        ("http+docker://ssh", False),
    ],
)
def test_an_engine_of_this_machine(engine: str, here: bool) -> None:
    assert container_settings.is_here(engine) is here


def test_the_requests_own_endpoints_count_too() -> None:
    entries = [
        {"name": "STORAGE_EMULATOR_HOST", "value": "http://127.0.0.1:1"},
        {"name": "A", "value": "http://localhost"},
    ]
    assert container_settings.endpoint_values(job(env=entries)) == ["http://127.0.0.1:1"]


def test_a_folder_may_be_written_as_an_address() -> None:
    assert container_settings.output_folders(job(base="file:///out/run/")) == ["/out/run"]


@pytest.mark.parametrize("base", ["out", "./out", "file://out"])
def test_a_relative_folder_is_another_one_in_a_container(base: str) -> None:
    with pytest.raises(UsageError, match=r"writes to \S*out, a relative path"):
        container_settings.output_folders(job(base=base))


def test_what_is_no_address_is_not_on_loopback() -> None:
    assert container_settings.network("7", ["http://[", "[", "ya29.token"]) == "launch-7"
