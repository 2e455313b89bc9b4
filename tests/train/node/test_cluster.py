"""CLUSTER_SPEC -> Cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train.node.cluster import Cluster, ClusterError, NotANodeError, parse_cluster


def spec(task: Any, **pools: Any) -> str:
    cluster = pools or {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]}
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": task, "job": {"scheduling": {}}})


PRIMARY = {"type": "workerpool0", "index": 0, "trial": "1"}


@pytest.mark.parametrize(
    ("task", "node"),
    [
        (PRIMARY, 0),
        ({"type": "workerpool1", "index": 0}, 1),
        ({"type": "workerpool1", "index": 1}, 2),
        ({"type": "workerpool1", "index": "1"}, 2),
    ],
)
def test_pool_0_then_pool_1_are_the_nodes(task: dict[str, Any], node: int) -> None:
    assert parse_cluster(spec(task), {}) == Cluster(("a-0:2222", "b-0:2222", "b-1:2222"), node, cloud=True)


def test_other_pools_are_not_nodes() -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"], "workerpool2": ["r:1", "r:2"], "workerpool3": ["e:1"]}
    assert parse_cluster(spec(PRIMARY, **pools), {}).nodes == ("a:1", "b:1")
    for pool, what in (("workerpool2", "a reduction server"), ("workerpool3", "an evaluator")):
        with pytest.raises(NotANodeError, match=f"this replica is {what}"):
            parse_cluster(spec({"type": pool, "index": 0}, **pools), {})


def test_host_and_port_are_node_0s() -> None:
    cluster = parse_cluster(spec(PRIMARY, workerpool0=["[::1]:2223"]), {})
    assert (cluster.host, cluster.port, cluster.size) == ("::1", 2223, 1)


def test_the_job_may_be_text_or_an_object_and_the_platform_a_rehearsal() -> None:
    value = {"cluster": {"workerpool0": ["a:1"]}, "environment": "local", "task": PRIMARY, "job": "{}"}
    assert parse_cluster(json.dumps(value), {}) == Cluster(("a:1",), 0, rehearsal=True)
    assert parse_cluster(json.dumps(value | {"environment": "host"}), {}) == Cluster(("a:1",), 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Cluster(("127.0.0.1:2222",), 0)),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "h"}, Cluster(("h:2222",), 0)),
        ({"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}, Cluster(("h:7", "", ""), 2)),
    ],
)
@pytest.mark.parametrize("nothing", [None, ""])
def test_without_cluster_spec_rank_and_world_size_count_nodes(
    nothing: str | None, environ: dict[str, str], expected: Cluster
) -> None:
    assert parse_cluster(nothing, environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "h"}, "RANK=2 and WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR, the host of node 0, is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "-1"}, "'-1' is not a whole number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_a_wrong_environment_is_one_line(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError, match=words) as caught:
        parse_cluster(None, environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "CLUSTER_SPEC must be an object"),
        ("{}", "cluster must be an object, not null"),
        (spec(None), "task must be an object"),
        (spec(PRIMARY, workerpool1=["b:1"]), "workerpool0 has 0 replicas"),
        (spec(PRIMARY, workerpool0=["a:1", "b:1"]), "workerpool0 has 2 replicas"),
        (spec(PRIMARY, workerpool0="a:1"), "must be a list of host:port"),
        (spec(PRIMARY, workerpool0=["a"]), '"a", which is not host:port'),
        (spec(PRIMARY, workerpool0=["a:0"]), "not host:port"),
        (spec(PRIMARY, workerpool0=["a:65536"]), "not host:port"),
        (spec(PRIMARY, workerpool0=[7]), "7, which is not host:port"),
        (spec({"type": "chief", "index": 0}), 'task type "chief"'),
        (spec({"type": ["x"], "index": 0}), "task type"),
        (spec({"type": "workerpool1", "index": 2}), "task index 2, but workerpool1 has 2 replicas"),
        (spec({"type": "workerpool1", "index": -1}), "task index -1"),
        (spec({"type": "workerpool1", "index": True}), "task index true"),
    ],
)
def test_a_wrong_cluster_spec_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
