"""The checks of a project: pure functions of what it needs and what was read. Each finding has the command that fixes
it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

from msgspec import UNSET
from msgspec.structs import replace

from launcher.catalog.model import QuotaFigures
from launcher.diagnosis.permissions import LAUNCHER, act_as_command
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.gcp.api import LOG_IN, words
from launcher.jobs.vm import last_url_part
from launcher.project import fixes
from launcher.project.keys import check_keys
from launcher.project.model import (
    UNEXPECTED,
    Check,
    Found,
    GpuNeed,
    Needs,
    ReservationNeed,
    Status,
    answer,
    by_severity,
    unread,
)
from launcher.project.org_policies import check_policies
from launcher.project.reads import OBJECT_PERMISSIONS, caller_permissions, subnetwork_key, subnetwork_permissions
from launcher.text import listed, plural


def evaluate(needs: Needs, found: Found) -> tuple[Check, ...]:
    """Return the result of every check whose data was read, failures first."""
    return by_severity(result for name, check in CHECKS for result in run(name, check, needs, found))


def run(name: str, check: Callable[[Needs, Found], Iterator[Check]], needs: Needs, found: Found) -> Iterator[Check]:
    """Yield the results of one check, or that it is unknown because its read failed."""
    if name in READS and name not in found:
        return
    if isinstance(found.get(name), LaunchError):
        yield unread(name, found[name])
        return
    try:
        yield from list(check(needs, found))
    except UNEXPECTED as error:
        yield Check(name, "unknown", f"not checked: unexpected answer ({type(error).__name__}: {error})")


def credentials(account: str, found: Found) -> Check:
    """Return whether Google accepts the credentials: not if every read of its APIs failed."""
    answers = [each for name, each in found.items() if name != "image"]
    errors = [each for each in answers if isinstance(each, LaunchError)]
    if len(errors) < len(answers):
        return Check("credentials", "ok", account or "application default credentials")
    if any(isinstance(each, NotAuthorised) and each.hint == LOG_IN for each in errors):
        return Check("credentials", "failed", words(errors[0].problem), "gcloud auth application-default login")
    if isinstance(errors[0], UnreachableError):  # so is the metadata server where nobody is logged in
        return Check("credentials", "unknown", words(errors[0].problem), "gcloud auth application-default login")
    return unread("credentials", errors[0])


# --- The project ------------------------------------------------------------------------------------------------------


def check_apis(needs: Needs, found: Found) -> Iterator[Check]:
    states = answer(found, "apis") or {}
    missing = [api for api in needs.apis if states.get(api) is False]
    unknown = [api for api in needs.apis if api not in states]
    if missing:
        yield Check("apis", "failed", f"disabled: {', '.join(missing)}", fixes.enable(needs.project, missing))
    elif unknown:
        yield Check("apis", "unknown", f"not reported: {', '.join(unknown)}")
    else:
        yield Check("apis", "ok", f"{plural(len(states), 'API')} enabled")


def check_billing(needs: Needs, found: Found) -> Iterator[Check]:
    known = answer(found, "billing") or {}
    if known.get("billingEnabled"):
        account = last_url_part(str(known.get("billingAccountName", "")))
        yield Check("billing", "ok", f"billing account {account}" if account else "enabled")
    else:
        text = f"project {needs.project} has no billing account"
        yield Check("billing", "failed", text, fixes.link_billing(needs.project))


def check_project(needs: Needs, found: Found) -> Iterator[Check]:
    known = answer(found, "project")
    if known is None:
        yield Check("project", "failed", f"project {needs.project} does not exist", "gcloud projects list")
    elif known.get("lifecycleState", "ACTIVE") != "ACTIVE":
        fix = f"gcloud projects undelete {needs.project}"
        yield Check("project", "failed", f"project {needs.project} is {known['lifecycleState']}", fix)
    else:
        yield Check("project", "ok", f"{needs.project} ({known.get('projectNumber', '')})")


def check_permissions(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the caller may create, watch and cancel jobs, and read their logs."""
    have = answer(found, "permissions") or ()
    missing = [permission for permission in caller_permissions(needs) if permission not in have]
    jobs = [permission for permission in missing if not permission.startswith("logging.")]
    if jobs:
        text = f"you lack {', '.join(jobs)}"
        role = "roles/aiplatform.user" if needs.service == "vertex" else "roles/compute.instanceAdmin.v1"
        yield Check("permissions", "failed", text, fixes.grant_in_project(needs.project, LAUNCHER, role))
    if len(missing) > len(jobs):
        fix = fixes.grant_in_project(needs.project, LAUNCHER, "roles/logging.viewer")
        yield Check("permissions", "warning", "you lack logging.logEntries.list: launch can't show a job's log", fix)
    if not missing:
        what = "create, watch and cancel jobs" if needs.service == "vertex" else "create and watch VMs"
        yield Check("permissions", "ok", f"you can {what}, and read logs")


