"""A launch that could cost more than $100 asks first, unless the user limited it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from launcher import api
from launcher.cli.flows.confirm import confirm_cost
from launcher.errors import LaunchError, UsageError
from launcher.plan.model import Plan, UsedPrices
from launcher.runs.cost_limit import ASK_USD, old_prices
from tests.cli.cloudjobs import FAILED, Job
from tests.cli.vms import Vms
from tests.command import WORLD, as_process
from tests.plan.planning import planned

DEAR = {"machine": {"type": "h100", "gpus": 2}, "provisioning": ["spot"], "regions": ["us-central1"]}
CHEAP = {"machine": {"type": "l4", "gpus": 1}}
NEW = UsedPrices(date="2026-11-20", digest="0", shipped=False)
OLD = UsedPrices(date="2026-10-01", digest="0", shipped=True)
NOW = 1795392000.0  # 2026-11-23


class Person(io.StringIO):
    """A terminal with someone who answers."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr(sys, "stdin", Person(text))


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr("launcher.runs.cost_limit.time.time", lambda: NOW)


def plan_of(prices: UsedPrices = NEW, **spec: Any) -> Plan:
    return replace(planned(**{**DEAR, **spec}), prices=prices)


def test_an_expensive_run_without_a_limit_is_refused_without_a_terminal(job: Job) -> None:
    job.write(**DEAR)
    ran = job.launch("vertex", "job.yaml", "--detach", code=2)
    assert job.created == []
    assert "--usd" in ran.err
    assert "--yes" in ran.err


@pytest.mark.parametrize(
    "more", [("--yes",), ("-y",), ("--usd", "1000"), ("--hours", "20"), ("--set", "limits.hours=20")], ids=" ".join
)
def test_yes_or_a_limit_is_enough(job: Job, more: tuple[str, ...]) -> None:
    job.write(**DEAR)
    job.launch("vertex", "job.yaml", "--detach", *more)
    assert len(job.created) == 1


@pytest.mark.parametrize("limits", [{"usd": 1000}, {"hours": 20}])
def test_a_limit_in_the_spec_is_enough(job: Job, limits: dict[str, float]) -> None:
    job.write(**DEAR, limits=limits)
    job.launch("vertex", "job.yaml", "--detach")
    assert len(job.created) == 1


def test_the_hours_of_the_built_in_spec_are_not_the_users(job: Job) -> None:
    image = ("--image", job.image, "--output", "gs://my-bucket/runs", "--region", "us-central1")
    argv = ("vertex", "--type", "h100", "--gpus", "2", *image, "--spot", "--detach")
    job.launch(*argv, code=2)
    assert job.created == []
    job.launch(*argv, "--hours", "20")
    assert len(job.created) == 1


def test_a_cheap_run_is_submitted_without_a_question(job: Job) -> None:
    job.write(**CHEAP)
    job.launch("vertex", "job.yaml", "--detach")
    assert len(job.created) == 1


@pytest.mark.parametrize(("text", "created"), [("y\n", 1), ("yes\n", 1), ("n\n", 0), ("\n", 0), ("", 0)])
def test_the_question_in_a_terminal(job: Job, answer: Callable[[str], None], text: str, created: int) -> None:
    job.write(**DEAR)
    answer(text)
    ran = job.launch("vertex", "job.yaml", "--detach", code=0 if created else 1)
    assert "$" in ran.err
    assert "[y/N]" in ran.err
    assert len(job.created) == created


def test_nothing_is_asked_about_a_run_that_exists(job: Job) -> None:
    job.write(**DEAR)
    job.launch("vertex", "job.yaml", "--detach", "--yes")
    ran = job.launch("vertex", "job.yaml", "--detach")
    assert len(job.created) == 1
    assert "already exists" in ran.err


def test_hours_alone_are_a_limit_and_the_bound_is_printed(job: Job) -> None:
    job.write(limits={"hours": 168})
    limits = job.data("vertex", "job.yaml", "--dry-run")["limits"]
    expected, bound = f"${limits['usd_expected']:,.2f}", f"${limits['usd_at_most']:,.2f}"
    assert f"{bound} = $" in " ".join(job.launch("vertex", "job.yaml", "--explain").out.split())
    assert (
        f"cost      ≈{expected}, at most {bound} (168 h of billed time)"
        in job.launch("vertex", "job.yaml").err.splitlines()
    )


