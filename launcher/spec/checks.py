"""Check combinations of settings that are valid on their own but cannot work together. Pure.

Each check declares the settings that it reads. If one of them has no valid value, that check is skipped and the others
still run, so one pass reports every error of a file.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from launch_train.common.config import local_paths, parse, problems, user_functions
from launch_train.common.contract import RESERVED, RESERVED_PREFIXES
from launch_train.common.loopback import is_loopback
from launcher.jobs.job import SWEEP_LABEL
from launcher.spec.kinds import BUCKET, ZONE
from launcher.spec.models import BUILTIN, OCCUPIED, SOURCES, SYSTEM, JobSpec, Run
from launcher.spec.nodes import Path, clipped
from launcher.spec.secret_detection import known_secret, looks_secret, masked, secrets_in

if TYPE_CHECKING:
    from launch_train.common.config import Config


class Finding(Struct, frozen=True):
    """An invalid combination: the setting to report, what is wrong, and what to do."""

    at: Path
    what: str
    fix: str


class Check(Struct, frozen=True):
    """One rule and the settings that it reads."""

    find: Callable[[JobSpec], Iterable[Finding]]
    reads: tuple[Path, ...]


def check(spec: JobSpec, invalid: Sequence[Path] = ()) -> list[Finding]:
    """Return all invalid combinations. Checks that read one of the `invalid` settings are skipped."""
    return [
        finding
        for rule in CHECKS
        if not any(paths_overlap(path, field) for path in invalid for field in rule.reads)
        for finding in rule.find(spec)
    ]


def paths_overlap(path: Path, other: Path) -> bool:
    """Return whether one path equals the other or lies below it."""
    shared = min(len(path), len(other))
    return path[:shared] == other[:shared]


def conflicting_programs(spec: JobSpec) -> Iterator[Finding]:
    run = spec.run
    named = [name for name in ("module", "script", "command") if getattr(run, name) is not None]
    if len(named) > 1:
        fix = "keep one of run.module, run.script and run.command"
        yield Finding(("run", named[1]), f"cannot be combined with run.{named[0]}", fix)
    if run.launcher is not None and run.command is not None:
        fix = "remove run.launcher; to use torchrun, start it in the command itself"
        what = "has no effect on run.command, which is started once per node"
        yield Finding(("run", "launcher"), what, fix)


def trainer_config(spec: JobSpec) -> Iterator[Finding]:
    """Check `run.config` with the built-in trainer's own parser, before anything is billed."""
    run = spec.run
    if not run.config:
        return
    if run.script or run.command or run.module not in (None, BUILTIN):
        fix = "pass settings to your own program with run.args or env"
        yield Finding(("run", "config"), "is read only by the built-in trainer (run.module: launch_train)", fix)
        return
    secret = [at for at, _ in secrets_in(run.config, ())]
    for path, what, fix in problems(run.config):
        if any(paths_overlap(path, at) for at in secret):
            continue  # the trainer's message would show the secret
        yield Finding(("run", "config", *path), what, fix)


SCRIPT_SETTINGS = {
    "hang_after": "for the built-in trainer, set run.config.hang_after",
    "loggers": "for the built-in trainer, set run.config.loggers",
    "metrics": "remove it: the built-in trainer logs its own metrics",
    "resume_args": "remove it: the built-in trainer resumes from its own checkpoints",
}
"""Settings of `run` that the built-in trainer doesn't have, and what to do instead."""


def settings_of_scripts(spec: JobSpec) -> Iterator[Finding]:
    run = spec.run
    for name, fix in SCRIPT_SETTINGS.items() if run.is_builtin else ():
        if getattr(run, name) is not None:
            yield Finding(("run", name), "applies only to scripts and commands", fix)
    yield from duplicates(("run", "loggers"), run.loggers or (), "remove the duplicates")


def script_resume(spec: JobSpec) -> Iterator[Finding]:
    """Check how a script resumes from its own checkpoints (train/launch_train/node/own_checkpoints.py)."""
    pattern, args = spec.run.resume_glob, spec.run.resume_args
    if pattern and pattern.count("{step}") > 1:
        yield Finding(("run", "resume_glob"), "{step} occurs twice", "keep one, and write * for the other")
    for index, arg in enumerate(args or ()):
        for placeholder in re.findall(r"\{\w+\}", arg):
            if placeholder not in ("{step}", "{path}"):
                at = ("run", "resume_args", index)
                yield Finding(at, f"unknown placeholder {clipped(placeholder)}", "use {step} or {path}")


