"""Make a project ready, step by step: each step is its gcloud command, a test whether it is done, and its effect.

A setup that was killed continues when it is typed again: every step first reads whether it is done.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from launcher import catalog
from launcher.catalog.model import Quota, Service
from launcher.catalog.quotas import PREEMPTIBLE, compute_quota_id
from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.gcp.api import ApiDisabledError, Rest, answer_behind, older_reason, status_of
from launcher.gcp.parallel import together
from launcher.inputs import gcloud_config
from launcher.plan.iam_commands import BUCKET_ROLE
from launcher.plan.names import default_output, default_repository, default_service_account
from launcher.project import fixes
from launcher.project.checks import limit_of
from launcher.project.firewall import Traffic, block
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
    tested,
)
from launcher.project.report import shell_lines
from launcher.project.vm_checks import (
    GLOBAL_GPU_QUOTA,
    IAP,
    SSH_PORT,
    UNPRIVILEGED,
    VmNetwork,
    allow_command,
    has_nat,
    nat_commands,
)
from launcher.text import near, plural

T = TypeVar("T")

COMMON = ("artifactregistry", "cloudbilling", "cloudbuild", "cloudquotas", "cloudresourcemanager", "iam", "logging",
          "monitoring", "orgpolicy", "policytroubleshooter", "secretmanager", "storage")  # fmt: skip
VERTEX, VMS = "aiplatform.googleapis.com", "compute.googleapis.com"
VM_APIS: Final = (VMS, "iap.googleapis.com", "oslogin.googleapis.com")
PROJECT_ROLES: Final = ("roles/logging.logWriter", fixes.SECRET_ROLE)
"""Roles of the trainer account in the project: write logs, read secrets."""
PULL_ROLE: Final = "roles/artifactregistry.reader"
ACT_ROLE: Final = "roles/iam.serviceAccountUser"
PATIENCE_SECONDS: Final = 180.0
"""Time limit for a step to take effect: an API that was just enabled refuses requests for about a minute."""
POLL_SECONDS: Final = 2.0


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


class Setup(Struct, frozen=True, kw_only=True):
    """The steps that set up a project: those that are done, and the pending ones."""

    target: SetupTarget
    done: tuple[Step, ...]
    pending: tuple[Step, ...]
    missing: tuple[str, ...]
    """The permissions for the pending steps that the caller lacks."""


def read_setup(
    project: str,
    environ: Mapping[str, str],
    *,
    region: str,
    vertex: bool = True,
    vms: bool = False,
    network: str = "default",
    quotas: Sequence[QuotaRequest] = (),
) -> Setup:
    """Return the state of the project's setup; changes nothing.

    Raises LaunchError: it can't be read, for another reason than a disabled API; UsageError: the bucket belongs to
    another project.
    """
    rest, email = Rest(project, environ), gcloud_config.account(environ)
    number = ""  # unknown while Resource Manager's API is disabled
    with suppress(LaunchError):
        number = str(rest(RESOURCES, f"/v1/projects/{project}").get("projectNumber", ""))
    kind = "serviceAccount" if email.endswith(".gserviceaccount.com") else "user"
    target = SetupTarget(
        project=project,
        number=number,
        region=region,
        caller=f"{kind}:{email}" if email else "",
        vertex=vertex,
        vms=vms,
        network=network,
        quotas=tuple(quotas),
    )
    every = list(steps(target, rest))
    answers = together({str(number): step.is_done for number, step in enumerate(every)}).values()
    for answer in answers:
        if isinstance(answer, LaunchError) and not isinstance(answer, ApiDisabledError):
            raise answer
    done = tuple(step for step, answer in zip(every, answers, strict=True) if answer is True)
    pending = tuple(step for step in every if step not in done)
    missing = missing_permissions(pending, rest) if pending else ()
    return Setup(target=target, done=done, pending=pending, missing=missing)


def missing_permissions(steps: Sequence[Step], rest: Rest) -> tuple[str, ...]:
    """Return the permissions for the steps that the caller lacks; none if they can't be tested yet."""
    wanted = tuple(dict.fromkeys(step.permission for step in steps))
    try:
        have = tested(rest, RESOURCES, f"/v1/projects/{rest.project}:testIamPermissions", wanted)
    except NotAuthorised:
        raise
    except LaunchError:
        return ()
    return tuple(permission for permission in wanted if permission not in have)


