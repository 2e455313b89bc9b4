"""Name a run and what belongs to it: run ID, labels, owner, and defaults for output, repository and account. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from launcher.jobs import job
from launcher.plan.model import Context
from launcher.spec.models import BUILTIN, JobSpec

DEFAULT_HOST = "us-docker.pkg.dev"


def labels(spec: JobSpec, context: Context, run: str, identity: str = "") -> dict[str, str]:
    """Return the user's labels and launch's own, by which runs are found. A VM to work on has no identity."""
    return {
        **spec.labels,
        job.RUN_LABEL: run,
        **({job.IDENTITY_LABEL: identity} if identity else {}),
        **({job.OWNER_LABEL: context.owner_label} if context.owner_label else {}),
        "launch-spec": json_digest(msgspec.to_builtins(spec), 12),  # to compare a job with the spec that it is from
        "launch-version": label_value(context.version),
    }


def label_value(text: str) -> str:
    """Convert a text to a label value: a-z, 0-9, `_` and `-`, at most 63. gcloud refuses dots and capitals."""
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]


def default_output(project: str) -> str:
    """Return the default output. Project ids are globally unique, so the bucket name is likely to be free."""
    return f"gs://{re.sub(r'[^a-z0-9-]', '-', project)}-launch/runs"


def default_repository(project: str) -> str:
    """Return the default image repository. A domain-scoped project `example.com:p` becomes two path segments."""
    return f"{DEFAULT_HOST}/{project.replace(':', '/')}/launch"


def default_service_account(project: str) -> str:
    """Return the default account of VMs. A domain-scoped project's accounts end in p.example.com."""
    domain, _, name = project.rpartition(":")
    return f"launch@{name}{'.' + domain if domain else ''}.iam.gserviceaccount.com"


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
        # The built-in trainer counts as `train`, and a user's own module of that name as another.
        package, _, rest = run.module.partition(".")
        old = {BUILTIN: "train", "train": "./train"}.get(package, package)
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


def json_digest(data: Any, length: int) -> str:
    """Return the first `length` hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


OwnerStyle = Literal["hashed", "plain", "none"]
HASH_DIGITS = 16


def owner_value(account: str, style: OwnerStyle) -> str:
    """Return the value of the owner label; empty without an account or with `none`.

    `hashed` keeps addresses out of bills and logs, but whoever has a list of addresses can hash them too.
    """
    name = account.lower()
    if not name or style == "none":
        return ""
    return label_value(name) if style == "plain" else hashlib.sha256(name.encode()).hexdigest()[:HASH_DIGITS]


def is_owned_by(labels: Mapping[str, str], account: str) -> bool:
    """Return whether the owner label names this account, in either style; False without a label or an account."""
    owner = labels.get(job.OWNER_LABEL, "")
    return bool(owner) and owner in (owner_value(account, "hashed"), owner_value(account, "plain"))


def is_of_another(labels: Mapping[str, str], account: str) -> bool:
    """Return whether the owner label names another account; False without a label, as older launches left it."""
    return job.OWNER_LABEL in labels and not is_owned_by(labels, account)
