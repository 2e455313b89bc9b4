"""Which image a run uses, and its content-addressed tag."""

from __future__ import annotations

from launcher.catalog import Catalog
from launcher.plan import names
from launcher.plan.model import Chosen, Context, Image
from launcher.spec.models import JobSpec

IMAGE_NAME = "train"
DEPENDENCIES_NAME = "dependencies"
"""A repository of its own beside the image's: it changes seldom, is large, and should be kept longer."""


def plan_image(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> Image:
    """The image of one run.

    A tag is a hash over all that goes in, so the same content on two machines has the same tag. Wheel and platform
    come from the machine, never from the host that builds.
    """
    platform = f"linux/{chosen.machine.arch if chosen.machine else 'amd64'}"
    wheel = spec.image.wheel or chosen.gpu.wheel
    own = spec.image.uri
    base, where = spec.image.base or context.base, repository(spec, context)
    dependencies = dependencies_tag(context, base, platform, wheel)
    return Image(
        uri=own or f"{where}/{IMAGE_NAME}:{tag(context, dependencies)}",
        pinned=own is not None,
        dependencies="" if own else f"{where}/{DEPENDENCIES_NAME}:{dependencies}",
        base="" if own else base,
        platform=platform,
        wheel=wheel,
        min_driver=catalog.wheels.get(wheel),
        files=context.code.files,
        size=context.code.size,
    )


def repository(spec: JobSpec, context: Context) -> str:
    """Where the image lies; `launch local` needs no project, so it has a name of its own.

    In names, a project of a domain (example.com:my-project) is two parts.
    """
    if spec.image.repository:
        host, _, path = spec.image.repository.partition("/")
        return f"{host}/{path.replace(':', '/') if host.endswith('.pkg.dev') else path}"
    return "localhost/launch" if context.target == "local" else names.default_repository(context.project)


def dependencies_tag(context: Context, base: str, platform: str, wheel: str) -> str:
    """Sixteen hex digits over the recipe and its locks, base, platform, wheel, and the user's requirements."""
    own = (context.requirements.digest, context.torch.digest)
    return names.digest((context.recipe.digest, base, platform, wheel, *own), 16)


def tag(context: Context, dependencies: str) -> str:
    """Sixteen hex digits over the dependencies' tag, launch_train and the user's code."""
    return names.digest((dependencies, context.trainer.digest, context.code.digest), 16)
