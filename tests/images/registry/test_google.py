"""Application default credentials: of a file, and of a machine of Google's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from launcher.images.registry.credentials import OAUTH2, Credentials, SourceError, from_google


class Tokens(BaseHTTPRequestHandler):
    """Google's token endpoint: takes any assertion but the second one."""

    asked: list[bytes] = []  # noqa: RUF012 - of the class, which the server makes its instances of

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["Content-Length"])))
        bad = len(self.asked) == 2
        body = json.dumps({"error": "invalid_grant"} if bad else {"access_token": "t0ken", "expires_in": 3600}).encode()
        self.send_response(400 if bad else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


@pytest.fixture
def token_uri() -> Iterator[str]:
    """The address of such an endpoint."""
    Tokens.asked = []
    with HTTPServer(("127.0.0.1", 0), Tokens) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/token"
        server.shutdown()
        thread.join()


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


def test_application_default_credentials(tmp_path: Path, token_uri: str) -> None:
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps(service_account(token_uri)))
    assert from_google({"GOOGLE_APPLICATION_CREDENTIALS": str(file)}) == Credentials(OAUTH2, "t0ken")
    with pytest.raises(SourceError, match=rf"{file}: .*invalid_grant"):
        from_google({"CLOUDSDK_CONFIG": str(tmp_path)})
    gcloud = tmp_path / "home" / ".config" / "gcloud"
    gcloud.mkdir(parents=True)
    file.rename(gcloud / file.name)
    assert from_google({"HOME": str(tmp_path / "home")}) == Credentials(OAUTH2, "t0ken")
    assert len(Tokens.asked) == 3


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


METADATA = """
from launcher.images.registry.credentials import from_google
import os
print(from_google(os.environ).password)
"""


def test_on_a_machine_of_googles_it_is_asked(tmp_path: Path) -> None:
    """google.auth reads where the metadata server is when it is imported: this takes a separate process."""
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        host = f"127.0.0.1:{server.server_address[1]}"
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GCE_METADATA_HOST": host}
        done = subprocess.run(
            [sys.executable, "-c", METADATA], env=environ, capture_output=True, text=True, check=False, timeout=60
        )
        server.shutdown()
        thread.join()
    assert (done.stdout, done.returncode) == ("machine's\n", 0), done.stderr


class Metadata(BaseHTTPRequestHandler):
    """The metadata server's two answers."""

    def do_GET(self) -> None:
        account = {"email": "trainer@my-project.iam.gserviceaccount.com", "scopes": [], "aliases": ["default"]}
        token = {"access_token": "machine's", "expires_in": 3600, "token_type": "Bearer"}
        body = json.dumps(token if self.path.partition("?")[0].endswith("/token") else account).encode()
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""
