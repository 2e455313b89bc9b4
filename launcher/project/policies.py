"""Grant a role on a resource by reading its IAM policy and writing it back with its etag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from launcher.errors import LaunchError
from launcher.gcp.api import status_of
from launcher.gcp.rest import Rest
from launcher.project.reads import IAM, REGISTRY, RESOURCES, STORAGE

Policy = Mapping[str, Any]
CHANGED: Final = (409, 412)
"""The policy was changed since it was read (412: Cloud Storage)."""
TRIES: Final = 8


class PolicyOf:
    """The IAM policy of one resource. `read` and `write` raise LaunchError."""

    def __init__(self, read: Callable[[], Policy], write: Callable[[Policy], object]) -> None:
        self.read, self.write = read, write

    def has(self, role: str, member: str) -> bool:
        """Return whether a member has a role without a condition. Raises LaunchError."""
        return has_grant(self.read(), role, member)

    def grant(self, role: str, member: str) -> None:
        """Grant a role, keeping what others change at the same time. Raises LaunchError."""
        for left in reversed(range(TRIES)):
            policy = self.read()
            if has_grant(policy, role, member):
                return
            try:
                self.write(with_grant(policy, role, member))
            except LaunchError as error:
                if status_of(error) not in CHANGED or not left:
                    raise
            else:
                return


def of_project(rest: Rest) -> PolicyOf:
    """Return the project's policy."""
    path = f"/v1/projects/{rest.project}"
    return PolicyOf(
        lambda: rest(RESOURCES, f"{path}:getIamPolicy", verb="POST", body={"options": {"requestedPolicyVersion": 3}}),
        lambda policy: rest(RESOURCES, f"{path}:setIamPolicy", verb="POST", body={"policy": policy}),
    )


def of_account(rest: Rest, email: str) -> PolicyOf:
    """Return the policy of a service account of the project."""
    path = f"/v1/projects/{rest.project}/serviceAccounts/{email}"
    return PolicyOf(
        lambda: rest(IAM, f"{path}:getIamPolicy", verb="POST", params={"options.requestedPolicyVersion": "3"}),
        lambda policy: rest(IAM, f"{path}:setIamPolicy", verb="POST", body={"policy": policy}),
    )


def of_bucket(rest: Rest, bucket: str) -> PolicyOf:
    """Return a bucket's policy."""
    path = f"/storage/v1/b/{bucket}/iam"
    return PolicyOf(
        lambda: rest(STORAGE, path, params={"optionsRequestedPolicyVersion": "3"}),
        lambda policy: rest(STORAGE, path, verb="PUT", body=policy),
    )


def of_repository(rest: Rest, name: str) -> PolicyOf:
    """Return the policy of an Artifact Registry repository, by resource name."""
    return PolicyOf(
        lambda: rest(REGISTRY, f"/v1/{name}:getIamPolicy", params={"options.requestedPolicyVersion": "3"}),
        lambda policy: rest(REGISTRY, f"/v1/{name}:setIamPolicy", verb="POST", body={"policy": policy}),
    )


def has_grant(policy: Policy, role: str, member: str) -> bool:
    """Return whether a policy grants a role to a member without a condition."""
    return any(
        binding["role"] == role and member in binding.get("members", ()) and not binding.get("condition")
        for binding in policy.get("bindings", ())
    )


def with_grant(policy: Policy, role: str, member: str) -> dict[str, Any]:
    """Return the policy with one more member of a role."""
    bindings = [dict(binding) for binding in policy.get("bindings", ())]
    same = next((binding for binding in bindings if binding["role"] == role and not binding.get("condition")), None)
    if same is None:
        bindings.append({"role": role, "members": [member]})
    else:
        same["members"] = [*same.get("members", ()), member]
    return {**policy, "bindings": bindings}
