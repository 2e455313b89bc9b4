"""From an image's plan to its digest in the registry, the shortest way there.

In the registry already: nothing to do. Only the code is new (the dependency image is there): its layer is appended,
without an engine. Else the dependency image is made first, by this machine's engine or by Cloud Build.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.images import dependency_image
from launcher.images.dependency_image import Report, Wanted, by_engine, engine_of
from launcher.images.reproducible_tar import Tree
from launcher.images.source_files import Source
from launcher.plan.model import Image

if TYPE_CHECKING:
    from launcher.images.docker_engine import Engine
    from launcher.images.layer import Layer
    from launcher.images.registry import Reference, Registry

How = Literal["own", "there", "appended", "docker", "pulled"]

LAUNCH_USER = 1000
"""The user of the image (containers/train.Dockerfile), who owns the code's folder."""
TRAINER_FOLDER = "opt/launch"
CODE_FOLDER = "workspace"


class Made(Struct, frozen=True, kw_only=True):
    """An image that is there."""

    reference: str
    """By its digest; by its tag where it is in this machine's engine alone."""
    how: How
    sent: int | None = None
    """Bytes that this machine has sent, where they are known."""
    pushed: bool = True
    dependencies: bool = False
    """Whether the dependency image had to be made for it."""


def push(wanted: Wanted, environ: Mapping[str, str], report: Report) -> Made:
    """The image in the registry, by its digest.

    Raises:
        LaunchError: no way leads there; each error says what to do.
    """
    target, base = references(wanted.image)
    with registry_of(target, environ) as registry:
        if made := there(wanted.image, target, registry):
            return made
        missing = registry.head(base.repository, base.tag or "") is None
        if missing:
            dependency_image.make(wanted, environ, registry, base, report)
        way = pushed_by_engine if wanted.builder == "docker" else appended
        return replace(way(wanted, environ, registry, base, target, report), dependencies=missing)


def build(wanted: Wanted, environ: Mapping[str, str], report: Report) -> Made:
    """The image in the registry where that needs no engine, else in this machine's engine, for `push` to send.

    Raises:
        LaunchError: no way leads there; each error says what to do.
    """
    if wanted.builder in ("append", "cloud-build"):
        return push(wanted, environ, report)
    if wanted.builder == "auto":
        target, base = references(wanted.image)
        with registry_of(target, environ) as registry:
            if made := there(wanted.image, target, registry):
                return made
            if registry.head(base.repository, base.tag or ""):
                return appended(wanted, environ, registry, base, target, report)
        report.line(f"the registry has no dependency image {base} yet, so the Docker engine builds")
    return built(engine_of(environ, wanted), wanted, report)


def here(wanted: Wanted, environ: Mapping[str, str], report: Report) -> Made:
    """The image in this machine's engine: there already, pulled, or built.

    Raises:
        LaunchError: there is no engine, or the image can neither be pulled nor built.
    """
    image, engine = wanted.image, engine_of(environ, wanted)
    if engine.has(image.uri):
        return Made(reference=image.uri, how="there", pushed=False)
    if not image.pinned and not (found := in_registry(image, environ, report)):
        return built(engine, wanted, report)
    reference = image.uri if image.pinned else found
    report.line(f"pulling {reference}")
    engine.pull(reference, report.layer)
    return Made(reference=reference, how="pulled")


def in_registry(image: Image, environ: Mapping[str, str], report: Report) -> str:
    """The image by its digest, or nothing: not there, its name is one of this machine alone, or nobody can be asked
    (no network, no credentials), which need not keep an engine from building it."""
    if image.uri.startswith("localhost/"):
        return ""
    target, _ = references(image)
    try:
        with registry_of(target, environ) as registry:
            digest = registry.head(target.repository, target.tag or "")
    except LaunchError as error:
        report.line(f"the registry can't be asked, so the image is built here: {error.problem}")
        return ""
    return pinned(target, digest) if digest else ""


def references(image: Image) -> tuple[Reference, Reference]:
    """The image and its dependency image, which an image of the user's own is itself.

    Raises:
        UsageError: nothing can be pushed there.
    """
    from launcher.images.registry import check_repository, parse

    target = parse(image.uri)
    if image.pinned:  # only read
        return target, target
    check_repository(target.name)
    return target, parse(image.dependencies)


def registry_of(target: Reference, environ: Mapping[str, str]) -> Registry:
    """The registry that an image is in; to be closed. Raises LaunchError: the client isn't installed."""
    from launcher.images.registry import Registry

    return Registry(target.host, environ)


def pinned(target: Reference, digest: str) -> str:
    """The image by its digest alone, as requests name it: a tag beside it would only look as if it mattered."""
    return f"{target.name}@{digest}"


def there(image: Image, target: Reference, registry: Registry) -> Made | None:
    """The image if the registry has it. Raises LaunchError: one that is pinned isn't there."""
    digest = registry.head(target.repository, target.digest or target.tag or "")
    if digest:
        return Made(reference=pinned(target, digest), how="own" if image.pinned else "there", sent=0)
    if image.pinned:
        raise LaunchError(
            f"the registry has no {image.uri}", "It is the spec's own (image.uri); launch doesn't build that one."
        )
    return None


def appended(
    wanted: Wanted,
    _environ: Mapping[str, str],
    registry: Registry,
    base: Reference,
    target: Reference,
    report: Report,
) -> Made:
    """Our package and the user's code, each as a layer upon the dependency image. Raises LaunchError."""
    from launcher.images.append import append

    before = registry.sent
    report.line(f"appending the code to {base}")
    with tempfile.TemporaryDirectory(prefix="launch-layers-") as folder:
        layers = code_layers(wanted.source, Path(folder))
        names = {one.digest: name for one, name in zip(layers, ("our package", "the code"), strict=False)}

        def on_bytes(digest: str, done: int, size: int) -> None:
            report.layer(names.get(digest, "the image's config"), done, size)

        digest = append(registry, base, target, layers, wanted.stamp, wanted.image.platform, on_bytes)
    return Made(reference=pinned(target, digest), how="appended", sent=registry.sent - before)


def code_layers(source: Source, folder: Path) -> list[Layer]:
    """The layers that change with the code, as the last two COPY lines of containers/train.Dockerfile make them."""
    from launcher.images.layer import layer

    made = [
        layer(
            [Tree(TRAINER_FOLDER, source.trainer)], folder / "trainer.tar.gz", "launch: COPY launch_train /opt/launch"
        )
    ]
    if source.code:
        tree = Tree(CODE_FOLDER, source.code, LAUNCH_USER, source.digest, group_writes=True)
        made.append(layer([tree], folder / "code.tar.gz", "launch: COPY code /workspace"))
    return made


# --- With an engine -------------------------------------------------------------------------------------------------


def built(engine: Engine, wanted: Wanted, report: Report) -> Made:
    """The whole image in the engine, under its tag. Raises LaunchError."""
    by_engine(engine, wanted, "train", wanted.image.uri, report)
    return Made(reference=wanted.image.uri, how="docker", pushed=False)


def pushed_by_engine(
    wanted: Wanted,
    environ: Mapping[str, str],
    registry: Registry,
    _base: Reference,
    target: Reference,
    report: Report,
) -> Made:
    """Built and pushed by the engine. Raises LaunchError."""
    registry.check_write(target.repository)
    engine = engine_of(environ, wanted)
    by_engine(engine, wanted, "train", wanted.image.uri, report)
    report.line(f"pushing {target}")
    return Made(reference=pinned(target, engine.push(wanted.image.uri, report.layer)), how="docker")
