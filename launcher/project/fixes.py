"""The commands that fix the findings of checks. Nothing is executed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher.plan.iam_commands import BUCKET_ROLE

SECRET_ROLE = "roles/secretmanager.secretAccessor"  # noqa: S105 - a role's name


def enable(project: str, apis: Iterable[str]) -> str:
    return f"gcloud services enable {' '.join(apis)} --project={project}"


def link_billing(project: str) -> str:
    return f"gcloud billing accounts list\ngcloud billing projects link {project} --billing-account=ACCOUNT"


def raise_quota(project: str, service: str, quota: str, value: int, dimensions: Mapping[str, str]) -> str:
    """Return the command that requests a higher quota."""
    where = ",".join(f"{name}={value}" for name, value in dimensions.items())
    return (
        f"gcloud beta quotas preferences create --service={service} --project={project} "
        f"--quota-id={quota} --preferred-value={value}" + (f" --dimensions={where}" if where else "")
    )


def quota_page(project: str) -> str:
    """Return the page on which a quota that can't be raised by command is requested."""
    return f"https://console.cloud.google.com/iam-admin/quotas?project={project}"


def create_account(email: str, project: str) -> str:
    name, _, domain = email.partition("@")
    home = domain.removesuffix(".iam.gserviceaccount.com")  # the project that the account's name names
    return f"gcloud iam service-accounts create {name} --project={home if home not in ('', domain) else project}"


def create_bucket(url: str, project: str, region: str) -> str:
    """Return the command that creates a bucket as a run needs it."""
    return (
        f"gcloud storage buckets create {url} --project={project} --location={region} "
        "--uniform-bucket-level-access --soft-delete-duration=0"
    )


def create_repository(name: str) -> str:
    _, project, _, location, _, repository = name.split("/")
    return (
        f"gcloud artifacts repositories create {repository} --project={project} --location={location} "
        "--repository-format=docker"
    )


# --- Grants -----------------------------------------------------------------------------------------------------------


def grant_in_project(project: str, member: str, role: str) -> str:
    """Return the grant of a project role. The condition is explicit: gcloud asks for it if the policy has any."""
    return f"gcloud projects add-iam-policy-binding {project} --member={member} --role={role} --condition=None"


def grant_on_bucket(bucket: str, member: str, role: str = BUCKET_ROLE) -> str:
    """Return the grant to read and write a bucket's objects."""
    return f"gcloud storage buckets add-iam-policy-binding gs://{bucket} --member={member} --role={role}"


def grant_on_repository(name: str, member: str, role: str = "roles/artifactregistry.reader") -> str:
    """Return the grant to pull from a repository, by resource name."""
    _, project, _, location, _, repository = name.split("/")
    return (
        f"gcloud artifacts repositories add-iam-policy-binding {repository} --project={project} "
        f"--location={location} --member={member} --role={role}"
    )
