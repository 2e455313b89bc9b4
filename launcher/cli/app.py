"""The root command `launch`."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher import __version__
from launcher.cli.help_page import COMMON, option
from launcher.cli.lazy_commands import PLAIN, Commands

app = typer.Typer(
    name="launch",
    cls=Commands,
    help="One YAML spec and one command for a multi-GPU training run on Google Cloud.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    **PLAIN,
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        option(COMMON, "--version", help="Print the version and exit.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """One YAML spec and one command for a multi-GPU training run on Google Cloud."""
