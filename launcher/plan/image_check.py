"""Compare what an image contains with the machine and with what its program needs. Pure."""

from __future__ import annotations

from launcher.catalog import Catalog
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Image, ImageContents, Packages
from launcher.plan.torch_build import allowed, cuda_problem, first
from launcher.spec.models import JobSpec

OLDEST_PYTHON = (3, 10)
"""For launch_train.node."""


def check_image_contents(
    spec: JobSpec, catalog: Catalog, chosen: Chosen, image: Image, contents: ImageContents, packages: Packages
) -> None:
    """Check an image that launch did not build, or the base whose PyTorch an image uses, with the `packages` of
    image.requirements. What is unknown is not checked.

    Raises:
        PlanRefused: it is for another processor or GPU, or lacks what starts the program.
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
