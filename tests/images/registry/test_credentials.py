"""Where credentials lie, and what becomes of a place that can't be read."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.images.registry.credentials import (
    OAUTH2,
    Credentials,
    SourceError,
    credential_sources,
    credentials,
    from_docker,
    from_environment,
    from_gcloud,
    from_google,
)
from launcher.testing.httpserver import Head, LoopbackServer, Response

GOOGLES = "us-docker.pkg.dev"
OTHER = "registry.example.com:5000"
Config = Callable[[object], dict[str, str]]
Command = Callable[[str, str], Path]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Writes docker's configuration; answers the environment that leads to it."""

    def write(content: object) -> dict[str, str]:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return {"DOCKER_CONFIG": str(tmp_path), "PATH": os.environ["PATH"]}

    return write


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Puts a shell script on PATH (docker's helpers are looked for there); answers where it is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def write(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


def login(user: str, password: str) -> dict[str, str]:
    """What docker login writes."""
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_the_order_of_the_sources() -> None:
    names = [source.name for source in credential_sources(GOOGLES, {})]
    docker, nobody = "docker's configuration", "no credentials"
    assert names == ["CLOUDSDK_AUTH_ACCESS_TOKEN", docker, "application default credentials", "gcloud", nobody]
    assert [source.name for source in credential_sources(OTHER, {"CLOUDSDK_AUTH_ACCESS_TOKEN": "x"})] == [
        docker,
        nobody,
    ]
    assert [source.name for source in credential_sources(GOOGLES, {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "True"})] == [
        docker,
        nobody,
    ]


def test_the_first_source_with_credentials_wins(config: Config) -> None:
    environ = config({"auths": {GOOGLES: login("me", "docker's")}})
    assert credentials(GOOGLES, {**environ, "CLOUDSDK_AUTH_ACCESS_TOKEN": "t0ken\n"}) == Credentials(OAUTH2, "t0ken")
    assert credentials(GOOGLES, environ) == Credentials("me", "docker's")
    assert credentials(OTHER, {**environ, "CLOUDSDK_AUTH_ACCESS_TOKEN": "t0ken"}) is None, "Google's is for Google"


def test_an_unreadable_source_hides_no_other(config: Config, command: Command) -> None:
    path = command("gcloud", "echo t0ken").parent
    assert credentials(GOOGLES, {**config("{broken"), "PATH": f"{path}:/usr/bin:/bin"}) == Credentials(OAUTH2, "t0ken")


def test_an_access_token_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t0ken\n")
    environ = {"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(file)}
    assert from_environment(environ) == Credentials(OAUTH2, "t0ken")
    assert from_environment({**environ, "CLOUDSDK_AUTH_ACCESS_TOKEN": "first"}) == Credentials(OAUTH2, "first")
    assert from_environment({}) is None
    file.unlink()
    with pytest.raises(SourceError, match=r"TOKEN_FILE: .*/token can't be read: No such file"):
        from_environment(environ)


@pytest.mark.parametrize("key", [OTHER, f"https://{OTHER}", f"https://{OTHER}/v1/"])
def test_dockers_logins(config: Config, key: str) -> None:
    environ = config({"auths": {key: login("me", "pass:word"), "else.example.com": login("you", "x")}})
    assert from_docker(OTHER, environ) == Credentials("me", "pass:word")
    assert from_docker("third.example.com", environ) is None


def test_docker_hubs_login_has_a_name_of_its_own(config: Config) -> None:
    environ = config({"auths": {"https://index.docker.io/v1/": login("me", "hub")}})
    assert from_docker("docker.io", environ) == Credentials("me", "hub")


def test_an_identity_token(config: Config) -> None:
    environ = config({"auths": {OTHER: {**login("me", ""), "identitytoken": "1dentity"}}})
    found = from_docker(OTHER, environ)
    assert found == Credentials("<token>", identity_token="1dentity")
    assert "1dentity" not in repr(found)


def test_dockers_configuration_in_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({"auths": {OTHER: login("me", "x")}}))
    assert from_docker(OTHER, {"HOME": str(tmp_path)}) == Credentials("me", "x")
    assert from_docker(OTHER, {}) is None


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_a_credential_helper_is_asked(config: Config, command: Command, key: str) -> None:
    command("docker-credential-mine", f'read host; echo "{{\\"Username\\": \\"$host\\", \\"Secret\\": \\"{key}\\"}}"')
    environ = {**config({key: {OTHER: "mine"} if key == "credHelpers" else "mine"}), "PATH": os.environ["PATH"]}
    assert from_docker(OTHER, environ) == Credentials(OTHER, key)


def test_a_helper_that_knows_nothing(config: Config, command: Command) -> None:
    command("docker-credential-mine", "echo credentials not found in native keychain; exit 1")
    environ = {**config({"credsStore": "mine", "auths": {OTHER: login("me", "x")}}), "PATH": os.environ["PATH"]}
    assert from_docker(OTHER, environ) == Credentials("me", "x"), "what stands in the file is next"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo the keyring is locked; exit 2", "the keyring is locked"),
        ("echo nonsense", "a credential helper's answer can't be read"),
        ("echo '{}'", "a credential helper's answer can't be read"),
    ],
)
def test_a_helper_that_fails(config: Config, command: Command, script: str, says: str) -> None:
    command("docker-credential-mine", script)
    environ = {**config({"credsStore": "mine"}), "PATH": os.environ["PATH"]}
    with pytest.raises(SourceError, match=rf"config\.json: .*{says}"):
        from_docker(OTHER, environ)


