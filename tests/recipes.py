"""Commands with their recorded output in Markdown.

A block that starts with ```console holds commands (`$ launch …`) and below each what it printed. They are run again
and compared; a long line of a command may be continued with a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.command import ROOT, launch, shell, steady

BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
STEP = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


class Step(NamedTuple):
    """A command as it is written, and what stands below it."""

    command: str
    output: str


def pages() -> list[Path]:
    """All pages with recorded commands."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def steps(text: str) -> Iterator[Step]:
    """The recorded steps of a page."""
    for block in BLOCK.finditer(text):
        for step in STEP.finditer(block[1]):
            yield Step(step[1], step[2])


def run(command: str) -> str:
    """What a terminal shows now; an exit code other than 0 is shown as `echo $?` would."""
    ran = launch(*shell(command.replace("\\\n", " ")))
    shown = steady(ran.shown)
    text = shown if shown.endswith("\n") or not shown else shown + "\n"
    return text + (f"[exit code {ran.code}]\n" if ran.code else "")


def renewed(text: str) -> str:
    """The page with every output as it is now."""

    def block(match: re.Match[str]) -> str:
        return "```console\n" + STEP.sub(lambda step: f"$ {step[1]}\n{run(step[1])}", match[1]) + "```"

    return BLOCK.sub(block, text)
