"""What a job in containers takes from this machine, and the words for what an engine refuses."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker.utils.proxy import ProxyConfig

from launcher.errors import LaunchError, UsageError
from launcher.services.local import in_docker as containers
from launcher.services.local.container_settings import Mount, Settings
from launcher.services.local.in_docker import endpoints_with_credentials
from launcher.services.local.request import ParsedJob, parse_request


def job(gpus: int = 0, base: str = "") -> ParsedJob:
    pool = {"containerSpec": {"imageUri": "host/image:1"}, "machineSpec": {"acceleratorCount": gpus}}
    return parse_request({"jobSpec": {"workerPoolSpecs": [pool], "baseOutputDirectory": {"outputUriPrefix": base}}})


def settings(**given: Any) -> Settings:
    fields: dict[str, Any] = {"argv": ("python", "x.py"), "env": {}, "network": "n", "shm": 1, **given}
    return Settings(name="workerpool0-0", job="7", image="sha256:1", platform="linux/arm64", **fields)


def test_folders_are_made_and_files_come_along_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.json").write_text("")
    given = endpoints_with_credentials(
        {"GOOGLE_APPLICATION_CREDENTIALS": "key.json", "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": "none", "HOME": "/nobody"}
    )
    assert given == {
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json"),
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(tmp_path / "none"),
    }
    out = tmp_path / "out" / "run"
    found = containers.make_mounts(job(base=f"{out}/"), given)
    assert found == (Mount(str(out), True), Mount(str(tmp_path / "key.json"), False))
    assert out.is_dir()
    assert containers.make_mounts(job(base="gs://bucket/run"), {}) == ()


def test_the_credentials_that_gcloud_keeps_for_all_programs(tmp_path: Path) -> None:
    usual = tmp_path / ".config" / "gcloud" / "application_default_credentials.json"
    assert endpoints_with_credentials({"HOME": str(tmp_path)}) == {}
    usual.parent.mkdir(parents=True)
    usual.write_text("")
    assert endpoints_with_credentials({"HOME": str(tmp_path)}) == {"GOOGLE_APPLICATION_CREDENTIALS": str(usual)}
    assert endpoints_with_credentials({"CLOUDSDK_CONFIG": str(usual.parent)})["GOOGLE_APPLICATION_CREDENTIALS"] == str(
        usual
    )
    own = {"HOME": str(tmp_path), "GOOGLE_APPLICATION_CREDENTIALS": "/own.json"}
    assert endpoints_with_credentials(own) == {"GOOGLE_APPLICATION_CREDENTIALS": "/own.json"}


def test_containers_that_run_as_the_current_user() -> None:
    assert containers.user_of({"SecurityOptions": ["name=seccomp,profile=default"]}) == f"{os.getuid()}:{os.getgid()}"
    assert containers.user_of({"SecurityOptions": None}) == f"{os.getuid()}:{os.getgid()}"
    assert containers.user_of({"SecurityOptions": ["name=rootless"]}) == "0:0"


@pytest.mark.parametrize(
    ("gpus", "runtimes", "expected", "told"),
    [
        (2, {"nvidia": {}, "runc": {}}, ("0", "1"), False),
        (2, {"runc": {}}, (), True),
        (0, {"runc": {}}, (), False),
        (0, {"nvidia": {}}, (), False),
    ],
)
def test_gpus_that_the_engine_can_hand_on(gpus: int, runtimes: Any, expected: tuple[str, ...], told: bool) -> None:
    said: list[str] = []
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert containers.gpus_of(job(gpus), {"Runtimes": runtimes}, environ, said.append) == expected
    assert any("does not support GPUs" in line for line in said) is told


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            'runc create failed: unable to start container process: exec: "python": executable file not found in $PATH',
            "python: no such command in the image",
        ),
        ('exec: "python": stat python: no such file or directory: unknown', "python: no such file in the image"),
        ('unable to start container process: exec: "python": permission denied', "python: not executable in the image"),
        ("standard_init_linux.go:228: exec user process caused: exec format error", "its image is for linux/arm64"),
        ('could not select device driver "" with capabilities: [[gpu]]', "can't give GPUs to"),
        (
            "error while mounting: permission denied",
            "can't start workerpool0-0: error while mounting: permission denied",
        ),
    ],
)
def test_why_a_container_was_not_started(said: str, words: str) -> None:
    error = containers.start_error(settings(), said)
    assert words in error.problem
    assert "workerpool0-0" in error.problem


def test_nothing_to_run() -> None:
    with pytest.raises(LaunchError, match="workerpool0-0: neither the request nor the image has a command"):
        containers.create(None, settings(argv=()), "workerpool0-0")


def test_an_image_is_named() -> None:
    with pytest.raises(LaunchError, match="the request has no imageUri"):
        containers.inspect_image(None, "", print)  # type: ignore[arg-type]  # no engine is asked


class Api(docker.APIClient):  # type: ignore[misc]  # the SDK has no types
    """The SDK's client, which keeps what it would send."""

    def __init__(self) -> None:
        super().__init__(base_url="http+unix:///none", version="1.41")
        self.config: Any = None
        self.name = ""

    def create_container_from_config(self, config: Any, name: str, platform: Any = None) -> dict[str, str]:
        self.config, self.name = config, name
        return {"Id": "1"}


