"""OS Login: a user's name on VMs, and the registered SSH keys.

https://cloud.google.com/compute/docs/oslogin/rest/v1/users
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UsageError
from launcher.gcp.api import Api, RestClient, Service, open_session, service_account, status_of

SERVICE: Final = Service("oslogin", "OS Login", "roles/compute.osAdminLogin")


class OsLogin:
    """The OS Login profile of the current account."""

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        account: str,
        clock: Clock = REAL,
        notice: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """`account`: gcloud's, for credentials that don't name their account. Raises NotAuthorised."""
        client = RestClient(SERVICE, *open_session(SERVICE, environ))
        self._api = Api(SERVICE, project, client, clock, notice)
        self._account = service_account(client.session.credentials) or account
        self._user = f"/v1/users/{quote(self._account)}"

    def user(self, key: str, region: str, now: float) -> str:
        """Return the user name; register a public key for it if needed.

        Raises UsageError: the account is unknown; LaunchError: refused, or no answer for a minute.
        """
        profile = self._profile()
        if not (name := oslogin_user(profile)) or not has_key(profile, key, now):
            params = {"projectId": self._api.project, "regions": region}
            answer = self._api.ask(
                "send", verb="POST", path=f"{self._user}:importSshPublicKey", params=params, json={"key": key}
            )
            name = oslogin_user(answer.get("loginProfile", {}))
        if not name:
            raise LaunchError(f"OS Login has no user name for {self._account}", "launch ssh NAME --user USER")
        return name

    def known_user(self) -> str:
        """Return the user name, or an empty string; registers nothing. Raises as `user` does."""
        return oslogin_user(self._profile())

    def _profile(self) -> Any:
        if not self._account:
            raise UsageError(
                "unknown account for OS Login: gcloud has none",
                "gcloud config set account YOU@EXAMPLE.COM\nOr name the user on the VM: launch ssh NAME --user USER",
            )
        try:
            return self._api.ask("send", path=f"{self._user}/loginProfile", params={"projectId": self._api.project})
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            return {}  # the account has no profile yet


def oslogin_user(profile: Mapping[str, Any]) -> str:
    """Return the user name of the primary POSIX account, else of the first one; empty: none."""
    accounts = profile.get("posixAccounts", [])
    account = next((each for each in accounts if each.get("primary")), accounts[0] if accounts else {})
    return str(account.get("username", ""))


def has_key(profile: Mapping[str, Any], key: str, now: float) -> bool:
    """Return whether a public key is registered and valid for at least a minute. `now`: Unix seconds."""
    for each in profile.get("sshPublicKeys", {}).values():
        until = int(each.get("expirationTimeUsec") or 0) / 1e6
        if each.get("key", "").split()[:2] == key.split()[:2] and (not until or until > now + 60):
            return True
    return False
