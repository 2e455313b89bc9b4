"""The preflight checks of `launch vertex`, against the loopback cloud."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest

from launcher.gcp.api import Rest
from launcher.project import preflight, reads
from launcher.project.checks import evaluate
from launcher.project.keys import USE
from launcher.project.needs import needs_of
from launcher.services.compute.client import Compute
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Stalled, Status
from launcher.testing.googlecloud.wire import json_response
from tests.cli.cloudjobs import Job
from tests.cli.vms import Vms

L4 = "custom_model_training_nvidia_l4_gpus"
SPOT_L4 = "custom_model_training_preemptible_nvidia_l4_gpus"
ACCOUNT = "trainer@my-project.iam.gserviceaccount.com"
READS = (
    "serviceusage.services.batchGet",
    "cloudbilling.projects.getBillingInfo",
    "cloudresourcemanager.projects.get",
    "cloudresourcemanager.projects.testIamPermissions",
    "cloudquotas.projects.locations.services.quotaInfos.list",
    "monitoring.projects.timeSeries.list",
    "iam.projects.serviceAccounts.testIamPermissions",
    "storage.buckets.get",
    "storage.buckets.testIamPermissions",
    "secretmanager.projects.secrets.versions.get",
    "policytroubleshooter.iam.troubleshoot",
    "orgpolicy.projects.policies.getEffectivePolicy",
)


@pytest.fixture
def whole(job: Job) -> Job:
    """A job that uses everything that is checked."""
    job.cloud.secrets.add("hf", b"value")
    job.write(identity={"service_account": ACCOUNT}, secrets={"HF_TOKEN": "projects/my-project/secrets/hf/versions/1"})
    return job


def zero(cloud: GoogleCloud, *metrics: str, regions: tuple[str, ...] = ("us-central1", "us-east4")) -> None:
    cloud.quotas.limits |= {(metric, region): 0 for metric in metrics for region in regions}


def test_a_placement_without_quota_is_not_tried(job: Job) -> None:
    zero(job.cloud, L4, regions=("us-central1",))
    ran = job.launch("vertex", "job.yaml")
    assert [region for region, _ in job.created] == ["us-east4"]
    assert f"{L4} in us-central1: 2 needed" in " ".join(ran.err.split())
    assert "--quota-id=CustomModelTrainingL4GPUsPerProjectPerRegion" in ran.err
    table = ran.err.partition("preflight checks:")[2].partition("launch: image")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_without_any_quota_nothing_is_submitted(job: Job) -> None:
    zero(job.cloud, L4, SPOT_L4)
    ran = job.launch("vertex", "job.yaml", code=5)
    assert not job.created
    assert ("✗ l4 " in ran.err, "✗ preemptible_l4 " in ran.err) == (True, True)
    job.launch("vertex", "job.yaml", "--no-preflight")
    assert len(job.created) == 1


def test_the_use_of_a_quota_counts_but_refuses_nothing(job: Job) -> None:
    job.cloud.quotas.limits[L4, "us-central1"] = 4
    job.cloud.quotas.usage[L4, "us-central1"] = 3
    checks = job.data("vertex", "job.yaml", "--preflight")["checks"]
    [found] = [one for one in checks if one["status"] == "warning" and one["name"] == "quota"]
    assert "2 needed, 3 in use, limit 4" in found["text"]
    job.launch("vertex", "job.yaml")
    assert [region for region, _ in job.created] == ["us-central1"]


def test_usage_is_read_by_googles_clock(job: Job, clock: FakeClock) -> None:
    """The loopback cloud's clock is years behind this machine's."""
    job.launch("vertex", "job.yaml", "--preflight")
    [asked] = [one.query for one in job.cloud.requests if one.path.endswith("/timeSeries")]
    assert asked["interval.endTime"][:19] == datetime.fromtimestamp(clock(), UTC).isoformat()[:19]


def test_preflight_alone_changes_nothing(whole: Job) -> None:
    found = whole.data("vertex", "job.yaml", "--preflight")
    assert {one["status"] for one in found["checks"]} == {"ok", "warning"}  # soft delete
    assert [one["region"] for one in found["placements"]] == ["us-central1", "us-east4"] * 2
    changes = [one.path for one in whole.cloud.requests if one.method != "GET"]
    assert all(path.endswith((":testIamPermissions", "iam:troubleshoot")) for path in changes), changes
    assert not whole.created
    assert not whole.cloud.objects.buckets["my-bucket"]
    ran = whole.launch("vertex", "job.yaml", "--preflight")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.out.splitlines()[-1] == "1 warning"


def test_preflight_alone_has_the_exit_code_of_its_refusal(whole: Job) -> None:
    whole.cloud.iam.denied.add("iam.serviceAccounts.actAs")
    found = whole.data("vertex", "job.yaml", "--preflight", code=4)
    assert found["error"]["exit_code"] == 4
    assert found["placements"] == []
    assert "gcloud iam service-accounts add-iam-policy-binding" in whole.launch("vertex", "job.yaml", code=4).err
    assert not whole.created
    zero(whole.cloud, L4, SPOT_L4)
    whole.launch("vertex", "job.yaml", "--preflight", code=2)  # two kinds of problems


def test_preflight_is_combined_with_nothing_that_submits(job: Job) -> None:
    for flag in ("--no-preflight", "--dry-run"):
        assert flag in job.launch("vertex", "job.yaml", "--preflight", flag, code=2).err
    assert not job.cloud.requests


@pytest.mark.parametrize("operation", READS)
def test_a_refused_read_is_unknown_and_the_job_is_submitted(whole: Job, operation: str) -> None:
    whole.cloud.faults.add(fault := Fault(operation, Status(403, message="no permission"), times=None))
    ran = whole.launch("vertex", "job.yaml", "--detach")
    assert whole.cloud.faults.used[fault]
    assert len(whole.created) == 1
    assert "Traceback" not in ran.err
    if operation not in ("monitoring.projects.timeSeries.list", "cloudresourcemanager.projects.get"):
        assert "not checked" in ran.err


def test_disabled_apis_of_the_checks_refuse_nothing(whole: Job) -> None:
    names = ("cloudquotas", "monitoring", "policytroubleshooter", "iam", "cloudbilling")
    whole.cloud.services.disabled |= {f"{name}.googleapis.com" for name in names}
    found = whole.data("vertex", "job.yaml", "--preflight")
    unknown = {one["name"]: one for one in found["checks"] if one["status"] == "unknown"}
    assert set(unknown) >= {"quota", "job access", "actAs", "billing", "secret"}
    assert "gcloud services enable cloudquotas.googleapis.com" in unknown["quota"]["fix"]


def test_a_disabled_api_that_the_job_needs_is_refused(whole: Job) -> None:
    whole.cloud.services.disabled.add("secretmanager.googleapis.com")
    ran = whole.launch("vertex", "job.yaml", "--preflight", code=2)
    assert "gcloud services enable secretmanager.googleapis.com" in ran.err


def test_what_the_jobs_account_lacks_is_refused(whole: Job) -> None:
    whole.cloud.iam.access[ACCOUNT, "secretmanager.versions.access"] = "CANNOT_ACCESS"
    whole.cloud.iam.access[ACCOUNT, "storage.objects.create"] = "CANNOT_ACCESS"
    ran = whole.launch("vertex", "job.yaml", code=4)
    assert "gcloud secrets add-iam-policy-binding hf" in ran.err
    assert "gcloud storage buckets add-iam-policy-binding gs://my-bucket" in ran.err
    assert not whole.created


def test_a_reservation_that_is_full_is_not_used(job: Job) -> None:
    name = "projects/my-project/zones/us-central1-a/reservations/r"
    job.write(provisioning=[f"reservation:{name}", "spot"], regions=["us-central1"])
    body = {"count": "1", "inUseCount": "1", "instanceProperties": {"machineType": "g2-standard-24"}}
    job.cloud.compute.zones.reservations["us-central1-a", "r"] = {"status": "READY", "specificReservation": body}
    found = job.data("vertex", "job.yaml", "--preflight")
    assert [one["provisioning"] for one in found["placements"]] == ["spot"]


@pytest.mark.parametrize("dense", [True, False])
def test_a_vm_of_a_dense_reservation_needs_the_field(job: Job, dense: bool) -> None:
    end = "2099-12-01T00:00:00+00:00"
    name = "projects/my-project/zones/us-central1-a/reservations/r"
    fields = {"machine": {"type": "g2-standard-24"}, "regions": None, "provisioning": [f"reservation:{name}"]}
    job.write(**fields, vm={"external_ip": True, "dense_reservation": dense})
    body = {"count": "1", "instanceProperties": {"machineType": "g2-standard-24"}}
    known = {"status": "READY", "deploymentType": "DENSE", "deleteAtTime": end, "specificReservation": body}
    job.cloud.compute.zones.reservations["us-central1-a", "r"] = known
    if dense:
        found = job.data("vm", "job.yaml", "--run", "--preflight")
        [check] = [one for one in found["checks"] if one["name"] == "reservation"]
        assert (check["status"], "ends on 2099-12-01 00:00 UTC" in check["text"]) == ("ok", True)
    else:
        ran = job.launch("vm", "job.yaml", "--run", "--preflight", code=2)
        assert "vm.dense_reservation=true" in ran.shown


def test_the_reads_take_less_than_three_seconds_at_200_ms_each(whole: Job) -> None:
    from launcher.api import plan

    with pytest.MonkeyPatch.context() as patch:
        for key, value in whole.env.items():
            patch.setenv(key, value)
        made = plan(whole.folder / "job.yaml").data
        whole.cloud.latency = 0.2
        began = time.monotonic()
        checks = preflight.check_plan(made, whole.env, Compute(made.project, whole.env))
        assert time.monotonic() - began < 3
    assert {one.status for one in checks} == {"ok", "warning"}
    assert len(checks) >= 10


def test_a_read_that_never_answers_is_unknown(whole: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.api import plan

    whole.cloud.faults.add(Fault("cloudbilling.*", Stalled(), times=None))
    for key, value in whole.env.items():
        monkeypatch.setenv(key, value)
    made = plan(whole.folder / "job.yaml").data
    needs = needs_of(made)
    found = reads.read(Rest(made.project, whole.env), needs, whole.env, seconds=2.0)
    checks = {one.name: one for one in evaluate(needs, found)}
    assert checks["billing"].status == "unknown"
    assert "2 s" in checks["billing"].text
    assert checks["permissions"].status == "ok"


def test_expired_credentials_are_not_a_finding_of_the_project(whole: Job) -> None:
    whole.env = {**whole.env, "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "", "CLOUDSDK_AUTH_ACCESS_TOKEN": "old"}
    whole.cloud.tokens = {"new"}
    found = whole.data("vertex", "job.yaml", "--preflight")
    google = [one for one in found["checks"] if one["name"] != "image"]
    assert {one["status"] for one in google} == {"unknown"}
    assert any("gcloud auth application-default login" in one["fix"] for one in google)


def test_the_checks_of_a_vm_alone(vms: Vms) -> None:
    vms.cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")
    vms.cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 0, "us-central1")
    words = ("--type", "l4", "--gpus", "1", "--region", "us-central1", "--preflight")
    found = json.loads(vms.launch(*words, "-o", "json", code=5).out)
    assert {one["name"] for one in found["checks"] if one["status"] == "failed"} == {"quota"}
    assert found["placements"] == []
    assert not vms.cloud.compute.names()


def test_a_missing_subnetwork_whose_name_says_quota_is_no_lack_of_quota(vms: Vms) -> None:
    words = ("--type", "l4", "--gpus", "1", "--region", "us-central1", "--set", "identity.subnetwork=quota-net")
    found = json.loads(vms.launch(*words, "--preflight", "-o", "json", code=2).out)
    assert {one["name"] for one in found["checks"] if one["status"] == "failed"} == {"vm"}


def test_policies_key_and_bucket_of_a_job(whole: Job) -> None:
    """The real reads: each is asked once, and each finding has its place."""
    whole.cloud.policies.rules["gcp.resourceLocations"] = [{"values": {"allowedValues": ["in:us-east4-locations"]}}]
    found = whole.data("vertex", "job.yaml", "--preflight")
    assert {one["region"] for one in found["placements"]} == {"us-east4"}
    [policy] = [one for one in found["checks"] if one["status"] == "failed"]
    assert (policy["name"], policy["place"]) == ("policy", "us-central1")
    whole.cloud.policies.rules.clear()
    key = "projects/my-project/locations/us-central1/keyRings/r/cryptoKeys/jobs"
    whole.write(identity={"kms_key": key}, regions=["us-central1"])
    whole.cloud.keys.states[key] = "ENABLED"
    checks = {one["name"]: one["status"] for one in whole.data("vertex", "job.yaml", "--preflight")["checks"]}
    assert checks["key"] == "ok"
    whole.cloud.iam.access["service-123456789012@gcp-sa-aiplatform.iam.gserviceaccount.com", USE] = "CANNOT_ACCESS"
    ran = whole.launch("vertex", "job.yaml", code=2)
    assert "gcloud kms keys add-iam-policy-binding jobs --keyring=r" in ran.err
    assert not whole.created


def test_a_subnetwork_of_a_host_project(vms: Vms) -> None:
    """What the caller may do there decides; policies are those of the VM's own project."""
    vms.cloud.compute.zones.hosts["host"] = set()
    shared = "projects/host/regions/us-central1/subnetworks/default"
    words = ("--type", "l4", "--gpus", "1", "--region", "us-central1", "--set", f"identity.subnetwork={shared}")
    found = json.loads(vms.launch(*words, "--preflight", "-o", "json", code=2).out)
    failed = {one["name"]: one for one in found["checks"] if one["status"] == "failed"}
    assert "gcloud compute networks subnets add-iam-policy-binding default" in failed["network"]["fix"]
    vms.cloud.compute.zones.hosts["host"] = {"compute.subnetworks.use"}
    vms.cloud.policies.rules["compute.requireShieldedVm"] = [{"enforce": True}]
    ran = vms.launch(*words, "--detach", code=2)
    assert "org-policies disable-enforce compute.requireShieldedVm" in " ".join(ran.err.replace("\\\n", "").split())
    assert not vms.cloud.compute.names()


def test_an_answer_that_is_not_what_google_documents_is_unknown(whole: Job) -> None:
    for path in ("/quotaInfos", "/timeSeries", ":batchGet", "/billingInfo"):
        route = next(one for one in whole.cloud._routes if one.pattern.pattern.endswith(path) and one.method == "GET")
        odd = route._replace(answer=lambda request, **names: json_response([{"metric": 7}]))
        whole.cloud._routes[whole.cloud._routes.index(route)] = odd
    found = whole.data("vertex", "job.yaml", "--preflight")
    assert {one["name"] for one in found["checks"] if one["status"] == "unknown"} == {"quota", "apis", "billing"}
