"""The help of a command: options in groups, then two examples, in 80 columns.

Plain text: rich's panels cost 70 ms of CPU, as much as the rest of a start (benchmarks/startup.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import typer
from typer.core import TyperCommand

from launcher.cli.style import styled

RUN: Final = "What to run"
MACHINE: Final = "Machine"
WHERE: Final = "Where"
COST: Final = "Time and cost"
CONNECTION: Final = "Connection"
OUTPUT: Final = "Output"
COMMON: Final = "Common options"
GROUPS: Final = (RUN, MACHINE, WHERE, COST, CONNECTION, OUTPUT, COMMON)
"""In the order of the help. --help is a common option."""
COLUMN: Final = 24
"""Width of the column of flags; the text of longer flags starts on the next line."""


def option(group: str, *flags: str, help: str, **settings: Any) -> Any:  # noqa: A002 -- Typer's name
    return typer.Option(*flags, help=help, rich_help_panel=group, **settings)


class Command(TyperCommand):
    """A command with this help page."""

    def invoke(self, ctx: Any) -> Any:
        """Call the command's function."""
        import_msgspec()
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by group."""
        write_groups(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(ctx, formatter)


def import_msgspec() -> None:
    """Import msgspec without typing_extensions, which it takes only for older Pythons: that is 2 ms of a dry run."""
    if {"msgspec", "typing_extensions"}.isdisjoint(sys.modules):
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # its import fails
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules["typing_extensions"]


def write_groups(params: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write each group of parameters that is not empty, in the order of GROUPS."""
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS)}
    for param in params:
        if (record := param.get_help_record(ctx)) is not None:  # None: hidden
            is_argument = param.param_type_name == "argument"
            groups["Arguments" if is_argument else getattr(param, "rich_help_panel", None) or COMMON].append(record)
    width = max((len(name) for rows in groups.values() for name, _ in rows if len(name) <= COLUMN), default=0)
    for name, rows in groups.items():
        if rows:
            with formatter.section(styled(name, "1")):
                formatter.write_dl([(first.ljust(width), second) for first, second in rows], col_max=width)


def write_examples(ctx: Any, formatter: Any) -> None:
    from launcher.cli.examples import EXAMPLES

    names: list[str] = []  # vm, list for `launch vm list`; none for `launch` itself
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    with formatter.section(styled("Examples", "1")):
        for line in EXAMPLES[" ".join(names)]:
            formatter.write(f"  {line}\n")
