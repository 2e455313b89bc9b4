"""Derive the image of a run and its content-addressed tag."""

from __future__ import annotations

from launcher.catalog import Catalog
from launcher.plan import names
from launcher.plan.model import Chosen, Context, Image
from launcher.spec.models import JobSpec

IMAGE_NAME = "train"
DEPENDENCIES_NAME = "dependencies"
"""Separate from the image's repository: dependencies change rarely, are large, and should be kept longer."""


def plan_image(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> Image:
    """Return the image of a run.

    A tag is a hash of the image's content, so equal content has the same tag wherever it is built. Wheel and platform
    depend on the job's machine, never on the build host.
    """
    platform = f"linux/{chosen.machine.arch if chosen.machine else 'amd64'}"
    wheel = spec.image.wheel or chosen.gpu.wheel
    existing = spec.image.uri
    base, location = spec.image.base or context.base, repository(spec, context)
    dependencies = dependencies_tag(context, base, platform, wheel)
    return Image(
        uri=existing or f"{location}/{IMAGE_NAME}:{tag(context, dependencies)}",
        pinned=existing is not None,
        dependencies="" if existing else f"{location}/{DEPENDENCIES_NAME}:{dependencies}",
        base="" if existing else base,
        platform=platform,
        wheel=wheel,
        min_driver=catalog.wheels.get(wheel),
        files=context.code.files,
        size=context.code.size,
    )


def repository(spec: JobSpec, context: Context) -> str:
    """Return the image's repository. `launch local` needs no project, so it has its own name.

    A domain-scoped project (example.com:my-project) becomes two path segments.
    """
    if spec.image.repository:
        host, _, path = spec.image.repository.partition("/")
        return f"{host}/{path.replace(':', '/') if host.endswith('.pkg.dev') else path}"
    return "localhost/launch" if context.target == "local" else names.default_repository(context.project)


def dependencies_tag(context: Context, base: str, platform: str, wheel: str) -> str:
    """Return 16 hex digits over the recipe with its locks, base, platform, wheel, and the user's requirements."""
    own = (context.requirements.digest, context.torch.digest)
    return names.digest((context.recipe.digest, base, platform, wheel, *own), 16)


def tag(context: Context, dependencies: str) -> str:
    """Return 16 hex digits over the dependencies' tag, launch_train and the user's code."""
    return names.digest((dependencies, context.trainer.digest, context.code.digest), 16)
