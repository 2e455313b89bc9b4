"""Write the result files: one JSON line per row, flushed before the next row starts, without private data."""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_acceptance.tasks import ROOT

ROWS: Final = "rows.jsonl"
OUTPUT: Final = "output.txt"
RAN_ON: Final = "ran-on.json"
MOST_OUTPUT: Final = 8 << 20
"""Size limit of OUTPUT, the rows' output, which helps to find the cause of a failure."""

Row = dict[str, Any]


class Log:
    """The result folder. Rows of earlier commands are kept; the newest row of a key counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and flush it to disk."""
        line = json.dumps(clean(row), allow_nan=False) + "\n"
        torn = self._ends_torn()
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line)
            file.flush()
            os.fsync(file.fileno())

    def _ends_torn(self) -> bool:
        """Return whether the file ends within a line, as after a killed command."""
        path = self.folder / ROWS
        return path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")

    def rows(self) -> list[Row]:
        """Return all lines in order; incomplete ones are skipped."""
        path = self.folder / ROWS
        return list(_parsed(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []

    def print(self, title: str, text: str) -> None:
        """Append a row's output, up to the size limit."""
        path = self.folder / OUTPUT
        room = MOST_OUTPUT - (path.stat().st_size if path.is_file() else 0)
        whole = f"\n===== {title}\n{cleaned(text)}"
        with path.open("a", encoding="utf-8") as file:
            file.write(whole[-max(0, min(room, 200_000)) :] if room > 0 else "")


def _parsed(lines: Iterable[str]) -> Iterable[Row]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the last row of each `key`, in order of first appearance; machine lines are left out."""
    found: dict[str, Row] = {}
    for row in rows:
        if "key" in row:
            found[row["key"]] = row
    return found


# --- Private data ----------------------------------------------------------------------------------------------------


def clean(value: Any) -> Any:
    """Return `value` as JSON data, without this machine's host name, user and folders."""
    if isinstance(value, str):
        return cleaned(value)
    if isinstance(value, Mapping):
        return {cleaned(str(key)): clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return cleaned(str(value))


def cleaned(text: str) -> str:
    """Replace names and folders of this machine; of other absolute paths keep the last two parts."""
    for private, public in _private():
        text = text.replace(private, public)
    text = _UUID.sub("GPU-uuid", text)
    text = _PATH.sub(lambda match: f"…/{'/'.join(match[0].strip('/').split('/')[-2:])}", text)
    return re.sub(rf"\b(?:{'|'.join(map(re.escape, names))})\b", "HOST", text) if (names := _names()) else text


_UUID: Final = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}[0-9a-f-]*", re.IGNORECASE)
_PATH: Final = re.compile(r"(?<![\w.…:/])/(?:[\w.+@~=-]+/){2,}[\w.+@~=-]*")


def _private() -> list[tuple[str, str]]:
    """Return folders and their replacements, the longest first."""
    folders = {str(ROOT): "REPO", str(Path.home()): "HOME", tempfile.gettempdir(): "TMP", sys.prefix: "PYTHON"}
    folders[os.getcwd()] = "REPO" if Path.cwd() == ROOT else "CWD"  # noqa: PTH109 - what the programs print
    return sorted(((one, to) for one, to in folders.items() if len(one) > 1), key=lambda pair: -len(pair[0]))


def _names() -> list[str]:
    """Return the host and user names, unless they are common words."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    host = socket.gethostname()
    return [one for one in {host, host.partition(".")[0], user} if len(one) > 2 and one not in _COMMON]


_COMMON: Final = frozenset({"localhost", "root", "user", "ubuntu", "main", "test", "gpu", "cuda", "torch", "train"})
