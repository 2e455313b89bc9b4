"""What Vertex AI would start for a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train.common import contract
from launcher.plan.container import expand
from launcher.services.local.replicas import ImageDefaults, replicas
from launcher.services.local.request import parse_request
from tests.plan.planning import request

OWN = ImageDefaults(env={"PYTHONPATH": "/site"})
ADDRESSES = ["127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"]


def started(body: dict[str, Any]) -> Any:
    return replicas(parse_request(body), addresses=ADDRESSES, job_id="7", image_defaults=lambda _: OWN)


def test_each_replica_has_its_place_in_cluster_spec() -> None:
    primary, first, second = started(request(machine={"type": "h100", "gpus": 8, "nodes": 3}))
    assert [one.name for one in (primary, first, second)] == ["workerpool0-0", "workerpool1-0", "workerpool1-1"]
    spec = json.loads(second.env["CLUSTER_SPEC"])
    assert spec["cluster"] == {"workerpool0": ADDRESSES[:1], "workerpool1": ADDRESSES[1:]}
    assert spec["task"] == {"type": "workerpool1", "index": 1, "trial": "1"}
    assert spec["job"]["scheduling"]["strategy"] == "STANDARD"


def test_the_output_folder_becomes_aip_variables() -> None:
    (one,) = started(request(output="gs://bucket/runs"))
    folder = one.env[contract.RUN_FOLDER]
    assert one.env["AIP_CHECKPOINT_DIR"] == f"{folder}/checkpoints/"
    assert one.env["AIP_TENSORBOARD_LOG_DIR"] == f"{folder}/logs/"
    assert one.env["CLOUD_ML_JOB_ID"] == "7"


def test_reduction_servers_are_not_rehearsed() -> None:
    machine = {"type": "h100", "gpus": 8, "nodes": 2}
    image = {"base": "us-docker.pkg.dev/p/r/with-the-plugin@sha256:" + "1" * 64}
    servers = {"reduction_server": {"replicas": 2}}
    body = request(machine=machine, provisioning=["spot"], image=image, vertex=servers)
    assert len(body["jobSpec"]["workerPoolSpecs"]) == 3
    assert len(started(body)) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$(NO)", "$(NO)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A $ $", "$A $ $"),
        ("$(A", "$(A"),
        ("cost: $$5", "cost: $5"),
    ],
)
def test_expansion_is_kubernetes_own(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


def test_a_value_may_use_those_before_it() -> None:
    body = request(env={"A": "1", "B": "$(A)2", "C": "$(LATER)", "LATER": "x"})
    (one,) = started(body)
    assert (one.env["B"], one.env["C"]) == ("12", "$(LATER)")


def test_a_request_without_a_command_gets_the_images_entrypoint() -> None:
    body = {"jobSpec": {"workerPoolSpecs": [{"containerSpec": {"imageUri": "x", "args": ["--module", "m"]}}]}}
    (one,) = started(body)
    assert one.argv == ("python", "-m", "launch_train.node", "--module", "m")
