"""The options that several commands share, and the spec overrides they stand for."""

# No `from __future__ import annotations`: Typer would compile the annotations at every start, twice.

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from launcher.cli.help_page import COMMON, CONNECTION, COST, MACHINE, OUTPUT, RUN, WHERE, Command, option
from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs
    from launcher.plan.model import Target
    from launcher.spec.reader import Override


class Output(StrEnum):
    """What a command prints on stdout."""

    text = "text"
    json = "json"
    yaml = "yaml"


OutputFormat = Annotated[Output, option(COMMON, "-o", help="Output format.")]

SpecFile = Annotated[
    Path | None, typer.Argument(metavar="[SPEC]", help="The job's YAML file; default: the built-in job.")
]

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, ID, folder or HOST:RUN; its spec, or a job's number.")
]
Regions = Annotated[
    list[str] | None,
    option(WHERE, "--region", help="Search only this region; repeatable.", metavar="REGION"),
]
Last = Annotated[bool, option(WHERE, "--last", help="Take the newest of several runs with that name.")]
ResumeLast = Annotated[bool, option(RUN, "--last", help="With --resume: take the newest of several runs.")]
Mine = Annotated[bool, option(WHERE, "--mine", help="Only those of gcloud's account.")]
AllRuns = Annotated[bool, option(OUTPUT, "--all", help="Print all runs, not only the newest 30.")]
DryRun = Annotated[bool, option(OUTPUT, "--dry-run", help="Print the plan; submit nothing.")]
Explain = Annotated[bool, option(OUTPUT, "--explain", help="Print the plan with all its reasons; submit nothing.")]
Offline = Annotated[bool, option(COST, "--offline", help="Use the prices shipped with launch.")]
AcceptHostKey = Annotated[
    bool, option(CONNECTION, "--accept-host-key", help="Store the key of a host that is not known yet.")
]
Container = Annotated[
    str | None,
    option(RUN, "--container", help="Run in a container: HOST/NAME:TAG, or a path there (.sif).", metavar="IMAGE"),
]
Mounts = Annotated[
    list[str] | None,
    option(RUN, "--mount", help="A folder there that the container sees (repeatable).", metavar="SOURCE[:TARGET]"),
]
Yes = Annotated[bool, option(COST, "--yes", "-y", help="Submit without the question about the cost.")]


def time_option(group: str, flag: str, help: str) -> Any:  # noqa: A002 -- Typer's name
    """Return an option whose value is a time (`15s`, `2m`, `1h`), in seconds for the command."""

    def parse(text: str) -> float:
        return flag_seconds(text, flag)

    return option(group, flag, help=help, metavar="TIME", parser=parse)


def flag_seconds(text: str, flag: str) -> float:
    """Return the seconds of a flag's `15s`, `2m` or `1h`, which a spec takes too. Raises UsageError."""
    from launcher.spec.kinds import DURATION
    from launcher.text import parse_duration

    if re.search(DURATION, text):
        return parse_duration(text)
    near = f"{text}s" if text.isdecimal() and int(text) else "15s, 2m or 1h"
    raise UsageError(f"{flag}: invalid duration {text!r}; use for example {near}")


WatchFor = Annotated[
    float | None, time_option(OUTPUT, "--watch-for", "Stop watching after this time (30m, 2h); exit code 6.")
]

BuilderFlag = Annotated[
    str,
    option(RUN, "--builder", help="auto, append (needs no Docker), docker or cloud-build.", metavar="BUILDER"),
]
CreateRepository = Annotated[
    bool,
    option(RUN, "--create-repository", help="Create the Artifact Registry repository first."),
]

YesForAnother = Annotated[
    bool, option(COMMON, "--yes", "-y", help="Skip the confirmation for what another account owns.")
]
VmName = Annotated[str, typer.Argument(metavar="NAME", help="A VM's name or number, or its resource name.")]
InZone = Annotated[
    str | None,
    option(WHERE, "--zone", help="The VM's zone, if several VMs share the name.", metavar="ZONE"),
]


