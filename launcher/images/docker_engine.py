"""Build, push and pull images with this machine's Docker engine, through Docker's own SDK.

A build receives the context and its arguments only: no environment variables, proxies or passwords from Docker's
configuration. A private base is pulled beforehand, with the credentials that launch finds.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from launcher.images import buildkit, docker_events
from launcher.images.append import BASE_LABEL
from launcher.images.build_context import BASE_DOCKERFILE, DOCKERFILE, base_context, build_context
from launcher.images.docker_events import EngineError, OnLayer, OnLine
from launcher.images.reference import HUB, Reference, parse
from launcher.images.registry.credentials import credentials
from launcher.images.source_files import Source
from launcher.plan.model import Image

__all__ = ["Engine", "EngineError"]

SILENT_SECONDS = 600.0
"""Timeout without any output of the engine, as in a long build step. By default the SDK and the engine have none."""

CONNECT_SECONDS = 10.0

HUB_ACCOUNT = "https://index.docker.io/v1/"
"""Docker Hub's key in Docker's credentials, for historical reasons."""

START = "Start it (Docker Desktop, or `sudo systemctl start docker`), or set DOCKER_HOST to another engine."
NO_PERMISSION = "Join the engine's group: `sudo usermod -aG docker $USER`, then log in again."


class Engine:
    """A connected Docker engine. `api` is the SDK's low-level client."""

    def __init__(self, api: Any, environ: Mapping[str, str]) -> None:
        self.api = api
        self._environ = environ

    @classmethod
    def connect(cls, environ: Mapping[str, str]) -> Engine:
        """Connect to the engine that the docker command uses: DOCKER_HOST, the current context, or the default socket.

        Raises:
            EngineError: no engine, no permission, or the SDK is not installed.
        """
        try:
            import docker
            import requests
        except ImportError as error:
            raise EngineError(f"Docker's SDK is not installed ({error})", 'pip install "gcp-launch[docker]"') from error
        try:
            options = address(environ)
            check_listens(options["base_url"])
            api = docker.APIClient(version="auto", **options)
        except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
            raise unreachable(error, environ) from error
        api.timeout = SILENT_SECONDS
        # For a build, the SDK would send every password in Docker's configuration and from each credential helper. The
        # base is pulled beforehand, so a build needs none.
        api._set_auth_headers = lambda _headers: None
        return cls(api, environ)

    def has(self, reference: str) -> str | None:
        """Return the id of an image in this engine, or None."""
        details = self._inspect(reference)
        return str(details["Id"]) if details else None

    def build(
        self,
        source: Source,
        image: Image,
        *,
        target: str,
        tag: str,
        labels: Mapping[str, str],
        on_line: OnLine = lambda _line: None,
    ) -> str:
        """Build a stage of the Dockerfile ("dependencies", "train") under a tag; return the image's id.

        Raises:
            LaunchError: a step failed (with its name and last lines), the base is not available, or the disk is full.
            UsageError: a file can't be read.
        """
        base = self._built_base(source, image, on_line) if image.builds_base else self._ensure_base(image, on_line)
        image = replace(image, base=base)
        if "@" in base:  # images on top of it inherit the label
            labels = {**labels, BASE_LABEL: base}
        if image.build_secrets:
            return self._buildkit(source, image, target=target, tag=tag, labels=labels, on_line=on_line)
        with build_context(source) as context, docker_errors(tag, "can't be built"):
            events = self.api.build(
                fileobj=context,
                custom_context=True,
                dockerfile=DOCKERFILE,
                target=target,
                tag=tag,
                platform=image.platform,
                buildargs=image.build_arguments,
                labels=dict(labels),
                rm=True,
                forcerm=True,
                use_config_proxy=False,
                decode=True,
            )
            return docker_events.built(events, tag, on_line)

    def _buildkit(
        self, source: Source, image: Image, *, target: str, tag: str, labels: Mapping[str, str], on_line: OnLine
    ) -> str:
        """Build a stage with BuildKit; return the image's id. Raises LaunchError."""
        options = [f"--file={DOCKERFILE}", f"--target={target}", f"--tag={tag}", f"--platform={image.platform}"]
        options += [f"--build-arg={name}={value}" for name, value in image.build_arguments.items()]
        options += [f"--label={name}={value}" for name, value in labels.items()]
        with build_context(source) as context:
            self._run_buildkit(context, options, image, on_line)
        return self.has(tag) or ""

    def push(self, reference: str, on_layer: OnLayer = lambda _name, _done, _all: None) -> str:
        """Push an image by its tag; return its digest.

        Raises:
            NotAuthorised: no permission in the registry.
            EngineError: the registry refuses the image or can't be reached.
        """
        name = parse(reference)
        with docker_errors(reference, "can't be pushed"):
            events = self.api.push(
                name.name, tag=name.tag, stream=True, decode=True, auth_config=self._credentials(name)
            )
            return docker_events.pushed(events, reference, on_layer)

    def pull(
        self, reference: str, on_layer: OnLayer = lambda _name, _done, _all: None, *, platform: str | None = None
    ) -> None:
        """Pull an image, by tag or digest.

        Raises:
            NotAuthorised: no permission in the registry.
            EngineError: the image does not exist, or not for this platform, or its registry can't be reached.
        """
        name = parse(reference)
        with docker_errors(reference, "can't be pulled"):
            events = self.api.pull(
                name.name,
                tag=name.digest or name.tag,
                stream=True,
                decode=True,
                auth_config=self._credentials(name),
                platform=platform,
            )
            docker_events.pulled(events, reference, on_layer)

    def tag(self, reference: str, name: str) -> None:
        """Add a name to an image of this engine. Raises EngineError."""
        new = parse(name)
        with docker_errors(reference, f"can't be named {name}"):
            self.api.tag(reference, new.name, tag=new.tag)

    def _run_buildkit(self, context: IO[bytes], options: Sequence[str], image: Image, on_line: OnLine) -> None:
        """Run BuildKit on a build context, with the image's secrets. Raises LaunchError."""
        buildkit.build(
            as_file(context),
            options,
            host=address(self._environ)["base_url"],
            environ=self._environ,
            secrets=image.build_secrets or (),
            on_line=on_line,
        )

    def _built_base(self, source: Source, image: Image, on_line: OnLine) -> str:
        """Build the base from the user's Dockerfile, unless the engine has it; return its name. Raises LaunchError."""
        if self._platform(image.base) == image.platform:
            return image.base
        on_line(f"building the base image {image.base} (image.dockerfile)")
        options = [f"--file={BASE_DOCKERFILE}", f"--tag={image.base}", f"--platform={image.platform}"]
        with base_context(source) as context:
            self._run_buildkit(context, options, image, on_line)
        return image.base

    def _ensure_base(self, image: Image, on_line: OnLine) -> str:
        """Pull the base image unless the engine has it for the image's platform; return it by digest if its registry
        gave one. Raises LaunchError."""
        if self._platform(image.base) != image.platform:
            self._pull_base(image, on_line)
        if "@" in image.base:
            return image.base
        name = parse(image.base)
        details = self._inspect(image.base) or {}
        digests = [digest for digest in details.get("RepoDigests") or () if parse(digest).name == name.name]
        if not digests:
            on_line(f"the base image {image.base} has no digest: it is in this engine only")
            return image.base
        digest = f"{name.name}@{parse(digests[0]).digest}"
        on_line(f"the base image {image.base} is not pinned; this build uses {digest}")
        return digest

    def _pull_base(self, image: Image, on_line: OnLine) -> None:
        """Pull the base image. Raises LaunchError."""
        on_line(f"pulling the base image {image.base}")
        try:
            self.pull(image.base, platform=image.platform)
        except EngineError as error:
            hint = f"{error.hint} To use another base: image.base".lstrip()
            raise EngineError(f"the base image {error.problem}", hint) from error
        if (platform := self._platform(image.base)) != image.platform:  # engines silently pull another platform
            raise EngineError(
                f"the base image {image.base} is for {platform}, but the machine is {image.platform}",
                "Choose a base for that platform: image.base",
            )

    def _platform(self, reference: str) -> str:
        """Return an image's platform (linux/amd64); empty: the engine does not have the image. Raises EngineError."""
        details = self._inspect(reference)
        return f"{details['Os']}/{details['Architecture']}" if details else ""

    def _inspect(self, reference: str) -> dict[str, Any] | None:
        """Return the engine's description of an image, or None. Raises EngineError."""
        from docker.errors import ImageNotFound

        with docker_errors(reference, "can't be looked up"):
            try:
                return dict(self.api.inspect_image(reference))
            except ImageNotFound:
                return None

    def _credentials(self, name: Reference) -> dict[str, str]:
        """Return a registry's credentials in the engine's format; empty: none (old engines require a value)."""
        login = credentials(name.host, self._environ)
        if login is None:
            return {}
        server = HUB_ACCOUNT if name.host == HUB else name.host
        if login.identity_token:
            return {"identitytoken": login.identity_token, "serveraddress": server}
        return {"username": login.username, "password": login.password, "serveraddress": server}


