"""Make a project ready for Vertex AI, VMs or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from launcher.errors import LaunchError
from launcher.gcp.rest import Rest
from launcher.inputs.gcloud_config import account
from launcher.project.reads import RESOURCES
from launcher.project.setup import missing_permissions, pending
from launcher.project.steps import QuotaRequest, SetupTarget, Step, steps


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
    """Return the state of the project's setup; changes nothing. Raises LaunchError: it can't be read; UsageError: the
    bucket belongs to another project."""
    rest = Rest(project, environ)
    target = SetupTarget(
        project=project,
        number=project_number(rest),
        region=region,
        caller=member(account(environ)),
        vertex=vertex,
        vms=vms,
        network=network,
        quotas=tuple(quotas),
    )
    every = list(steps(target, rest))
    left = pending(every)
    missing = missing_permissions(left, rest) if left else []
    done = tuple(one for one in every if one not in left)
    return Setup(target=target, done=done, pending=tuple(left), missing=tuple(missing))


def project_number(rest: Rest) -> str:
    """Return the project's number; empty if it can't be read, as while Resource Manager's API is disabled."""
    try:
        return str(rest(RESOURCES, f"/v1/projects/{rest.project}").get("projectNumber", ""))
    except LaunchError:
        return ""


def member(email: str) -> str:
    """Return an account as an IAM member; empty if it is unknown."""
    kind = "serviceAccount" if email.endswith(".gserviceaccount.com") else "user"
    return f"{kind}:{email}" if email else ""
