"""The result files: a JSON line for each row, on the disk before the next row starts, and nothing private in them."""

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
"""Bytes of OUTPUT: what the rows printed, for whoever looks for the cause of a failure."""

Row = dict[str, Any]


class Log:
    """The folder of one acceptance. Rows of an earlier command are kept; the newest row of a key counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on the disk when this returns."""
        line = json.dumps(clean(row), allow_nan=False) + "\n"
        torn = self._ends_torn()
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line)
            file.flush()
            os.fsync(file.fileno())

    def _ends_torn(self) -> bool:
        """Whether a command was cut off within a line."""
        path = self.folder / ROWS
        return path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")

    def rows(self) -> list[Row]:
        """All lines in the order in which they were written; one that is torn is passed over."""
        path = self.folder / ROWS
        return list(_parsed(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []

    def print(self, title: str, text: str) -> None:
        """Keep what a row printed, as long as there is room."""
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
    """The last row of each key (`key`), in the order of their first appearance; machine lines are left out."""
    found: dict[str, Row] = {}
    for row in rows:
        if "key" in row:
            found[row["key"]] = row
    return found


# --- Nothing private -------------------------------------------------------------------------------------------------


def clean(value: Any) -> Any:
    """`value` as JSON can hold it, without this machine's name, its user and its folders."""
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
    """Names and folders of this machine are replaced; of any other absolute path the last two parts stay."""
    for private, public in _private():
        text = text.replace(private, public)
    text = _UUID.sub("GPU-uuid", text)
    text = _PATH.sub(lambda match: f"…/{'/'.join(match[0].strip('/').split('/')[-2:])}", text)
    return re.sub(rf"\b(?:{'|'.join(map(re.escape, names))})\b", "HOST", text) if (names := _names()) else text


_UUID: Final = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}[0-9a-f-]*", re.IGNORECASE)
_PATH: Final = re.compile(r"(?<![\w.…:/])/(?:[\w.+@~=-]+/){2,}[\w.+@~=-]*")


def _private() -> list[tuple[str, str]]:
    """Folders, the longest first."""
    folders = {str(ROOT): "REPO", str(Path.home()): "HOME", tempfile.gettempdir(): "TMP", sys.prefix: "PYTHON"}
    folders[os.getcwd()] = "REPO" if Path.cwd() == ROOT else "CWD"  # noqa: PTH109 - what the programs print
    return sorted(((one, to) for one, to in folders.items() if len(one) > 1), key=lambda pair: -len(pair[0]))


def _names() -> list[str]:
    """The machine's name and its user's, unless they are words that any text has."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    host = socket.gethostname()
    return [one for one in {host, host.partition(".")[0], user} if len(one) > 2 and one not in _COMMON]


_COMMON: Final = frozenset({"localhost", "root", "user", "ubuntu", "main", "test", "gpu", "cuda", "torch", "train"})
