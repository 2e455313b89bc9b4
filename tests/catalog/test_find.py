"""From what a spec says to the machine that is meant, and what the errors say."""

from __future__ import annotations

import re

import pytest

from launcher import catalog
from launcher.catalog import CatalogError, MachineType, Service
from launcher.errors import PlanRefused
from launcher.spec.kinds import ZONE

CATALOG = catalog.load()


@pytest.mark.parametrize(
    ("kind", "gpus", "service", "name"),
    [
        ("h100", 1, "vertex", "a3-highgpu-1g"),
        ("h100", 2, "vertex", "a3-highgpu-2g"),
        ("h100", 2, "compute", "a3-highgpu-2g"),
        ("h100", 4, "vertex", "a3-highgpu-4g"),
        ("h100", 8, "compute", "a3-highgpu-8g"),
        ("h100-mega", 8, "vertex", "a3-megagpu-8g"),
        ("h200", 8, "vertex", "a3-ultragpu-8g"),
        ("b200", 8, "vertex", "a4-highgpu-8g"),
        ("gb200", 4, "vertex", "a4x-highgpu-4g"),
        ("gb300", 4, "compute", "a4x-maxgpu-4g-metal"),
        ("a100-80gb", 2, "vertex", "a2-ultragpu-2g"),
        ("a100-40gb", 8, "vertex", "a2-highgpu-8g"),
        ("a100-40gb", 16, "vertex", "a2-megagpu-16g"),
        ("l4", 1, "vertex", "g2-standard-12"),
        ("l4", 2, "vertex", "g2-standard-24"),
        ("l4", 8, "compute", "g2-standard-96"),
        ("rtx-pro-6000", 1, "compute", "g4-standard-48"),
        ("rtx-pro-6000", 8, "vertex", "g4-standard-384"),
        ("t4", 1, "vertex", "n1-standard-8"),
        ("t4", 4, "compute", "n1-standard-32"),
        ("v100", 8, "vertex", "n1-standard-64"),
        ("p4", 2, "vertex", "n1-standard-16"),
    ],
)
def test_gpu_and_count(kind: str, gpus: int, service: Service, name: str) -> None:
    found = CATALOG.find(kind, gpus, None, service)
    assert (found.name, found.gpus, found.gpu) == (name, gpus, kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("h100", "a3-highgpu-1g"), ("h200", "a3-ultragpu-8g"), ("l4", "g2-standard-12"), ("gb200", "a4x-highgpu-4g")],
)
def test_a_gpu_without_a_count_is_its_smallest_shape(kind: str, name: str) -> None:
    assert CATALOG.find(kind, None, None, "vertex").name == name


def test_every_gpu_that_a_spec_may_name_is_found() -> None:
    names = "h100 h100-mega h200 b200 gb200 gb300 a100-80gb a100-40gb l4 rtx-pro-6000 t4 v100 p4"
    assert " ".join(gpu.name for gpu in CATALOG.gpus.values() if not gpu.shut_down) == names
    assert all(CATALOG.find(name, None, None, "compute").gpu == name for name in names.split())


@pytest.mark.parametrize("count", [None, 2])
def test_a_machine_type_brings_its_gpus(count: int | None) -> None:
    found = CATALOG.find("a3-highgpu-2g", count, None, "vertex")
    assert (found.gpu, found.gpus, found.vcpus, found.memory_gb) == ("h100", 2, 52, 468.0)


@pytest.mark.parametrize("name", ["t4", "nvidia-tesla-t4", "NVIDIA_TESLA_T4"])
def test_n1_takes_the_gpu_that_the_accelerator_names(name: str) -> None:
    found = CATALOG.find("n1-standard-8", 2, name, "compute")
    assert (found.gpu, found.gpus, found.guest_accelerator) == ("t4", 2, True)
    assert CATALOG.find("n1-standard-8", None, name, "compute").gpus == 1


def test_only_n1_sends_guest_accelerators() -> None:
    senders = {name for name, shapes in CATALOG.machines.items() if any(shape.guest_accelerator for shape in shapes)}
    assert senders == {name for name in CATALOG.machines if name.startswith("n1-")}


