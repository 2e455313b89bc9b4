"""The steps that make a project ready. Each can check whether it is done, do it, and show its gcloud command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from launcher import catalog
from launcher.catalog.model import Quota, Service
from launcher.catalog.quotas import PREEMPTIBLE, compute_quota_id
from launcher.errors import LaunchError, UsageError
from launcher.gcp.api import ApiDisabledError, answer_behind, older_reason, status_of
from launcher.gcp.rest import Rest
from launcher.plan.iam_commands import BUCKET_ROLE
from launcher.plan.names import default_output, default_repository, default_service_account
from launcher.project import fixes, policies
from launcher.project.needs import bucket_name, repository_name
from launcher.project.reads import (
    COMPUTE,
    IAM,
    QUOTAS,
    REGISTRY,
    RESOURCES,
    SERVICE_USAGE,
    STORAGE,
    pages,
    read_apis,
    read_quota,
)
from launcher.project.vm_checks import GLOBAL_GPU_QUOTA, IAP, SSH_PORT, UNPRIVILEGED, VmNetwork, has_nat
from launcher.services.compute.firewall import Traffic, block
from launcher.text import near, plural

COMMON = ("artifactregistry", "cloudbilling", "cloudbuild", "cloudquotas", "cloudresourcemanager", "iam", "logging",
          "monitoring", "orgpolicy", "policytroubleshooter", "secretmanager", "storage")  # fmt: skip
COMMON_APIS: Final = tuple(f"{name}.googleapis.com" for name in COMMON)
VERTEX_APIS: Final = ("aiplatform.googleapis.com",)
VERTEX, VMS = VERTEX_APIS[0], "compute.googleapis.com"
VM_APIS: Final = ("compute.googleapis.com", "iap.googleapis.com", "oslogin.googleapis.com")
PROJECT_ROLES: Final = ("roles/logging.logWriter", fixes.SECRET_ROLE)
"""Roles of the trainer account in the project: write logs, read secrets."""
PULL_ROLE: Final = "roles/artifactregistry.reader"
ACT_ROLE: Final = "roles/iam.serviceAccountUser"
NAT: Final = "launch-nat"


class QuotaRequest(Struct, frozen=True, kw_only=True):
    """A GPU quota to request: the catalog's name of the GPU, how many, and the provisioning model."""

    gpu: str
    gpus: int
    provisioning: str = "standard"


class SetupTarget(Struct, frozen=True, kw_only=True):
    """The target of a setup: the project, and what it is made ready for."""

    project: str
    number: str
    """The project's number; empty: unknown."""
    region: str
    caller: str = ""
    """The caller as an IAM member (user:me@example.com); empty: unknown."""
    vertex: bool = True
    vms: bool = False
    network: str = "default"
    quotas: tuple[QuotaRequest, ...] = ()

    @property
    def bucket(self) -> str:
        """Return the name of the default bucket."""
        return bucket_name(default_output(self.project))

    @property
    def repository(self) -> str:
        """Return the resource name of the default repository."""
        return repository_name(default_repository(self.project))

    @property
    def account(self) -> str:
        """Return the email address of the trainer account."""
        return default_service_account(self.project)


class Step(Struct, frozen=True, kw_only=True):
    """One step. `is_done` and `do` raise LaunchError; `do` may be repeated."""

    name: str
    text: str
    permission: str
    """The permission that the caller needs for it in the project."""
    command: str
    """The gcloud commands that do the same, one per line."""
    is_done: Callable[[], bool]
    do: Callable[[], object]


def steps(target: SetupTarget, rest: Rest) -> Iterator[Step]:
    """Yield all steps, in the order in which they depend on each other."""
    yield apis(target, rest)
    yield repository(target, rest)
    yield bucket(target, rest)
    yield account(target, rest)
    yield from grants(target, rest)
    if target.vms:
        yield from network(target, rest)
    for request in target.quotas:
        yield from quotas(target, request, rest)


