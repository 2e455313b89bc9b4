"""Build, push and pull images with this machine's Docker engine, through Docker's own SDK.

A build receives the context and its arguments only: no environment variables, proxies or passwords from Docker's
configuration. A private base is pulled beforehand, with the credentials that launch finds. Build secrets and a user's
own Dockerfile need BuildKit, which the docker command starts: the SDK speaks only to the engine's older builder.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError, UsageError
from launcher.images.append import BASE_LABEL
from launcher.images.archives import BASE_DOCKERFILE, DOCKERFILE, base_context, build_context
from launcher.images.reference import HUB, Reference, parse
from launcher.images.registry.credentials import credentials
from launcher.images.registry.transport import RepositoryMissing, denied
from launcher.images.source_files import Source
from launcher.plan.model import Image

Event = Mapping[str, Any]
OnLine = Callable[[str], None]
OnLayer = Callable[[str, int, int], None]
"""Called with a layer's name, the bytes done and its size."""

SILENT_SECONDS = 600.0
"""Timeout without any output of the engine, as in a long build step. By default the SDK and the engine have none."""

CONNECT_SECONDS = 10.0

HUB_ACCOUNT = "https://index.docker.io/v1/"
"""Docker Hub's key in Docker's credentials, for historical reasons."""

START = "Start it (Docker Desktop, or `sudo systemctl start docker`), or set DOCKER_HOST to another engine."
NO_PERMISSION = "Join the engine's group: `sudo usermod -aG docker $USER`, then log in again."

LAST_LINES = 10
"""Lines of a failed step's output in an error."""

MOVING = frozenset({"Pushing", "Downloading"})
GONE = frozenset({"Pushed", "Download complete"})
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOISE = (" ---> ", "---> ", "Removing intermediate container", "Successfully built ", "Successfully tagged ")
"""Messages of the engine that don't concern the user."""

NO_ACCESS = ("unauthorized", "denied", "authentication required", "no basic auth credentials", "forbidden")
HINTS = (
    (
        ("no space left on device",),
        "The engine's disk is full. `docker system df` shows the usage; `docker builder prune` empties its cache.",
    ),
    (
        ("exec format error",),
        "The base is for another CPU architecture, and this engine has no emulator for it (binfmt, qemu-user-static).",
    ),
    (
        ("is not a supported wheel on this platform",),
        "The wheel (image.torch) is for another Python or platform than the base image's.",
    ),
    (
        ("name resolution", "failed to establish a new connection", "network is unreachable", "no such host"),
        "The engine, or the containers that it builds in, can't reach the network.",
    ),
    (
        ("connection refused",),
        "The registry does not respond. Check its name, and that it is running.",
    ),
)
"""Messages of the engine, pip or apt → a hint."""

HINT_REQUIREMENTS = "These are the job's own requirements (image.requirements); see pip's output above."
BROKE_OFF = "the engine closed the connection before it had finished"

INSTALL = "Install Docker's command with its buildx plugin: https://docs.docker.com/engine/install/"
NO_BUILDX = "buildx component is missing"
HIDDEN = "***"
"""In the place of a build secret."""


class EngineError(LaunchError):
    """No Docker engine is available, or it reported an error."""


