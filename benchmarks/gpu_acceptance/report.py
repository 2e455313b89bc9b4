"""Write the Markdown page of each part from the log, after every row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_acceptance.log import Log, newest

TITLES = {1: "Does it work?", 2: "How fast is it?", 3: "What would make it faster?"}


def write(out: Log, part: int, mine: Callable[[Mapping[str, Any]], bool], left: Sequence[str]) -> None:
    """Write `part-N.md` atomically."""
    everything = out.rows()
    machines = [row["machine"] for row in everything if "machine" in row]
    rows = [row for row in newest(row for row in everything if mine(row)).values() if row["part"] == part]
    path = out.folder / f"part-{part}.md"
    path.with_suffix(".new").write_text(page(part, rows, machines[-1] if machines else {}, left), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def page(part: int, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], left: Sequence[str] = ()) -> str:
    """Return the page: title, machine, rows, and what is missing."""
    lines = [f"# GPU acceptance, part {part}: {TITLES[part]}", "", *about(rows, machine), ""]
    lines += table(rows)
    if left:
        lines += ["", f"Not run, not enough time left: {', '.join(key.partition(' ')[2] for key in left)}."]
    for row in rows:
        if row["status"] == "failed" and row.get("output"):
            lines += ["", f"## {row['name']}", "", "```", *row["output"], "```"]
    return "\n".join(lines) + "\n"


def about(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> list[str]:
    """Return the lines about machine, versions and command."""
    if not machine:
        return []
    found = {name: version for name, version in machine["versions"].items() if version != "missing"}
    missing = [name for name, version in machine["versions"].items() if version == "missing"]
    days = sorted({row["time"][:10] for row in rows})
    hardware = f"{machine['device']}, driver {machine['driver'] or '-'}, CUDA {machine['cuda'] or '-'}"
    return [
        f"{hardware}, {machine['cores']} cores; "
        f"{' to '.join(dict.fromkeys((*days[:1], *days[-1:])))}, commit {machine['commit']}: `{machine['command']}`.",
        "",
        ", ".join(f"{name} {version}" for name, version in found.items())
        + (f"; missing: {', '.join(missing)}" if missing else "")
        + ".",
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each row, and the separate tables of rows that have one (`measured["table"]`)."""
    lines = ["| row | result | what was measured | s |", "|---|---|---|---:|"]
    lines += [f"| {row['name']} | {_result(row)} | {_cell(row)} | {row['seconds']:.0f} |" for row in rows]
    for row in rows:
        found = row.get("measured") or {}
        if found.get("table"):
            lines += ["", f"**{row['name']}**: {row['about']}", "", *found["table"]]
    return lines


def _result(row: Mapping[str, Any]) -> str:
    again = f", try {row['try']}" if row["try"] > 1 else ""
    return f"{row['status']}{f' (CPU: {one})' if (one := row.get('cpu')) else ''}{again}"


def _cell(row: Mapping[str, Any]) -> str:
    return str(row["why"]).replace("|", "\\|").replace("\n", " ")[:400]