def apis(target: SetupTarget, rest: Rest) -> Step:
    """Enable the APIs, all in one request."""
    names = (*COMMON_APIS, *(VERTEX_APIS if target.vertex else ()), *(VM_APIS if target.vms else ()))
    project = f"projects/{target.project}"
    enable = partial(rest, SERVICE_USAGE, f"/v1/{project}/services:batchEnable", verb="POST")
    return Step(
        name="apis",
        text=f"enable {len(names)} APIs",
        permission="serviceusage.services.enable",
        command=fixes.enable(target.project, names),
        is_done=lambda: all(read_apis(rest, project, names).get(name) for name in names),
        do=lambda: enable(body={"serviceIds": list(names)}),
    )


def repository(target: SetupTarget, rest: Rest) -> Step:
    """Create the Artifact Registry repository for images."""
    parent, _, name = target.repository.rpartition("/repositories/")
    body = {"format": "DOCKER", "description": "Training images made by launch"}
    create = partial(rest, REGISTRY, f"/v1/{parent}/repositories", verb="POST", params={"repositoryId": name})
    return Step(
        name="repository",
        text=f"create {target.repository}",
        permission="artifactregistry.repositories.create",
        command=fixes.create_repository(target.repository),
        is_done=lambda: exists(lambda: rest(REGISTRY, f"/v1/{target.repository}")) is not None,
        do=lambda: unless_exists(lambda: create(body=body)),
    )


def bucket(target: SetupTarget, rest: Rest) -> Step:
    """Create the bucket for runs, or turn soft delete off in it. A stranger's bucket is refused."""
    settings = {
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}},
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
    }
    url, path = f"gs://{target.bucket}", f"/storage/v1/b/{target.bucket}"
    read = partial(own_bucket, target, rest)

    def do() -> None:
        if read() is not None:
            rest(STORAGE, path, verb="PATCH", body=settings)
            return
        body = {"name": target.bucket, "location": target.region, **settings}
        unless_exists(
            lambda: rest(STORAGE, "/storage/v1/b", verb="POST", params={"project": target.project}, body=body)
        )

    def is_done() -> bool:
        known = read()
        if known is None:
            return False
        uniform = known.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {}).get("enabled", False)
        return bool(uniform) and not int(known.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))

    return Step(
        name="bucket",
        text=f"create or update {url} in {target.region}: uniform access, soft delete off (it would bill each replaced "
        "checkpoint for 7 more days)",
        permission="storage.buckets.create",
        command=fixes.create_bucket(url, target.project, target.region)
        + f" || gcloud storage buckets update {url} --uniform-bucket-level-access --clear-soft-delete",
        is_done=is_done,
        do=do,
    )


def own_bucket(target: SetupTarget, rest: Rest) -> Any:
    """Return the bucket; None if it does not exist. Raises UsageError: it belongs to another project; LaunchError."""
    try:
        known = exists(lambda: rest(STORAGE, f"/storage/v1/b/{target.bucket}"))
    except LaunchError as error:
        is_closed = older_reason(answer_behind(error)) == "accountDisabled"  # the owner's billing account
        if status_of(error) != 403 or is_closed or isinstance(error, ApiDisabledError):
            raise
        problem = f"gs://{target.bucket} exists, but you may not read it: it may belong to another project"
        raise UsageError(problem, f"gcloud storage buckets describe gs://{target.bucket}") from error
    owner = str((known or {}).get("projectNumber", ""))
    number = target.number
    if known is not None and not number:  # Resource Manager was disabled when the setup began
        number = str(rest(RESOURCES, f"/v1/projects/{target.project}").get("projectNumber", ""))
    if known is not None and owner != number:
        raise UsageError(
            f"gs://{target.bucket} belongs to project {owner or 'unknown'}, not to {target.project} ({number})",
            "Create a bucket of another name and set it in specs: output: gs://BUCKET/runs",
        )
    return known


