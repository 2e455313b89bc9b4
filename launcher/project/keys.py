"""Check customer-managed encryption keys (CMEK): of the spec, the bucket and the repository. Pure.

Google's service agents encrypt and decrypt with a key, not the job's account
(https://cloud.google.com/kms/docs/compatible-services).
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import LaunchError
from launcher.project.model import Check, Found, Needs, answer, unread

USE = "cloudkms.cryptoKeyVersions.useToEncrypt"


def keys(needs: Needs, found: Found) -> dict[tuple[str, str], str]:
    """Return (what is encrypted, key) -> the service agent that needs the key; empty: the project's number is
    unknown."""
    number = str((answer(found, "project") or {}).get("projectNumber", ""))
    bucket, repository = answer(found, "bucket") or {}, answer(found, "repository") or {}
    owner = str(bucket.get("projectNumber", "")) or number
    service = "gcp-sa-aiplatform" if needs.service == "vertex" else "compute-system"
    wanted = (
        ("the job" if needs.service == "vertex" else "the disks", needs.key, service, number),
        (
            f"gs://{needs.bucket}",
            (bucket.get("encryption") or {}).get("defaultKmsKeyName", ""),
            "gs-project-accounts",
            owner,
        ),
        (
            needs.repository,
            repository.get("kmsKeyName", ""),
            "gcp-sa-artifactregistry",
            number if needs.repository.split("/")[1:2] == [needs.project] else "",
        ),
    )
    return {
        (what, key): f"service-{of}@{name}.iam.gserviceaccount.com" if of else ""
        for what, key, name, of in wanted
        if key
    }


def check_keys(needs: Needs, found: Found) -> Iterator[Check]:
    """Check that each key is enabled, and that the service agent may use it."""
    for (what, key), agent in keys(needs, found).items():
        if not agent and not isinstance(found.get("project"), LaunchError):
            continue  # the project does not exist, as is reported
        known, state = found.get(f"key {key}"), found.get(f"access {agent} {key}")
        name = f"key {key.rpartition('/')[2]} of {what}"
        primary = (known.get("primary") or {}) if isinstance(known, dict) else {}
        if f"key {key}" in found and known is None:
            project, location, ring, _ = key.split("/")[1::2]
            fix = f"gcloud kms keys list --keyring={ring} --location={location} --project={project}"
            yield Check("key", "failed", f"{name} does not exist", fix)
        elif primary.get("state", "ENABLED") != "ENABLED":
            yield Check("key", "failed", f"{name} is {primary['state']}", enable(primary["name"]))
        elif state == "CANNOT_ACCESS":
            project, location, ring, short = key.split("/")[1::2]
            fix = (
                f"gcloud kms keys add-iam-policy-binding {short} --keyring={ring} --location={location} "
                f"--project={project} --member=serviceAccount:{agent} --role=roles/cloudkms.cryptoKeyEncrypterDecrypter"
            )
            yield Check("key", "failed", f"{agent} can't use {name}", fix)
        elif state == "CAN_ACCESS" and isinstance(known, dict):
            yield Check("key", "ok", f"{name} can be used")
        else:
            errors = [each for each in (known, state) if isinstance(each, LaunchError)]
            yield (unread("key", errors[0]) if errors else Check("key", "unknown", f"{name}: not checked"))


def enable(version: str) -> str:
    """Return the command that enables a key version, by resource name."""
    project, location, ring, key, number = version.split("/")[1::2]
    where = f"--key={key} --keyring={ring} --location={location} --project={project}"
    return f"gcloud kms keys versions enable {number} {where}"
