"""The run folder can be changed by others (docs/security.md): what `launch follow` and `--resume RUN` do with its
plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launcher.errors import LaunchError
from launcher.gcp.storage import open_folder
from launcher.jobs.job import PLAN_LABEL
from launcher.plan.binding import Stored
from launcher.runs.identity_check import request_id
from launcher.runs.ledger import Ledger
from launcher.runs.stored_plan import is_bound
from launcher.services import request
from launcher.services.compute.backend import Vms
from launcher.services.compute.client import Compute
from launcher.services.vertex import Vertex, endpoint_of
from launcher.testing.googlecloud import FakeClock
from launcher.testing.googlecloud.compute.service import YOU
from tests.cli.cloudjobs import FAILED, FULL, RUNS, WELL, Job, scripts
from tests.cli.commands.vm.test_run import RUN, inserts
from tests.runs.vm_runs import VmSite, exits, is_preempted
from tests.services.compute.vm_site import ZONE, work_body

EVIL = "registry.example.com/p/train@sha256:" + "e" * 64
Change = Callable[[dict[str, Any]], None]


def of_requests(change: Change) -> Change:
    """A change of every attempt's request."""

    def changed(plan: dict[str, Any]) -> None:
        for attempt in plan["attempts"]:
            change(attempt["request"].get("instanceProperties", attempt["request"]))

    return changed