def account(target: SetupTarget, rest: Rest) -> Step:
    """Create the trainer account."""
    name, path = target.account.partition("@")[0], f"/v1/projects/{target.project}/serviceAccounts"
    body = {"accountId": name, "serviceAccount": {"displayName": "launch: training jobs"}}
    return Step(
        name="account",
        text=f"create {target.account}",
        permission="iam.serviceAccounts.create",
        command=fixes.create_account(target.account, target.project),
        is_done=lambda: exists(lambda: rest(IAM, f"{path}/{target.account}")) is not None,
        do=lambda: unless_exists(lambda: rest(IAM, path, verb="POST", body=body)),
    )


# --- Grants -----------------------------------------------------------------------------------------------------------


def grants(target: SetupTarget, rest: Rest) -> Iterator[Step]:
    """Yield the trainer account's roles: on its bucket, in the project, and to pull for VMs; and the caller's to act
    as it."""
    member, project = f"serviceAccount:{target.account}", target.project
    yield grant(
        f"{BUCKET_ROLE} on gs://{target.bucket}",
        policies.of_bucket(rest, target.bucket),
        (BUCKET_ROLE, member),
        "storage.buckets.setIamPolicy",
        fixes.grant_on_bucket(target.bucket, member),
    )
    for role in PROJECT_ROLES:
        command = fixes.grant_in_project(project, member, role)
        yield grant(
            f"{role} in the project",
            policies.of_project(rest),
            (role, member),
            "resourcemanager.projects.setIamPolicy",
            command,
        )
    if target.vms:
        yield grant(
            f"{PULL_ROLE} on the repository (VMs pull images themselves)",
            policies.of_repository(rest, target.repository),
            (PULL_ROLE, member),
            "artifactregistry.repositories.setIamPolicy",
            fixes.grant_on_repository(target.repository, member),
        )
    if target.caller:
        command = (
            f"gcloud iam service-accounts add-iam-policy-binding {target.account} --project={project} "
            f"--member={target.caller} --role={ACT_ROLE}"
        )
        yield grant(
            f"{ACT_ROLE} on {target.account} for {target.caller.partition(':')[2]}",
            policies.of_account(rest, target.account),
            (ACT_ROLE, target.caller),
            "iam.serviceAccounts.setIamPolicy",
            command,
        )


def grant(text: str, policy: policies.PolicyOf, binding: tuple[str, str], permission: str, command: str) -> Step:
    """Return the step that grants a role to a member (`binding`). A resource that does not exist yet has no grants."""
    return Step(
        name="grant",
        text=f"grant {text}",
        permission=permission,
        command=command,
        is_done=lambda: bool(exists(lambda: policy.has(*binding))),
        do=lambda: policy.grant(*binding),
    )


# --- VMs --------------------------------------------------------------------------------------------------------------


def network(target: SetupTarget, rest: Rest) -> Iterator[Step]:
    """Yield what VMs without external addresses need: SSH through IAP, traffic between nodes, and Cloud NAT."""
    compute = f"/compute/v1/projects/{target.project}"
    rules = f"{compute}/global/firewalls"
    subnetwork = f"{compute}/regions/{target.region}/subnetworks/{target.network}"
    ssh, inner = f"launch-iap-ssh{suffix(target)}", f"launch-internal-{target.region}{suffix(target)}"

    def is_open(peers: Callable[[], str], ports: range, peers_account: str) -> bool:
        traffic = Traffic("INGRESS", peers(), ports, target.account, peers_account)
        return block(rest(COMPUTE, rules).get("items", ()), target.network, traffic) is None

    def allow(name: str, peers: str, ports: list[str]) -> None:
        allowed = [{"IPProtocol": "tcp", **({"ports": ports} if ports else {})}]
        where = {"network": f"projects/{target.project}/global/networks/{target.network}", "direction": "INGRESS"}
        body = {"name": name, **where, "sourceRanges": [peers], "allowed": allowed}
        unless_exists(lambda: rest(COMPUTE, rules, verb="POST", body=body))

    def inside() -> str:
        return str(rest(COMPUTE, subnetwork)["ipCidrRange"])

    create = f"gcloud compute firewall-rules create {{}} --project={target.project} --network={target.network} "
    yield Step(
        name="firewall",
        text=f"allow SSH through IAP ({IAP}) in network {target.network}",
        permission="compute.firewalls.create",
        command=create.format(ssh) + f"--direction=INGRESS --allow=tcp:{SSH_PORT} --source-ranges={IAP}",
        is_done=lambda: is_open(lambda: IAP, range(SSH_PORT, SSH_PORT + 1), ""),
        do=lambda: allow(ssh, IAP, [str(SSH_PORT)]),
    )
    describe = f"gcloud compute networks subnets describe {target.network} --region={target.region}"
    peers = f"RANGE=$({describe} --project={target.project} --format='value(ipCidrRange)')"
    yield Step(
        name="firewall",
        text=f"allow TCP between nodes in {target.region}",
        permission="compute.firewalls.create",
        command=f"{peers}\n{create.format(inner)}--direction=INGRESS --allow=tcp --source-ranges=$RANGE",
        is_done=lambda: is_open(inside, UNPRIVILEGED, target.account),
        do=lambda: allow(inner, inside(), []),
    )
    yield nat(target, rest, f"{compute}/regions/{target.region}/routers")


