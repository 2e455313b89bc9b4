"""The order of the commands, and `launch vm` as a command and a group in one: `launch vm --gpus 2` makes a VM, `launch
vm stop dev` stops one. (click-default-group does that for click's classes; Typer has its own copy of them.)"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

MAKE = "make"
"""The command that is meant where no other is named. A spec file called like one is ./list."""


class Commands(TyperGroup):
    """In the order in which they are needed: Typer puts groups behind commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """`vm` stands beside `vertex`."""
        names = [name for name in super().list_commands(ctx) if name != "vm"]
        return [names[0], "vm", *names[1:]]


class Make(TyperCommand):
    """`launch vm` itself: usage doesn't name it otherwise."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """In the place of the group's own context."""
        return super().make_context(parent.info_name, args, parent=parent.parent, **extra)


class VmGroup(TyperGroup):
    """Whatever doesn't begin with a command's name is for `make`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with the command that they leave out."""
        if args[:1] and (args[0] in self.commands or args[0] in ctx.help_option_names):
            return super().parse_args(ctx, args)
        self.refuse_typo(args)
        return super().parse_args(ctx, [MAKE, *args])

    def refuse_typo(self, args: list[str]) -> None:
        """Raises UsageError: what stands where a spec may is no file, and nearly a command."""
        from difflib import get_close_matches
        from pathlib import Path

        from launcher.errors import UsageError

        others = [name for name in self.commands if name != MAKE]
        near = get_close_matches(args[0], others, n=1) if args and not Path(args[0]).exists() else []
        if near:
            raise UsageError(f"launch vm has no command {args[0]!r}", f"Did you mean launch vm {near[0]}?")

    def get_help(self, ctx: Any) -> str:
        """The help of `make`, then the other commands."""
        make = self.commands[MAKE]
        shown = make.get_help(type(ctx)(make, info_name=ctx.info_name, parent=ctx.parent))
        width = max(map(len, self.commands)) + 2
        others = [
            f"  {name:<{width}}{command.get_short_help_str(76 - width)}"
            for name, command in self.commands.items()
            if name != MAKE
        ]
        return "\n".join([shown, "", "Commands (launch vm COMMAND --help):", *others])
