"""What ran where: docs/what-ran.md, its summary in README.md and the GPU figures of docs/performance.md, made from the
result files in benchmarks/results/ (gpu-acceptance-*.json, selftest-*.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launch_train.bench import peaks
from launcher.catalog import tables
from tests.command import ROOT

RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE: Final = ROOT / "docs" / "what-ran.md"
README: Final = ROOT / "README.md"
FIGURES: Final = ROOT / "docs" / "performance.md"

SERVICES: Final = {"vertex": "Vertex AI", "vm": "Compute Engine"}
"""Targets of a selftest's steps, and what they are called."""

LOOPBACK: Final = "not yet; only on a loopback cloud with Google's clients"
CPUS: Final = "not yet; only on CPUs"

Result = Mapping[str, Any]


def results(kind: str, folder: Path = RESULTS) -> list[Result]:
    """The result files of a kind, the newest last."""
    found: list[Result] = [json.loads(path.read_text()) for path in folder.glob(f"{kind}-*.json")]
    return sorted(found, key=lambda one: str(one["date"]))


def renewed(text: str, marker: str, lines: Sequence[str]) -> str:
    """A page with what is between its markers as it is now."""
    between = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- end of {marker} -->)", re.DOTALL)
    inner = "".join(f"{line}\n" for line in lines)
    return between.sub(lambda match: match[1] + inner + match[2], text)


def pages(folder: Path = RESULTS) -> dict[Path, str]:
    """All pages that say it, as they should be."""
    return {
        PAGE: renewed(PAGE.read_text(), "what ran", table(folder)),
        README: renewed(README.read_text(), "what never ran", summary(folder)),
        FIGURES: renewed(FIGURES.read_text(), "gpu figures", figures(folder)),
    }


def table(folder: Path = RESULTS) -> list[str]:
    """A line for each service and each GPU of the catalog."""
    return ["| what | ran |", "|---|---|", *(f"| {what} | {ran} |" for what, ran in rows(folder))]


def rows(folder: Path = RESULTS) -> Iterator[tuple[str, str]]:
    """What, and when it ran."""
    tests, gpus = results("selftest", folder), results("gpu-acceptance", folder)
    for target, title in SERVICES.items():
        yield title, _service(tests, target)
    for gpu in (gpu for gpu in tables.gpus().values() if not gpu.shut_down):
        yield f"{gpu.title} (`{gpu.name}`)", _gpu(gpus, gpu.name)


def _service(found: Sequence[Result], target: str) -> str:
    """By the newest selftest in which a step of it went well."""
    for one in reversed(found):
        steps = [bool(step["ok"]) for step in one["steps"] if step["target"] == target]
        if any(steps):
            return f"ran on {one['date']} with {one['commit']}: {sum(steps)} of {len(steps)} steps"
    return LOOPBACK


def _gpu(found: Sequence[Result], name: str) -> str:
    """By the newest acceptance on such a GPU in which a check went well."""
    for one in reversed(found):
        card = peaks.of(one["device"])
        checks = [row["status"] for row in one["rows"] if row["part"] == 1 and row["status"] in ("ok", "failed")]
        if card and card.name == name and "ok" in checks:
            return f"ran on {one['date']} with {one['commit']}: {checks.count('ok')} of {len(checks)} checks"
    return CPUS


def summary(folder: Path = RESULTS) -> list[str]:
    """Return the README's lines on what has run and what has not."""
    found = list(rows(folder))
    never = [what for what, ran in found if ran.startswith("not yet")]
    ran = [f"{what} {when}" for what, when in found if not when.startswith("not yet")]
    services = [what for what in never if what in SERVICES.values()]
    gpus = len(never) - len(services)
    lines = [f"- Ran: {'; '.join(ran)}."] if ran else []
    if services:
        lines.append(
            f"- Not yet run on {' or '.join(services)}: tested with Google's own clients on a loopback cloud only."
        )
    if gpus:
        which = "any GPU" if gpus == len(found) - len(SERVICES) else f"{gpus} of the catalog's GPU types"
        lines.append(f"- Not yet run on {which}: the trainer's tests run on CPUs.")
    return [*lines, "", "The full table is in [docs/what-ran.md](docs/what-ran.md)."]


def figures(folder: Path = RESULTS) -> list[str]:
    """Parts 2 and 3 of the newest acceptance of each device."""
    newest = {str(one["device"]): one for one in results("gpu-acceptance", folder)}
    lines: list[str] = []
    for device, one in newest.items():
        measured = [row for row in one["rows"] if row["part"] > 1 and row["status"] == "ok"]
        if measured:
            lines += [f"On {device}, {one['date']}, commit {one['commit']}:", "", "| what | measured |", "|---|---|"]
            lines += [f"| {row['name']} | {row['why'].replace('|', '/')} |" for row in measured]
            lines.append("")
    return lines or ["No figure is from a GPU yet; `python3 -m benchmarks.gpu_acceptance` measures them on one."]


def renew(folder: Path = RESULTS) -> None:
    """Write the pages."""
    for path, text in pages(folder).items():
        path.write_text(text)