def suffix(target: SetupTarget) -> str:
    """Return the suffix of the names of resources of a network."""
    return "" if target.network == "default" else f"-{target.network}"


def nat(target: SetupTarget, rest: Rest, routers: str) -> Step:
    """Create Cloud NAT, unless a router of the region has it. A router without it, from a setup that was killed, is
    completed."""
    where, name = f"--region={target.region} --project={target.project}", NAT + suffix(target)
    net = VmNetwork(
        project=target.project,
        region=target.region,
        network=target.network,
        subnetwork=target.network,
        is_named=False,
    )
    own = {
        "name": name,
        "natIpAllocateOption": "AUTO_ONLY",
        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
    }

    def do() -> None:
        if exists(lambda: rest(COMPUTE, f"{routers}/{name}")) is not None:
            rest(COMPUTE, f"{routers}/{name}", verb="PATCH", body={"nats": [own]})
            return
        uri = f"projects/{target.project}/global/networks/{target.network}"
        unless_exists(lambda: rest(COMPUTE, routers, verb="POST", body={"name": name, "network": uri, "nats": [own]}))

    return Step(
        name="nat",
        text=f"create Cloud NAT in {target.region}: VMs have no external address",
        permission="compute.routers.create",
        command=f"gcloud compute routers create {name} --network={target.network} {where}\n"
        f"gcloud compute routers nats create {name} --router={name} {where} --auto-allocate-nat-external-ips "
        "--nat-all-subnet-ip-ranges",
        is_done=lambda: has_nat(net, {}, rest(COMPUTE, routers).get("items", ())),
        do=do,
    )


# --- Quotas -----------------------------------------------------------------------------------------------------------


def parse_quota(text: str) -> QuotaRequest:
    """Parse GPU:NUMBER or GPU:NUMBER:PROVISIONING (h100:8, l4:4:spot). Raises UsageError."""
    gpu, number, model, *rest = [*text.lower().split(":"), "", ""]
    known = catalog.load().gpus
    if gpu not in known:
        close = near(gpu, known)
        raise UsageError(f"unknown GPU {gpu!r} in --request-quota", f"Use {close[0] if close else ', '.join(known)}.")
    if not number.isdecimal() or not int(number) or any(rest) or model not in ("", "standard", *PREEMPTIBLE):
        raise UsageError(f"invalid quota {text!r} in --request-quota", "Use for example h100:8 or h100:8:spot.")
    return QuotaRequest(gpu=gpu, gpus=int(number), provisioning=model or "standard")


