"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher import __version__
from launcher.cli.commands import Commands

app = typer.Typer(
    name="launch",
    cls=Commands,
    help="One YAML spec and one command for a multi-GPU training run on Google Cloud.",
    no_args_is_help=True,
    # Plain help and errors: rich costs 70 ms of CPU, as much as everything else of a start (benchmarks/startup.py).
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """One YAML spec and one command for a multi-GPU training run on Google Cloud."""
