"""What is rehearsed, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from launcher.rehearsal.workdirs import Code

if TYPE_CHECKING:
    from launcher.cli.flows.suggestions import Typed
    from launcher.plan.model import Plan


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: a request, the user's code, and the plan it came from, if it did."""

    request: dict[str, Any]
    code: Code = Code()
    content: str = ""
    """The digest of the code."""
    plan: Plan | None = None
    typed: Typed | None = None
    """The spec and the flags of the command line, to type them again; a request from a file has none."""
    preempt_after: float | None = None
    """Seconds from the replicas' start to a preemption."""
    docker: bool = False
    """In containers, instead of as processes: the user's code is the image's then."""
    image: str | None = None
    """The image that the containers are of; None: what the request says."""
    job_id: str | None = None
    """The job that is played: somebody else submitted it, and has its run folder and its locks. None: one of ours."""
