"""Read the data for the checks of a project: in parallel, each once, with one time limit for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from launcher.errors import LaunchError
from launcher.gcp.api import Rest, Service
from launcher.gcp.parallel import together
from launcher.images.registry import Registry, parse
from launcher.project.keys import USE, keys
from launcher.project.model import UNEXPECTED, Found, Needs, SubnetworkNeed, answer, settled
from launcher.project.org_policies import constraints

SECONDS: Final = 6.0
"""Time limit of all reads together."""
USAGE_WINDOW: Final = timedelta(hours=25)
"""Usage is sampled once a day; gcloud looks back as far (command_lib/ai/model_garden_utils)."""
MAX_PAGES: Final = 10

SERVICE_USAGE: Final = Service("serviceusage", "Service Usage", "roles/serviceusage.serviceUsageViewer")
RESOURCES: Final = Service("cloudresourcemanager", "Resource Manager", "roles/browser")
BILLING: Final = Service("cloudbilling", "Cloud Billing", "roles/billing.viewer")
QUOTAS: Final = Service("cloudquotas", "Cloud Quotas", "roles/cloudquotas.viewer")
MONITORING: Final = Service("monitoring", "Cloud Monitoring", "roles/monitoring.viewer")
IAM: Final = Service("iam", "IAM", "roles/iam.serviceAccountViewer")
STORAGE: Final = Service("storage", "Cloud Storage", "roles/storage.legacyBucketReader")
REGISTRY: Final = Service("artifactregistry", "Artifact Registry", "roles/artifactregistry.reader")
SECRETS: Final = Service("secretmanager", "Secret Manager", "roles/secretmanager.viewer")
COMPUTE: Final = Service("compute", "Compute Engine", "roles/compute.viewer")
POLICIES: Final = Service("orgpolicy", "Org Policy", "roles/orgpolicy.policyViewer")
KMS: Final = Service("cloudkms", "Cloud KMS", "roles/cloudkms.viewer")
TROUBLESHOOTER: Final = Service("policytroubleshooter", "Policy Troubleshooter", "roles/iam.securityReviewer")

CALLER_PERMISSIONS: Final = (
    "aiplatform.customJobs.create",
    "aiplatform.customJobs.get",
    "aiplatform.customJobs.list",
    "aiplatform.customJobs.cancel",
    "logging.logEntries.list",
)
VM_PERMISSIONS: Final = (
    *(f"compute.instances.{verb}" for verb in ("create", "get", "list")),
    "compute.disks.create",
    "logging.logEntries.list",
)
OBJECT_PERMISSIONS: Final = tuple(f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list"))
"""What a run needs in its bucket: its locks and checkpoints are replaced, which needs delete."""

Call = Callable[[], Any]


def read(rest: Rest, needs: Needs, environ: Mapping[str, str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return each answer by its name (`Found`); nothing is raised, except for a bug."""
    until = time.monotonic() + seconds
    answers = settled(together(tolerant(first_calls(rest, needs, environ)), seconds))
    calls = {**access_calls(rest, needs, answers), **key_calls(rest, needs, answers)}
    later = settled(together(tolerant(calls), max(1.0, until - time.monotonic())))
    return {**answers, **later}


def tolerant(calls: Mapping[str, Call]) -> dict[str, Call]:
    """Return the calls with a LaunchError in place of the error of an answer of an unexpected shape."""

    def answered(call: Call) -> Any:
        try:
            return call()
        except UNEXPECTED as error:
            raise LaunchError(f"unexpected answer ({type(error).__name__}: {error})") from error

    return {name: partial(answered, call) for name, call in calls.items()}


