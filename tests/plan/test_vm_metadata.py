"""The metadata of a VM: what its startup script is told."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.cli.ui.plan_page import mount_lines
from launcher.errors import PlanRefused
from tests.plan.planning import planned, request, told

SPOT: dict[str, Any] = {"provisioning": ["spot"], "output": "gs://b-b/o"}


def items(body: dict[str, Any]) -> dict[str, str]:
    """The metadata by its keys."""
    return {item["key"]: item["value"] for item in body["metadata"]["items"]}


def test_the_items_of_every_vm() -> None:
    body = request("vm", world={"startup": "the script"}, **SPOT)
    found = items(body)
    assert list(found) == ["enable-oslogin", "enable-guest-attributes", "startup-script", "launch"]
    assert found["enable-oslogin"] == found["enable-guest-attributes"] == "TRUE"
    assert found["startup-script"] == "the script"


@pytest.mark.parametrize(
    ("vm", "installs"),
    [
        ({}, False),
        ({"image_family": "common-cu129-ubuntu-2404-nvidia-580"}, False),
        ({"image_family": "common-cu121-debian-11"}, True),
        ({"image": "projects/p/global/images/i"}, True),
    ],
)
def test_a_driver_is_installed_where_the_image_may_have_none(vm: dict[str, Any], installs: bool) -> None:
    assert ("install-nvidia-driver" in items(request("vm", vm=vm, **SPOT))) == installs


def test_a_vm_to_work_on_is_told_its_lease_in_seconds() -> None:
    vm = {"lease": "4h", "idle_stop": "60m", "on_stop": "delete"}
    found = told(request("vm", world={"training": False}, vm=vm, **SPOT))
    assert found == {"kind": "work", "on_stop": "delete", "lease_seconds": 14400, "idle_stop_seconds": 3600}
    assert told(request("vm", world={"training": False}, **SPOT)) == {"kind": "work", "on_stop": "stop"}


def test_a_vm_that_trains_is_told_its_container() -> None:
    plan = planned("vm", zones=["us-central1-b"], run={"module": "mine", "args": ["--x", "a b"]}, **SPOT)
    found = told(plan.attempts[0].request)
    assert plan.image
    assert found["kind"] == "train"
    assert (found["run"], found["run_folder"]) == (plan.run, f"gs://b-b/o/{plan.run}")
    assert found["image"] == plan.image.uri
    assert [found["entrypoint"], *found["arguments"]] == list(plan.command)
    assert found["nodes"] == [plan.run]
    assert found["domain"] == "us-central1-b.c.my-project.internal"
    assert found["account"] == plan.attempts[0].request["serviceAccounts"][0]["email"]
    assert '.startsWith("job-")' in found["grant"]


def test_the_grant_of_a_run_whose_id_was_set_by_hand_is_for_it_alone() -> None:
    found = told(request("vm", world={"run_id": "other"}, **SPOT))
    assert '.startsWith("other")' in found["grant"]


def test_a_domain_scoped_project_has_its_domain_behind_it() -> None:
    found = told(request("vm", world={"project": "example.com:p"}, zones=["us-central1-b"], **SPOT))
    assert found["domain"] == "us-central1-b.c.p.example.com.internal"


def test_values_are_expanded_as_on_vertex() -> None:
    """`$(NAME)` and `$$` mean the same on both services; a VM has nobody to expand them, so the plan does."""
    env, run = {"A": "1", "B": "$(A)$$2"}, {"command": ["bash", "-c", "echo $$ $(B)"]}
    found = told(request("vm", env=env, run=run, **SPOT))
    assert found["env"]["B"] == "1$2"
    assert found["arguments"][-1] == "echo $ 1$2"


def test_a_config_is_never_expanded() -> None:
    found = told(request("vm", run={"config": {"steps": 3, "data": "$(X) 'q' $$"}}, **SPOT))
    assert found["env"]["LAUNCH_CONFIG"] == '{"data":"$(X) \'q\' $$","steps":3}'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"env": {"A": "x" * 131_071}}, r"env\.A: 128 KiB"),
        ({"run": {"command": ["x", "y" * 131_072]}}, r"run\.args: 128 KiB"),
        ({"env": {f"A{n}": "x" * 90_000 for n in range(3)}}, "VM metadata, which holds 256 KiB"),
    ],
    ids=["variable", "argument", "all"],
)
def test_what_is_too_large_for_a_vm_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanRefused, match=words):
        planned("vm", **SPOT, **fields)


def test_the_page_says_what_is_mounted_and_what_becomes_of_it() -> None:
    plan = planned(
        "vm",
        **SPOT,
        mounts=[{"bucket": "b-1", "path": "/data", "read_only": True}, {"new_disk_gb": 500, "path": "/scratch"}],
    )
    assert list(mount_lines(plan)) == [
        "/data: gs://b-1, read-only",
        "/scratch: a new disk of 500 GB, deleted with its VM",
    ]
