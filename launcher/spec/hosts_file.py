"""The user's hosts.yaml, beside config.yaml: names for `launch on`, and the settings of each host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from launcher.spec.kinds import ContainerImage, ContainerMount, Model, matching
from launcher.spec.nodes import Map, Node, node_at, plain
from launcher.spec.overrides import Override
from launcher.spec.project_file import decode_file, user_settings_path

HostName = Annotated[str, matching(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", "a name: letters, digits, . _ and -")]
FIELDS: Final = {"gpus": "machine.gpus", "type": "machine.type", "price": "limits.price"}
"""Field of a host -> the spec's field for which it is the default."""


class HostEntry(Model, frozen=True, kw_only=True):
    """A host."""

    host: (
        Annotated[str, Meta(min_length=1, description="its name or address for ssh, or colab:NAME; default: the name")]
        | None
    ) = None
    gpus: Annotated[int, Meta(ge=1, le=16, description="GPUs that a job gets if its spec says nothing")] | None = None
    type: Annotated[str, Meta(min_length=1, description="a GPU, such as a100-80gb, or a machine type")] | None = None
    price: Annotated[float, Meta(gt=0, description="USD per hour")] | None = None
    python: Annotated[str, Meta(min_length=1, description="path of the Python there that runs jobs")] | None = None
    container: ContainerImage | None = None
    mounts: tuple[ContainerMount, ...] = ()


class HostsFile(Struct, frozen=True):
    """The hosts by name, with the position of each value; without a file there are none."""

    hosts: Mapping[str, HostEntry] = {}
    root: Node = Map("", {})

    def entry(self, name: str) -> HostEntry:
        """Return a host; nothing is set if it has no entry."""
        return self.hosts.get(name, HostEntry())

    def defaults(self, name: str) -> list[Override]:
        """Return the fields of a spec that a host sets where the spec and its flags don't."""
        entry, overrides = self.entry(name), []
        for field, path in FIELDS.items():
            if getattr(entry, field) is not None:
                node = node_at(self.root, (name, field))
                overrides.append(Override(path, plain(node), node.where, node, is_default=True))
        return overrides


def read_hosts(environ: Mapping[str, str]) -> HostsFile:
    """Read the file. Raises SpecError with all its problems."""
    settings = user_settings_path(environ)
    path = settings.with_name("hosts.yaml") if settings else None
    if path is None or not os.path.isfile(path):  # noqa: PTH113 -- Path.is_file may raise
        return HostsFile()
    decoded = decode_file(path, str(path), dict[HostName, HostEntry], HostEntry)
    return HostsFile(*decoded) if decoded else HostsFile()
