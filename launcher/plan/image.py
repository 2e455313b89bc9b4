"""Which image a run uses, and its content-addressed tag."""

from __future__ import annotations

from launcher.catalog import Gpu, MachineType
from launcher.plan import names
from launcher.plan.model import Context, Image
from launcher.spec.models import JobSpec

IMAGE_NAME = "train"


def plan_image(spec: JobSpec, context: Context, machine: MachineType | None, gpu: Gpu) -> Image:
    """The image of one run.

    The tag is a hash over all that goes in, so the same content on two machines has the same tag. Wheel and platform
    come from the machine, never from the host that builds.
    """
    platform = f"linux/{machine.arch if machine else 'amd64'}"
    uri = spec.image.uri or f"{repository(spec, context)}/{IMAGE_NAME}:{tag(context, platform, gpu.wheel)}"
    return Image(
        uri=uri,
        pinned=spec.image.uri is not None,
        platform=platform,
        wheel=gpu.wheel,
        min_driver=gpu.min_driver,
        files=context.code.files,
        size=context.code.size,
    )


def repository(spec: JobSpec, context: Context) -> str:
    """Where the image lies; `launch local` needs no project, so it has a name of its own."""
    if spec.image.repository:
        return spec.image.repository
    return "localhost/launch" if context.target == "local" else names.default_repository(context.project)


def tag(context: Context, platform: str, wheel: str) -> str:
    """Sixteen hex digits over the recipe, the platform, the wheel variant, the code and the requirements."""
    parts = (context.recipe.digest, platform, wheel, context.code.digest, context.requirements.digest)
    return names.digest(parts, 16)