class Flags(NamedTuple):
    """Flags that override the spec. None and empty change nothing."""

    type: Annotated[
        str | None,
        option(MACHINE, "--type", help="GPU (h100, l4 …) or machine type; or several: h100,l4.", metavar="TYPE"),
    ] = None
    gpus: Annotated[int | None, option(MACHINE, "--gpus", help="GPUs on each node.", metavar="N")] = None
    nodes: Annotated[int | None, option(MACHINE, "--nodes", help="Number of machines.", metavar="N")] = None
    provisioning: Annotated[
        list[str] | None,
        option(
            MACHINE, "--provisioning", help="standard, spot, flex-start, reservation:…; repeatable.", metavar="MODEL"
        ),
    ] = None
    flex_start: Annotated[bool, option(MACHINE, "--flex-start", help="Short for --provisioning flex-start.")] = False
    spot: Annotated[bool, option(MACHINE, "--spot", help="Short for --provisioning spot.")] = False
    region: Annotated[
        list[str] | None, option(WHERE, "--region", help="A region, or any; repeatable.", metavar="REGION")
    ] = None
    zone: Annotated[
        list[str] | None, option(WHERE, "--zone", help="A zone (VMs only); repeatable.", metavar="ZONE")
    ] = None
    image: Annotated[str | None, option(RUN, "--image", help="Use a custom image: NAME@sha256:….", metavar="IMAGE")] = (
        None
    )
    output: Annotated[
        str | None,
        option(OUTPUT, "--output", help="gs://BUCKET/PATH, or a folder for launch local and on.", metavar="WHERE"),
    ] = None
    hours: Annotated[
        float | None, option(COST, "--hours", help="Upper bound of billed hours for the whole run.", metavar="H")
    ] = None
    usd: Annotated[
        float | None, option(COST, "--usd", help="Refuse the plan if it could cost more.", metavar="USD")
    ] = None
    price: Annotated[
        float | None, option(COST, "--price", help="USD per hour and node, where the price is unknown.", metavar="USD")
    ] = None
    name: Annotated[str | None, option(RUN, "--name", help="Name of the job, VM or sweep.", metavar="NAME")] = None
    run_id: Annotated[str | None, option(RUN, "--run-id", help="Set the run ID.", metavar="ID")] = None
    set: Annotated[
        list[str] | None, option(RUN, "--set", help="Set any field; VALUE is YAML; repeatable.", metavar="A.B=VALUE")
    ] = None


FIELDS = {
    "type": "machine.type",
    "gpus": "machine.gpus",
    "nodes": "machine.nodes",
    "output": "output",
    "hours": "limits.hours",
    "usd": "limits.usd",
    "price": "limits.price",
    "name": "name",
}
"""Flag -> the spec field that it sets unchanged."""


def gather(
    target: "Target", spec: Path | None, flags: Flags, *, more: "Sequence[Override]" = (), **options: Any
) -> "Inputs":
    """Return the inputs of a plan. `more` are overrides in addition to the flags. `options` and errors are those of
    `launcher.inputs.gather.gather`; an unknown machine is reported before a missing project."""
    from launcher.inputs.gather import GatherOptions, NoProject
    from launcher.inputs.gather import gather as gather_inputs

    changes = [*overrides(flags), *more]
    try:
        return gather_inputs(target, spec, changes, GatherOptions(run_id=flags.run_id, **options))
    except NoProject:
        from launcher import catalog
        from launcher.plan.placement import choose

        inputs = gather_inputs(target, spec, changes, GatherOptions(run_id=flags.run_id, stand_in="project", **options))
        with inputs.located.naming_places():
            choose(inputs.spec, catalog.load(), target)
        raise


