"""`launch estimate`: does it fit, how fast is it, what does it cost."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.help_page import MACHINE, option
from launcher.cli.options import Output, OutputFormat, SpecFile, flags_of
from launcher.errors import UsageError


def estimate(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    vram: Annotated[
        str | None,
        option(MACHINE, "--vram", help="Show the largest models for this GPU memory.", metavar="24GB"),
    ] = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Estimate a training run: GPU memory, speed, time and cost.

    Sends no request. Uses formulas for the built-in models and the known types of hf:…. Builds a custom model without
    allocating its tensors, in a separate process with limits on memory and time.
    """
    import msgspec

    from launcher.cli.ui import estimate_page as ui
    from launcher.cli.ui.documents import printed

    flags = flags_of(ctx)
    if vram is not None:
        from launcher.cli.options import words
        from launcher.plan.memory.largest import largest_models, memory_bytes

        if spec is not None or words(flags):
            raise UsageError("--vram cannot be combined with a spec or its flags", "Remove one of them.")
        rows = largest_models(memory_bytes(vram))
        if output_format is Output.text:
            print("\n".join(ui.largest_page(vram, rows)))
        else:
            printed([row._asdict() for row in rows], output_format)
        return
    from launcher.api.estimating import estimate_spec
    from launcher.cli.flows.plan import gather

    found = estimate_spec(gather("vertex", spec, flags, project_id="unknown"))
    if output_format is Output.text:
        print("\n".join(ui.page(found)))
    else:
        printed(msgspec.to_builtins(found), output_format)