@pytest.mark.parametrize("network", ["launch-7", "host"])
def test_what_the_engine_is_asked_for(network: str) -> None:
    api = Api()
    api._proxy_configs = ProxyConfig(http="http://user:password@proxy")
    given = settings(network=network, env={"A": "1"}, user="1:2")
    assert containers.create(api, given, "workerpool0-0.2") == "1"
    sent = api.config
    assert (api.name, sent["Image"], sent["Labels"]) == ("launch-7-workerpool0-0.2", "sha256:1", {"launch.job": "7"})
    assert (sent["Entrypoint"], sent["Cmd"]) == (["python", "x.py"], None)
    assert sent["Env"] == ["A=1"], "no proxy of Docker's configuration"
    assert (sent["User"], sent["Healthcheck"]["Test"]) == ("1:2", ["NONE"])
    assert (sent["Tty"], sent["OpenStdin"]) == (False, False)
    if network == "host":
        assert (sent["Hostname"], sent["NetworkingConfig"]) == (None, {})
    else:
        assert sent["Hostname"] == "workerpool0-0"
        assert sent["NetworkingConfig"]["EndpointsConfig"]["launch-7"]["Aliases"] == ["workerpool0-0"]


def test_what_it_gets_of_this_machine() -> None:
    api = Api()
    given = settings(gpus=("2", "GPU-3"), mounts=(Mount("/out", True), Mount("/key", False)), shm=1 << 30)
    made = containers.host_config(api, given)
    assert (made["NetworkMode"], made["ShmSize"], made["Init"]) == ("n", 1 << 30, False)
    assert [(one["Source"], one["Target"], one["ReadOnly"]) for one in made["Mounts"]] == [
        ("/out", "/out", False),
        ("/key", "/key", True),
    ]
    (gpus,) = made["DeviceRequests"]
    assert (gpus["DeviceIDs"], gpus["Capabilities"], gpus["Count"]) == (["2", "GPU-3"], [["gpu"]], 0)
    assert not containers.host_config(api, settings()).get("DeviceRequests")
    assert containers.host_config(api, settings(group="1000"))["GroupAdd"] == ["1000"]
    assert not containers.host_config(api, settings()).get("GroupAdd")


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"folder \S*file/run: Not a directory"):
        containers.make_mounts(job(base=f"{tmp_path}/file/run"), {})


class Gone:
    """An engine that has made the network, and is not there any more."""

    def create_network(self, *_: Any, **__: Any) -> None:
        pass

    def containers(self, **_: Any) -> None:
        raise requests.exceptions.ConnectionError("gone")


def test_what_went_wrong_before_is_told_rather_than_that_it_can_not_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watcher:
        monkeypatch.setattr(containers, "start_cleanup_process", lambda *_: watcher)
        with pytest.raises(LaunchError, match="first"), containers.job_resources(Gone(), "7", "launch-7", {}):
            raise LaunchError("first")
        with pytest.raises(LaunchError, match="can't remove the containers of job 7"):  # noqa: SIM117 -- at its end
            with containers.job_resources(Gone(), "7", "launch-7", {}):
                pass
        assert not watcher.communicate()[0], "it was told nothing, so it has it to do"


class Engine:
    """An engine whose containers end by themselves with these codes, one after the other."""

    def __init__(self, *codes: int) -> None:
        self.api = self
        self.base_url = "http+unix:///none"
        self.codes = dict(enumerate(codes))
        self.names: list[str] = []
        self.create_host_config = self.create_networking_config = self.create_endpoint_config = dict

    def info(self) -> dict[str, Any]:
        return {"MemTotal": 1 << 30, "Architecture": "x86_64"}

    def has(self, _uri: str) -> bool:
        return True

    def inspect_image(self, _uri: str) -> dict[str, Any]:
        return {"Id": "sha256:1", "Architecture": "amd64", "Config": {"Cmd": ["work"]}}

    def create_container(self, _image: str, *, name: str, **_: Any) -> dict[str, str]:
        self.names.append(name)
        return {"Id": str(len(self.names) - 1)}

    def attach(self, *_: Any, **__: Any) -> Any:
        return BytesIO()

    def start(self, _container: str) -> None:
        pass

    def wait(self, container: str, timeout: None) -> dict[str, int]:
        return {"StatusCode": self.codes[int(container)]}


def test_a_killed_container_is_replaced_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(137, 0)
    monkeypatch.setattr(containers, "connect", lambda _: engine)
    monkeypatch.setattr(containers, "job_resources", lambda *_: nullcontext())
    said: list[str] = []
    ended = containers.rehearse(
        job(), job_id="7", environ={}, on_line=lambda *_: None, on_left=lambda _: None, say=said.append
    )
    assert ended.codes == {"workerpool0-0": 0}
    assert engine.names == ["launch-7-workerpool0-0", "launch-7-workerpool0-0.2"]
    assert said == ["workerpool0-0 was killed (SIGKILL); restarting it (1 of 5)"]
