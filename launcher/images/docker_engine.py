"""This machine's Docker engine, by Docker's own SDK: build, push, pull.

A build gets nothing of this process but the context's files and three arguments: no variable, no proxy and no password
of Docker's configuration. A private base is pulled before, with the credentials that launch finds for its registry.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from launcher.images import docker_events
from launcher.images.build_context import DOCKERFILE, build_context
from launcher.images.docker_events import EngineError, OnLayer, OnLine
from launcher.images.registry.credentials import credentials
from launcher.images.registry.reference import HUB, Reference, parse
from launcher.images.source_files import Source
from launcher.plan.model import Image

__all__ = ["Engine", "EngineError"]

SILENT_SECONDS = 600.0
"""How long an engine may say nothing. A step of a build may: SDK and engine set no limit there."""

CONNECT_SECONDS = 10.0

HUB_ACCOUNT = "https://index.docker.io/v1/"
"""What Docker Hub is called in credentials, for historical reasons."""

START = "Start one (Docker Desktop, or `sudo systemctl start docker`), or name another one: DOCKER_HOST."
NO_PERMISSION = "Become a member of its group: `sudo usermod -aG docker $USER`, then log in anew."


class Engine:
    """A Docker engine that answers. `api` is the SDK's low-level client."""

    def __init__(self, api: Any, environ: Mapping[str, str]) -> None:
        self.api = api
        self._environ = environ

    @classmethod
    def connect(cls, environ: Mapping[str, str]) -> Engine:
        """The engine that Docker's own command would take: DOCKER_HOST, its current context, its usual socket.

        Raises:
            EngineError: there is none, this user may not speak to it, or the SDK isn't installed.
        """
        try:
            import docker
            import requests
        except ImportError as error:
            what = f"the Docker engine is spoken to by Docker's SDK, which isn't there ({error})"
            raise EngineError(what, 'pip install "gcp-launch[docker]"') from error
        try:
            options = address(environ)
            check_listens(options["base_url"])
            api = docker.APIClient(version="auto", **options)
        except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
            raise unreachable(error, environ) from error
        api.timeout = SILENT_SECONDS
        # The SDK would send every password of Docker's configuration along with a build, asking each helper for its
        # own; the base is pulled before, so a build needs none.
        api._set_auth_headers = lambda _headers: None
        return cls(api, environ)

    def has(self, reference: str) -> str | None:
        """The id of an image in this engine, or None."""
        found = self._inspect(reference)
        return str(found["Id"]) if found else None

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
        """Build a stage of the Dockerfile ("dependencies", "train") under a tag; the image's id is returned.

        Raises:
            LaunchError: a step failed (it is named, with its last lines), the base isn't there, the disk is full.
            UsageError: a file can't be read.
        """
        self._ensure_base(image, on_line)
        with build_context(source) as context, docker_errors(tag, "can't be built"):
            events = self.api.build(
                fileobj=context,
                custom_context=True,
                dockerfile=DOCKERFILE,
                target=target,
                tag=tag,
                platform=image.platform,
                buildargs={"BASE": image.base, "WHEEL": image.wheel},
                labels=dict(labels),
                rm=True,
                forcerm=True,
                use_config_proxy=False,
                decode=True,
            )
            return docker_events.built(events, tag, on_line)

    def push(self, reference: str, on_layer: OnLayer = lambda _name, _done, _all: None) -> str:
        """Push an image by its tag; its digest is returned.

        Raises:
            NotAuthorised: the registry doesn't let us.
            EngineError: it doesn't take the image, or can't be reached.
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
            NotAuthorised: the registry doesn't let us.
            EngineError: it isn't there, not for this platform, or its registry can't be reached.
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
        """Give an image of this engine another name. Raises EngineError."""
        new = parse(name)
        with docker_errors(reference, f"can't be named {name}"):
            self.api.tag(reference, new.name, tag=new.tag)

    def _ensure_base(self, image: Image, on_line: OnLine) -> None:
        """Pull the base unless it is here for the image's platform. Raises LaunchError."""
        if self._platform(image.base) == image.platform:
            return
        on_line(f"pulling the base image {image.base}")
        try:
            self.pull(image.base, platform=image.platform)
        except EngineError as error:
            hint = f"{error.hint} Another one: image.base, or one that this engine has.".lstrip()
            raise EngineError(f"the base image {error.problem}", hint) from error
        if (found := self._platform(image.base)) != image.platform:  # engines take what there is, and say nothing
            raise EngineError(
                f"the base image {image.base} is for {found}, and the machine is {image.platform}",
                "Name a base for that platform: image.base",
            )

    def _platform(self, reference: str) -> str:
        """What an image of this engine is for, such as linux/amd64; empty: it isn't here. Raises EngineError."""
        found = self._inspect(reference)
        return f"{found['Os']}/{found['Architecture']}" if found else ""

    def _inspect(self, reference: str) -> dict[str, Any] | None:
        """What the engine knows of an image, or None. Raises EngineError."""
        from docker.errors import ImageNotFound

        with docker_errors(reference, "can't be looked up"):
            try:
                return dict(self.api.inspect_image(reference))
            except ImageNotFound:
                return None

    def _credentials(self, name: Reference) -> dict[str, str]:
        """For one registry, as the engine takes them; empty for none, since old engines want them said."""
        found = credentials(name.host, self._environ)
        if found is None:
            return {}
        server = HUB_ACCOUNT if name.host == HUB else name.host
        if found.identity_token:
            return {"identitytoken": found.identity_token, "serveraddress": server}
        return {"username": found.username, "password": found.password, "serveraddress": server}


