"""`--adopt`: copy results from a GPU machine into the repository and its documentation."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance import log, machine, report
from benchmarks.gpu_acceptance.log import Log
from benchmarks.gpu_acceptance.tasks import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def adopt(folders: Sequence[Path]) -> int:
    """Copy the results of these folders, one file per device. Return 1 if they hold nothing from a GPU."""
    devices = _devices(row for folder in folders for row in Log(folder).rows())
    if not devices:
        print(f"no rows from a GPU in {', '.join(folder.name for folder in folders)}", file=sys.stderr)
        return 1
    for device, rows in devices.items():
        print(f"{_kept(device, rows).relative_to(RESULTS.parent.parent)}")
    _merge_ran_on(folders)
    from tests import features, what_ran

    features.PAGE.write_text(features.renewed(features.PAGE.read_text()))
    what_ran.renew()
    return 0


def _devices(rows: Iterable[log.Row]) -> dict[str, list[log.Row]]:
    """Return the rows of each GPU, with the machine lines; --tiny rows are left out."""
    found: dict[str, list[log.Row]] = {}
    for row in rows:
        device = row.get("device") or row.get("machine", {}).get("device", "CPU")
        if device != "CPU" and not row.get("tiny"):
            found.setdefault(device, []).append(row)
    return {device: those for device, those in found.items() if any("key" in row for row in those)}


def _kept(device: str, rows: Sequence[log.Row]) -> Path:
    """Write the JSON and the Markdown; return the JSON's path."""
    newest = [{**row, "commit": known(row["commit"])} for row in log.newest(rows).values()]
    about = {**next((row["machine"] for row in reversed(rows) if "machine" in row), {})}
    commit = Counter(row["commit"] for row in newest).most_common(1)[0][0]
    if about:
        about["commit"] = known(about["commit"])
    date = max(row["time"] for row in newest)[:10]
    whole = {"date": date, "commit": commit, "device": device, "machine": about, "rows": newest}
    name = f"gpu-acceptance-{date}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}"
    RESULTS.mkdir(exist_ok=True)
    pages = [_page(part, newest, about) for part in (1, 2, 3)]
    (RESULTS / f"{name}.md").write_text("\n".join(filter(None, pages)), encoding="utf-8")
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return path


def _page(part: int, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    mine = [row for row in rows if row["part"] == part]
    return report.page(part, mine, about) if mine else ""


def known(commit: str) -> str:
    """Return this checkout's commit for a code digest, if the commit has the same code."""
    return machine.head() if commit == f"source-{machine.source()}" else commit


def _merge_ran_on(folders: Sequence[Path]) -> None:
    """Merge the GPU tests that passed with those that passed before."""
    path = RESULTS / log.RAN_ON
    whole: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for folder in folders:
        if (new := folder / log.RAN_ON).is_file():
            whole |= json.loads(new.read_text())
    if whole:
        path.write_text(json.dumps(dict(sorted(whole.items())), indent=2) + "\n", encoding="utf-8")
