"""`launch sweep` on the loopback cloud: plan, submit, continue, cancel."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from launch_train.common.storage import GcsFolder
from launcher.cli.commands.sweep import plan_of
from launcher.cli.options import Flags
from launcher.cli.ui.text import utc_stamp
from launcher.gcp.parallel import in_pool
from launcher.runs.cloud import open_cloud
from launcher.runs.sweep import in_cloud as sweep_cloud
from launcher.runs.sweep.in_cloud import CloudSweep
from launcher.testing.googlecloud import FakeClock, Fault, Status
from tests.cli.cloudjobs import CREATE, FAILED, FULL, RUNS, WAITS, WELL, Job, scripts
from tests.command import WORLD, as_process
from tests.runs.vm_runs import VmSite, exits, is_preempted

STEPS = ("--set", "run.config.steps=10,20,30")
SWEEP = ("sweep", "job.yaml", *STEPS)


def states(data: dict[str, Any]) -> list[str]:
    return [one["state"] for one in data["points"]]


def cloud_sweep(job: Job) -> CloudSweep:
    """Return the sweep of SWEEP, planned in a process that has the job's environment."""
    flags = Flags(set=[STEPS[1]])
    plan = plan_of("vertex", job.folder / "job.yaml", flags, random=None, seed=0, offline=True)
    return CloudSweep(plan, open_cloud(plan.project), lambda made: made, lambda _: None, lambda _: None)


def labels(job: Job) -> set[str]:
    return {body["labels"]["launch-sweep"] for _, body in job.created}


# --- The plan --------------------------------------------------------------------------------------------------------


def test_a_dry_run_sends_nothing_and_is_the_same_each_time(job: Job) -> None:
    data = job.data(*SWEEP, "--dry-run")
    assert data == job.data(*SWEEP, "--dry-run")
    assert [one["set"] for one in data["points"]] == [{"run.config.steps": steps} for steps in (10, 20, 30)]
    assert len({one["run"] for one in data["points"]}) == 3
    for one in data["points"]:
        request = one["plan"]["attempts"][0]["request"]
        assert request["labels"]["launch-sweep"] == one["plan"]["spec"]["labels"]["launch-sweep"] == data["sweep"]
    assert data["limits"]["usd_at_most"] == sum(one["plan"]["limits"]["usd_at_most"] for one in data["points"])
    assert not job.cloud.requests


def test_one_argument_is_swept_and_tables_show_only_the_arguments_that_differ(job: Job) -> None:
    job.write(run={"module": "train", "args": ["data", "--lr", 0.1, "--epochs=3"]})
    command = ("sweep", "job.yaml", "--dry-run", "--set")
    points = job.data(*command, "run.args.lr=1e-2,1e-3")["points"]
    written = [point["plan"]["spec"]["run"]["args"] for point in points]
    assert written == [["data", "--lr", lr, "--epochs=3"] for lr in ("1e-2", "1e-3")]
    for setting in ("run.args.lr=1e-2,1e-3", "run.args=[data, --lr, 0.01, --amp],[data, --lr, 0.001, --amp]"):
        [head] = [line for line in job.launch(*command, setting).out.splitlines() if line.startswith("point")]
        assert head.split() == ["point", "lr", "run", "at", "most"]


def test_a_point_is_the_same_run_as_without_a_sweep(job: Job) -> None:
    alone = job.data("vertex", "job.yaml", "--set", "run.config.steps=20", "--dry-run")
    assert job.data(*SWEEP, "--dry-run")["points"][1]["run"] == alone["run"]


def test_the_table_fits_80_columns(job: Job) -> None:
    axes = [word for n in range(8) for word in ("--set", f"env.A_RATHER_LONG_NAME_{n}=some-value-{n},other")]
    for flags in ([], axes[:12]):
        ran = job.launch(*SWEEP, *flags, "--dry-run")
        assert max(map(len, ran.out.splitlines())) <= 80


