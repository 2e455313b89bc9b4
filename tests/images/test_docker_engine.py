"""Building, pushing and pulling with the Docker engine, against one that says what a real one said; BuildKit."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.images.docker_engine import Engine, EngineError, buildkit
from launcher.images.registry import RepositoryMissing
from launcher.images.source_files import File, Source
from launcher.plan.model import Image
from tests.images import scripted_engine
from tests.images.scripted_engine import BASE, DIGEST, TAG, Answer, failure

IMAGE = Image(uri=TAG, pinned=False, dependencies="", base=BASE, platform="linux/amd64", wheel="cu126", min_driver=None)


def stream(*texts: str) -> list[dict[str, Any]]:
    return [{"stream": text} for text in texts]


def failed(message: str, code: int = 1) -> dict[str, Any]:
    return {"errorDetail": {"code": code, "message": message}, "error": message}


BUILT: list[dict[str, Any]] = [
    *stream("Step 1/3 : FROM localhost:5055/base:bookworm", "\n", " ---> cf200e60a3d8\n"),
    *stream("Step 2/3 : RUN echo a     && echo b >&2", "\n", " ---> Running in 62a7be8428eb\n"),
    *stream("a\n", "\x1b[91mb\n\x1b[0m", "Coll", "ecting x\r\n  10 %\r  50 %\r", "  100 %\n"),
    *stream("Removing intermediate container 62a7be8428eb\n", " ---> 335ababd9a58\n"),
    *stream("Step 3/3 : LABEL a=b", "\n", " ---> c155e5dcff62\n"),
    {"aux": {"ID": "sha256:c155e5dcff62"}},
    *stream("Successfully built c155e5dcff62\n", f"Successfully tagged {TAG}\n"),
]


def build(engine: Engine, lines: list[str] | None = None, image: Image = IMAGE, source: Source | None = None) -> str:
    given = source or Source()
    on_line = lines.append if lines is not None else print
    return engine.build(given, image, target="train", tag=TAG, labels={"a": "b"}, on_line=on_line)


# --- Building -------------------------------------------------------------------------------------------------------


def test_a_build_sends_the_context_and_three_arguments_and_nothing_else(
    double: scripted_engine.Engine, engine: Engine, tmp_path: Path
) -> None:
    double.says("POST", "/build", Answer(events=BUILT))
    (tmp_path / "a.py").write_text("1")
    build(engine, source=Source(code=(File("a.py", tmp_path / "a.py"),)))
    asked = double.asked[-1]
    assert {key: value for key, value in asked.query.items() if value not in ("True", "False")} == {
        "t": TAG, "dockerfile": "train.Dockerfile", "target": "train", "platform": "linux/amd64",
        "buildargs": json.dumps({"BASE": BASE, "WHEEL": "cu126"}), "labels": json.dumps({"a": "b"}),
    }  # fmt: skip
    assert (asked.query["rm"], asked.query["forcerm"], asked.query["nocache"]) == ("True", "True", "False")
    with tarfile.open(fileobj=io.BytesIO(asked.body)) as tar:
        assert "code/a.py" in tar.getnames()


def test_a_base_by_tag_is_built_on_by_the_digest_that_its_registry_gave(
    double: scripted_engine.Engine, engine: Engine
) -> None:
    pinned = f"{BASE.rpartition(':')[0]}@sha256:{'7' * 64}"
    data = {"Id": "x", "Os": "linux", "Architecture": "amd64", "RepoDigests": ["other/x@sha256:" + "8" * 64, pinned]}
    double.says("GET", f"/images/{BASE}/json", Answer(data=data), Answer(data=data))
    double.says("POST", "/build", Answer(events=BUILT))
    lines: list[str] = []
    build(engine, lines)
    asked = double.asked[-1].query
    assert json.loads(asked["buildargs"])["BASE"] == pinned
    assert json.loads(asked["labels"]) == {"a": "b", "launch.base": pinned}
    assert any(pinned in line and "not pinned" in line for line in lines)


def test_no_password_and_no_proxy_of_dockers_configuration_goes_along(
    double: scripted_engine.Engine, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = base64.b64encode(b"me:canary").decode()
    proxies = {"default": {"httpProxy": "http://me:canary@proxy:1"}}
    config = {"auths": {"example.com": {"auth": auth}}, "credsStore": "no-such-helper", "proxies": proxies}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))  # the SDK looks here, whatever environment it is given
    monkeypatch.setenv("HTTP_PROXY", "http://me:canary@proxy:1")
    double.says("POST", "/build", Answer(events=BUILT))
    engine = Engine.connect(environ)
    build(engine)
    engine.api.close()
    asked = double.asked[-1]
    assert "X-Registry-Config" not in asked.headers
    assert "canary" not in f"{asked.query}{asked.headers}".lower()
    assert b"canary" not in asked.body


def test_a_build_tells_its_steps_and_output_without_the_engines_housekeeping(
    double: scripted_engine.Engine, engine: Engine
) -> None:
    double.says("POST", "/build", Answer(events=BUILT))
    lines: list[str] = []
    assert build(engine, lines) == "sha256:c155e5dcff62"
    assert lines == [
        f"the base image {BASE} has no digest: it is in this engine only",
        "Step 1/3 : FROM localhost:5055/base:bookworm", "Step 2/3 : RUN echo a && echo b >&2", "a", "b",
        "Collecting x", "  100 %", "Step 3/3 : LABEL a=b",
    ]  # fmt: skip


def failing(*events: Mapping[str, Any]) -> Answer:
    step = stream("Step 7/12 : RUN pip install --requirement /opt/venv/requirements.txt", "\n", " ---> Running in 6\n")
    return Answer(events=[*stream("old\n"), *step, *map(dict, events)])


def test_a_step_that_fails_is_named_with_its_last_lines(double: scripted_engine.Engine, engine: Engine) -> None:
    output = stream(*(f"line {number}\n" for number in range(15)), "\x1b[91mERROR: No matching distribution for x\n")
    said = "The command '/bin/sh -c pip …' returned a non-zero code: 1"
    double.says("POST", "/build", failing(*output, failed(said)))
    with pytest.raises(EngineError) as error:
        build(engine)
    first, second, *rest = error.value.problem.splitlines()
    assert first == f"{TAG} can't be built: Step 7/12 : RUN pip install --requirement /opt/venv/requirements.txt"
    assert second == said
    assert rest == [*(f"  line {number}" for number in range(6, 15)), "  ERROR: No matching distribution for x"]
    assert "image.requirements" in error.value.hint


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("write /opt/venv/x: no space left on device", "docker system df"),
        ("standard_init_linux.go:228: exec user process caused: exec format error", "no emulator"),
        ("ERROR: torch-1.whl is not a supported wheel on this platform.", "image.torch"),
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution", "network"),
    ],
)
def test_known_errors_have_a_hint(double: scripted_engine.Engine, engine: Engine, said: str, hint: str) -> None:
    for answer in (failing(failed(said)), failing(*stream(f"{said}\n"), failed("returned a non-zero code: 1"))):
        double.says("POST", "/build", answer)
        with pytest.raises(EngineError) as error:
            build(engine)
        assert hint in error.value.hint


def test_an_error_of_a_step_without_a_remedy_has_no_hint(double: scripted_engine.Engine, engine: Engine) -> None:
    said = stream("Step 1/2 : RUN a", "\n", "output of another step\n", "Step 2/2 : COPY a b", "\n")
    double.says("POST", "/build", Answer(events=[*said, failed("COPY failed: no a")]))
    with pytest.raises(EngineError, match=r"Step 2/2 : COPY a b\nCOPY failed: no a$"):
        build(engine)


def test_an_invalid_dockerfile(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/build", failure("dockerfile parse error line 2: unknown instruction: RUNN", 400))
    with pytest.raises(EngineError, match="train:1 can't be built: dockerfile parse error line 2: unknown"):
        build(engine)


@pytest.mark.parametrize("cut", ['{"stream": "Step 2', '{"stream": "Step 2/3 : RUN x"}\r\n'])
def test_an_engine_that_dies_in_the_midst(double: scripted_engine.Engine, engine: Engine, cut: str) -> None:
    for path, act in (("/build", build), ("/images/localhost:5055/team/train/push", lambda one: one.push(TAG))):
        double.says("POST", path, Answer(events=BUILT[:4], cut=cut))
        with pytest.raises(EngineError, match="no answer from the Docker engine"):
            act(engine)


def test_an_invalid_stream(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/build", Answer(events=BUILT[:4], tail='{"stream": '))
    with pytest.raises(EngineError, match="no answer from the Docker engine"):
        build(engine)


def test_a_stream_that_ends_too_early_is_no_success(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/build", Answer(events=BUILT[:4]))
    with pytest.raises(EngineError, match="isn't built: the engine closed the connection"):
        build(engine)


# --- The base -------------------------------------------------------------------------------------------------------


def test_a_base_that_is_here_is_not_pulled(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/build", Answer(events=BUILT))
    build(engine)
    assert "/images/create" not in [asked.path for asked in double.asked]


def test_a_base_for_another_platform_is_pulled_again(double: scripted_engine.Engine, engine: Engine) -> None:
    """The name is here, for amd64: taken as it is, it would end as an exec format error on a paid machine."""
    image = Image(**{**vars_of(IMAGE), "platform": "linux/arm64"})
    here = Answer(data={"Id": "x", "Os": "linux", "Architecture": "amd64"})
    right = Answer(data={"Id": "y", "Os": "linux", "Architecture": "arm64"})
    double.says("GET", f"/images/{BASE}/json", here, right)
    double.says("POST", "/images/create", Answer(events=[{"status": "Pulling from base", "id": "bookworm"}]))
    double.says("POST", "/build", Answer(events=BUILT))
    lines: list[str] = []
    build(engine, lines, image)
    (pull,) = [asked for asked in double.asked if asked.path == "/images/create"]
    assert pull.query == {"fromImage": "localhost:5055/base", "tag": "bookworm", "platform": "linux/arm64"}
    assert lines[0] == f"pulling the base image {BASE}"


def vars_of(image: Image) -> dict[str, Any]:
    return {name: getattr(image, name) for name in image.__struct_fields__}


def test_an_engine_that_pulls_the_wrong_platform_and_says_nothing(
    double: scripted_engine.Engine, engine: Engine
) -> None:
    double.has(BASE, "arm64")
    double.says("POST", "/images/create", Answer(events=[{"status": "Status: Image is up to date"}]))
    with pytest.raises(EngineError, match="bookworm is for linux/arm64, but the machine is linux/amd64"):
        build(engine)


@pytest.mark.parametrize(
    ("said", "status", "hint"),
    [
        (f"manifest for {BASE} not found: manifest unknown: manifest unknown", 404, "Check its name"),
        ('Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1: no such host', 500, "the network"),
        ('Get "http://localhost:9/v2/": dial tcp 127.0.0.1:9: connect: connection refused', 500, "does not respond"),
    ],
)
def test_a_base_that_can_not_be_pulled(
    double: scripted_engine.Engine, engine: Engine, said: str, status: int, hint: str
) -> None:
    double.says("GET", f"/images/{BASE}/json", failure("No such image", 404))
    double.says("POST", "/images/create", failure(said, status))
    with pytest.raises(EngineError) as error:
        build(engine)
    assert error.value.problem == f"the base image {BASE} can't be pulled: {said}"
    assert hint in error.value.hint
    assert "image.base" in error.value.hint


# --- Finding the engine -----------------------------------------------------------------------------------------------


def test_no_socket_and_one_that_nobody_listens_at(tmp_path: Path) -> None:
    dead = tmp_path / "dead.sock"
    with scripted_engine.Engine(dead):
        pass
    for host in (f"unix://{tmp_path}/none.sock", f"unix://{dead}", "tcp://127.0.0.1:9"):
        with pytest.raises(EngineError) as error:
            Engine.connect({"DOCKER_HOST": host})
        assert f"no Docker engine is running at {host} (DOCKER_HOST)" in error.value.problem
        assert "systemctl start docker" in error.value.hint


def test_no_permission_on_the_socket(monkeypatch: pytest.MonkeyPatch, double: scripted_engine.Engine) -> None:
    """Root may always: here the door itself says no."""

    def refuse(_url: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("launcher.images.docker_engine.check_listens", refuse)
    with pytest.raises(EngineError, match="no permission to use the Docker engine") as error:
        Engine.connect({"DOCKER_HOST": double.host})
    assert "usermod -aG docker" in error.value.hint


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DOCKER_HOST": "nonsense://x"}, "can't be used"),
        ({"DOCKER_HOST": "tcp://127.0.0.1:9", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/no"}, "can't be used"),
    ],
)
def test_an_invalid_address(environ: dict[str, str], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        Engine.connect(environ)


def test_something_that_listens_and_is_no_engine(double: scripted_engine.Engine) -> None:
    double.says("GET", "/version", failure("what?", 500))
    with pytest.raises(EngineError, match=r"can't be used: .*500"):
        Engine.connect({"DOCKER_HOST": double.host})


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(EngineError, match="Docker's SDK is not installed") as error:
        Engine.connect({})
    assert error.value.hint == 'pip install "gcp-launch[docker]"'


# --- Pushing and pulling ----------------------------------------------------------------------------------------------


PUSHED: list[dict[str, Any]] = [
    {"status": "The push refers to repository [localhost:5055/team/train]"},
    {"status": "Preparing", "progressDetail": {}, "id": "d471e9ec47dc"},
    {"status": "Layer already exists", "progressDetail": {}, "id": "0123456789ab"},
    {"status": "Pushing", "progressDetail": {"current": 40, "total": 90}, "progress": "[=>]", "id": "d471e9ec47dc"},
    {"status": "Pushing", "progressDetail": {"current": 95, "total": 90}, "progress": "[==>]", "id": "d471e9ec47dc"},
    {"status": "Pushed", "progressDetail": {}, "id": "d471e9ec47dc"},
    {"status": f"1: digest: {DIGEST} size: 529"},
    {"progressDetail": {}, "aux": {"Tag": "1", "Digest": DIGEST, "Size": 529}},
]


def test_a_push_tells_the_digest_and_each_layers_bytes(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/images/localhost:5055/team/train/push", Answer(events=PUSHED))
    told: list[tuple[str, int, int]] = []
    assert engine.push(TAG, lambda *layer: told.append(layer)) == DIGEST
    assert told == [("layer d471e9ec47dc", 40, 90), ("layer d471e9ec47dc", 90, 90), ("layer d471e9ec47dc", 90, 90)]
    assert double.asked[-1].query == {"tag": "1"}


def sent_credentials(double: scripted_engine.Engine) -> object:
    return json.loads(base64.urlsafe_b64decode(double.asked[-1].headers["X-Registry-Auth"]))


def test_the_credentials_of_that_registry_alone_are_handed_on(
    double: scripted_engine.Engine, engine: Engine, tmp_path: Path
) -> None:
    double.says("POST", "/images/localhost:5055/team/train/push", Answer(events=PUSHED))
    engine.push(TAG)
    assert sent_credentials(double) == {}
    auths = {"localhost:5055": "me:secret", "example.com": "you:other"}
    config = {"auths": {host: {"auth": base64.b64encode(pair.encode()).decode()} for host, pair in auths.items()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine.push(TAG)
    assert sent_credentials(double) == {"username": "me", "password": "secret", "serveraddress": "localhost:5055"}
    config = {"auths": {"localhost:5055": {"identitytoken": "idt"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine.push(TAG)
    assert sent_credentials(double) == {"identitytoken": "idt", "serveraddress": "localhost:5055"}


@pytest.mark.parametrize(
    ("said", "kind", "hint"),
    [
        ("unauthorized: authentication required", NotAuthorised, "docker login localhost:5055"),
        ("no basic auth credentials", NotAuthorised, "docker login"),
        ("denied: requested access to the resource is denied", NotAuthorised, "docker login"),
        ('name unknown: Repository "team" not found', RepositoryMissing, "--create-repository"),
        ('Get "http://localhost:5055/v2/": connect: connection refused', EngineError, "does not respond"),
        ("write: no space left on device", EngineError, "docker system df"),
        ("unknown: something else", EngineError, ""),
    ],
)
def test_an_error_inside_the_stream_of_a_push(
    double: scripted_engine.Engine, engine: Engine, said: str, kind: type[LaunchError], hint: str
) -> None:
    events: list[dict[str, Any]] = [*PUSHED[:4], {"errorDetail": {"message": said}, "error": said}]
    double.says("POST", "/images/localhost:5055/team/train/push", Answer(events=events))
    with pytest.raises(kind) as error:
        engine.push(TAG)
    assert error.value.problem == f"{TAG} can't be pushed: {said}"
    assert hint in error.value.hint


def test_a_pull_by_digest_tells_what_is_downloaded(double: scripted_engine.Engine, engine: Engine) -> None:
    events: list[dict[str, Any]] = [
        {"status": "Pulling from team/train", "id": DIGEST},
        {"status": "Downloading", "progressDetail": {"current": 5, "total": 9}, "id": "a"},
        {"status": "Download complete", "progressDetail": {}, "id": "a"},
        {"status": "Extracting", "progressDetail": {"current": 1, "total": 9}, "id": "a"},
        {"status": "Pull complete", "progressDetail": {}, "id": "a"},
    ]
    double.says("POST", "/images/create", Answer(events=events))
    told: list[tuple[str, int, int]] = []
    engine.pull(f"localhost:5055/team/train@{DIGEST}", lambda *layer: told.append(layer))
    assert told == [("layer a", 5, 9), ("layer a", 9, 9)]
    assert double.asked[-1].query == {"fromImage": "localhost:5055/team/train", "tag": DIGEST}


def test_a_push_that_ends_too_early_is_no_success(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/images/localhost:5055/team/train/push", Answer(events=PUSHED[:3]))
    with pytest.raises(EngineError, match="isn't pushed: the engine closed the connection"):
        engine.push(TAG)


# --- BuildKit ---------------------------------------------------------------------------------------------------------


TOKEN = "canary-51b0"


@pytest.fixture
def context() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(b"context")
        file.seek(0)
        yield file


def docker_command(folder: Path, script: str) -> dict[str, str]:
    """An environment whose docker command is a script."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    home = folder / "home"
    (home / ".docker" / "cli-plugins").mkdir(parents=True)
    (home / ".docker" / "config.json").write_text('{"auths": {"x": {"auth": "canary"}}}')
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(home), "TOKEN": TOKEN, "OTHER": "canary-other"}