def as_file(context: IO[bytes]) -> IO[bytes]:
    """Return a context as a file with a descriptor, for another process's standard input."""
    if isinstance(context, tempfile.SpooledTemporaryFile):
        context.rollover()
    context.seek(0)
    return context


@contextmanager
def docker_errors(reference: str, what: str) -> Iterator[None]:
    """Raise the SDK's errors as EngineError; its text begins with `reference` and `what` ("can't be pulled")."""
    from http.client import HTTPException

    import requests
    from docker.errors import APIError, DockerException, StreamParseError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except APIError as error:
        raise docker_events.refused(reference, what, str(error.explanation or error)) from error
    except (DockerException, StreamParseError, requests.RequestException, HTTPError, HTTPException) as error:
        problem = f"{reference} {what}: no answer from the Docker engine ({error})"
        raise EngineError(problem, "Check it with `docker info`, then repeat the command.") from error


def address(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the engine's address (`base_url`) and TLS settings: from DOCKER_HOST, the context or the default."""
    from docker import ContextAPI
    from docker.constants import DEFAULT_UNIX_SOCKET
    from docker.utils import kwargs_from_env

    named: dict[str, Any] = kwargs_from_env(environment={**environ})
    if "base_url" in named:
        return named
    return {"base_url": DEFAULT_UNIX_SOCKET, **ContextAPI.kwargs_from_context(environment={**environ})}


def check_listens(url: str) -> None:
    """Check that an engine listens at an address.

    The SDK's own error would be less clear, and it would leave a socket open.

    Raises:
        OSError: no engine, or no permission.
    """
    parts = urlsplit(url.removeprefix("http+"))
    if parts.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(parts.path)
    elif parts.scheme in ("tcp", "http", "https") and parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), CONNECT_SECONDS).close()


def unreachable(error: Exception, environ: Mapping[str, str]) -> EngineError:
    """Return the error for an engine that can't be reached."""
    host = environ.get("DOCKER_HOST")
    where = f"at {host} (DOCKER_HOST)" if host else "on this machine"
    if isinstance(error, PermissionError):
        return EngineError(f"no permission to use the Docker engine {where}", NO_PERMISSION)
    if isinstance(error, FileNotFoundError | ConnectionError):
        return EngineError(f"no Docker engine is running {where} ({error.strerror})", START)
    return EngineError(f"the Docker engine {where} can't be used: {' '.join(str(error).split())}", START)