def first_calls(rest: Rest, needs: Needs, environ: Mapping[str, str]) -> dict[str, Call]:
    """Return the reads that need nothing but the plan."""
    project = f"projects/{quote(needs.project, safe='')}"
    calls: dict[str, Call] = {
        "apis": partial(read_apis, rest, project, needs.apis),
        "billing": partial(rest, BILLING, f"/v1/{project}/billingInfo"),
        "project": partial(rest, RESOURCES, f"/v1/{project}"),
        "permissions": partial(tested, rest, RESOURCES, f"/v1/{project}:testIamPermissions", caller_permissions(needs)),
    }
    for constraint in constraints(needs):
        path = f"/v2/{project}/policies/{constraint}:getEffectivePolicy"
        calls[f"policy {constraint}"] = partial(rest, POLICIES, path)
    for need in needs.subnetworks:
        path = f"/compute/v1/projects/{need.project}/regions/{need.region}/subnetworks/{need.name}/testIamPermissions"
        calls[subnetwork_key(need)] = partial(tested, rest, COMPUTE, path, subnetwork_permissions(need))
    if needs.gpus or needs.lists_quotas:
        calls["quota"] = partial(read_quotas, rest, project)
    if needs.account:
        path = f"/v1/projects/-/serviceAccounts/{needs.account}:testIamPermissions"
        calls["actAs"] = partial(tested, rest, IAM, path, ("iam.serviceAccounts.actAs",))
    if needs.bucket:
        path = f"/storage/v1/b/{needs.bucket}"
        calls["bucket"] = partial(rest, STORAGE, path)
        pairs = [("permissions", each) for each in OBJECT_PERMISSIONS]
        calls["access"] = partial(rest, STORAGE, f"{path}/iam/testPermissions", params=pairs)
    if needs.repository:
        calls["repository"] = partial(rest, REGISTRY, f"/v1/{needs.repository}")
    if needs.image:
        calls["image"] = partial(find_image, needs.image, environ)
    for secret in needs.secrets:
        calls[f"secret {secret}"] = partial(rest, SECRETS, f"/v1/{secret}")
    for each in needs.reservations:
        calls[f"reservation {each.name}"] = partial(rest, COMPUTE, f"/compute/v1/{each.name}")
    return calls


def caller_permissions(needs: Needs) -> tuple[str, ...]:
    """Return the project's permissions that the caller needs."""
    return CALLER_PERMISSIONS if needs.service == "vertex" else VM_PERMISSIONS


def subnetwork_key(need: SubnetworkNeed) -> str:
    """Return the name of the read of a subnetwork's permissions."""
    return f"subnetwork {need.project} {need.region} {need.name}"


def subnetwork_permissions(need: SubnetworkNeed) -> tuple[str, ...]:
    """Return the permissions with which a VM is attached to a subnetwork."""
    return ("compute.subnetworks.use", *(("compute.subnetworks.useExternalIp",) if need.external_ip else ()))


def tested(rest: Rest, service: Service, path: str, permissions: tuple[str, ...]) -> list[str]:
    """Return which of the permissions the caller has. Raises LaunchError."""
    granted = rest(service, path, verb="POST", body={"permissions": list(permissions)})
    return [str(permission) for permission in granted.get("permissions", ())]


def read_apis(rest: Rest, project: str, apis: tuple[str, ...]) -> dict[str, bool]:
    """Return whether each API is enabled. Raises LaunchError."""
    names = [("names", f"{project}/services/{api}") for api in apis]
    page = rest(SERVICE_USAGE, f"/v1/{project}/services:batchGet", params=names)
    states = {
        str(entry["name"]).rpartition("/")[2]: entry.get("state") == "ENABLED" for entry in page.get("services", ())
    }
    return {api: states[api] for api in apis if api in states}


def find_image(image: str, environ: Mapping[str, str]) -> str | None:
    """Return the digest of an image in its registry; None: it does not exist. Raises LaunchError."""
    where = parse(image)
    with Registry(where.host, environ) as registry:
        return registry.head(where.repository, where.digest or where.tag or "")


# --- Quotas -----------------------------------------------------------------------------------------------------------


def read_quotas(rest: Rest, project: str) -> dict[str, Any]:
    """Return Vertex AI's quotas of training (`quotas`, QuotaInfo by metric without its service) and their `usage`
    (metric -> region -> units; None: it could not be read). Raises LaunchError: the quotas could not be read."""
    quotas = {
        str(info["metric"]).rpartition("/")[2]: info
        for info in pages(rest, QUOTAS, f"/v1/{project}/locations/global/services/aiplatform.googleapis.com/quotaInfos",
                         "quotaInfos")
        if "/custom_model_training_" in str(info.get("metric", ""))
    }  # fmt: skip
    try:
        usage: dict[str, dict[str, int]] | None = read_usage(rest, project)
    except LaunchError:
        usage = None
    return {"quotas": quotas, "usage": usage}


