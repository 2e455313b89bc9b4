"""`launch push`: the container image, in the registry."""

from __future__ import annotations

from launcher.cli.images import BuilderFlag, CreateRepository
from launcher.cli.options import Flags, Output, OutputFormat, SpecFile, with_flags


@with_flags
def push(
    spec: SpecFile = None,
    *,
    flags: Flags,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Put the training image into the registry.

    Built only if its content is new; the digest is printed.
    """
    from launcher.apply import images
    from launcher.cli.images import run

    run(images.push, spec, flags, builder, create_repository, output_format)