def overrides(flags: Flags) -> "list[Override]":
    """Return the flags as overrides of the spec: the fields they clear, then `--set`, then the other flags, which win.

    Raises UsageError: flags that cannot be combined; SpecError: an invalid `--set`.
    """
    from launcher.spec.reader import Override, parse_set

    changes = [*cleared_fields(flags), *(parse_set(text) for text in flags.set or ())]
    for flag, path in FIELDS.items():
        value = getattr(flags, flag)
        if value is not None:
            several = flag == "type" and "," in value
            changes.append(Override(path, machine_types(value) if several else value, f"--{flag}"))
    if flags.image is not None:  # a custom image replaces the whole image section
        changes.append(Override("image", {"uri": flags.image}, "--image"))
    # In fallback order.
    models = [*(flags.provisioning or ()), *(["flex-start"] * flags.flex_start), *(["spot"] * flags.spot)]
    if models:
        short = "--flex-start" if flags.flex_start else "--spot"
        changes.append(
            Override("provisioning", list(dict.fromkeys(models)), "--provisioning" if flags.provisioning else short)
        )
    return [*changes, *place_overrides(flags)]


def machine_types(text: str) -> list[str]:
    """Return the names in the value of `--type`."""
    return [name.strip() for name in text.split(",")]


def flag_words(flags: Flags) -> list[str]:
    """Return the flags as command-line arguments, without `--output`."""
    typed: list[str] = []
    for name, value in flags._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        if name != "output" and value not in (None, False):
            values = value if isinstance(value, list) else [value]
            typed += [flag] if value is True else [word for each in values for word in (flag, str(each))]
    return typed


def cleared_fields(flags: Flags) -> "list[Override]":
    """Return overrides that clear fields of the spec which do not fit the value of a flag."""
    from launcher import catalog
    from launcher.spec.reader import Override

    changes = []
    if flags.type is not None:
        changes.append(Override("machine.accelerator", None, "--type"))
        # A machine type has its own number of GPUs; with the name of a GPU, the spec's number stays.
        if not {*machine_types(flags.type.lower())} <= catalog.load().gpus.keys():
            changes.append(Override("machine.gpus", None, "--type"))
    if flags.region and not flags.zone:
        changes.append(Override("zones", None, "--region"))
    return changes


def place_overrides(flags: Flags) -> "list[Override]":
    """Return the overrides of `--region` and `--zone`; `--zone` alone also sets the regions.

    Raises UsageError: `--region any` with another region.
    """
    from launcher.spec.reader import Override

    if "any" in (flags.region or ()) and len(set(flags.region or ())) > 1:
        raise UsageError(
            "--region any cannot be combined with another --region", "List the regions to try, or use any alone."
        )
    zones = flags.zone or []
    changes = [Override("zones", zones, "--zone")] if zones else []
    valid = [zone for zone in zones if zone.count("-") == 2]  # others are reported with the spec's problems
    regions: list[str] | str = flags.region or list(dict.fromkeys(zone.rpartition("-")[0] for zone in valid))
    if "any" in regions:
        regions = "any"
    if regions:
        changes.append(Override("regions", regions, "--region" if flags.region else "--zone"))
    return changes


class FlagsCommand(Command):
    """A command with an option for each field of `Flags`; its function gets them by `flags_of`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command()(Flags)  # Typer makes options of any callable's parameters
        self._flags = typer.main.get_command(app)
        self.params = [*self._flags.params, *self.params]

    def invoke(self, ctx: Any) -> Any:
        """Call the function. Its own options are its arguments; the flags are in the context."""
        values = {param.name: ctx.params.pop(param.name) for param in self._flags.params if param.name}
        ctx.meta[FLAGS] = ctx.invoke(self._flags.callback, **values)
        return super().invoke(ctx)


FLAGS = "launcher.flags"


def flags_of(ctx: typer.Context) -> Flags:
    flags: Flags = ctx.meta[FLAGS]
    return flags
