"""`launch estimate`: does it fit, how fast is it, what does it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launch_train.common.config import PRESETS
from launcher.cli.help_page import MACHINE, option
from launcher.cli.options import Output, OutputFormat, flags_of, overrides
from launcher.cli.ui import estimate_page as ui
from launcher.cli.ui.documents import printed
from launcher.errors import UsageError
from launcher.inputs.gather import GatherOptions, gather
from launcher.plan.memory.sizes import FAMILIES
from launcher.spec.reader import Override
from launcher.text import did_you_mean, near


def estimate(
    ctx: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC|MODEL]", help="The job's YAML file, or a model (gpt2-124m, hf:llama …)."),
    ] = None,
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

    flags = flags_of(ctx)
    if vram is not None:
        from launcher.cli.options import flag_words
        from launcher.plan.memory.need import largest_models, memory_bytes

        if spec is not None or flag_words(flags):
            raise UsageError("--vram cannot be combined with a spec or its flags", "Remove one of them.")
        rows = largest_models(memory_bytes(vram))
        printed([row._asdict() for row in rows], output_format, page=ui.largest_page(vram, rows))
        return
    from launcher.inputs.estimating import estimate_spec

    changes, name = overrides(flags), str(spec or "")
    if spec and not spec.exists() and (name.startswith("hf:") or not ("/" in name or spec.suffix)):
        if name not in PRESETS and not name.startswith("hf:"):
            known = [*PRESETS, *(f"hf:{kind}" for kind in FAMILIES)]
            problem = f"{name} is neither a file nor a built-in model"
            raise UsageError(problem, did_you_mean(near(name, known, most=3), f"Models: {', '.join(known)}"))
        tokens = [Override("run.config.data.block_size", 1024, name)] * (name.removeprefix("hf:") in FAMILIES)
        changes, spec = [Override("run.config.model", {"name": name}, name), *tokens, *changes], None
    options = GatherOptions(run_id=flags.run_id, project_id="unknown")
    estimates = estimate_spec(gather("vertex", spec, changes, options))
    if output_format is Output.text:
        print("\n\n".join("\n".join(ui.estimate_lines(estimated)) for estimated in estimates))
    else:
        printed(msgspec.to_builtins(estimates if len(estimates) > 1 else estimates[0]), output_format)
