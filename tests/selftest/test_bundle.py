"""The bundle holds nothing that tells whose it is: canaries in every place, and every byte looked at."""

from __future__ import annotations

import getpass
import json
import re
import socket
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from google.cloud import artifactregistry_v1

from launcher.selftest.recording import Redactor, write_bundle
from launcher.testing.googlecloud import Fault, Status
from launcher.testing.googlecloud.faults import Serve, Step
from launcher.testing.googlecloud.images.artifact_registry import RepositoryRecord
from launcher.testing.googlecloud.wire import Call, Response, json_response
from tests.selftest.comparison import read_bundle
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
    "log line": "customer Jane Canary",
    "metadata": "canary-db-password",
    "usage": "canary-usage-bucket",
    "other repository": "canary-images",
    "key": "AAAAC3NzaC1lZDI1NTE5AAAAICANARYCANARYCANARYCANARYCANARY",
}


class Answer:
    """No fault: what a real project holds."""

    step: ClassVar[Step | None] = None

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def __call__(self, call: Call, serve: Serve) -> Response:
        return json_response(self.answer)


def leaks(path: Path) -> list[str]:
    """The canaries in an unpacked bundle."""
    with zipfile.ZipFile(path) as file:
        text = "".join([path.name, *file.namelist(), *(file.read(name).decode() for name in file.namelist())])
    return [name for name, canary in CANARIES.items() if canary.lower() in text.lower()]