def test_more_random_points_belong_to_the_same_sweep(job: Job) -> None:
    line = ("sweep", "job.yaml", "--set", "run.config.steps=int(1,1000)", "--dry-run", "--random")
    few, many = job.data(*line, "3"), job.data(*line, "5")
    assert few["sweep"] == many["sweep"]
    assert [one["run"] for one in few["points"]] == [one["run"] for one in many["points"]][:3]
    assert job.data(*line, "3", "--seed", "1")["sweep"] != few["sweep"]
    assert job.data("sweep", "job.yaml", "--set", "run.config.steps=int(1,2)", "--random", "9", "--dry-run")["warnings"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "run.config.stepz=1,2"], "did you mean steps"),
        (["--set", "run.config.steps=10,-20"], "point 2 (run.config.steps=-20)"),
        (["--set", "limits.hours=1,2"], "same run"),
        ([*STEPS, "--name", "job"], "--name job"),
        ([*STEPS, "--name", "job-0123abcd"], "--name"),
        ([*STEPS, "--name", "My_Sweep"], "invalid name"),
        ([*STEPS, "--run-id", "x"], "--run-id"),
        ([*STEPS, "--seed", "1"], "--random"),
        ([*STEPS, "--dry-run", "--detach"], "--dry-run"),
        ([*STEPS, "--max-parallel", "0"], "--max-parallel"),
        ([*STEPS, "--max-parallel", "2", "--detach"], "--detach"),
        (["--set", f"run.config.steps={','.join(map(str, range(1, 1002)))}"], "1,001 points"),
        (["--random", "0", "--set", "run.config.steps=int(1,9)"], "--random"),
    ],
)
def test_what_is_refused_before_anything_is_sent(job: Job, flags: list[str], words: str) -> None:
    ran = job.launch("sweep", "job.yaml", *flags, code=2)
    assert words in ran.err
    assert not job.cloud.requests


def test_the_cost_limit_holds_for_the_sum(job: Job) -> None:
    one = job.data("vertex", "job.yaml", "--dry-run")["limits"]["usd_at_most"]
    assert job.data(*SWEEP, "--usd", str(int(3 * one) + 1), "--dry-run")["limits"]["usd"] == int(3 * one) + 1
    ran = job.launch(*SWEEP, "--usd", str(int(2 * one) + 1), code=2)
    assert "at most 2" in ran.err
    assert not job.cloud.requests


# --- The cloud -------------------------------------------------------------------------------------------------------


def test_all_points_run_with_one_image_and_the_same_command_again_does_nothing(job: Job) -> None:
    data = job.data(*SWEEP, "--yes")
    assert states(data) == ["SUCCEEDED"] * 3
    assert labels(job) == {data["sweep"]}
    assert len(job.created) == 3
    record = json.loads(job.cloud.objects.buckets["my-bucket"][f"runs/sweeps/{data['sweep']}.json"].data)
    assert {one["run"] for one in record["points"]} == {one["run"] for one in data["points"]}
    assert states(job.data(*SWEEP, "--yes")) == ["SUCCEEDED"] * 3
    assert len(job.created) == 3


def test_a_line_for_each_point_as_it_starts_and_ends(job: Job) -> None:
    ran = job.launch(*SWEEP, "--yes")
    for number in (1, 2, 3):
        assert [word for line in ran.err.splitlines() if f" {number}/3 " in line for word in line.split()[3:4]][:1] == [
            "started"
        ]
    assert ran.err.count("succeeded after") == 3
    assert "3 succeeded" in ran.out


def test_one_failing_point_leaves_the_others(job: Job) -> None:
    scripts(job.cloud, FAILED, WELL)
    data = job.data(*SWEEP, "--yes")
    assert sorted(states(data)) == ["FAILED", "SUCCEEDED", "SUCCEEDED"]
    assert [one["cause"] for one in data["points"] if one["state"] == "FAILED"] != [None]
    assert sorted(states(job.data(*SWEEP, "--yes"))) == ["FAILED", "SUCCEEDED", "SUCCEEDED"], "nothing is retried"
    assert len(job.created) == 3
    job.cloud.jobs.script = WELL
    assert states(job.data(*SWEEP, "--yes", "--retry-failed")) == ["SUCCEEDED"] * 3
    assert len(job.created) == 4