class Engine:
    """A connected Docker engine. `api` is the SDK's low-level client."""

    def __init__(self, api: Any, environ: Mapping[str, str]) -> None:
        self.api = api
        self._environ = environ

    @classmethod
    def connect(cls, environ: Mapping[str, str]) -> Engine:
        """Connect to the engine that the docker command uses: DOCKER_HOST, the current context, or the default socket.

        Raises EngineError: no engine, no permission, or the SDK is not installed.
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
        with build_context(source) as context, docker_errors(f"{tag} can't be built", tag):
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
            return read_build(events, tag, on_line)

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
        with docker_errors(f"{reference} can't be pushed", reference):
            events = self.api.push(
                name.name, tag=name.tag, stream=True, decode=True, auth_config=self._credentials(name)
            )
            digest = ""
            for event in followed(events, on_layer, reference, "can't be pushed"):
                digest = (event.get("aux") or {}).get("Digest", digest)
        if not digest:
            raise EngineError(
                f"{reference} isn't pushed: {BROKE_OFF}", "Push again: layers that have arrived stay there."
            )
        return digest

    def pull(
        self, reference: str, on_layer: OnLayer = lambda _name, _done, _all: None, *, platform: str | None = None
    ) -> None:
        """Pull an image, by tag or digest.

        Raises:
            NotAuthorised: no permission in the registry.
            EngineError: the image does not exist, or not for this platform, or its registry can't be reached.
        """
        name = parse(reference)
        with docker_errors(f"{reference} can't be pulled", reference):
            events = self.api.pull(
                name.name,
                tag=name.digest or name.tag,
                stream=True,
                decode=True,
                auth_config=self._credentials(name),
                platform=platform,
            )
            deque(followed(events, on_layer, reference, "can't be pulled"), maxlen=0)

    def tag(self, reference: str, name: str) -> None:
        """Add a name to an image of this engine. Raises EngineError."""
        new = parse(name)
        with docker_errors(f"{reference} can't be named {name}", reference):
            self.api.tag(reference, new.name, tag=new.tag)

    def _run_buildkit(self, context: IO[bytes], options: Sequence[str], image: Image, on_line: OnLine) -> None:
        """Run BuildKit on a build context, with the image's secrets. Raises LaunchError."""
        if isinstance(context, tempfile.SpooledTemporaryFile):
            context.rollover()  # another process's standard input needs a descriptor
        context.seek(0)
        host = address(self._environ)["base_url"]
        buildkit(context, options, host=host, environ=self._environ, secrets=image.build_secrets or (), on_line=on_line)

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

        with docker_errors(f"{reference} can't be looked up", reference):
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


@contextmanager
def docker_errors(problem: str, image: str = "") -> Iterator[None]:
    """Raise the SDK's errors as EngineError, or for an operation on `image` as those of `image_refusal`; the text
    begins with `problem`."""
    from http.client import HTTPException

    from docker.errors import APIError, DockerException, StreamParseError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except APIError as error:
        message = str(error.explanation or error).strip()
        plain = EngineError(f"{problem}: {message}", hint_for(message))
        raise (image_refusal(image, problem, message) if image else plain) from error
    except (DockerException, StreamParseError, HTTPError, HTTPException, OSError) as error:
        problem = f"{problem}: no answer from the Docker engine ({error})"
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

    Raises OSError: no engine, or no permission.
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


# --- The events of the engine -----------------------------------------------------------------------------------------


# https://docs.docker.com/reference/api/engine/: a build sends its output in pieces of text; a push or pull sends the
# state of each layer. An error may come inside the stream, after HTTP status 200.


def read_build(events: Iterable[Event], name: str, on_line: OnLine) -> str:
    """Read a build's events and return the image's id. Raises EngineError: it failed or was interrupted."""
    step, output, image = "", deque[str](maxlen=LAST_LINES), ""
    rest = output_lines(events)
    for line, event in rest:
        if message := error_in(event):
            deque(rest, maxlen=0)  # read to its end, a stream's connection is closed
            raise build_failure(name, step, message, output)
        image = (event.get("aux") or {}).get("ID", image)
        if line.startswith("Step "):
            step = " ".join(line.split())
            output.clear()
            on_line(step)
        elif line and not line.startswith(NOISE):
            output.append(line)
            on_line(line)
    if not image:
        raise EngineError(f"{name} isn't built: {BROKE_OFF}", "Try again; `docker info` says whether it runs.")
    return image


def output_lines(events: Iterable[Event]) -> Iterator[tuple[str, Event]]:
    """Yield (line, event): each complete line of output with an empty event, and each other event with an empty line.

    A line may be split over any number of events. A carriage return, used by progress bars, overwrites the line.
    """
    rest = ""
    for event in events:
        if "stream" in event:
            *whole, rest = (rest + COLOUR.sub("", event["stream"])).split("\n")
            yield from ((line.rstrip().rpartition("\r")[2], {}) for line in whole)
        else:
            yield rest.rstrip().rpartition("\r")[2], {}
            yield "", event
            rest = ""
    yield rest.rstrip().rpartition("\r")[2], {}


def build_failure(name: str, step: str, message: str, output: Iterable[str]) -> EngineError:
    """Return the error of a failed build: the engine's name of the step (maybe empty), its message, the last lines of
    output, and a hint."""
    where = f"{name} can't be built: {step or 'before its first step'}"
    lines = [*output, message]
    hint = hint_for(" ".join(lines))
    # pip found conflicting versions, even if one of its indexes was unreachable.
    conflict = any("ResolutionImpossible" in line for line in lines)
    if "requirements.txt" in step and (conflict or not hint):
        hint = HINT_REQUIREMENTS
    return EngineError("\n  ".join([f"{where}\n{message}", *lines[:-1]]), hint)


