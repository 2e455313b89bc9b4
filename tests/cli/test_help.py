"""The help of every command: grouped options, 80 columns, two examples that parse."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from launcher.cli.app import app
from launcher.cli.examples import EXAMPLES
from launcher.cli.help_page import COMMON, GROUPS, RUN, WHERE
from launcher.cli.lazy_commands import COMMANDS, VM_COMMANDS
from tests.command import launch

PATHS = ("", *COMMANDS, *(f"vm {name}" for name in VM_COMMANDS))


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines below each heading, `Examples:` for instance."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z].*:", line):
            found[line[:-1]] = []
        elif line and found:
            found[list(found)[-1]].append(line)
    return found


def command(path: str) -> Any:
    """Return the command as Typer has it."""
    found: Any = typer.main.get_command(app)
    for name in path.split():
        found = found.get_command(typer.Context(found), name)
    return found.get_command(typer.Context(found), "make") if path == "vm" else found


def test_every_command_has_examples() -> None:
    assert set(PATHS) == set(EXAMPLES)


@pytest.mark.parametrize("path", PATHS)
def test_the_help_page(path: str) -> None:
    ran = launch(*path.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    listed_as = VM_COMMANDS.get(path.removeprefix("vm ")) if " " in path else COMMANDS.get(path)
    assert path in ("", "vm") or listed_as == command(path).get_short_help_str(80), "the table of commands repeats it"
    assert max(map(len, ran.out.splitlines())) <= 80
    shown = sections(ran.out)
    assert [*shown][-1] == "Examples"
    assert [line.strip() for line in shown["Examples"]] == [*EXAMPLES[path]]
    assert [name for name in shown if name in GROUPS] == [name for name in GROUPS if name in shown], "their order"
    listed = " ".join(line.split("  ")[1] for name in GROUPS for line in shown.get(name, ()) if line.startswith("  -"))
    for param in command(path).params:
        if param.param_type_name == "option" and not param.hidden:
            assert param.rich_help_panel in GROUPS, param.name
            assert max(param.opts, key=len) in re.split(r"[ ,]+", listed), param.name
        if "--last" in param.opts:
            assert param.rich_help_panel == (RUN if "--resume" in listed else WHERE), "beside what names the run"
    assert "Options" not in shown
    assert any("--help" in line for line in shown[COMMON])


def test_the_commands_are_in_groups() -> None:
    """A newcomer finds what to start with, what runs a job, what looks at one, the VMs, and the project."""
    shown = sections(launch("--help").out)
    groups = {name: [line.split()[0] for line in shown[name] if line[2] != " "] for name in [*shown][:-2]}
    assert [*groups] == ["Get started", "Run jobs", "Inspect runs", "VMs", "Project"]
    assert groups["Get started"][0] == "init"
    assert {"vertex", "local", "sweep"} <= {*groups["Run jobs"]}
    assert {"status", "logs", "report"} <= {*groups["Inspect runs"]}
    assert groups["VMs"] == ["vm", "ssh", "push-code"]
    assert {"doctor", "setup"} <= {*groups["Project"]}
    assert [name for names in groups.values() for name in names] == [*COMMANDS]


@pytest.mark.parametrize(("path", "line"), [(path, line) for path, lines in EXAMPLES.items() for line in lines])
def test_an_example_parses(path: str, line: str) -> None:
    """Typer knows its options, and takes its values and arguments."""
    assert len(line) <= 78
    program, *words = shlex.split(line.partition(" > ")[0])
    assert program == "launch"
    group: Any = typer.main.get_command(app)
    context = group.make_context("launch", words)
    name, found, rest = group.resolve_command(context, words)
    if name == "vm":
        context = found.make_context(name, rest, parent=context)
        words = [*context._protected_args, *context.args]
        name, found, rest = found.resolve_command(context, words)
    assert found.make_context(name, rest, parent=context).params is not None


def test_a_wrong_example_would_not_parse() -> None:
    with pytest.raises(Exception, match="--gpu"):
        test_an_example_parses("vertex", "launch vertex --gpuz 2")
    with pytest.raises(Exception, match="not a valid int"):
        test_an_example_parses("vm list", "launch vm --gpus two")