def container(request: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = request["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    return found


def image(plan: dict[str, Any]) -> None:
    plan["image"] |= {"uri": EVIL, "pinned": True}
    of_requests(lambda one: container(one).update(imageUri=EVIL))(plan)


def region(plan: dict[str, Any]) -> None:
    for attempt in plan["attempts"]:
        attempt["region"] = "europe-west4"


def run_folder(plan: dict[str, Any]) -> None:
    plan["run_folder"] = "gs://my-bucket/others"


CHANGES: dict[str, tuple[Change, str]] = {
    "serviceAccount": (of_requests(lambda one: one["jobSpec"].update(serviceAccount="admin@p.iam")), "admin@p.iam"),
    "command": (of_requests(lambda one: container(one).update(command=["sh", "-c", "id"])), "sh -c id"),
    "image": (image, EVIL),
    "env": (of_requests(lambda one: container(one)["env"].append({"name": "PIP_URL", "value": "evil"})), "env.PIP_URL"),
    "region": (region, "europe-west4"),
    "project": (lambda plan: plan.update(project="other-project"), "other-project"),
    "run_folder": (run_folder, "gs://my-bucket/others"),
    "wait": (lambda plan: plan["limits"].update(wait_seconds=1), ""),
    "unknown field": (lambda plan: plan["attempts"][1].update(field_of_another_launch=1), ""),
}


def tamper(job: Job, run: str, change: Change) -> None:
    """Change the run's plan.json, as the job's own service account could."""
    name = f"runs/{run}/{runfolder.PLAN}"
    plan = json.loads(job.cloud.objects.buckets["my-bucket"][name].data)
    change(plan)
    job.cloud.objects.put("my-bucket", name, json.dumps(plan).encode())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_plan_is_never_submitted(job: Job, name: str) -> None:
    change, shown = CHANGES[name]
    scripts(job.cloud, FULL, WELL)
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    tamper(job, run, change)
    followed = job.launch("follow", run, code=4)
    assert len(job.created) == 1
    assert shown in followed.err
    assert f"launch vertex SPEC --resume {run}" in followed.err
    assert job.launch("vertex", "--resume", run, code=4).err.count(f"launch vertex SPEC --resume {run}") == 1
    assert len(job.created) == 1
    assert not [one for one in job.cloud.requests if "others" in one.path]
    assert "succeeded" in job.launch("vertex", "job.yaml", "--resume", run).out  # with its spec it continues
    (_, first), (_, second) = job.created
    assert first["labels"] == second["labels"]
    assert first["jobSpec"]["workerPoolSpecs"] == second["jobSpec"]["workerPoolSpecs"]


def test_a_run_with_a_changed_plan_is_watched_to_its_end(job: Job) -> None:
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    tamper(job, run, CHANGES["command"][0])
    assert f"{run} succeeded" in job.launch("follow", run).out


def test_a_failed_job_stays_failed_despite_a_changed_plan(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    tamper(job, run, CHANGES["command"][0])
    job.launch("follow", run, code=3)


def test_a_planted_job_vouches_only_for_itself(job: Job) -> None:
    """Who may create jobs, but not as the victim's account, copies the labels of a plan of his own."""
    scripts(job.cloud, FULL, FULL, WELL)
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    tamper(job, run, CHANGES["serviceAccount"][0])
    (_, body), *_ = job.created
    planted = {**body, "labels": {**body["labels"], PLAN_LABEL: stored(job, run).digest}}
    Vertex("my-project", job.cloud.environ()).create_in("us-central1", planted)
    job.launch("follow", run, code=4)
    assert len(job.created) == 2


def stored(job: Job, run: str) -> Stored:
    """The plan in the run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", job.cloud.url)
        found = Ledger.open(f"gs://my-bucket/runs/{run}").stored()
    assert found is not None
    return found


def plant_vm(job: Job, run: str, zone: str, user: str) -> None:
    """Somebody creates a VM with the request id of the folder's plan, and the folder names it as the first job."""
    token = f"token-of-{user}"
    job.cloud.compute.actors[token] = user
    as_user = {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "", "CLOUDSDK_AUTH_ACCESS_TOKEN": token}
    compute = Compute("my-project", {**job.cloud.environ(), **as_user})
    found = stored(job, run)
    body = {**work_body("planted", zone), "labels": request.labels(found.plan.attempts[0].request)}
    made = compute.insert(zone, body, request_id(run, zone, 1, found.digest))
    note_job(job, run, f"projects/my-project/zones/{zone}/instances/{made.target}")


def test_a_vm_vouches_for_no_plan_of_vertex_ai(job: Job) -> None:
    scripts(job.cloud, FULL, WELL)
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    tamper(job, run, CHANGES["serviceAccount"][0])
    plant_vm(job, run, ZONE, YOU)
    job.launch("follow", run, code=4)
    assert len(job.created) == 1


def test_a_planted_job_vouches_for_no_vm(job: Job) -> None:
    """Nobody's account is needed for either: but who may create jobs may not be allowed to create VMs."""
    scripts(job.cloud, FULL, FULL, WELL)
    run = job.data("vertex", "job.yaml", "--detach")["run"]

    def on_a_vm(plan: dict[str, Any]) -> None:
        asks = request.read(plan["attempts"][1]["request"])
        told = {"image": asks.image, "entrypoint": asks.words[0], "arguments": asks.words[1:], "env": asks.env}
        told |= {"run_folder": asks.output, "nodes": ["n"]}
        items = [{"key": "launch", "value": json.dumps(told)}, {"key": "startup-script", "value": "#!/bin/sh\nid\n"}]
        for attempt in plan["attempts"][1:]:
            attempt |= {"zone": ZONE, "request": {**work_body(), "serviceAccounts": [], "metadata": {"items": items}}}

    tamper(job, run, on_a_vm)
    tamper(job, run, lambda plan: plan["attempts"].pop(0))
    (_, body), *_ = job.created
    planted = {**body, "labels": {**body["labels"], PLAN_LABEL: stored(job, run).digest}}
    Vertex("my-project", job.cloud.environ()).create_in("us-central1", planted)
    job.launch("follow", run, code=4)
    assert not inserts(job.cloud)


def test_a_resumed_run_takes_no_image_of_a_planted_job(job: Job, clock: FakeClock) -> None:
    """Who may create and delete jobs, but not act as the run's account, puts one with its labels in their place."""
    account = {"service_account": "trainer@my-project.iam.gserviceaccount.com"}
    job.write(identity=account)
    scripts(job.cloud, FAILED, FAILED, WELL)
    job.launch("vertex", "job.yaml", code=3)
    (_, body), *_ = job.created
    job.cloud.jobs.jobs.clear()
    planted = json.loads(json.dumps(body))
    del planted["jobSpec"]["serviceAccount"]
    container(planted)["imageUri"] = EVIL
    Vertex("my-project", job.cloud.environ()).create_in("us-central1", planted)
    clock.advance(120)
    job.launch("vertex", "job.yaml", "--resume", body["labels"]["launch-run"])
    _, _, (_, resumed) = job.created
    assert resumed["jobSpec"]["serviceAccount"] == account["service_account"]
    assert container(resumed)["imageUri"] == job.image


OLD = Path(__file__).with_name("plan_before_binding.json")
"""plan.json of an older launch (commit 071a270): no labels launch-plan, no fields usd_ceiling and the like."""


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_of_an_older_launch_is_watched_but_not_submitted(job: Job, full: bool) -> None:
    old = json.loads(OLD.read_bytes())
    run = old["run"]
    assert "usd_ceiling" not in old["attempts"][0]
    job.cloud.jobs.script = FULL if full else WELL
    job.cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.PLAN}", OLD.read_bytes())
    attempt, *_ = stored(job, run).plan.attempts
    Vertex("my-project", job.cloud.environ()).create_in(attempt.region, attempt.request)
    followed = job.launch("follow", run, code=4 if full else 0)
    assert (f"{run} succeeded" in followed.out) is not full
    assert f"launch vertex SPEC --resume {run}" in job.launch("vertex", "--resume", run, code=4).err
    assert len(job.created) == 1


def test_a_run_from_before_plans_were_bound(job: Job) -> None:
    scripts(job.cloud, FULL, RUNS, WELL)
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    for made in job.cloud.jobs.jobs.values():
        del made.message.labels[PLAN_LABEL]
    assert PLAN_LABEL in job.launch("follow", run, code=4).err
    job.launch("vertex", "--resume", run, code=4)
    job.launch("vertex", "job.yaml", "--resume", run, "--detach")
    assert "cancelled (" in job.launch("cancel", run).out


def test_a_resumed_run_with_another_plan_is_followed(job: Job) -> None:
    """More hours, another place: the plan of the newest job is in the folder, and is its own."""
    scripts(job.cloud, FAILED, FULL, WELL)
    job.launch("vertex", "job.yaml", code=3)
    run = job.data("status", "job")["run"]
    job.launch("vertex", "job.yaml", "--resume", run, "--hours", "7", "--detach")
    assert "succeeded" in job.launch("follow", run).out
    assert [body["labels"]["launch-plan"] for _, body in job.created][1:] == [
        job.created[2][1]["labels"]["launch-plan"]
    ] * 2


@pytest.fixture
def site(job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> VmSite:
    made = VmSite(job.cloud, clock, [exits(0)])
    monkeypatch.setattr("launcher.clock.REAL", made.time)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", job.cloud.url)
    job.write(zones=["us-central1-a", "us-central1-b"], regions=None, provisioning=["spot"])
    return made


def of_parameters(change: Change) -> Change:
    """A change of what every VM's startup script is told."""

    def changed(request: dict[str, Any]) -> None:
        item = next(one for one in request["metadata"]["items"] if one["key"] == "launch")
        told = json.loads(item["value"])
        change(told)
        item["value"] = json.dumps(told)

    return of_requests(changed)


def startup(request: dict[str, Any]) -> None:
    next(one for one in request["metadata"]["items"] if one["key"] == "startup-script")["value"] = "#!/bin/sh\nid\n"


def zone(plan: dict[str, Any]) -> None:
    for attempt in plan["attempts"]:
        attempt["zone"] = "us-east4-a"


VM_CHANGES = {
    "serviceAccount": of_requests(lambda one: one["serviceAccounts"][0].update(email="admin@p.iam")),
    "startup-script": of_requests(startup),
    "image": of_parameters(lambda told: told.update(image=EVIL)),
    "command": of_parameters(lambda told: told.update(arguments=["--script", "evil.py"])),
    "zone": zone,
}


def on_nodes(job: Job, nodes: int) -> None:
    """A spec for so many Spot VMs, in one of two zones."""
    machine = {"type": "l4", "gpus": 2, "nodes": nodes}
    job.write(zones=["us-central1-a", "us-central1-b"], regions=None, provisioning=["spot"], machine=machine)


def take_away(job: Job, site: VmSite) -> None:
    """The VMs are preempted after they have saved."""
    for vm in job.cloud.compute.names():
        is_preempted(site, job.cloud.compute.vm(vm))
    site.clock.advance(60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes"), [*((name, 1) for name in VM_CHANGES), ("command", 2), ("zone", 2)])
def test_a_changed_plan_creates_no_vm(job: Job, site: VmSite, name: str, nodes: int) -> None:
    on_nodes(job, nodes)
    run = job.data(*RUN, "--detach")["run"]
    folder = f"gs://my-bucket/runs/{run}"
    tamper(job, run, VM_CHANGES[name])
    take_away(job, site)
    followed = job.launch("follow", folder, code=4)
    assert f"launch vm SPEC --run --resume {run}" in followed.err
    job.launch("vm", "--no-preflight", "--resume", folder, code=4)
    assert len(site.zones) == 1
    assert "succeeded" in job.launch(*RUN, "--resume", run).out
    assert EVIL not in str([one.body for one in job.cloud.requests if "/instances" in one.path])


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_unchanged_plan_creates_the_next_vm(job: Job, site: VmSite, nodes: int) -> None:
    on_nodes(job, nodes)
    run = job.data(*RUN, "--detach")["run"]
    take_away(job, site)
    assert "succeeded" in job.launch("follow", f"gs://my-bucket/runs/{run}").out
    assert len(site.zones) == 2


@pytest.mark.parametrize("account", ["", "colleague@example.com"])
def test_a_vm_that_another_account_created_vouches_for_nothing(job: Job, site: VmSite, account: str) -> None:
    """Who isn't known to have created it may not act as its account."""
    run = job.data(*RUN, "--detach")["run"]
    take_away(job, site)
    job.env["CLOUDSDK_CORE_ACCOUNT"] = account
    refused = job.launch("follow", f"gs://my-bucket/runs/{run}", code=4)
    assert f"launch vm SPEC --run --resume {run}" in refused.err
    assert len(site.zones) == 1


def test_a_planted_vm_vouches_for_nothing(job: Job, site: VmSite) -> None:
    """Who may create VMs, but not as the victim's account, sends the request id of a plan of his own."""
    run = job.data(*RUN, "--detach")["run"]
    tamper(job, run, VM_CHANGES["serviceAccount"])
    take_away(job, site)
    plant_vm(job, run, ZONE, "trainer@p.iam")
    open_folder(f"gs://my-bucket/runs/{run}").write(
        runfolder.attempt_lock(10**12), b"{}"
    )  # as many names are not tried
    entries = Ledger.open(f"gs://my-bucket/runs/{run}").entries()
    bound = {
        account: is_bound(stored(job, run), (), entries, Vms("my-project", job.cloud.environ(), account=account))
        for account in (YOU, "trainer@p.iam")
    }
    assert bound == {YOU: False, "trainer@p.iam": True}


def test_a_vm_that_google_has_forgotten_vouches_for_nothing(job: Job, site: VmSite) -> None:
    run = job.data(*RUN, "--detach")["run"]
    take_away(job, site)
    job.cloud.compute.forget_operations()
    job.launch("follow", f"gs://my-bucket/runs/{run}", code=4)
    assert len(site.zones) == 1


def test_the_vms_own_statement_about_its_image_is_not_trusted(job: Job, site: VmSite) -> None:
    """Its own account may change its metadata."""
    job.data(*RUN, "--detach")
    (name,) = job.cloud.compute.names()
    item = next(one for one in job.cloud.compute.vm(name).body["metadata"]["items"] if one["key"] == "launch")
    item["value"] = item["value"].replace(job.image, EVIL)
    job.cloud.compute.power_off(name)
    site.clock.advance(120)
    job.launch(*RUN)
    assert len(inserts(job.cloud)) == 2
    assert EVIL not in str(inserts(job.cloud))


# --- What else the folder says ---------------------------------------------------------------------------------------


def note_job(job: Job, run: str, name: str) -> None:
    """The folder names another job for the run's first attempt."""
    job.cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.attempt_job(1)}", json.dumps({"name": name}).encode())


def test_a_job_of_the_folder_that_is_not_the_runs_is_left_alone(job: Job, site: VmSite) -> None:
    """Else `launch cancel` of one run would delete another's VM, or anybody's."""
    run = job.data(*RUN, "--detach")["run"]
    take_away(job, site)
    other = job.cloud.compute.put({**inserts(job.cloud)[0][1], "name": "theirs", "labels": {}})
    note_job(job, run, f"projects/my-project/zones/us-central1-a/instances/{other.number}")
    job.launch("cancel", f"gs://my-bucket/runs/{run}", code=2)
    assert job.cloud.compute.names() == ["theirs"]


def test_a_folder_sends_no_credentials_elsewhere(job: Job) -> None:
    """A region is a part of the host that is asked."""
    job.cloud.jobs.script = FULL
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    name = "projects/p/locations/evil.example.com?/customJobs/1"
    note_job(job, run, name)
    with pytest.raises(LaunchError):
        endpoint_of("evil.example.com?", {})
    job.launch("follow", run, code=5)
    assert "evil" not in str([one.path for one in job.cloud.requests])


def test_control_characters_in_the_run_folder_are_removed(job: Job) -> None:
    run = "job-01234567"
    lock = {"round": 1, "region": "us-central1", "zone": None, "provisioning": "spot", "machine": "m", "identity": ""}
    end = {"state": "FAILED", "kind": "user", "scope": "permanent", "cause": "a\x1b[2Jb", "fix": "one\ntwo\x07"}
    for name, content in (
        (runfolder.attempt_lock(1), {**lock, "writer": "w", "time": 1.0}),
        (runfolder.attempt_verdict(1), end),
    ):
        job.cloud.objects.put("my-bucket", f"runs/{run}/{name}", json.dumps(content).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", job.cloud.url)
        (entry,) = Ledger.open(f"gs://my-bucket/runs/{run}").entries()
    assert entry.end is not None
    assert (entry.end.cause, entry.end.fix) == ("a\\x1b[2Jb", "one\ntwo\\x07")
