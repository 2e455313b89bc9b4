"""Flags beat the spec, also where a field beside the one they set would refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import SPECS, launch

CENTRAL = ("--region", "us-central1")


def attempts(*argv: str | Path) -> list[dict[str, Any]]:
    ran = launch(*argv, "--dry-run", "-o", "json")
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = json.loads(ran.out)["attempts"]
    return found


def written(folder: Path, text: str) -> Path:
    spec = folder / "job.yaml"
    spec.write_text(f"name: a\nregions: any\n{text}")
    return spec


def test_the_region_flag_replaces_the_specs_zones() -> None:
    zones = {one["zone"] for one in attempts("vm", SPECS / "vm-dlvm-ssh.yaml", "--region", "us-east4")}
    assert zones
    assert {zone.rpartition("-")[0] for zone in zones} == {"us-east4"}


@pytest.mark.parametrize(
    ("wanted", "machine"),
    [("b200", "a4-highgpu-8g"), ("a3-highgpu-2g", "a3-highgpu-2g"), ("l4", "g2-standard-12")],
)
def test_the_type_flag_resets_the_gpu_count(wanted: str, machine: str) -> None:
    assert {one["machine_type"] for one in attempts("vertex", "--type", wanted)} == {machine}


def test_the_type_flag_replaces_the_specs_gpu(tmp_path: Path) -> None:
    spec = written(tmp_path, "machine: {type: n1-standard-8, accelerator: t4, gpus: 1}\n")
    assert attempts("vertex", spec, "--type", "l4")[0]["machine_type"] == "g2-standard-12"
    assert attempts("vertex", spec, "--type", "l4", "--gpus", "2")[0]["machine_type"] == "g2-standard-24"


def test_another_gpu_keeps_the_specs_count(tmp_path: Path) -> None:
    spec = written(tmp_path, "machine: {type: h100, gpus: 2}\n")
    assert attempts("vertex", spec, "--type", "a100-80gb")[0]["machine_type"] == "a2-ultragpu-2g"


def test_set_wins_over_other_flags(tmp_path: Path) -> None:
    spec = written(tmp_path, "machine: {type: l4, gpus: 1}\n")
    asked = attempts(
        "vertex", spec, "--type", "n1-standard-8", "--set", "machine={accelerator: v100, gpus: 2}", *CENTRAL
    )
    machine = asked[0]["request"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]
    assert (machine["acceleratorType"], machine["acceleratorCount"]) == ("NVIDIA_TESLA_V100", 2)
    zones = attempts("vm", spec, "--region", "us-east4", "--set", "zones=us-east4-a")
    assert [one["zone"] for one in zones] == ["us-east4-a"]


def test_any_region_and_one_region() -> None:
    ran = launch("vertex", "--region", "any", "--region", "us-central1", "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert "--region any cannot be combined with another --region" in ran.err
    once, twice = ("--region", "any"), ("--region", "any", "--region", "any")
    assert attempts("vertex", *twice) == attempts("vertex", *once)
