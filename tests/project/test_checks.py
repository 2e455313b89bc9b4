"""The checks as pure functions of what was read: each fault alone, each read refused, and all at once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.project.checks import evaluate, limit_of
from launcher.project.keys import keys
from launcher.project.model import Check, GpuNeed, Needs, ReservationNeed, SubnetworkNeed
from launcher.project.org_policies import constraints, is_allowed, is_enforced, named, region_in
from launcher.project.reads import CALLER_PERMISSIONS, OBJECT_PERMISSIONS
from launcher.project.report import data, lines

METRIC = "custom_model_training_nvidia_l4_gpus"
SECRET = "projects/p/secrets/hf/versions/1"
RESERVATION = "projects/p/zones/us-central1-a/reservations/r"
KEY, BUCKET_KEY = (f"projects/p/locations/us-central1/keyRings/r/cryptoKeys/{name}" for name in ("jobs", "bucket"))
SUBNETWORK = SubnetworkNeed(project="host", region="us-central1", name="shared", external_ip=False)
VERTEX_AGENT, STORAGE_AGENT = (
    f"service-1@{name}.iam.gserviceaccount.com" for name in ("gcp-sa-aiplatform", "gs-project-accounts")
)
ACCOUNT = "trainer@p.iam.gserviceaccount.com"
NEEDS = Needs(
    project="p",
    apis=("aiplatform.googleapis.com", "secretmanager.googleapis.com"),
    bucket="b",
    regions=("us-central1",),
    account=ACCOUNT,
    image="us-docker.pkg.dev/p/launch/train@sha256:1",
    repository="projects/p/locations/us/repositories/launch",
    secrets=(SECRET,),
    gpus=(GpuNeed(metric=METRIC, gpus=2, region="us-central1", provisioning="standard"),),
    reservations=(ReservationNeed(name=RESERVATION, machine_type="g2-standard-24", nodes=2, region="us-central1"),),
    subnetworks=(SUBNETWORK,),
    key=KEY,
)


def quota(limit: int | None, **more: Any) -> dict[str, Any]:
    details = {} if limit is None else {"value": str(limit)}
    info = {"applicableLocations": ["us-central1"], "dimensions": {"region": "us-central1"}, "details": details}
    return {"metric": f"aiplatform.googleapis.com/{METRIC}", "quotaId": "ID", "dimensionsInfos": [info], **more}


def reservation(**changes: Any) -> dict[str, Any]:
    specific = {"count": "4", "inUseCount": "1", "instanceProperties": {"machineType": "g2-standard-24"}}
    return {"status": "READY", "specificReservation": specific, **changes}


GOOD: dict[str, Any] = {
    "project": {"projectId": "p", "projectNumber": "1", "lifecycleState": "ACTIVE"},
    "billing": {"billingEnabled": True, "billingAccountName": "billingAccounts/A"},
    "apis": dict.fromkeys(NEEDS.apis, True),
    "permissions": [*CALLER_PERMISSIONS],
    "actAs": ["iam.serviceAccounts.actAs"],
    "quota": {"quotas": {METRIC: quota(2)}, "usage": {}},
    "bucket": {"location": "US-CENTRAL1", "locationType": "region", "projectNumber": "1"},
    "access": {"permissions": [*OBJECT_PERMISSIONS]},
    "repository": {"format": "DOCKER"},
    "image": "sha256:1",
    f"secret {SECRET}": {"state": "ENABLED"},
    f"access {SECRET}": "CAN_ACCESS",
    "access image": "CAN_ACCESS",
    **{f"access {one}": "CAN_ACCESS" for one in OBJECT_PERMISSIONS},
    f"reservation {RESERVATION}": reservation(),
    **{f"policy {one}": {"spec": {"rules": [{"allowAll": True}]}} for one in constraints(NEEDS)},
    "subnetwork host us-central1 shared": ["compute.subnetworks.use"],
    f"key {KEY}": {"primary": {"name": f"{KEY}/cryptoKeyVersions/2", "state": "ENABLED"}},
    f"access {VERTEX_AGENT} {KEY}": "CAN_ACCESS",
}
ENCRYPTED = {**GOOD["bucket"], "encryption": {"defaultKmsKeyName": BUCKET_KEY}}


def bad(checks: tuple[Check, ...]) -> list[str]:
    return [f"{check.name} {check.status}" for check in checks if check.status != "ok"]


def test_a_project_with_everything_passes() -> None:
    checks = evaluate(NEEDS, GOOD)
    assert not bad(checks)
    assert {one.name for one in checks} >= {"quota", "bucket", "secret", "reservation", "actAs", "image", "billing"}


FAULTS: dict[str, tuple[str, Any, str, str]] = {
    "no project": ("project", None, "project failed", "gcloud projects list"),
    "deleted": ("project", {"lifecycleState": "DELETE_REQUESTED"}, "project failed", "gcloud projects undelete p"),
    "billing": ("billing", {}, "billing failed", "gcloud billing projects link p"),
    "api": (
        "apis",
        {**dict.fromkeys(NEEDS.apis, True), "aiplatform.googleapis.com": False},
        "apis failed",
        "gcloud services enable aiplatform.googleapis.com --project=p",
    ),
    "create": ("permissions", ["logging.logEntries.list"], "permissions failed", "--role=roles/aiplatform.user"),
    "logs": ("permissions", CALLER_PERMISSIONS[:-1], "permissions warning", "--role=roles/logging.viewer"),
    "no account": ("actAs", None, "actAs failed", "gcloud iam service-accounts create trainer --project=p"),
    "actAs": ("actAs", [], "actAs failed", f"service-accounts add-iam-policy-binding {ACCOUNT}"),
    "limit": ("quota", {"quotas": {METRIC: quota(1)}, "usage": {}}, "quota failed", "--preferred-value=3"),
    "limit 0": ("quota", {"quotas": {METRIC: quota(None)}, "usage": None}, "quota failed", "--quota-id=ID"),
    "in use": (
        "quota",
        {"quotas": {METRIC: quota(2)}, "usage": {METRIC: {"us-central1": 1}}},
        "quota warning",
        "--preferred-value=4",
    ),
    "no increase": (
        "quota",
        {
            "quotas": {METRIC: quota(0, quotaIncreaseEligibility={"ineligibilityReason": "NO_VALID_BILLING_ACCOUNT"})},
            "usage": {},
        },
        "quota failed",
        "gcloud billing projects link p",
    ),
    "unlisted": ("quota", {"quotas": {}, "usage": {}}, "quota unknown", ""),
    "no bucket": ("bucket", None, "bucket failed", "gcloud storage buckets create gs://b --project=p"),
    "stranger's": (
        "bucket",
        {"location": "US-CENTRAL1", "locationType": "region", "projectNumber": "2"},
        "bucket warning",
        "gcloud projects describe 2",
    ),
    "far": (
        "bucket",
        {"location": "EUROPE-WEST4", "locationType": "region", "projectNumber": "1"},
        "bucket warning",
        "--region europe-west4",
    ),
    "multi-region": (
        "bucket",
        {"location": "US", "locationType": "multi-region"},
        "bucket warning",
        "--location=us-central1",
    ),
    "soft delete": (
        "bucket",
        {**GOOD["bucket"], "softDeletePolicy": {"retentionDurationSeconds": "604800"}},
        "bucket warning",
        "gcloud storage buckets update gs://b --clear-soft-delete",
    ),
    "caller's bucket": (
        "access",
        {"permissions": ["storage.objects.get"]},
        "access failed",
        "gcloud storage buckets add-iam-policy-binding gs://b --member",
    ),
    "job's bucket": (
        "access storage.objects.create",
        "CANNOT_ACCESS",
        "job access failed",
        f"--member=serviceAccount:{ACCOUNT} --role=roles/storage.objectUser",
    ),
    "conditional": ("access storage.objects.get", "UNKNOWN_CONDITIONAL", "job access unknown", ""),
    "no repository": ("repository", None, "repository failed", "gcloud artifacts repositories create launch"),
    "npm": ("repository", {"format": "NPM"}, "repository failed", "image.repository"),
    "agent": ("access image", "CANNOT_ACCESS", "repository unknown", "service-1@gcp-sa-aiplatform-cc"),
    "no image": ("image", None, "image failed", "gcloud artifacts docker images list"),
    "no secret": (f"secret {SECRET}", None, "secret failed", "gcloud secrets versions list hf --project=p"),
    "disabled": (
        f"secret {SECRET}",
        {"state": "DISABLED"},
        "secret failed",
        "gcloud secrets versions enable 1 --secret=hf",
    ),
    "secret's access": (
        f"access {SECRET}",
        "CANNOT_ACCESS",
        "secret failed",
        "gcloud secrets add-iam-policy-binding hf --project=p",
    ),
    "no reservation": (f"reservation {RESERVATION}", None, "reservation failed", "gcloud compute reservations list"),
    "other machine": (
        f"reservation {RESERVATION}",
        reservation(specificReservation={"count": 4, "instanceProperties": {"machineType": "a3-highgpu-8g"}}),
        "reservation failed",
        "--type a3-highgpu-8g",
    ),
    "full": (
        f"reservation {RESERVATION}",
        reservation(specificReservation={"count": "4", "inUseCount": "3"}),
        "reservation failed",
        "gcloud compute reservations describe r",
    ),
    "location": (
        "policy gcp.resourceLocations",
        {"spec": {"rules": [{"values": {"allowedValues": ["in:europe-west4-locations", "in:asia-locations"]}}]}},
        "policy failed",
        "gcloud org-policies describe gcp.resourceLocations --effective --project=p",
    ),
    "conditional policy": (
        "policy gcp.restrictServiceUsage",
        {"spec": {"rules": [{"denyAll": True, "condition": {"expression": "resource.matchTag('1/a', 'b')"}}]}},
        "policy unknown",
        "gcloud org-policies describe gcp.restrictServiceUsage",
    ),
    "no subnetwork": (
        "subnetwork host us-central1 shared",
        None,
        "network failed",
        "gcloud compute networks subnets list --project=host",
    ),
    "network user": (
        "subnetwork host us-central1 shared",
        [],
        "network failed",
        "gcloud compute networks subnets add-iam-policy-binding shared --region=us-central1 --project=host",
    ),
    "no key": (f"key {KEY}", None, "key failed", "gcloud kms keys list --keyring=r --location=us-central1"),
    "disabled key": (
        f"key {KEY}",
        {"primary": {"name": f"{KEY}/cryptoKeyVersions/2", "state": "DISABLED"}},
        "key failed",
        "gcloud kms keys versions enable 2 --key=jobs --keyring=r",
    ),
    "key's access": (
        f"access {VERTEX_AGENT} {KEY}",
        "CANNOT_ACCESS",
        "key failed",
        f"--member=serviceAccount:{VERTEX_AGENT} --role=roles/cloudkms.cryptoKeyEncrypterDecrypter",
    ),
    "bucket's key": ("bucket", ENCRYPTED, "key unknown", ""),
    "unshared": (
        f"reservation {RESERVATION}",
        reservation(reservationSharingPolicy={"serviceShareType": "DISALLOW_ALL"}),
        "reservation failed",
        "--reservation-sharing-policy=ALLOW_ALL",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_alone(name: str) -> None:
    """It is found once, with its command, and nothing else is."""
    read, value, expected, command = FAULTS[name]
    checks = evaluate(NEEDS, {**GOOD, read: value})
    assert bad(checks) == [expected]
    assert command in checks[0].fix


@pytest.mark.parametrize(
    ("known", "dense", "text", "fix"),
    [
        ({"deploymentType": "DENSE"}, False, "is DENSE", "--set vm.dense_reservation=true"),
        ({"reservationMode": "CALENDAR"}, False, "is DENSE", "--set vm.dense_reservation=true"),
        ({}, True, "is not DENSE", "--set vm.dense_reservation=false"),
        ({"deploymentType": "DENSE"}, True, "", ""),
        ({"deploymentType": "DENSE"}, None, "", ""),
    ],
)
def test_a_dense_reservation_needs_the_field(known: dict[str, Any], dense: bool | None, text: str, fix: str) -> None:
    """On Vertex AI (None) the field has no effect."""
    need = replace(NEEDS.reservations[0], dense=dense)
    needs = replace(NEEDS, reservations=(need,), service="vertex" if dense is None else "vm")
    name = f"reservation {RESERVATION}"
    [check] = [one for one in evaluate(needs, {name: reservation(**known)}) if one.name == "reservation"]
    assert check.status == ("failed" if text else "ok")
    assert (text in check.text, fix in check.fix) == (True, True)


def test_the_end_of_a_calendar_reservation_is_reported() -> None:
    name, end = f"reservation {RESERVATION}", "2026-12-01T00:00:00.000-08:00"
    [check] = [one for one in evaluate(NEEDS, {name: reservation(deleteAtTime=end)}) if one.name == "reservation"]
    assert check.ends == end
    assert "ends on 2026-12-01 08:00 UTC" in check.text


@pytest.mark.parametrize("read", GOOD)
def test_an_unreadable_answer_is_unknown_and_refuses_nothing(read: str) -> None:
    checks = evaluate(NEEDS, {**GOOD, read: LaunchError("the API is disabled", "gcloud services enable it")})
    assert {result.rpartition(" ")[2] for result in bad(checks)} <= {"unknown"}


def test_nothing_could_be_read() -> None:
    checks = evaluate(NEEDS, {name: LaunchError("no credentials", "gcloud auth login") for name in GOOD})
    assert {one.status for one in checks} == {"unknown"}
    assert all("no credentials" in one.text for one in checks)


def test_all_faults_at_once_fit_80_columns() -> None:
    worst = {read: value for read, value, expected, _ in FAULTS.values() if expected.endswith("failed")}
    checks = evaluate(NEEDS, {**GOOD, **worst})
    assert len([one for one in checks if one.status == "failed"]) >= 9
    shown = [*lines(checks)]
    assert max(map(len, shown)) <= 80
    assert len([line for line in shown if line.startswith("✗")]) == len(
        [one for one in checks if one.status == "failed"]
    )


def test_the_key_of_a_bucket_is_used_by_its_projects_agent() -> None:
    read = {
        f"key {BUCKET_KEY}": {"primary": {"state": "ENABLED"}},
        f"access {STORAGE_AGENT} {BUCKET_KEY}": "CAN_ACCESS",
    }
    assert not bad(evaluate(NEEDS, {**GOOD, "bucket": ENCRYPTED, **read}))


def test_the_key_of_a_repository_elsewhere_is_used_by_its_own_projects_agent() -> None:
    needs = replace(NEEDS, repository="us-docker.pkg.dev/other/images")
    found = {**GOOD, "repository": {"kmsKeyName": BUCKET_KEY}}
    assert [agent for (what, _), agent in keys(needs, found).items() if what == needs.repository] == [""]


def rules(*values: str, **more: Any) -> dict[str, Any]:
    return {"spec": {"rules": [{"values": {"allowedValues": [*values]}, **more}]}}


def denied(*values: str) -> dict[str, Any]:
    return {"spec": {"rules": [{"values": {"deniedValues": [*values]}}]}}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, True),
        ({"spec": {"rules": [{"denyAll": True}]}}, False),
        (rules("us-east4"), True),
        (rules("in:us-east4-locations"), True),
        (rules("in:us-locations"), True),
        (rules("in:europe-locations", "in:us-central1-locations"), False),
        (rules("in:eu-locations"), None),  # its members are not known here
        (rules("us-east4-a"), None),
        (rules("in:eu-locations", "in:us-locations"), True),
        (rules("in:us-locations", condition={"expression": "tag"}), None),
        (denied("in:us-locations"), False),
        (denied("in:asia-locations"), True),
        (denied("in:low-carbon-us-locations"), None),
        (
            {"spec": {"rules": [*rules("in:us-locations")["spec"]["rules"], *denied("us-east4")["spec"]["rules"]]}},
            False,
        ),
    ],
)
def test_the_locations_of_a_policy(policy: dict[str, Any], expected: bool | None) -> None:
    assert is_allowed(policy, region_in("us-east4")) is expected


def test_named_values_and_enforcement() -> None:
    project = named("projects/deeplearning-platform-release", "under:")
    assert is_allowed(rules("is:projects/deeplearning-platform-release"), project) is True
    assert is_allowed(rules("projects/other"), project) is False
    assert is_allowed(rules("under:organizations/1"), project) is None
    assert [is_enforced({"spec": {"rules": [one]}}) for one in ({"enforce": True}, {"enforce": False}, {})] == [
        True, False, False,
    ]  # fmt: skip
    assert is_enforced({"spec": {"rules": [{"enforce": True, "condition": {"expression": "x"}}]}}) is None


VM = Needs(
    project="p",
    service="vm",
    apis=("compute.googleapis.com",),
    regions=("us-central1",),
    external_ip=True,
    image_project="deeplearning-platform-release",
)
OPEN: dict[str, Any] = {f"policy {one}": {} for one in constraints(VM)}


@pytest.mark.parametrize(
    ("constraint", "policy", "status", "command"),
    [
        ("compute.requireShieldedVm", {"spec": {"rules": [{"enforce": True}]}}, "failed", "disable-enforce"),
        ("compute.requireShieldedVm", {"spec": {"rules": [{"enforce": False}]}}, "ok", ""),
        ("compute.trustedImageProjects", rules("projects/mine"), "failed", "projects/deeplearning-platform-release"),
        ("compute.vmExternalIpAccess", {"spec": {"rules": [{"denyAll": True}]}}, "failed", "vm.external_ip=false"),
        ("compute.vmExternalIpAccess", rules("projects/p/zones/us-central1-a/instances/x"), "unknown", "describe"),
        ("gcp.restrictNonCmekServices", denied("compute.googleapis.com"), "failed", "identity.kms_key="),
        ("gcp.restrictNonCmekServices", denied("is:aiplatform.googleapis.com"), "ok", ""),
        ("gcp.restrictServiceUsage", rules("storage.googleapis.com"), "failed", "describe gcp.restrictServiceUsage"),
    ],
)
def test_what_policies_refuse_vms(constraint: str, policy: dict[str, Any], status: str, command: str) -> None:
    assert [one.status for one in evaluate(VM, OPEN)] == ["ok"]
    [check] = evaluate(VM, {**OPEN, f"policy {constraint}": policy})
    assert (check.name, check.status) == ("policy", status)
    assert command in check.fix
    assert max(map(len, lines([check]))) <= 80


def test_images_of_the_own_project_are_always_allowed() -> None:
    own = replace(VM, image_project=VM.project)
    assert [one.status for one in evaluate(own, {**OPEN, "policy compute.trustedImageProjects": rules("x")})] == ["ok"]


def test_a_quota_that_the_catalog_lacks_is_found_by_its_beginning() -> None:
    need = GpuNeed(
        metric="custom_model_training_nvidia_gb200", gpus=4, region="us-central1", provisioning="spot", is_exact=False
    )
    info = {**quota(0), "metric": "aiplatform.googleapis.com/custom_model_training_nvidia_gb200_gpus"}
    needs = replace(NEEDS, gpus=(need,))
    found = {**GOOD, "quota": {"quotas": {"custom_model_training_nvidia_gb200_gpus": info}, "usage": {}}}
    [check] = [one for one in evaluate(needs, found) if one.name == "quota"]
    assert (check.status, check.place, check.provisioning) == ("failed", "us-central1", "spot")
    both = dict.fromkeys(("custom_model_training_nvidia_gb200_gpus", "custom_model_training_nvidia_gb200_x"), info)
    [check] = [one for one in evaluate(needs, {**GOOD, "quota": {"quotas": both, "usage": {}}}) if one.name == "quota"]
    assert check.status == "unknown"


def test_quotas_are_one_table_with_each_fix_once() -> None:
    regions, spot = (
        ("us-central1", "us-east4", "northamerica-northeast1"),
        METRIC.replace("nvidia", "preemptible_nvidia"),
    )
    gpus = [
        GpuNeed(metric=metric, gpus=2, region=region, provisioning=model)
        for metric, model in ((METRIC, "standard"), (spot, "spot"), (spot, "flex-start"))
        for region in regions
    ]
    limits = {METRIC: (1, 1, 2), spot: (1000, 1000, 1000)}
    infos = {
        metric: {
            **quota(0, quotaIncreaseEligibility={"ineligibilityReason": "OTHER"} if metric == METRIC else {}),
            "metric": f"aiplatform.googleapis.com/{metric}",
            "dimensionsInfos": [
                {"dimensions": {"region": region}, "details": {"value": str(limit)}}
                for region, limit in zip(regions, values, strict=True)
            ],
        }
        for metric, values in limits.items()
    }
    found = {**GOOD, "quota": {"quotas": infos, "usage": {METRIC: {regions[2]: 1}}}}
    checks = [one for one in evaluate(replace(NEEDS, gpus=tuple(gpus)), found) if one.name == "quota"]
    assert [*lines(checks)] == [
        "  quota           limit  used  needed  verdict  region",
        "✗ l4                  1     0       2  too low  us-central1, us-east4",
        "! l4                  2     1       2  used up  northamerica-northeast1",
        "✓ preemptible_l4   1000     0       2  fits     us-central1, us-east4,",
        "                                                northamerica-northeast1",
        "    l4: can't be raised by command: OTHER",
        "    https://console.cloud.google.com/iam-admin/quotas?project=p",
    ]
    sentence = next(lines(checks[:2]))
    assert sentence.startswith("✗ quota       custom_model_training_nvidia_l4_gpus in us-central1: 2")
    assert {*data(checks)[0]} == {"name", "status", "text", "fix", "place", "provisioning", "machine_type"}


def test_the_limit_of_the_more_specific_dimensions_counts() -> None:
    own = {"dimensions": {"region": "us-central1"}, "details": {"value": "8"}}
    rest = {"details": {"value": "-1"}, "applicableLocations": ["us-central1", "us-east4"]}
    info = {"dimensionsInfos": [own, rest]}
    assert (limit_of(info, "us-central1"), limit_of(info, "us-east4"), limit_of(info, "me-west1")) == (8, -1, None)
    families = [
        {"dimensions": {"gpu_family": name}, "details": {"value": value}} for name, value in (("A", 1), ("B", 2))
    ]
    assert limit_of({"dimensionsInfos": families}, "us-central1", {"gpu_family": "B"}) == 2


@pytest.mark.parametrize("read", GOOD)
def test_an_answer_of_another_shape_is_no_reason_to_refuse(read: str) -> None:
    """Google may change what it answers; nothing is raised."""
    for odd in ({"quotas": {METRIC: {"dimensionsInfos": [7]}}}, [7], 7):
        evaluate(NEEDS, {**GOOD, read: odd})
    odd_quota = {"quotas": {METRIC: {"metric": "m", "dimensionsInfos": [7]}}, "usage": {}}
    [check] = [one for one in evaluate(NEEDS, {**GOOD, "quota": odd_quota}) if one.name == "quota"]
    assert check.status == "unknown"