@pytest.mark.parametrize(
    ("asked", "service", "problem", "hint"),
    [
        ("h100 3", "vertex", "machine.gpus: 3 is not available for h100, only 1, 2, 4 or 8 GPUs", "add nodes"),
        ("h200 2", "vertex", "machine.gpus: 2 is not available for h200, only 8 GPUs", "--nodes 2"),
        ("h1OO 2", "vertex", "unknown GPU or machine type h1OO", "Did you mean h100"),
        ("a100 2", "vertex", "a100 is ambiguous", "Use a100-80gb or a100-40gb"),
        ("NVIDIA_A100_80GB 2", "vertex", "unknown GPU or machine type NVIDIA_A100_80GB", "Did you mean a100-80gb?"),
        ("nvidia-l4 2", "vertex", "unknown GPU or machine type nvidia-l4", "Did you mean l4?"),
        ("a3-highgpu-3g", "vertex", "unknown GPU or machine type a3-highgpu-3g", "Did you mean a3-highgpu-"),
        ("n2-standard-8", "compute", "unknown GPU or machine type n2-standard-8", "Did you mean n1-standard-8"),
        ("tpu", "compute", "tpu is not supported", "GPU: h100 h100-mega"),
        ("a3-highgpu-2g 4", "vertex", "a3-highgpu-2g has 2 GPUs (NVIDIA H100 80GB), not 4", "--type h100"),
        ("a3-highgpu-1g 4", "vertex", "a3-highgpu-1g has 1 GPU (", "--gpus 4"),
        ("a3-highgpu-2g 2 l4", "vertex", "a3-highgpu-2g has NVIDIA H100 80GB, not NVIDIA L4", "remove it"),
        ("h100 2 l4", "vertex", "machine.type h100 and machine.accelerator l4 are different", "Remove"),
        ("gb300", "vertex", "NVIDIA GB300 is not available on Vertex AI", "launch vm"),
        ("g4-standard-6", "vertex", "g4-standard-6 is not available on Vertex AI", "Use g4-standard-48, "),
        ("a3-edgegpu-8g", "vertex", "a3-edgegpu-8g is not available on Vertex AI", "Use a3-highgpu-1g, "),
        (
            "n1-standard-8",
            "vertex",
            "n1-standard-8 needs machine.accelerator: it takes t4, v100 or p4",
            "accelerator=t4",
        ),
        ("n1-standard-8 2 l4", "vertex", "n1-standard-8 has NVIDIA T4, ", "accelerator=t4"),
        ("n1-standard-8 2 t5", "vertex", "unknown GPU or machine type t5", "Did you mean t4"),
        ("n1-standard-2 1 t4", "vertex", "n1-standard-2 with t4 is not available on Vertex AI", "Use n1-standard-4, "),
        ("n1-standard-32 1 t4", "vertex", "n1-standard-32 has 2 or 4 GPUs (NVIDIA T4), not 1", "--gpus 1"),
    ],
)
def test_unknown_machines_are_refused_with_alternatives(asked: str, service: Service, problem: str, hint: str) -> None:
    """`asked`: machine.type, machine.gpus and machine.accelerator."""
    kind, gpus, accelerator = [*asked.split(), None, None][:3]
    with pytest.raises(CatalogError) as caught:
        CATALOG.find(str(kind), int(gpus) if gpus else None, accelerator, service)
    assert problem in caught.value.problem
    assert hint in caught.value.hint


def test_the_error_is_a_refused_plan_and_keeps_long_names_short() -> None:
    with pytest.raises(PlanRefused) as caught:
        CATALOG.gpu("x" * 65536)
    assert len(str(caught.value)) < 400
    assert caught.value.exit_code == 2


def test_uncertain_provisioning_is_warned_of_only_on_vertex() -> None:
    shape = _shape("a3-highgpu-2g")
    assert "uncertain" in CATALOG.warnings(shape, "vertex", "standard")[0]
    assert CATALOG.warnings(shape, "vertex", "spot") == ()
    assert CATALOG.warnings(shape, "compute", "standard") == ()


def test_warnings_cite_no_source_keys() -> None:
    texts = [
        text
        for shapes in CATALOG.machines.values()
        for shape in shapes
        for service in ("vertex", "compute")
        for model in ("standard", "spot", "flex-start", "reservation")
        for text in CATALOG.warnings(shape, service, model)
    ]
    assert texts
    assert [text for text in texts if re.search(r"\([A-Z]{3,}", text)] == []


def test_regions_and_zones() -> None:
    shape = _shape("a3-highgpu-2g")
    assert CATALOG.zones(shape, "us-central1") == ("us-central1-a", "us-central1-b", "us-central1-c")
    assert CATALOG.zones(shape, "asia-northeast3") == ("asia-northeast3-c",)
    assert CATALOG.zones(shape, "australia-southeast2") == ()
    assert "us-east5-a" in CATALOG.zones(shape)
    assert CATALOG.zones(_shape("a3-ultragpu-8g"), "us-east4") == ("us-east4-b",)


@pytest.mark.parametrize("zone", ["us-central1-ai1a", "us-south1-ai1b", "europe-west4-ai1a"])
def test_an_ai_zone_is_a_zone_of_its_region(zone: str) -> None:
    region = zone.rpartition("-")[0]
    assert re.fullmatch(ZONE, zone)
    assert catalog.region_of(zone) == region
    shape = _shape("a3-highgpu-8g")
    assert CATALOG.price(shape, "compute", "spot", zone) == CATALOG.price(shape, "compute", "spot", region)


@pytest.mark.parametrize(
    "text", ["us-central1", "us-central1-aa", "us-central1-1a", "us-central1-aia", "us-central1-ai1", "-a", "x"]
)
def test_an_invalid_zone_name(text: str) -> None:
    assert not re.fullmatch(ZONE, text)


def test_vertex_regions_exclude_those_without_training() -> None:
    shape = _shape("a3-highgpu-2g")
    assert len(CATALOG.vertex_regions(shape)) == 12
    assert "asia-south2" not in CATALOG.vertex_regions(_shape("a3-ultragpu-8g"))
    assert CATALOG.vertex_regions(_shape("a3-edgegpu-8g")) == ()


def _shape(name: str) -> MachineType:
    return CATALOG.machines[name][0]
