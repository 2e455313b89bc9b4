"""What `launch vertex --dry-run -o yaml` prints is taken by the real gcloud, unchanged, as the same request.

The gcloud command is the one that stands above the YAML; only the file's name is put in. A loopback cloud receives
what gcloud posts, and it must be the plan's first request, field by field.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import GoogleCloud, parse_custom_job, parse_instance
from launcher.testing.googlecloud.protobufs import to_json
from tests.rendered import JOB_SPECS, difference, gcloud_command, plan, rendered

VERTEX = sorted([*JOB_SPECS.glob("vertex-*.yaml"), *JOB_SPECS.glob("default.yaml")])
VMS = sorted(JOB_SPECS.glob("vm-*.yaml"))

NASTY = [
    *("n", "y", "N", "no", "off", "On", "TRUE", "null", "~", "", "017", "0o17", "0x1f", "1:30", "1_000", "1.0", ".5"),
    *("1e3", "1e-4", "12e03", ".inf", ".nan", "2026-11-20", "2026-11-20 10:00:00", "=", "<<", "!a", "&a", "*a", "@a"),
    *("%a", "- a", "-", "--", "?", "a: b", "a:", "a #b", "#a", " a", "a ", "'a'", '"a"', "[a", "{a", "a,b", "|", ">"),
    *(
        "---",
        "...",
        "\\n",
        "a\nb\n",
        "a\tb",
        "é",
        "日本",
        "😀",
        "\u0085",
        "\u2028",
        "$HOME",
        "%s",
        "#!/bin/sh\na b",
        "x y " * 60,
    ),
]
EVERYTHING = {
    "name": "everything",
    "machine": {"type": "a3-highgpu-8g", "nodes": 3, "boot_disk_gb": 200, "boot_disk_type": "pd-ssd"},
    "provisioning": "reservation:projects/p/zones/us-central1-a/reservations/y",
    "regions": ["us-central1"],
    "image": {"base": "us-docker.pkg.dev/p/r/with-the-plugin@sha256:" + "1" * 64},
    "run": {"command": ["echo", *NASTY]},
    "env": {f"V{n}": value for n, value in enumerate(NASTY[:60]) if value},
    "output": "gs://my-bucket/runs",
    "limits": {"hours": 12.5, "wait": "90m", "restarts": 0},
    "identity": {
        "service_account": "trainer@my-project.iam.gserviceaccount.com",
        "kms_key": "projects/p/locations/us-central1/keyRings/n/cryptoKeys/y",
        "psc": {
            "network_attachment": "n",
            "dns_peering": [{"domain": "a.b.", "target_project": "off", "target_network": "y"}],
        },
    },
    "mounts": [
        {"bucket": "on-1e3"},
        {"nfs": "10.0.0.2:/0x1f", "path": "/mnt/nfs/1e3"},
        {"lustre": "10.0.0.3@tcp:/y", "volume_handle": "1:30", "path": "/mnt/lustre/no"},
    ],
    "labels": {"team": "no", "n": "1e3", "empty": ""},
    "vertex": {
        "tensorboard": "projects/p/locations/us-central1/tensorboards/1",
        "web_access": True,
        "dashboard_access": True,
        "nfs": [{"server": "10.0.0.2", "path": "/1e3", "mount_point": "on"}],
        "lustre": [{"instance_ip": "10.0.0.3", "volume_handle": "1:30", "filesystem": "n", "mount_point": "l"}],
        "reduction_server": {"replicas": 2},
    },
}
NETWORK = {
    "name": "network",
    "machine": {"type": "l4", "gpus": 2},
    "provisioning": "standard",
    "regions": ["us-central1"],
    "run": {"config": {"data": "/gcs/data/$(HOME) n", "optimizer": {"lr": 1e-4}, "steps": 10}},
    "output": "gs://my-bucket/runs",
    "identity": {"network": "projects/1/global/networks/n", "reserved_ip_ranges": ["y", "0x1f"]},
    "vertex": {"experiment": "no", "experiment_run": "1e3", "persistent_resource": "y"},
}


def test_there_are_specs() -> None:
    assert VERTEX
    assert VMS


@pytest.mark.gcloud
@pytest.mark.parametrize("spec", VERTEX, ids=lambda path: path.stem)
def test_gcloud_sends_what_the_plan_says(spec: Path, gcloud: str, cloud: GoogleCloud, tmp_path: Path) -> None:
    assert_gcloud_agrees(spec, cloud, gcloud, tmp_path)


@pytest.mark.gcloud
@pytest.mark.parametrize("spec", [EVERYTHING, NETWORK], ids=["everything", "network"])
def test_gcloud_reads_every_field_and_every_text_as_it_is(
    spec: dict[str, Any], gcloud: str, cloud: GoogleCloud, tmp_path: Path
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(spec).replace(r"\ud83d\ude00", r"\U0001f600"))  # YAML has no surrogate pairs
    assert_gcloud_agrees(file, cloud, gcloud, tmp_path)


@pytest.mark.parametrize("spec", VERTEX, ids=lambda path: path.stem)
def test_each_request_is_a_custom_job(spec: Path) -> None:
    attempts = plan("vertex", spec)["attempts"]
    assert attempts
    for attempt in attempts:
        parse_custom_job(attempt["request"])


@pytest.mark.parametrize("spec", VMS, ids=lambda path: path.stem)
def test_each_request_is_an_instance(spec: Path) -> None:
    attempts = plan("vm", spec)["attempts"]
    assert attempts
    for attempt in attempts:
        parse_instance(attempt["request"])


def assert_gcloud_agrees(spec: Path, cloud: GoogleCloud, gcloud: str, folder: Path) -> None:
    """The request that gcloud posts for the rendered file is the plan's first one."""
    first = plan("vertex", spec)["attempts"][0]
    text = rendered("vertex", spec, "yaml")
    config = folder / "job.yaml"
    config.write_text(text)
    done = run(cloud, command(text, gcloud, config))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    [arrived] = [request for request in cloud.requests if request.method == "POST"]
    assert arrived.path == f"/v1/projects/my-project/locations/{first['region']}/customJobs"
    sent, planned = (to_json(type(job).pb(job)) for job in map(parse_custom_job, (arrived.body, first["request"])))
    differences = list(difference(sent, planned))
    assert not differences, "gcloud sent != the plan says\n" + "\n".join(differences)


