"""Diagnose refusals about identity and project: credentials, permissions, disabled APIs, organization policies.

Several principals take part in a job, and each needs its own grant: the user (creates the job, acts as its account),
Vertex AI's service agents (pull the image; the job's account cannot, vertex-ai-samples issue 2176) and the job's
account (reads secrets, writes the output).
"""

from __future__ import annotations

import re

from launcher.diagnosis.model import Diagnosis, Refusal, RequestContext, first, plain

LOG_IN = "gcloud auth application-default login, or run as a service account"
LAUNCHER = '"user:$(gcloud config get account)"'
"""The user who launches, as a shell expression."""
EMAIL = r"([\w.+-]+@[\w-]+(?:\.[\w-]+)+)"
CREDENTIALS = frozenset(
    {"ACCESS_TOKEN_EXPIRED", "ACCESS_TOKEN_SCOPE_INSUFFICIENT", "ACCOUNT_STATE_INVALID", "CREDENTIALS_MISSING"}
)
"""google.api.ErrorReason."""
PROJECT = frozenset({"CONSUMER_INVALID", "CONSUMER_SUSPENDED", "RESOURCE_PROJECT_INVALID", "GCP_SUSPENDED"})
POLICY = frozenset({"SECURITY_POLICY_VIOLATED", "LOCATION_ORG_POLICY_VIOLATED", "RESOURCE_USAGE_RESTRICTION_VIOLATED"})


