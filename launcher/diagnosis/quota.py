"""Diagnose an exceeded quota: which one, where, how much is needed, and how to raise it.

Vertex AI's messages list metrics; Compute Engine's name one quota with its limit, newer ones also the metric and the
limit's name.
"""

from __future__ import annotations

import re

from msgspec import Struct

from launcher import catalog
from launcher.diagnosis.model import Diagnosis, Refusal, RequestContext, Scope, first

LISTED = r"quotas? (?:metrics exceed quota limits|are exceeded)\W+([\w./, -]+)"
"""Vertex AI, when a job is created and as a job's own error."""
NAMED = r"quota '([\w-]+)' exceeded"
"""Compute Engine."""
REASONS = frozenset({"quotaExceeded", "QUOTA_EXCEEDED", "RESOURCE_QUOTA_EXCEEDED"})
CONSOLE = "https://console.cloud.google.com/iam-admin/quotas?project={project}"


class Exceeded(Struct, frozen=True, kw_only=True):
    """A quota that a message names. `limit` is as Google writes it; empty: unknown."""

    service: str
    names: tuple[str, ...]
    limit: str
    everywhere: bool
    """True: a quota of all regions together."""
    quota_id: str
    """Its name in Cloud Quotas; empty: unknown."""
    gpu_family: str = ""
    """NVIDIA_H100, …: a dimension of one of Compute Engine's quotas."""


def diagnose_quota(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    quota = exceeded(refusal)
    if quota is None:
        return None
    names = " and ".join(quota.names)
    where = "in all regions together" if quota.everywhere else f"in {context.region}"
    needed = f"{context.gpus} are needed" if context.gpus and "gpu" in quota.names[0].lower() else ""
    limit = f"the limit is {quota.limit}" if quota.limit else ""
    figures = [figure for figure in (needed, limit) if figure]
    known = f": {', '.join(figures)}" if figures else ""
    return Diagnosis(
        scope=reach(quota),
        kind="quota",
        cause=f"quota {names} {where} is too low for {context.provisioning}{known}",
        fix=quota_fix(quota, context),
    )


def reach(quota: Exceeded) -> Scope:
    """Return the scope: GPUs have a separate quota for Spot; disks, CPUs and addresses do not."""
    if quota.everywhere:
        return "project"
    own = quota.service != "compute" or any("GPU" in name.upper() or "PREEMPTIBLE" in name for name in quota.names)
    return "region+provisioning" if own else "region"


def exceeded(refusal: Refusal) -> Exceeded | None:
    """Return the quota in a message; None if it is about something else."""
    text, metadata = refusal.message, refusal.metadata
    names = listed(text) or ((first(NAMED, text),) if re.search(NAMED, text, re.IGNORECASE) else ())
    if not names and refusal.reason in REASONS:
        names = (metadata.get("quota_metric") or metadata.get("quota_limit") or "of some kind",)
    if not names:
        return None
    limit = first(r"\blimit\W{1,3}([\d.]+)", text) or metadata.get("quota_limit_value", "")
    return Exceeded(
        service=refusal.service,
        names=names,
        limit=limit.removesuffix(".").removesuffix(".0"),
        everywhere="globally" in text or "ALL_REGIONS" in names[0],
        quota_id=first(r"limit name = ([\w-]+)", text) or metadata.get("quota_limit", "") or known_id(names[0]),
        gpu_family=metadata.get("gpu_family", "") or first(r"gpu_family: (\w+)", text),
    )


def listed(text: str) -> tuple[str, ...]:
    """Return the names in Vertex AI's list, without duplicates."""
    values = first(LISTED, text).replace(",", " ").split()
    return tuple(dict.fromkeys(name.strip(".-") for name in values if "_" in name or re.match(r"[A-Z]\w+Per\w+", name)))


def known_id(name: str) -> str:
    """Return Cloud Quotas' id for the name in a message; empty if the catalog lacks it."""
    if name.endswith("PerProjectPerRegion"):
        return name
    if name == "GPUS_PER_GPU_FAMILY":
        return "GPUS-PER-GPU-FAMILY-per-project-region"
    match = re.fullmatch(r".*/custom_model_training_(preemptible_)?(\w+)_gpus", name)
    if not match:
        return ""
    gpus = catalog.load().gpus.values()
    ids = (gpu.quota_names["vertex_quota_id"] for gpu in gpus if gpu.quota_names["vertex_quota_metric"] == match[2])
    kind = "Preemptible" if match[1] else ""
    return next(
        (f"CustomModelTraining{kind}{accelerator}GPUsPerProjectPerRegion" for accelerator in ids if accelerator), ""
    )


def quota_fix(quota: Exceeded, context: RequestContext) -> str:
    """Return how to raise the quota, and the command that shows it."""
    if quota.service == "compute":
        return f"{increase_command(quota, context)}; current quota: {show_command(quota, context)}"
    more = f"Request {context.gpus} or more" if context.gpus and "gpu" in quota.names[0].lower() else "Request more"
    return f"{more}: {CONSOLE.format(project=context.project)}; current quota: {show_command(quota, context)}"


def increase_command(quota: Exceeded, context: RequestContext) -> str:
    """Return the command that requests more of a Compute Engine quota. Google may take minutes or days to answer."""
    gpus = context.gpus if "GPU" in quota.names[0].upper() else 0
    limit = int(first(r"^(\d{1,9})(?:\.\d*)?$", quota.limit) or 0)
    value = limit + gpus if gpus else "N"
    family = f",gpu_family={quota.gpu_family or 'GPU_FAMILY'}" if "FAMILY" in quota.names[0].upper() else ""
    quota_id = quota.quota_id or catalog.quotas.compute_quota_id(quota.names[0], everywhere=quota.everywhere)
    where = "" if quota.everywhere else f" --dimensions=region={context.region}{family}"
    return (
        f"gcloud beta quotas preferences create --service=compute.googleapis.com --project={context.project} "
        f"--quota-id={quota_id} --preferred-value={value}{where}"
    )


def show_command(quota: Exceeded, context: RequestContext) -> str:
    service = f"--service={quota.service}.googleapis.com --project={context.project}"
    if quota.quota_id:
        return f"gcloud beta quotas info describe {quota.quota_id} {service}"
    if quota.service != "compute":
        return f"gcloud beta quotas info list {service} --filter=metric={quota.names[0]}"
    of = "project-info describe" if quota.everywhere else f"regions describe {context.region}"
    columns = '--flatten="quotas[]" --format="csv(quotas.metric,quotas.limit,quotas.usage)"'
    return f"gcloud compute {of} --project={context.project} {columns}"
