"""Explain a registry's refusals, with a fix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from launcher.errors import LaunchError, NotAuthorised
from launcher.images.registry.reference import artifact_repository, is_googles

if TYPE_CHECKING:
    from requests import Response


class RegistryError(LaunchError):
    """A registry can't be reached, or refuses a request."""


class RepositoryMissing(RegistryError):
    """The repository does not exist. Artifact Registry never creates one by itself."""


def refusal(response: Response, host: str, repository: str, what: str, tried: str = "") -> LaunchError:
    """Return the error for a refusal. `what` is the operation ("put manifest x"), `tried` the credentials."""
    where, text = f"{host}/{repository}", said(response)
    if response.status_code in (401, 403):
        return denied(host, f"{where}: {what}: {text}", tried)
    if response.status_code == 404 and "NAME_UNKNOWN" in codes(response):
        return RepositoryMissing(f"{where}: the repository does not exist ({text})", _create(host, repository))
    return RegistryError(f"{where}: {what}: {text}")


def denied(host: str, problem: str, tried: str) -> NotAuthorised:
    """Return the error for denied access, with the credentials that were tried and the commands to log in."""
    ways = f"docker login {host}"
    if is_googles(host):
        ways = (
            f"gcloud auth login, then gcloud auth configure-docker {host}. Pushing needs "
            "roles/artifactregistry.writer on the repository; one that doesn't exist is refused in the same way."
        )
    return NotAuthorised(problem, f"Tried: {tried or 'no credentials'}.\nLog in: {ways}")


def _create(host: str, repository: str) -> str:
    found = artifact_repository(host, repository)
    if found is None:
        return "Create the repository first, or name another: image.repository"
    return (
        "launch build --create-repository creates it; or gcloud artifacts repositories create "
        f"{found.repository} --project={found.project} --location={found.location} --repository-format=docker"
    )


def done(response: Response) -> bool:
    """Return whether a request succeeded. A redirect, which requests counts as ok, has written nothing."""
    return 200 <= response.status_code < 300


def codes(response: Response) -> tuple[str, ...]:
    """Return the error codes in a response, such as BLOB_UPLOAD_UNKNOWN. Empty if there are none."""
    return tuple(code for code, _ in _errors(response))


def said(response: Response) -> str:
    """Return the registry's message on one line: code and message of each error, else the text, else the status."""
    words = "; ".join(f"{code}: {message}" if message else code for code, message in _errors(response))
    words = words or " ".join(response.text[:300].split())
    return f"HTTP {response.status_code} {words or response.reason}"


def _errors(response: Response) -> list[tuple[str, str]]:
    """Parse errors as in https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes."""
    try:
        errors = json.loads(response.content)["errors"]
        return [(str(one["code"]), str(one.get("message") or "")) for one in errors]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
