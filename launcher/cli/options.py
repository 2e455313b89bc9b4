"""The flags that every launching command has, declared once, and how they change a spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.spec.reader import Override


class Output(StrEnum):
    """What a command prints on stdout."""

    text = "text"
    json = "json"
    yaml = "yaml"


OutputFormat = Annotated[Output, typer.Option("-o", help="What to print.")]

SpecFile = Annotated[
    Path | None, typer.Argument(metavar="[SPEC]", help="The job's YAML file; left out: the built-in default job.")
]

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, id or folder (gs://…), or a job's number.")]
Regions = Annotated[list[str] | None, typer.Option("--region", help="Look only there; repeatable.", metavar="REGION")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan; send nothing.")]
WatchFor = Annotated[
    str | None, typer.Option("--watch-for", help="Stop watching after that time (30m, 2h): exit 6.", metavar="TIME")
]

VmName = Annotated[str, typer.Argument(metavar="NAME", help="A VM's name or number, or its resource name.")]
InZone = Annotated[str | None, typer.Option("--zone", help="Where, if several have that name.", metavar="ZONE")]


def _flag(name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, metavar=metavar, rich_help_panel="The job (flags beat the spec)")


@dataclass(frozen=True)
class Flags:
    """Overrides of the spec. None and empty are left out."""

    type: Annotated[str | None, _flag("--type", "A GPU (h100, l4 …) or a machine type.", "TYPE")] = None
    gpus: Annotated[int | None, _flag("--gpus", "GPUs on each node.", "N")] = None
    nodes: Annotated[int | None, _flag("--nodes", "Machines.", "N")] = None
    provisioning: Annotated[
        list[str] | None, _flag("--provisioning", "standard, spot, flex-start, reservation:…; repeatable.", "MODEL")
    ] = None
    flex_start: Annotated[bool, _flag("--flex-start", "Provisioning flex-start.")] = False
    spot: Annotated[bool, _flag("--spot", "Provisioning spot.")] = False
    region: Annotated[list[str] | None, _flag("--region", "A region, or any; repeatable.", "REGION")] = None
    zone: Annotated[list[str] | None, _flag("--zone", "A zone (VMs); repeatable.", "ZONE")] = None
    image: Annotated[str | None, _flag("--image", "An image of your own: NAME@sha256:….", "IMAGE")] = None
    output: Annotated[str | None, _flag("--output", "gs://BUCKET/PATH, or a folder for local.", "WHERE")] = None
    hours: Annotated[float | None, _flag("--hours", "Billed time of the whole run.", "H")] = None
    usd: Annotated[float | None, _flag("--usd", "Refuse the plan if it could cost more.", "USD")] = None
    price: Annotated[float | None, _flag("--price", "USD per hour and node, where unknown.", "USD")] = None
    name: Annotated[str | None, _flag("--name", "The job's name.", "NAME")] = None
    run_id: Annotated[str | None, _flag("--run-id", "Set the run's id by hand.", "ID")] = None
    set: Annotated[
        list[str] | None, _flag("--set", "Any field: a.b=VALUE, VALUE being YAML; repeatable.", "A.B=VALUE")
    ] = field(default=None)


PLAIN = {
    "type": "machine.type",
    "gpus": "machine.gpus",
    "nodes": "machine.nodes",
    "output": "output",
    "hours": "limits.hours",
    "usd": "limits.usd",
    "price": "limits.price",
    "name": "name",
}
"""Flag -> the field of the spec that it sets as it is."""


def overrides(flags: Flags) -> list[Override]:
    """The flags as changes of the spec, in this order: what they rule out, `--set`, the plain flags (which beat it).

    Raises:
        UsageError: flags that can't go together.
        SpecError: a `--set` that can't be read.
    """
    from launcher.spec.reader import Override, parse_set

    changes = [*ruled_out(flags), *(parse_set(text) for text in flags.set or ())]
    for flag, path in PLAIN.items():
        value = getattr(flags, flag)
        if value is not None:
            changes.append(Override(path, value, f"--{flag}"))
    if flags.image is not None:  # an image of one's own takes the place of all that the spec would put together
        changes.append(Override("image", {"uri": flags.image}, "--image"))
    models = provisioning(flags)
    if models:
        changes.append(Override("provisioning", models, provisioning_flag(flags)))
    return [*changes, *places(flags)]


def words(flags: Flags) -> list[str]:
    """The flags as they are typed, less `--output`."""
    typed: list[str] = []
    for one in fields(flags):
        value, flag = getattr(flags, one.name), f"--{one.name.replace('_', '-')}"
        if one.name != "output" and value not in (None, False):
            values = value if isinstance(value, list) else [value]
            typed += [flag] if value is True else [word for each in values for word in (flag, str(each))]
    return typed


def ruled_out(flags: Flags) -> list[Override]:
    """What the spec says beside a field that a flag sets, and that only fits the spec's own value of it."""
    from launcher import catalog
    from launcher.spec.reader import Override

    changes = []
    if flags.type is not None:
        changes.append(Override("machine.accelerator", None, "--type"))
        if (
            flags.type.lower() not in catalog.load().gpus
        ):  # a machine type brings its own GPUs; of another GPU as many are meant
            changes.append(Override("machine.gpus", None, "--type"))
    if flags.region and not flags.zone:
        changes.append(Override("zones", None, "--region"))
    return changes


def provisioning(flags: Flags) -> list[str]:
    """`--provisioning` in its order, then flex-start (cheaper to lose nothing), then spot."""
    named = [*(flags.provisioning or ()), *(["flex-start"] * flags.flex_start), *(["spot"] * flags.spot)]
    return list(dict.fromkeys(named))


def provisioning_flag(flags: Flags) -> str:
    """The flag that an error about provisioning names."""
    return "--provisioning" if flags.provisioning else "--flex-start" if flags.flex_start else "--spot"


def places(flags: Flags) -> list[Override]:
    """`--zone` alone sets the regions too: who names a zone means that zone and no other.

    Raises:
        UsageError: `--region any` beside a region.
    """
    from launcher.spec.reader import Override

    if "any" in (flags.region or ()) and len(set(flags.region or ())) > 1:
        raise UsageError("--region any can't go with another --region", "Name the regions to try, or any: all of them.")
    zones = flags.zone or []
    changes = [Override("zones", zones, "--zone")] if zones else []
    whole = [zone for zone in zones if zone.count("-") == 2]  # what is no zone says so itself
    regions: list[str] | str = flags.region or list(dict.fromkeys(zone.rpartition("-")[0] for zone in whole))
    if "any" in regions:
        regions = "any"
    if regions:
        changes.append(Override("regions", regions, "--region" if flags.region else "--zone"))
    return changes


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(…, flags: Flags)` a command-line option for each field of `Flags`."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "flags"
    ]
    fields = get_type_hints(Flags, include_extras=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Flags, name), annotation=hint)
        for name, hint in fields.items()
    ]

    @wraps(command)
    def typed(**values: Any) -> None:
        flags = Flags(**{name: values.pop(name) for name in fields})
        command(**values, flags=flags)

    # Typer reads the signature and the annotations: both list the command's own parameters, then the shared flags.
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    typed.__signature__ = inspect.Signature([*keyword, *shared])  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    del typed.__wrapped__  # else inspect would look through to `command`
    return typed
