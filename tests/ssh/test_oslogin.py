"""Who we are on VMs, by an OS Login on loopback."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.ssh.oslogin import OsLogin
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Status

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIGkLOz9sGmX5Uspr me@here"
ME = "me@example.com"
GET, IMPORT = "oslogin.users.getLoginProfile", "oslogin.users.importSshPublicKey"


@pytest.fixture
def login(cloud: GoogleCloud, clock: FakeClock) -> OsLogin:
    return OsLogin("my-project", cloud.environ(), ME, Clock(clock, clock.advance))


def imports(cloud: GoogleCloud) -> list[Any]:
    return [(one.query, one.body) for one in cloud.requests if one.method == "POST"]


def test_a_key_is_registered_once(cloud: GoogleCloud, login: OsLogin) -> None:
    assert login.known_user() == ""
    assert login.user(KEY, "us-central1", 0.0) == "me_example_com"
    assert imports(cloud) == [({"projectId": "my-project", "regions": "us-central1"}, {"key": KEY})]
    again = KEY.replace("me@here", "another comment")
    assert login.user(again, "us-central1", 0.0) == login.known_user() == "me_example_com"
    assert len(imports(cloud)) == 1


def test_an_expiring_key_is_registered_again(cloud: GoogleCloud, login: OsLogin) -> None:
    login.user(KEY, "us-central1", 0.0)
    for kept in cloud.oslogin.keys[ME].values():
        kept["expirationTimeUsec"] = str(1000 * 10**6)
    login.user(KEY, "us-central1", 900.0)
    assert len(imports(cloud)) == 1
    login.user(KEY, "us-central1", 950.0)
    assert len(imports(cloud)) == 2


def test_another_key(cloud: GoogleCloud, login: OsLogin) -> None:
    login.user(KEY, "us-central1", 0.0)
    login.user(KEY.replace("Uspr", "Other"), "us-central1", 0.0)
    assert len(cloud.oslogin.keys[ME]) == 2


def test_an_outage_passes(cloud: GoogleCloud, login: OsLogin) -> None:
    for operation in (GET, IMPORT):
        cloud.faults.add(Fault(operation, Status(503), times=2))
    assert login.user(KEY, "us-central1", 0.0) == "me_example_com"


def test_nobody_has_a_profile_yet(cloud: GoogleCloud, login: OsLogin) -> None:
    cloud.faults.add(Fault(GET, Status(404)))
    assert login.user(KEY, "us-central1", 0.0) == "me_example_com"


def test_an_api_that_is_off(cloud: GoogleCloud, login: OsLogin) -> None:
    cloud.faults.add(Fault(GET, Status(403, info="SERVICE_DISABLED"), times=None))
    with pytest.raises(LaunchError, match="OS Login API is disabled") as caught:
        login.known_user()
    assert "gcloud services enable oslogin.googleapis.com --project=my-project" in caught.value.hint


def test_a_missing_permission(cloud: GoogleCloud, login: OsLogin) -> None:
    cloud.faults.add(Fault(IMPORT, Status(403), times=None))
    with pytest.raises(NotAuthorised) as caught:
        login.user(KEY, "us-central1", 0.0)
    assert "--role=roles/compute.osAdminLogin" in caught.value.hint


def test_an_unknown_account(cloud: GoogleCloud) -> None:
    with pytest.raises(UsageError, match="gcloud has none") as caught:
        OsLogin("my-project", cloud.environ(), "").known_user()
    assert "--user" in caught.value.hint