@pytest.mark.slow
def test_a_whole_selftest_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries are the project, its number, account, token, user, host and home, and stand in a refusal, too."""
    home = tmp_path / CANARIES["home"]
    home.mkdir()
    monkeypatch.setattr(getpass, "getuser", lambda: CANARIES["user"])
    monkeypatch.setattr(socket, "gethostname", lambda: CANARIES["host"])
    with opened(home, project=PROJECT, number=NUMBER) as world:
        monkeypatch.setattr("launcher.clock.REAL", world.time)
        world.cloud.objects.add(CANARIES["bucket"])
        world.cloud.let_in(CANARIES["token"])
        del world.env["CLOUDSDK_AUTH_DISABLE_CREDENTIALS"]
        world.env |= {**world.cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": CANARIES["account"]}
        log = {"logName": f"projects/{PROJECT}/logs/app", "textPayload": CANARIES["log line"], "insertId": "1"}
        log["timestamp"] = datetime.fromtimestamp(world.clock(), UTC).isoformat()
        metadata = {"items": [{"key": "db", "value": CANARIES["metadata"]}]}
        metadata["items"].append({"key": "ssh-keys", "value": f"x:ssh-ed25519 {CANARIES['key']} x"})
        project = {"kind": "compute#project", "id": NUMBER, "name": PROJECT, "commonInstanceMetadata": metadata}
        project["usageExportLocation"] = {"bucketName": CANARIES["usage"]}
        world.cloud.faults.add(Fault("logging.entries.list", Answer({"entries": [log]}), times=1))
        world.cloud.faults.add(Fault("compute.projects.get", Answer(project), times=1))
        name = f"projects/{PROJECT}/locations/us/repositories/{CANARIES['other repository']}"
        message = artifactregistry_v1.Repository.pb()(name=name, format_="DOCKER")
        world.cloud.artifacts.repositories[name] = RepositoryRecord(message, 0.0)
        said = f"{CANARIES['account']} may not read gs://{CANARIES['bucket']} in {home} of project {NUMBER}"
        world.cloud.faults.add(Fault("compute.machineTypes.get", Status(403, message=said), times=None))
        ran = world.selftest("--only", "cpu")
    assert ran.code == 1, ran.shown
    (path,) = home.glob("launch-selftest-*.zip")
    assert leaks(path) == []
    results, calls = read_bundle(path)
    assert {one["name"] for one in results["steps"]} >= {"access", "cpu", "once"}
    failed = next(one for one in results["steps"] if one["name"] == "tables")
    assert failed["ok"] is False
    assert "ACCOUNT may not read gs://BUCKET in HOME of project PROJECT-NUMBER" in failed["why"], failed
    text = json.dumps(calls)
    assert {"ACCOUNT", "PROJECT-NUMBER"} <= set(re.findall(r"[A-Z][A-Z-]+", text))
    assert {call["step"] for call in calls} >= {"access", "bucket", "build", "cpu", "clean"}, ran.shown
    created = [call for call in calls if call["operation"] == "POST /v1/projects/*/locations/*/customJobs"]
    assert created[0]["request"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] == {"machineType": "string"}
    assert created[0]["answer"]["state"].startswith("JOB_STATE_")


def test_the_results_are_what_is_adopted(world: World) -> None:
    ran = world.selftest("--only", "push")
    assert ran.code == 0, ran.shown
    (path,) = world.folder.glob("launch-selftest-*.zip")
    results, _ = read_bundle(path)
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
        ("projects/other-proj/zones/z", "projects/OTHER-PROJECT/zones/z"),
        ("us-docker.pkg.dev/other-proj/r/i:t", "us-docker.pkg.dev/OTHER-PROJECT/r/i:t"),
        (
            "http://x:34985/artifacts/v1/projects/PROJECT/locations/us/repositories/launch",
            "http://x:34985/artifacts/v1/projects/PROJECT/locations/us/repositories/launch",
        ),
        (f"source/{64 * 'a'}.tgz", f"source/{64 * 'a'}.tgz"),
        ("Ab1/" * 20, "BASE64"),
        ("root in chroot", "USER in chroot"),
        ("My-Project-launch", "PROJECT-launch"),
    ],
)
def test_patterns(text: str, redacted: str) -> None:
    redact = Redactor({"root": "USER", "my-project": "PROJECT"})
    assert redact(text) == redacted
    assert redact({"a": [{text: 1}]}) == {"a": [{redacted: 1}]}


OWN = "launch-selftest-0a1b2c"


def test_only_the_shape_of_requests_and_answers_is_kept(tmp_path: Path) -> None:
    """Allow-list: keys, kinds, counts and Google's own words stay; tests.selftest.loopback needs no more."""
    answer = {
        "posixAccounts": [{"username": "jane_doe", "uid": 512, "primary": True}],
        "sshPublicKeys": {"0123abcd": {"key": "ssh-rsa AAAA jane"}},
        "commonInstanceMetadata": {"items": [{"key": "db-password", "value": "hunter2"}]},
        "usageExportLocation": {"bucketName": "secret-usage"},
        "quotas": [{"metric": "CPUS_ALL_REGIONS", "limit": 12.0}],
        "entries": [{"textPayload": "Jane", "jsonPayload": {"jane": "owes", "of": {"status": "red"}}, "ssn": 123121}],
        "labels": {"acme/team": "red"},
        "repositories": [{"name": "projects/p/repositories/acme", "format": "DOCKER"}],
        "nextPageToken": "b3BhcXVl",
    }
    call = {"operation": "GET /v1/users/*", "path": "/users/jane", "request": answer, "status": 200, "answer": answer}
    _, [kept] = read_bundle(write_bundle(tmp_path, "x.zip", {}, [call], {}))
    text = json.dumps(kept)
    private = ("jane", "0123abcd", "512", "password", "hunter2", "secret-usage", "owes", "1231", "acme", "b3Bh", '"red')
    assert [word for word in private if word.lower() in text.lower()] == []
    assert kept["request"] == kept["answer"]
    assert kept["answer"].keys() == answer.keys()
    assert kept["answer"]["quotas"] == [{"metric": "CPUS_ALL_REGIONS", "limit": 0.0}]
    assert kept["answer"]["repositories"] == [{"name": "string", "format": "DOCKER"}]
    assert kept["answer"]["posixAccounts"][0]["primary"] is True


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "access_token",
        "accessToken",
        "id_token",
        "refresh_token",
        "identity_token",
        "client_secret",
        "private_key",
        "pageToken",
    ],
)
def test_a_secret_is_known_by_its_field(name: str) -> None:
    redact = Redactor({})
    assert "s3cr3t" not in json.dumps(redact([f"GET /x?a=b&{name}=s3cr3t&c=d"]))
    assert "s3cr3t" not in redact(f'{{"{name}": "s3cr3t"}}')


def test_a_projects_number_is_learnt_wherever_it_stands(tmp_path: Path) -> None:
    answer = {"name": OWN, "projectNumber": "123456789012", "n": 123456789012, "text": "of 123456789012, 4444444444"}
    mail = "by service-5555555555@gcp-sa.example and 6666666666-compute@developer.gserviceaccount.com; 5555555555"
    call = {"operation": "GET /storage/v1/b", "path": "/storage/v1/b", "query": {"project": "4444444444"}}
    refused = {**call, "answer": {"error": {"message": f"/x?project=7777777777 7777777777 {mail}"}}}
    path = write_bundle(tmp_path, "x.zip", {}, [{**call, "answer": answer}, refused], {})
    assert re.findall(r"\d{6,}", json.dumps(read_bundle(path)[1]).replace(OWN, "")) == []


def test_long_texts_are_cut(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, "x.zip", {"steps": []}, [{"answer": {"error": {"message": "x y " * 5000}}}], {})
    assert read_bundle(path)[1][0]["answer"]["error"]["message"].endswith("… (20000 characters)")