def command(text: str, gcloud: str, config: Path) -> list[str]:
    """The command above the YAML, with the real gcloud and the real file put in."""
    name, *rest = gcloud_command(text)
    assert name == "gcloud"
    assert rest[:3] == ["ai", "custom-jobs", "create"]
    placed = [f"--config={config}" if argument.startswith("--config=") else argument for argument in rest]
    assert f"--config={config}" in placed
    return [gcloud, *placed]


def run(cloud: GoogleCloud, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cloud.environ()}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_difference_names_the_field() -> None:
    left, right = {"a": [{"b": 1}], "c": False}, {"a": [{"b": 2}], "d": "x"}
    assert list(difference(left, right)) == ["a[0].b: 1 != 2", "c: false != (absent)", 'd: (absent) != "x"']
    assert list(difference({"a": True}, {"a": 1})) == ["a: true != 1"]
    assert list(difference({"a": [1]}, {"a": [1, 2]})) == ["a: [1] != [1, 2]"]
    assert not list(difference(left, left))


def test_the_command_is_read_over_its_lines() -> None:
    text = "# to send it:\n# gcloud ai custom-jobs create \\\n#   --region=r \\\n#   '--display-name=a b'\nx: 1\n"
    assert gcloud_command(text) == ["gcloud", "ai", "custom-jobs", "create", "--region=r", "--display-name=a b"]
