"""Print checked specs: as a table, as data, and as annotations of GitHub Actions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.cli.ui.text import COMMAND, WIDTH, printable, wrapped
from launcher.inputs.checking import STAND_IN, CheckedSpec, SpecFinding
from launcher.text import plural, usd_text

INDENT = "    "


def check_lines(checked: Sequence[CheckedSpec], others: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each spec, with the problems below it; the warnings too if it is the only one."""
    yield f"{'result':<7}  {'target':<6}  {'at most':>11}  spec"
    for spec in checked:
        count = f" ({plural(len(spec.warnings), 'warning')})" if spec.warnings else ""
        yield f"{result(spec):<7}  {spec.target or '':<6}  {bound_text(spec):>11}  {spec.path}{count}"
        for problem in spec.problems:
            yield from finding_lines(problem)
        for warning in spec.warnings if len(checked) == 1 else ():
            yield from finding_lines(warning, "warning: ")
    yield ""
    refused = sum(spec.plan is None for spec in checked)
    skipped = f"; {plural(len(others), 'other YAML file')} skipped" if others else ""
    yield f"{plural(len(checked), 'spec')}: {len(checked) - refused} pass, {refused} refused{skipped}."
    if any(spec.plan and spec.plan.project == STAND_IN for spec in checked):
        yield f"No project is set; planned for {STAND_IN} (--project sets one)."
    if len(checked) > 1 and any(spec.warnings for spec in checked):
        yield "launch check SPEC shows the warnings of a spec."


def result(spec: CheckedSpec) -> str:
    """Return pass or refused."""
    return "pass" if spec.plan else "refused"


def bound_text(spec: CheckedSpec) -> str:
    """Return the upper bound of the cost; `-` for a run on this machine."""
    if spec.plan is None:
        return ""
    usd = spec.plan.limits.usd_at_most
    return "-" if spec.target == "local" else "unknown" if usd is None else usd_text(usd)


def finding_lines(finding: SpecFinding, label: str = "") -> Iterator[str]:
    """Yield a finding with its position and hint, indented; lines with a command are not wrapped."""
    where = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
    for number, line in enumerate(f"{label}{where}: {finding.text}\n{finding.hint}".rstrip().split("\n")):
        indent = INDENT + "  " * (number > 0)
        lines = [line.strip()] if re.match(COMMAND, line) else wrapped(line, WIDTH - len(indent))
        yield from (f"{indent}{each}" for each in lines)


# --- Data ------------------------------------------------------------------------------------------------------------


def check_data(checked: Sequence[CheckedSpec], others: Sequence[Path]) -> dict[str, Any]:
    """Return the results for scripts (docs/ci.md)."""
    return {"specs": [spec_data(spec) for spec in checked], "skipped": [str(path) for path in others]}


def spec_data(spec: CheckedSpec) -> dict[str, Any]:
    """Return the result of one spec for scripts; costs in USD, null if unknown."""
    plan = spec.plan
    return {
        "spec": spec.path,
        "result": result(spec),
        "target": spec.target,
        "run": plan.run if plan else None,
        "machine": msgspec.to_builtins(plan.machine) if plan else None,
        "machines": msgspec.to_builtins(plan.machines) if plan else None,
        "usd_expected": plan.limits.usd_expected if plan else None,
        "usd_at_most": plan.limits.usd_at_most if plan else None,
        "problems": msgspec.to_builtins(spec.problems),
        "warnings": msgspec.to_builtins(spec.warnings),
    }


# --- GitHub Actions --------------------------------------------------------------------------------------------------


def annotation_lines(checked: Sequence[CheckedSpec]) -> Iterator[str]:
    """Yield a workflow command for each problem and warning.

    Source of the form: GitHub's "Workflow commands for GitHub Actions" and actions/toolkit, core/src/command.ts.
    """
    for spec in checked:
        for kind, findings in (("error", spec.problems), ("warning", spec.warnings)):
            for finding in findings:
                place = f"file={escaped_property(in_repository(finding.file), ':,')},line={finding.line or 1}"
                text = "\n".join(filter(None, (finding.text, finding.hint)))
                yield f"::{kind} {place},title=launch check::{escaped_property(text)}"


def log_line(line: str) -> str:
    """Return a line that GitHub doesn't take for a workflow command: those begin with `::`, or have the older `##[`
    anywhere."""
    return re.sub(r"^(\s*)::", r"\1%3A%3A", printable(line)).replace("##[", "##%5B")


def in_repository(file: str) -> str:
    """Return a path relative to the repository that GitHub checked out, else to the current folder."""
    top = os.path.realpath(os.environ.get("GITHUB_WORKSPACE") or ".")
    path = Path(os.path.realpath(file))
    return path.relative_to(top).as_posix() if path.is_relative_to(top) else file


def escaped_property(text: str, more: str = "") -> str:
    """Escape a text of a workflow command; `more` are the characters that end a property."""
    for char in ("%", "\r", "\n", *more):
        text = text.replace(char, f"%{ord(char):02X}")
    return printable(text)
