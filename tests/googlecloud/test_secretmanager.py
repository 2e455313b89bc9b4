"""Secret Manager on loopback."""

from __future__ import annotations

import base64
from typing import Any

import google_crc32c
import pytest
import requests

from launcher.testing.googlecloud import GoogleCloud

HERE = "projects/123456789012/secrets/hf"


def access(cloud: GoogleCloud, version: str = "latest", secret: str = "hf", project: str = "my-project") -> Any:
    name = f"projects/{project}/secrets/{secret}/versions/{version}"
    return requests.get(f"{cloud.url}/v1/{name}:access", timeout=5)


def test_a_version_is_read_with_its_checksum(cloud: GoogleCloud) -> None:
    assert [cloud.secrets.add("hf", b"old"), cloud.secrets.add("hf", b"\xffnew")] == ["1", "2"]
    for version, value, number in (("1", b"old", "1"), ("latest", b"\xffnew", "2")):
        found = access(cloud, version).json()
        assert found["name"] == f"{HERE}/versions/{number}"
        assert base64.b64decode(found["payload"]["data"]) == value
        assert int(found["payload"]["dataCrc32c"]) == google_crc32c.value(value)


@pytest.mark.parametrize(
    ("secret", "version", "words"),
    [
        ("other", "latest", "Secret [projects/123456789012/secrets/other] not found or has no versions."),
        ("hf", "9", f"Secret Version [{HERE}/versions/9] not found."),
    ],
)
def test_what_isnt_there(cloud: GoogleCloud, secret: str, version: str, words: str) -> None:
    cloud.secrets.add("hf", b"1")
    answer = access(cloud, version, secret)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, words)


@pytest.mark.parametrize("state", ["DISABLED", "DESTROYED"])
def test_a_version_that_was_disabled_stays_the_latest(cloud: GoogleCloud, state: str) -> None:
    cloud.secrets.add("hf", b"1")
    cloud.secrets.disable("hf", cloud.secrets.add("hf", b"2"), state)
    error = access(cloud).json()["error"]
    assert (error["code"], error["status"]) == (400, "FAILED_PRECONDITION")
    assert error["message"] == f"Secret Version [{HERE}/versions/2] is in {state} state."
    assert access(cloud, "1").ok


def test_without_the_grant_nothing_is_told(cloud: GoogleCloud) -> None:
    cloud.secrets.add("hf", b"1")
    cloud.secrets.deny("hf")
    error = access(cloud).json()["error"]
    assert (error["code"], error["status"]) == (403, "PERMISSION_DENIED")
    name = "projects/my-project/secrets/hf/versions/latest"
    said = f"Permission 'secretmanager.versions.access' denied for resource '{name}' (or it may not exist)."
    assert error["message"] == said
    cloud.secrets.allow("hf")
    assert access(cloud).ok
    assert access(cloud, project="other").status_code == 403
