"""The bundle holds nothing that tells whose it is: canaries in every place, and every byte looked at."""

from __future__ import annotations

import getpass
import json
import re
import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launcher.apply import running
from launcher.selftest.bundle import Redactor, read, without_people, written
from tests.googlecloud import Fault, Status
from tests.selftest.world import World, opened

PROJECT, NUMBER = "canary-project-7d3f", "987654321098"
CANARIES = {
    "project": PROJECT,
    "number": NUMBER,
    "account": "canary.person@canary-corp.example",
    "person": "canary.person",
    "login": "canary_person_canary_corp_example",
    "token": "ya29.canary-token-0123456789",
    "bucket": "canary-bucket-55",
    "user": "canaryuser",
    "host": "canary-host",
    "home": "canary-home",
    "key": "AAAAC3NzaC1lZDI1NTE5AAAAICANARYCANARYCANARYCANARYCANARY",
}


def leaks(path: Path) -> list[str]:
    """The canaries in an unpacked bundle."""
    with zipfile.ZipFile(path) as file:
        text = "".join([path.name, *file.namelist(), *(file.read(name).decode() for name in file.namelist())])
    return [name for name, canary in CANARIES.items() if canary.lower() in text.lower()]


def test_a_whole_selftest_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries are the project, its number, account, token, user, host and home, and stand in a refusal, too."""
    home = tmp_path / CANARIES["home"]
    home.mkdir()
    monkeypatch.setattr(getpass, "getuser", lambda: CANARIES["user"])
    monkeypatch.setattr(socket, "gethostname", lambda: CANARIES["host"])
    with opened(home, project=PROJECT, number=NUMBER) as world:
        monkeypatch.setattr(running, "REAL", world.time)
        world.cloud.objects.add(CANARIES["bucket"])
        world.cloud.let_in(CANARIES["token"])
        del world.env["CLOUDSDK_AUTH_DISABLE_CREDENTIALS"]
        world.env |= {**world.cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": CANARIES["account"]}
        said = f"{CANARIES['account']} may not read gs://{CANARIES['bucket']} in {home} of project {NUMBER}"
        world.cloud.faults.add(Fault("compute.machineTypes.get", Status(403, message=said), times=None))
        ran = world.selftest("--only", "cpu")
    assert ran.code == 1, ran.shown
    (path,) = home.glob("launch-selftest-*.zip")
    assert leaks(path) == []
    results, calls = read(path)
    assert {one["name"] for one in results["steps"]} >= {"access", "cpu", "once"}
    failed = next(one for one in results["steps"] if one["name"] == "tables")
    assert failed["ok"] is False
    assert "ACCOUNT may not read gs://BUCKET in HOME of project PROJECT-NUMBER" in failed["why"], failed
    text = json.dumps(calls)
    assert {"PROJECT", "PROJECT-NUMBER"} <= set(re.findall(r"[A-Z][A-Z-]+", text))
    assert {call["step"] for call in calls} >= {"access", "bucket", "build", "cpu", "clean"}, ran.shown
    created = [call for call in calls if call["operation"] == "POST /v1/projects/*/locations/*/customJobs"]
    assert created[0]["request"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] == {"machineType": "n1-standard-4"}
    assert created[0]["answer"]["state"].startswith("JOB_STATE_")


def test_the_results_are_what_is_adopted(world: World) -> None:
    ran = world.selftest("--only", "push")
    assert ran.code == 0, ran.shown
    (path,) = world.folder.glob("launch-selftest-*.zip")
    results, _ = read(path)
    assert {"date", "commit", "version", "steps"} <= results.keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", results["date"])
    for step in results["steps"]:
        assert {"name", "ok", "target", "seconds", "why"} <= step.keys()
        assert step["ok"] in (True, False, None)
    assert [step["target"] for step in results["steps"]] == ["project"] * 3 + ["bucket", "image", "image"]


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("by a.b+c@d-e.example.com, too", "by EMAIL, too"),
        ("Bearer ya29.a0-B_c.d", "Bearer TOKEN"),
        ("eyJhbGciOi.eyJpc3Mi.c2ln-_", "TOKEN"),
        ("ssh-ed25519 AAAAC3Nza/+= me", "SSH-KEY me"),
        ("from 10.128.0.2 to 2001:db8::8a2e:370:7334", "from IP to IP"),
        ("Zm9v" * 20, "BASE64"),
        ("a" * 64, "a" * 64),  # a digest
        ("2026-11-22T10:00:00.123456Z", "2026-11-22T10:00:00.123456Z"),
        ("/home/somebody/x and /Users/somebody/y", "/home/USER/x and /Users/USER/y"),
        ("projects/123456789012/locations", "projects/PROJECT-NUMBER/locations"),
        ("root in chroot", "USER in chroot"),
        ("My-Project-launch", "PROJECT-launch"),
    ],
)
def test_patterns(text: str, redacted: str) -> None:
    redact = Redactor({"root": "USER", "my-project": "PROJECT"})
    assert redact(text) == redacted
    assert redact({"a": [{text: 1}]}) == {"a": [{redacted: 1}]}


def test_nothing_of_a_person_is_left_of_os_login() -> None:
    answer = {
        "name": "1234",
        "posixAccounts": [{"username": "jane_doe", "homeDirectory": "/home/jane_doe", "uid": "5", "primary": True}],
        "sshPublicKeys": {"0123abcd": {"key": "ssh-rsa AAAA jane", "fingerprint": "0123abcd"}},
    }
    call: dict[str, Any] = {"operation": "GET /v1/users/*/loginProfile", "path": "/v1/users/jane@x.org/loginProfile"}
    hidden = json.dumps(without_people({**call, "request": None, "answer": answer}))
    assert not [word for word in ("jane", "0123abcd", "1234") if word in hidden]
    assert '"primary": true' in hidden


def test_long_texts_are_cut(tmp_path: Path) -> None:
    path = written(tmp_path, "x.zip", {"steps": []}, [{"path": "/", "answer": "x y " * 5000}], {})
    assert read(path)[1][0]["answer"].endswith("… (20000 characters)")
