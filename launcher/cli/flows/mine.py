"""`--mine`: runs and VMs of gcloud's account."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.inputs.gcloud_config import person
from launcher.plan.names import is_owned_by


def is_mine(labels: Mapping[str, str]) -> bool:
    """Return whether the owner label names gcloud's account. Raises UsageError: gcloud has none."""
    account = person(os.environ)
    if not account:
        raise UsageError("--mine needs gcloud's account, and none is set", "gcloud auth login")
    return is_owned_by(labels, account)
