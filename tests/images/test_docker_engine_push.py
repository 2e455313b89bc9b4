"""Pushing and pulling with the Docker engine, against one that says what a real one said."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError, NotAuthorised
from launcher.images.docker_engine import Engine, EngineError
from launcher.images.registry.transport import RepositoryMissing
from tests.images import scripted_engine
from tests.images.scripted_engine import BASE, DIGEST, TAG, Answer

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


def test_has_and_tag(double: scripted_engine.Engine, engine: Engine) -> None:
    assert engine.has(BASE) == f"sha256:{BASE}"
    assert engine.has(TAG) is None
    double.says("POST", f"/images/{BASE}/tag", Answer(201))
    engine.tag(BASE, TAG)
    assert double.asked[-1].query["repo"] == "localhost:5055/team/train"
    assert double.asked[-1].query["tag"] == "1"
    with pytest.raises(EngineError, match=f"{TAG} can't be named {BASE}: No such image"):
        engine.tag(TAG, BASE)


def test_a_push_that_ends_too_early_is_no_success(double: scripted_engine.Engine, engine: Engine) -> None:
    double.says("POST", "/images/localhost:5055/team/train/push", Answer(events=PUSHED[:3]))
    with pytest.raises(EngineError, match="isn't pushed: the engine closed the connection"):
        engine.push(TAG)
