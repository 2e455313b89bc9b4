"""Find credentials for a registry, and authenticate with them: Basic, or a Bearer token of its token service.

The sources, in order: gcloud's access token in the environment, Docker's configuration, Google's application default
credentials, the gcloud command, and anonymous access. Google's credentials are used for Google's registries only.

https://distribution.github.io/distribution/spec/auth/token/ and …/oauth/
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from launch_train.common.loopback import is_plain_loopback
from launcher.images.registry.reference import is_googles
from launcher.images.registry.transport import (
    Http,
    HttpRequest,
    RegistryError,
    RetryPolicy,
    TransientError,
    denied,
    error_text,
    raise_if_transient,
)

if TYPE_CHECKING:
    from requests import Response


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
            if login := source.credentials():
                return login
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
        login = auth.resolve_authconfig(host)
    except DockerException as error:
        raise SourceError(f"{path}: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # docker.auth's errors for an invalid entry
        problem = f"an entry of auths or a credential helper's answer can't be read ({type(error).__name__})"
        raise SourceError(f"{path}: {problem}") from error
    return _of_docker(login or {})


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
        loaded = _loaded(path)
        loaded.refresh(Request())
    except (GoogleAuthError, OSError, ValueError, AttributeError) as error:  # all but GoogleAuthError: an invalid file
        raise SourceError(f"{path or 'this machine'}: {_first_line(error)}") from error
    return Credentials(OAUTH2, loaded.token) if loaded.token else None


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


LIFETIME_SECONDS: Final = 60.0
"""The lifetime of a token whose service does not specify one: the specification's default."""

MARGIN: Final = 0.9
"""The fraction of its lifetime for which a token is used. It must not expire while a piece of 16 MiB is being sent."""

Scopes = tuple[str, ...]


