"""The VM's side of a push, run there with the Python that it has: a file of its own, of the standard library alone.

    python3 -c SOURCE FOLDER keep|delete     (the names of what comes, a NUL after each, on stdin)

Makes the folder, and remembers there what has come from outside; `delete` removes what an earlier push brought and this
one doesn't: nothing else, so no result that was made there. Prints JSON: {"rsync": bool, "removed": [name, …]}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

KEPT = ".launch-pushed"
"""In the folder: the names of what was brought, a NUL after each."""


def main(text: str, mode: str) -> None:
    """One push to a folder."""
    folder = Path(text)
    folder.mkdir(parents=True, exist_ok=True)
    coming = names_of(sys.stdin.buffer.read())
    before = remembered(folder)
    removed = sorted(name for name in before - coming if mode == "delete" and remove(folder, name))
    remember(folder, coming if mode == "delete" else before | coming)
    answer = {"rsync": shutil.which("rsync") is not None, "removed": removed}
    os.write(1, json.dumps(answer).encode())


def names_of(listed: bytes) -> set[str]:
    """Names, without the empty one after the last NUL."""
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}


def remembered(folder: Path) -> set[str]:
    """What earlier pushes have brought."""
    try:
        return names_of((folder / KEPT).read_bytes())
    except FileNotFoundError:
        return set()


def remember(folder: Path, names: set[str]) -> None:
    """Write that down, whole or not at all."""
    new = folder / f"{KEPT}.new"
    new.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in sorted(names)))
    new.replace(folder / KEPT)


def remove(folder: Path, name: str) -> bool:
    """Remove one file, and the folders that are empty then. Whether it was there; what lies elsewhere is left alone."""
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
