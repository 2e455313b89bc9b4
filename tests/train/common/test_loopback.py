"""Which addresses are this machine's: what is wrong here sends a password to somebody else, or in the clear."""

from __future__ import annotations

import pytest

from launch_train.common.loopback import is_loopback, is_plain_loopback
from launch_train.common.storage import client
from launcher.gcp import api
from launcher.inputs import gcloud_config
from launcher.services.local import container_settings

HERE = ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "[::1]"]
ELSEWHERE = [
    *("127.evil.com", "127.0.0.1.nip.io", "localhost.evil.com", "evil.com", "127.0.0.1.", "127.1", "0127.0.0.1"),
    *("127.0.0.1@evil.com", "localhost:80@evil.com", "evil.com@127.0.0.1", "127.0.0.1\\@evil.com"),
    *("evil.com\\@127.0.0.1", "evil.com#@127.0.0.1", "[::1].evil.com", "[::1]@evil.com", "[2001:db8::1]", "128.0.0.1"),
    *("", "localhost evil.com", "127.0.0.1\n.evil.com", "127.0.0.1%2eevil.com", "metadata.google.internal"),
]


@pytest.mark.parametrize("end", ["", ":5000", "/v2/", ":5000/v2/?a=b@c#d"])
@pytest.mark.parametrize("host", HERE)
def test_this_machine(host: str, end: str) -> None:
    assert is_loopback(host + end)
    assert is_loopback(f"https://{host}{end}")
    assert is_plain_loopback(f"http://{host}{end}")
    assert is_plain_loopback(f"HTTP://{host}{end}")
    assert not is_plain_loopback(f"https://{host}{end}")
    assert not is_plain_loopback(host + end)


@pytest.mark.parametrize("end", ["", ":5000", "/v2/", "/@127.0.0.1", "?@localhost"])
@pytest.mark.parametrize("host", ELSEWHERE)
def test_others(host: str, end: str) -> None:
    assert not is_loopback(host + end)
    assert not is_plain_loopback(f"http://{host}{end}")


@pytest.mark.parametrize("host", [host for host in ELSEWHERE if host])
def test_nobody_takes_another_machine_for_this_one(host: str) -> None:
    url = f"http://{host}"
    assert not gcloud_config.is_here("COMPUTE", {"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": url})
    assert container_settings.network("7", [url]) == "launch-7"
    assert api.credentials({}, url) is None
    assert client.storage_credentials({}, url) is None
