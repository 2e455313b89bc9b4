"""Bring a planned image into the registry by the fastest method, and return its digest.

An image that already exists in the registry is used as it is. If only the code is new and the dependency image exists,
the code is appended to it as a layer, without an engine. Otherwise the dependency image is built first, by this
machine's Docker engine or by Cloud Build.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

import launcher.clock
from launch_train.common import contract
from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError
from launcher.images.append import BASE_LABEL, Stamp, append, image_manifest
from launcher.images.archives import Layer, Tree, layer
from launcher.images.docker_engine import Engine, EngineError
from launcher.images.node_packages import FOLDER, node_packages
from launcher.images.reference import is_googles
from launcher.images.registry import Reference, Registry, check_repository, parse
from launcher.images.source_files import Source, write_installed
from launcher.plan.model import Image

Builder = Literal["auto", "docker", "append", "cloud-build"]
BUILDERS: tuple[Builder, ...] = get_args(Builder)
NO_TIME = "1980-01-01T00:00:00Z"
"""The creation time of an image without a commit. A real time would change the digest of the same content."""
LONGEST = 100
"""Maximum length of a build's progress line, in characters."""
How = Literal["own", "there", "appended", "docker", "pulled"]

LAUNCH_USER = 1000
"""The uid of the image's user (containers/train.Dockerfile), who owns the code's folder."""
TRAINER_FOLDER = "opt/launch"
PROJECT_FOLDER = f"{TRAINER_FOLDER}/launch_train/{contract.PROJECT_FOLDER}"
CODE_FOLDER = "workspace"


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


class ImageResult(Struct, frozen=True, kw_only=True):
    """An available image."""

    reference: str
    """The reference by digest. If the image is only in this machine's engine, the reference by tag."""
    how: How
    sent: int | None = None
    """Bytes that this machine uploaded. None: unknown."""
    pushed: bool = True
    dependencies: bool = False
    """True if the dependency image had to be built."""
    base: str = ""
    """The base by digest, if the spec names it by tag and the image says which one it was. Empty: unknown."""


def push(request: ImageBuildRequest, environ: Mapping[str, str], report: Report) -> ImageResult:
    """Bring the image into the registry, and return it by its digest.

    Raises LaunchError: no method worked; the error says what to do.
    """
    target, base = references(request.image)
    with Registry(target.host, environ) as registry:
        if result := find_in_registry(request.image, target, registry):
            return result
        missing = registry.head(base.repository, base.tag or "") is None
        if missing:
            make_dependency_image(request, environ, registry, base, report)
        if request.builder == "docker" and not request.image.appends_node:
            registry.check_write(target.repository)
            engine = engine_of(environ, request)
            by_engine(engine, request, "train", request.image.uri, report)
            report.line(f"pushing {target}")
            digest = engine.push(request.image.uri, report.layer)
            result = ImageResult(reference=pinned(target, digest), how="docker")
        else:
            result = appended(request, registry, base, target, report)
        return replace(result, dependencies=missing, base=base_in(registry, request.image, result.reference))


def recorded_base(image: Image, reference: str, environ: Mapping[str, str]) -> str:
    """Return the base by digest that an image records; empty if it is unknown, or if the spec's base has a digest.

    Raises LaunchError: the registry does not answer.
    """
    target, _ = references(image)
    with Registry(target.host, environ) as registry:
        return base_in(registry, image, reference)


def base_in(registry: Registry, image: Image, reference: str) -> str:
    """As recorded_base, with an open registry. Raises LaunchError."""
    if image.pinned or "@" in image.base:
        return ""
    where = parse(reference)
    manifest = image_manifest(registry, where, image.platform)
    config = json.loads(registry.blob(where.repository, manifest.body["config"]["digest"]))
    return str(((config.get("config") or {}).get("Labels") or {}).get(BASE_LABEL, ""))


def build(request: ImageBuildRequest, environ: Mapping[str, str], report: Report) -> ImageResult:
    """Bring the image into the registry if that needs no engine. Otherwise build it in this machine's engine.

    In the second case, `push` sends it later.

    Raises LaunchError: no method worked; the error says what to do.
    """
    if request.builder in ("append", "cloud-build") or request.image.appends_node:
        return push(request, environ, report)
    if request.builder == "auto":
        target, base = references(request.image)
        with Registry(target.host, environ) as registry:
            if result := find_in_registry(request.image, target, registry):
                return result
            if registry.head(base.repository, base.tag or ""):
                return appended(request, registry, base, target, report)
        report.line(f"the registry has no dependency image {base} yet, so the Docker engine builds")
    return built(engine_of(environ, request), request, report)