def apply(steps: Sequence[Step], clock: Clock, say: Callable[[str], None]) -> None:
    """Do the steps in order, and wait until each has an effect. Raises LaunchError: a step failed; those before it are
    done."""
    for step in steps:
        until = clock.now() + PATIENCE_SECONDS
        if not patiently(step.is_done, clock, until):
            patiently(step.do, clock, until)
            while not patiently(step.is_done, clock, until):
                if clock.now() > until:
                    problem = f"{step.name}: not in effect after {PATIENCE_SECONDS:.0f} s: {step.text}"
                    raise LaunchError(problem, "Run the command again; it continues from this step.")
                clock.sleep(POLL_SECONDS)
        say(step.text)


def patiently(call: Callable[[], T], clock: Clock, until: float) -> T:
    """Return a call's result; repeat the call while an earlier step takes effect. Raises LaunchError."""
    while True:
        try:
            return call()
        except LaunchError as error:
            is_new = status_of(error) in (400, 404) and "does not exist" in error.problem  # IAM does not know it yet
            may_pass = isinstance(error, UnreachableError | ApiDisabledError) or is_new
            if clock.now() + POLL_SECONDS > until or not may_pass:
                raise
        clock.sleep(POLL_SECONDS)


def ticket(steps: Sequence[Step], project: str, caller: str) -> Iterator[str]:
    """Yield the text for an administrator: the commands for all steps."""
    yield f"# Please run these commands in project {project}, for {caller or 'me'}:"
    for step in steps:
        yield from (f"# {line}" for line in textwrap.wrap(step.text, 78, break_on_hyphens=False))
        for command in step.command.splitlines():
            yield from shell_lines(command, 80)


# --- The steps --------------------------------------------------------------------------------------------------------


def steps(target: SetupTarget, rest: Rest) -> Iterator[Step]:
    """Yield all steps, in the order in which they depend on each other."""
    project, home = target.project, f"projects/{target.project}"
    apis = (
        *(f"{name}.googleapis.com" for name in COMMON),
        *((VERTEX,) if target.vertex else ()),
        *(VM_APIS if target.vms else ()),
    )
    yield Step(
        name="apis",
        text=f"enable {len(apis)} APIs",
        permission="serviceusage.services.enable",
        command=fixes.enable(project, apis),
        is_done=lambda: all(read_apis(rest, home, apis).get(name) for name in apis),
        do=lambda: rest(SERVICE_USAGE, f"/v1/{home}/services:batchEnable", verb="POST", body={"serviceIds": [*apis]}),
    )
    parent, _, name = target.repository.rpartition("/repositories/")
    repository = {"format": "DOCKER", "description": "Training images made by launch"}
    create = partial(rest, REGISTRY, f"/v1/{parent}/repositories", verb="POST", params={"repositoryId": name})
    yield Step(
        name="repository",
        text=f"create {target.repository}",
        permission="artifactregistry.repositories.create",
        command=fixes.create_repository(target.repository),
        is_done=lambda: exists(lambda: rest(REGISTRY, f"/v1/{target.repository}")) is not None,
        do=lambda: unless_exists(lambda: create(body=repository)),
    )
    yield bucket(target, rest)
    accounts = f"/v1/{home}/serviceAccounts"
    account = {
        "accountId": target.account.partition("@")[0],
        "serviceAccount": {"displayName": "launch: training jobs"},
    }
    yield Step(
        name="account",
        text=f"create {target.account}",
        permission="iam.serviceAccounts.create",
        command=fixes.create_account(target.account, project),
        is_done=lambda: exists(lambda: rest(IAM, f"{accounts}/{target.account}")) is not None,
        do=lambda: unless_exists(lambda: rest(IAM, accounts, verb="POST", body=account)),
    )
    yield from grants(target, rest)
    if target.vms:
        yield from network(target, rest)
    for request in target.quotas:
        yield from quotas(target, request, rest)


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


def bucket(target: SetupTarget, rest: Rest) -> Step:
    """Create the bucket for runs, or turn soft delete off in it. A stranger's bucket is refused."""
    settings = {
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}},
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
    }
    url, path = f"gs://{target.bucket}", f"/storage/v1/b/{target.bucket}"

    def do() -> None:
        if own_bucket(target, rest) is not None:
            rest(STORAGE, path, verb="PATCH", body=settings)
            return
        body, params = {"name": target.bucket, "location": target.region, **settings}, {"project": target.project}
        unless_exists(lambda: rest(STORAGE, "/storage/v1/b", verb="POST", params=params, body=body))

    def is_done() -> bool:
        known = own_bucket(target, rest) or {}
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


