"""`launch build` and `launch push`: build and push the training image."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import typer

from launcher.catalog import load
from launcher.cli.options import BuilderFlag, CreateRepository, Flags, Output, OutputFormat, SpecFile, flags_of, gather
from launcher.cli.ui.documents import printed
from launcher.cli.ui.plan_page import code_text
from launcher.cli.ui.progress_bars import progress, report_to
from launcher.cli.ui.text import LABEL
from launcher.images import pipeline
from launcher.images.pipeline import ImageBuildRequest, ImageResult
from launcher.inputs.gather import Inputs
from launcher.plan.warnings import about_code
from launcher.runs.image import create, image_build_request
from launcher.text import size_text


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
    build_image(pipeline.push, spec, flags_of(ctx), builder, create_repository, output_format)


def build_image(
    make: Any, spec: Path | None, flags: Flags, builder: str, create_repository: bool, output: Output
) -> None:
    """Build or push the image of a spec with `make` and print it. Raises LaunchError."""
    begun = time.monotonic()
    inputs = gather("vertex", spec, flags, image_only=True)
    job = image_build_request(inputs, builder)
    for warning in code_warnings(inputs):
        typer.echo(f"launch: {warning}", err=True)
    with progress() as bars:
        if create_repository:
            create(job, bars.line)
        try:
            result = make(job, os.environ, report_to(bars))
        except KeyboardInterrupt:
            bars.line("interrupted; no incomplete image was published; the same command continues")
            raise
    show_image(job, result, time.monotonic() - begun, output)


def code_warnings(inputs: Inputs) -> tuple[str, ...]:
    """Return the warnings about files that the image will not contain."""
    return tuple(about_code(inputs.spec, load(), inputs.context))


def show_image(build: ImageBuildRequest, result: ImageResult, seconds: float, output: Output) -> None:
    image = build.image
    data = {
        "image": image.uri,
        "reference": result.reference,
        "how": result.how,
        "pushed": result.pushed,
        "sent": result.sent,
        "dependencies": image.dependencies or None,
        "base": result.base or image.base or None,
        "platform": image.platform,
        "wheel": image.wheel,
        "code": {"files": image.files, "bytes": image.size},
    }
    printed(data, output, page=image_lines(build, result, seconds))


def image_lines(build: ImageBuildRequest, result: ImageResult, seconds: float) -> list[str]:
    """Return the result as text."""
    image = build.image
    shown = [f"{'image':{LABEL}}{image.uri}"]
    if "@" in result.reference and result.reference != image.uri:
        shown.append(f"{'digest':{LABEL}}{result.reference.partition('@')[2]}")
    if not image.pinned:
        code = code_text(image) if image.files else "none"
        shown.append(f"{'code':{LABEL}}{code}; {image.platform}, {image.wheel}")
    return [*shown, "", outcome_text(result, seconds)]


def outcome_text(result: ImageResult, seconds: float) -> str:
    """Return in a sentence what was done: built, appended, pulled or nothing."""
    took = f"{seconds:.1f} s"
    start = "The dependency image was built and pushed; t" if result.dependencies else "T"
    return {
        "own": "Nothing to do: the spec names an existing image.",
        "there": f"Nothing to do: the registry already has the image ({took}).",
        "appended": f"{start}he code was appended in the registry: {size_text(result.sent or 0)} uploaded in {took}.",
        "docker": f"Built by the Docker engine{' and pushed' if result.pushed else ''} in {took}."
        + ("" if result.pushed else "\nIt is only on this machine; launch push uploads it."),
        "pulled": f"Pulled in {took}.",
    }[result.how]
