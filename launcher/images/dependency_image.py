"""Build the dependency image with a Docker engine or Cloud Build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

import launcher.clock
from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError
from launcher.images.append import Stamp, append
from launcher.images.archives import Tree, layer
from launcher.images.docker_engine import Engine, EngineError
from launcher.images.node_packages import FOLDER, node_packages
from launcher.images.reference import is_googles
from launcher.images.registry import Reference, Registry, parse
from launcher.images.source_files import Source
from launcher.plan.model import Image

Builder = Literal["auto", "docker", "append", "cloud-build"]
BUILDERS: tuple[Builder, ...] = get_args(Builder)
NO_TIME = "1980-01-01T00:00:00Z"
"""The creation time of an image without a commit. A real time would change the digest of the same content."""
LONGEST = 100
"""Maximum length of a build's progress line, in characters."""


class ImageBuildRequest(Struct, frozen=True, kw_only=True):
    """The image to bring into the registry: its plan, its files, its labels and the builder to use."""

    image: Image
    source: Source
    stamp: Stamp
    builder: Builder = "auto"
    project: str = ""
    """The project whose Cloud Build may be used."""
    bucket: str = ""
    """The bucket for the source (gs://NAME). Empty: the project's default bucket."""


class Report(Struct, frozen=True):
    """Receivers of progress: text lines, and the bytes of a layer (name, done, size)."""

    line: Callable[[str], None] = lambda _text: None
    layer: Callable[[str, int, int], None] = lambda _name, _done, _all: None


def make(
    request: ImageBuildRequest, environ: Mapping[str, str], registry: Registry, base: Reference, report: Report
) -> None:
    """Build the dependency image and push it. Callers check that it does not exist, so its tag is never overwritten.

    Raises LaunchError, before the build if the registry denies write access.
    """
    if request.image.appends_node:
        append_node(request, environ, registry, base, report)
        return
    if request.builder == "append":
        raise LaunchError(
            f"the registry has no dependency image {base} yet, which appending needs",
            "Build it once: launch push --builder docker, or launch push --builder cloud-build",
        )
    registry.check_write(base.repository)
    if request.builder == "cloud-build":
        from launcher.images.cloud_build import build as build_in_cloud

        build_in_cloud(
            request.source,
            pinned_base(request.image, environ, report),
            project=request.project,
            environ=environ,
            bucket=request.bucket,
            on_line=report.line,
            clock=launcher.clock.REAL,
        )
        return
    engine = engine_of(environ, request)
    by_engine(engine, request, "dependencies", request.image.dependencies, report)
    report.line(f"pushing {base}")
    engine.push(request.image.dependencies, report.layer)


def pinned_base(image: Image, environ: Mapping[str, str], report: Report) -> Image:
    """Return the image with its base by digest, as its registry has it now; unchanged if that does not answer."""
    if "@" in image.base:
        return image
    name = parse(image.base)
    try:
        with Registry(name.host, environ) as registry:
            digest = registry.head(name.repository, name.tag or "latest")
    except LaunchError as error:
        report.line(f"the base image {image.base} has no digest: {error.problem}")
        return image
    if not digest:
        raise LaunchError(f"the base image {image.base} does not exist", "Choose another one: image.base")
    report.line(f"the base image {image.base} is not pinned; this build uses {name.name}@{digest}")
    return replace(image, base=f"{name.name}@{digest}")


# --- On an existing image -------------------------------------------------------------------------------------------


def append_node(
    request: ImageBuildRequest, environ: Mapping[str, str], registry: Registry, target: Reference, report: Report
) -> None:
    """Push the existing image with the node's packages as one layer. Raises LaunchError."""
    existing = parse(request.image.base)
    if existing.host != registry.host:
        raise LaunchError(
            f"image.uri is in {existing.host}, and layers can only be added within one registry ({registry.host})",
            f"Copy it first (gcrane cp {request.image.base} …), or build on it with an engine: "
            f"image.base: {request.image.base}",
        )
    registry.check_write(target.repository)
    report.line(f"appending the node's packages to {request.image.base}")
    (lock,) = [lock_file.path for lock_file in request.source.locks if lock_file.name == "node.lock"]
    with temporary_folder("node") as name:
        files = node_packages(lock, request.image.platform, Path(name), environ)
        added = layer([Tree(FOLDER, files)], Path(name, "node.tar.gz"), "launch: packages of launch_train.node")
        change = partial(with_launch, has_code=bool(request.source.code))
        append(registry, existing, target, [added], request.stamp, request.image.platform, report.layer, change)


def with_launch(settings: dict[str, Any], *, has_code: bool) -> dict[str, Any]:
    """Return an image's settings in which Python finds launch_train, and which start in the user's code if the image
    gets that. Entrypoint and user stay the image's own."""
    env = dict(variable.partition("=")[::2] for variable in settings.get("Env") or ())
    path = ":".join(("/opt/launch", *filter(None, [env.get("PYTHONPATH")])))
    env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    folder = {"WorkingDir": "/workspace"} if has_code else {}
    return {**settings, "Env": [f"{name}={value}" for name, value in env.items()], **folder}


# --- With an engine -------------------------------------------------------------------------------------------------


def engine_of(environ: Mapping[str, str], request: ImageBuildRequest) -> Engine:
    """Connect to this machine's Docker engine. Raises LaunchError: there is none; the hint names alternatives."""
    try:
        return Engine.connect(environ)
    except EngineError as error:
        if request.builder == "docker" or not is_googles(request.image.uri.partition("/")[0]):
            raise
        more = "Without an engine, Cloud Build can build the dependency image: launch push --builder cloud-build"
        raise EngineError(error.problem, f"{error.hint}\n{more}" if error.hint else more) from error


def by_engine(engine: Engine, request: ImageBuildRequest, stage: str, reference: str, report: Report) -> None:
    """Build one stage of the Dockerfile under a name. Raises LaunchError."""
    report.line(f"building {reference} with the Docker engine")
    labels = request.stamp.labels if stage == "train" else {}
    engine.build(
        request.source, request.image, target=stage, tag=reference, labels=labels, on_line=clipped(report.line)
    )


def clipped(say: Callable[[str], None]) -> Callable[[str], None]:
    """Limit the length of progress lines. The error of a failed step has the whole step."""
    return lambda text: say(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")