def run_buildkit(environ: dict[str, str], context: IO[bytes], secrets: tuple[str, ...] = ("TOKEN",)) -> list[str]:
    lines: list[str] = []
    buildkit(context, ["--tag=x"], host="unix:///s", environ=environ, secrets=secrets, on_line=lines.append)
    return lines


def test_it_gets_the_context_the_secrets_and_nothing_else(tmp_path: Path, context: IO[bytes]) -> None:
    script = 'echo "$@"; cat; echo; env | sort; ls -a "$DOCKER_CONFIG"'
    first, second, *rest = run_buildkit(docker_command(tmp_path, script), context)
    assert first == "build --progress=plain --tag=x --secret id=TOKEN,env=TOKEN -"
    assert second == "context"
    shown = "\n".join(rest)
    assert {"DOCKER_BUILDKIT=1", "DOCKER_HOST=unix:///s", "cli-plugins"} <= set(rest)
    assert "canary" not in shown
    assert "TOKEN=***" in rest


def test_a_failed_step_has_its_last_lines_without_the_secret(tmp_path: Path, context: IO[bytes]) -> None:
    with pytest.raises(EngineError) as error:
        run_buildkit(docker_command(tmp_path, f"echo one; echo fetching https://me:{TOKEN}@host >&2; exit 3"), context)
    assert "exit code 3" in error.value.problem
    assert "https://me:***@host" in error.value.problem
    assert TOKEN not in str(error.value)


