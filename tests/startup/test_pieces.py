"""The startup script's functions, each by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.node import cluster
from tests.plan.planning import request
from tests.startup.shell import SCRIPT, call, told_text

TRAINING: dict[str, Any] = {"provisioning": ["spot"], "output": "gs://b-b/a folder"}
ME = ("42", "job-1", "my-project", "us-central1-a")
"""number, name, project and zone."""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The script's folder, with what a VM that trains is told."""
    (tmp_path / "told.json").write_text(told_text(request("vm", world={"run_id": "job-1"}, **TRAINING)))
    return tmp_path


def words(state: Path, *arguments: str) -> list[str]:
    """The last arguments of docker run."""
    ran = call(state, 'told words "$@"', *arguments)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\0")[:-1]


def variables(found: list[str]) -> dict[str, str]:
    """The container's environment."""
    pairs = [word.partition("=") for before, word in pairwise(found) if before == "--env"]
    return {name: value for name, _, value in pairs}


def test_shellcheck_finds_nothing() -> None:
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", SCRIPT], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_the_container_of_a_single_node(state: Path) -> None:
    found = words(state, *ME, "")
    env = variables(found)
    told = json.loads((state / "told.json").read_text())
    assert found[-len(told["arguments"]) - 3 :] == ["--entrypoint", "python", told["image"], *told["arguments"]]
    assert env.items() >= told["env"].items()
    assert env[contract.JOB_ID] == "42"
    where = cluster.parse_cluster(env[contract.CLUSTER_SPEC], {})
    assert where.nodes == ("job-1.us-central1-a.c.my-project.internal:2222",)
    assert where.cloud
    assert json.loads(env["LAUNCH_MACHINE"]) == {
        "project": "my-project",
        "zone": "us-central1-a",
        "name": "job-1",
        "instance": "42",
    }
    assert "--volume" not in found
    assert "TMPDIR" not in env


@pytest.mark.parametrize("node", [0, 1, 2])
def test_the_container_of_one_node_of_three(tmp_path: Path, node: int) -> None:
    machine = {"type": "l4", "gpus": 2, "nodes": 3}
    body = request("vm", world={"run_id": "r"}, machine=machine, zones=["us-central1-a"], **TRAINING)
    (tmp_path / "told.json").write_text(told_text(body))
    env = variables(words(tmp_path, "42", f"r-n{node}", *ME[2:], ""))
    where = cluster.parse_cluster(env[contract.CLUSTER_SPEC], {})
    assert where.node == node
    assert where.nodes == tuple(f"r-n{n}.us-central1-a.c.my-project.internal:2222" for n in range(3))
    assert (contract.JOB_ID in env) == (node == 0)


def test_a_vm_that_is_none_of_the_nodes_starts_nothing(state: Path) -> None:
    ran = call(state, 'told words "$@"', "42", "another", *ME[2:], "")
    assert ran.returncode != 0
    assert "'another' is not in list" in ran.stderr


def test_local_ssds_are_the_scratch_unless_the_spec_names_another(tmp_path: Path) -> None:
    for own, env in (("/mnt/localssd", {}), ("/elsewhere", {"TMPDIR": "/elsewhere"})):
        (tmp_path / "told.json").write_text(told_text(request("vm", world={"run_id": "job-1"}, env=env, **TRAINING)))
        found = words(tmp_path, *ME, "/mnt/localssd")
        assert variables(found)["TMPDIR"] == own
        assert found[found.index("--volume") + 1] == "/mnt/localssd:/mnt/localssd"


def test_the_record_is_where_the_contract_says(state: Path) -> None:
    bucket, name, _ = call(state, 'told item "$1"', "42").stdout.split("\0")
    assert bucket == "b-b"
    assert name == f"a folder/job-1/{runfolder.machine_end('42')}".replace(" ", "%20").replace("/", "%2F")


def test_the_record_takes_any_reason(state: Path) -> None:
    reason = 'it\'s "quoted" \\ and\nlong é \udcff' + "x" * 5000
    ran = call(state, 'told record "$@"', "70", reason, "n", "z", "1", "2", "")
    record = json.loads(ran.stdout)
    assert record.pop("reason").startswith('it\'s "quoted" \\ and\nlong é ?x')
    assert record == {"exit": 70, "name": "n", "zone": "z", "started": 1, "ended": 2, "cleanup": ""}
    assert len(ran.stdout) < 2300


@pytest.mark.parametrize(
    ("image", "asks"),
    [
        ("us-docker.pkg.dev/p/r/i@sha256:0", True),
        ("eu.gcr.io/p/i", True),
        ("gcr.io/p/i", True),
        ("docker.io/library/i", False),
        ("localhost:5000/i", False),
        ("evil-gcr.io/i", False),
        ("pkg.dev.example.com/i", False),
    ],
)
def test_the_token_is_for_googles_registries_alone(tmp_path: Path, image: str, asks: bool) -> None:
    (tmp_path / "told.json").write_text(json.dumps({"image": image}))
    config = json.loads(call(tmp_path, "told helpers").stdout)
    assert config == ({"credHelpers": {image.partition("/")[0]: "launch"}} if asks else {})


def test_docker_gets_the_token_of_the_vms_account(tmp_path: Path) -> None:
    code = "token() { echo t-1; }; printf us-docker.pkg.dev | credential get"
    answer = json.loads(call(tmp_path, code).stdout)
    assert answer == {"ServerURL": "us-docker.pkg.dev", "Username": "oauth2accesstoken", "Secret": "t-1"}
    assert call(tmp_path, "token() { echo t-1; }; echo x | credential store").stdout == ""
    assert call(tmp_path, "token() { return 1; }; echo x | credential get").returncode == 1


