"""`launch push`: the container image, in the registry."""

from __future__ import annotations

import typer

from launcher.cli.flows.image import BuilderFlag, CreateRepository
from launcher.cli.options import Output, OutputFormat, SpecFile, flags_of


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
    from launcher.cli.flows.image import run
    from launcher.images import pipeline

    run(pipeline.push, spec, flags_of(ctx), builder, create_repository, output_format)
