"""Run ids, labels and default names."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import msgspec
from msgspec.structs import replace

from launcher.jobs import job
from launcher.plan.model import Context
from launcher.spec.models import BUILTIN, OLD_BUILTIN, JobSpec

DEFAULT_HOST = "us-docker.pkg.dev"


def run_id(spec: JobSpec, context: Context, gpus: int) -> str:
    """`<name>-<8 hex>`: what is computed and for whom.

    Where it runs, its limits, labels and launch's version stay out, so that another region or a second try is still
    the same run.
    """
    return context.run_id or f"{spec.name}-{identity(spec, context, gpus)}"


def identity(spec: JobSpec, context: Context, gpus: int) -> str:
    """Eight hex digits of what is computed and for whom; a run id that was set by hand belongs to one of them.

    On this machine nobody's project or account counts: setting one is not another run."""
    here = context.target == "local"
    run = replace(spec.run, preflight="off", hang_after=None)
    if run.module:
        run = replace(run, module=counted_module(run.module))
    what = {
        "run": msgspec.to_builtins(run),
        "env": spec.env,
        "gpus": gpus,
        "nodes": spec.machine.nodes,
        "code": context.code.digest,
        "requirements": context.requirements.digest,
        "image": [spec.image.uri, spec.image.base, spec.image.wheel, context.torch.digest],
        "project": "local" if here else context.project,
        "output": spec.output,
        "owner": "local" if here else context.owner,
    }
    return digest(what, 8)


def counted_module(module: str) -> str:
    """Return the module as run ids count it: launch_train under its old name, so that a run keeps its id, and a user's
    own `train` under another."""
    package, _, rest = module.partition(".")
    old = {BUILTIN: OLD_BUILTIN, OLD_BUILTIN: f"./{OLD_BUILTIN}"}.get(package, package)
    return f"{old}.{rest}" if rest else old


def spec_hash(spec: JobSpec) -> str:
    """Twelve hex digits of the whole spec, so that a job can be held against the file that made it."""
    return digest(msgspec.to_builtins(spec), 12)


def digest(data: Any, length: int) -> str:
    """The first `length` hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def labels(spec: JobSpec, context: Context, run: str, identity: str = "") -> dict[str, str]:
    """The user's labels and launch's own, by which a run is found again. A VM to work on computes nothing: it has no
    identity."""
    return {
        **spec.labels,
        job.RUN_LABEL: run,
        **({job.IDENTITY_LABEL: identity} if identity else {}),
        "launch-spec": spec_hash(spec),
        "launch-version": label_value(context.version),
    }


def label_value(text: str) -> str:
    """`text` as a label's value: a-z, 0-9, `_` and `-`, at most 63. gcloud refuses dots and capitals."""
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]


def default_output(project: str) -> str:
    """The bucket that `launch setup` makes: project ids are unique in the world, so this is likely to be free."""
    return f"gs://{re.sub(r'[^a-z0-9-]', '-', project)}-launch/runs"


def default_repository(project: str) -> str:
    """Artifact Registry writes a domain-scoped project `example.com:p` as two path segments."""
    return f"{DEFAULT_HOST}/{project.replace(':', '/')}/launch"


def default_service_account(project: str) -> str:
    """The account that `launch setup` makes for VMs. A domain-scoped project's accounts end in p.example.com."""
    domain, _, name = project.rpartition(":")
    return f"launch@{name}{'.' + domain if domain else ''}.iam.gserviceaccount.com"


def region_of(zone: str) -> str:
    """`us-central1-a` -> `us-central1`."""
    return zone.rpartition("-")[0]
