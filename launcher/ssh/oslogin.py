"""OS Login: a user's name on VMs, and the registered SSH keys.

It calls the REST API through google-auth's session, because two calls don't need a client library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UsageError
from launcher.gcp.api import Api, Service, UnreachableError, open_session, service_account, status_of

SERVICE: Final = Service("oslogin", "OS Login", "roles/compute.osAdminLogin")


class Profiles:
    """users.getLoginProfile and users.importSshPublicKey, with the method signatures that `Api` expects.

    https://cloud.google.com/compute/docs/oslogin/rest/v1/users
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises NotAuthorised: no credentials were found."""
        self._session, self._endpoint = open_session(SERVICE, environ)

    @property
    def account(self) -> str:
        """Return the service account of the credentials. Empty for a user's credentials."""
        return service_account(self._session.credentials)

    def profile(self, *, request: Mapping[str, Any], retry: None, timeout: float) -> Any:
        """Return the LoginProfile as JSON."""
        params = {"projectId": request["project"]}
        url = f"{self._endpoint}/v1/users/{quote(request['user'])}/loginProfile"
        return parse_response(self._session.get(url, params=params, timeout=timeout))

    def import_key(self, *, request: Mapping[str, Any], retry: None, timeout: float) -> Any:
        """Import a key, which may be imported already; return the ImportSshPublicKeyResponse as JSON."""
        params = {"projectId": request["project"], "regions": request["region"]}
        url = f"{self._endpoint}/v1/users/{quote(request['user'])}:importSshPublicKey"
        return parse_response(self._session.post(url, params=params, json={"key": request["key"]}, timeout=timeout))


def parse_response(response: Any) -> Any:
    """Return a response's JSON. Raises the exceptions of Google's own clients."""
    from google.api_core.exceptions import from_http_response

    if response.status_code != 200:
        raise from_http_response(response)
    try:
        return response.json()
    except ValueError as error:
        raise UnreachableError(f"{SERVICE.title}: incomplete response: {error}", "Try again in a moment.") from error


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
        profiles = Profiles(environ)
        self._api = Api(SERVICE, project, profiles, clock, notice)
        self._account = profiles.account or account

    def user(self, key: str, region: str, now: float) -> str:
        """Return the user name; register a public key for it if needed.

        Raises:
            UsageError: the account is unknown.
            LaunchError: refused, or no answer for a minute.
        """
        profile = self._profile()
        if not (name := oslogin_user(profile)) or not has_key(profile, key, now):
            arguments = {"user": self._account, "project": self._api.project, "key": key, "region": region}
            profile = self._api.ask("import_key", **arguments).get("loginProfile", {})
            name = oslogin_user(profile)
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
            return self._api.ask("profile", user=self._account, project=self._api.project)
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
