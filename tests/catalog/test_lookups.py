"""GPUs, quotas, NCCL settings and images."""

from __future__ import annotations

import pytest

from launcher import catalog
from launcher.catalog import MachineType, Quota, Service

CATALOG = catalog.load()


@pytest.mark.parametrize(
    ("name", "memory_gb", "bf16", "wheel", "min_driver"),
    [
        ("h100", 80, 989.0, "cu126", "525"),
        ("b200", 180, 2250.0, "cu130", "580"),
        ("t4", 16, None, "cu126", "525"),
    ],
)
def test_gpus(name: str, memory_gb: int, bf16: float | None, wheel: str, min_driver: str) -> None:
    gpu = CATALOG.gpu(name)
    assert (gpu.memory_gb, gpu.peak_tflops["bf16"], gpu.wheel, gpu.min_driver) == (memory_gb, bf16, wheel, min_driver)


def test_a_peak_without_a_source_is_unknown() -> None:
    assert CATALOG.gpu("p4").peak_tflops == {"bf16": None, "fp16": None, "tf32": None, "fp32": 5.5}


def test_the_gpus_memory_is_the_machines_divided() -> None:
    """GPU memory of whole machines in Google's table, in GB."""
    table = {"a3-highgpu-2g": 160, "a3-ultragpu-8g": 1128, "a4-highgpu-8g": 1440, "a4x-highgpu-4g": 744}
    table |= {"a4x-maxgpu-4g-metal": 1116, "a2-ultragpu-8g": 640, "g2-standard-96": 192, "g4-standard-384": 768}
    for name, memory in table.items():
        shape = _shape(name)
        assert CATALOG.gpu(shape.gpu).memory_gb * shape.gpus == memory, name


def vertex_quota(metric: str, name: str | None) -> Quota:
    metric = f"aiplatform.googleapis.com/custom_model_training_{metric}_gpus"
    return Quota(metric, name and f"CustomModelTraining{name}GPUsPerProjectPerRegion", 1, {})


FAMILY = "compute.googleapis.com/gpus_per_gpu_family"
OF_FAMILY = Quota(FAMILY, "GPUS-PER-GPU-FAMILY-per-project-region", 8, {"gpu_family": "NVIDIA_H200"})
SPOT_L4 = Quota("PREEMPTIBLE_NVIDIA_L4_GPUS", "PREEMPTIBLE-NVIDIA-L4-GPUS-per-project-region", 1, {})
SPOT_H100 = Quota("PREEMPTIBLE_NVIDIA_H100_GPUS", "PREEMPTIBLE-NVIDIA-H100-GPUS-per-project-region", 1, {})
SPOT_RTX = Quota(None, "PREEMPTIBLE-NVIDIA-RTX-PRO-6000-GPUS-per-project-region", 1, {})
"""Only Cloud Quotas shows it."""


@pytest.mark.parametrize(
    ("gpu", "service", "provisioning", "expected"),
    [
        ("h100", "vertex", "standard", vertex_quota("nvidia_h100", "H100")),
        ("a100-80gb", "vertex", "flex-start", vertex_quota("preemptible_nvidia_a100_80gb", "PreemptibleA10080GB")),
        ("b200", "vertex", "spot", Quota(None, "CustomModelTrainingPreemptibleB200GPUsPerProjectPerRegion", 8, {})),
        ("p4", "vertex", "standard", vertex_quota("nvidia_p4", None)),
        ("gb200", "vertex", "reservation", None),
        ("h100", "vertex", "reservation:projects/p/zones/z/reservations/r", None),
        ("a100-40gb", "compute", "standard", Quota("NVIDIA_A100_GPUS", "NVIDIA-A100-GPUS-per-project-region", 1, {})),
        ("l4", "compute", "spot", SPOT_L4),
        ("l4", "compute", "flex-start", SPOT_L4),
        ("h100", "compute", "spot", SPOT_H100),
        ("h100", "compute", "flex-start", SPOT_H100),
        ("rtx-pro-6000", "compute", "spot", SPOT_RTX),
        ("h200", "compute", "flex-start", None),
        ("h200", "compute", "reservation:projects/p/zones/z/reservations/r", None),
        ("h200", "compute", "standard", OF_FAMILY),
        ("h200", "compute", "spot", None),
    ],
)
def test_quotas(gpu: str, service: Service, provisioning: str, expected: Quota | None) -> None:
    assert CATALOG.quota(CATALOG.find(gpu, None, None, service), service, provisioning) == expected


