"""The CustomJob: what each part of a spec becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch_train.common import contract
from launcher.errors import PlanRefused
from launcher.plan.container import escaped, expand
from launcher.plan.vertex_request import gcloud_command
from launcher.testing.googlecloud.vertex.jobs import parse_custom_job
from tests.plan.planning import CATALOG, env_of, planned, request

QUIET: dict[str, Any] = {
    "output": "gs://b-1/o",
    "image": {"uri": "us-docker.pkg.dev/p/r/i@sha256:" + "0" * 64},
}
"""A spec that leaves nothing to be warned about."""


def pools(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body["jobSpec"]["workerPoolSpecs"]
    return found


def test_several_nodes_are_a_primary_and_a_worker_pool() -> None:
    body = request(machine={"type": "h100", "gpus": 8, "nodes": 3})
    primary, workers = pools(body)
    assert primary["replicaCount"] == "1"
    assert workers["replicaCount"] == "2"
    assert {**workers, "replicaCount": "1"} == primary  # flex-start wants identical pools
    parse_custom_job(body)  # which refuses pools that differ


@pytest.mark.parametrize(
    ("provisioning", "strategy"), [("standard", "STANDARD"), ("spot", "SPOT"), ("flex-start", "FLEX_START")]
)
def test_strategy(provisioning: str, strategy: str) -> None:
    assert request(provisioning=[provisioning])["jobSpec"]["scheduling"]["strategy"] == strategy


def test_standard_on_a_small_a3_is_warned_about() -> None:
    assert any("STANDARD" in warning for warning in planned(provisioning=["standard"]).warnings)
    assert not planned(provisioning=["spot"], **QUIET).warnings


def test_reservation() -> None:
    name = "projects/p/zones/us-central1-a/reservations/r"
    plan = planned(provisioning=[f"reservation:{name}"], machine={"type": "h100", "gpus": 8}, regions=None)
    (attempt,) = plan.attempts
    assert attempt.region == "us-central1"
    affinity = pools(attempt.request)[0]["machineSpec"]["reservationAffinity"]
    assert affinity["reservationAffinityType"] == "SPECIFIC_RESERVATION"
    assert affinity["values"] == [name]
    assert attempt.request["jobSpec"]["scheduling"]["strategy"] == "STANDARD"


def test_time_limits() -> None:
    scheduling = request(limits={"hours": 1.5, "wait": "90m"})["jobSpec"]["scheduling"]
    assert scheduling["timeout"] == "5400s"
    assert scheduling["maxWaitDuration"] == "5400s"
    assert "maxWaitDuration" not in request(limits={"wait": "90m"}, provisioning=["spot"])["jobSpec"]["scheduling"]
    assert request()["jobSpec"]["scheduling"]["timeout"] == "86400s"


def test_no_restarts_means_no_retries_by_vertex_either() -> None:
    assert request(limits={"restarts": 0})["jobSpec"]["scheduling"]["disableRetries"] is True
    assert request()["jobSpec"]["scheduling"]["disableRetries"] is False


EVERYTHING: dict[str, Any] = {
    "output": "gs://bucket/runs",
    "image": {"uri": "us-docker.pkg.dev/p/r/i@sha256:" + "0" * 64},
    "machine": {"type": "h100", "gpus": 8, "nodes": 2, "boot_disk_gb": 300, "boot_disk_type": "pd-ssd"},
    "provisioning": ["spot"],
    "identity": {
        "service_account": "a@p.iam.gserviceaccount.com",
        "psc": {
            "network_attachment": "projects/p/regions/us-central1/networkAttachments/n",
            "dns_peering": [{"domain": "a.internal.", "target_project": "t", "target_network": "n"}],
        },
        "kms_key": "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
    },
    "vertex": {
        "tensorboard": "projects/p/locations/us-central1/tensorboards/1",
        "experiment": "e",
        "experiment_run": "r",
        "web_access": True,
        "dashboard_access": True,
        "nfs": [{"server": "10.0.0.1", "path": "/data", "mount_point": "data"}],
        "lustre": [{"instance_ip": "10.0.0.2", "volume_handle": "v", "filesystem": "f", "mount_point": "fast"}],
        "reduction_server": {"replicas": 4},
    },
    "secrets": {"HF_TOKEN": "projects/p/secrets/hf/versions/latest"},
}


def test_every_field_arrives_in_googles_own_type() -> None:
    job = parse_custom_job(request(**EVERYTHING))
    spec = job.job_spec
    assert spec.service_account == "a@p.iam.gserviceaccount.com"
    assert spec.psc_interface_config.dns_peering_configs[0].domain == "a.internal."
    assert job.encryption_spec.kms_key_name.endswith("/cryptoKeys/k")
    assert (spec.tensorboard, spec.experiment, spec.experiment_run) == (
        "projects/p/locations/us-central1/tensorboards/1",
        "projects/my-project/locations/us-central1/metadataStores/default/contexts/e",
        "projects/my-project/locations/us-central1/metadataStores/default/contexts/e-r",
    )
    assert spec.enable_web_access
    assert spec.enable_dashboard_access
    node = spec.worker_pool_specs[1]
    assert node.nfs_mounts[0].mount_point == "data"
    assert node.lustre_mounts[0].volume_handle == "v"
    assert node.disk_spec.boot_disk_size_gb == 300
    reduction = spec.worker_pool_specs[2]
    assert reduction.replica_count == 4
    assert reduction.container_spec.image_uri.startswith("us-docker.pkg.dev/vertex-ai-restricted/")


SERVERS: dict[str, Any] = {
    "machine": {"type": "h100", "gpus": 2, "nodes": 2},
    "image": QUIET["image"],
    "vertex": {"reduction_server": {"replicas": 2}},
}


def test_reduction_servers_never_go_with_flex_start() -> None:
    assert [attempt.provisioning for attempt in planned(**SERVERS).attempts] == ["spot"]


def test_reduction_servers_are_the_third_pool_and_no_nodes() -> None:
    (_, _, servers) = pools(request(**SERVERS))
    assert servers["replicaCount"] == "2"
    assert servers["machineSpec"] == {"machineType": "n1-highcpu-16"}
    assert set(servers["containerSpec"]) == {"imageUri"}


def test_reduction_servers_warn_about_the_images_nccl_plugin() -> None:
    (warning,) = [line for line in planned(**SERVERS).warnings if "plugin" in line]
    assert "google-reduction-server" in warning


def test_a_short_run_is_never_sent_as_none() -> None:
    assert request(limits={"hours": 0.0501})["jobSpec"]["scheduling"]["timeout"] == "181s"


def test_fields_of_the_other_service_are_reported() -> None:
    (warning,) = planned(provisioning=["spot"], vm={"external_ip": True}, **QUIET).warnings
    assert warning == "vm.external_ip: no effect on Vertex AI."


def test_network_and_reserved_ranges() -> None:
    network = "projects/1/global/networks/n"
    spec = request(identity={"network": network, "reserved_ip_ranges": ["r"]})["jobSpec"]
    assert spec["network"] == network
    assert spec["reservedIpRanges"] == ["r"]


def test_persistent_resource_needs_no_strategy() -> None:
    spec = request(vertex={"persistent_resource": "pr"})["jobSpec"]
    assert spec["persistentResourceId"] == "pr"
    assert "strategy" not in spec["scheduling"]


def test_environment_says_everything() -> None:
    env = env_of(request(run={"config": {"steps": 5}}, env={"NCCL_DEBUG": "INFO"}, output="gs://bucket/runs/"))
    assert json.loads(env[contract.CONFIG]) == {"steps": 5}
    assert env[contract.RUN_FOLDER] == f"gs://bucket/runs/{env[contract.RUN]}"
    assert env[contract.PROCESSES] == "2"
    assert env["PYTHONSAFEPATH"] == "1"
    assert env["NCCL_DEBUG"] == "INFO"
    gpu = json.loads(env[contract.GPU])
    assert gpu["name"] == "h100"
    assert gpu["peak_tflops"]["bf16"] == 989.0


@pytest.mark.parametrize(
    ("provisioning", "nodes", "hours"),
    [
        (["spot"], 1, 160),
        (["standard"], 1, 3692),
        (["flex-start", "spot"], 1, 160),  # the attempt that is interrupted most
        (["standard"], 4, 923),  # each node stops the run
        (["reservation:projects/p/zones/us-central1-a/reservations/r"], 1, 3692),
    ],
)
def test_how_often_the_run_is_interrupted(provisioning: list[str], nodes: int, hours: float) -> None:
    plan = planned(machine={"type": "h100", "gpus": 8, "nodes": nodes}, provisioning=provisioning)
    for attempt in plan.attempts:
        for pool in range(len(pools(attempt.request))):
            assert float(env_of(attempt.request, pool)[contract.MTBF]) == hours


def test_how_often_a_run_is_interrupted_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    known = CATALOG.interruptions
    monkeypatch.setattr(CATALOG, "interruptions", lambda model: known(model) if model == "spot" else None)
    assert contract.MTBF in env_of(request(provisioning=["spot"]))
    assert contract.MTBF not in env_of(request(provisioning=["flex-start", "spot"]))


def test_a_rehearsal_has_machines_that_stay() -> None:
    assert env_of(request("local", provisioning=["spot"], output="/o"))[contract.MTBF] == "3692"


def test_secrets_travel_as_references() -> None:
    reference = {"HF_TOKEN": "projects/p/secrets/hf/versions/latest"}
    body = request(secrets=reference, identity={"service_account": "a@p.iam.gserviceaccount.com"})
    assert json.loads(env_of(body)[contract.SECRETS]) == reference


def test_secrets_need_no_account_where_the_cloud_is_played() -> None:
    reference = {"HF_TOKEN": "projects/p/secrets/hf/versions/latest"}
    assert contract.SECRETS in env_of(request(secrets=reference, world={"is_local_cloud": True}))


@pytest.mark.parametrize(
    ("run", "args"),
    [
        ({"script": "my.py", "args": ["--x", "1"]}, ["--script", "my.py", "--", "--x", "1"]),
        ({"module": "pkg.main"}, ["--module", "pkg.main"]),
        ({"script": "k.py", "launcher": "python"}, ["--launcher", "python", "--script", "k.py"]),
        ({"command": ["bash", "run.sh"], "args": ["a"]}, ["--command", "--", "bash", "run.sh", "a"]),
    ],
    ids=str,
)
def test_what_runs(run: dict[str, Any], args: list[str]) -> None:
    assert pools(request(run=run))[0]["containerSpec"]["args"] == args


def test_nccl_settings_come_with_the_machine_and_only_between_nodes() -> None:
    mega = {"type": "h100-mega", "gpus": 8}
    one = env_of(request(machine=mega, provisioning=["spot"]))
    two = env_of(request(machine={**mega, "nodes": 2}, provisioning=["spot"]))
    assert not [name for name in one if name.startswith("NCCL_")]
    assert two["NCCL_FASTRAK_CTRL_DEV"] == "eth0"
    assert contract.LIBRARY_PATH in two or "NCCL_LIB_DIR" in two
    mine = env_of(
        request(machine={**mega, "nodes": 2}, provisioning=["spot"], env={"NCCL_FASTRAK_CTRL_DEV": "eth9"}), pool=1
    )
    assert mine["NCCL_FASTRAK_CTRL_DEV"] == "eth9"


def test_rdma_machines_source_their_script() -> None:
    body = request(machine={"type": "h200", "nodes": 2}, provisioning=["spot"], regions=["us-east4"])
    assert env_of(body)[contract.NCCL_SCRIPT].endswith("set_nccl_env.sh")


@given(st.text(alphabet='$(){}ABLAUNCH_ "', max_size=40))
def test_escaping_survives_vertex_expansion(text: str) -> None:
    assert expand(escaped(text), {"A": "!", "B": "!", "LAUNCH": "!", "": "!"}) == text


def test_config_with_dollars_is_escaped_in_the_request_only() -> None:
    config = {"data": "$(HOME)/x $$5 $x"}
    env = env_of(request(run={"config": config}))
    assert "$$(HOME)" in env[contract.CONFIG]
    assert json.loads(expand(env[contract.CONFIG], {"HOME": "/root"})) == config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"machine": {"type": "h100", "gpus": 3}}, "1, 2, 4 or 8"),
        ({"machine": {"type": "h100x"}}, "h100x"),
        ({"regions": ["us-west3"]}, "not available in us-west3"),
        ({"output": "runs"}, "local folder"),
        ({"limits": {"usd": 5}}, "could cost"),
        ({"env": {"EMPTY": ""}}, "EMPTY: empty value"),
        ({"run": {"config": {"batch_size": 5}}}, "cannot be divided evenly among 2 processes"),
        (
            {"run": {"config": {"parallel": "fsdp", "optimizer": {"name": "sgd", "fused": True}}}},
            "no fused SGD",
        ),
        ({"run": {"config": {"batch_size": 6, "micro_batch_size": 2}}}, "of micro_batch_size 2"),
        ({"machine": {"type": "t4", "gpus": 1}, "run": {"config": {"precision": "bf16"}}}, "T4 does not support bf16"),
        (
            {"machine": {"type": "v100", "gpus": 1}, "run": {"config": {"precision": "tf32"}}},
            "V100 does not support tf32",
        ),
        (
            {"machine": {"type": "t4", "gpus": 1}, "run": {"config": {"attention": "flash"}}},
            "attention: flash needs an Ampere or newer GPU and 16-bit precision; NVIDIA T4 is older",
        ),
        (
            {"machine": {"type": "h100", "gpus": 1}, "run": {"config": {"attention": "cudnn", "precision": "tf32"}}},
            "precision is tf32",
        ),
        ({"vertex": {"tensorboard": "projects/p/locations/l/tensorboards/1"}}, "service_account"),
        ({"machine": {"type": "h100", "gpus": 2, "boot_disk_type": "pd-balanced"}}, "cannot boot from pd-balanced"),
        ({"identity": {"network": "default"}}, "invalid network"),
        (
            {"identity": {"kms_key": "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k"}},
            "identity.kms_key is in europe-west4",
        ),
        (
            {"identity": {"psc": {"network_attachment": "projects/p/regions/europe-west4/networkAttachments/n"}}},
            "network_attachment is in europe-west4",
        ),
        ({"vertex": {"persistent_resource": "pr"}, "regions": ["us-central1", "us-east5"]}, "exists in one region"),
        ({"machine": {"type": "t4", "gpus": 1}, "regions": ["us-west8"]}, "training is not available in us-west8"),
        (
            {
                "vertex": {"persistent_resource": "pr"},
                "provisioning": ["reservation:projects/p/zones/us-central1-a/reservations/r"],
            },
            "cannot be combined with a reservation",
        ),
        ({"machine": {"type": "t4", "gpus": 1}, "provisioning": ["flex-start"]}, "not available as flex-start"),
        (
            {
                "machine": {"type": "h200", "nodes": 2},
                "regions": ["us-east4"],
                "provisioning": ["spot"],
                "vertex": {"reduction_server": {"replicas": 1}},
            },
            "fast network",
        ),
        (
            {
                "machine": {"type": "h100", "gpus": 2, "nodes": 2},
                "provisioning": ["spot"],
                "vertex": {"reduction_server": {"replicas": 1}},
            },
            "google-reduction-server, which",
        ),
        (
            {"secrets": {"HF_TOKEN": "projects/p/secrets/hf/versions/1", "DB": "projects/p/secrets/db/versions/1"}},
            "secrets (HF_TOKEN, DB) need identity.service_account",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(**fields)
    assert words in str(refused.value)
    assert refused.value.hint


def test_more_environment_than_vertex_takes() -> None:
    mega: dict[str, Any] = {"machine": {"type": "h100-mega", "gpus": 8, "nodes": 2}, "provisioning": ["spot"]}
    env = {f"V{number}": "x" for number in range(80)}
    with pytest.raises(PlanRefused, match="environment variables"):
        planned(env=env, **mega)
    planned(env=env)


@pytest.mark.parametrize("run_id", ["Big", "a_b", "a-", "1a", "a" * 64, "a/b"])
def test_a_run_id_that_can_be_no_label(run_id: str) -> None:
    with pytest.raises(PlanRefused, match="run-id"):
        planned(world={"run_id": run_id})


def test_the_gcloud_command_has_the_kms_key_and_labels() -> None:
    command = gcloud_command(request(**EVERYTHING), project="p", region="us-central1", config="-")
    assert "--kms-key=projects/p/locations/us-central1/keyRings/r/cryptoKeys/k" in command
    assert any(flag.startswith("--labels=") and ",launch-run=job-" in flag for flag in command)


def test_shares_in_mounts_are_mounted_on_every_node() -> None:
    body = request(
        machine={"type": "h100", "gpus": 8, "nodes": 2},
        identity={"network": "projects/1/global/networks/n"},
        vertex={"nfs": [{"server": "10.0.0.1", "path": "/a", "mount_point": "a"}]},
        mounts=[
            {"bucket": "b-1"},
            {"nfs": "10.0.0.2:/b/c", "path": "/mnt/nfs/data"},
            {"lustre": "10.0.0.3@tcp:/lfs", "volume_handle": "v", "path": "/mnt/lustre/fast"},
        ],
    )
    for pool in body["jobSpec"]["workerPoolSpecs"]:
        assert pool["nfsMounts"] == [
            {"server": "10.0.0.1", "path": "/a", "mountPoint": "a"},
            {"server": "10.0.0.2", "path": "/b/c", "mountPoint": "data"},
        ]
        assert pool["lustreMounts"] == [
            {"instanceIp": "10.0.0.3", "volumeHandle": "v", "filesystem": "lfs", "mountPoint": "fast"}
        ]
    assert "mounts" not in json.dumps(body)


LUSTRE = {"lustre": "10.0.0.3@tcp:/lfs", "path": "/mnt/lustre/fast"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mounts": [{"nfs": "s:/a", "path": "/data"}]}, r"mounts\[0\].path: .* /mnt/nfs/data"),
        ({"mounts": [{"nfs": "s:/a", "path": "/mnt/nfs/a/b"}]}, r"mounts\[0\].path: .* /mnt/nfs/b"),
        ({"mounts": [{"bucket": "b-1"}, {"nfs": "s:/a", "path": "/mnt/nfs/a"}]}, r"mounts\[1\].nfs: .* network"),
        ({"vertex": {"nfs": [{"server": "s", "path": "/a", "mount_point": "a"}]}}, r"vertex.nfs: .* network"),
        ({"mounts": [{**LUSTRE, "path": "/mnt/nfs/a"}]}, r"mounts\[0\].path: .* /mnt/lustre/a"),
        ({"mounts": [LUSTRE]}, r"mounts\[0\].lustre: volume_handle is required"),
        ({"mounts": [{**LUSTRE, "volume_handle": "v"}]}, r"mounts\[0\].lustre: .* network"),
    ],
)
def test_a_share_that_vertex_ai_cannot_mount(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanRefused, match=words):
        planned(**fields)
