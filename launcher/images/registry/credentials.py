"""Find credentials for a registry, in a fixed order of sources.

The sources are gcloud's access token in the environment, Docker's configuration, Google's application default
credentials, the gcloud command, and anonymous access. Google's credentials are used for Google's registries only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from launcher.images.registry.reference import is_googles

OAUTH2: Final = "oauth2accesstoken"
"""The user name with which Artifact Registry accepts an access token as the password:
https://cloud.google.com/artifact-registry/docs/docker/authentication#token, read in 2026.
"""

TRUE: Final = ("true", "1", "yes", "on", "y")
"""Values that gcloud accepts as true (googlecloudsdk.core.properties)."""

HELPER_SECONDS: Final = 60.0
"""Timeout of a credential helper. gcloud takes about a second."""

SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"


class SourceError(Exception):
    """A source of credentials exists but can't be read."""


@dataclass(frozen=True)
class Credentials:
    """A user name and a password, or an identity token for the token service."""

    username: str
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)


class CredentialSource:
    """One source of credentials. Its result is cached."""

    def __init__(self, name: str, find: Callable[[], Credentials | None] | None = None) -> None:
        self.name = name
        self.anonymous = find is None
        self.known = False
        self._find = find
        self._found: Credentials | None = None

    def credentials(self, *, refresh: bool = False) -> Credentials | None:
        """Return the credentials; None: none for this registry. Raises SourceError."""
        if self._find and (refresh or not self.known):
            self._found = self._find()
            self.known = True
        return self._found


def sources(host: str, environ: Mapping[str, str]) -> tuple[CredentialSource, ...]:
    """Return the sources in order; the last one is anonymous."""
    docker = CredentialSource("docker's configuration", partial(from_docker, host, environ))
    nobody = CredentialSource("no credentials")
    if not is_googles(host) or environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in TRUE:
        return docker, nobody
    return (
        CredentialSource("CLOUDSDK_AUTH_ACCESS_TOKEN", partial(from_environment, environ)),
        docker,
        CredentialSource("application default credentials", partial(from_google, environ)),
        CredentialSource("gcloud", partial(from_gcloud, environ)),
        nobody,
    )


def credentials(host: str, environ: Mapping[str, str]) -> Credentials | None:
    """Return the first credentials for a registry, or None. A source that can't be read has none."""
    for source in sources(host, environ):
        try:
            if found := source.credentials():
                return found
        except SourceError:
            continue
    return None


def from_environment(environ: Mapping[str, str]) -> Credentials | None:
    """Return gcloud's access token, from the environment or from the file that it names."""
    token, file = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"), environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    if not token and file:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise SourceError(f"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE: {file} can't be read: {_reason(error)}") from error
    return Credentials(OAUTH2, token.strip()) if token else None


def from_docker(host: str, environ: Mapping[str, str]) -> Credentials | None:
    """Return the credentials of `docker login`, from its file or a credential helper."""
    folder, home = environ.get("DOCKER_CONFIG"), environ.get("HOME")
    path = Path(folder or f"{home}/.docker", "config.json") if folder or home else None
    content = _read_json(path) if path else {}
    config = {key: content[key] for key in ("auths", "credHelpers", "credsStore") if content.get(key)}
    if not config:
        return None
    try:
        from docker.auth import load_config
        from docker.errors import DockerException
    except ImportError as error:
        raise SourceError('not read: pip install "gcp-launch[docker]"') from error
    try:
        auth = load_config(config_dict=config, credstore_env=dict(environ))
        store = auth.get_credential_store(host)
        helper = f"docker-credential-{store}"
        # docker.auth only warns of a missing one, and then reports another reason.
        if store and shutil.which(helper, path=environ.get("PATH", "")) is None:
            raise SourceError(f"its credential helper {helper} is not on PATH")
        found = auth.resolve_authconfig(host)
    except DockerException as error:
        raise SourceError(f"{path}: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # docker.auth's errors for an invalid entry
        problem = f"an entry of auths or a credential helper's answer can't be read ({type(error).__name__})"
        raise SourceError(f"{path}: {problem}") from error
    return _of_docker(found or {})


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Empty if the file does not exist. Raises SourceError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} can't be read: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} is not a JSON object")
    return content


def _of_docker(found: Mapping[str, Any]) -> Credentials | None:
    """Convert docker.auth's result. A helper's keys are capitalised; those of the file are in lower case."""
    values = {key.lower(): str(value or "") for key, value in found.items()}
    if token := values.get("identitytoken"):
        return Credentials("<token>", identity_token=token)
    if not values.get("password"):
        return None
    return Credentials(values.get("username", ""), values["password"])


def from_google(environ: Mapping[str, str]) -> Credentials | None:
    """Return application default credentials, from a file or, on a Google machine, from its metadata server.

    On other machines the metadata server is not queried: waiting for its timeout costs seconds.
    """
    path = _default_file(environ)
    if path is None and not _on_googles_machine(environ):
        return None
    try:
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request
    except ImportError as error:
        raise SourceError('not read: pip install "gcp-launch[gcp]"') from error
    try:
        found = _loaded(path)
        found.refresh(Request())
    except (GoogleAuthError, OSError, ValueError, AttributeError) as error:  # all but GoogleAuthError: an invalid file
        raise SourceError(f"{path or 'this machine'}: {_first_line(error)}") from error
    return Credentials(OAUTH2, found.token) if found.token else None


def _loaded(path: Path | None) -> Any:
    """Load credentials. google.auth.default() would also run gcloud to find the project, which takes a second."""
    import google.auth
    from google.auth import compute_engine

    if path is None:
        return compute_engine.Credentials()
    with warnings.catch_warnings():  # the warning is about files from untrusted sources
        warnings.simplefilter("ignore", DeprecationWarning)
        return google.auth.load_credentials_from_file(str(path), scopes=[SCOPE])[0]


def _default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file of application default credentials that google.auth would read, or None."""
    if named := environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return Path(named)
    folder, home = environ.get("CLOUDSDK_CONFIG"), environ.get("HOME")
    if not folder and not home:
        return None
    path = Path(folder or f"{home}/.config/gcloud") / "application_default_credentials.json"
    return path if path.is_file() else None


def _on_googles_machine(environ: Mapping[str, str]) -> bool:
    """Return whether this is a Google machine, by google.auth's own rule:
    https://cloud.google.com/compute/docs/instances/detect-compute-engine.
    """
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text(encoding="utf-8")
    except (OSError, ValueError):
        product = ""
    return bool(environ.get("GCE_METADATA_HOST")) or product.startswith("Google")


def from_gcloud(environ: Mapping[str, str]) -> Credentials | None:
    """Return the access token of gcloud's account, or None if gcloud is not installed."""
    if command := shutil.which("gcloud", path=environ.get("PATH", "")):
        token = _output([command, "auth", "print-access-token", "--quiet"], environ).strip()
        return Credentials(OAUTH2, token) if token else None
    return None


def _output(command: list[str], environ: Mapping[str, str]) -> str:
    """Run a command and return its output. Raises SourceError (with stderr, never the output): it fails or hangs."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=HELPER_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"{name} has not answered for {HELPER_SECONDS:.0f} s") from error
    except OSError as error:
        raise SourceError(f"{name} can't be started: {_reason(error)}") from error
    if done.returncode:
        raise SourceError(f"{name} failed: {_first_line(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")[:300]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