def test_without_buildx_or_docker_it_says_what_to_install(tmp_path: Path, context: IO[bytes]) -> None:
    with pytest.raises(EngineError, match="buildx") as error:
        run_buildkit(
            docker_command(tmp_path, "echo 'ERROR: the buildx component is missing or broken.'; exit 1"), context
        )
    assert "docs.docker.com" in error.value.hint
    with pytest.raises(EngineError, match="not installed"):
        run_buildkit({"PATH": "/no/such/folder", "TOKEN": TOKEN}, context)


def test_a_secret_that_is_not_set_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError) as refused:
        run_buildkit({"PATH": "/no/such/folder"}, io.BytesIO())
    assert refused.value.field == "image.build_secrets"
    assert "export TOKEN=" in refused.value.hint


def test_each_line_of_a_secret_is_masked_and_the_longest_first(tmp_path: Path, context: IO[bytes]) -> None:
    """A build prints lines, so a key of several lines never appears as a whole; and one secret may begin another."""
    environ = docker_command(tmp_path, 'printf "%s\\n" "$KEY" "$TOKEN"')
    environ |= {"KEY": f"-----BEGIN\n{TOKEN}-first\n{TOKEN}-second\n"}
    lines = run_buildkit(environ, context, secrets=("TOKEN", "KEY"))
    assert lines[:3] == ["***", "***", "***"]
    assert lines[-1] == "***"
