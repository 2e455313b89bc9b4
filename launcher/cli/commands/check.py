"""`launch check`: dry-run specs offline, for CI and pre-commit."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from launcher.cli.help_page import OUTPUT, RUN, WHERE, option
from launcher.cli.options import Output, OutputFormat
from launcher.errors import LaunchError, PlanRefused, UsageError
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.inputs.checking import CheckedSpec
    from launcher.plan.model import Target


class On(StrEnum):
    """What a spec runs on."""

    vertex = "vertex"
    vm = "vm"
    local = "local"


class TextFormat(StrEnum):
    """The form of the text output."""

    text = "text"
    github = "github"


def check(
    specs: Annotated[
        list[Path] | None, typer.Argument(metavar="[SPECS]", help="Spec files and folders; default: this folder.")
    ] = None,
    *,
    target: Annotated[
        On | None, option(RUN, "--target", help="What to plan for; default: what each spec can run on.")
    ] = None,
    project: Annotated[
        str | None,
        option(WHERE, "--project", help="Plan for this project; default: gcloud's.", metavar="PROJECT"),
    ] = None,
    form: Annotated[TextFormat, option(OUTPUT, "--format", help="github: also print annotations at file and line.")] = (
        TextFormat.text
    ),
    against: Annotated[
        str | None,
        option(OUTPUT, "--against", help="Print what changed since a git commit, as Markdown.", metavar="REF"),
    ] = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Dry-run specs offline.

    Prints a line for each spec: its target and the upper bound of its cost, or why it is refused. Nothing is sent.
    Exits with 0 if all specs pass, else with 2.
    """
    if form is TextFormat.github and output_format is not Output.text:
        raise UsageError(f"--format github cannot be combined with -o {output_format}", "Remove one of them.")
    from launcher.cli.ui.check_page import log_line
    from launcher.cli.ui.plan_page import printable

    paths, on = specs or [Path()], cast("Target | None", target)
    shown = log_line if form is TextFormat.github else printable
    try:
        if against is not None:
            show_changes(paths, against, on, project, output_format, shown)
        else:
            show_checked(paths, on, project, output_format, shown)
    except LaunchError as error:
        if form is TextFormat.github:
            error.problem, error.hint = (
                "\n".join(map(log_line, text.split("\n"))) for text in (error.problem, error.hint)
            )
        raise


def show_checked(
    paths: list[Path], target: Target | None, project: str | None, output_format: Output, shown: Callable[[str], str]
) -> None:
    """Print the specs and what is wrong with them, as `shown` returns each line. Raises PlanRefused."""
    from launcher.cli.ui.check_page import annotation_lines, check_data, check_lines, log_line
    from launcher.cli.ui.documents import printed
    from launcher.inputs.checking import check_specs, find_specs

    files = find_specs(paths)
    checked = check_specs(files.specs, target=target, project=project)
    error = specs_refusal(checked)
    if output_format is not Output.text:
        printed(check_data(checked, files.other_files), output_format, error)
    else:
        for line in check_lines(checked, files.other_files):
            print(shown(line))
        for line in annotation_lines(checked) if shown is log_line else ():
            print(line)
    if error:
        raise error


def show_changes(
    paths: list[Path],
    against: str,
    target: Target | None,
    project: str | None,
    output_format: Output,
    shown: Callable[[str], str],
) -> None:
    """Print what changed since a commit. Raises PlanRefused: a spec of the working tree is refused."""
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.spec_changes import changes_data, markdown
    from launcher.inputs.checking import compare_specs

    changes = compare_specs(paths, against, target=target, project=project)
    error = specs_refusal([change.after for change in changes if change.after])
    if output_format is not Output.text:
        printed(changes_data(changes, against), output_format, error)
    else:
        print("\n".join(map(shown, markdown(changes, against))))
    if error:
        raise error


def specs_refusal(checked: list[CheckedSpec]) -> LaunchError | None:
    """Return the error of the command if specs are refused."""
    count = sum(spec.plan is None for spec in checked)
    return PlanRefused(f"{count} of {plural(len(checked), 'spec')} refused; see above") if count else None