@contextmanager
def docker_errors(reference: str, what: str) -> Iterator[None]:
    """What the SDK raises inside, as an error of ours: that image, and what can't be done with it."""
    from http.client import HTTPException

    import requests
    from docker.errors import APIError, DockerException, StreamParseError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except APIError as error:
        raise docker_events.refused(reference, what, str(error.explanation or error)) from error
    except (DockerException, StreamParseError, requests.RequestException, HTTPError, HTTPException) as error:
        problem = f"{reference} {what}: the Docker engine doesn't answer any more ({error})"
        raise EngineError(problem, "`docker info` says whether it runs; then run the command again.") from error


def address(environ: Mapping[str, str]) -> dict[str, Any]:
    """The engine's address, `base_url`, and what TLS needs: DOCKER_HOST's, the current context's, the usual one's."""
    from docker import ContextAPI
    from docker.constants import DEFAULT_UNIX_SOCKET
    from docker.utils import kwargs_from_env

    named: dict[str, Any] = kwargs_from_env(environment={**environ})
    if "base_url" in named:
        return named
    return {"base_url": DEFAULT_UNIX_SOCKET, **ContextAPI.kwargs_from_context(environment={**environ})}


def check_listens(url: str) -> None:
    """Connect to an engine's address and close again: a plainer error than the SDK's, which would leave a socket open.

    Raises:
        OSError: nobody is there, or doesn't let us in.
    """
    parts = urlsplit(url.removeprefix("http+"))
    if parts.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(parts.path)
    elif parts.scheme in ("tcp", "http", "https") and parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), CONNECT_SECONDS).close()


def unreachable(error: Exception, environ: Mapping[str, str]) -> EngineError:
    """Why there is no engine, and what to do."""
    host = environ.get("DOCKER_HOST")
    where = f"at {host} (DOCKER_HOST)" if host else "on this machine"
    if isinstance(error, PermissionError):
        return EngineError(f"the Docker engine {where} doesn't let this user speak to it", NO_PERMISSION)
    if isinstance(error, FileNotFoundError | ConnectionError):
        return EngineError(f"there is no Docker engine {where} ({error.strerror})", START)
    return EngineError(f"the Docker engine {where} can't be used: {' '.join(str(error).split())}", START)