def script_metrics(spec: JobSpec) -> Iterator[Finding]:
    """Check `run.metrics`: the node compiles the regular expression with the same rules (node/collector.py)."""
    at, wanted = ("run", "metrics"), spec.run.metrics
    if wanted is None or spec.run.is_builtin:
        return
    if wanted.regex is None and wanted.tensorboard is None:
        yield Finding(at, "is empty", "set run.metrics.regex, run.metrics.tensorboard or both")
    elif wanted.regex is not None and (problem := regex_problem(wanted.regex)):
        fix = "for example: '^step (?P<step>\\d+): loss (?P<loss>[\\d.]+)'"
        yield Finding((*at, "regex"), problem, fix)


def regex_problem(regex: str) -> str:
    """Return why lines of output can't be read with this regular expression, or ""."""
    try:
        with warnings.catch_warnings(action="ignore"):
            names = re.compile(regex).groupindex.keys()
    except (re.error, RecursionError, OverflowError) as error:
        return f"{clipped(regex)} is not a regular expression of Python: {error}"
    if "step" not in names:
        return f"{clipped(regex)} has no group (?P<step>…)"
    if taken := sorted(names & {"time", "event", "nonfinite"}):
        return f"the group name {taken[0]} is reserved"
    return "" if len(names) > 1 else f"{clipped(regex)} has no named group beside step, so its rows would be empty"


def config_of(run: Run) -> Config:
    """Return the built-in trainer's settings with their defaults; parsed once, as many parts of a plan ask for them."""
    return _parsed(msgspec.json.encode(run.config))


@lru_cache(maxsize=64)
def _parsed(config: bytes) -> Config:
    return parse(msgspec.json.decode(config))


def custom_functions(run: Run) -> dict[str, str]:
    """Return the custom functions (MODULE:FUNCTION) in `run.config`, by setting; without functions of PyTorch & co."""
    if not run.is_builtin or not run.config:
        return {}
    functions = {f"run.config.{key}": name for key, name in user_functions(run.config).items()}
    return {key: name for key, name in functions.items() if re.split("[.:]", name)[0] not in INSTALLED}


INSTALLED = frozenset({"torch", "numpy", "transformers"})
"""Packages in every image (containers/): a loss may be torch.nn.functional:cross_entropy."""


def data_paths(run: Run) -> dict[str, str]:
    """Return the local data paths in `run.config`, by setting; without buckets and built-in data sets."""
    if not run.is_builtin or not run.config:
        return {}
    return {f"run.config.{key}": path for key, path in local_paths(run.config).items()}


def webhook(spec: JobSpec) -> Iterator[Finding]:
    """Check `notify`. No message shows the URL, which is a secret."""
    wanted = spec.notify
    if wanted is None:
        return
    if wanted.webhook.startswith("http://") and not is_loopback(wanted.webhook):
        yield Finding(("notify", "webhook"), "http:// would send the run's data unencrypted", "use https://")
    yield from duplicates(("notify", "on"), wanted.on, "remove the duplicates")
    shares = [index for index, event in enumerate(wanted.on) if event.startswith("cost>")]
    if len(shares) > 1:
        yield Finding(("notify", "on", shares[1]), "a second share of the cost", "keep one")
    if shares and spec.limits.usd is None:
        fix = "set limits.usd, the maximum cost of the run"
        yield Finding(("notify", "on", shares[0]), f"{wanted.on[shares[0]]} needs limits.usd", fix)
    if spec.run.node == "none":
        yield Finding(("notify",), "is sent by launch's node, and run.node is none", "remove it, or run.node")


def conflicting_image_settings(spec: JobSpec) -> Iterator[Finding]:
    """An existing image (image.uri) is not built, so settings of the build cannot apply to it."""
    of_code, of_build = "repository code allow_secrets", "requirements base torch wheel python dockerfile"
    for name in f"{of_code} {of_build} build_secrets setup".split() if spec.image.uri else ():
        is_appended = spec.run.node == "append" and name in of_code.split()
        if getattr(spec.image, name) and not is_appended:
            fix = "remove it: an existing image (image.uri) is used unchanged"
            yield Finding(("image", name), "cannot be combined with image.uri", fix)


