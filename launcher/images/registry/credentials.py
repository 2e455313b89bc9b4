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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from launch_train.common.loopback import is_plain_loopback
from launcher.gcp.api import SCOPE, TRUE
from launcher.images.reference import is_googles
from launcher.images.registry.transport import (
    Http,
    RegistryError,
    Request,
    TransientError,
    denied,
    raise_if_transient,
    registry_message,
)

if TYPE_CHECKING:
    from requests import Response


OAUTH2: Final = "oauth2accesstoken"
"""The user name with which Artifact Registry accepts an access token as the password:
https://cloud.google.com/artifact-registry/docs/docker/authentication#token, read in 2026.
"""

GCLOUD_SECONDS: Final = 60.0
"""Timeout of gcloud, which takes about a second."""


class SourceError(Exception):
    """A source of credentials exists but can't be read."""


@dataclass(frozen=True)
class Credentials:
    """A user name and a password, or an identity token for the token service."""

    username: str
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)


class Source(NamedTuple):
    """A source of credentials, and how to read those for one registry; None: it is the anonymous one."""

    name: str
    find: Callable[[], Credentials | None] | None = None


def credential_sources(host: str, environ: Mapping[str, str]) -> tuple[Source, ...]:
    """Return the sources in order; the last one is anonymous."""
    docker = Source("docker's configuration", partial(from_docker, host, environ))
    nobody = Source("no credentials")
    if not is_googles(host) or environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in TRUE:
        return docker, nobody
    return (
        Source("CLOUDSDK_AUTH_ACCESS_TOKEN", partial(from_environment, environ)),
        docker,
        Source("application default credentials", partial(from_google, environ)),
        Source("gcloud", partial(from_gcloud, environ)),
        nobody,
    )


