"""The image of a spec: its content and its labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from msgspec.structs import replace

import launcher.clock
from launcher.catalog import load
from launcher.errors import LaunchError, UsageError
from launcher.images import artifact_registry
from launcher.images.append import OCI, Stamp
from launcher.images.inspect import contents
from launcher.images.pipeline import BUILDERS, NO_TIME, ImageBuildRequest
from launcher.images.registry import Registry, parse
from launcher.inputs.gather import Inputs
from launcher.inputs.git import commit
from launcher.inputs.planning import planned_image
from launcher.plan.image import BASE_TORCH, check_image_contents
from launcher.plan.model import Image
from launcher.plan.placement import choose

TITLE = "launch train"


def image_build_request(inputs: Inputs, builder: str = "auto") -> ImageBuildRequest:
    """Return the image of a spec and its contents. Raises UsageError: unknown builder."""
    known = next((name for name in BUILDERS if name == builder), None)
    if known is None:
        raise UsageError(f"unknown builder {builder!r} in --builder", f"Use one of {', '.join(BUILDERS)}.")
    image = planned_image(inputs)
    return ImageBuildRequest(
        image=image,
        source=replace(inputs.source, dockerfile=image.dockerfile or ""),
        stamp=stamp(inputs),
        builder=known,
        project=inputs.context.project,
        bucket=bucket_of(inputs.spec.output),
    )


def bucket_of(output: str | None) -> str:
    """Return gs://NAME of an output in a bucket, else an empty text."""
    return "/".join((output or "").split("/")[:3]) if (output or "").startswith("gs://") else ""


def stamp(inputs: Inputs) -> Stamp:
    """Return the labels of the OCI image specification, with the commit of the user's code."""
    revision = commit(inputs.code, (file.name for file in inputs.source.code)) if inputs.code else None
    known = {"title": TITLE, "version": inputs.context.version}
    if revision:
        known |= {"revision": revision.revision, "source": revision.source, "created": revision.time}
    return Stamp(
        {f"{OCI}.{key}": value for key, value in known.items() if value}, revision.time if revision else NO_TIME
    )


def create(build: ImageBuildRequest, say: Callable[[str], None]) -> None:
    """Create the repository unless it exists. Raises LaunchError."""
    repository = build.image.uri.rpartition("/")[0]
    is_new = artifact_registry.create(repository, os.environ, launcher.clock.REAL)
    say(f"repository {repository} {'created' if is_new else 'already exists'}")


def check_contents(inputs: Inputs, image: Image, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Check that an image that launch did not build (image.uri, or a base with its own PyTorch) fits the machine.

    Content that can't be read is not a reason to refuse the plan. Raises PlanRefused.
    """
    if image.builds_base or (not image.pinned and image.wheel != BASE_TORCH):
        return
    name = image.uri if image.pinned else image.base
    try:
        where = parse(name)
        with Registry(where.host, environ) as registry:
            inside = contents(registry, where, image.platform)
    except LaunchError as error:
        say(f"cannot read what {name} contains: {error.problem}")
        return
    with inputs.located.naming_places():
        for chosen in choose(inputs.spec, load(), inputs.context.target):
            check_image_contents(inputs.spec, load(), chosen, image, inside, inputs.context.packages)
