"""A request's JSON, read: what can't be taken is named, and moving its run folder changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train.common import contract
from launcher.errors import UsageError
from launcher.services.local.request import parse_request, rebased, with_image
from tests.plan.planning import env_of, request


def by_hand(*, pool: Any = None, container: Any = None, **fields: Any) -> dict[str, Any]:
    """The smallest request, with fields of its pool, its container and itself put in."""
    return {"jobSpec": {"workerPoolSpecs": [{"containerSpec": {**(container or {})}, **(pool or {})}]}, **fields}


def test_the_smallest_request() -> None:
    job = parse_request(by_hand())
    assert (job.name, job.run_folder, [pool.replica_count for pool in job.pools]) == ("", None, [1])


@pytest.mark.parametrize("count", [3, "3"])
def test_numbers_may_be_text(count: object) -> None:
    body = by_hand(pool={"replicaCount": count, "machineSpec": {"acceleratorCount": "8"}})
    (pool,) = parse_request(body).pools
    assert (pool.replica_count, pool.machine_spec.accelerator_count) == (3, 8)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "no jobSpec"),
        ({"jobSpec": None}, "no jobSpec"),
        ({"jobSpec": [1]}, "no jobSpec"),
        ({"jobSpec": {"x": 1}}, "no jobSpec.workerPoolSpecs"),
        ({"jobSpec": {"workerPoolSpecs": []}}, "no jobSpec.workerPoolSpecs"),
        ({"jobSpec": {"workerPoolSpecs": [None]}}, "worker pool 0 has no containerSpec"),
        ({"jobSpec": {"workerPoolSpecs": [{"pythonPackageSpec": {}}]}}, "worker pool 0 has no containerSpec"),
        ({"jobSpec": {"workerPoolSpecs": [{"containerSpec": None}]}}, "workerPoolSpecs[0].containerSpec: expected"),
        (by_hand(pool={"replicaCount": "x"}), "workerPoolSpecs[0].replicaCount: expected a whole number, got text"),
        (by_hand(pool={"replicaCount": "0"}), "workerPoolSpecs[0].replicaCount: expected a whole number >= 1"),
        (by_hand(pool={"replicaCount": -1}), "workerPoolSpecs[0].replicaCount: expected a whole number >= 1"),
        (by_hand(pool={"replicaCount": 10**30}), "replicaCount: expected a whole number <= 1000"),
        (by_hand(pool={"machineSpec": {"acceleratorCount": 1.5}}), "acceleratorCount: expected a whole number, got"),
        (by_hand(container={"env": [{"value": "1"}]}), "containerSpec.env[0]: missing field `name`"),
        (by_hand(container={"env": [{"name": "A", "value": 1}]}), "env[0].value: expected text, got a whole number"),
        (by_hand(container={"env": [{"name": "A=B"}]}), "env[0].name: invalid for a process"),
        (by_hand(container={"env": [{"name": "A", "value": "\0"}]}), "env[0].value: invalid for a process"),
        (by_hand(container={"args": ["\ud800"]}), "args[0]: invalid for a process"),
        (by_hand(container={"args": "one"}), "args: expected a list, got text"),
        (by_hand(container={"command": [1]}), "command[0]: expected text, got a whole number"),
        (by_hand(displayName=5), "displayName: expected text"),
    ],
)
def test_what_can_not_be_taken_is_named(body: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_request(body)
    assert words in caught.value.problem
    assert "CustomJob" in caught.value.hint or "containers" in caught.value.hint


def test_the_run_folder_is_what_the_node_is_told() -> None:
    env = [{"name": "A", "value": "x"}, {"name": contract.RUN_FOLDER, "value": "/runs/$(A)/$$/"}]
    assert parse_request(by_hand(container={"env": env})).run_folder == "/runs/x/$"


def test_moving_the_run_folder() -> None:
    body = request(output="gs://bucket/runs", machine={"type": "h100", "gpus": 8, "nodes": 2})
    run = body["displayName"]
    moved = rebased(body, "/here")
    assert parse_request(moved).run_folder == f"/here/{run}"
    assert moved["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"] == f"/here/{run}"
    assert {env_of(moved, pool)[contract.RUN_FOLDER] for pool in (0, 1)} == {f"/here/{run}"}
    assert "gs://bucket" not in json.dumps(moved)


def test_moving_changes_nothing_else() -> None:
    old = "gs://b/runs/x"
    env = [{"name": contract.RUN_FOLDER, "value": old}, {"name": "OTHER", "value": f"{old}/other"}]
    body = by_hand(container={"env": env, "args": ["--from", old, f"{old}2"]}, displayName=old, labels={"a": "b"})
    body["jobSpec"]["baseOutputDirectory"] = {"outputUriPrefix": f"{old}/"}
    before = json.dumps(body)
    moved = rebased(body, "/here")
    assert json.dumps(body) == before
    expected = json.loads(before)
    expected["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"] = "/here/x"
    expected["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"][0]["value"] = "/here/x"
    assert moved == expected


def test_a_request_without_a_place_gets_one() -> None:
    assert parse_request(rebased(by_hand(displayName="my job/../1"), "/here")).run_folder == "/here/my-job-..-1"
    assert parse_request(rebased(by_hand(), "/here")).run_folder == "/here/run"


def test_a_folder_is_never_expanded() -> None:
    body = by_hand(container={"env": [{"name": contract.RUN_FOLDER, "value": "gs://b/x"}]})
    assert parse_request(rebased(body, "/a$(b)$$")).run_folder == "/a$(b)$$/x"


def test_an_image_is_filled_in_for_the_nodes_alone() -> None:
    machine = {"type": "h100", "gpus": 8, "nodes": 2}
    image = {"base": "us-docker.pkg.dev/p/r/with-the-plugin@sha256:" + "1" * 64}
    servers = {"reduction_server": {"replicas": 2}}
    body = request(machine=machine, provisioning=["spot"], image=image, vertex=servers)
    filled = with_image(body, "host/image@sha256:1")
    assert parse_request(filled).images == ("host/image@sha256:1",)
    assert filled["jobSpec"]["workerPoolSpecs"][2] == body["jobSpec"]["workerPoolSpecs"][2]
    assert with_image(filled, body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["imageUri"]) == body


@pytest.mark.parametrize(
    "pool",
    [
        *(None, 3, {"containerSpec": None}, {"containerSpec": {"env": None}}),
        *({"containerSpec": {"env": [entry]}} for entry in ({}, 3, {"name": "LAUNCH_RUN_FOLDER", "value": 3})),
    ],
)
def test_a_pool_that_is_not_rehearsed_is_looked_at_too(pool: Any) -> None:
    """--output moves its run folder, and CLUSTER_SPEC carries it."""
    node = {"containerSpec": {"command": ["true"]}}
    request = {"displayName": "job", "jobSpec": {"workerPoolSpecs": [node, node, pool]}}
    with pytest.raises(UsageError, match=r"workerPoolSpecs\[2:\]"):
        rebased(request, "/out")


def test_a_pool_that_is_not_rehearsed_may_be_empty() -> None:
    node = {"containerSpec": {"command": ["true"]}}
    request = {"displayName": "job", "jobSpec": {"workerPoolSpecs": [node, node, {}]}}
    assert rebased(request, "/out")["jobSpec"]["workerPoolSpecs"][2] == {}