def node_of_existing_image(spec: JobSpec) -> Iterator[Finding]:
    """The node is in every image that launch builds; only an existing image may lack it, or be started without it."""
    run = spec.run
    if run.node and not spec.image.uri:
        yield Finding(("run", "node"), "applies only to an existing image (image.uri)", "remove it")
    elif run.node == "append" and run.is_builtin:
        fix = "start your own program (run.script), or build on the image: image.base"
        yield Finding(("run", "node"), "append adds no PyTorch, which the built-in trainer needs", fix)
    elif run.node == "none":
        fix = "remove it, or run.node; without the node, only run.command, run.args and env have an effect"
        for name in ("module", "script", "config", "launcher", "hang_after", "loggers", "metrics", "resume_args"):
            if getattr(run, name):
                yield Finding(("run", name), "needs launch's node, and run.node is none", fix)
        if run.preflight != "off":
            yield Finding(("run", "preflight"), "needs launch's node, and run.node is none", fix)
        if spec.secrets:
            yield Finding(("secrets",), "are read by launch's node, and run.node is none", "remove run.node")


def container_registry(spec: JobSpec) -> Iterator[Finding]:
    """Container Registry was shut down on 2025-03-18; gcr.io names are now read-only Artifact Registry repositories."""
    host, _, path = (spec.image.repository or "").partition("/")
    if host.endswith("gcr.io"):
        location = {"eu": "europe", "asia": "asia"}.get(host.partition(".")[0], "us")
        fix = f"use Artifact Registry: {location}-docker.pkg.dev/{path.partition('/')[0]}/launch"
        yield Finding(("image", "repository"), f"{host} (Container Registry) is read-only since 2025-03-18", fix)


def empty_or_duplicate_entries(spec: JobSpec) -> Iterator[Finding]:
    """Check the lists that define a fallback order."""
    for name in ("provisioning", "regions", "zones"):
        values = getattr(spec, name)
        if values == ():
            yield Finding((name,), "is an empty list", "add an entry, or remove the line")
        elif isinstance(values, tuple):
            yield from duplicates((name,), values, "remove the duplicates")


def several_machine_types(spec: JobSpec) -> Iterator[Finding]:
    """Check the list, and what only a single machine type can have."""
    at, types = ("machine", "type"), spec.machine.types
    if not types:
        yield Finding(at, "is an empty list", "add a name")
    if "" in types:
        yield Finding((*at, types.index("")), "a name is missing", "list names such as [h100, a100-80gb]")
    if len(types) < 2:
        return
    yield from duplicates(at, types, "remove the duplicates")
    fix = f"name one type: machine.type: {types[0]}"
    if spec.machine.accelerator:
        yield Finding(("machine", "accelerator"), "cannot be combined with several machine types", fix)
    if spec.vertex.persistent_resource:
        yield Finding(at, "cannot be several types with vertex.persistent_resource", fix)
    if any(model.startswith("reservation:") for model in spec.provisioning or ()):
        yield Finding(at, "cannot be several types with a reservation", fix)


def duplicates(at: Path, values: Sequence[str], fix: str) -> Iterator[Finding]:
    for value, times in Counter(values).items():
        if times > 1:
            index = len(values) - 1 - values[::-1].index(value)
            yield Finding((*at, index), f"{clipped(value)!r} is listed {times} times", fix)


def zones_outside_regions(spec: JobSpec) -> Iterator[Finding]:
    if not isinstance(spec.regions, tuple) or not spec.regions:
        return
    for index, zone in enumerate(spec.zones or ()):
        if region_of(zone) not in spec.regions:
            fix = f"add {region_of(zone)} to regions, or remove the zone"
            yield Finding(("zones", index), f"{zone} is in none of the regions ({', '.join(spec.regions)})", fix)


def reservation_outside_places(spec: JobSpec) -> Iterator[Finding]:
    """A reservation can be used only in its own zone."""
    if spec.vm.dense_reservation and not any(model.startswith("reservation:") for model in spec.provisioning or ()):
        fix = "set provisioning: reservation:projects/P/zones/Z/reservations/R"
        yield Finding(("vm", "dense_reservation"), "no reservation is set", fix)
    for index, provisioning in enumerate(spec.provisioning or ()):
        if not provisioning.startswith("reservation:"):
            continue
        zone = provisioning.split("/")[3]
        at = ("provisioning", index)
        if not re.fullmatch(ZONE, zone):
            fix = "use reservation:projects/P/zones/Z/reservations/R, with a zone such as us-central1-a"
            yield Finding(at, f"invalid zone {clipped(zone)!r}", fix)
        elif spec.zones and zone not in spec.zones:
            yield Finding(at, f"the reservation is in {zone}, which zones does not list", f"add {zone} to zones")
        elif isinstance(spec.regions, tuple) and region_of(zone) not in spec.regions:
            fix = f"add {region_of(zone)} to regions"
            yield Finding(at, f"the reservation is in {zone}, whose region is not in regions", fix)


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def reduction_server(spec: JobSpec) -> Iterator[Finding]:
    """Vertex AI's Reduction Server sums the gradients of several nodes. Flex-start does not support it."""
    at = ("vertex", "reduction_server")
    if spec.vertex.reduction_server is None:
        return
    if spec.machine.nodes == 1:
        yield Finding(at, "needs two or more nodes, and machine.nodes is 1", "remove it, or raise machine.nodes")
    if "flex-start" in (spec.provisioning or ()):
        fix = "remove one of the two: flex-start needs the same machine type in all worker pools"
        yield Finding(at, "cannot be combined with provisioning flex-start", fix)


