"""Secrets: read on the node, handed to its processes, and told to nobody else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.errors import UsageError
from launch_train.common.secrets import SecretError, SecretReader, UnavailableError, read_secrets
from launcher.testing.googlecloud import Fault, GoogleCloud, Reset, Stalled, Status, Torn, Truncated
from tests.train.nodes import Machines, Node, machines

CANARY = "canary-7f3a91c2d4"
ACCESS = "secretmanager.projects.secrets.versions.access"
HF = "projects/my-project/secrets/hf/versions/latest"


def environ(cloud: GoogleCloud, **secrets: str) -> dict[str, str]:
    return {**cloud.environ(), contract.SECRETS: json.dumps(secrets or {"HF_TOKEN": HF})}


def read(cloud: GoogleCloud, **secrets: str) -> Mapping[str, str]:
    return SecretReader(environ(cloud, **secrets), seconds=5).read()


def told(cloud: GoogleCloud, kind: type[Exception] = SecretError, **secrets: str) -> str:
    with pytest.raises(kind) as refused:
        read(cloud, **secrets)
    assert CANARY not in "".join(map(str, (refused.value, refused.value.__cause__)))
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return str(refused.value)


def test_values_by_their_variables(cloud: GoogleCloud) -> None:
    cloud.secrets.add("hf", b"old")
    cloud.secrets.add("hf", "newér\n".encode())
    first = "projects/my-project/secrets/hf/versions/1"
    assert read(cloud, NEW=HF, OLD=first) == {"NEW": "newér\n", "OLD": "old"}


def test_without_secrets_nobody_is_asked() -> None:
    assert SecretReader({}, seconds=5).read() == {}


def test_what_is_said_of_them(cloud: GoogleCloud) -> None:
    cloud.secrets.add("hf", f"{CANARY}\n".encode())
    lines: list[str] = []
    before = dict(os.environ)
    found = read_secrets(environ(cloud), 5, lambda ask: ask(), lines.append)
    assert found == {"HF_TOKEN": f"{CANARY}\n"}
    assert lines == [
        "warning: the secret HF_TOKEN ends with a newline, which is part of its value",
        "read from Secret Manager: HF_TOKEN",
    ]
    assert dict(os.environ) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"A": 1}', '{"A": "hf"}', '{"A": "https://x/secrets/a/versions/1"}'])
def test_references_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="LAUNCH_SECRETS must be a JSON object"):
        SecretReader({contract.SECRETS: text}, seconds=5)


# --- What can't be read, and what to do about it ----------------------------------------------------------------------


def test_a_missing_grant_is_named_to_the_letter(cloud: GoogleCloud) -> None:
    cloud.secrets.deny("hf")
    assert told(cloud) == (
        f"secret HF_TOKEN ({HF}) can't be read: the job's service account has no access, or it doesn't exist: "
        "gcloud secrets add-iam-policy-binding hf --project=my-project --member=serviceAccount:ACCOUNT "
        "--role=roles/secretmanager.secretAccessor"
    )


def test_the_account_is_named_where_it_is_known(cloud: GoogleCloud) -> None:
    cloud.secrets.deny("hf")
    vault = SecretReader(environ(cloud), seconds=5)
    with pytest.raises(SecretError):
        vault.read()
    vault._session.credentials.service_account_email = "trainer@my-project.iam.gserviceaccount.com"
    with pytest.raises(SecretError) as refused:
        vault.read()
    assert "trainer@my-project.iam.gserviceaccount.com has no access" in str(refused.value)
    assert "--member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role" in str(refused.value)


def test_what_isnt_there(cloud: GoogleCloud) -> None:
    assert "gcloud secrets versions list hf --project=my-project" in told(cloud)
    cloud.secrets.add("hf", CANARY.encode())
    assert "versions/9] not found" in told(cloud, A=HF.replace("latest", "9"))


def test_a_version_that_is_disabled(cloud: GoogleCloud) -> None:
    cloud.secrets.disable("hf", cloud.secrets.add("hf", CANARY.encode()))
    assert "is in DISABLED state" in told(cloud)
    assert told(cloud, A=HF.replace("latest", "1")).endswith(
        "gcloud secrets versions enable 1 --secret=hf --project=my-project"
    )


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("SERVICE_DISABLED", "gcloud services enable secretmanager.googleapis.com --project=my-project"),
        ("ACCESS_TOKEN_SCOPE_INSUFFICIENT", "identity.service_account"),
    ],
)
def test_what_403_means_is_in_its_reason(cloud: GoogleCloud, reason: str, words: str) -> None:
    cloud.faults.add(Fault(ACCESS, Status(403, info=reason)))
    assert words in told(cloud)


def test_credentials_that_are_not_accepted(cloud: GoogleCloud) -> None:
    cloud.let_in("good")
    cloud.secrets.add("hf", CANARY.encode())
    assert read(cloud) == {"HF_TOKEN": CANARY}
    names = environ(cloud)
    cloud.tokens = {"better"}
    with pytest.raises(SecretError, match="secret HF_TOKEN: Secret Manager rejected the credentials"):
        SecretReader(names, seconds=5).read()


@pytest.mark.parametrize("value", [b"\xff" + CANARY.encode(), CANARY.encode() + b"\0"])
def test_a_value_that_is_no_environment_variable(cloud: GoogleCloud, value: bytes) -> None:
    cloud.secrets.add("hf", value)
    assert "can't be an environment variable" in told(cloud)


# --- What passes ------------------------------------------------------------------------------------------------------

PASSING = [Status(429), Status(500), Status(502), Status(503), Reset("before"), Reset("after"), Truncated(), Torn()]


@pytest.mark.parametrize("effect", PASSING, ids=str)
def test_what_passes_is_asked_again(cloud: GoogleCloud, effect: Status) -> None:
    cloud.secrets.add("hf", CANARY.encode())
    cloud.secrets.add("other", b"2")
    cloud.faults.add(Fault(ACCESS, effect, name="other"))
    vault = SecretReader(environ(cloud, A=HF, B=HF.replace("hf", "other")), seconds=5)
    with pytest.raises(UnavailableError, match="secret B") as away:
        vault.read()
    assert CANARY not in str(away.value)
    assert vault.read() == {"A": CANARY, "B": "2"}
    assert sum("/hf/" in asked.path for asked in cloud.requests) == 1  # what was read isn't asked for again


def test_a_server_that_says_nothing_takes_no_longer_than_a_request_may(cloud: GoogleCloud) -> None:
    cloud.faults.add(Fault(ACCESS, Stalled()))
    with pytest.raises(UnavailableError, match="is unreachable"):
        SecretReader(environ(cloud), seconds=0.2).read()


def test_no_flipped_bit_gets_through(cloud: GoogleCloud) -> None:
    cloud.secrets.add("hf", CANARY.encode())
    torn = 0
    for at in range(0, 131, 3):
        cloud.faults.add(Fault(ACCESS, Torn(at=at)))
        vault = SecretReader(environ(cloud), seconds=5)
        with suppress(UnavailableError):
            torn += 1
            assert vault.read() == {"HF_TOKEN": CANARY}  # it was a bit of something else, the version's name say
            torn -= 1
    assert torn > 10


# --- On a node --------------------------------------------------------------------------------------------------------

SHOWS = """
import hashlib, os, sys
print(sorted(name for name in os.environ if os.environ[name] == sys.argv[1][::-1]))
print(hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest())
raise SystemExit(int(sys.argv[2]))
"""


@pytest.fixture
def start(tmp_path: Path, cloud: GoogleCloud) -> Iterator[Callable[..., Node]]:
    """Starts nodes whose run folder is in the bucket."""
    with machines(tmp_path) as machine:
        yield lambda *argv, **env: on(machine, cloud, *argv, **env)


def on(machine: Machines, cloud: GoogleCloud, *argv: str, **env: str) -> Node:
    (machine.folder / "spools").mkdir(exist_ok=True)
    folder = {"LAUNCH_RUN_FOLDER": "gs://my-bucket/runs/r", "LAUNCH_SPOOL": str(machine.folder / "spools")}
    script = machine.script(SHOWS)
    names = {**environ(cloud), **folder, contract.RESTARTS: "1", **env}
    timing = {"text": 0.2, "retry_every": 0.05}
    return machine.start("--launcher", "python", "--script", script, "--", *argv, env=names, timing=timing)


def everywhere(cloud: GoogleCloud, folder: Path, node: Node) -> bytes:
    """All that a node leaves: its log, the bucket, what it asked of the cloud, and files of its own."""
    bucket = b"".join(blob.name.encode() + blob.data for blob in cloud.objects.listed("my-bucket"))
    asked = "".join(f"{request.method} {request.path} {request.body!r}" for request in cloud.requests)
    files = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return node.text.encode() + bucket + asked.encode() + files


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_value_reaches_the_processes_and_nothing_else(
    tmp_path: Path, cloud: GoogleCloud, start: Callable[..., Node], exit_code: int
) -> None:
    cloud.secrets.add("hf", CANARY.encode())
    node = start(CANARY[::-1], str(exit_code))
    assert node.wait() == (Exit.FAILED if exit_code else Exit.OK)
    assert "['HF_TOKEN']" in node.text
    assert "read from Secret Manager: HF_TOKEN" in node.text
    left = everywhere(cloud, tmp_path, node)
    assert b"['HF_TOKEN']" in left.replace(node.text.encode(), b"")  # the text in the bucket was looked at too
    assert CANARY.encode() not in left


@pytest.mark.slow
def test_a_node_without_the_grant_stops_and_may_start_again(cloud: GoogleCloud, start: Callable[..., Node]) -> None:
    cloud.secrets.add("hf", CANARY.encode())
    cloud.secrets.deny("hf")
    node = start(CANARY[::-1], "0")
    assert node.wait() == Exit.UNFIT
    assert "gcloud secrets add-iam-policy-binding hf --project=my-project" in node.text
    assert not [blob for blob in cloud.objects.listed("my-bucket") if blob.name.endswith(runfolder.TERMINAL)]
    cloud.secrets.allow("hf")
    assert start(CANARY[::-1], "0").wait() == Exit.OK


def test_a_node_waits_for_secret_manager(cloud: GoogleCloud, start: Callable[..., Node]) -> None:
    cloud.secrets.add("hf", CANARY.encode())
    cloud.faults.add(Fault(ACCESS, Status(503), times=3))
    node = start(CANARY[::-1], "0")
    assert node.wait() == Exit.OK
    assert "Secret Manager answers 503; retrying" in node.text