def test_a_resume_is_asked_about_too(job: Job) -> None:
    """With the spec, and without it: then the plan in the run's folder counts."""
    job.cloud.jobs.script = FAILED
    job.write(**DEAR)
    run = json.loads(job.launch("vertex", "job.yaml", "--yes", "-o", "json", code=3).out)["run"]
    for spec in ((), ("job.yaml",)):
        ran = job.launch("vertex", *spec, "--resume", run, "--detach", code=2)
        assert ("--yes" in ran.err, len(job.created)) == (True, 1), spec
    job.launch("vertex", "--resume", run, "--detach", "--yes")
    assert len(job.created) == 2


@pytest.mark.parametrize("limits", [{"usd": 1000}, {"hours": 20}])
def test_the_limit_of_a_stored_plan_is_enough(job: Job, limits: dict[str, float]) -> None:
    job.cloud.jobs.script = FAILED
    job.write(**DEAR, limits=limits)
    run = json.loads(job.launch("vertex", "job.yaml", "-o", "json", code=3).out)["run"]
    job.launch("vertex", "--resume", run, "--detach")
    assert len(job.created) == 2


def test_a_submission_from_python_is_refused_without_a_limit(job: Job) -> None:
    job.write(**DEAR)
    with as_process(["python"], {**WORLD, **job.env}, job.folder):
        with pytest.raises(UsageError, match="could cost"):
            api.submit(api.plan("job.yaml"))
        assert job.created == []
        api.submit(api.plan("job.yaml"), yes=True)
        api.submit(api.plan("job.yaml", changes={"limits.usd": 1000}), new=True)
    assert len(job.created) == 2


def test_a_dry_run_asks_nothing(job: Job) -> None:
    job.write(**DEAR)
    assert "[y/N]" not in job.launch("vertex", "job.yaml", "--dry-run").shown


def test_a_vm_to_work_on_is_asked_about_too(vms: Vms) -> None:
    argv = (
        "--type",
        "a100-80gb",
        "--gpus",
        "8",
        "--name",
        "dev",
        "--region",
        "us-central1",
        "--no-preflight",
        "--external-ip",
        "--detach",
    )
    ran = vms.launch(*argv, code=2)
    assert "--yes" in ran.err
    assert not [one for one in vms.cloud.requests if one.method == "POST"]
    vms.launch(*argv, "--yes")
    assert vms.cloud.compute.vm("dev")


def test_the_limit_is_100_dollars() -> None:
    plan = plan_of()
    for most, refused in ((ASK_USD, False), (ASK_USD + 0.01, True), (None, True)):
        limits = replace(plan.limits, usd_at_most=most)
        if refused:
            with pytest.raises(UsageError):
                confirm_cost(replace(plan, limits=limits), limited=False, say=print)
        else:
            confirm_cost(replace(plan, limits=limits), limited=False, say=print)


def test_old_prices_are_asked_about_in_a_terminal(answer: Callable[[str], None]) -> None:
    answer("n\n")
    with pytest.raises(LaunchError, match="nothing was submitted"):
        confirm_cost(plan_of(OLD), limited=True, say=print)
    answer("n\n")
    confirm_cost(plan_of(NEW), limited=True, say=print)
    answer("y\n")
    confirm_cost(plan_of(OLD), limited=True, say=print)


def test_old_prices_are_reported_without_a_terminal() -> None:
    said: list[str] = []
    confirm_cost(plan_of(OLD), limited=True, say=said.append)
    [text] = said
    assert "2026-10-01" in text
    assert "launch prices --update" in text


def test_a_clock_that_is_a_day_off_makes_no_prices_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in (-86400.0, 86400.0):
        monkeypatch.setattr("launcher.runs.cost_limit.time.time", lambda off=off: NOW + off)
        for date in ("2026-11-23", "2026-10-25"):
            made = plan_of(replace(NEW, date=date))
            assert old_prices(made) == ""
    assert old_prices(plan_of(replace(NEW, date="2026-10-22"))) != ""
