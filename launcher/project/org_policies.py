"""Check a project against its organization policies: which constraints stop a job. Pure.

A policy is the project's effective one (Org Policy API v2). What can't be decided from it, such as a rule with a
condition or a value group whose members are unknown, is unknown. Constraints and values:
https://cloud.google.com/resource-manager/docs/organization-policy/org-policy-constraints
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from launcher.errors import LaunchError
from launcher.project.model import Check, Found, Needs, unread

LOCATIONS: Final = "gcp.resourceLocations"
CMEK: Final = "gcp.restrictNonCmekServices"
SERVICES: Final = "gcp.restrictServiceUsage"
EXTERNAL_IP: Final = "compute.vmExternalIpAccess"
SHIELDED: Final = "compute.requireShieldedVm"
IMAGES: Final = "compute.trustedImageProjects"

CONTINENTS: Final = ("us", "asia", "europe", "australia", "southamerica")
"""Value groups whose members are the regions that begin with their name."""

Matches = Callable[[str], bool | None]
"""Whether a value of a policy covers what is needed; None: unknown."""


def constraints(needs: Needs) -> tuple[str, ...]:
    """Return the constraints that can stop the jobs."""
    common = (LOCATIONS, CMEK, SERVICES)
    if needs.service == "vertex":
        return common
    return (*common, SHIELDED, IMAGES, *((EXTERNAL_IP,) if needs.external_ip else ()))


def check_policies(needs: Needs, found: Found) -> Iterator[Check]:
    """Check each constraint. All constraints that forbid nothing share one line."""
    answers = {
        constraint: found[f"policy {constraint}"]
        for constraint in constraints(needs)
        if f"policy {constraint}" in found
    }
    problems = [
        check
        for name, policy in answers.items()
        for check in (
            [unread("policy", policy)] if isinstance(policy, LaunchError) else problems_of(name, needs, policy or {})
        )
    ]
    yield from dict.fromkeys(problems)
    if answers and not problems:
        yield Check("policy", "ok", "no organization policy stops a job")


def problems_of(name: str, needs: Needs, policy: Mapping[str, Any]) -> Iterator[Check]:
    """Yield what one policy forbids, or that this can't be determined."""
    if name == LOCATIONS:
        for region in needs.regions:
            text = f"{name} does not allow {region}"
            yield from refused(needs, name, is_allowed(policy, region_in(region)), text, describe(needs, name), region)
    elif name == CMEK and not needs.key:
        allowed, text = is_allowed(policy, named(needs.api)), f"{name}: {needs.api} needs a customer-managed key"
        fix = f"launch {needs.service} … --set identity.kms_key=projects/P/locations/L/keyRings/R/cryptoKeys/K"
        yield from refused(needs, name, allowed, text, fix)
    elif name == SERVICES:
        for api in needs.apis:
            allowed = is_allowed(policy, named(api))
            yield from refused(needs, name, allowed, f"{name} does not allow {api}", describe(needs, name))
    elif name == SHIELDED:
        text = f"{name} requires Secure Boot, which launch's VMs don't have: it refuses NVIDIA's driver"
        fix = f"gcloud resource-manager org-policies disable-enforce {name} --project={needs.project}"
        enforced = is_enforced(policy)
        yield from refused(needs, name, None if enforced is None else not enforced, text, fix)
    elif name == IMAGES and needs.image_project not in ("", needs.project):  # own images are always allowed
        value = f"projects/{needs.image_project}"
        text = f"{name} does not allow boot images of {needs.image_project}"
        fix = f"gcloud resource-manager org-policies allow {name} {value} --project={needs.project}"
        yield from refused(needs, name, is_allowed(policy, named(value, "under:")), text, fix)
    elif name == EXTERNAL_IP:
        text = f"{name} allows no external IP; without --external-ip, VMs use IAP and Cloud NAT"
        fix = "launch setup --for vm --yes\nlaunch vm … --set vm.external_ip=false"
        own = f"projects/{needs.project}/"  # its new VM may or may not be one that a value names
        allowed = is_allowed(policy, lambda value: None if value.removeprefix("is:").startswith(own) else False)
        yield from refused(needs, name, allowed, text, fix)


def refused(needs: Needs, name: str, allowed: bool | None, text: str, fix: str, place: str = "") -> Iterator[Check]:
    """Yield the result unless the policy allows it."""
    if allowed is None:
        text = f"{name} is not checked: its rules have conditions, or groups that launch does not know"
        yield Check("policy", "unknown", text, describe(needs, name), place)
    elif not allowed:
        yield Check("policy", "failed", text, fix, place)


def describe(needs: Needs, name: str) -> str:
    return f"gcloud org-policies describe {name} --effective --project={needs.project}"


# --- Rules ------------------------------------------------------------------------------------------------------------


def is_enforced(policy: Mapping[str, Any]) -> bool | None:
    """Return whether a boolean constraint is enforced; None: its rules have conditions."""
    rules = rules_of(policy)
    if any(rule.get("condition") for rule in rules):
        return None
    return any(rule.get("enforce", False) for rule in rules)


def is_allowed(policy: Mapping[str, Any], matches: Matches) -> bool | None:
    """Return whether a list constraint allows what `matches` covers; None: unknown. Without rules all is allowed."""
    rules = rules_of(policy)
    if any(rule.get("condition") for rule in rules):
        return None
    if any(rule.get("denyAll") for rule in rules):
        return False
    values = [rule.get("values") or {} for rule in rules]
    denied = [matches(str(value)) for each in values for value in each.get("deniedValues", ())]
    allowed = [matches(str(value)) for each in values for value in each.get("allowedValues", ())]
    if any(rule.get("allowAll") for rule in rules) or not allowed:
        allowed = [True]
    if True in denied or not {True, None} & {*allowed}:
        return False
    return None if None in denied or True not in allowed else True


def rules_of(policy: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(policy.get("spec") or {}).get("rules", ())]


# --- Values -----------------------------------------------------------------------------------------------------------


def named(wanted: str, *groups: str) -> Matches:
    """Return the rule for values that name something; those that begin with one of `groups` are unknown."""

    def matches(value: str) -> bool | None:
        return None if value.startswith(("in:", *groups)) else value.removeprefix("is:") == wanted

    return matches


def region_in(region: str) -> Matches:
    """Return the rule for locations: a region, its group (in:us-central1-locations), a continent (in:us-locations), or
    one of its zones (unknown)."""

    def matches(value: str) -> bool | None:
        group = value.startswith("in:")
        name = value.removeprefix("in:").removeprefix("is:").removesuffix("-locations" if group else "")
        if name == region:
            return True
        if group and (name in CONTINENTS or re.fullmatch(r"[a-z]+-[a-z]+\d+", name)):
            return region.startswith(f"{name}-")
        return None if group or name.startswith(f"{region}-") else False

    return matches
