"""The table of commands, and `launch vm`, which is both a command and a group.

`launch vm --gpus 2` creates a VM, `launch vm stop dev` stops one. click-default-group does this for click's classes;
Typer has its own copy of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, ClassVar, Final

import typer
from typer.core import TyperGroup

from launcher.cli.help_page import Command, write_examples, write_groups
from launcher.cli.style import styled

MAKE = "make"
"""The default command of `launch vm`. A spec file with the name of a command is written ./list."""

COMMAND_GROUPS = {
    "Get started": {
        "init": "Write a commented starter spec.",
        "check": "Dry-run specs offline.",
        "estimate": "Estimate a training run: GPU memory, speed, time and cost.",
        "gpus": "List GPUs with memory, speed, regions and prices.",
        "prices": "Show the prices that plans use, or fetch newer ones.",
        "schema": "Print the JSON Schema of a spec, for editors.",
    },
    "Run jobs": {
        "local": "Run a job on this machine as Vertex AI would.",
        "vertex": "Run a training job on Vertex AI.",
        "on": "Run a training job on a machine that you reach by SSH.",
        "slurm": "Run a training job on a Slurm cluster.",
        "sweep": "Run a spec once for each combination of several values.",
        "follow": "Watch a run to its end.",
        "cancel": "Cancel a run or all points of a sweep.",
        "build": "Build the training image.",
        "push": "Push the training image to the registry.",
    },
    "Inspect runs": {
        "runs": "List runs, on this machine and in the cloud.",
        "status": "Show a run or a sweep, or list all runs as `launch runs` does.",
        "watch": "Show one or several runs live, until they end.",
        "logs": "Print the log of a run.",
        "metrics": "Print the metrics of a run, step by step.",
        "report": "Write an HTML report of runs or a sweep.",
        "compare": "Compare two or more runs.",
        "export": "Export a checkpoint's weights for other programs.",
        "move": "Move a run that has ended to another place, to continue it there.",
        "rm": "Delete runs that have ended, or all runs of a sweep.",
    },
    "VMs": {
        "vm": "Create and manage VMs with GPUs.",
        "ssh": "Open a shell on a VM, or run a command there.",
        "push-code": "Copy a folder's code to a VM.",
    },
    "Project": {
        "doctor": "Check this machine and project, and show the fixes.",
        "setup": "Show what a project lacks; --yes creates it.",
        "config": "Print the settings and their origin.",
        "bench": "Measure this machine's compute, memory, links and data loading.",
        "selftest": "Run every feature once in a project and report what works.",
    },
}
"""The commands by heading, with the first line of their help: a command's module is imported only when it runs."""
COMMANDS = {name: text for texts in COMMAND_GROUPS.values() for name, text in texts.items()}
"""`push-code` is the function push_code of commands/push_code.py."""
VM_COMMANDS = {
    "list": "List launch's VMs, in all zones.",
    "status": "Show a VM's state, price, lease and addresses.",
    "stop": "Stop a VM and wait until it has stopped.",
    "start": "Start a stopped VM and wait until it runs.",
    "extend": "Move the end of a VM's lease to a later or earlier time.",
    "delete": "Delete a VM with its disk, and wait until it is deleted.",
    "code": "Add a VM to your ssh configuration by its name.",
}
"""`launch vm list` is the function vm_list of commands/vm/list.py; `launch vm` is vm of commands/vm/create.py."""
MODULES = {"vm": "vm.create", "vm_start": "vm.stop", "push": "build"}
"""The modules of commands whose module has another name."""
PLAIN_WORDS = {
    "Got unexpected extra argument(s)": "unexpected argument",
    "a valid int": "a whole number",
    "a valid float": "a number",
}
"""Typer's words in usage errors, and ours."""
WITH_FLAGS = ("vertex", "vm", "local", "on", "slurm", "sweep", "build", "push", "estimate")
"""Commands with the flags that override the spec."""
PLANNED = ("vertex", "vm", "local", "sweep")
"""Commands whose --dry-run works on Windows."""
PORTABLE = ("gpus", "prices", "estimate", "init", "check", "config", "schema")
"""Commands that work on Windows."""

# Plain help and errors: rich costs 70 ms of CPU, as much as everything else of a start (benchmarks/startup.py).
PLAIN: Final[dict[str, Any]] = {
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}


class LazyGroup(TyperGroup):
    """A group whose subclasses load a command in get_command: building each one takes Typer a millisecond."""

    names: ClassVar[Collection[str]]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.names)