def persistent_resource(spec: JobSpec) -> Iterator[Finding]:
    """The machines of a persistent resource exist already."""
    unsupported = [model for model in spec.provisioning or () if model in ("flex-start", "spot")]
    if spec.vertex.persistent_resource and unsupported:
        fix = "remove provisioning: the machines of a persistent resource exist already"
        yield Finding(("vertex", "persistent_resource"), f"cannot be combined with provisioning {unsupported[0]}", fix)


def output_location(spec: JobSpec) -> Iterator[Finding]:
    """The output is a folder in a bucket, or a local path."""
    where = spec.output
    if where is None:
        return
    shown = masked(where) if known_secret(where) else repr(clipped(where))
    if where.startswith("gs://"):
        if not re.fullmatch(BUCKET, where):
            fix = "use gs://BUCKET/PATH; a bucket name has a-z, 0-9, '-', '_' and '.', and 3 or more characters"
            yield Finding(("output",), f"invalid bucket name in {shown}", fix)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", where) or not where.strip():
        fix = "use gs://BUCKET/PATH; `launch local` also takes a folder"
        yield Finding(("output",), f"unsupported location {shown}", fix)


def mount_points(spec: JobSpec) -> Iterator[Finding]:
    for kind in ("nfs", "lustre"):
        points = [mount.mount_point for mount in getattr(spec.vertex, kind)]
        yield from duplicates(("vertex", kind), points, "use a different mount_point for each mount")


def mount_sources(spec: JobSpec) -> Iterator[Finding]:
    """Each mount has one source, and its own folder in the container."""
    for index, mount in enumerate(spec.mounts):
        at = ("mounts", index)
        sources = [name for name in SOURCES if getattr(mount, name) is not None]
        if not sources:
            yield Finding(at, "names nothing to mount", f"add one of {', '.join(SOURCES)}")
        elif len(sources) > 1:
            yield Finding((*at, sources[1]), f"cannot be combined with {sources[0]}", "make it a separate mount")
        elif mount.path is None and sources != ["bucket"]:
            yield Finding((*at, "path"), "required, but missing", "add the folder in the container: path: /data")
        if mount.new_disk_type and mount.new_disk_gb is None:
            yield Finding((*at, "new_disk_type"), "needs new_disk_gb", "add the size, such as new_disk_gb: 500")
        if mount.volume_handle and mount.lustre is None:
            yield Finding((*at, "volume_handle"), "needs lustre", "remove it, or add lustre: IP@tcp:/FILESYSTEM")
        if mount.read_only and mount.new_disk_gb:
            yield Finding((*at, "read_only"), "a new disk is empty, so it must be writable", "remove it")
        path = mount.path or ""
        if path in OCCUPIED or any(f"{path}/".startswith(f"{folder}/") for folder in SYSTEM):
            yield Finding((*at, "path"), f"{path} is a folder of the image", "use another folder, such as /data")
    folders = [mount.folder for mount in spec.mounts]
    yield from duplicates(("mounts",), folders, "use a different path for each mount")


def labels(spec: JobSpec) -> Iterator[Finding]:
    for key in spec.labels:
        if key.startswith("launch-") and key != SWEEP_LABEL:  # the spec in the folder of a sweep's run has that one
            yield Finding(("labels", key), "the prefix launch- is reserved for launch's own labels", "rename the label")


def variable_names(spec: JobSpec) -> Iterator[Finding]:
    """The spec's variables must not collide with each other, the platform's or launch's."""
    for section in ("env", "secrets"):
        for name in getattr(spec, section):
            if name in RESERVED or name.startswith(RESERVED_PREFIXES):
                yield Finding((section, name), "is set by launch, torchrun or the platform", "use another name")
    for folder in spec.env.get("PYTHONPATH", "").split(":") if spec.run.node != "none" else ():
        if "$" in folder or ".." in folder.split("/"):
            fix = "name folders of the code, separated by colons: env: {PYTHONPATH: src}"
            yield Finding(("env", "PYTHONPATH"), f"{folder!r} is not a folder of the code", fix)
    for name in sorted(spec.env.keys() & spec.secrets.keys()):
        yield Finding(("env", name), "is set in both env and secrets", "keep one of the two")


