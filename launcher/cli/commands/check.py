"""`launch check`: dry-run specs offline, for CI and pre-commit."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import typer

from launcher.cli.help_page import OUTPUT, RUN, WHERE, option
from launcher.cli.options import Output, OutputFormat
from launcher.cli.ui.check_page import annotation_lines, check_data, check_lines, log_line
from launcher.cli.ui.documents import printed
from launcher.cli.ui.spec_changes import changes_data, markdown
from launcher.cli.ui.text import printable
from launcher.errors import LaunchError, PlanRefused, UsageError
from launcher.inputs.checking import check_specs, compare_specs, find_specs
from launcher.text import plural


def check(
    specs: Annotated[
        list[Path] | None, typer.Argument(metavar="[SPECS]", help="Spec files and folders; default: this folder.")
    ] = None,
    *,
    target: Annotated[
        Literal["vertex", "vm", "local"] | None,
        option(RUN, "--target", help="What to plan for; default: what each spec can run on."),
    ] = None,
    project: Annotated[
        str | None,
        option(WHERE, "--project", help="Plan for this project; default: gcloud's.", metavar="PROJECT"),
    ] = None,
    form: Annotated[
        Literal["text", "github"],
        option(OUTPUT, "--format", help="github: also print annotations at file and line."),
    ] = "text",
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
    is_github = form == "github"
    if is_github and output_format is not Output.text:
        raise UsageError(f"--format github cannot be combined with -o {output_format}", "Remove one of them.")
    paths = specs or [Path()]
    shown = log_line if is_github else printable
    try:
        if against is not None:
            changes = compare_specs(paths, against, target=target, project=project)
            checked = [change.after for change in changes if change.after]
            data, lines = changes_data(changes, against), chain(map(shown, markdown(changes, against)))
        else:
            files = find_specs(paths)
            checked = check_specs(files.specs, target=target, project=project)
            table = map(shown, check_lines(checked, files.other_files))
            data = check_data(checked, files.other_files)
            lines = chain(table, annotation_lines(checked) if is_github else ())
        count = sum(spec.plan is None for spec in checked)
        error = PlanRefused(f"{count} of {plural(len(checked), 'spec')} refused; see above") if count else None
        printed(data, output_format, error, page=lines)
        if error:
            raise error
    except LaunchError as error:
        if is_github:
            error.problem, error.hint = (
                "\n".join(map(log_line, text.split("\n"))) for text in (error.problem, error.hint)
            )
        raise