def quotas(target: SetupTarget, request: QuotaRequest, rest: Rest) -> Iterator[Step]:
    """Yield the requests of higher quotas for GPUs: for training on Vertex AI, and for VMs, where one for all regions
    together counts as well. Raises UsageError: a quota's name is unknown."""
    what = f"{request.gpus} {request.gpu} ({request.provisioning}) in {target.region}"
    name = f"{request.gpu}-{'spot' if request.provisioning in PREEMPTIBLE else 'standard'}-{target.region}"
    if target.vertex:
        known = named_quota(target, request, "vertex")
        yield quota_step(target, VERTEX, known, request.gpus, f"request {what} for Vertex AI", f"launch-{name}", rest)
    if target.vms:
        known = named_quota(target, request, "compute")
        yield quota_step(target, VMS, known, request.gpus, f"request {what} for VMs", f"launch-vm-{name}", rest)
        every = Quota(None, compute_quota_id(GLOBAL_GPU_QUOTA, everywhere=True), 1, {})
        text = f"request {plural(request.gpus, 'GPU')} in all regions together for VMs"
        yield quota_step(target, VMS, every, request.gpus, text, "launch-vm-all-regions", rest)


def named_quota(target: SetupTarget, request: QuotaRequest, service: Service) -> Quota:
    """Return the quota of a request, with its dimensions. Raises UsageError: its name is unknown."""
    known = catalog.quotas.quota(1, catalog.load().gpus[request.gpu], service, request.provisioning)
    if known is None or not known.id:
        page = fixes.quota_page(target.project)
        where = "Vertex AI's" if service == "vertex" else "Compute Engine's"
        problem = f"the name of {where} quota of {request.provisioning} {request.gpu} GPUs is unknown"
        raise UsageError(problem, f"Request it at {page}")
    return replace(known, dims={"region": target.region, **known.dims})


def quota_step(target: SetupTarget, service: str, quota: Quota, value: int, text: str, name: str, rest: Rest) -> Step:
    """Return the step that requests a higher quota, as the quota preference `name`."""
    project, quota_id = f"projects/{target.project}", str(quota.id)
    parent = f"/v1/{project}/locations/global/quotaPreferences"
    body = {
        "service": service,
        "quotaId": quota_id,
        "dimensions": dict(quota.dims),
        "quotaConfig": {"preferredValue": str(value)},
        **({"contactEmail": target.caller.partition(":")[2]} if target.caller else {}),
    }

    def is_done() -> bool:
        known = exists(lambda: rest(QUOTAS, f"{parent}/{name}")) or {}
        return int(known.get("quotaConfig", {}).get("preferredValue", 0)) >= value or has_enough()

    def has_enough() -> bool:
        from launcher.project.checks import limit_of

        more = {key: each for key, each in quota.dims.items() if key != "region"}
        info = exists(lambda: read_quota(rest, project, service, quota_id)) or {}
        limit = limit_of(info, quota.dims.get("region", "global"), more)
        return limit is not None and (limit < 0 or limit >= value)

    def do() -> None:
        try:
            rest(QUOTAS, parent, verb="POST", params={"quotaPreferenceId": name}, body=body)
        except LaunchError as error:
            if status_of(error) != 409:
                raise
            rest(QUOTAS, f"/v1/{existing() or parent.removeprefix('/v1/') + '/' + name}", verb="PATCH", body=body)

    def existing() -> str:
        """Return the preference of this quota under another name: there is one for each quota and its dimensions."""
        for preference in pages(rest, QUOTAS, parent, "quotaPreferences"):
            if preference.get("quotaId") == quota_id and preference.get("dimensions", {}) == body["dimensions"]:
                return str(preference["name"])
        return ""

    return Step(
        name="quota",
        text=text,
        permission="cloudquotas.quotas.update",
        command=fixes.raise_quota(target.project, service, quota_id, value, quota.dims),
        is_done=is_done,
        do=do,
    )


# --- Outcomes ---------------------------------------------------------------------------------------------------------


def exists(call: Callable[[], Any]) -> Any:
    """Return a read's answer; None: 404. Raises LaunchError."""
    try:
        return call()
    except LaunchError as error:
        if status_of(error) != 404:
            raise
        return None


def unless_exists(call: Callable[[], object]) -> None:
    """Make a create call; succeed too if the resource exists: another setup was faster. Raises LaunchError."""
    try:
        call()
    except LaunchError as error:
        if status_of(error) != 409:
            raise
