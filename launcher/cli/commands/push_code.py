"""`launch push-code`: copy a folder's code to a VM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.flows.find_vm import one_machine, open_compute
from launcher.cli.flows.ssh_access import Port, Tunnel, User, remote
from launcher.cli.help_page import OUTPUT, RUN, option
from launcher.cli.options import InZone, VmName
from launcher.cli.ui.streams import say
from launcher.errors import UsageError
from launcher.inputs.code_files import Code, collect_code, size_of, without_secrets
from launcher.ssh.sync import parse_destination, push
from launcher.text import plural, size_text

SHOWN = 10
"""Most file names to print without --dry-run."""


def push_code(
    name: VmName,
    folder: Annotated[str, typer.Argument(metavar="DIR[:DEST]", help="Folder, and its destination; default: ~/DIR.")],
    *,
    delete: Annotated[
        bool,
        option(RUN, "--delete", help="Delete files that an earlier push copied and that no longer exist here."),
    ] = False,
    allow_secret: Annotated[
        list[str] | None,
        option(RUN, "--allow-secret", help="Copy this file even if it looks like a secret.", metavar="FILE"),
    ] = None,
    dry_run: Annotated[bool, option(OUTPUT, "--dry-run", help="List the files; copy nothing.")] = False,
    user: User = None,
    zone: InZone = None,
    port: Port = 22,
    iap: Tunnel = False,
) -> None:
    """Copy a folder's code to a VM.

    Files that .gitignore or .dockerignore exclude, and files with secrets, are not copied, as for images.
    """
    here, there = source_of(folder)
    code = without_secrets(collect_code(here), allow_secret or (), override="--allow-secret FILE")
    if not code.files:
        raise UsageError(f"{here} has no files to copy", "See its .gitignore and .dockerignore.")
    if dry_run:
        show_files(code, every=True)
        print(f"nothing was copied: {files_total(code)} would be copied to {name}:{there}")
        return
    compute = open_compute()
    machine = one_machine(compute, name, zone)
    vm = remote(compute, machine, user=user, port=port, tunnel=iap)
    show_files(code, every=False)
    done = push(vm, here, code.files, there, delete=delete, say=say)
    for removed in done.removed:
        print(f"deleted on {machine.name}: {safe_name(removed)}")
    print(f"copied {files_total(code)} to {machine.name}:{there}")


def source_of(text: str) -> tuple[Path, str]:
    """Parse DIR or DIR:DEST into the local folder and its destination. Raises UsageError."""
    path, sign, destination = text.rpartition(":")
    if not sign or Path(text).is_dir():
        path, destination = text, ""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{path} is not a folder", "Use launch push-code NAME DIR, or DIR:DEST.")
    folder = folder.resolve()
    if not destination and not folder.name:
        raise UsageError(f"{path} has no name", "Add the destination: DIR:DEST")
    return folder, parse_destination(destination or folder.name)


def show_files(code: Code, *, every: bool) -> None:
    """Print the files to copy, and the files that are not copied because they look like secrets."""
    names = [file.name for file in code.files]
    for name in names if every else names[:SHOWN]:
        print(f"  {safe_name(name)}")
    if not every and len(names) > SHOWN:
        print(f"  … and {len(names) - SHOWN} more (--dry-run lists all)")
    for name in code.secrets:
        print(f"  {safe_name(name)} not copied: it looks like a secret")


def files_total(code: Code) -> str:
    """Return `12 files, 0.3 MB`."""
    size = sum(size_of(file.path) for file in code.files)
    return f"{plural(len(code.files), 'file')}, {size_text(size)}"


def safe_name(name: str) -> str:
    return name if name.isprintable() else repr(name)