def secrets_in_env(spec: JobSpec) -> Iterator[Finding]:
    """The cloud stores and shows a job's request, so values in `env` are not secret."""
    for name, value in spec.env.items():
        if looks_secret(name, value):
            fix = f"store it in Secret Manager, and reference it: secrets.{name}: projects/P/secrets/S/versions/latest"
            yield Finding(("env", name), f"{masked(value)} looks like a secret, and others can read env", fix)


def secrets_in_program(spec: JobSpec) -> Iterator[Finding]:
    """Arguments and config have no telling variable name, so only well-known kinds of secrets are found there."""
    for field in ("command", "args", "config", "resume_args"):
        for at, text in secrets_in(getattr(spec.run, field) or (), ("run", field)):
            what = f"{masked(text)} contains a secret, and others can read the request"
            yield Finding(at, what, "store it in Secret Manager, reference it under secrets:, and read that variable")
    for at, text in secrets_in(spec.image.setup, ("image", "setup")):
        what = f"{masked(text)} contains a secret, and others can read the image's history"
        yield Finding(at, what, "name a variable of this shell in image.build_secrets, and write $NAME in the line")


def pair(spec: JobSpec, setting: str, rule: str, other: str, fix: str) -> Iterator[Finding]:
    is_set, is_other_set = (attrgetter(name)(spec) not in (None, ()) for name in (setting, other))
    if is_set and is_other_set == (rule == EXCLUDES):
        yield Finding(path_of(setting), f"{rule} {other}", fix)


def path_of(setting: str) -> Path:
    return tuple(setting.split("."))


NEEDS, EXCLUDES = "needs", "cannot be combined with"
RESUME = "set both: {step} and {path} are the newest checkpoint's"
PAIRS = (
    ("run.resume_glob", NEEDS, "run.resume_args", RESUME),
    ("run.resume_args", NEEDS, "run.resume_glob", RESUME),
    ("image.dockerfile", EXCLUDES, "image.base", "name the base in its FROM"),
    ("vm.image", EXCLUDES, "vm.image_family", "remove one of the two"),
    ("identity.psc", EXCLUDES, "identity.network", "remove one of the two"),
    ("identity.reserved_ip_ranges", NEEDS, "identity.network", "name the peered network in identity.network"),
    ("vertex.experiment_run", NEEDS, "vertex.experiment", "name the experiment in vertex.experiment"),
)
"""Settings that need another one, or that another one rules out, and what to do."""
CHECKS = (
    Check(conflicting_programs, tuple(("run", name) for name in ("module", "script", "command", "launcher"))),
    Check(trainer_config, (("run", "config"), ("run", "module"), ("run", "script"), ("run", "command"))),
    Check(settings_of_scripts, (("run",),)),
    Check(script_resume, (("run", "resume_glob"), ("run", "resume_args"))),
    Check(conflicting_image_settings, (("image",), ("run", "node"))),
    Check(node_of_existing_image, (("image", "uri"), ("run",), ("secrets",))),
    Check(script_metrics, (("run", "metrics"), ("run", "module"), ("run", "script"), ("run", "command"))),
    Check(webhook, (("notify",), ("limits", "usd"), ("run", "node"))),
    Check(container_registry, (("image", "repository"),)),
    Check(empty_or_duplicate_entries, (("provisioning",), ("regions",), ("zones",))),
    Check(several_machine_types, (("machine",), ("vertex", "persistent_resource"), ("provisioning",))),
    Check(zones_outside_regions, (("regions",), ("zones",))),
    Check(reservation_outside_places, (("provisioning",), ("regions",), ("zones",), ("vm", "dense_reservation"))),
    Check(reduction_server, (("vertex", "reduction_server"), ("machine",), ("provisioning",))),
    Check(persistent_resource, (("vertex", "persistent_resource"), ("provisioning",))),
    Check(output_location, (("output",),)),
    Check(mount_points, (("vertex", "nfs"), ("vertex", "lustre"))),
    Check(mount_sources, (("mounts",),)),
    Check(labels, (("labels",),)),
    Check(variable_names, (("env",), ("secrets",))),
    Check(secrets_in_env, (("env",),)),
    Check(secrets_in_program, (("run",), ("image", "setup"))),
    *(
        Check(partial(pair, setting=setting, rule=rule, other=other, fix=fix), (path_of(setting), path_of(other)))
        for setting, rule, other, fix in PAIRS
    ),
)
