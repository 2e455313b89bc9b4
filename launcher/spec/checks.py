"""Combinations of fields that can't work, each of them checked on its own, purely.

A check says which fields it reads: where one of these is wrong by itself, the check has nothing to go by and is left
out, and the rest of the file is checked all the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.spec.kinds import BUCKET, ZONE
from launcher.spec.models import BUILTIN, OLD_BUILTIN, JobSpec, Run
from launcher.spec.nodes import Path, clipped


class Finding(NamedTuple):
    """A field, what is wrong with it beside the others, and what would be right."""

    at: Path
    what: str
    fix: str


class Check(NamedTuple):
    """One rule and the fields that it reads."""

    find: Callable[[JobSpec], Iterable[Finding]]
    reads: tuple[Path, ...]


def check(spec: JobSpec, bad: Sequence[Path] = ()) -> list[Finding]:
    """All combinations that can't work. `bad`: fields without a usable value; no check looks at them."""
    return [
        finding
        for rule in CHECKS
        if not any(touches(path, field) for path in bad for field in rule.reads)
        for finding in rule.find(spec)
    ]


def touches(path: Path, field: Path) -> bool:
    """One of them is the other or lies within it."""
    shared = min(len(path), len(field))
    return path[:shared] == field[:shared]


def one_program(spec: JobSpec) -> Iterator[Finding]:
    """`run` names one thing to start."""
    run = spec.run
    given = [name for name in ("module", "script", "command") if getattr(run, name) is not None]
    if len(given) > 1:
        fix = "keep one of run.module, run.script and run.command"
        yield Finding(("run", given[1]), f"can't go with run.{given[0]}", fix)


def started_once(spec: JobSpec) -> Iterator[Finding]:
    if spec.run.launcher and spec.run.command is not None:
        fix = "remove run.launcher; a command that wants torchrun starts it itself"
        yield Finding(("run", "launcher"), "a command is always started once a node, as it is", fix)


def own_trainer(spec: JobSpec) -> Iterator[Finding]:
    """`run.config` is the built-in trainer's, and is checked by it before it costs anything."""
    run = spec.run
    if not run.config:
        return
    if run.script or run.command or run.module not in (None, BUILTIN, OLD_BUILTIN):
        fix = "pass your program's settings with run.args or env"
        yield Finding(("run", "config"), "only the built-in trainer (run.module: launch_train) reads it", fix)
        return
    from launch_train.common.config import problems
    from launcher.spec.secretive import secrets_in

    secret = [at for at, _ in secrets_in(run.config, ())]
    for path, what, fix in problems(run.config):
        if any(touches(path, at) for at in secret):
            continue  # the trainer's words would show it
        yield Finding(("run", "config", *path), what, fix)


def own_silence(spec: JobSpec) -> Iterator[Finding]:
    """The built-in trainer counts steps."""
    if spec.run.hang_after is not None and spec.run.is_builtin:
        yield Finding(("run", "hang_after"), "is for scripts and commands", "use run.config.hang_after")


def own_functions(run: Run) -> dict[str, str]:
    """Functions of the user's (MODULE:FUNCTION) that `run.config` names, by their field; not those of PyTorch."""
    if not run.is_builtin or not run.config:
        return {}
    from launch_train.common.config import own_functions as named

    found = {f"run.config.{key}": name for key, name in named(run.config).items()}
    return {key: name for key, name in found.items() if re.split("[.:]", name)[0] not in INSTALLED}


INSTALLED = frozenset({"torch", "numpy", "transformers"})
"""What every image has (containers/): a loss may be torch.nn.functional:cross_entropy."""


def own_files(run: Run) -> dict[str, str]:
    """Paths that `run.config` reads its data from, by their field; not those in buckets, nor what comes by itself."""
    if not run.is_builtin or not run.config:
        return {}
    from launch_train.common.config import own_paths

    return {f"run.config.{key}": path for key, path in own_paths(run.config).items()}


def one_image(spec: JobSpec) -> Iterator[Finding]:
    """Either an image that exists, or what it takes to put one together."""
    image = spec.image
    if image.uri:
        for name in ("repository", "code", "requirements", "base", "torch", "wheel"):
            if getattr(image, name) is not None:
                fix = "remove it: an image of your own (image.uri) is used as it is"
                yield Finding(("image", name), "can't go with image.uri", fix)


