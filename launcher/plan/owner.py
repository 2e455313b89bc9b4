"""The owner label of jobs and VMs: whose run it is. No access control: whoever may create jobs can set any label."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

from launcher.jobs.job import OWNER_LABEL

OwnerStyle = Literal["hashed", "plain", "none"]
HASH_DIGITS = 16


def owner_value(account: str, style: OwnerStyle) -> str:
    """Return the value of the owner label; empty without an account or with `none`.

    `hashed` keeps addresses out of bills and logs, but whoever has a list of addresses can hash them too.
    """
    from launcher.plan.names import label_value

    name = account.lower()
    if not name or style == "none":
        return ""
    return label_value(name) if style == "plain" else hashlib.sha256(name.encode()).hexdigest()[:HASH_DIGITS]


def is_owned_by(labels: Mapping[str, str], account: str) -> bool:
    """Return whether the owner label names this account, in either style; False without a label or an account."""
    owner = labels.get(OWNER_LABEL, "")
    return bool(owner) and owner in (owner_value(account, "hashed"), owner_value(account, "plain"))


def is_of_another(labels: Mapping[str, str], account: str) -> bool:
    """Return whether the owner label names another account; False without a label, as older launches left it."""
    return OWNER_LABEL in labels and not is_owned_by(labels, account)