def test_compute_metrics_and_vertex_accelerators_are_in_googles_own_enums() -> None:
    from google.cloud.aiplatform_v1.types import accelerator_type
    from google.cloud.compute_v1.types import compute

    gpus = CATALOG.gpus.values()
    metrics = {gpu.quota_names[name] for gpu in gpus for name in ("compute_quota", "compute_spot_quota")} - {None}
    assert len(metrics) == 15
    assert metrics <= set(compute.Quota.Metric.__members__)
    accelerators = {gpu.vertex_accelerator for gpu in gpus} - {None}
    assert accelerators <= set(accelerator_type.AcceleratorType.__members__)


def test_nccl_on_vertex() -> None:
    mega = CATALOG.nccl(_shape("a3-megagpu-8g"), "vertex")
    assert mega.library_path == "/usr/local/nvidia/lib64"
    assert (len(mega.env), mega.env["NCCL_FASTRAK_CTRL_DEV"], mega.env["NCCL_LIB_DIR"]) == (
        22,
        "eth0",
        "/usr/local/nvidia/lib64",
    )
    for name in ("a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g"):
        found = CATALOG.nccl(_shape(name), "vertex")
        assert (found.env, found.script) == ({}, "/usr/local/gib/scripts/set_nccl_env.sh")
        assert found.library_path == "/usr/local/gib/lib64"
    plain = CATALOG.nccl(_shape("a3-highgpu-8g"), "vertex")
    assert (plain.env, plain.library_path, plain.script) == ({}, None, None)
    assert "no GPUDirect" in plain.network


def test_nccl_on_compute_engine() -> None:
    mega = CATALOG.nccl(_shape("a3-megagpu-8g"), "compute")
    assert mega.env["NCCL_FASTRAK_CTRL_DEV"] == "enp0s12"
    assert mega.script == "/var/lib/tcpxo/lib64/nccl-env-profile.sh"
    assert CATALOG.nccl(_shape("a3-highgpu-8g"), "compute").env == {}


@pytest.mark.parametrize("name", ["g2-standard-24", "a3-highgpu-2g"])
def test_machines_without_settings_leave_nccl_alone(name: str) -> None:
    found = CATALOG.nccl(_shape(name), "vertex")
    assert (found.env, found.library_path, found.script) == ({}, None, None)


def test_images() -> None:
    for name in ("a3-highgpu-2g", "a4-highgpu-8g", "n1-standard-8"):
        found = CATALOG.image_family(_shape(name))
        assert found is not None
        assert found.family == "pytorch-2-9-cu129-ubuntu-2404-nvidia-580"
        assert found.project == "deeplearning-platform-release"
    assert CATALOG.image_family(_shape("a4x-highgpu-4g")) is None
    assert {shape.arch for shape in CATALOG.machines["a4x-highgpu-4g"]} == {"arm64"}


def test_vertex_bills_a_boot_disk_with_its_fee() -> None:
    """The bills of 2025-08 against the disk's own price."""
    disk, fee = CATALOG.disk_price("pd-ssd", "us-central1"), CATALOG.rates["vertex-fee"]
    assert disk
    assert CATALOG.rates["vertex-boot-pd-ssd"] == pytest.approx(disk / 730 * (1 + fee), abs=1e-7)


def test_hyperdisk_is_bounded_by_pd_ssd_and_an_unknown_kind_by_nothing() -> None:
    assert CATALOG.disk_price_at_most("hyperdisk-balanced", "us-central1") == 0.17
    assert CATALOG.disk_price_at_most("pd-balanced", "us-central1") == 0.1
    assert CATALOG.disk_price_at_most("hyperdisk-extreme", "us-central1") is None
    assert CATALOG.disk_price_at_most("pd-ssd", "us-nowhere1") is None


def _shape(name: str) -> MachineType:
    return CATALOG.machines[name][0]


def test_interruptions() -> None:
    spot, standard = CATALOG.interruptions("spot"), CATALOG.interruptions("standard")
    assert spot
    assert standard
    assert spot.hours == 24 / 0.15
    assert standard.hours == round(1000 * 24 / 6.5)
    assert CATALOG.interruptions("reservation:projects/p/zones/z/reservations/r") is not None
    assert CATALOG.interruptions("bespoke") is None


def test_every_provisioning_model_has_an_interruption_rate() -> None:
    models = {model for shape in CATALOG.shapes for model in shape.compute_provisioning}
    assert {model for model in models if not CATALOG.interruptions(model)} == set()