def no_container_registry(spec: JobSpec) -> Iterator[Finding]:
    """Container Registry was shut down on 2025-03-18; what is named gcr.io now is Artifact Registry, read only."""
    host, _, path = (spec.image.repository or "").partition("/")
    if host.endswith("gcr.io"):
        location = {"eu": "europe", "asia": "asia"}.get(host.partition(".")[0], "us")
        fix = f"Artifact Registry: {location}-docker.pkg.dev/{path.partition('/')[0]}/launch"
        yield Finding(("image", "repository"), f"{host}: Container Registry takes no writes since 2025-03-18", fix)


def no_empty_or_double(spec: JobSpec) -> Iterator[Finding]:
    """Lists that are tried in their order have something in them, and nothing twice."""
    for name in ("provisioning", "regions", "zones"):
        values = getattr(spec, name)
        if values == ():
            yield Finding((name,), "is an empty list", "name at least one, or remove the line")
        elif isinstance(values, tuple):
            yield from doubles((name,), values, "name each once")


def doubles(at: Path, values: Sequence[str], fix: str) -> Iterator[Finding]:
    for value, times in Counter(values).items():
        if times > 1:
            index = len(values) - 1 - values[::-1].index(value)
            yield Finding((*at, index), f"{clipped(value)!r} is given {times} times", fix)


def zones_in_regions(spec: JobSpec) -> Iterator[Finding]:
    if not isinstance(spec.regions, tuple) or not spec.regions:
        return
    for index, zone in enumerate(spec.zones or ()):
        if region_of(zone) not in spec.regions:
            fix = f"add {region_of(zone)} to regions, or remove the zone"
            yield Finding(("zones", index), f"{zone} is in none of the regions ({', '.join(spec.regions)})", fix)


def reservation_in_reach(spec: JobSpec) -> Iterator[Finding]:
    """A reservation is used in its own zone."""
    for index, provisioning in enumerate(spec.provisioning or ()):
        if not provisioning.startswith("reservation:"):
            continue
        zone = provisioning.split("/")[3]
        at = ("provisioning", index)
        if not re.fullmatch(ZONE, zone):
            fix = "reservation:projects/P/zones/Z/reservations/R, with a Z such as us-central1-a"
            yield Finding(at, f"{clipped(zone)!r} is no zone", fix)
        elif spec.zones and zone not in spec.zones:
            yield Finding(at, f"the reservation is in {zone}, which zones leaves out", f"add {zone} to zones")
        elif isinstance(spec.regions, tuple) and region_of(zone) not in spec.regions:
            fix = f"add {region_of(zone)} to regions"
            yield Finding(at, f"the reservation is in {zone}, which regions leaves out", fix)


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def reduction_server(spec: JobSpec) -> Iterator[Finding]:
    """Vertex's Reduction Server adds up gradients of several nodes, on plain networks, without Flex-start."""
    at = ("vertex", "reduction_server")
    if spec.vertex.reduction_server is None:
        return
    if spec.machine.nodes == 1:
        yield Finding(at, "has nothing to do with machine.nodes: 1", "remove it, or ask for several nodes")
    if "flex-start" in (spec.provisioning or ()):
        fix = "remove it, or flex-start: Flex-start wants the same machine in all pools"
        yield Finding(at, "can't go with provisioning flex-start", fix)


def persistent_resource(spec: JobSpec) -> Iterator[Finding]:
    """A persistent resource has its machines already."""
    given = [model for model in spec.provisioning or () if model in ("flex-start", "spot")]
    if spec.vertex.persistent_resource and given:
        fix = "remove provisioning: the machines of a persistent resource are there already"
        yield Finding(("vertex", "persistent_resource"), f"can't go with provisioning {given[0]}", fix)


def experiment(spec: JobSpec) -> Iterator[Finding]:
    if spec.vertex.experiment_run and not spec.vertex.experiment:
        fix = "name the experiment in vertex.experiment"
        yield Finding(("vertex", "experiment_run"), "is a run of no experiment", fix)


def network(spec: JobSpec) -> Iterator[Finding]:
    """A job is in a peered network or has a Private Service Connect interface."""
    identity = spec.identity
    if identity.network and identity.psc:
        yield Finding(("identity", "psc"), "can't go with identity.network", "keep one of the two")
    if identity.reserved_ip_ranges and not identity.network:
        fix = "name the peered network in identity.network"
        yield Finding(("identity", "reserved_ip_ranges"), "goes with identity.network alone", fix)


