"""Baseline of `benchmarks.startup`: a Typer command with two parameters that reads a YAML file and prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bare(spec: Path, name: Annotated[str, typer.Option("--name", help="Printed first.")] = "") -> None:
    """Read a YAML file and print it."""
    import yaml

    print(name, yaml.safe_load(spec.read_bytes()))


if __name__ == "__main__":
    app()