@dataclass(frozen=True)
class Challenge:
    """A parsed WWW-Authenticate header. `scheme` is in lower case; `scope` is the one that the registry suggests."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""


@dataclass(frozen=True)
class Grant:
    """An Authorization header, the index of its credential source, and its expiry time."""

    header: str | None
    source: int
    until: float


class Auth:
    """The credentials of one registry: the first ones that it accepts, by scope. Thread-safe."""

    def __init__(self, host: str, environ: Mapping[str, str], http: Http, policy: RetryPolicy) -> None:
        self._host = host
        self._http = http
        self._policy = policy
        self._sources = sources(host, environ)
        self._challenge: Challenge | None = None
        self._grants: dict[Scopes, Grant] = {}
        self._outcomes: dict[str, str] = {}
        self._lock = threading.Lock()

    def header(self, scopes: Scopes, what: str) -> str | None:
        """Return the Authorization header for `scopes`. None until the registry has requested authentication.

        `what` is the operation, for error messages.

        Raises:
            NotAuthorised: no credentials are accepted.
            RegistryError: the token service fails.
        """
        with self._lock:
            grant = self._grants.get(scopes)
            if self._challenge is None or (grant and self._policy.clock.now() < grant.until):
                return grant.header if grant else None
            start = grant.source if grant else 0
            return self._grant(scopes, self._challenge, start, None, f"{what}: credentials are not accepted")

    def renew(self, scopes: Scopes, response: Response, refused: str | None, *, first: bool, what: str) -> str | None:
        """Return the header to send instead of `refused`, which the registry answered with a 401.

        On the `first` refusal the token may have expired, so the same credentials are used again. Afterwards they lack
        the permission, and the next ones are tried.

        Raises:
            NotAuthorised: there are no others.
            RegistryError: the token service fails, or the registry requests neither Basic nor Bearer.
        """
        with self._lock:
            grant = self._grants.get(scopes)
            if grant and grant.header != refused:
                return grant.header  # another thread has renewed it
            challenge = self._asked(response, what)
            self._challenge = replace(challenge, scope="")  # the scope was for this request only
            start = grant.source if grant else 0
            if refused is not None and not first:
                self._note(start, "refused")
                start += 1
            return self._grant(scopes, challenge, start, refused, f"{what}: {error_text(response)}")

    def tried(self) -> str:
        """Return the credentials that were tried and the results, never their values."""
        return ", ".join(f"{name} ({outcome})" for name, outcome in self._outcomes.items())

    def _grant(self, scopes: Scopes, challenge: Challenge, start: int, refused: str | None, problem: str) -> str | None:
        """Return the header of the first accepted credentials, from the source with index `start` on."""
        for index in range(start, len(self._sources)):
            granted = self._granted(scopes, challenge, index)
            if granted and granted.header != refused:
                self._grants[scopes] = granted
                return granted.header
            if granted:
                self._note(index, "refused")
        raise denied(self._host, problem, self.tried())

    def _granted(self, scopes: Scopes, challenge: Challenge, index: int) -> Grant | None:
        """Return a grant from one source. None: it has no credentials for this registry, or they are refused."""
        source = self._sources[index]
        try:
            known = source.known
            credentials = source.credentials()
            grant = self._exchanged(scopes, challenge, index, credentials)
            if grant is None and known and source.credentials(refresh=True) != credentials:
                grant = self._exchanged(scopes, challenge, index, source.credentials())
        except SourceError as error:
            self._note(index, str(error))
            return None
        if grant:
            self._note(index, "used")
        return grant

    def _exchanged(self, scopes: Scopes, challenge: Challenge, index: int, found: Credentials | None) -> Grant | None:
        if found is None and not self._sources[index].anonymous:
            self._note(index, "nothing for this registry")
            return None
        if challenge.scheme == "basic":
            return Grant(_basic(found), index, float("inf")) if found and not found.identity_token else None
        return self._token(scopes, challenge, index, found)

    def _token(self, scopes: Scopes, challenge: Challenge, index: int, found: Credentials | None) -> Grant | None:
        """Request a token from the token service. None: it refuses the credentials."""
        request = _token_request(challenge, (*scopes, *challenge.scope.split()), found)
        tries = self._policy.begin(f"{self._host}: ask for a token at {challenge.realm}")
        while True:
            begun = self._policy.clock.now()
            try:
                response = self._http.send(request)
                raise_if_transient(response)
                break
            except TransientError as error:
                tries.wait(error)
        if response.status_code in (400, 401, 403, 404):
            self._note(index, "refused")
            return None
        token, seconds = _token_of(response, f"{self._host}: ask for a token at {challenge.realm}")
        return Grant(f"Bearer {token}", index, begun + MARGIN * seconds)

    def _asked(self, response: Response, what: str) -> Challenge:
        """Return the first challenge that can be met. A password is only sent over TLS or loopback."""
        text = response.headers.get("WWW-Authenticate", "")
        for challenge in challenges(text):
            if challenge.scheme == "basic":
                return challenge
            if challenge.scheme == "bearer":
                if urlsplit(challenge.realm).scheme == "https" or is_plain_loopback(challenge.realm):
                    return challenge
                raise RegistryError(f"{what}: the registry's token service has no TLS: {challenge.realm!r}")
        raise RegistryError(
            f"{what}: {error_text(response)}; it asks for {text or 'nothing'!r}, not for Basic or Bearer"
        )

    def _note(self, index: int, outcome: str) -> None:
        if index < len(self._sources):
            self._outcomes[self._sources[index].name] = outcome


_WORD = re.compile(r'([A-Za-z][\w-]*)(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+)))?')


def challenges(text: str) -> list[Challenge]:
    """Parse the challenges of a WWW-Authenticate header, in order (RFC 9110, section 11.6.1).

    A word without a value starts a challenge. Words with values are its parameters.
    """
    parsed: list[tuple[str, dict[str, str]]] = []
    for word in _WORD.finditer(text):
        name, quoted, bare = word[1].lower(), word[2], word[3]
        if quoted is None and bare is None:
            parsed.append((name, {}))
        elif parsed and name in ("realm", "service", "scope"):
            parsed[-1][1][name] = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    return [Challenge(scheme, **parameters) for scheme, parameters in parsed]


def _basic(credentials: Credentials) -> str:
    pair = f"{credentials.username}:{credentials.password}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _token_request(challenge: Challenge, scopes: Scopes, found: Credentials | None) -> HttpRequest:
    """Build the request for a token: by GET with user name and password, or by POST with an identity token.

    Every token service supports GET.
    """
    distinct = tuple(dict.fromkeys(scopes))
    service = (("service", challenge.service),) if challenge.service else ()
    if found and found.identity_token:
        form = (
            ("grant_type", "refresh_token"),
            *service,
            ("client_id", "gcp-launch"),
            ("scope", " ".join(distinct)),
            ("refresh_token", found.identity_token),
        )
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return HttpRequest("POST", challenge.realm, kind, body=urlencode(form).encode())
    params = (*service, *(("scope", scope) for scope in distinct))
    return HttpRequest("GET", challenge.realm, params=params, authorization=_basic(found) if found else None)


def _token_of(response: Response, what: str) -> tuple[str, float]:
    """Return the token in a response, and its lifetime in seconds."""
    try:
        answer = json.loads(response.content) if response.ok else {}
        token = str(answer.get("token") or answer.get("access_token") or "")
        seconds = float(answer.get("expires_in") or LIFETIME_SECONDS)
    except (ValueError, TypeError, AttributeError):
        token, seconds = "", 0.0
    if not token:
        raise RegistryError(f"{what}: {error_text(response) if not response.ok else 'the answer has no token'}")
    return token, seconds
