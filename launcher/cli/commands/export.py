"""`launch export`: write a checkpoint in a format that other programs load."""

from __future__ import annotations

import gc
from typing import Annotated, Literal

from launcher.cli.flows.find_run import run_folder_of
from launcher.cli.help_page import OUTPUT, RUN, option
from launcher.cli.options import Last, Output, Regions, RunName
from launcher.cli.ui.streams import say
from launcher.errors import UsageError
from launcher.runs.exporting import export_checkpoint
from launcher.text import size_text


def export(
    run: RunName,
    *,
    kind: Annotated[
        Literal["safetensors", "hf", "torch", "dcp"],
        option(OUTPUT, "--format", help="hf: for transformers; dcp: torch.distributed.checkpoint."),
    ],
    step: Annotated[
        str | None,
        option(RUN, "--step", help="The step, or best (lowest held-out loss); default: newest.", metavar="N"),
    ] = None,
    target: Annotated[
        str | None,
        option(
            OUTPUT, "--output", "-o", help="A new folder, here or gs://…; default: ./RUN-step-N-FORMAT.", metavar="DIR"
        ),
    ] = None,
    weights_only: Annotated[
        bool, option(OUTPUT, "--weights-only", help="Omit the optimizer's state (hf, dcp).")
    ] = False,
    tokenizer: Annotated[
        str | None,
        option(OUTPUT, "--tokenizer", help="A tokenizer.json to write next to the weights.", metavar="FILE"),
    ] = None,
    regions: Regions = None,
    last: Last = False,
) -> None:
    """Export a checkpoint's weights for other programs.

    Writes the config next to the weights, and the tokenizer if it is that of bytes or --tokenizer names it. hf loads
    with from_pretrained, torch with torch.load(weights_only=True). hf and dcp also contain the optimizer's state.
    """
    if target in [*Output]:
        raise UsageError(f"-o {target}: -o names the output folder here", f"For a folder of that name: -o ./{target}")
    gc.enable()  # the command handles gigabytes
    wanted = step_number(step)
    name, folder = run_folder_of(run, regions, last=last)
    done = export_checkpoint(
        name, folder, kind, target, step=wanted, weights_only=weights_only, tokenizer=tokenizer, say=say
    )
    for note in done.notes:
        say(note)
    for file, size in done.files.items():
        print(f"{size_text(size):>8}  {done.url}/{file}")


def step_number(text: str | None) -> int | Literal["best"] | None:
    """Return the value of --step. Raises UsageError."""
    if text is None or text == "latest":
        return None
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise UsageError(f"invalid --step {text}", "Use the number of a step, best or latest.")
    return int(text)
