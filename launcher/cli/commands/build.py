"""`launch build` and `launch push`: build and push the training image."""

from __future__ import annotations

import typer

from launcher.cli.options import BuilderFlag, CreateRepository, Output, OutputFormat, SpecFile, flags_of


def build(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Build the training image.

    If only code has changed, its layer is appended in the registry without a Docker engine.
    """
    from launcher.cli.flows.image import build_image
    from launcher.images import pipeline

    build_image(pipeline.build, spec, flags_of(ctx), builder, create_repository, output_format)


def push(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Push the training image to the registry.

    Builds it only if its content is new. Prints the digest.
    """
    from launcher.cli.flows.image import build_image
    from launcher.images import pipeline

    build_image(pipeline.push, spec, flags_of(ctx), builder, create_repository, output_format)