def test_a_helper_that_isnt_there(config: Config) -> None:
    environ = {**config({"credHelpers": {OTHER: "desktop"}}), "PATH": "/nowhere"}
    with pytest.raises(SourceError, match="credential helper docker-credential-desktop is not on PATH"):
        from_docker(OTHER, environ)
    assert from_docker("other.example.com", environ) is None, "it is for the other one"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{broken", "can't be read: Expecting property name"),
        ("[]", "is not a JSON object"),
        ({"auths": {OTHER: {"auth": "%"}}}, "an entry of auths"),
        ({"auths": {OTHER: {"auth": base64.b64encode(b"no colon").decode()}}}, "an entry of auths"),
        ({"auths": {OTHER: 1}}, "Invalid configuration for registry"),
        ({"auths": []}, "an entry of auths"),
        ({"auths": 3}, "an entry of auths"),
        ({"credsStore": 3}, "an entry of auths|is not on PATH"),
        ({"credHelpers": ["gcloud"]}, "an entry of auths"),
    ],
)
def test_a_broken_configuration(config: Config, content: object, says: str) -> None:
    environ = config(content)
    if content == {"auths": []}:
        assert from_docker(OTHER, environ) is None
        return
    with pytest.raises(SourceError, match=says) as caught:
        from_docker(OTHER, environ)
    assert environ["DOCKER_CONFIG"] in str(caught.value) or "PATH" in str(caught.value)


def test_gclouds_login(command: Command, tmp_path: Path) -> None:
    path = command("gcloud", f'echo "$@ $CLOUDSDK_CONFIG" > {tmp_path}/asked; echo t0ken').parent
    assert from_gcloud({"PATH": str(path), "CLOUDSDK_CONFIG": "mine"}) == Credentials(OAUTH2, "t0ken")
    assert (tmp_path / "asked").read_text() == "auth print-access-token --quiet mine\n"
    assert from_gcloud({"PATH": "/nowhere"}) is None


def test_a_gcloud_that_isnt_logged_in(command: Command) -> None:
    path = command("gcloud", "echo; echo 'ERROR: (gcloud.auth) You do not have an active account' >&2; exit 1").parent
    with pytest.raises(SourceError, match=r"gcloud failed: ERROR: .* You do not have an active account"):
        from_gcloud({"PATH": str(path)})
    command("gcloud", "exit 3")
    with pytest.raises(SourceError, match="gcloud failed: exit code 3"):
        from_gcloud({"PATH": str(path)})


@pytest.mark.gcloud
def test_the_real_gcloud_says_that_nobody_is_logged_in(gcloud: str, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "CLOUDSDK_CONFIG": str(tmp_path), "HOME": str(tmp_path)}
    with pytest.raises(SourceError, match="gcloud failed: ERROR"):
        from_gcloud({**environ, "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false"})


# --- Google's application default credentials -------------------------------------------------------------------------


class Tokens(LoopbackServer):
    """Google's token endpoint, which takes any assertion but the second one, and a machine's metadata server."""

    def __init__(self) -> None:
        super().__init__(self.answer, "tokens")
        self.asked = 0

    def answer(self, head: Head) -> Response:
        account = "trainer@my-project.iam.gserviceaccount.com"
        status, content = 200, dict[str, Any](email=account, scopes=[], aliases=["default"])
        if head.method == "POST":
            self.asked += 1
            is_bad = self.asked == 2
            status = 400 if is_bad else 200
            content = {"error": "invalid_grant"} if is_bad else {"access_token": "t0ken", "expires_in": 3600}
        elif head.path.endswith("/token"):
            content = {"access_token": "machine's", "expires_in": 3600, "token_type": "Bearer"}
        headers = {"Content-Type": "application/json", "Metadata-Flavor": "Google"}
        return Response(json.dumps(content).encode(), status, headers)


@pytest.fixture
def tokens() -> Iterator[Tokens]:
    with Tokens() as server:
        yield server


def service_account(token_uri: str) -> dict[str, str]:
    """The file of a service account that nobody knows."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "client_email": "trainer@my-project.iam.gserviceaccount.com",
        "private_key": key.decode(),
        "token_uri": token_uri,
    }


def test_application_default_credentials(tmp_path: Path, tokens: Tokens) -> None:
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps(service_account(f"{tokens.url}/token")))
    assert from_google({"GOOGLE_APPLICATION_CREDENTIALS": str(file)}) == Credentials(OAUTH2, "t0ken")
    with pytest.raises(SourceError, match=rf"{file}: .*invalid_grant"):
        from_google({"CLOUDSDK_CONFIG": str(tmp_path)})
    gcloud = tmp_path / "home" / ".config" / "gcloud"
    gcloud.mkdir(parents=True)
    file.rename(gcloud / file.name)
    assert from_google({"HOME": str(tmp_path / "home")}) == Credentials(OAUTH2, "t0ken")
    assert tokens.asked == 3


def test_application_default_credentials_that_are_broken(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"File .*/gone\.json was not found"):
        from_google({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "gone.json")})
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "list.json").write_text("[]")
    for name in ("folder", "list"):
        with pytest.raises(SourceError, match=rf"{name}\.json: "):
            from_google({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / f"{name}.json")})
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(SourceError, match=r"x\.json: "):
        from_google({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "x.json")})


def test_elsewhere_no_machine_of_googles_is_asked(tmp_path: Path) -> None:
    assert from_google({"HOME": str(tmp_path)}) is None
    assert from_google({}) is None


def test_on_a_machine_of_googles_it_is_asked(tmp_path: Path, tokens: Tokens) -> None:
    """google.auth reads where the metadata server is when it is imported: this takes a separate process."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GCE_METADATA_HOST": tokens.host}
    code = f"import os; from {from_google.__module__} import from_google; print(from_google(os.environ).password)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("machine's\n", 0), done.stderr