# --- Grants -----------------------------------------------------------------------------------------------------------


def grants(target: SetupTarget, rest: Rest) -> Iterator[Step]:
    """Yield the trainer account's roles: on its bucket, in the project, and to pull for VMs; and the caller's to act
    as it."""
    member, project = f"serviceAccount:{target.account}", target.project
    version = {"options.requestedPolicyVersion": "3"}
    bucket_iam = partial(rest, STORAGE, f"/storage/v1/b/{target.bucket}/iam")
    of_bucket = IamPolicy(
        lambda: bucket_iam(params={"optionsRequestedPolicyVersion": "3"}),
        lambda policy: bucket_iam(verb="PUT", body=policy),
    )
    command = fixes.grant_on_bucket(target.bucket, member)
    text = f"{BUCKET_ROLE} on gs://{target.bucket}"
    yield grant(text, of_bucket, (BUCKET_ROLE, member), "storage.buckets.setIamPolicy", command)
    options = {"options": {"requestedPolicyVersion": 3}}
    of_project = iam_policy(rest, RESOURCES, f"/v1/projects/{project}", verb="POST", body=options)
    for role in PROJECT_ROLES:
        command = fixes.grant_in_project(project, member, role)
        permission = "resourcemanager.projects.setIamPolicy"
        yield grant(f"{role} in the project", of_project, (role, member), permission, command)
    if target.vms:
        text = f"{PULL_ROLE} on the repository (VMs pull images themselves)"
        of_repository = iam_policy(rest, REGISTRY, f"/v1/{target.repository}", params=version)
        command = fixes.grant_on_repository(target.repository, member)
        yield grant(text, of_repository, (PULL_ROLE, member), "artifactregistry.repositories.setIamPolicy", command)
    if target.caller:
        text = f"{ACT_ROLE} on {target.account} for {target.caller.partition(':')[2]}"
        path = f"/v1/projects/{project}/serviceAccounts/{target.account}"
        of_account = iam_policy(rest, IAM, path, verb="POST", params=version)
        command = (
            f"gcloud iam service-accounts add-iam-policy-binding {target.account} --project={project} "
            f"--member={target.caller} --role={ACT_ROLE}"
        )
        yield grant(text, of_account, (ACT_ROLE, target.caller), "iam.serviceAccounts.setIamPolicy", command)


def grant(text: str, policy: IamPolicy, binding: tuple[str, str], permission: str, command: str) -> Step:
    """Return the step that grants a role to a member (`binding`). A resource that does not exist yet has no grants."""
    return Step(
        name="grant",
        text=f"grant {text}",
        permission=permission,
        command=command,
        is_done=lambda: bool(exists(lambda: has_grant(policy.read(), *binding))),
        do=lambda: policy.grant(*binding),
    )


Policy = Mapping[str, Any]
POLICY_CHANGED: Final = (409, 412)
"""The policy was changed since it was read (412: Cloud Storage)."""
POLICY_TRIES: Final = 8


class IamPolicy(Struct, frozen=True):
    """The IAM policy of one resource. `read` and `write` raise LaunchError."""

    read: Callable[[], Policy]
    write: Callable[[Policy], object]

    def grant(self, role: str, member: str) -> None:
        """Grant a role, keeping what others change at the same time: the policy is written back with its etag. Raises
        LaunchError."""
        for more_tries in reversed(range(POLICY_TRIES)):
            policy = self.read()
            if has_grant(policy, role, member):
                return
            try:
                self.write(with_grant(policy, role, member))
            except LaunchError as error:
                if status_of(error) not in POLICY_CHANGED or not more_tries:
                    raise
            else:
                return


def iam_policy(rest: Rest, service: Any, path: str, **read: Any) -> IamPolicy:
    """Return the policy of a resource by its path; `read` are the options of the read request."""
    return IamPolicy(
        lambda: rest(service, f"{path}:getIamPolicy", **read),
        lambda policy: rest(service, f"{path}:setIamPolicy", verb="POST", body={"policy": policy}),
    )


def has_grant(policy: Policy, role: str, member: str) -> bool:
    """Return whether a policy grants a role to a member without a condition."""
    return any(
        binding["role"] == role and member in binding.get("members", ()) and not binding.get("condition")
        for binding in policy.get("bindings", ())
    )


