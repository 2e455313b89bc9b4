"""What ssh and gcloud's tunnel say, explained."""

from __future__ import annotations

import pytest

from launcher.errors import LaunchError, NotAuthorised
from launcher.ssh.errors import explain
from tests.ssh.vms import machine

ME = {"account": "me@example.com", "member": "user:me@example.com"}
FACTS = {"user": "me_example_com", "port": "22", "known_hosts": "/h/known_hosts", **ME}
CLOSED = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535"


def tunnel(words: str) -> str:
    """gcloud's own line, as 528 writes it, and what ssh makes of it."""
    return f"ERROR: [0] Error during local connection to [stdin]: Error while connecting [{words}].\n{CLOSED}"


CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Host key for compute.1 has changed and you have requested strict checking.
Host key verification failed."""
LOGGED_OUT = """ERROR: (gcloud.compute.start-iap-tunnel) You do not currently have an active account selected.
Please run:

  $ gcloud auth login
"""
DENIED = "me_example_com@compute.1: Permission denied (publickey)."
REFUSED = "ssh: connect to host 203.0.113.7 port 22: Connection refused"
TIMED_OUT = "ssh: connect to host 203.0.113.7 port 22: Connection timed out"


@pytest.mark.parametrize(
    ("log", "problem", "hint", "passing"),
    [
        (tunnel("4003: 'failed to connect to backend'"), "4003: failed to connect to backend", "--network=big", True),
        (
            tunnel("4003: 'failed to connect to backend'"),
            "from port 22 of dev",
            "--source-ranges=35.235.240.0/20",
            True,
        ),
        (tunnel("4033: 'not authorized'"), "me@example.com may not", "role=roles/iap.tunnelResourceAccessor", False),
        (tunnel("4047: 'Failed to lookup instance'"), "4047: Failed to lookup instance", "vm status dev", True),
        (tunnel("4010: 'destination read failed'"), "4010: destination read failed", "vm status dev", True),
        (tunnel("Handshake status 403 Forbidden"), "may not open a tunnel", "tunnelResourceAccessor", False),
        (tunnel("[Errno -2] Name or service not known"), "[Errno -2] Name or service", "tunnel.cloudproxy.app", True),
        (LOGGED_OUT, "gcloud, which opens the tunnel to dev, is not logged in", "gcloud auth login", False),
        (CHANGED, "the host key of dev has changed", "ssh-keygen -R compute.5000000000000000001", False),
        (
            "No ED25519 host key is known for compute.1 and",
            "the host key of dev has changed",
            "-f /h/known_hosts",
            False,
        ),
        (DENIED, "dev refused the SSH key of me_example_com", "--role=roles/compute.osAdminLogin", True),
        (DENIED, "permission denied (publickey)", "vm@my-project.iam.gserviceaccount.com --project", True),
        (REFUSED, "dev refuses SSH connections", "launch vm status dev", True),
        (TIMED_OUT, "can't connect to dev:\n    ssh: connect to host 203.0.113.7 port 22", "--iap", True),
        ("Connection to 203.0.113.7 closed by remote host.", "was lost", "launch vm status dev", True),
        ("client_loop: send disconnect: Broken pipe", "was lost:\n    client_loop", "Was it stopped?", True),
        ("Timeout, server 203.0.113.7 not responding.", "was lost", "Was it stopped?", True),
        (
            "bind [127.0.0.1]:80: Address already in use\nCould not request",
            "can't forward a port of this machine:\n    bind",
            "LOCAL",
            False,
        ),
    ],
)
def test_known_failures(log: str, problem: str, hint: str, passing: bool) -> None:
    found = explain(log, machine(), FACTS)
    assert found
    assert problem in found.error.problem
    assert hint in found.error.hint
    assert found.passing is passing
    assert "{" not in str(found.error)
    assert max(map(len, f"error: {found.error}".splitlines())) <= 80, str(found.error)


@pytest.mark.parametrize("log", [tunnel("4033: 'not authorized'"), LOGGED_OUT, DENIED])
def test_a_missing_right_has_its_own_exit_code(log: str) -> None:
    found = explain(log, machine(), FACTS)
    assert found
    assert isinstance(found.error, NotAuthorised)


def test_an_unknown_failure_is_shown_as_it_is() -> None:
    found = explain("no such cipher\nfatal: something new\n", machine(), FACTS)
    assert found
    assert type(found.error) is LaunchError
    assert found.error.problem == "ssh to dev failed: no such cipher\nfatal: something new"


@pytest.mark.parametrize(
    "log",
    [
        "",
        "Warning: Permanently added 'compute.1' (ED25519) to the list of known hosts.\r\n",
        "Connection to compute.1 closed.\r\n",
        "WARNING: \n\nTo increase the performance of the tunnel, consider installing NumPy. For instructions,\n"
        "please see https://cloud.google.com/iap/docs/using-tcp-forwarding#increasing_the_tcp_upload_bandwidth\n",
    ],
)
def test_a_command_that_ends_with_255_is_no_failure_of_sshs(log: str) -> None:
    assert explain(f"{log}debug1: Exit status 255\r\n", machine(), FACTS) is None
    lost = explain(f"{log}debug1: Exit status -1\r\n", machine(), FACTS)
    assert lost
    assert lost.error.problem == "the connection to dev was lost"


def test_a_vm_without_an_account_needs_no_grant_on_it() -> None:
    found = explain(DENIED, machine(request={}), FACTS)
    assert found
    assert "service-accounts" not in found.error.hint
