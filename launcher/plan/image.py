"""Derive the image of a run and its content-addressed tag."""

from __future__ import annotations

from msgspec import UNSET

from launcher.catalog import Catalog
from launcher.errors import PlanRefused
from launcher.plan import names
from launcher.plan.model import Chosen, Context, Image, ImageContents, Packages
from launcher.plan.names import json_digest
from launcher.plan.recipe import allowed, cuda_problem, dockerfile, first, recipe_of, torch_of
from launcher.spec.models import JobSpec

IMAGE_NAME = "train"
BASE_TORCH = "base"
"""The variant of an image that uses its base's own PyTorch: unknown."""
CONDA_TORCH = "conda"
"""The variant of an image whose PyTorch conda chooses: unknown."""
BASE_NAME = "base"
"""Of a base that the user's Dockerfile makes; it stays in the engine."""
DEPENDENCIES_NAME = "dependencies"
"""Separate from the image's repository: dependencies change rarely, are large, and should be kept longer."""


def plan_image(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> Image:
    """Return the image of a run.

    A tag is a hash of the image's content, so equal content has the same tag wherever it is built. Wheel and platform
    depend on the job's machine, never on the build host.
    """
    platform = f"linux/{chosen.machine.arch if chosen.machine else 'amd64'}"
    torch = torch_of(spec, catalog, context, chosen)
    wheel = torch.build if torch else spec.image.wheel or chosen.gpu.wheel
    if context.packages.tool == "conda" and torch is None:
        wheel = context.packages.index_build or CONDA_TORCH
    if spec.run.node == "append" and spec.image.uri:
        return with_node(spec.image.uri, image_repository(spec, context), platform, context)
    existing = spec.image.uri
    location = image_repository(spec, context)
    base = spec.image.base or context.base
    if spec.image.dockerfile:
        base = f"{location}/{BASE_NAME}:{json_digest((context.own_base.digest, platform), 16)}"
    recipe = recipe_of(spec, catalog, context, torch, wheel)
    text = dockerfile(recipe) if recipe else ""
    # The tag covers the recipe with its locks, or the text made for this spec, and all that goes into it.
    made_from = (text, context.locks.digest) if text else (context.recipe.digest,)
    files = (context.requirements.digest, context.torch.digest)
    dependencies = json_digest((*made_from, base, platform, wheel, *files), 16)
    return Image(
        uri=existing or f"{location}/{IMAGE_NAME}:{image_tag(context, dependencies)}",
        pinned=existing is not None,
        dependencies="" if existing else f"{location}/{DEPENDENCIES_NAME}:{dependencies}",
        base="" if existing else base,
        platform=platform,
        wheel=BASE_TORCH if recipe and recipe.torch is None else wheel,
        min_driver=None if recipe and recipe.torch is None else catalog.wheels.get(wheel),
        files=context.code.files,
        size=context.code.size,
        torch=torch or UNSET,
        builds_base=True if spec.image.dockerfile else UNSET,
        build_secrets=spec.image.build_secrets or UNSET,
        dockerfile=text or UNSET,
    )


def with_node(uri: str, location: str, platform: str, context: Context) -> Image:
    """Return an existing image with the node's packages, launch_train and the user's code on top."""
    has_code = "code" if context.code.files else ""
    dependencies = json_digest((context.locks.digest, uri, platform, "append", has_code), 16)
    return Image(
        uri=f"{location}/{IMAGE_NAME}:{image_tag(context, dependencies)}",
        pinned=False,
        dependencies=f"{location}/{DEPENDENCIES_NAME}:{dependencies}",
        base=uri,
        platform=platform,
        wheel=BASE_TORCH,
        min_driver=None,
        files=context.code.files,
        size=context.code.size,
        appends_node=True,
    )


def image_repository(spec: JobSpec, context: Context) -> str:
    """Return the image's repository. `launch local` needs no project, so it has its own name.

    A domain-scoped project (example.com:my-project) becomes two path segments.
    """
    if spec.image.repository:
        host, _, path = spec.image.repository.partition("/")
        return f"{host}/{path.replace(':', '/') if host.endswith('.pkg.dev') else path}"
    return "localhost/launch" if context.target == "local" else names.default_repository(context.project)


def image_tag(context: Context, dependencies: str) -> str:
    """Return 16 hex digits over the dependencies' tag, launch_train, the user's code and its projects' metadata."""
    installed = (context.installed.digest,) if context.installed.digest else ()
    return json_digest((dependencies, context.trainer.digest, context.code.digest, *installed), 16)


OLDEST_PYTHON = (3, 10)
"""For launch_train.node."""


def check_image_contents(
    spec: JobSpec, catalog: Catalog, chosen: Chosen, image: Image, contents: ImageContents, packages: Packages
) -> None:
    """Check an image that launch did not build, or the base whose PyTorch an image uses, with the `packages` of
    image.requirements. What is unknown is not checked.

    Raises PlanRefused: it is for another processor or GPU, or lacks what starts the program.
    """
    field = "image.uri" if spec.image.uri else "image.base"
    name = spec.image.uri or spec.image.base or ""
    if contents.platform != image.platform:
        problem = f"{field}: {name} is for {contents.platform}, but {chosen.gpu.name} is {image.platform}"
        raise PlanRefused(problem, "Use an image for that platform.", field=field)
    if why := cuda_problem(catalog, chosen.gpu, contents.build, contents.torch):
        raise PlanRefused(f"{field}: {name}: {why}", "Use an image with another CUDA, or another GPU.", field=field)
    torch = first(packages, "torch")
    if torch and contents.torch and not image.pinned and not allowed(torch, (contents.torch,), prereleases=True):
        raise PlanRefused(
            f"{torch.where}: {torch.text}: the base's own PyTorch is used, and {name} has {contents.torch}",
            "Remove torch from the requirements, or choose a base without PyTorch.",
            field="image.requirements",
        )
    if spec.run.node == "none":
        return
    if contents.python and tuple(map(int, contents.python.split("."))) < OLDEST_PYTHON:
        raise PlanRefused(
            f"{field}: {name} has Python {contents.python}; launch's node needs 3.10 or later",
            "Install another Python (image.base and image.python: 3.12), or start the image without the node: "
            "run.node: none",
            field=field,
        )
    if spec.image.uri and spec.run.node is None and contents.has_node is False:
        raise PlanRefused(
            f"image.uri: {name} does not contain launch's node, which starts the program",
            "Add it to the image (--set run.node=append), or start the image's own entrypoint (--set run.node=none).",
            field="image.uri",
        )