@pytest.mark.parametrize(
    ("now", "active", "lease", "moved", "idle", "why"),
    [
        (1000, 1000, "", "", "", ""),
        (1099, 1099, "100", "", "", ""),
        (1100, 1100, "100", "", "", "its lease is over"),
        (1100, 1100, "100", "1200", "", ""),
        (1200, 1200, "100", "1200", "", "its lease is over"),
        (1050, 1050, "100", "1040", "", "its lease is over"),
        (1050, 1050, "100", "999", "", ""),
        (1050, 1050, "", "1040", "", "its lease is over"),
        (1419, 1000, "", "", "420", ""),
        (1420, 1000, "", "", "420", "idle for 7 minutes"),
        (1420, 1400, "", "", "420", ""),
        (1420, 1000, "100", "", "420", "its lease is over"),
    ],
)
def test_when_a_vm_stops_itself(
    tmp_path: Path, now: int, active: int, lease: str, moved: str, idle: str, why: str
) -> None:
    """It was started at 1000. A deadline from before that is of an earlier life."""
    ran = call(tmp_path, 'due "$@"', str(now), "1000", str(active), lease, moved, idle)
    assert ran.stdout.strip() == why
    assert (ran.returncode == 0) == bool(why)


@pytest.mark.parametrize(
    ("ssh", "cpu", "gpus", "used"),
    [
        ("", "3", "0\\n5\\n", False),
        ("ESTAB 10.0.0.2:22 1.2.3.4:50000", "3", "0\\n0\\n", True),
        ("", "10", "0\\n", True),
        ("", "3", "0\\n6\\n", True),
        ("", "3", "[N/A]\\n", False),
    ],
)
def test_what_counts_as_used(tmp_path: Path, ssh: str, cpu: str, gpus: str, used: bool) -> None:
    stand_ins = f"ss() {{ printf '{ssh}'; }}; timeout() {{ printf '{gpus}'; }}; cpu_percent() {{ echo {cpu}; }}"
    assert (call(tmp_path, f"{stand_ins}; active").returncode == 0) == used


def test_a_vm_whose_connections_can_not_be_read_counts_as_used(tmp_path: Path) -> None:
    stand_ins = "ss() { return 1; }; timeout() { echo 0; }; cpu_percent() { echo 0; }"
    assert call(tmp_path, f"{stand_ins}; active").returncode == 0


def test_the_cpus_are_counted_between_two_looks(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("0 0\n")
    shown = int(call(tmp_path, "cpu_percent").stdout)
    busy, everything = map(int, (tmp_path / "cpu").read_text().split())
    assert 0 < busy < everything
    assert shown == 100 * busy // everything
    assert 0 <= int(call(tmp_path, "cpu_percent").stdout) <= 100


@pytest.mark.parametrize(
    ("status", "answer", "at"),
    [
        ("200", '{"lastStartTimestamp": "2026-11-20T00:00:10.5-08:00"}', "1795161610"),
        ("200", "{}", "7"),
        ("403", "", "7"),
        ("000", "", "7"),
    ],
)
def test_a_lease_is_counted_from_googles_own_start_else_from_the_boot(
    tmp_path: Path, status: str, answer: str, at: str
) -> None:
    (tmp_path / "given").write_text(answer)
    code = f'request() {{ cp "$STATE/given" "$STATE/answer"; printf {status}; }}; BOOTED=7 NUMBER=1 PROJECT=p ZONE=z'
    assert call(tmp_path, f"{code}; last_start").stdout.strip() == at


def test_again_gives_up(tmp_path: Path) -> None:
    ran = call(tmp_path, "one() { echo try; return 1; }; again 3 one")
    assert (ran.returncode, ran.stdout.split()) == (1, ["try"] * 3)


def test_the_script_needs_nothing_of_its_environment(tmp_path: Path) -> None:
    """systemd starts it with next to none: an unset name would end it."""
    ran = subprocess.run(
        ["bash", "-c", f'source "{SCRIPT}"; echo "$METADATA $COMPUTE $STORAGE"'],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        cwd=tmp_path,
    )
    assert ran.stdout.split() == [
        "http://metadata.google.internal/computeMetadata/v1",
        "https://compute.googleapis.com/compute/v1/",
        "https://storage.googleapis.com",
    ]


@pytest.mark.parametrize("text", ["a[$(touch canary)]", "x", "1.5"])
def test_what_is_no_number_is_never_calculated_with(tmp_path: Path, text: str) -> None:
    (tmp_path / "told.json").write_text(json.dumps({"lease_seconds": text}))
    ran = call(tmp_path, 'cd "$STATE"; due 10 0 10 "$(told number lease_seconds)" "" ""')
    assert (ran.returncode, ran.stdout) == (1, "")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("status", "text", "moved"),
    [
        ("200", "123", "123"),
        ("200", "a[$(touch canary)]", None),
        ("200", "09", None),
        ("404", "", ""),
        ("503", "", None),
    ],
)
def test_a_lease_that_was_moved_is_a_number_or_unknown(
    tmp_path: Path, status: str, text: str, moved: str | None
) -> None:
    (tmp_path / "given").write_text(text)
    code = f'curl() {{ cp "$STATE/given" "$STATE/moved"; echo {status}; }}; lease_moved'
    ran = call(tmp_path, code)
    assert (ran.stdout if ran.returncode == 0 else None) == moved
