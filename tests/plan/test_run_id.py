"""The run id is what is computed and for whom, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.plan.model import Content, Packages
from tests.plan.planning import planned

SAME = [
    {"regions": ["us-east5"]},
    {"provisioning": ["spot"]},
    {"limits": {"hours": 2, "usd": 900}},
    {"labels": {"team": "vision"}},
    {"machine": {"type": "a3-highgpu-2g", "boot_disk_gb": 500}},
]
OTHER: list[dict[str, Any]] = [
    {"run": {"config": {"steps": 5}}},
    {"env": {"A": "1"}},
    {"machine": {"type": "h100", "gpus": 4}},
    {"machine": {"type": "h100", "gpus": 8, "nodes": 2}},
    {"output": "gs://other-bucket/runs"},
    {"image": {"uri": "us-docker.pkg.dev/p/r/i@sha256:" + "a" * 64}},
]


@pytest.mark.parametrize("change", SAME, ids=str)
def test_another_placement_keeps_the_run_id(change: dict[str, Any]) -> None:
    assert planned(**change).run == planned().run


@pytest.mark.parametrize("change", OTHER, ids=str)
def test_another_computation_changes_the_run_id(change: dict[str, Any]) -> None:
    assert planned(**change).run != planned().run


def test_another_number_of_nodes_with_the_same_gpus_each_is_another_run() -> None:
    runs = {planned(machine={"type": "h100", "gpus": 8, "nodes": nodes}).run for nodes in (1, 2, 3)}
    assert len(runs) == 3


@pytest.mark.parametrize(
    "world",
    [
        {"project": "other-project"},
        {"owner": "you@example.com"},
        {"code": Content(digest="edited")},
        {"requirements": Content(digest="edited")},
        {"torch": Content(digest="edited")},
        {"packages": Packages(extras=("cu128",))},
        {"packages": Packages(groups=("train",))},
    ],
    ids=str,
)
def test_another_owner_project_or_code_is_another_run(world: dict[str, Any]) -> None:
    assert planned(world=world).run != planned().run


def test_on_this_machine_projects_and_accounts_make_no_other_run() -> None:
    other = {"project": "local", "owner": "you@example.com"}
    assert planned("local", world=other).run == planned("local").run


def test_launchs_own_version_and_recipe_are_not_part_of_the_run() -> None:
    world = {"version": "9.9.9", "recipe": Content(digest="new")}
    assert planned(world=world).run == planned().run
    assert planned(world=world).image != planned().image


def test_mounts_are_part_of_the_run_and_no_mounts_change_nothing() -> None:
    """Other data at the same path is another computation. /gcs/BUCKET names its data itself, and Vertex AI always has
    it."""
    vm: dict[str, Any] = {"output": "gs://b-b/o"}
    before = planned("vm", **vm).run
    share = {"nfs": "10.0.0.2:/a", "path": "/data"}
    for same in ([], [{"bucket": "b-1"}, {"bucket": "b-2", "path": "/gcs/b-2"}], [{"new_disk_gb": 10, "path": "/a"}]):
        assert planned("vm", **vm, mounts=same).run == before
    others = ([share], [{**share, "nfs": "10.0.0.2:/b"}], [{**share, "path": "/b"}], [{"bucket": "b-1", "path": "/a"}])
    assert len({before, *(planned("vm", **vm, mounts=mounts).run for mounts in others)}) == 5


def test_a_custom_run_id() -> None:
    assert planned(world={"run_id": "mine"}).run == "mine"


def test_run_id_has_the_name_and_eight_hex_digits() -> None:
    name, _, digits = planned().run.rpartition("-")
    assert name == "job"
    assert len(digits) == 8
    assert int(digits, 16) >= 0