def followed(events: Iterable[Event], on_layer: OnLayer, name: str, what: str) -> Iterator[Event]:
    """Yield the events of a push or pull and report each layer's progress. Raises LaunchError: an event is an error."""
    sizes: dict[str, int] = {}
    rest = iter(events)
    for event in rest:
        if message := error_in(event):
            deque(rest, maxlen=0)
            raise image_refusal(name, f"{name} {what}", message)
        layer, status, detail = event.get("id", ""), event.get("status"), event.get("progressDetail") or {}
        if status in MOVING and detail.get("total"):
            sizes[layer] = detail["total"]
            on_layer(f"layer {layer}", min(detail.get("current", 0), sizes[layer]), sizes[layer])
        elif status in GONE and layer in sizes:
            on_layer(f"layer {layer}", sizes[layer], sizes[layer])
        yield event


def error_in(event: Event) -> str:
    """Return the message of an error event, else an empty string."""
    return str((event.get("errorDetail") or {}).get("message") or event.get("error") or "").strip()


def image_refusal(image: str, problem: str, message: str) -> LaunchError:
    """Return the error of an operation on an image with the engine's message; NotAuthorised: no permission."""
    problem, words = f"{problem}: {message}", message.lower()
    if any(phrase in words for phrase in NO_ACCESS):
        return denied(parse(image).host, problem, "what launch found for it, handed to the engine")
    if "name unknown" in words:
        return RepositoryMissing(problem, "Create the repository first: launch build --create-repository")
    if "not found" in words or "manifest unknown" in words:
        return EngineError(problem, "Check its name, and that it exists for this platform.")
    return EngineError(problem, hint_for(message))


def hint_for(text: str) -> str:
    """Return a hint for a message of the engine or pip, if one is known."""
    words = text.lower()
    return next((hint for signs, hint in HINTS if any(sign in words for sign in signs)), "")


# --- BuildKit ---------------------------------------------------------------------------------------------------------


def buildkit(
    context: IO[bytes],
    options: Sequence[str],
    *,
    host: str,
    environ: Mapping[str, str],
    secrets: Sequence[str],
    on_line: OnLine,
) -> None:
    """Run `docker build` with a context as tar on its standard input. The values of `secrets` come from `environ`.

    Raises:
        UsageError: a secret is not set.
        EngineError: the docker command or BuildKit is not available, or a step failed (with its last lines).
    """
    if missing := [name for name in secrets if not environ.get(name)]:
        raise UsageError(
            f"image.build_secrets: {missing[0]} is not set in this shell",
            f"Set it where you run launch: export {missing[0]}=VALUE",
            field="image.build_secrets",
        )
    program = shutil.which("docker", path=environ.get("PATH"))
    if program is None:
        raise EngineError("this build needs BuildKit, and the docker command is not installed", INSTALL)
    words = [word for name in secrets for word in ("--secret", f"id={name},env={name}")]
    command = [program, "build", "--progress=plain", *options, *words, "-"]
    masked = {part for name in secrets for part in environ[name].splitlines() if part.strip()}
    last = deque[str](maxlen=LAST_LINES)

    def show(line: str) -> None:
        for part in sorted(masked, key=len, reverse=True):  # one may begin another; programs in the build print them
            line = line.replace(part, HIDDEN)
        last.append(line)
        on_line(line)

    kept = ("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", *secrets)
    with temporary_folder("docker") as config:
        # The configuration is empty but for the user's plugins (buildx).
        home = environ.get("DOCKER_CONFIG") or os.path.join(environ.get("HOME", ""), ".docker")  # noqa: PTH118 -- may be empty
        if (plugins := Path(home, "cli-plugins")).is_dir():
            Path(config, "cli-plugins").symlink_to(plugins)
        env = {"PATH": environ.get("PATH", os.defpath), "DOCKER_HOST": host, "DOCKER_CONFIG": config}
        env |= {"DOCKER_BUILDKIT": "1", **{name: environ[name] for name in kept if name in environ}}
        with subprocess.Popen(
            command, stdin=context, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        ) as process:
            try:
                for line in process.stdout or ():
                    show(line.decode(errors="replace").rstrip())
                status = process.wait()
            except BaseException:
                process.kill()
                raise
    if status:
        text = "\n  ".join(last)
        hint = INSTALL if NO_BUILDX in text else hint_for(text)
        raise EngineError(f"the build failed (docker build: exit code {status})\n  {text}", hint)
