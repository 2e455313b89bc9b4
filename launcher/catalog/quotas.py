"""Return the names of the quotas that a machine consumes.

Sources: vertex-ai-samples (common_util.py) for Vertex AI; the enum `Quota.Metric` of google-cloud-compute 1.56.0 and
Cloud Quotas for Compute Engine. GPUs that regions.get does not show have only an id in Cloud Quotas.
"""

from __future__ import annotations

from typing import Final

from launcher.catalog.model import Gpu, Quota, Service

PREEMPTIBLE: Final = ("spot", "flex-start")
"""Provisioning models that consume preemptible quota, on both services."""


def quota(gpus: int, gpu: Gpu, service: Service, provisioning: str) -> Quota | None:
    """Return the quota that GPUs of a node consume; `None` if its name is unknown."""
    return (_vertex if service == "vertex" else _compute)(gpus, gpu, provisioning)


def _vertex(units: int, gpu: Gpu, provisioning: str) -> Quota | None:
    """Return Vertex AI's quota. Flex-start consumes preemptible quota, although its VMs are not preempted (DOC-DWS)."""
    metric, name = gpu.quota_names["vertex_quota_metric"], gpu.quota_names["vertex_quota_id"]
    if provisioning.startswith("reservation") or not (metric or name):
        return None
    kind, prefix = ("Preemptible", "preemptible_") if provisioning in PREEMPTIBLE else ("", "")
    return Quota(
        metric=f"aiplatform.googleapis.com/custom_model_training_{prefix}{metric}_gpus" if metric else None,
        id=f"CustomModelTraining{kind}{name}GPUsPerProjectPerRegion" if name else None,
        units=units,
        dims={},
    )


def compute_quota_id(metric: str, *, everywhere: bool = False) -> str:
    """Return Cloud Quotas' id of a metric of Compute Engine: NVIDIA_L4_GPUS is NVIDIA-L4-GPUS-per-project-region."""
    return f"{metric.rpartition('/')[2].upper().replace('_', '-')}-per-project{'' if everywhere else '-region'}"


def _compute(units: int, gpu: Gpu, provisioning: str) -> Quota | None:
    """Return Compute Engine's quota. GPUs before H100 have a metric each; later ones share a metric, with the GPU
    family as a dimension.

    Flex-start VMs consume preemptible quota, as Spot VMs do (Google Cloud blog, 2025-09-25:
    https://cloud.google.com/blog/products/compute/introducing-flex-start-vms-for-the-compute-engine-instance-api).
    """
    names = gpu.quota_names
    if provisioning in PREEMPTIBLE:
        metric, name = names["compute_spot_quota"], names["compute_spot_quota_id"]
        name = name or (compute_quota_id(metric) if metric else None)
        return Quota(metric, name, units, {}) if name else None
    if provisioning != "standard":
        return None
    if metric := names["compute_quota"]:
        return Quota(metric, compute_quota_id(metric), units, {})
    if family := names["compute_family"]:
        metric, name = "compute.googleapis.com/gpus_per_gpu_family", "GPUS-PER-GPU-FAMILY-per-project-region"
        return Quota(metric, name, units, {"gpu_family": family})
    return None
