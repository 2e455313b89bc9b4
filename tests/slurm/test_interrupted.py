"""Ends that Slurm makes without a notice, on a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.remote.hosts import NAME, launch
from tests.slurm.cluster import SlurmCluster, until_true
from tests.slurm.recipe import losses
from tests.slurm.test_slurm import cluster, jobs_on, login, output, slower, trains, undisturbed
from tests.ssh.server import SshServer

__all__ = ["cluster", "login", "undisturbed"]
pytestmark = pytest.mark.slow


def test_a_job_that_slurm_itself_requeues_continues(
    login: SshServer, cluster: SlurmCluster, undisturbed: Callable[[], dict[int, float]]
) -> None:
    slower(150)
    assert launch("slurm", "job.yaml", "--on", NAME, "--cpu", "--detach").returncode == 0
    until_true(lambda: trains(login), lambda: output(login))
    (job,) = jobs_on(login)
    number = str(job["number"])
    cluster.run("scontrol", "requeue", number)  # as after the failure of a node, or a preemption without a grace time
    until_true(lambda: cluster.states()[number] == "PENDING", lambda: str(cluster.states()))
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    until_true(lambda: cluster.states()[number] == "COMPLETED", lambda: str(cluster.states()) + output(login), 240)
    assert "succeeded" in launch("status", job["run"]).stdout, output(login)
    starts = json.loads((login.home / "launch" / "jobs" / job["id"] / "starts.json").read_bytes())
    assert len(starts) == 2
    assert losses(login.home / "launch" / "runs" / job["run"]) == undisturbed()


def test_a_job_that_is_interrupted_as_it_begins_is_queued_again(login: SshServer, cluster: SlurmCluster) -> None:
    """Before its nodes can save, and know a signal."""
    assert launch("slurm", "job.yaml", "--on", NAME, "--cpu", "--detach").returncode == 0
    (job,) = jobs_on(login)
    number, folder = str(job["number"]), login.home / "launch" / "jobs" / job["id"]
    until_true((folder / "starts.json").exists)
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    until_true(lambda: cluster.states()[number] == "PENDING", lambda: str(cluster.states()) + output(login), 240)
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    until_true(lambda: cluster.states()[number] == "COMPLETED", lambda: str(cluster.states()) + output(login), 240)
    assert "succeeded" in launch("status", job["run"]).stdout, output(login)
