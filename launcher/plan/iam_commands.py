"""The gcloud commands that make a small service account for VMs, as text for people. Nothing here is run."""

from __future__ import annotations

import shlex
from typing import Final

from launcher.plan.names import default_service_account

PROJECT_ROLES: Final = ("roles/logging.logWriter", "roles/artifactregistry.reader")
"""What every VM's account needs in the project: its log, and to pull images."""
BUCKET_ROLE: Final = "roles/storage.objectUser"
DELETE_ROLE: Final = "roles/compute.instanceAdmin.v1"


def account(project: str, output: str | None, *, deletes: str | None) -> str:
    """Commands, one under the other, that make the account `launch` with the few roles that a VM needs. `output` is
    where its runs write (gs://BUCKET/…), if it has any; `deletes`: the names of the VMs that it may delete start so."""
    email = default_service_account(project)
    name = email.partition("@")[0]
    found = [
        continued("gcloud iam service-accounts create", name, f"--project={project}"),
        *(in_project(project, email, role, "None") for role in PROJECT_ROLES),
        *((in_bucket(output, email),) if output else ()),
        *((self_delete(project, email, deletes),) if deletes else ()),
    ]
    return "\n".join(found)


def self_delete(project: str, email: str, prefix: str) -> str:
    """The grant by which a VM that trains may delete itself, and no VM whose name starts otherwise (IAM, conditions
    with resource attributes)."""
    named = f'resource.name.extract("/instances/{{name}}").startsWith("{prefix}")'
    condition = f'resource.type == "compute.googleapis.com/Instance" && {named}'
    return in_project(project, email, DELETE_ROLE, f"title=launch-deletes-its-vms,expression={condition}")


def in_bucket(output: str, email: str) -> str:
    """The role that reads and writes objects, in the bucket of gs://BUCKET/…"""
    bucket, words = "/".join(output.split("/")[:3]), (f"--member={member(email)}", f"--role={BUCKET_ROLE}")
    return continued("gcloud storage buckets add-iam-policy-binding", bucket, *words)


def in_project(project: str, email: str, role: str, condition: str) -> str:
    """A role in the project; gcloud asks for the condition where none is said and the project has some."""
    words = (project, f"--member={member(email)}", f"--role={role}", f"--condition={condition}")
    return continued("gcloud projects add-iam-policy-binding", *words)


def member(email: str) -> str:
    """An account, as IAM writes it."""
    return f"serviceAccount:{'PROJECT_NUMBER-compute@developer.gserviceaccount.com' if email == 'default' else email}"


def continued(*words: str) -> str:
    """One command as a shell takes it, each option on a line of its own."""
    command, first, *options = words
    return " \\\n    ".join([f"{command} {shlex.quote(first)}", *map(shlex.quote, options)])
