"""What a registry asks for, and the answer to it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from launcher.errors import NotAuthorised
from launcher.images.registry import Registry, RegistryError
from launcher.images.registry.credentials import Challenge, challenges
from launcher.testing.clock import FakeClock
from tests.images.registry.helpers import MIB, OCI, REPOSITORY, client, manifest, opens, send, some
from tests.registry import Basic, Bearer, Fault, OciRegistry, Refuse, Reset, digest
from tests.registry.access import Access

USERS = {"me": "s3cret"}
Home = Callable[..., Mapping[str, str]]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Writes docker's configuration with a login for one registry; answers the environment that leads to it."""

    def write(registry: OciRegistry, user: str = "me", password: str = "s3cret", **entry: str) -> Mapping[str, str]:
        auth = base64.b64encode(f"{user}:{password}".encode()).decode()
        config = {"auths": {registry.host: entry or {"auth": auth}}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return {"DOCKER_CONFIG": str(tmp_path)}

    return write


def push(made: Registry, repository: str = REPOSITORY) -> None:
    """An image of one layer, part of which is taken over."""
    send(made, b"layer", f"{repository}-dependencies")
    assert made.mount(repository, digest(b"layer"), f"{repository}-dependencies")
    send(made, b"{}", repository)
    made.put_manifest(repository, "t", manifest(b"layer"), OCI)


@pytest.mark.parametrize("access", [Basic(USERS), Bearer(USERS), Bearer(USERS, denies=403)], ids=["b", "t", "t403"])
def test_a_login_opens_a_registry(access: Access, time: FakeClock, home: Home) -> None:
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        push(made)
        assert made.head(REPOSITORY, "t") == registry.tag(REPOSITORY, "t")
        assert made.manifest(REPOSITORY, "t")
        assert made.blob(REPOSITORY, digest(b"{}")) == b"{}"


@pytest.mark.parametrize("access", [Basic(USERS), Bearer(USERS)], ids=["basic", "token"])
def test_wrong_credentials_are_named_and_not_shown(access: Access, time: FakeClock, home: Home) -> None:
    with OciRegistry(access=access) as registry:
        with client(registry, time, home(registry, password="wr0ng")) as made, pytest.raises(NotAuthorised) as caught:
            send(made, b"layer")
        assert caught.value.exit_code == 4
        assert f"{registry.host}/{REPOSITORY}: send {digest(b'layer')}: HTTP 401 UNAUTHORIZED" in str(caught.value)
        assert "docker's configuration (refused)" in str(caught.value)
        assert f"docker login {registry.host}" in str(caught.value)
        assert "wr0ng" not in str(caught.value)
        assert base64.b64encode(b"me:wr0ng").decode() not in str(caught.value)
        assert not time.waited


@pytest.mark.parametrize("access", [Basic(USERS), Bearer(USERS)], ids=["basic", "token"])
def test_no_credentials(access: Access, time: FakeClock) -> None:
    with OciRegistry(access=access) as registry, client(registry, time) as made:
        with pytest.raises(NotAuthorised, match=r"Tried: docker's configuration \(nothing for this registry\)"):
            send(made, b"layer")
        with pytest.raises(NotAuthorised, match="look for t"):
            made.head(REPOSITORY, "t")


def test_a_public_image_needs_no_login(time: FakeClock) -> None:
    access = Bearer(USERS, reads={None: frozenset({"public/base"})})
    with OciRegistry(access=access) as registry, client(registry, time) as made:
        registry.store.add("public/base", b"layer")
        assert made.blob("public/base", digest(b"layer")) == b"layer"
        assert access.issued == [(None, ("repository:public/base:pull",))]
        with pytest.raises(NotAuthorised, match=r"no credentials \(refused\)"):
            send(made, b"layer", "public/base")


def test_a_token_is_asked_for_once(time: FakeClock, home: Home) -> None:
    access = Bearer(USERS, clock=time)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        push(made)
        push(made)
        push_scope, source = f"repository:{REPOSITORY}:pull,push", f"repository:{REPOSITORY}-dependencies"
        assert access.issued == [
            ("me", (f"{source}:pull,push",)),
            ("me", (push_scope, f"{source}:pull")),
            ("me", (push_scope,)),
        ]
        unauthorised = [request for request in registry.requests if "authorization" not in request.headers]
        assert len(unauthorised) == 1, "once the registry has asked, nothing is sent twice"


def test_a_token_is_renewed_before_it_expires(time: FakeClock, home: Home) -> None:
    access = Bearer(USERS, lifetime=100, clock=time)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        for seconds in (0, 80, 15, 80):  # 95 of 100 seconds are too near to the end
            time.advance(seconds)
            made.head(REPOSITORY, "t")
        assert len(access.issued) == 2
        time.advance(1000)
        made.head(REPOSITORY, "t")
        assert len(access.issued) == 3
        assert len([one for one in registry.requests if "authorization" not in one.headers]) == 1


def test_a_service_that_gives_no_lifetime_means_a_minute(time: FakeClock, home: Home) -> None:
    access = Bearer(USERS, reports_lifetime=False, clock=time)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        for seconds in (0, 50, 5):
            time.advance(seconds)
            made.head(REPOSITORY, "t")
        assert len(access.issued) == 2


def test_a_token_that_dies_under_way_is_renewed(time: FakeClock, home: Home) -> None:
    access, data = Bearer(USERS, clock=time), some(10 * MIB)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        made.check_write(REPOSITORY)
        made.upload(REPOSITORY, digest(data), len(data), opens(data), lambda _done: access.tokens.clear())
        assert registry.store.blob(REPOSITORY, digest(data)) == data
        assert len(access.issued) == 2
        assert not time.waited


def test_a_token_service_is_given_time(time: FakeClock, home: Home) -> None:
    with OciRegistry(access=Bearer(USERS)) as registry, client(registry, time, home(registry)) as made:
        registry.faults.add(Fault("token", Refuse(503, retry_after=2)))
        registry.faults.add(Fault("token", Reset()))
        assert made.head(REPOSITORY, "t") is None
        assert time.waited == [2.0, 1.0]
        registry.faults.add(Fault("token", Refuse(503), times=None))
        with pytest.raises(RegistryError, match=r"ask for a token at http://.*/token: HTTP 503 .*\(tried 5 times\)"):
            made.head("other", "t")


def test_an_identity_token_is_exchanged(time: FakeClock, home: Home) -> None:
    access = Bearer(USERS, identity_tokens={"me": "1dentity"})
    with OciRegistry(access=access) as registry:
        with client(registry, time, home(registry, identitytoken="1dentity")) as made:
            push(made)
        assert {name for name, _ in access.issued} == {"me"}
        assert "POST" in {request.method for request in registry.requests if request.step == "token"}
        with client(registry, time, home(registry, identitytoken="0ther")) as made, pytest.raises(NotAuthorised) as no:
            push(made)
        assert "0ther" not in str(no.value)


@pytest.mark.parametrize("denies", [401, 403])
def test_a_login_without_the_right(time: FakeClock, home: Home, denies: int) -> None:
    access = Bearer(USERS, reads={"me": frozenset({REPOSITORY})}, denies=403 if denies == 403 else 401)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        assert made.head(REPOSITORY, "t") is None
        with pytest.raises(NotAuthorised, match=rf"send .*HTTP {denies} (DENIED|UNAUTHORIZED)[^\n]*\nTried: docker's"):
            send(made, b"layer")
        assert made.head(REPOSITORY, "t") is None, "what was taken before still is"


def test_cancelling_needs_no_right_of_its_own(time: FakeClock, home: Home) -> None:
    """Docker's registry wants the right to delete for it; who may only push must not lose the login over that."""
    access = Bearer(USERS)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        assert not made.mount(REPOSITORY, digest(b"layer"), "other")
        assert registry.steps[-1] == "upload.cancel"
        send(made, b"layer")
        assert {name for name, _ in access.issued} == {"me"}


@pytest.mark.parametrize(
    ("realm", "says"),
    [
        ("http://tokens.example.com/token", "no TLS: 'http://tokens.example.com/token'"),
        ("ftp://127.0.0.1/token", "no TLS"),
        ("/token", "no TLS"),
    ],
)
def test_a_password_goes_nowhere_in_the_clear(time: FakeClock, home: Home, realm: str, says: str) -> None:
    access = Bearer(USERS, realm=realm)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        with pytest.raises(RegistryError, match=says):
            made.head(REPOSITORY, "t")
        assert registry.steps == ["manifest.head"]


def test_an_unknown_challenge_is_refused(made: Registry, registry: OciRegistry) -> None:
    registry.faults.add(Fault("manifest.head", Refuse(401)))
    with pytest.raises(RegistryError, match="it asks for 'nothing', not for Basic or Bearer"):
        made.head(REPOSITORY, "t")


def test_threads_share_a_token(time: FakeClock, home: Home) -> None:
    access = Bearer(USERS)
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        threads = [threading.Thread(target=send, args=(made, some(1000, seed))) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(registry.store.repository(REPOSITORY).blobs) == 8
        assert len(access.issued) == 1


def test_the_next_credentials_are_tried(time: FakeClock, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a registry of Google's there are several places to look in; one with old ones must not hide the others."""
    monkeypatch.setattr("launcher.images.registry.credentials.is_googles", lambda host: True)
    access = Bearer({"oauth2accesstoken": "new", "me": "s3cret"})
    with OciRegistry(access=access) as registry:
        environ = {**home(registry), "CLOUDSDK_AUTH_ACCESS_TOKEN": "0ld"}
        with client(registry, time, environ) as made:
            push(made)
            assert {name for name, _ in access.issued} == {"me"}
        with client(registry, time, {**environ, "CLOUDSDK_AUTH_ACCESS_TOKEN": "new"}) as made:
            push(made)
            assert access.issued[-1][0] == "oauth2accesstoken"
        bad = {**home(registry, password="wr0ng"), "CLOUDSDK_AUTH_ACCESS_TOKEN": "0ld", "PATH": "/nowhere"}
        with client(registry, time, bad) as made, pytest.raises(NotAuthorised) as caught:
            push(made)
        assert "CLOUDSDK_AUTH_ACCESS_TOKEN (refused), docker's configuration (refused)" in str(caught.value)


def test_a_password_that_was_changed_is_read_again(time: FakeClock, home: Home) -> None:
    """A push may last longer than an access token: its source is asked again, which renews it."""
    access = Bearer({"me": "s3cret"})
    with OciRegistry(access=access) as registry, client(registry, time, home(registry)) as made:
        send(made, b"layer")
        access.users = {"me": "newer"}
        access.tokens.clear()
        home(registry, password="newer")
        send(made, b"another")
        assert registry.store.blob(REPOSITORY, digest(b"another"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ('Basic realm="a b"', [Challenge("basic", "a b")]),
        (
            'Bearer realm="https://h/t",service="s",scope="repository:a:pull,push repository:b:pull",error="x"',
            [Challenge("bearer", "https://h/t", "s", "repository:a:pull,push repository:b:pull")],
        ),
        (
            'Negotiate, bearer  realm = "https://h/\\"t" , service=s, Basic realm=x',
            [Challenge("negotiate"), Challenge("bearer", 'https://h/"t', "s"), Challenge("basic", "x")],
        ),
        ('Bearer realm=""', [Challenge("bearer")]),
    ],
)
def test_challenges_as_servers_write_them(text: str, expected: list[Challenge]) -> None:
    assert challenges(text) == expected
