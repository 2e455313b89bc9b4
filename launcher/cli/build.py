"""`launch build`: the container image, without an engine where that is possible."""

from __future__ import annotations

from launcher.cli.images import BuilderFlag, CreateRepository
from launcher.cli.options import Flags, Output, OutputFormat, SpecFile, with_flags


@with_flags
def build(
    spec: SpecFile = None,
    *,
    flags: Flags,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Build the training image.

    When only code has changed, its layer is appended in the registry, and no Docker engine is needed.
    """
    from launcher.apply import images
    from launcher.cli.images import run

    run(images.build, spec, flags, builder, create_repository, output_format)
