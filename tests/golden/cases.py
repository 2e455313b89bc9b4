"""Which dry runs are recorded, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.command import SPECS, launch, steady

FOLDER = Path(__file__).parent
SCRIPT = "#!/bin/bash (launcher/startup.sh)"


class Case(NamedTuple):
    """One recorded dry run."""

    file: str
    argv: tuple[str, ...]


def cases() -> list[Case]:
    """The page, the plan and the YAML of every spec in job_specs/, and of the built-in default; and the page of
    torchtitan's, which no test runs."""
    found = []
    for spec in sorted(SPECS.glob("*.yaml")):
        for output, ending in (("text", "txt"), ("json", "json"), ("yaml", "yaml")):
            command = (*target(spec.stem), f"job_specs/{spec.name}")
            found.append(Case(f"{spec.stem}.{ending}", (*command, "--dry-run", "-o", output)))
    titan = ("vertex", "job_specs/frameworks/torchtitan/job.yaml", "--dry-run")
    found.append(Case("torchtitan.txt", titan))
    default = ("vertex", "--gpus", "2", "--type", "h100", "--dry-run")
    return [*found, Case("no-spec.txt", default), Case("no-spec.json", (*default, "-o", "json"))]


def target(stem: str) -> tuple[str, ...]:
    """The command that a spec is for, by its name."""
    if stem == "quickstart":
        return ("local", "--output", "/runs")
    if stem.startswith("vm-"):
        return ("vm", "--run") if "train" in stem else ("vm",)
    return ("vertex",)


def recorded(case: Case) -> str:
    """What the command prints now.

    Raises:
        AssertionError: it doesn't end well.
    """
    ran = launch(*case.argv)
    assert ran.code == 0, f"launch {' '.join(case.argv)}\n{ran.shown}"
    return without_script(steady(ran.out))


def without_script(text: str) -> str:
    """`text` without the startup script, which is the same in each and has tests of its own (tests/startup)."""
    block = re.sub(r"(?m)(?<=key: startup-script\n    value: )\|\n(      .*\n|\n)*", f'"{SCRIPT}"\n', text)
    return re.sub(r'(?<="key": "startup-script",\n)( *"value": )"#!/bin/bash.*"', rf'\1"{SCRIPT}"', block)
