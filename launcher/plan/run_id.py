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
        run = replace(run, module=counted_module(run.module))
    what = {
        "run": msgspec.to_builtins(run),
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
        **({"mounts": data} if (data := mounted_data(spec)) else {}),
        "owner": "local" if here else context.owner,
    }
    return json_digest(what, 8)


def mounted_data(spec: JobSpec) -> list[list[str]]:
    """Return the mounts as run ids hash them: without new disks, which are empty, and buckets at /gcs/BUCKET, a path
    that names its data itself and that Vertex AI has without a mount."""
    return [
        [one.kind, one.source, one.folder]
        for one in spec.mounts
        if not one.new_disk_gb and one.folder != f"/gcs/{one.bucket}"
    ]


def newer_settings(spec: JobSpec, context: Context) -> tuple[str, ...]:
    """Return what later settings of an image add to run ids: nothing where they are unset, so that existing ids stay
    valid."""
    image = spec.image
    own_base = [context.own_base.digest] if image.dockerfile else []
    return (
        *own_base,
        *(["torch: base"] if image.torch == "base" else []),
        *([f"python: {image.python}"] if image.python else []),
    )


def counted_module(module: str) -> str:
    """Return the module name that run ids hash: launch_train by its former name, so that existing ids stay valid, and
    a user's `train` by another."""
    package, _, rest = module.partition(".")
    old = {BUILTIN: OLD_BUILTIN, OLD_BUILTIN: f"./{OLD_BUILTIN}"}.get(package, package)
    return f"{old}.{rest}" if rest else old


def spec_hash(spec: JobSpec) -> str:
    """Return 12 hex digits over the whole spec, to compare a job with the file that it was launched from."""
    return json_digest(msgspec.to_builtins(spec), 12)


def json_digest(data: Any, length: int) -> str:
    """Return the first `length` hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
