"""Find the newest checkpoint that a script wrote itself (`run.resume_glob` of a spec)."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class OwnCheckpoint(NamedTuple):
    """A file or folder that a script wrote; the newer one is the greater. `step`: -1 if its name has no number."""

    step: int
    modified_ns: int
    path: str


class Resume(NamedTuple):
    """How a script resumes: the pattern of its checkpoints, and its arguments for the newest one."""

    glob: str
    args: Sequence[str]

    def newest(self) -> OwnCheckpoint | None:
        """Return the newest checkpoint that the arguments can name, or None. Raises OSError."""
        return newest_own_checkpoint(self.glob, needs_step=any("{step}" in arg for arg in self.args))

    def args_for(self, checkpoint: OwnCheckpoint) -> tuple[str, ...]:
        """Return the arguments with `{step}` and `{path}` replaced."""
        step, path = str(checkpoint.step), checkpoint.path
        return tuple(arg.replace("{step}", step).replace("{path}", path) for arg in self.args)


def newest_own_checkpoint(pattern: str, *, needs_step: bool = False) -> OwnCheckpoint | None:
    """Return the newest checkpoint that matches, or None. Raises OSError if its folder can't be read.

    `{step}` in the pattern stands for the step; without it, the step is the last number in the name. Empty
    files and folders are skipped, and zip archives without their end: torch.save and numpy.savez write archives, and a
    process may be killed in the middle of it. `needs_step`: so are names without a number.
    """
    with suppress(FileNotFoundError, NotADirectoryError):  # glob takes a folder that can't be read for an empty one
        os.scandir(os.path.dirname(re.split(r"[*?[]|\{step\}", pattern)[0]) or ".").close()  # noqa: PTH120 - may be ""
    before, marker, after = pattern.partition("{step}")
    level = -1 - after.count("/")
    marked = fnmatch.translate(f"{before}\0{after}".split("/")[level]).replace("\0", r"(?P<step>\d+)")
    checkpoints: list[OwnCheckpoint] = []
    for name in glob.glob(pattern.replace("{step}", "*"), recursive=True):  # noqa: PTH207 - the pattern may be absolute
        path, part = Path(name).absolute(), name.split("/")[level]
        if marker:
            steps = [match["step"]] if (match := re.match(marked, part)) else []
        else:
            steps = re.findall(r"\d+", re.sub(r"\.[A-Za-z]\w*$", "", part))  # without an extension such as .h5
        with suppress(FileNotFoundError):  # deleted meanwhile, or a broken link
            if (steps or not (marker or needs_step)) and _is_complete(path):
                checkpoints.append(OwnCheckpoint(int(steps[-1]) if steps else -1, path.stat().st_mtime_ns, str(path)))
    return max(checkpoints, default=None)


def _is_complete(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    with path.open("rb") as file:
        start = file.read(4)
        return bool(start) and (start != b"PK\x03\x04" or zipfile.is_zipfile(file))
