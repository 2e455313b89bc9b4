"""Prepare a push on the VM. The script runs with the VM's own Python and uses the standard library only.

    python3 -c SOURCE FOLDER keep|delete     (stdin: the names of the pushed files, each followed by a NUL)

It creates the folder and records in it which files were pushed. `delete` removes files of earlier pushes that are not
part of this one. All other files, such as results, are kept. Prints JSON: {"rsync": bool, "removed": [name, …]}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

KEPT = ".launch-pushed"
"""The file in the folder with the names of pushed files, each followed by a NUL."""


def main(text: str, mode: str) -> None:
    """Prepare one push to a folder."""
    folder = Path(text)
    folder.mkdir(parents=True, exist_ok=True)
    coming = names_of(sys.stdin.buffer.read())
    try:
        before = names_of((folder / KEPT).read_bytes())
    except FileNotFoundError:
        before = set()
    removed = sorted(name for name in before - coming if mode == "delete" and remove(folder, name))
    pushed = coming if mode == "delete" else before | coming
    new = folder / f"{KEPT}.new"
    new.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in sorted(pushed)))
    new.replace(folder / KEPT)
    answer = {"rsync": shutil.which("rsync") is not None, "removed": removed}
    os.write(1, json.dumps(answer).encode())


def names_of(listed: bytes) -> set[str]:
    """Split names, without the empty one after the last NUL."""
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}


def remove(folder: Path, name: str) -> bool:
    """Remove one file and its parent folders that are then empty. Return whether it existed.

    Files outside the folder are not touched.
    """
    path, top = folder / name, folder.resolve()
    parent = path.parent.resolve()
    if top not in (parent, *parent.parents) or not (path.is_symlink() or path.is_file()):
        return False
    path.unlink()
    while parent != top:
        try:
            parent.rmdir()
        except OSError:  # not empty
            break
        parent = parent.parent
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