def with_grant(policy: Policy, role: str, member: str) -> dict[str, Any]:
    bindings = [dict(binding) for binding in policy.get("bindings", ())]
    same = next((binding for binding in bindings if binding["role"] == role and not binding.get("condition")), None)
    if same is None:
        bindings.append({"role": role, "members": [member]})
    else:
        same["members"] = [*same.get("members", ()), member]
    return {**policy, "bindings": bindings}


# --- VMs --------------------------------------------------------------------------------------------------------------


def network(target: SetupTarget, rest: Rest) -> Iterator[Step]:
    """Yield what VMs without external addresses need: SSH through IAP, traffic between nodes, and Cloud NAT.

    A router without NAT, from a setup that was killed, is completed.
    """
    compute, where = f"/compute/v1/projects/{target.project}", f"--region={target.region} --project={target.project}"
    rules, routers = f"{compute}/global/firewalls", f"{compute}/regions/{target.region}/routers"
    subnetwork = f"{compute}/regions/{target.region}/subnetworks/{target.network}"
    uri = f"projects/{target.project}/global/networks/{target.network}"
    suffix = "" if target.network == "default" else f"-{target.network}"

    def is_open(peers: Callable[[], str], ports: range, peers_account: str) -> bool:
        traffic = Traffic("INGRESS", peers(), ports, target.account, peers_account)
        return block(rest(COMPUTE, rules).get("items", ()), target.network, traffic) is None

    def allow(name: str, peers: str, ports: list[str]) -> None:
        allowed = [{"IPProtocol": "tcp", **({"ports": ports} if ports else {})}]
        body = {"name": name, "network": uri, "direction": "INGRESS", "sourceRanges": [peers], "allowed": allowed}
        unless_exists(lambda: rest(COMPUTE, rules, verb="POST", body=body))

    def inside() -> str:
        return str(rest(COMPUTE, subnetwork)["ipCidrRange"])

    ssh, inner = f"launch-iap-ssh{suffix}", f"launch-internal-{target.region}{suffix}"
    net = VmNetwork(
        project=target.project,
        region=target.region,
        network=target.network,
        subnetwork=target.network,
        is_named=False,
    )
    yield Step(
        name="firewall",
        text=f"allow SSH through IAP ({IAP}) in network {target.network}",
        permission="compute.firewalls.create",
        command=allow_command(ssh, net, target.network, None, f"--allow=tcp:{SSH_PORT}", IAP),
        is_done=lambda: is_open(lambda: IAP, range(SSH_PORT, SSH_PORT + 1), ""),
        do=lambda: allow(ssh, IAP, [str(SSH_PORT)]),
    )
    peers = f"RANGE=$(gcloud compute networks subnets describe {target.network} {where} --format='value(ipCidrRange)')"
    yield Step(
        name="firewall",
        text=f"allow TCP between nodes in {target.region}",
        permission="compute.firewalls.create",
        command=f"{peers}\n{allow_command(inner, net, target.network, None, '--allow=tcp', '$RANGE')}",
        is_done=lambda: is_open(inside, UNPRIVILEGED, target.account),
        do=lambda: allow(inner, inside(), []),
    )
    name = f"launch-nat{suffix}"
    nat = {
        "name": name,
        "natIpAllocateOption": "AUTO_ONLY",
        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
    }

    def create_nat() -> None:
        if exists(lambda: rest(COMPUTE, f"{routers}/{name}")) is not None:
            rest(COMPUTE, f"{routers}/{name}", verb="PATCH", body={"nats": [nat]})
            return
        unless_exists(lambda: rest(COMPUTE, routers, verb="POST", body={"name": name, "network": uri, "nats": [nat]}))

    yield Step(
        name="nat",
        text=f"create Cloud NAT in {target.region}: VMs have no external address",
        permission="compute.routers.create",
        command=nat_commands(net, {}, name),
        is_done=lambda: has_nat(net, {}, rest(COMPUTE, routers).get("items", ())),
        do=create_nat,
    )


# --- Quotas -----------------------------------------------------------------------------------------------------------


