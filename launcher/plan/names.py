"""Make labels, label values and default names."""

from __future__ import annotations

import re

from launcher.jobs import job
from launcher.plan.model import Context
from launcher.plan.run_id import spec_hash
from launcher.spec.models import JobSpec

DEFAULT_HOST = "us-docker.pkg.dev"


def labels(spec: JobSpec, context: Context, run: str, identity: str = "") -> dict[str, str]:
    """Return the user's labels and launch's own, by which runs are found. A VM to work on has no identity."""
    return {
        **spec.labels,
        job.RUN_LABEL: run,
        **({job.IDENTITY_LABEL: identity} if identity else {}),
        **({job.OWNER_LABEL: context.owner_label} if context.owner_label else {}),
        "launch-spec": spec_hash(spec),
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
