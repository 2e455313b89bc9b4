"""`launch setup` on the loopback cloud: a fresh project, faults, and what the real gcloud reads back."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.clock import Clock
from launcher.testing.googlecloud import Bucket, FakeClock, Fault, GoogleCloud, Meanwhile, Reset, Status
from launcher.testing.googlecloud.compute.service import YOU
from launcher.testing.googlecloud.project.services import USED
from tests.cli.cloudjobs import WELL, Job
from tests.command import Ran, launch
from tests.golden import terraform
from tests.registry import OciRegistry, put_image

ACCOUNT = "launch@my-project.iam.gserviceaccount.com"
MEMBER = f"serviceAccount:{ACCOUNT}"
BUCKET = "my-project-launch"
BASIC = {"serviceusage.googleapis.com", "cloudresourcemanager.googleapis.com"}
"""APIs that a new project has here."""


@pytest.fixture
def fresh(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> GoogleCloud:
    """A new project: no bucket, repository, account or rule, and hardly any API."""
    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.advance))
    return emptied(cloud)


def emptied(cloud: GoogleCloud) -> GoogleCloud:
    cloud.objects.remove("my-bucket")
    cloud.services.disabled |= {*USED} - BASIC | {"cloudbuild.googleapis.com"}
    cloud.compute.zones.firewalls.clear()
    cloud.iam.strict = True
    return cloud


def setup(cloud: GoogleCloud, *argv: str, code: int = 0) -> Ran:
    ran = launch("setup", *argv, env={**cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": YOU})
    assert ran.code == code, ran.shown
    return ran


def changes(cloud: GoogleCloud) -> list[str]:
    """The requests that change something."""
    reads = (":testIamPermissions", ":getIamPolicy", "iam:troubleshoot")
    return [one.path for one in cloud.requests if one.method != "GET" and not one.path.endswith(reads)]


def roles(policy: dict[str, Any], member: str) -> set[str]:
    return {one["role"] for one in policy["bindings"] if member in one["members"]}


def check_ready(cloud: GoogleCloud, *, vms: bool) -> None:
    """Assert that the project has everything, and that the account has nothing else."""
    policies = cloud.iam.policies
    bucket = cloud.objects.settings[BUCKET]
    assert (bucket.location.lower(), bucket.uniform, bucket.soft_delete_seconds) == ("us-central1", True, 0)
    assert roles(policies.get(f"buckets/{BUCKET}"), MEMBER) == {"roles/storage.objectUser"}
    own = {"roles/logging.logWriter", "roles/secretmanager.secretAccessor"}
    assert roles(policies.get("project"), MEMBER) == own
    assert roles(policies.get(f"serviceAccounts/{ACCOUNT}"), f"user:{YOU}") == {"roles/iam.serviceAccountUser"}
    repository = "projects/my-project/locations/us/repositories/launch"
    assert repository in cloud.artifacts.repositories
    assert roles(policies.get(repository), MEMBER) == ({"roles/artifactregistry.reader"} if vms else set())
    assert "aiplatform.googleapis.com" not in cloud.services.disabled
    rules = {one["name"]: one for one in cloud.compute.zones.firewalls}
    assert set(rules) == ({"launch-iap-ssh", "launch-internal-us-central1"} if vms else set())
    assert (("us-central1", "launch-nat") in cloud.compute.zones.routers) == vms


def test_setup_shows_and_changes_nothing(fresh: GoogleCloud) -> None:
    ran = setup(fresh, "--for", "both", "--request-quota", "h100:8")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "launch setup --yes" in ran.out
    assert "gcloud storage buckets create gs://my-project-launch" in ran.out
    assert not changes(fresh)


@pytest.mark.parametrize("target", ["vertex", "both"])
def test_setup_makes_a_project_ready_once(fresh: GoogleCloud, target: str) -> None:
    made = setup(fresh, "--for", target, "--yes")
    assert max(map(len, made.out.splitlines())) <= 80
    check_ready(fresh, vms=target == "both")
    fresh.requests.clear()
    again = setup(fresh, "--for", target, "--yes")
    assert "nothing to do" in again.out
    assert not changes(fresh)


def test_json_has_every_step(fresh: GoogleCloud) -> None:
    shown = json.loads(setup(fresh, "-o", "json").out)
    assert {one["status"] for one in shown["steps"]} == {"missing"}
    made = json.loads(setup(fresh, "-o", "json", "--yes").out)
    assert {one["status"] for one in made["steps"]} == {"done"}
    assert all(one["command"].startswith("gcloud ") for one in made["steps"])


CHANGES = (
    "serviceusage.services.batchEnable",
    "artifactregistry.projects.locations.repositories.create",
    "storage.buckets.insert",
    "iam.projects.serviceAccounts.create",
    "storage.buckets.setIamPolicy",
    "cloudresourcemanager.projects.setIamPolicy",
    "artifactregistry.projects.locations.repositories.setIamPolicy",
    "iam.projects.serviceAccounts.setIamPolicy",
    "compute.firewalls.insert",
    "compute.routers.insert",
)


@pytest.mark.slow
@pytest.mark.parametrize("operation", CHANGES)
@pytest.mark.parametrize("effect", [Status(400, message="no"), Reset("after")], ids=["refused", "answer lost"])
def test_a_setup_that_ends_at_any_step_continues(fresh: GoogleCloud, operation: str, effect: Any) -> None:
    """Killed before a step, or after it had its effect: the same command finishes the rest."""
    fault = fresh.faults.add(Fault(operation, effect))
    first = launch("setup", "--for", "both", "--yes", env={**fresh.environ(), "CLOUDSDK_CORE_ACCOUNT": YOU})
    assert fresh.faults.used[fault] == 1
    assert "Traceback" not in first.err
    assert (first.code == 0) == isinstance(effect, Reset), first.shown  # a lost answer is asked for again
    setup(fresh, "--for", "both", "--yes")
    check_ready(fresh, vms=True)


def test_two_setups_at_once(fresh: GoogleCloud) -> None:
    """What another changes between the reads and the writes of this setup is kept."""
    policies = fresh.iam.policies
    others: list[str] = []

    def writes() -> int:
        return len([request for request in fresh.requests if request.path.endswith("/my-project:setIamPolicy")])

    def another() -> None:
        """Another changes the policy right after it was read."""
        if writes() < 2:
            others.append(f"user:{len(others)}@example.com")
            policy = policies.get("project")
            bindings = [*policy["bindings"], {"role": "roles/viewer", "members": others[-1:]}]
            policies.set("project", {**policy, "bindings": bindings})

    fresh.faults.add(Fault("cloudresourcemanager.projects.getIamPolicy", Meanwhile(another), times=None))
    setup(fresh, "--yes")
    check_ready(fresh, vms=False)
    assert writes() > 2
    members = {member for binding in policies.get("project")["bindings"] for member in binding["members"]}
    assert others
    assert members >= {*others}


def test_a_new_account_that_iam_does_not_know_yet_is_waited_for(fresh: GoogleCloud, clock: FakeClock) -> None:
    began = clock()
    known = fresh.iam.policies.known
    fresh.iam.policies.known = lambda email: known(email) and clock() > began + 20
    setup(fresh, "--yes")
    check_ready(fresh, vms=False)


def test_without_a_permission_there_is_one_ticket_and_no_change(fresh: GoogleCloud) -> None:
    fresh.projects.denied.add("resourcemanager.projects.setIamPolicy")
    ran = setup(fresh, "--for", "both", "--yes", code=4)
    assert "resourcemanager.projects.setIamPolicy" in ran.err
    assert not changes(fresh)
    assert ran.out.count("# Please run these commands") == 1
    assert "--role=roles/logging.logWriter" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("readable", [True, False])
def test_a_strangers_bucket_is_refused(fresh: GoogleCloud, readable: bool) -> None:
    denied = frozenset() if readable else frozenset({"storage.buckets.get"})
    fresh.services.disabled.discard("storage.googleapis.com")
    fresh.objects.add(BUCKET, Bucket(BUCKET, project_number="999", denied=denied))
    ran = setup(fresh, "--yes", code=2)
    assert "gs://my-project-launch" in ran.err
    assert not changes(fresh)


def test_a_closed_billing_account_is_no_strangers_bucket(fresh: GoogleCloud) -> None:
    fresh.services.disabled.discard("storage.googleapis.com")
    message = "The billing account for the owning project is disabled in state closed"
    fresh.faults.add(Fault("storage.buckets.get", Status(403, reason="accountDisabled", message=message), times=None))
    ran = setup(fresh, "--yes", code=4)
    assert message in " ".join(ran.err.split())
    assert "another project" not in ran.err


def test_the_terraform_module_is_rendered_from_the_steps() -> None:
    assert terraform.PAGE.read_text(encoding="utf-8") == terraform.rendered(), "run make golden"


def test_soft_delete_of_an_old_bucket_is_turned_off(fresh: GoogleCloud) -> None:
    fresh.objects.add(BUCKET, Bucket(BUCKET))
    setup(fresh, "--yes")
    check_ready(fresh, vms=False)


def test_a_router_without_nat_is_completed(fresh: GoogleCloud) -> None:
    """As an administrator leaves it who ran only the first of the two commands."""
    fresh.compute.zones.routers["us-central1", "launch-nat"] = {"network": "global/networks/default", "nats": []}
    setup(fresh, "--for", "vm", "--yes")
    assert fresh.compute.zones.routers["us-central1", "launch-nat"]["nats"]


def test_a_quota_is_requested_once(fresh: GoogleCloud) -> None:
    metric = "custom_model_training_preemptible_nvidia_h100_gpus"
    fresh.quotas.limits[metric, "us-central1"] = 0
    setup(fresh, "--request-quota", "h100:8:spot", "--yes")
    [asked] = fresh.quotas.preferences.values()
    assert asked["quotaId"] == "CustomModelTrainingPreemptibleH100GPUsPerProjectPerRegion"
    assert (asked["dimensions"], asked["quotaConfig"]["preferredValue"]) == ({"region": "us-central1"}, "8")
    assert "nothing to do" in setup(fresh, "--request-quota", "h100:8:spot", "--yes").out
    setup(fresh, "--request-quota", "h100:16:spot", "--yes")
    [asked] = fresh.quotas.preferences.values()
    assert asked["quotaConfig"]["preferredValue"] == "16"
    fresh.quotas.limits[metric, "us-central1"] = 64
    assert "nothing to do" in setup(fresh, "--request-quota", "h100:32:spot", "--yes").out


def test_quotas_of_vms_are_requested_once(fresh: GoogleCloud) -> None:
    """H100s by their family on demand, by their own quota as Spot; and GPUs in all regions together."""
    for metric in ("GPUS_PER_GPU_FAMILY", "PREEMPTIBLE_NVIDIA_H100_GPUS", "GPUS_ALL_REGIONS"):
        fresh.compute.quotas.limit(metric, 0, "us-central1")
    asked = ("--for", "vm", "--request-quota", "h100:8", "--request-quota", "h100:8:spot", "--yes")
    setup(fresh, *asked)
    found = {one["quotaId"]: one["dimensions"] for one in fresh.quotas.preferences.values()}
    assert found == {
        "GPUS-PER-GPU-FAMILY-per-project-region": {"region": "us-central1", "gpu_family": "NVIDIA_H100"},
        "PREEMPTIBLE-NVIDIA-H100-GPUS-per-project-region": {"region": "us-central1"},
        "GPUS-ALL-REGIONS-per-project": {},
    }
    assert {one["service"] for one in fresh.quotas.preferences.values()} == {"compute.googleapis.com"}
    assert "nothing to do" in setup(fresh, *asked).out
    page = " ".join(setup(fresh, "--for", "vm", "--request-quota", "h100:16").out.replace("\\\n", "").split())
    assert "--dimensions=region=us-central1,gpu_family=NVIDIA_H100" in page
    for metric in ("GPUS_PER_GPU_FAMILY", "GPUS_ALL_REGIONS"):
        fresh.compute.quotas.limit(metric, 64, "us-central1")
    assert "nothing to do" in setup(fresh, "--for", "vm", "--request-quota", "h100:32").out
    setup(fresh, "--for", "vm", "--request-quota", "gb200:4", code=2)


@pytest.mark.parametrize("text", ["h100", "h100:0", "h100:x", "h1000:8", "h100:8:reserved", "h100:8:spot:x"])
def test_an_invalid_quota_is_refused(fresh: GoogleCloud, text: str) -> None:
    setup(fresh, "--request-quota", text, code=2)
    assert not fresh.requests


def test_a_fresh_project_trains_after_one_command(fresh: GoogleCloud, tmp_path: Path) -> None:
    """With its own account, bucket and nothing else; every check passes."""
    setup(fresh, "--yes")
    fresh.compute.zones.firewalls.clear()
    fresh.jobs.script = WELL
    with OciRegistry() as registry:
        job = Job(tmp_path, fresh, f"{registry.host}/p/train@{put_image(registry, 'p/train')}")
        job.write(identity={"service_account": ACCOUNT}, output=f"gs://{BUCKET}/runs", regions=["us-central1"])
        checks = job.data("vertex", "job.yaml", "--preflight")["checks"]
        assert {one["status"] for one in checks} == {"ok"}
        assert "succeeded" in job.launch("vertex", "job.yaml").out


@pytest.mark.gcloud
def test_gcloud_reads_back_what_setup_made(gcloud: str, fresh: GoogleCloud) -> None:
    setup(fresh, "--for", "both", "--yes")

    def read(*words: str) -> Any:
        return json.loads(run(fresh, gcloud, *words, "--format=json"))

    enabled = {one["config"]["name"] for one in read("services", "list", "--enabled")}
    assert enabled >= {"aiplatform.googleapis.com", "compute.googleapis.com"}
    bucket = read("storage", "buckets", "describe", f"gs://{BUCKET}", "--raw")
    assert bucket["iamConfiguration"]["uniformBucketLevelAccess"]["enabled"] is True
    assert bucket["softDeletePolicy"]["retentionDurationSeconds"] == "0"
    policy = read("storage", "buckets", "get-iam-policy", f"gs://{BUCKET}")
    assert roles(policy, MEMBER) == {"roles/storage.objectUser"}
    assert read("artifacts", "repositories", "describe", "launch", "--location=us")["format"] == "DOCKER"
    assert read("iam", "service-accounts", "describe", ACCOUNT)["email"] == ACCOUNT
    assert roles(read("projects", "get-iam-policy", "my-project"), MEMBER) >= {"roles/logging.logWriter"}
    rules = {one["name"]: one for one in read("compute", "firewall-rules", "list")}
    assert rules["launch-iap-ssh"]["sourceRanges"] == ["35.235.240.0/20"]
    nats = read("compute", "routers", "nats", "list", "--router=launch-nat", "--region=us-central1")
    assert [one["name"] for one in nats] == ["launch-nat"]


@pytest.mark.gcloud
def test_the_tickets_commands_do_what_setup_does(gcloud: str, fresh: GoogleCloud) -> None:
    """An administrator pastes the ticket into a shell with the real gcloud; then nothing is left to do."""
    fresh.artifacts.seconds = 0  # gcloud waits by its own clock
    fresh.projects.denied.add("serviceusage.services.enable")
    ticket = setup(fresh, "--for", "both", "--yes", code=4).out
    script = ticket[ticket.index("# Please run") :]
    run(fresh, "bash", "-e", "-c", script)
    fresh.projects.denied.clear()
    assert "nothing to do" in setup(fresh, "--for", "both", "--yes").out
    check_ready(fresh, vms=True)


def run(cloud: GoogleCloud, *command: str) -> str:
    env = {**os.environ, **cloud.environ()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return done.stdout