def diagnose_access(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a missing permission or a disabled API. The order of the rules matters: if a quota project is missing,
    Google answers SERVICE_DISABLED for gcloud's own project."""
    rules = (
        diagnose_quota_project,
        diagnose_credentials,
        diagnose_disabled_api,
        diagnose_project,
        diagnose_acting,
        diagnose_policy,
        diagnose_permission,
    )
    return next(filter(None, (rule(refusal, context) for rule in rules)), None)


def diagnose_quota_project(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose user credentials without a quota project."""
    if refusal.reason != "USER_PROJECT_DENIED" and "quota project" in refusal.message:
        fix = f"gcloud auth application-default set-quota-project {context.project}"
        return Diagnosis(scope="project", kind="credentials", cause="your credentials have no quota project", fix=fix)
    return None


def diagnose_credentials(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    if refusal.code != 401 and refusal.reason not in CREDENTIALS:
        return None
    cause = f"the credentials are not accepted: {plain(refusal.message)}"
    return Diagnosis(scope="permanent", kind="credentials", cause=cause, fix=LOG_IN)


def diagnose_disabled_api(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a disabled API, by the name in the message: a job may need more APIs than the one called."""
    text, metadata = refusal.message, refusal.metadata
    known = refusal.reason in ("SERVICE_DISABLED", "accessNotConfigured")
    if not known and not re.search(r"API has not been used in project|it is disabled", text):
        return None
    service = metadata.get("service", "") or first(r"([a-z]+\.googleapis\.com)", text) or refusal.service
    service = service.removesuffix(".googleapis.com")
    consumer = metadata.get("consumer", "").removeprefix("projects/")
    project = consumer or first(r"in project ([\w:.-]+) before", text) or context.project
    fix = f"gcloud services enable {service}.googleapis.com --project={project}; then wait a minute"
    return Diagnosis(
        scope="project", kind="disabled", cause=f"the API {service}.googleapis.com is disabled in {project}", fix=fix
    )


def diagnose_project(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a project that does not exist, is not accessible, or has no billing."""
    text = refusal.message
    if refusal.reason == "BILLING_DISABLED" or "requires billing to be enabled" in text:
        fix = f"gcloud billing projects link {context.project} --billing-account=ACCOUNT (gcloud billing accounts list)"
        return Diagnosis(scope="project", kind="project", cause=f"project {context.project} has no billing", fix=fix)
    missing = re.search(r"on resource project \S+|[Tt]he resource 'projects/[\w:.-]+' was not found", text)
    if refusal.reason not in PROJECT and not missing:
        return None
    cause = f"project {context.project} does not exist, or you have no access to it: {plain(text)}"
    return Diagnosis(
        scope="project", kind="project", cause=cause, fix="gcloud projects list; gcloud config set project PROJECT"
    )


ACTING = r"act as[ _]*service[ _]account|iam\.serviceAccounts\.actAs|not have access to service account"
"""Vertex AI's, IAM's and Compute Engine's wordings."""


def diagnose_acting(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a missing permission to act as the job's service account."""
    text = refusal.message
    if not re.search(ACTING, text, re.IGNORECASE):
        return None
    account = first(EMAIL, text) or context.account or "ACCOUNT"
    cause = f"you have no permission to act as {account}, or it does not exist"
    return Diagnosis(scope="permanent", kind="permission", cause=cause, fix=act_as_command(account, context.project))


def act_as_command(account: str, project: str) -> str:
    """Return the grant of roles/iam.serviceAccountUser on an account, in the project that its name ends with."""
    home = first(r"@([\w-]+)\.iam\.gserviceaccount\.com$", account) or project
    return (
        f"gcloud iam service-accounts add-iam-policy-binding {account} --project={home} "
        f"--member={LAUNCHER} --role=roles/iam.serviceAccountUser"
    )


def diagnose_policy(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    text = refusal.message
    constraint = first(r"constraints/([\w.]+)", text)
    if not constraint and refusal.reason not in POLICY and "organization's policy" not in text:
        return None
    show = f"gcloud resource-manager org-policies describe {constraint} --effective --project={context.project}"
    fix = show if constraint else "Ask an administrator of the organization what it allows"
    cause = f"an organization policy forbids it: {plain(text)}"
    return Diagnosis(scope="permanent", kind="permission", cause=cause, fix=fix)


PERMISSION = (
    r"permission[( :'\"]+([a-z]\w*\.\w+(?:\.\w+)*)|required '([\w.]+)' permission"
    r"|have (?:the )?[`'\"\[(]*([a-z]\w*\.\w+\.\w+)|lacks ([a-z]\w*\.\w+\.\w+)"
)
ROLES = {
    "aiplatform.": "roles/aiplatform.user",
    "artifactregistry.": "roles/artifactregistry.reader",
    "cloudkms.": "roles/cloudkms.cryptoKeyEncrypterDecrypter",
    "compute.subnetworks.": "roles/compute.networkUser",
    "compute.": "roles/compute.instanceAdmin.v1",
    "logging.": "roles/logging.viewer",
    "secretmanager.": "roles/secretmanager.secretAccessor",
    "serviceusage.": "roles/serviceusage.serviceUsageConsumer",
    "storage.objects.": "roles/storage.objectUser",
    "storage.": "roles/storage.admin",
}
"""Permission's beginning -> the predefined role that holds it (https://cloud.google.com/iam/docs/roles-permissions)."""


def diagnose_permission(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a missing permission; the fix grants it on the smallest resource that the message names."""
    text = refusal.message
    permission = refusal.metadata.get("permission", "")
    if not permission and (named := re.search(PERMISSION, text, re.IGNORECASE)):
        permission = next(filter(None, named.groups()), "")
    if refusal.reason == "USER_PROJECT_DENIED":
        permission = "serviceusage.services.use"
    if not permission:
        return None
    role = next((role for begin, role in ROLES.items() if permission.startswith(begin)), "ROLE")
    who = principal(permission, text, context)
    fix = f"{binding_command(text + refusal.metadata.get('resource', ''), context)} --member={who} --role={role}"
    if role == "ROLE":
        fix += f", where ROLE contains {permission}"
    cause = f"{principal_text(who)} lacks the permission {permission} (or the resource does not exist)"
    return Diagnosis(scope="permanent", kind="permission", cause=cause, fix=fix)


def principal(permission: str, text: str, context: RequestContext) -> str:
    """Return the IAM member that lacks a permission: the one in the message, or the one that uses it."""
    if email := first(EMAIL, text):
        return member(email)
    if permission.startswith("artifactregistry."):
        return member(pulling_account(context))
    if permission.startswith(("storage.", "secretmanager.")):
        return member(context.account or pulling_account(context))
    return LAUNCHER


def member(email: str) -> str:
    """Return an email address as an IAM member."""
    return f"{'serviceAccount' if email.endswith('.gserviceaccount.com') else 'user'}:{email}"


def pulling_account(context: RequestContext) -> str:
    """Return the account that pulls the image: Vertex AI's custom code service agent, which also runs jobs without an
    account; on Compute Engine the VM's own account."""
    if context.zone:
        return context.account or f"{project_number(context)}-compute@developer.gserviceaccount.com"
    return f"service-{project_number(context)}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"


def project_number(context: RequestContext) -> str:
    """Return the project's number, as a shell expression."""
    return f'$(gcloud projects describe {context.project} --format="value(projectNumber)")'


def principal_text(who: str) -> str:
    if who == LAUNCHER:
        return "your account"
    agent = "Vertex AI's service agent (it pulls images, and is used by jobs without a service account)"
    return agent if "gcp-sa-aiplatform-cc" in who else who.partition(":")[2]


def binding_command(text: str, context: RequestContext) -> str:
    """Return the command that grants on the resource in a message, otherwise on the project."""
    for wording, command in RESOURCES:
        if match := re.search(wording, text):
            return command.format(*match.groups(), project=context.project)
    return f"gcloud projects add-iam-policy-binding {context.project}"


BIND = "add-iam-policy-binding"
RESOURCES = (
    (
        r"projects/([\w:.-]+)/locations/([\w-]+)/repositories/([\w-]+)",
        f"gcloud artifacts repositories {BIND} {{2}} --location={{1}} --project={{0}}",
    ),
    (
        r"projects/([\w:.-]+)/locations/([\w-]+)/keyRings/([\w-]+)/cryptoKeys/([\w-]+)",
        f"gcloud kms keys {BIND} {{3}} --keyring={{2}} --location={{1}} --project={{0}}",
    ),
    (r"projects/([\w:.-]+)/secrets/([\w-]+)", f"gcloud secrets {BIND} {{1}} --project={{0}}"),
    (
        r"projects/([\w:.-]+)/regions/([\w-]+)/subnetworks/([\w-]+)",
        f"gcloud compute networks subnets {BIND} {{2}} --region={{1}} --project={{0}}",
    ),
    (r"(?:gs://|buckets/)([\w.-]*\w)", f"gcloud storage buckets {BIND} gs://{{0}}"),
)
"""What is named in a message -> the command that grants on it."""