def check_acting(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the job's service account exists and that the caller may act as it."""
    have = answer(found, "actAs")
    if have is None:
        fix = fixes.create_account(needs.account, needs.project)
        yield Check("actAs", "failed", f"service account {needs.account} does not exist", fix)
    elif "iam.serviceAccounts.actAs" not in have:
        text = f"you have no permission to act as {needs.account}"
        yield Check("actAs", "failed", text, act_as_command(needs.account, needs.project))
    else:
        yield Check("actAs", "ok", f"you can act as {needs.account}")


# --- Quota and reservations -------------------------------------------------------------------------------------------


def check_vertex_quotas(needs: Needs, found: Found) -> Iterator[Check]:
    """Check the GPU quota of each placement: its limit, and what is left of it."""
    known = answer(found, "quota") or {}
    if needs.lists_quotas:
        yield from list_vertex_quotas(needs, known.get("quotas", {}), known.get("usage"))
    for need in dict.fromkeys(needs.gpus):
        yield check_vertex_quota_limit(needs.project, need, known.get("quotas", {}), known.get("usage"))


def list_vertex_quotas(needs: Needs, quotas: Any, usage: Any) -> Iterator[Check]:
    """List the GPUs of which each region has any quota."""
    metrics = sorted(filter(gpu_of, quotas), key=gpu_of)
    for region in needs.regions:
        used = {metric: None if usage is None else usage.get(metric, {}).get(region, 0) for metric in metrics}
        figures = [
            QuotaFigures(metric=metric, region=region, limit=limit, used=used[metric], needed=None)
            for metric in metrics
            if (limit := limit_of(quotas[metric], region))
        ]
        if figures:
            text = f"{region}: {', '.join(f'{gpu_of(quota.metric)} {units_text(quota.limit)}' for quota in figures)}"
            yield Check("quota", "ok", text, place=region, quotas=tuple(figures))
        else:
            fix = f"launch setup --request-quota l4:1 --region {region}"
            yield Check("quota", "warning", f"no GPU quota for training on Vertex AI in {region}", fix, region)


def gpu_of(metric: str) -> str:
    """Return `l4` or `l4 (spot, flex-start)` of a metric of training; empty for one that isn't about GPUs."""
    match = re.fullmatch(r"custom_model_training_(preemptible_)?nvidia_(\w+)_gpus", metric)
    return f"{match[2]}{' (spot, flex-start)' if match[1] else ''}" if match else ""


def check_vertex_quota_limit(project: str, need: GpuNeed, quotas: Any, usage: Any) -> Check:
    where = {"place": need.region, "provisioning": need.provisioning, "machine_type": need.machine_type}
    info = quotas.get(need.metric) or None
    if not info and not need.is_exact:  # the only quota whose metric begins with an accelerator without one of its own
        similar = [name for name in quotas if re.fullmatch(rf"{re.escape(need.metric)}\w*", name)]
        info = quotas[similar[0]] if len(similar) == 1 else None
    limit = limit_of(info, need.region) if info else None
    metric = last_url_part(info["metric"]) if info else need.metric
    used = None if usage is None else usage.get(metric, {}).get(need.region, 0)
    figures = QuotaFigures(metric=metric, region=need.region, limit=limit, used=used, needed=need.gpus)
    if info is None or limit is None:
        missing = f"quota {need.metric}" if info is None else f"a limit of {need.metric} in {need.region}"
        return Check("quota", "unknown", f"the project lists no {missing}", quotas=(figures,), **where)
    in_use = "usage unknown" if used is None else f"{used} in use"
    text = f"{metric} in {need.region}: {need.gpus} needed, {in_use}, limit {units_text(limit)}"
    if limit < 0 or limit - (used or 0) >= need.gpus:
        return Check("quota", "ok", text, quotas=(figures,), **where)
    quota, wanted = str(info.get("quotaId", "")), max(limit, 0) + need.gpus
    fix = fixes.raise_quota(project, "aiplatform.googleapis.com", quota, wanted, {"region": need.region})
    reason = (info.get("quotaIncreaseEligibility") or {}).get("ineligibilityReason", "")
    if reason:
        text += f" (no increase: {reason})"
        fix = fixes.link_billing(project) if reason == "NO_VALID_BILLING_ACCOUNT" else fixes.quota_page(project)
        figures = replace(figures, no_increase=reason)
    status: Status = "failed" if limit < need.gpus else "warning"
    return Check("quota", status, text, fix, quotas=(figures,), **where)


NO_DIMENSIONS: Final[Mapping[str, str]] = {}


def limit_of(info: Any, region: str, dimensions: Mapping[str, str] = NO_DIMENSIONS) -> int | None:
    """Return a quota's limit in a region (or "global"), for further dimensions; -1: no limit; None: unknown. The more
    specific dimensions come first. A limit of 0 has no `value`: gcloud reads it so
    (command_lib/ai/model_garden_utils)."""
    wanted = {"region": region, **dimensions}
    for entry in info.get("dimensionsInfos", ()):
        own = entry.get("dimensions") or {}
        if all(own.get(name, value) == value for name, value in wanted.items()) and region in (
            entry.get("applicableLocations") or [region]
        ):
            return int((entry.get("details") or {}).get("value", 0))
    return None


def units_text(units: float | None) -> str:
    """Return a quota's limit or usage as text; None: unknown, -1: no limit."""
    return "?" if units is None else "unlimited" if units < 0 else f"{units:g}"


def check_reservation(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that each reservation exists, fits the machines, has room, and may be used by Vertex AI."""
    for need in needs.reservations:
        name = f"reservation {need.name}"
        known = found.get(name)
        if isinstance(known, LaunchError):
            yield unread("reservation", known)
        elif name in found:
            problem, fix = reservation_problem(need, known, needs.service)
            status: Status = "failed" if problem else "ok"
            text = f"{last_url_part(need.name)}: {problem or 'fits'}"
            if ends := (known or {}).get("deleteAtTime"):
                text += (
                    f"; it ends on {datetime.fromisoformat(ends).astimezone(UTC):%Y-%m-%d %H:%M} UTC, and its VMs too"
                )
            yield Check(
                "reservation",
                status,
                text,
                fix,
                need.region,
                f"reservation:{need.name}",
                ends=ends or UNSET,
            )


def reservation_problem(need: ReservationNeed, known: Any, service: str) -> tuple[str, str]:
    """Return why a reservation can't be used, and the command that shows or fixes it; empty texts if it can."""
    _, project, _, zone, _, name = need.name.split("/")
    where = f"--project={project} --zone={zone}"
    if known is None:
        return f"does not exist in {zone}", f"gcloud compute reservations list --project={project}"
    specific = known.get("specificReservation") or {}
    machine = (specific.get("instanceProperties") or {}).get("machineType", "")
    free = int(specific.get("count", 0)) - int(specific.get("inUseCount", 0))
    dense = known.get("deploymentType") == "DENSE" or known.get("reservationMode") == "CALENDAR"
    bound = "is DENSE: it takes VMs of provisioning model RESERVATION_BOUND alone" if dense else "is not DENSE"
    sharing = (known.get("reservationSharingPolicy") or {}).get("serviceShareType", "")
    show = f"gcloud compute reservations describe {name} {where}"
    share = f"gcloud compute reservations update {name} {where} --reservation-sharing-policy=ALLOW_ALL"
    status = known.get("status", "READY")
    problems = (
        (status != "READY", f"is {status}", show),
        (
            machine not in ("", need.machine_type),
            f"has {machine}, not {need.machine_type}",
            f"launch {service} … --type {machine}",
        ),
        (need.dense not in (None, dense), bound, f"launch vm … --set vm.dense_reservation={str(dense).lower()}"),
        (specific and free < need.nodes, f"{need.nodes} needed, {free} free of {specific.get('count', 0)}", show),
        (service == "vertex" and sharing == "DISALLOW_ALL", "is not shared with Vertex AI", share),
    )
    return next(((text, fix) for is_problem, text, fix in problems if is_problem), ("", ""))


# --- Bucket, image, secrets -------------------------------------------------------------------------------------------


def check_bucket(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the bucket exists, its region, the project that owns it, and soft delete."""
    known, url = answer(found, "bucket"), f"gs://{needs.bucket}"
    if known is None:
        fix = fixes.create_bucket(url, needs.project, needs.regions[0] if needs.regions else "REGION")
        yield Check("bucket", "failed", f"bucket {url} does not exist", fix)
        return
    warnings = [*bucket_warnings(needs, known, answer(found, "project") or {})]
    yield from warnings
    if not warnings:
        yield Check("bucket", "ok", f"{url} in {known.get('location', '').lower()}")


def bucket_warnings(needs: Needs, known: Any, project: Any) -> Iterator[Check]:
    url, location = f"gs://{needs.bucket}", str(known.get("location", "")).lower()
    if known.get("locationType", "region") != "region" and needs.service == "vertex":
        text = f"{url} is in the {known['locationType']} {location}: Vertex AI can't mount it at /gcs"
        fix = fixes.create_bucket("gs://NAME", needs.project, needs.regions[0] if needs.regions else "REGION")
        yield Check("bucket", "warning", text, fix)
    elif needs.regions and location not in needs.regions:
        text = f"{url} is in {location}, the job runs in {listed(needs.regions, 3)}: traffic between regions is billed"
        is_region = known.get("locationType", "region") == "region"
        yield Check("bucket", "warning", text, f"launch {needs.service} … --region {location}" if is_region else "")
    owner, number = str(known.get("projectNumber", "")), str(project.get("projectNumber", ""))
    if owner and number and owner != number:
        text = f"{url} belongs to project {owner}, not to {needs.project} ({number})"
        yield Check("bucket", "warning", text, f"gcloud projects describe {owner}")
    days = int((known.get("softDeletePolicy") or {}).get("retentionDurationSeconds", 0)) / 86_400
    if days:
        text = f"{url} keeps and bills deleted checkpoints for {days:g} days (soft delete)"
        yield Check("bucket", "warning", text, f"gcloud storage buckets update {url} --clear-soft-delete")


def check_bucket_permissions(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the caller can read and write the bucket: the run's locks and plan are written from here."""
    if found.get("bucket", ...) is None:  # it does not exist, as `check_bucket` reports
        return
    have = (answer(found, "access") or {}).get("permissions", ())
    missing = [permission for permission in OBJECT_PERMISSIONS if permission not in have]
    if missing:
        text = f"you lack {', '.join(missing)} on gs://{needs.bucket}"
        yield Check("access", "failed", text, fixes.grant_on_bucket(needs.bucket, LAUNCHER))
    else:
        yield Check("access", "ok", f"you can read and write gs://{needs.bucket}")


def check_job_access(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the job's account can read and write the bucket."""
    if not needs.bucket or found.get("bucket", ...) is None:
        return
    account = job_account(needs, found)
    states = {permission: found.get(f"access {permission}") for permission in OBJECT_PERMISSIONS}
    denied = [permission for permission, state in states.items() if state == "CANNOT_ACCESS"]
    if denied:
        fix = fixes.grant_on_bucket(needs.bucket, f"serviceAccount:{account}")
        yield Check("job access", refused(needs), f"{account} lacks {', '.join(denied)} on gs://{needs.bucket}", fix)
        return
    yield known_or_not(
        "job access", [*states.values()], f"{account} can read and write gs://{needs.bucket}", f"for {account}"
    )


def job_account(needs: Needs, found: Found) -> str:
    """Return the account that a job runs as, for texts."""
    number = str((answer(found, "project") or {}).get("projectNumber", ""))
    unknown = "Vertex AI's service agent" if needs.service == "vertex" else "Compute Engine's default account"
    return needs.job_account(number) or unknown


def refused(needs: Needs) -> Literal["failed", "unknown"]:
    """Return the status of a permission that the job's account lacks: unknown for Vertex AI's service agent, which
    Google makes, with its permissions, when a project's first job starts."""
    return "failed" if needs.account else "unknown"


def known_or_not(name: str, states: list[Any], text: str, about: str) -> Check:
    """Return ok if Policy Troubleshooter answered CAN_ACCESS to all, else unknown with the reason."""
    error = next((state for state in states if isinstance(state, LaunchError)), None)
    if error is not None:
        return unread(name, error, f"not checked {about}")
    if all(state == "CAN_ACCESS" for state in states):
        return Check(name, "ok", text)
    reason = next(
        (str(state) for state in states if state and state != "CAN_ACCESS"), "the project's number is unknown"
    )
    return Check(name, "unknown", f"not checked {about}: {reason}")


def check_repository(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the image's repository exists and holds containers, and that Vertex AI may pull from it."""
    known, short = answer(found, "repository"), needs.repository
    if known is None:
        if needs.creates_repository:
            yield Check("repository", "ok", f"{short} will be created")
        else:
            fix = fixes.create_repository(needs.repository)
            yield Check("repository", "failed", f"{short} does not exist (--create-repository creates it)", fix)
        return
    if known.get("format", "DOCKER") != "DOCKER":
        text = f"{short} holds {known['format']} packages, not containers"
        yield Check("repository", "failed", text, f"launch {needs.service} … --set image.repository=…")
        return
    number = str((answer(found, "project") or {}).get("projectNumber", ""))
    if found.get("access image") == "CANNOT_ACCESS":
        who = needs.pulling_account(number)
        text = f"{'Vertex AI' if needs.service == 'vertex' else who} can't pull from {short}"
        status = refused(needs) if needs.service == "vm" else "unknown"  # as in `refused`
        yield Check("repository", status, text, fixes.grant_on_repository(needs.repository, f"serviceAccount:{who}"))
    else:
        yield Check("repository", "ok", f"{short} exists")


def check_image(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the spec's own image exists."""
    if answer(found, "image") is None:
        name = needs.image.partition("@")[0]
        fix = f"gcloud artifacts docker images list {name}" if needs.repository else f"docker manifest inspect {name}"
        yield Check("image", "failed", f"the registry has no {needs.image}", fix)
    else:
        yield Check("image", "ok", f"{needs.image.partition('@')[0]} exists")


def check_secrets(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that each secret's version exists and is enabled, and that the job's account can read it."""
    account = job_account(needs, found)
    for version in needs.secrets:
        project, secret, name = version.split("/")[1::2]
        known, where = found.get(f"secret {version}"), f"--secret={secret} --project={project}"
        state = known.get("state", "ENABLED") if isinstance(known, dict) else ""
        if known is None:
            text, fix = f"{version} does not exist", f"gcloud secrets versions list {secret} --project={project}"
            yield Check("secret", "failed", text, fix)
        elif state and state != "ENABLED":
            fix = f"gcloud secrets versions enable {name} {where}"
            if state == "DESTROYED":
                fix = f"gcloud secrets versions add {secret} --project={project} --data-file=FILE"
            yield Check("secret", "failed", f"{version} is {state}", fix)
        elif found.get(f"access {version}") == "CANNOT_ACCESS":
            grant = f"--member=serviceAccount:{account} --role={fixes.SECRET_ROLE}"
            fix = f"gcloud secrets add-iam-policy-binding {secret} --project={project} {grant}"
            yield Check("secret", refused(needs), f"{account} can't read the secret {secret}", fix)
        else:
            states = [found.get(f"access {version}"), *([known] if isinstance(known, LaunchError) else [])]
            yield known_or_not("secret", states, f"{account} can read {secret}", f"whether {account} can read {secret}")


def check_subnetworks(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that the caller may attach VMs to each subnetwork of a Shared VPC's host project."""
    for need in needs.subnetworks:
        known = found.get(subnetwork_key(need))
        if isinstance(known, LaunchError):
            yield unread("network", known)
            continue
        text = f"subnetwork {need.name} of host project {need.project} in {need.region}"
        wanted = subnetwork_permissions(need)
        missing = [permission for permission in wanted if permission not in (known or ())]
        if known is None:
            fix = f"gcloud compute networks subnets list --project={need.project} --filter=region:{need.region}"
            yield Check("network", "failed", f"{text} does not exist", fix, need.region)
        elif missing:
            fix = (
                f"gcloud compute networks subnets add-iam-policy-binding {need.name} --region={need.region} "
                f"--project={need.project} --member={LAUNCHER} --role=roles/compute.networkUser"
            )
            yield Check("network", "failed", f"you lack {', '.join(missing)} on {text}", fix, need.region)
        else:
            yield Check("network", "ok", f"you can use {text}", place=need.region)


CHECKS: Final[tuple[tuple[str, Callable[[Needs, Found], Iterator[Check]]], ...]] = (
    ("project", check_project),
    ("billing", check_billing),
    ("apis", check_apis),
    ("permissions", check_permissions),
    ("actAs", check_acting),
    ("quota", check_vertex_quotas),
    ("bucket", check_bucket),
    ("access", check_bucket_permissions),
    ("repository", check_repository),
    ("image", check_image),
    ("policy", check_policies),
    ("network", check_subnetworks),
    ("keys", check_keys),
    ("job access", check_job_access),
    ("secret", check_secrets),
    ("reservation", check_reservation),
)
"""Name and check."""
READS: Final = frozenset(name for name, _ in CHECKS[:-6])
"""Checks that depend on the read of the same name."""
