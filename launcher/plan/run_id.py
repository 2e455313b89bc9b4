"""Compute run ids and identities: hashes of what is computed and for whom."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
from msgspec.structs import replace

from launcher.plan.model import Context
from launcher.spec.models import BUILTIN, OLD_BUILTIN, JobSpec


def run_id(spec: JobSpec, context: Context, gpus: int) -> str:
    """Return `<name>-<8 hex>`, a hash of the computation and its owner.

    Placement, limits, labels and launch's version do not count, so another region or a retry is the same run.
    """
    return context.run_id or f"{spec.name}-{compute_identity(spec, context, gpus)}"


def compute_identity(spec: JobSpec, context: Context, gpus: int) -> str:
    """Return 8 hex digits over the computation and its owner. A custom run id belongs to one identity.

    With target `local`, project and account do not count.
    """
    here = context.target == "local"
    run = replace(spec.run, preflight="off", hang_after=None, metrics=None, loggers=None)
    if run.module:
        # launch_train counts by its former name, so that existing ids stay valid, and a user's `train` by another.
        package, _, rest = run.module.partition(".")
        old = {BUILTIN: OLD_BUILTIN, OLD_BUILTIN: f"./{OLD_BUILTIN}"}.get(package, package)
        run = replace(run, module=f"{old}.{rest}" if rest else old)
    counted = {name: value for name, value in msgspec.to_builtins(run).items() if not name.startswith("resume_")}
    # New disks are empty, and /gcs/BUCKET names its data itself and is there on Vertex AI without a mount.
    mounts = [
        [mount.kind, mount.source, mount.folder]
        for mount in spec.mounts
        if not mount.new_disk_gb and mount.folder != f"/gcs/{mount.bucket}"
    ]
    what = {
        "run": counted,
        "env": spec.env,
        "gpus": gpus,
        "nodes": spec.machine.nodes,
        "code": context.code.digest,
        "requirements": context.requirements.digest,
        "image": [
            spec.image.uri,
            spec.image.base,
            spec.image.wheel,
            context.torch.digest,
            *newer_settings(spec, context),
        ],
        "project": "local" if here else context.project,
        "output": spec.output,
        **({"mounts": mounts} if mounts else {}),
        "owner": "local" if here else context.owner,
    }
    return json_digest(what, 8)


def newer_settings(spec: JobSpec, context: Context) -> tuple[str, ...]:
    """Return what later settings of an image add to run ids: nothing where they are unset, so that existing ids stay
    valid."""
    image = spec.image
    own_base = [context.own_base.digest] if image.dockerfile else []
    return (
        *own_base,
        *(["torch: base"] if image.torch == "base" else []),
        *([f"python: {image.python}"] if image.python else []),
        *(f"setup: {line}" for line in image.setup),
        *([f"extras: {names}"] if (names := [*context.packages.extras, *context.packages.groups]) else []),
    )


def spec_hash(spec: JobSpec) -> str:
    """Return 12 hex digits over the whole spec, to compare a job with the file that it was launched from."""
    return json_digest(msgspec.to_builtins(spec), 12)


def json_digest(data: Any, length: int) -> str:
    """Return the first `length` hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