def parse_quota(text: str) -> QuotaRequest:
    """Parse GPU:NUMBER or GPU:NUMBER:PROVISIONING (h100:8, l4:4:spot). Raises UsageError."""
    gpu, number, model, *more = [*text.lower().split(":"), "", ""]
    known = catalog.load().gpus
    if gpu not in known:
        close = near(gpu, known)
        raise UsageError(f"unknown GPU {gpu!r} in --request-quota", f"Use {close[0] if close else ', '.join(known)}.")
    if not number.isdecimal() or not int(number) or any(more) or model not in ("", "standard", *PREEMPTIBLE):
        raise UsageError(f"invalid quota {text!r} in --request-quota", "Use for example h100:8 or h100:8:spot.")
    return QuotaRequest(gpu=gpu, gpus=int(number), provisioning=model or "standard")


def quotas(target: SetupTarget, request: QuotaRequest, rest: Rest) -> Iterator[Step]:
    """Yield the requests of higher quotas for GPUs: for training on Vertex AI, and for VMs, where one for all regions
    together counts as well. Raises UsageError: a quota's name is unknown."""
    wanted = f"request {request.gpus} {request.gpu} ({request.provisioning}) in {target.region}"
    name = f"{request.gpu}-{'spot' if request.provisioning in PREEMPTIBLE else 'standard'}-{target.region}"
    step = partial(quota_step, target, rest, request.gpus)
    if target.vertex:
        yield step(VERTEX, named_quota(target, request, "vertex"), f"{wanted} for Vertex AI", f"launch-{name}")
    if target.vms:
        yield step(VMS, named_quota(target, request, "compute"), f"{wanted} for VMs", f"launch-vm-{name}")
        every = Quota(None, compute_quota_id(GLOBAL_GPU_QUOTA, everywhere=True), 1, {})
        text = f"request {plural(request.gpus, 'GPU')} in all regions together for VMs"
        yield step(VMS, every, text, "launch-vm-all-regions")


def named_quota(target: SetupTarget, request: QuotaRequest, service: Service) -> Quota:
    """Return the quota of a request, with its dimensions. Raises UsageError: its name is unknown."""
    known = catalog.quotas.quota(1, catalog.load().gpus[request.gpu], service, request.provisioning)
    if known is None or not known.id:
        where = "Vertex AI's" if service == "vertex" else "Compute Engine's"
        problem = f"the name of {where} quota of {request.provisioning} {request.gpu} GPUs is unknown"
        raise UsageError(problem, f"Request it at {fixes.quota_page(target.project)}")
    return replace(known, dims={"region": target.region, **known.dims})


def quota_step(target: SetupTarget, rest: Rest, units: int, service: str, quota: Quota, text: str, name: str) -> Step:
    """Return the step that requests a higher quota, as the quota preference `name`."""
    project, quota_id = f"projects/{target.project}", str(quota.id)
    parent = f"{project}/locations/global/quotaPreferences"
    body = {
        "service": service,
        "quotaId": quota_id,
        "dimensions": dict(quota.dims),
        "quotaConfig": {"preferredValue": str(units)},
        **({"contactEmail": target.caller.partition(":")[2]} if target.caller else {}),
    }

    def is_done() -> bool:
        known = exists(lambda: rest(QUOTAS, f"/v1/{parent}/{name}")) or {}
        if int(known.get("quotaConfig", {}).get("preferredValue", 0)) >= units:
            return True
        more = {key: each for key, each in quota.dims.items() if key != "region"}
        info = exists(lambda: read_quota(rest, project, service, quota_id)) or {}
        limit = limit_of(info, quota.dims.get("region", "global"), more)
        return limit is not None and (limit < 0 or limit >= units)

    def do() -> None:
        try:
            rest(QUOTAS, f"/v1/{parent}", verb="POST", params={"quotaPreferenceId": name}, body=body)
        except LaunchError as error:
            if status_of(error) != 409:
                raise
            # There is one preference for each quota and its dimensions; it may have another name.
            preferences = pages(rest, QUOTAS, f"/v1/{parent}", "quotaPreferences")
            same = (
                str(preference["name"])
                for preference in preferences
                if (preference.get("quotaId"), preference.get("dimensions", {})) == (quota_id, body["dimensions"])
            )
            rest(QUOTAS, f"/v1/{next(same, f'{parent}/{name}')}", verb="PATCH", body=body)

    return Step(
        name="quota",
        text=text,
        permission="cloudquotas.quotas.update",
        command=fixes.raise_quota(target.project, service, quota_id, units, quota.dims),
        is_done=is_done,
        do=do,
    )
