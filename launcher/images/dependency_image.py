"""Build the dependency image with a Docker engine or Cloud Build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import Struct

import launcher.clock
from launcher.errors import LaunchError
from launcher.images.source_files import Source
from launcher.plan.model import Image

if TYPE_CHECKING:
    from launcher.images.append import Stamp
    from launcher.images.docker_engine import Engine
    from launcher.images.registry import Reference, Registry

Builder = Literal["auto", "docker", "append", "cloud-build"]
BUILDERS: tuple[Builder, ...] = get_args(Builder)
NO_TIME = "1980-01-01T00:00:00Z"
"""The creation time of an image without a commit. A real time would change the digest of the same content."""
LONGEST = 100
"""Maximum length of a build's progress line, in characters."""


class Wanted(Struct, frozen=True, kw_only=True):
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


def make(wanted: Wanted, environ: Mapping[str, str], registry: Registry, base: Reference, report: Report) -> None:
    """Build the dependency image and push it. Callers check that it does not exist, so its tag is never overwritten.

    Raises LaunchError, before the build if the registry denies write access.
    """
    if wanted.builder == "append":
        raise LaunchError(
            f"the registry has no dependency image {base} yet, and without one nothing can be appended",
            "Make it once: launch push --builder docker, or launch push --builder cloud-build",
        )
    registry.check_write(base.repository)
    if wanted.builder == "cloud-build":
        from launcher.images.cloud_build import build as build_in_cloud

        build_in_cloud(
            wanted.source,
            wanted.image,
            project=wanted.project,
            environ=environ,
            bucket=wanted.bucket,
            on_line=report.line,
            clock=launcher.clock.REAL,
        )
        return
    engine = engine_of(environ, wanted)
    by_engine(engine, wanted, "dependencies", wanted.image.dependencies, report)
    report.line(f"pushing {base}")
    engine.push(wanted.image.dependencies, report.layer)


# --- With an engine -------------------------------------------------------------------------------------------------


def engine_of(environ: Mapping[str, str], wanted: Wanted) -> Engine:
    """Connect to this machine's Docker engine. Raises LaunchError: there is none; the hint names alternatives."""
    from launcher.images.docker_engine import Engine, EngineError
    from launcher.images.registry.reference import is_googles

    try:
        return Engine.connect(environ)
    except EngineError as error:
        if wanted.builder == "docker" or not is_googles(wanted.image.uri.partition("/")[0]):
            raise
        more = "Without an engine, Cloud Build can make the dependency image: launch push --builder cloud-build"
        raise EngineError(error.problem, f"{error.hint}\n{more}" if error.hint else more) from error


def by_engine(engine: Engine, wanted: Wanted, stage: str, reference: str, report: Report) -> None:
    """Build one stage of the Dockerfile under a name. Raises LaunchError."""
    report.line(f"building {reference} with the Docker engine")
    labels = wanted.stamp.labels if stage == "train" else {}
    engine.build(wanted.source, wanted.image, target=stage, tag=reference, labels=labels, on_line=clipped(report.line))


def clipped(say: Callable[[str], None]) -> Callable[[str], None]:
    """Limit the length of progress lines. The error of a failed step has the whole step."""
    return lambda text: say(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")