def read_quota(rest: Rest, project: str, service: str, quota: str) -> dict[str, Any]:
    """Return one QuotaInfo of a service by its id. Raises LaunchError."""
    return rest(QUOTAS, f"/v1/{project}/locations/global/services/{service}/quotaInfos/{quota}")


def read_usage(rest: Rest, project: str) -> dict[str, dict[str, int]]:
    """Return the newest usage of each quota: metric -> region -> units; nothing is listed for 0. Raises LaunchError.

    The interval follows Google's clock: this machine's may be wrong.
    """
    now = datetime.fromtimestamp(rest.server_time if rest.server_time is not None else time.time(), UTC)
    params = {
        "filter": 'metric.type="serviceruntime.googleapis.com/quota/allocation/usage" AND '
        'resource.type="consumer_quota" AND resource.label.service="aiplatform.googleapis.com"',
        "interval.startTime": (now - USAGE_WINDOW).isoformat(timespec="seconds"),
        "interval.endTime": now.isoformat(timespec="seconds"),
    }
    usage: dict[str, dict[str, int]] = {}
    for series in pages(rest, MONITORING, f"/v3/{project}/timeSeries", "timeSeries", params):
        metric = str(series["metric"]["labels"]["quota_metric"]).rpartition("/")[2]
        region = str(series["resource"]["labels"].get("location", ""))
        points = series.get("points") or [{"value": {}}]
        usage.setdefault(metric, {})[region] = int(points[0]["value"].get("int64Value", 0))  # newest first
    return usage


def pages(
    rest: Rest, service: Service, path: str, field: str, params: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the items of a list. Raises LaunchError."""
    token = ""
    for _ in range(MAX_PAGES):
        page = rest(service, path, params={**(params or {}), **({"pageToken": token} if token else {})})
        yield from page.get(field, ())
        token = str(page.get("nextPageToken", ""))
        if not token:
            return


# --- Access of other principals ---------------------------------------------------------------------------------------


def access_calls(rest: Rest, needs: Needs, found: Found) -> dict[str, Call]:
    """Return the reads of what the job's account and Vertex AI's agent may do. Without the project's number the agent
    is unknown, so nothing about it is read."""
    number = str((answer(found, "project") or {}).get("projectNumber", ""))
    account = needs.job_account(number)
    calls: dict[str, Call] = {}
    for permission in OBJECT_PERMISSIONS if needs.bucket and account else ():
        resource = f"//storage.googleapis.com/projects/_/buckets/{needs.bucket}"
        calls[f"access {permission}"] = partial(troubleshoot, rest, account, resource, permission)
    for secret in needs.secrets if account else ():
        resource = f"//secretmanager.googleapis.com/{secret.rpartition('/versions/')[0]}"
        permission = "secretmanager.versions.access"
        calls[f"access {secret}"] = partial(troubleshoot, rest, account, resource, permission)
    if needs.repository and needs.pulling_account(number):
        resource = f"//artifactregistry.googleapis.com/{needs.repository}"
        permission = "artifactregistry.repositories.downloadArtifacts"
        calls["access image"] = partial(troubleshoot, rest, needs.pulling_account(number), resource, permission)
    return calls


def key_calls(rest: Rest, needs: Needs, found: Found) -> dict[str, Call]:
    """Return the reads of the encryption keys, and of whether Google's service agents may use them."""
    calls: dict[str, Call] = {}
    for (_, key), principal in keys(needs, found).items():
        calls[f"key {key}"] = partial(rest, KMS, f"/v1/{key}")
        if principal:
            resource = f"//cloudkms.googleapis.com/{key}"
            calls[f"access {principal} {key}"] = partial(troubleshoot, rest, principal, resource, USE)
    return calls


def troubleshoot(rest: Rest, principal: str, resource: str, permission: str) -> str:
    """Return CAN_ACCESS, CANNOT_ACCESS, UNKNOWN_INFO or UNKNOWN_CONDITIONAL: what a principal may do by all policies
    that the caller can read. Raises LaunchError."""
    access = {"principal": principal, "fullResourceName": resource, "permission": permission}
    verdict = rest(TROUBLESHOOTER, "/v3/iam:troubleshoot", verb="POST", body={"accessTuple": access})
    return str(verdict.get("overallAccessState", ""))