def credentials(host: str, environ: Mapping[str, str]) -> Credentials | None:
    """Return the first credentials for a registry, or None. A source that can't be read has none."""
    for source in credential_sources(host, environ):
        with suppress(SourceError):
            if source.find and (login := source.find()):
                return login
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
    path = Path(folder or f"{home}/.docker", "config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if folder or home else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} can't be read: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} is not a JSON object")
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
        login = auth.resolve_authconfig(host) or {}
    except DockerException as error:
        raise SourceError(f"{path}: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # docker.auth's errors for an invalid entry
        problem = f"an entry of auths or a credential helper's answer can't be read ({type(error).__name__})"
        raise SourceError(f"{path}: {problem}") from error
    values = {key.lower(): str(value or "") for key, value in login.items()}  # a helper's keys are capitalised
    if token := values.get("identitytoken"):
        return Credentials("<token>", identity_token=token)
    password = values.get("password")
    return Credentials(values.get("username", ""), password) if password else None


def from_google(environ: Mapping[str, str]) -> Credentials | None:
    """Return application default credentials, from a file or, on a Google machine, from its metadata server.

    On other machines the metadata server is not queried: waiting for its timeout costs seconds.
    """
    named, folder, home = (environ.get(each) for each in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME"))
    path = Path(named or f"{folder or f'{home}/.config/gcloud'}/application_default_credentials.json")
    is_file = bool(named) or (bool(folder or home) and path.is_file())
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text(encoding="utf-8")
    except (OSError, ValueError):
        product = ""
    # google.auth's own rule: https://cloud.google.com/compute/docs/instances/detect-compute-engine
    if not (is_file or environ.get("GCE_METADATA_HOST") or product.startswith("Google")):
        return None
    try:
        import google.auth
        from google.auth import compute_engine
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request as GoogleRequest
    except ImportError as error:
        raise SourceError('not read: pip install "gcp-launch[gcp]"') from error
    try:
        if is_file:  # google.auth.default() would also run gcloud to find the project, which takes a second
            with warnings.catch_warnings():  # the warning is about files from untrusted sources
                warnings.simplefilter("ignore", DeprecationWarning)
                login, _ = google.auth.load_credentials_from_file(str(path), scopes=[SCOPE])
        else:
            login = compute_engine.Credentials()
        login.refresh(GoogleRequest())
    except (GoogleAuthError, OSError, ValueError, AttributeError) as error:  # all but GoogleAuthError: an invalid file
        raise SourceError(f"{path if is_file else 'this machine'}: {_first_line(error)}") from error
    return Credentials(OAUTH2, login.token) if login.token else None


def from_gcloud(environ: Mapping[str, str]) -> Credentials | None:
    """Return the access token of gcloud's account, or None if gcloud is not installed.

    Raises SourceError (with stderr, never the output): gcloud fails or hangs."""
    gcloud = shutil.which("gcloud", path=environ.get("PATH", ""))
    if gcloud is None:
        return None
    try:
        done = subprocess.run(
            [gcloud, "auth", "print-access-token", "--quiet"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=GCLOUD_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"gcloud has not answered for {GCLOUD_SECONDS:.0f} s") from error
    except OSError as error:
        raise SourceError(f"gcloud can't be started: {_reason(error)}") from error
    if done.returncode:
        raise SourceError(f"gcloud failed: {_first_line(done.stderr) or f'exit code {done.returncode}'}")
    token = done.stdout.strip()
    return Credentials(OAUTH2, token) if token else None


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")[:300]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


LIFETIME_SECONDS: Final = 60.0
"""The lifetime of a token whose service does not specify one: the specification's default."""

MARGIN: Final = 0.9
"""The fraction of its lifetime for which a token is used. It must not expire while a request is on its way."""

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

    def __init__(self, host: str, environ: Mapping[str, str], http: Http) -> None:
        self._host = host
        self._http = http
        self._sources = credential_sources(host, environ)
        self._logins: dict[Source, Credentials | None] = {}
        self._challenge: Challenge | None = None
        self._grants: dict[Scopes, Grant] = {}
        self._outcomes: dict[str, str] = {}
        self._lock = threading.Lock()

    def header(self, scopes: Scopes, what: str) -> str | None:
        """Return the Authorization header for `scopes`. None until the registry has requested authentication.

        `what` is the operation, for error messages.

        Raises NotAuthorised: no credentials are accepted; RegistryError: the token service fails.
        """
        with self._lock:
            grant = self._grants.get(scopes)
            if self._challenge is None or (grant and self._http.clock.now() < grant.until):
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
            challenge = _challenge_of(response, what)
            self._challenge = replace(challenge, scope="")  # the scope was for this request only
            start = grant.source if grant else 0
            if refused is not None and not first:
                self._outcomes[self._sources[start].name] = "refused"
                start += 1
            return self._grant(scopes, challenge, start, refused, f"{what}: {registry_message(response)}")

    def tried(self) -> str:
        """Return the credentials that were tried and the results, never their values."""
        return ", ".join(f"{name} ({outcome})" for name, outcome in self._outcomes.items())

    def _grant(self, scopes: Scopes, challenge: Challenge, start: int, refused: str | None, problem: str) -> str | None:
        """Return the header of the first accepted credentials, from the source with index `start` on."""
        for index, source in enumerate(self._sources[start:], start):
            try:
                grants = (self._exchanged(scopes, challenge, index, login) for login in self._read(source))
                grant = next(filter(None, grants), None)
            except SourceError as error:
                self._outcomes[source.name] = str(error)
                continue
            if grant and grant.header != refused:
                self._outcomes[source.name] = "used"
                self._grants[scopes] = grant
                return grant.header
            if grant:
                self._outcomes[source.name] = "refused"
        raise denied(self._host, problem, self.tried())

    def _read(self, source: Source) -> Iterator[Credentials | None]:
        """Yield a source's credentials, and, if they were read before and have changed since, the new ones. None: it
        has none for this registry. Raises SourceError."""
        find, known = source.find or (lambda: None), source in self._logins
        login = self._logins[source] if known else find()
        self._logins[source] = login
        yield login
        if known and (renewed := find()) != login:
            self._logins[source] = renewed
            yield renewed

    def _exchanged(self, scopes: Scopes, challenge: Challenge, index: int, login: Credentials | None) -> Grant | None:
        """Return a grant for credentials, with a token of the token service if the registry wants one. None: there are
        none, or they are refused."""
        source = self._sources[index]
        if login is None and source.find:
            self._outcomes[source.name] = "nothing for this registry"
            return None
        if challenge.scheme == "basic":
            return Grant(_basic(login), index, float("inf")) if login and not login.identity_token else None
        request = _token_request(challenge, (*scopes, *challenge.scope.split()), login)
        authorization = _basic(login) if login and not login.identity_token else None
        what = f"{self._host}: {request.what}"
        tries = self._http.tries(what)
        while True:
            begun = self._http.clock.now()
            try:
                response = self._http.send(request, authorization)
                raise_if_transient(response)
                break
            except TransientError as error:
                tries.wait(error)
        if response.status_code in (400, 401, 403, 404):
            self._outcomes[source.name] = "refused"
            return None
        try:
            answer = json.loads(response.content) if response.ok else {}
            token = str(answer.get("token") or answer.get("access_token") or "")
            seconds = float(answer.get("expires_in") or LIFETIME_SECONDS)
        except (ValueError, TypeError, AttributeError):
            token = ""
        if not token:
            raise RegistryError(
                f"{what}: {registry_message(response) if not response.ok else 'the answer has no token'}"
            )
        return Grant(f"Bearer {token}", index, begun + MARGIN * seconds)


def _challenge_of(response: Response, what: str) -> Challenge:
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
        f"{what}: {registry_message(response)}; it asks for {text or 'nothing'!r}, not for Basic or Bearer"
    )


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


def _token_request(challenge: Challenge, scopes: Scopes, login: Credentials | None) -> Request:
    """Build the request for a token: by GET with user name and password, or by POST with an identity token.

    Every token service supports GET.
    """
    what, distinct = f"ask for a token at {challenge.realm}", tuple(dict.fromkeys(scopes))
    service = (("service", challenge.service),) if challenge.service else ()
    if login and login.identity_token:
        form = (
            ("grant_type", "refresh_token"),
            *service,
            ("client_id", "gcp-launch"),
            ("scope", " ".join(distinct)),
            ("refresh_token", login.identity_token),
        )
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return Request(what, "POST", challenge.realm, headers=kind, body=urlencode(form).encode())
    return Request(what, "GET", challenge.realm, params=(*service, *(("scope", scope) for scope in distinct)))