class Commands(LazyGroup):
    """All commands."""

    names = COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None if there is none of that name."""
        if cmd_name not in self.names:
            return None
        return (
            VmGroup(name="vm", help=COMMANDS["vm"], rich_markup_mode=None)
            if cmd_name == "vm"
            else load_command(cmd_name, cmd_name)
        )

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the options of `launch` itself. Raises UsageError."""
        with usage_errors(info_name or "launch"):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse the command's arguments and run it. Raises LaunchError."""
        with usage_errors(f"{ctx.command_path} {(ctx._protected_args or [''])[0]}"):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the whole command line. Raises UsageError: a value is empty, or the command needs POSIX."""
        refuse_empty(args)
        if sys.platform == "win32":
            refuse_on_windows(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; fail with similar names if it is unknown."""
        if args[0] not in self.names:
            from launcher.text import did_you_mean, near

            if close := near(args[0], self.names, most=3):
                ctx.fail(f"No such command {args[0]!r}. {did_you_mean([repr(name) for name in close])}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, texts in COMMAND_GROUPS.items():
            with formatter.section(styled(heading, "1")):
                formatter.write_dl([(f"{name:9}", text) for name, text in texts.items()])
        write_groups(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(ctx, formatter)


@contextmanager
def usage_errors(command: str) -> Iterator[None]:
    """Convert Typer's usage errors to UsageError, so that they are printed like all others. `command` is named where
    Typer's error has no context."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "format_message", None)  # Typer's classes are private
        if message is None or type(error).__name__ == "NoArgsIsHelpError":
            raise
        from launcher.errors import UsageError
        from launcher.text import did_you_mean

        context = getattr(error, "ctx", None)
        command = context.command_path if context else command
        problem, _, hint = message().removesuffix(".").partition(". ")
        for words, plain in PLAIN_WORDS.items():
            problem = problem.replace(words, plain)
        if name := getattr(error, "option_name", "") if type(error).__name__ == "NoSuchOption" else "":
            problem, hint = f"{command} has no option {name}", did_you_mean(getattr(error, "possibilities", None) or ())
        lines = [hint, f"{command} --help"] if hint else [f"{command} --help"]
        raise UsageError(problem[:1].lower() + problem[1:], "\n".join(lines)) from error


@cache
def load_command(name: str, function: str, cls: type[Command] | None = None) -> Any:
    """Import and return the command of a function: push_code of commands/push_code.py for `push-code`."""
    own = function.replace("-", "_")
    module = MODULES.get(own) or own.replace("vm_", "vm.")
    called: Callable[..., Any] = getattr(import_module(f"launcher.cli.commands.{module}"), own)
    if cls is None and function in WITH_FLAGS:
        from launcher.cli.options import FlagsCommand as cls  # noqa: N813 -- `cls` is a variable; a slow import
    group = typer.Typer(**PLAIN)
    group.command(name, cls=cls or Command)(called)
    return typer.main.get_command(group)


def refuse_empty(args: Sequence[str]) -> None:
    """Refuse empty values, as from an unset shell variable: `--type "$GPU"`. Words after -- are not checked.

    Raises UsageError.
    """
    from launcher.errors import UsageError

    own = args[: args.index("--")] if "--" in args else args
    for before, word in pairwise(["", *own]):
        if not word or (word.startswith("--") and word.endswith("=") and word.count("=") == 1):
            what = before if not word and before.startswith("-") else word.rstrip("=") or "an argument"
            raise UsageError(f"{what} is empty", "Set a value or remove it.")


def refuse_on_windows(args: Sequence[str]) -> None:
    """Refuse commands that need POSIX (file locks, process groups, ssh). Raises UsageError."""
    from launcher.errors import UsageError

    own = args[: args.index("--")] if "--" in args else args
    name = next((word for word in own if not word.startswith("-")), "")
    works = {"-h", "--help", *(["--dry-run"] if name in PLANNED else [])}
    if name in COMMANDS and name not in PORTABLE and works.isdisjoint(own):
        planned = "\nOr add --dry-run: Windows can plan a job." if name in PLANNED else ""
        raise UsageError(
            f"launch {name} needs Linux or macOS; this is Windows",
            f"Run it in WSL (wsl --install), with launch installed there.{planned}",
        )


class VmGroup(LazyGroup):
    """`launch vm`. Arguments that do not start with a command's name go to `make`."""

    names = (MAKE, *VM_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None if there is none of that name."""
        if cmd_name == MAKE:
            return load_command(MAKE, "vm", make_command())
        return load_command(cmd_name, f"vm-{cmd_name}") if cmd_name in self.names else None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the default command added.

        Raises UsageError: a spec does not exist, and looks like a misspelled command.
        """
        if args[:1] and (args[0] in self.names or args[0] in ctx.help_option_names):
            return super().parse_args(ctx, args)
        from pathlib import Path

        from launcher.errors import UsageError
        from launcher.text import did_you_mean, near

        close = near(args[0], VM_COMMANDS) if args and not Path(args[0]).exists() else []
        if close:
            raise UsageError(f"launch vm has no command {args[0]!r}", did_you_mean([f"launch vm {close[0]}"]))
        return super().parse_args(ctx, [MAKE, *args])

    def get_help(self, ctx: Any) -> str:
        """Return the help of `make`, which also lists the other commands."""
        make = self.get_command(ctx, MAKE)
        return str(make.get_help(type(ctx)(make, info_name=ctx.info_name, parent=ctx.parent)))


@cache
def make_command() -> type[Command]:
    from launcher.cli.options import FlagsCommand

    class Make(FlagsCommand):
        """The default command; its usage and help show it as the group."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            """Create the context in place of the group's own."""
            return super().make_context(parent.info_name, args, parent=parent.parent, **extra)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write the options, then the group's other commands."""
            super().format_options(ctx, formatter)
            with formatter.section(styled("Commands (launch vm COMMAND --help)", "1")):
                formatter.write_dl([*VM_COMMANDS.items()])

    return Make