def image_in_engine(request: ImageBuildRequest, environ: Mapping[str, str], report: Report) -> ImageResult:
    """Return the image from this machine's engine: as it is, pulled, or built.

    Raises LaunchError: there is no engine, or the image can neither be pulled nor built.
    """
    image, engine = request.image, engine_of(environ, request)
    if engine.has(image.uri):
        return ImageResult(reference=image.uri, how="there", pushed=False)
    if image.appends_node:
        reference = push(request, environ, report).reference
    elif not image.pinned and not (reference := in_registry(image, environ, report)):
        return built(engine, request, report)
    reference = image.uri if image.pinned else reference
    report.line(f"pulling {reference}")
    engine.pull(reference, report.layer)
    return ImageResult(reference=reference, how="pulled")


def in_registry(image: Image, environ: Mapping[str, str], report: Report) -> str:
    """Return the image's reference by digest, or an empty string if the engine must build it.

    It must build the image if the registry does not have it, its name is local, or the registry can't be reached (no
    network, no credentials).
    """
    if image.uri.startswith("localhost/"):
        return ""
    target, _ = references(image)
    try:
        with Registry(target.host, environ) as registry:
            digest = registry.head(target.repository, target.tag or "")
    except LaunchError as error:
        report.line(f"the registry can't be asked, so the image is built here: {error.problem}")
        return ""
    return pinned(target, digest) if digest else ""


def references(image: Image) -> tuple[Reference, Reference]:
    """Parse the names of the image and its dependency image. For a custom image they are the same.

    Raises UsageError: images can't be pushed to this name.
    """
    target = parse(image.uri)
    if image.pinned:  # a custom image is never pushed
        return target, target
    check_repository(target.name)
    return target, parse(image.dependencies)


def pinned(target: Reference, digest: str) -> str:
    """Return the image's reference with its digest only. An additional tag would have no effect."""
    return f"{target.name}@{digest}"


def find_in_registry(image: Image, target: Reference, registry: Registry) -> ImageResult | None:
    """Return the image if the registry has it, else None. Raises LaunchError: a custom image does not exist."""
    digest = registry.head(target.repository, target.digest or target.tag or "")
    if digest:
        return ImageResult(reference=pinned(target, digest), how="own" if image.pinned else "there", sent=0)
    if image.pinned:
        raise LaunchError(
            f"the registry has no {image.uri}", "It is the spec's own (image.uri); launch doesn't build that one."
        )
    return None


def appended(
    request: ImageBuildRequest, registry: Registry, base: Reference, target: Reference, report: Report
) -> ImageResult:
    """Append launch_train and the user's code to the dependency image, each as a layer. Raises LaunchError."""
    before = registry.sent
    report.line(f"appending the code to {base}")
    with temporary_folder("layers") as folder:
        layers = code_layers(request.source, Path(folder))
        names = {each.digest: name for each, name in zip(layers, ("our package", "the code"), strict=False)}

        def on_bytes(digest: str, done: int, size: int) -> None:
            report.layer(names.get(digest, "the image's config"), done, size)

        digest = append(registry, base, target, layers, request.stamp, request.image.platform, on_bytes)
    return ImageResult(reference=pinned(target, digest), how="appended", sent=registry.sent - before)


def code_layers(source: Source, folder: Path) -> list[Layer]:
    """Return the layers that change with the code.

    They match the last two COPY lines of containers/train.Dockerfile.
    """
    layers = [
        layer(
            [Tree(TRAINER_FOLDER, source.trainer)], folder / "trainer.tar.gz", "launch: COPY launch_train /opt/launch"
        )
    ]
    if source.code:
        trees = [Tree(CODE_FOLDER, source.code, LAUNCH_USER, source.digest, group_writes=True)]
        if source.installed:
            trees.append(Tree(PROJECT_FOLDER, write_installed(source.installed, folder / "installed")))
        layers.append(layer(trees, folder / "code.tar.gz", "launch: COPY code /workspace"))
    return layers


# --- The dependency image ---------------------------------------------------------------------------------------------


def make_dependency_image(
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


# --- With an engine ---------------------------------------------------------------------------------------------------


def built(engine: Engine, request: ImageBuildRequest, report: Report) -> ImageResult:
    """Build the whole image in the engine, under its tag. Raises LaunchError."""
    by_engine(engine, request, "train", request.image.uri, report)
    return ImageResult(reference=request.image.uri, how="docker", pushed=False)


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
