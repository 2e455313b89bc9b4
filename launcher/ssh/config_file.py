"""Write ssh's settings for VMs to a file that ~/.ssh/config includes with one line.

With it, `ssh dev`, scp, rsync and editors that use SSH can connect to the VM by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from launcher.jobs.vm import VmInstance
from launcher.ssh import command
from launcher.ssh.keys import forget, locked, make_ssh_folder, replace_file, text_of

HEAD: Final = "# Written by launch (launch vm code NAME); launch overwrites its blocks.\n"
NOTE: Final = re.compile(r"^    # (projects/[^/]+/zones/[^/]+/instances/\d+)$", re.M)
"""The VM that a block belongs to."""


def host_blocks(text: str) -> dict[str, str]:
    parts = re.split(r"^(?=Host )", text, flags=re.M)
    host_blocks = (part for part in parts if part.startswith("Host "))
    return {part.split(None, 2)[1]: part.rstrip("\n") + "\n" for part in host_blocks}


def resource_of(block: str) -> str:
    """Return the resource name of the VM that a block belongs to. Empty if launch did not write the block."""
    match = NOTE.search(block)
    return match[1] if match else ""


def gone(there: Iterable[VmInstance], unread: Iterable[str], project: str) -> Callable[[str], bool]:
    """Return a function that tells whether a VM was deleted, by its resource name.

    It is True only for a VM of this project, in a zone that could be read, that is not among the existing ones.
    """
    known, silent = {machine.resource for machine in there}, set(unread)

    def is_gone(resource: str) -> bool:
        parts = resource.split("/")
        return len(parts) == 6 and parts[1] == project and parts[3] not in silent and resource not in known

    return is_gone


def put(file: Path, machine: VmInstance, target: command.SshTarget, is_gone: Callable[[str], bool]) -> None:
    """Write a VM's block, and remove the host keys of deleted VMs. Raises LaunchError."""
    make_ssh_folder(file.parent)
    with locked(file.parent):
        before = text_of(file)
        kept = {name: block for name, block in host_blocks(before).items() if not is_gone(resource_of(block))}
        kept[machine.name] = command.host_block([machine.name], target, note=machine.resource)
        replace_file(file, HEAD + "".join(f"\n{block}" for _, block in sorted(kept.items())))
    for resource in filter(is_gone, map(resource_of, host_blocks(before).values())):
        forget(file.parent, f"compute.{resource.rpartition('/')[2]}")


# --- The user's own file ------------------------------------------------------------------------------------------


def is_included(config: Path, file: Path, environ: Mapping[str, str]) -> bool:
    """Return whether the user's ~/.ssh/config includes the file before any Host block. Raises LaunchError."""
    top = re.split(r"^\s*(?:Host|Match)\b", text_of(config), maxsplit=1, flags=re.M | re.I)[0]
    named = re.findall(r"^\s*Include[\s=]+(.+?)\s*$", top, re.M | re.I)
    home = environ.get("HOME", "")
    words = [word.strip('"') for text in named for word in re.findall(r'"[^"]*"|\S+', text)]  # quotes group words
    return any(str(file) == word.replace("~", home, 1) for word in words)


def include(config: Path, file: Path) -> None:
    """Add the Include line at the top of ~/.ssh/config. Raises LaunchError."""
    make_ssh_folder(config.parent)
    with locked(config.parent):
        before = text_of(config)
        replace_file(config, include_line(file) + "\n" + (f"\n{before}" if before else ""))


def include_line(file: Path) -> str:
    """Return the Include line. Raises UsageError."""
    return f"Include {command.quoted(str(file))}"


def own_block(config: Path, name: str) -> bool:
    """Return whether the user already has a Host block with that name. Raises LaunchError."""
    hosts = re.findall(r"^\s*Host[\s=]+(.+?)\s*$", text_of(config), re.M | re.I)
    return any(name in host.split() for host in hosts)
