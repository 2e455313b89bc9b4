"""OS Login on loopback, as gcloud and plain requests see it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from launcher.testing.googlecloud import GoogleCloud

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIGkLOz9sGmX5Uspr me@here"


def send(cloud: GoogleCloud, key: str, user: str = "me@example.com", **params: str) -> Any:
    url = f"{cloud.url}/v1/users/{user}:importSshPublicKey"
    return requests.post(url, json={"key": key}, params={"projectId": "my-project", **params}, timeout=5)


def test_a_key_makes_a_user(cloud: GoogleCloud) -> None:
    profile = requests.get(f"{cloud.url}/v1/users/me@example.com/loginProfile", timeout=5).json()
    assert list(profile) == ["name"]
    made = send(cloud, KEY).json()["loginProfile"]
    assert made["posixAccounts"][0]["username"] == "me_example_com"
    assert [one["key"] for one in made["sshPublicKeys"].values()] == [KEY]
    assert requests.get(f"{cloud.url}/v1/users/me@example.com/loginProfile", timeout=5).json() == made


def test_what_is_refused(cloud: GoogleCloud) -> None:
    assert send(cloud, "no key").status_code == 400
    assert send(cloud, KEY, user="me").status_code == 400
    assert send(cloud, KEY, projectId="another").status_code == 403
    assert send(cloud, KEY, unknown="x").status_code == 400


@pytest.mark.gcloud
def test_gcloud_adds_a_key(cloud: GoogleCloud, gcloud: str, tmp_path: Path) -> None:
    file = tmp_path / "key.pub"
    file.write_text(KEY)
    env = {**os.environ, **cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": "me@example.com"}
    argv = [gcloud, "compute", "os-login", "ssh-keys", "add", f"--key-file={file}", "--format=json"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["loginProfile"]["posixAccounts"][0]["username"] == "me_example_com"