def test_all_failing_is_an_error_with_the_common_cause(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    ran = job.launch(*SWEEP, "--yes", code=3)
    assert "all 3 points failed" in ran.err
    assert "workerpool0-0 exited with 1" in ran.err.rpartition("all 3 points failed")[2]


def test_the_common_cause_is_that_of_the_output(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    runs = job.data(*SWEEP, "--yes", "--detach")["points"]
    for one in runs:
        job.cloud.logs.write(one["job"].rpartition("/")[2], "workerpool0-0", "ValueError: too hot")
    ran = job.launch(*SWEEP, "--yes", code=3)
    assert "too hot" in ran.err.rpartition("all 3 points failed")[2]


def test_without_capacity_the_exit_code_is_5(job: Job) -> None:
    job.cloud.jobs.script = FULL
    assert states(job.data(*SWEEP, "--yes", code=5)) == ["FAILED"] * 3


def test_a_missing_bucket_is_reported_once(job: Job) -> None:
    job.write(output="gs://no-such-bucket/runs")
    ran = job.launch(*SWEEP, "--yes", code=2)
    assert ran.err.count("gcloud storage buckets create") == 1
    assert not job.created


def test_killed_between_two_submissions_the_same_command_submits_what_is_missing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.cloud.jobs.script = RUNS

    def killed(calls: Any, _threads: int) -> None:
        for call in calls[:1]:  # the first point
            call()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("launcher.runs.sweep.in_cloud.in_pool", killed)
        ran = job.launch(*SWEEP, "--yes", "--detach", "-o", "json", code=130)
    assert states(json.loads(ran.out)) == ["ACTIVE", "WAITING", "WAITING"]
    assert "1 job continues; 2 points not started" in ran.err
    assert "launch cancel job-" in ran.err
    assert len(job.created) == 1
    assert states(job.data(*SWEEP, "--yes", "--detach")) == ["ACTIVE"] * 3
    assert len(job.created) == 3


def test_two_sweeps_at_once_create_one_job_for_each_point(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    with as_process(["launch"], {**WORLD, **job.env}, job.folder):
        both = [cloud_sweep(job) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda one: one.run(detach=True), both))
    assert len(job.created) == 3
    assert {run.state for one in both for run in one.runs} == {"active"}


def test_too_many_requests_are_retried_with_a_pause(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    fault = job.cloud.faults.add(Fault(CREATE, Status(429, retry_after=7), times=2))
    data = job.data(*SWEEP, "--yes", "--detach")
    assert states(data) == ["ACTIVE"] * 3
    assert job.cloud.faults.used[fault] == 2
    assert len(job.created) == 5


def test_a_rate_limit_that_outlasts_a_runs_retries_delays_its_point_only(job: Job) -> None:
    job.write(provisioning=["standard"], regions=["us-central1"])
    job.cloud.jobs.script = RUNS
    job.cloud.faults.add(Fault(CREATE, Status(429), times=20))
    assert states(job.data(*SWEEP, "--yes", "--detach")) == ["ACTIVE"] * 3
    assert len(job.created) == 23


def test_max_parallel_limits_the_jobs_at_a_time(job: Job) -> None:
    ran = job.launch(*SWEEP, "--yes", "--max-parallel", "1")
    kinds = [line.split()[3] for line in ran.err.splitlines() if "/3 " in line]
    assert [kind for kind in kinds if kind in ("started", "succeeded")] == ["started", "succeeded"] * 3


def test_a_watch_limit_ends_the_watch(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    data = job.data(*SWEEP, "--yes", "--watch-for", "1m", code=6)
    assert states(data) == ["ACTIVE"] * 3


def test_a_point_whose_job_has_no_label_of_the_sweep_is_watched_like_the_others(job: Job) -> None:
    job.write(limits={"wait": "10m"}, provisioning=["standard"], regions=["us-central1"])
    job.cloud.jobs.script = WAITS
    job.launch("vertex", "job.yaml", "--set", "run.config.steps=20", "--detach")
    ran = job.launch(*SWEEP, "--yes", "--watch-for", "1h", code=5)
    lines = [line for line in ran.err.splitlines() if " 2/3 " in line]
    assert (sum("already started" in line for line in lines), "failed" in lines[-1]) == (1, True)
    assert len(job.created) == 3


@pytest.mark.slow
def test_an_attempt_waits_no_longer_than_it_may(job: Job) -> None:
    job.write(limits={"wait": "10m"}, provisioning=["standard"])
    job.cloud.jobs.script = WAITS
    assert states(job.data(*SWEEP, "--yes", code=5)) == ["FAILED"] * 3
    assert len(job.created) == 6, "each point in both regions"


def test_a_waiting_job_that_somebody_cancelled_has_not_waited_too_long(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.cloud.jobs.script = WAITS
    poll = CloudSweep.poll

    def cancelled(self: CloudSweep) -> None:
        for run in self.runs:
            if run.job:
                self.cloud.service.cancel(run.job.name)
        clock.advance(60)
        poll(self)

    monkeypatch.setattr(CloudSweep, "poll", cancelled)
    ran = job.launch(*SWEEP, "--yes", code=3)
    assert (ran.out, len(job.created)) == (f"{labels(job).pop()}: 3 cancelled\n", 3)
    assert "limits.wait" not in ran.err


def test_another_sweep_cannot_take_the_name(job: Job) -> None:
    job.data(*SWEEP, "--yes", "--name", "lr-search")
    job.data(*SWEEP, "--yes", "--name", "lr-search")
    ran = job.launch("sweep", "job.yaml", "--set", "run.config.steps=11,12", "--yes", "--name", "lr-search", code=2)
    assert "lr-search" in ran.err
    assert len(job.created) == 3


def test_a_costly_sweep_asks_once_for_all_points(job: Job) -> None:
    one = job.data("vertex", "job.yaml", "--dry-run")["limits"]["usd_at_most"]
    hours = ("--set", "limits.hours=null")
    ran = job.launch(*SWEEP, *hours, code=2)
    assert "this sweep could cost" in ran.err
    assert f"{3 * one:,.2f}"[:4] in ran.err
    assert not job.created


# --- cancel and report -----------------------------------------------------------------------------------------------


def test_cancel_cancels_all_active_points_after_one_question(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(job.cloud, WELL, RUNS)
    sweep = job.data(*SWEEP, "--yes", "--watch-for", "2m", code=6)["sweep"]
    assert "--yes" in job.launch("cancel", sweep, code=2).err, "there is no terminal"
    monkeypatch.setattr("launcher.cli.commands.cancel.confirmed", lambda *_: False)
    job.launch("cancel", sweep, code=1)
    asked: list[Any] = []

    def confirmed(*words: Any) -> bool:
        asked.append(words)
        return True

    monkeypatch.setattr("launcher.cli.commands.cancel.confirmed", confirmed)
    ran = job.launch("cancel", sweep)
    assert (len(asked), ran.out.count("cancelled after"), "2 points cancelled" in ran.out) == (1, 2, True)
    assert job.data("cancel", sweep, "--yes") == {"sweep": sweep, "runs": []}
    assert sorted(states(job.data(*SWEEP, "--yes"))) == ["CANCELLED", "CANCELLED", "SUCCEEDED"]


def test_a_sweep_that_is_cancelled_while_it_submits_starts_no_more(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.cloud.jobs.script = RUNS
    sweep = job.data(*SWEEP, "--dry-run")["sweep"]

    def interrupted(calls: Any, _threads: int) -> None:
        calls[0]()
        job.cloud.objects.put("my-bucket", f"runs/sweeps/{sweep}.cancelled", b"{}")
        clock.advance(10)
        for call in calls[1:]:
            call()

    with monkeypatch.context() as patch:
        patch.setattr("launcher.runs.sweep.in_cloud.in_pool", interrupted)
        data = job.data(*SWEEP, "--yes", "--detach", code=3)
    assert (len(job.created), states(data)) == (1, ["CANCELLED"] * 3)


@pytest.mark.parametrize(("seconds", "reads"), [(0, 0), (60, 1)])
def test_points_that_begin_together_read_once_whether_it_is_cancelled(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seconds: float, reads: int
) -> None:
    def later(calls: Any, threads: int) -> None:
        clock.advance(seconds)
        in_pool(calls, threads)

    monkeypatch.setattr("launcher.runs.sweep.in_cloud.in_pool", later)
    before = len(job.cloud.requests)
    job.launch(*SWEEP, "--yes", "--detach")
    asked = [one for one in job.cloud.requests[before:] if one.path.endswith(".cancelled")]
    at_start, at_end = 1, 1
    assert (len(asked), len(job.created)) == (at_start + reads + at_end, 3)


def cancelled_during(job: Job, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """`launch cancel` writes its mark just after the first call of a function."""
    sweep, called = job.data(*SWEEP, "--dry-run")["sweep"], getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        found = called(*given, **named)
        monkeypatch.setattr(owner, name, called)
        job.cloud.objects.put("my-bucket", f"runs/sweeps/{sweep}.cancelled", b"{}")
        return found

    monkeypatch.setattr(owner, name, call)


def test_jobs_that_launch_cancel_was_too_early_to_find_are_cancelled(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cloud.jobs.script = RUNS
    cancelled_during(job, monkeypatch, sweep_cloud, "in_pool")
    assert states(job.data(*SWEEP, "--yes", "--detach", code=3)) == ["CANCELLED"] * 3
    assert len(job.created) == 3
    assert states(job.data(*SWEEP, "--yes", "--detach", "--retry-failed")) == ["ACTIVE"] * 3


def test_launch_cancel_that_finds_a_sweep_as_it_is_recorded_cancels_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.cloud.jobs.script = RUNS
    cancelled_during(job, monkeypatch, GcsFolder, "swap")
    assert states(job.data(*SWEEP, "--yes", "--detach", code=3)) == ["CANCELLED"] * 3


def test_an_earlier_cancellation_is_over_also_in_a_bucket_that_refuses_writes(job: Job) -> None:
    sweep = job.data(*SWEEP, "--dry-run")["sweep"]
    job.cloud.objects.put("my-bucket", f"runs/sweeps/{sweep}.cancelled", b"{}")
    for operation in ("storage.objects.insert", "storage.objects.delete"):
        job.cloud.faults.add(Fault(operation, Status(403), times=None))
    assert states(job.data(*SWEEP, "--yes")) == ["SUCCEEDED"] * 3


def test_points_that_wait_for_a_slow_read_of_the_mark_share_its_answer(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, reads = threading.Event(), list[int]()
    with as_process(["launch"], {**WORLD, **job.env}, job.folder):
        sweep = cloud_sweep(job)
    second = threading.Thread(target=sweep._is_cancelled)

    def now() -> float:
        if threading.current_thread() is second:
            asked.set()
        return clock()

    def slow(*_: Any) -> str:
        reads.append(1)
        if len(reads) == 1:
            second.start()
            asked.wait(5)
            clock.advance(60)
        return ""

    sweep.cloud = replace(sweep.cloud, clock=sweep.cloud.clock._replace(now=now))
    monkeypatch.setattr(sweep_cloud, "mark_version", slow)
    assert not sweep._is_cancelled()
    second.join()
    assert len(reads) == 1


def test_the_name_of_another_sweep_does_not_end_its_cancellation(job: Job) -> None:
    mark = f"runs/sweeps/{job.data(*SWEEP, '--name', 'lr-search', '--yes')['sweep']}.cancelled"
    job.cloud.objects.put("my-bucket", mark, b"{}")
    ran = job.launch("sweep", "job.yaml", "--set", "run.config.seed=1,2", "--name", "lr-search", "--yes", code=2)
    assert "another sweep" in ran.err
    assert mark in job.cloud.objects.buckets["my-bucket"]


def test_a_large_sweep_asks_before_failed_points_are_resumed(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    costly = (*SWEEP, "--hours", "40")
    job.launch(*costly, "--yes", code=3)
    job.write(limits={})
    ran = job.launch(*SWEEP, "--retry-failed", "--detach", code=2)
    assert "--yes" in ran.err
    assert len(job.created) == 3


def test_a_cancelled_sweep_starts_no_further_points(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.runs.sweep.record import mark_cancelled

    poll, polls = CloudSweep.poll, []

    def cancelled(self: CloudSweep) -> None:
        polls.append(1)
        if len(polls) == 2:
            mark_cancelled(self.storage(self.plan.output), self.plan.name)
        poll(self)

    monkeypatch.setattr(CloudSweep, "poll", cancelled)
    assert states(job.data(*SWEEP, "--yes", "--max-parallel", "1")) == ["SUCCEEDED", "CANCELLED", "CANCELLED"]
    monkeypatch.setattr(CloudSweep, "poll", poll)
    assert states(job.data(*SWEEP, "--yes")) == ["SUCCEEDED"] * 3, "typed again it continues"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "lr-search"])
def test_one_report_of_all_points_also_when_vertex_has_forgotten_the_jobs(job: Job, name: str) -> None:
    job.cloud.objects.add("my-project-launch")
    job.write(output="gs://my-project-launch/runs")
    data = job.data(*SWEEP, "--yes", *(["--name", name] if name else []))
    for one in data["points"]:
        row = b'{"step": 1, "loss": 2.5, "time": 1750000000.0}\n'
        part = f"runs/{one['run']}/metrics/0001-0000-0000-000000.jsonl"
        job.cloud.objects.put("my-project-launch", part, row)
    for _ in range(2):
        ran = job.launch("report", data["sweep"])
        text = (job.folder / ran.out.strip()).read_text(encoding="utf-8")
        assert ran.out.strip() == f"{data['sweep']}-report.html"
        assert all(one["run"] in text for one in data["points"])
        job.cloud.jobs.jobs.clear()


def test_a_report_leaves_out_points_that_have_not_begun(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    flags = ("--yes", "--max-parallel", "1", "--watch-for", "1m")
    data = job.data(*SWEEP, *flags, code=6)
    ran = job.launch("report", data["sweep"])
    assert "2 points of 3" in ran.err
    assert "0 of 3 succeeded" in job.launch("runs").out
    assert data["points"][2]["run"] not in (job.folder / ran.out.strip()).read_text(encoding="utf-8")


@pytest.mark.slow
def test_other_commands_and_a_sweeps_name(job: Job) -> None:
    job.cloud.objects.add("my-project-launch")
    job.write(output="gs://my-project-launch/runs")
    scripts(job.cloud, WELL, RUNS)
    data = job.data(*SWEEP, "--yes", "--max-parallel", "2", "--watch-for", "1m", code=6)
    name, ids = data["sweep"], [one["run"] for one in data["points"]]
    shown = job.data("status", name)
    assert [(one["run"], one["set"]) for one in shown["points"]] == [
        (run, {"run.config.steps": steps}) for run, steps in zip(ids, (10, 20, 30), strict=True)
    ]
    assert sorted(one["state"] for one in shown["points"]) == ["RUNNING", "RUNNING", "SUCCEEDED"]
    page = job.launch("status", name).out
    assert page.startswith(f"{name}  1 of 3 points succeeded")
    assert "steps=30" in page
    assert max(map(len, page.splitlines())) <= 80
    watched = job.launch("watch", name, "--watch-for", "1s", code=6)
    assert sorted(line.split()[1] for line in watched.out.splitlines() if line.startswith("job-")) == ["running"] * 2
    for command in ("logs", "metrics", "follow"):
        assert f"{name} is a sweep of 3 points, not a run" in job.launch(command, name, code=2).err
    for line in (("vertex", "--resume", name), ("vertex", "job.yaml", "--resume", name)):
        error = job.launch(*line, code=2).err
        assert f"launch {' '.join(line[:-1])} {ids[0]}" in error
    assert "is still running" in job.launch("rm", name, "--yes", code=2).err
    job.launch("cancel", name, "--yes")
    ran = job.launch("rm", name, "--yes")
    assert sorted(line.split()[0] for line in ran.out.splitlines()) == sorted(ids)
    job.launch("status", name, code=2)
    left = [path for path in job.cloud.objects.buckets["my-project-launch"] if name in path or ids[0] in path]
    assert not left


def test_a_sweep_that_is_typed_again_prints_when_its_points_ended(job: Job) -> None:
    data = job.data(*SWEEP, "--yes")
    ends = {one["run"]: job.data("status", one["run"])["ended"] for one in data["points"]}
    lines = [line for line in job.launch(*SWEEP, "--yes").err.splitlines() if "/3  " in line]
    assert len(lines) == 3
    for line in lines:
        assert f"already succeeded on {utc_stamp(ends[line.split()[1]])}" in line


def test_a_name_without_a_sweep_or_run_is_an_error(job: Job) -> None:
    for argv in (("report", "job-012345"), ("report", "nothing"), ("cancel", "job-012345"), ("cancel", "nothing")):
        assert job.launch(*argv, code=2).out == ""


# --- VMs -------------------------------------------------------------------------------------------------------------


def test_points_on_vms_and_their_report_when_the_vms_are_gone(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = VmSite(job.cloud, clock, [exits(0), is_preempted, exits(0)])
    monkeypatch.setattr("launcher.clock.REAL", site.time)
    job.cloud.objects.add("my-project-launch")
    place = {"zones": ["us-central1-a", "us-central1-b"], "regions": None, "provisioning": ["spot"]}
    job.write(output="gs://my-project-launch/runs", **place)
    line = (
        *SWEEP[:2],
        "--set",
        "run.config.steps=10,20",
        "--to",
        "vm",
        "--no-preflight",
        "--yes",
        "--max-parallel",
        "1",
    )
    data = job.data(*line)
    assert states(data) == ["SUCCEEDED"] * 2
    assert job.cloud.compute.names() == []
    assert states(job.data(*line)) == ["SUCCEEDED"] * 2, "nothing runs again"
    assert job.launch("report", data["sweep"]).out.strip() == f"{data['sweep']}-report.html"
