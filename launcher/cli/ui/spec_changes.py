"""Print what changed in specs since a commit: as Markdown for a pull request, and as data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from launcher.cli.ui.check_page import bound_text, spec_data
from launcher.inputs.checking import CheckedSpec, SpecChange
from launcher.plan.changes import Change, PlanChanges
from launcher.text import listed, plural, usd_text

MOST_FIELDS = 50
"""Maximum number of fields of a spec in the Markdown; GitHub accepts comments of up to 64 kB."""
MOST_NAMED = 5
"""Maximum number of specs in the line on images."""
MOST_SHOWN = 120
"""Maximum number of characters of a value."""


def markdown(changes: Sequence[SpecChange], ref: str) -> Iterator[str]:
    """Yield Markdown: a table of the specs that changed, the fields of each, and one line on those whose image alone
    changed."""
    changed = [
        change
        for change in changes
        if (change.kind != "unchanged" or change.renamed_from) and not is_image_only(change)
    ]
    images = [change for change in changes if is_image_only(change)]
    yield f"### Specs: {len(changed)} of {len(changes)} changed since {inline_code(ref)}"
    if changed:
        yield from ("", "| spec | change | cost at most |", "|---|---|---:|")
        for change in changed:
            before, after = (bound_text(side) if side and side.plan else "" for side in (change.before, change.after))
            cost = " → ".join(filter(None, (before, after or ("–" if before else ""))))
            yield f"| {inline_code(change.path)} | {kind_text(change)} | {after if before == after else cost} |"
    for change in changed:
        if lines := [*details(change, ref)]:
            yield from ("", f"#### {inline_code(change.path)}", "", *lines)

    if images:
        names = listed([inline_code(change.path) for change in images], MOST_NAMED)
        yield from ("", f"New image and run ID, because code changed, in {plural(len(images), 'other spec')}: {names}")


def is_image_only(change: SpecChange) -> bool:
    """Return whether only the image's content and the run ID changed, as with each change of the code."""
    both = change.changes
    return bool(both.image) and not change.renamed_from and both == PlanChanges(run=both.run, image=both.image)


def kind_text(change: SpecChange) -> str:
    """Return new, removed, changed, renamed, or refused."""
    if change.after and change.after.plan is None:
        return "refused"
    renamed = f"renamed from {inline_code(change.renamed_from)}" if change.renamed_from else ""
    return ", ".join(filter(None, (renamed, change.kind if change.kind != "unchanged" else "")))


def details(change: SpecChange, ref: str) -> Iterator[str]:
    """Yield problems, the run ID and the image, a line each, and the table of fields."""
    yield from problem_lines(change.after, "")
    if change.after:
        yield from problem_lines(change.before, f"refused at {inline_code(ref)}: ")
    both = change.changes
    if both.run:
        yield f"- run ID: {inline_code(both.run[0])} → {inline_code(both.run[1])}: a launch starts a new run"
    if both.image:
        yield f"- image: {escaped_markdown(both.image)}"
    if both.usd_expected:
        yield f"- expected cost: {' → '.join('unknown' if usd is None else usd_text(usd) for usd in both.usd_expected)}"
    if both.fields:
        yield from ("", f"| field | {inline_code(ref)} | working tree |", "|---|---|---|")
        yield from map(field_row, both.fields[:MOST_FIELDS])
        if len(both.fields) > MOST_FIELDS:
            yield from ("", f"and {plural(len(both.fields) - MOST_FIELDS, 'more field')} (-o json has all)")


def problem_lines(side: CheckedSpec | None, label: str) -> Iterator[str]:
    for problem in side.problems if side else ():
        where = problem.file if problem.line is None else f"{problem.file}:{problem.line}"
        yield f"- {label}{inline_code(where)}: {escaped_markdown(problem.text)}"


def field_row(change: Change) -> str:
    some = f" ({change.attempts})" if change.attempts else ""
    before, after = ("" if value is None else inline_code(value) for value in (change.before, change.after))
    return f"| {inline_code(change.field)}{some} | {before} | {after} |"


def inline_code(text: str) -> str:
    """Return a text as code in one line of Markdown, also in a table, at most MOST_SHOWN characters of it."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    gap = " " if "`" in shown else ""
    return f"{fence}{gap}{shown}{gap}{fence}".replace("|", "\\|")


def escaped_markdown(text: str) -> str:
    """Return a text in which no character has a meaning in Markdown or HTML."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in " ".join(text.split()))


def changes_data(changes: Sequence[SpecChange], ref: str) -> dict[str, Any]:
    """Return the changes for scripts (docs/ci.md)."""
    return {
        "against": ref,
        "specs": [
            {
                "spec": change.path,
                "kind": change.kind,
                "renamed_from": change.renamed_from or None,
                "before": spec_data(change.before) if change.before else None,
                "after": spec_data(change.after) if change.after else None,
                "changes": msgspec.to_builtins(change.changes),
            }
            for change in changes
        ],
    }
