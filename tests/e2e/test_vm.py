"""`launch vm SPEC --run` with VMs that boot: the startup script really runs, its container is a process of this
machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.testing.googlecloud import GoogleCloud, Pace
from tests.e2e.running import TINY, run, started
from tests.registry import OciRegistry, put_image
from tests.startup.park import Park

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 1200
VMS = "zones: [us-central1-a, us-central1-b]\nprovisioning: spot\noutput: gs://my-bucket/runs\n"


class Site(NamedTuple):
    """A cloud whose VMs boot, and a spec."""

    cloud: GoogleCloud
    park: Park
    folder: Path
    env: dict[str, str]

    def stored(self, part: str) -> dict[str, bytes]:
        """What lies in the bucket under names with this in them."""
        return {blob.name: blob.data for blob in self.cloud.objects.listed("my-bucket") if part in blob.name}

    def rows(self) -> list[dict[str, Any]]:
        """The metrics, in the order of their parts."""
        parts = [data for _, data in sorted(self.stored("/metrics/").items())]
        return [json.loads(line) for part in parts for line in part.decode().splitlines()]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with GoogleCloud() as cloud, OciRegistry() as registry, Park(cloud, tmp_path / "vms") as park:
        cloud.compute.pace = Pace(staging=0.1, running=0.2, delete=0.2, stop=0.5, notice=20)
        image = f"{registry.host}/p/train@{put_image(registry, 'p/train')}"
        spec = TINY.replace("steps: 12", f"steps: {STEPS}").replace("every: 6", "every: 0")
        spec += "    loader: {workers: 2}\n"  # which the preemption must leave alone
        (tmp_path / "tiny.yaml").write_text(f"{spec}{VMS}image: {{uri: '{image}'}}\n")
        yield Site(cloud, park, tmp_path, {**cloud.environ(), "DOCKER_CONFIG": "/nonexistent"})


def test_preempted_it_goes_on_elsewhere_and_no_step_is_lost(site: Site) -> None:
    process = started("vm", "tiny.yaml", "--run", "--no-preflight", "-o", "json", cwd=site.folder, env=site.env)
    with process:
        until = time.monotonic() + 600
        while not any(row.get("step", 0) >= 100 for row in site.rows()):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.1)
        site.cloud.compute.capacity.out("us-central1-a")
        site.cloud.compute.preempt(site.cloud.compute.names()[0])
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert (found["state"], found["zone"], found["results"]["steps"]) == ("SUCCEEDED", "us-central1-b", STEPS)
    assert "Compute Engine is preempting this VM" in err
    (left,) = [row for row in site.rows() if row.get("event") == "resumed"]
    before = [row["step"] for row in site.rows() if "event" not in row and row["step"] <= left["step"]]
    assert before == list(range(1, left["step"] + 1))  # all that was done is there, and was done once
    records = [json.loads(data) for data in site.stored("/machines/").values()]
    assert [record["exit"] for record in sorted(records, key=lambda one: one["started"])] == [75, 0]
    assert site.cloud.compute.names() == []


def test_a_run_is_cancelled_after_it_has_saved(site: Site) -> None:
    begun = run("vm", "tiny.yaml", "--run", "--no-preflight", "--detach", "-o", "json", cwd=site.folder, env=site.env)
    assert begun.returncode == 0, begun.stderr
    name = json.loads(begun.stdout)["run"]
    until = time.monotonic() + 600
    while not any(row.get("step", 0) >= 20 for row in site.rows()):
        assert time.monotonic() < until
        time.sleep(0.1)
    ended = run("cancel", name, cwd=site.folder, env=site.env)
    assert f"{name} cancelled" in ended.stdout, ended.stderr
    assert site.cloud.compute.names() == []
    assert site.stored("/checkpoints/")
    shown = run("status", f"gs://my-bucket/runs/{name}", cwd=site.folder, env=site.env)
    assert "cancelled after" in shown.stdout
