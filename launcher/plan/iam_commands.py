"""Format the gcloud commands that create a least-privilege service account for VMs. Nothing is executed here."""

from __future__ import annotations

import shlex
from typing import Final

from launcher.plan.names import default_service_account

PROJECT_ROLES: Final = ("roles/logging.logWriter", "roles/artifactregistry.reader")
"""Project roles of every VM's account: write its log, pull images."""
BUCKET_ROLE: Final = "roles/storage.objectUser"
DELETE_ROLE: Final = "roles/compute.instanceAdmin.v1"


def account(project: str, output: str | None, *, deletes: str | None) -> str:
    """Return the commands that create the account `launch` with the roles that a VM needs.

    Args:
        output: gs://BUCKET/… where its runs write, if any.
        deletes: name prefix of the VMs that it may delete, if any.
    """
    email = default_service_account(project)
    name = email.partition("@")[0]
    commands = [continued("gcloud iam service-accounts create", name, f"--project={project}")]
    commands += [project_grant(project, email, role, "None") for role in PROJECT_ROLES]
    if output:
        bucket, words = "/".join(output.split("/")[:3]), (f"--member={member(email)}", f"--role={BUCKET_ROLE}")
        commands.append(continued("gcloud storage buckets add-iam-policy-binding", bucket, *words))
    if deletes:
        commands.append(self_delete(project, email, deletes))
    return "\n".join(commands)


def self_delete(project: str, email: str, prefix: str) -> str:
    """Return the grant that lets a VM delete itself, limited to VMs whose names start with `prefix` (IAM, conditions
    with resource attributes)."""
    named = f'resource.name.extract("/instances/{{name}}").startsWith("{prefix}")'
    condition = f'resource.type == "compute.googleapis.com/Instance" && {named}'
    return project_grant(project, email, DELETE_ROLE, f"title=launch-deletes-its-vms,expression={condition}")


def project_grant(project: str, email: str, role: str, condition: str) -> str:
    """Return the grant of a project role. The condition is explicit: gcloud prompts for it if the project has any."""
    words = (project, f"--member={member(email)}", f"--role={role}", f"--condition={condition}")
    return continued("gcloud projects add-iam-policy-binding", *words)


def member(email: str) -> str:
    """Return an account as an IAM member."""
    return f"serviceAccount:{'PROJECT_NUMBER-compute@developer.gserviceaccount.com' if email == 'default' else email}"


def continued(*words: str) -> str:
    """Return a shell command with each option on its own line."""
    command, first, *options = words
    return " \\\n    ".join([f"{command} {shlex.quote(first)}", *map(shlex.quote, options)])
