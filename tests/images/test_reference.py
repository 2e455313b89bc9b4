"""Names of images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.images.reference import (
    ArtifactRepository,
    Reference,
    artifact_repository,
    check_repository,
    is_googles,
    parse,
    scheme,
)

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:5000/a/b:t", Reference("localhost:5000", "a/b", "t")),
        (f"localhost/a@{DIGEST}", Reference("localhost", "a", None, DIGEST)),
        (
            f"us-docker.pkg.dev/p/r/train:0a1b@{DIGEST}",
            Reference("us-docker.pkg.dev", "p/r/train", "0a1b", DIGEST),
        ),
        ("[::1]:5000/a", Reference("[::1]:5000", "a")),
        ("nvidia/cuda:12.9", Reference("docker.io", "nvidia/cuda", "12.9")),
        ("python", Reference("docker.io", "library/python")),
        ("python:3.12", Reference("docker.io", "library/python", "3.12")),
        ("host:5000/a.b_c__d---e", Reference("host:5000", "a.b_c__d---e")),
    ],
)
def test_a_reference_has_four_parts(text: str, expected: Reference) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a name"),
        ("host.io/", "'' is not a name"),
        ("host.io/A/b", "lower case: a/b"),
        ("host.io/a b", "'a b' is not a name"),
        ("host.io/a:", "'' is not a tag"),
        ("host.io/a:-t", "'-t' is not a tag"),
        ("host.io/a@", "'' is not a digest"),
        ("host.io/a@sha256:12", "is not a digest"),
        (f"host.io/a@{DIGEST}0", "is not a digest"),
        ("host.io/a//b", "is not a name"),
        ("-host.io/a", "is not a host"),
        ("https://host.io/a", "Remove the scheme"),
        ("host.io/" + "a" * 300, "more than 255 characters"),
        ("host.io/a\n", "is not a name"),
    ],
)
def test_invalid_references_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)


@given(st.text())
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError:
        return
    assert parse(str(reference)) == reference


def test_a_digest_pins() -> None:
    reference = parse("host.io/a:one")
    assert str(reference.with_digest(DIGEST)) == f"host.io/a:one@{DIGEST}"
    with pytest.raises(UsageError, match="'md5:1' is not a digest"):
        reference.with_digest("md5:1")


@pytest.mark.parametrize("host", ["localhost", "localhost:5000", "127.0.0.1:5000", "127.9.9.9", "[::1]", "[::1]:5000"])
def test_this_machine_needs_no_tls(host: str) -> None:
    assert scheme(host) == "http"


@pytest.mark.parametrize(
    "host", ["docker.io", "localhost.evil.com", "127.0.0.1.evil.com", "10.0.0.1:5000", "[2001:db8::1]:5000", ""]
)
def test_other_hosts_need_tls(host: str) -> None:
    assert scheme(host) == "https"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("us-docker.pkg.dev", True),
        ("gcr.io", True),
        ("eu.gcr.io", True),
        ("docker.io", False),
        ("evilgcr.io", False),
        ("pkg.dev.evil.com", False),
        ("evilpkg.dev", False),
    ],
)
def test_whose_credentials_are_for_google(host: str, expected: bool) -> None:
    assert is_googles(host) is expected


@pytest.mark.parametrize(
    "text",
    [
        "us-docker.pkg.dev/my-project/launch",
        "europe-west4-docker.pkg.dev/my-project/launch/team/vision",
        "us-docker.pkg.dev/example.com/my-project/launch",
        "localhost:5000/launch",
        "ghcr.io/me",
        "me/launch",
    ],
)
def test_repositories_that_are_accepted(text: str) -> None:
    check_repository(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("us-docker.pkg.dev/my-project", "LOCATION-docker.pkg.dev/PROJECT/REPOSITORY"),
        ("us-docker.pkg.dev/my/launch", "LOCATION-docker.pkg.dev/PROJECT/REPOSITORY"),
        ("us-docker.pkg.dev/my-project/1launch", "LOCATION-docker.pkg.dev/PROJECT/REPOSITORY"),
        ("us-python.pkg.dev/my-project/launch", "LOCATION-docker.pkg.dev/PROJECT/REPOSITORY"),
        ("docker.pkg.dev/my-project/launch", "LOCATION-docker.pkg.dev/PROJECT/REPOSITORY"),
        ("us-docker.pkg.dev/my-project/launch:latest", "launch adds name and tag itself"),
        ("gcr.io/my-project", "no writes since 2025-03-18"),
        ("gcr.io/my-project", "us-docker.pkg.dev/my-project/launch"),
        ("eu.gcr.io/my-project/train", "europe-docker.pkg.dev/my-project/launch"),
    ],
)
def test_repositories_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_repository(text)
    assert says in str(caught.value)


def test_the_place_of_an_image_in_artifact_registry() -> None:
    assert artifact_repository("us-docker.pkg.dev", "my-project/launch/train") == ArtifactRepository(
        "us", "my-project", "launch"
    )
    assert artifact_repository("us-docker.pkg.dev", "example.com/my-project/launch/train") == ArtifactRepository(
        "us", "example.com:my-project", "launch"
    )
    assert artifact_repository("localhost:5000", "my-project/launch/train") is None
    assert artifact_repository("us-docker.pkg.dev", "example.com") is None