def output(spec: JobSpec) -> Iterator[Finding]:
    """A bucket's folder or a path: nothing else can be written to."""
    from launcher.spec.secretive import known_secret, masked

    where = spec.output
    if where is None:
        return
    shown = masked(where) if known_secret(where) else repr(clipped(where))
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", where)
    if where.startswith("gs://"):
        if not re.fullmatch(BUCKET, where):
            yield Finding(("output",), f"{shown} names no bucket", "gs://BUCKET/PATH")
    elif scheme or not where.strip():
        yield Finding(("output",), f"{shown} can't be written to", "gs://BUCKET/PATH, or a local folder")


def mount_points(spec: JobSpec) -> Iterator[Finding]:
    for kind in ("nfs", "lustre"):
        points = [mount.mount_point for mount in getattr(spec.vertex, kind)]
        yield from doubles(("vertex", kind), points, "give each mount a mount_point of its own")


def vm_image(spec: JobSpec) -> Iterator[Finding]:
    if spec.vm.image and spec.vm.image_family:
        yield Finding(("vm", "image"), "can't go with vm.image_family", "keep one of the two")


def labels(spec: JobSpec) -> Iterator[Finding]:
    for key in spec.labels:
        if key.startswith("launch-"):
            yield Finding(("labels", key), "launch itself sets the labels that start with launch-", "name it otherwise")


def environment(spec: JobSpec) -> Iterator[Finding]:
    """Variables of the spec don't collide with each other, the platform's or launch's."""
    from launch_train.common.contract import RESERVED, RESERVED_PREFIXES

    for section in ("env", "secrets"):
        for name in getattr(spec, section):
            if name in RESERVED or name.startswith(RESERVED_PREFIXES):
                yield Finding((section, name), "is set by launch, torchrun or the platform", "name it otherwise")
    for name in sorted(spec.env.keys() & spec.secrets.keys()):
        yield Finding(("env", name), "stands in env and in secrets", "keep one of the two")


def secrets(spec: JobSpec) -> Iterator[Finding]:
    """A request is stored and shown by the cloud: what is in `env` is not secret."""
    from launcher.spec.secretive import looks_secret, masked

    for name, value in spec.env.items():
        if looks_secret(name, value):
            fix = f"store it in Secret Manager, and name it under secrets: {name}: projects/P/secrets/S/versions/latest"
            yield Finding(("env", name), f"{masked(value)} looks like a secret, and env can be read by others", fix)


def secrets_of_program(spec: JobSpec) -> Iterator[Finding]:
    """The same goes for what the program is given: no name tells there, so only well-known kinds are seen."""
    from launcher.spec.secretive import masked, secrets_in

    for field in ("command", "args", "config"):
        for at, text in secrets_in(getattr(spec.run, field) or (), ("run", field)):
            what = f"{masked(text)} has a secret in it, and the request can be read by others"
            yield Finding(at, what, "store it in Secret Manager, name it under secrets:, and read that variable")


CHECKS = (
    Check(one_program, (("run", "module"), ("run", "script"), ("run", "command"))),
    Check(started_once, (("run", "launcher"), ("run", "command"))),
    Check(own_trainer, (("run", "config"), ("run", "module"), ("run", "script"), ("run", "command"))),
    Check(own_silence, (("run", "hang_after"), ("run", "module"), ("run", "script"), ("run", "command"))),
    Check(one_image, (("image",),)),
    Check(no_container_registry, (("image", "repository"),)),
    Check(no_empty_or_double, (("provisioning",), ("regions",), ("zones",))),
    Check(zones_in_regions, (("regions",), ("zones",))),
    Check(reservation_in_reach, (("provisioning",), ("regions",), ("zones",))),
    Check(reduction_server, (("vertex", "reduction_server"), ("machine",), ("provisioning",))),
    Check(persistent_resource, (("vertex", "persistent_resource"), ("provisioning",))),
    Check(experiment, (("vertex", "experiment"), ("vertex", "experiment_run"))),
    Check(network, (("identity",),)),
    Check(output, (("output",),)),
    Check(mount_points, (("vertex", "nfs"), ("vertex", "lustre"))),
    Check(vm_image, (("vm",),)),
    Check(labels, (("labels",),)),
    Check(environment, (("env",), ("secrets",))),
    Check(secrets, (("env",),)),
    Check(secrets_of_program, (("run", "command"), ("run", "args"), ("run", "config"))),
)
