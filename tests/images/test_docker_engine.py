"""Building with the Docker engine, against one that says what a real one said."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.images.docker_engine import Engine, EngineError
from launcher.images.source_files import File, Source
from launcher.plan.model import Image
from tests.images import scripted_engine
from tests.images.scripted_engine import BASE, TAG, Answer, failure

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


def test_a_conflict_is_of_the_requirements_even_if_an_index_is_away(
    double: scripted_engine.Engine, engine: Engine
) -> None:
    away = "WARNING: Retrying: Failed to establish a new connection: Temporary failure in name resolution\n"
    output = stream(away, "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io\n")
    double.says("POST", "/build", failing(*output, failed("returned a non-zero code: 1")))
    with pytest.raises(EngineError) as error:
        build(engine)
    assert "image.requirements" in error.value.hint


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
