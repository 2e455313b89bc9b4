"""The commands, each loaded when it is asked for, and `launch vm` as a command and a group in one: `launch vm --gpus 2`
makes a VM, `launch vm stop dev` stops one. (click-default-group does that for click's classes; Typer has its own copy
of them.)"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

MAKE = "make"
"""The command that is meant where no other is named. A spec file called like one is ./list."""

NAMES = (
    *("vertex", "vm", "ssh", "push-code", "local", "status", "follow", "logs", "metrics", "cancel", "bench", "build"),
    *("push", "init", "schema", "selftest"),
)
"""In the order in which they are needed. `push-code` is the function push_code of push_code.py here."""

PLANNED = ("vertex", "vm", "local")
"""Their --dry-run works on Windows."""
FILES_ONLY = ("init", "schema")
"""They work on Windows."""

VM = ("list", "status", "stop", "start", "extend", "delete", "code")
"""`launch vm list` is the function vm_list of vm_list.py."""

# Plain help and errors: rich costs 70 ms of CPU, as much as everything else of a start (benchmarks/startup.py).
PLAIN: Final[dict[str, Any]] = {
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}


class Loaded(Mapping[str, Any]):
    """Commands by name. Typer takes a millisecond to make one of its function, and there are two dozen."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError: there is no such command."""
        if name not in NAMES:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = vm_group() if name == "vm" else single(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


def single(name: str) -> Any:
    """A command that is no group."""
    made = typer.Typer(**PLAIN)
    made.command(name)(function(name))
    return typer.main.get_command(made)


def vm_group() -> Any:
    """`launch vm` with its commands."""
    made = typer.Typer(name="vm", cls=VmGroup, help="A VM with GPUs: to work on, or one that trains.", **PLAIN)
    made.command(MAKE, cls=Make)(function("vm"))
    for name in VM:
        made.command(name)(function(f"vm-{name}"))
    return typer.main.get_command(made)


def function(name: str) -> Callable[..., Any]:
    """Of the file with its name: push_code of push_code.py for `push-code`."""
    own = name.replace("-", "_")
    found: Callable[..., Any] = getattr(import_module(f"launcher.cli.{own}"), own)
    return found


class Commands(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Loaded()  # type: ignore[assignment]  # Typer only reads it

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the whole command line. Raises UsageError: a value in it is empty, or it does not work on Windows."""
        refuse_empty(args)
        if sys.platform == "win32":
            refuse_on_windows(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """In our order: Typer puts groups behind commands."""
        return list(NAMES)


def refuse_empty(args: Sequence[str]) -> None:
    """Refuse empty values, which an unset shell variable leaves: `--type "$GPU"`. What follows -- is not launch's.
    Raises UsageError."""
    from launcher.errors import UsageError

    own = args[: args.index("--")] if "--" in args else args
    for before, word in pairwise(["", *own]):
        if not word or (word.startswith("--") and word.endswith("=") and word.count("=") == 1):
            what = before if not word and before.startswith("-") else word.rstrip("=") or "an argument"
            raise UsageError(f"{what} is empty", "Give it a value, or leave it out.")


def refuse_on_windows(args: Sequence[str]) -> None:
    """Refuse what needs POSIX (file locks, process groups, ssh). Raises UsageError."""
    from launcher.errors import UsageError

    own = args[: args.index("--")] if "--" in args else args
    name = next((word for word in own if not word.startswith("-")), "")
    works = {"-h", "--help", *(["--dry-run"] if name in PLANNED else [])}
    if name in NAMES and name not in FILES_ONLY and works.isdisjoint(own):
        planned = "\nOr add --dry-run: Windows can plan a job." if name in PLANNED else ""
        raise UsageError(
            f"launch {name} needs Linux or macOS; this is Windows",
            f"Run it in WSL (wsl --install), with launch installed there.{planned}",
        )


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
