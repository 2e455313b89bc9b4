"""Format checks as text in 80 columns: a line each with its sign and the commands that fix it; quotas as a table."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from launcher.project.checks import units_text
from launcher.project.model import Check
from launcher.text import plural

WIDTH: Final = 80
LABEL: Final = 14
"""Columns of sign and name."""
VERDICTS: Final = {"ok": "fits", "warning": "used up", "failed": "too low", "unknown": "unknown"}
"""Of a quota that a job needs."""
SIGNS: Final = {"ok": "✓", "warning": "!", "failed": "✗", "unknown": "?"}
COMMAND: Final = re.compile(r"(gcloud|launch|pip|docker|sudo|nvidia-smi|unset|export|du) |RANGE=")
WORD: Final = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def lines(checks: Iterable[Check]) -> Iterator[str]:
    """Yield the lines of all checks. Equal findings of several placements are one."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        text, fix = ((part.replace(check.place, "") if check.place else part) for part in (check.text, check.fix))
        groups.setdefault(f"{check.status} {check.name} {text} {fix}", []).append(check)
    table = quota_table([group for group in groups.values() if group[0].quotas])
    table_lines = iter(table)
    for first, *others in groups.values():
        if table and first.quotas:
            yield from table_lines  # all of them at the first quota, which is the worst
        else:
            more = f" (also: {', '.join(dict.fromkeys(check.place for check in others))})" if others else ""
            yield from line_of(first, more)


def quota_table(groups: Sequence[Sequence[Check]]) -> list[str]:
    """Return a table of all quotas, and below it the fix of each group; empty for a single row, which is a sentence."""
    regions: dict[tuple[str, ...], dict[str, None]] = {}
    fixes: dict[tuple[str, ...], None] = {}
    for group in groups:
        reasons = []
        for check in group:
            for quota in check.quotas:
                name = re.sub(r"custom_model_training_|nvidia_|_gpus$", "", quota.metric)  # what all of them share
                cells: tuple[str, ...] = (f"{SIGNS[check.status]} {name}", *map(units_text, (quota.limit, quota.used)))
                if quota.needed is not None:
                    cells += (f"{quota.needed}", VERDICTS[check.status])
                regions.setdefault(cells, {})[quota.region or "all regions"] = None
                if quota.no_increase:
                    reasons = [f"    {name}: can't be raised by command: {quota.no_increase}"]
        commands = [shell_lines(command, WIDTH - 4) for command in group[0].fix.splitlines()]
        fixes[*reasons, *(f"    {line}" for line in itertools.chain(*commands))] = None
    if len(regions) < 2:
        return []
    heads = ("  quota", "limit", "used", "needed", "verdict")[: max(map(len, regions))]
    widths = [max(map(len, column)) for column in zip(heads, *regions, strict=True)]
    table: list[str] = []
    for cells, places in [(heads, ["region"]), *regions.items()]:
        aligned = (f"{cells[n]:{'<' if n in (0, 4) else '>'}{width}}  " for n, width in enumerate(widths))
        start = "".join(aligned)
        wrapped = textwrap.wrap(", ".join(places), WIDTH - len(start), break_on_hyphens=False, break_long_words=False)
        table += [start + wrapped[0], *(" " * len(start) + line for line in wrapped[1:])]
    return [*table, *itertools.chain(*fixes)]


def line_of(check: Check, more: str = "") -> Iterator[str]:
    """Yield one check, wrapped beside its name, and its fix."""
    wrapped = textwrap.wrap(check.text + more, WIDTH - LABEL, break_on_hyphens=False, break_long_words=False) or [""]
    yield f"{SIGNS[check.status]} {check.name:<{LABEL - 3}} {wrapped[0]}"
    for text in wrapped[1:]:
        yield " " * LABEL + text
    if check.status != "ok":
        for command in check.fix.splitlines():
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
    counts = {status: sum(check.status == status for check in checks) for status in SIGNS}
    parts = [
        plural(counts["failed"], "problem") if counts["failed"] else "",
        plural(counts["warning"], "warning") if counts["warning"] else "",
        f"{counts['unknown']} not checked" if counts["unknown"] else "",
    ]
    return ", ".join(filter(None, parts))


def data(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """Return the checks for scripts (docs/output.md)."""
    documents = msgspec.to_builtins(list(checks))
    return [{key: value for key, value in document.items() if key != "quotas"} for document in documents]
