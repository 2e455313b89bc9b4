"""Format checks as text: a line each with its sign, and the commands that fix it, in 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from launcher.project.model import Check

WIDTH: Final = 80
LABEL: Final = 14
"""Columns of sign and name."""
SIGNS: Final = {"ok": "✓", "warning": "!", "failed": "✗", "unknown": "?"}
COMMAND: Final = re.compile(r"(gcloud|launch|pip|docker|sudo|nvidia-smi|unset|export|du) |RANGE=")
WORD: Final = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def lines(checks: Iterable[Check]) -> Iterator[str]:
    """Yield the lines of all checks. Equal findings of several placements are one."""
    groups: dict[str, list[Check]] = {}
    for one in checks:
        text, fix = ((part.replace(one.place, "") if one.place else part) for part in (one.text, one.fix))
        groups.setdefault(f"{one.status} {one.name} {text} {fix}", []).append(one)
    for first, *others in groups.values():
        more = f" (also: {', '.join(dict.fromkeys(one.place for one in others))})" if others else ""
        yield from line_of(first, more)


def line_of(one: Check, more: str = "") -> Iterator[str]:
    """Yield one check, wrapped beside its name, and its fix."""
    wrapped = textwrap.wrap(one.text + more, WIDTH - LABEL, break_on_hyphens=False, break_long_words=False) or [""]
    yield f"{SIGNS[one.status]} {one.name:<{LABEL - 3}} {wrapped[0]}"
    for text in wrapped[1:]:
        yield " " * LABEL + text
    if one.status != "ok":
        for command in one.fix.splitlines():
            yield from (f"    {part}" for part in shell_lines(command, WIDTH - 4))


def shell_lines(command: str, width: int) -> list[str]:
    """Return a command in lines of at most `width` columns, continued by backslashes where it is one; other text is
    wrapped."""
    if not COMMAND.match(command):
        return textwrap.wrap(command, width, break_on_hyphens=False, break_long_words=False) or [""]
    rows = [""]
    for word in WORD.findall(command):
        longer = f"{rows[-1]} {word}" if rows[-1].strip() else rows[-1] + word
        if len(longer) + 2 > width and rows[-1].strip():
            rows[-1] += " \\"
            longer = f"    {word}"
            rows.append(longer)
        rows[-1] = longer
    return rows


def summary(checks: Sequence[Check]) -> str:
    """Return `1 problem, 2 warnings, 3 not checked`; empty if every check passed."""
    from launcher.text import plural

    counts = {status: sum(one.status == status for one in checks) for status in SIGNS}
    parts = [
        plural(counts["failed"], "problem") if counts["failed"] else "",
        plural(counts["warning"], "warning") if counts["warning"] else "",
        f"{counts['unknown']} not checked" if counts["unknown"] else "",
    ]
    return ", ".join(filter(None, parts))


def data(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """Return the checks for scripts (docs/output.md)."""
    found: list[dict[str, Any]] = msgspec.to_builtins(list(checks))
    return found
