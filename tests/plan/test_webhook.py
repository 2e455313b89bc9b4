"""A webhook's URL is a secret: it is in no request of the cloud, and on no page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train.common import contract
from launcher.cli.options import Output
from launcher.cli.ui import plan_page
from launcher.errors import PlanRefused
from launcher.plan.changes import compare_plans
from launcher.project.needs import needs_of
from tests.plan.planning import env_of, planned, request, spec

SECRET = "projects/my-project/secrets/hook/versions/latest"
URL = "https://hooks.example.com/T0/B1/s3cr3t"
ACCOUNT = {"service_account": "trainer@my-project.iam.gserviceaccount.com"}


def notify(webhook: str = SECRET, **fields: Any) -> dict[str, Any]:
    return {"notify": {"webhook": webhook, **fields}}


def test_the_settings_travel_with_their_defaults_and_the_cost_limit() -> None:
    fields = notify(on=["failed", "cost>80%"], format="slack")
    body = request(identity=ACCOUNT, limits={"usd": 1000, "hours": 1}, **fields)
    assert json.loads(env_of(body)[contract.NOTIFY]) == {
        "webhook": SECRET,
        "on": ["failed", "cost>80%"],
        "format": "slack",
        "usd": 1000,
    }
    told = json.loads(env_of(request(identity=ACCOUNT, **notify()))[contract.NOTIFY])
    assert (told["on"], told["usd"]) == (["preempted", "failed", "finished", "stalled"], None)


def test_a_run_is_the_same_with_another_webhook() -> None:
    assert planned(identity=ACCOUNT).run == planned(identity=ACCOUNT, **notify()).run


@pytest.mark.parametrize("target", ["vertex", "vm"])
def test_a_url_is_refused_in_the_cloud(target: str) -> None:
    with pytest.raises(PlanRefused) as refusal:
        planned(target, identity=ACCOUNT, **notify(URL))
    assert refusal.value.field == "notify.webhook"
    assert "gcloud secrets create" in refusal.value.hint
    assert "s3cr3t" not in str(refusal.value)


def test_a_webhook_of_this_machine_is_for_a_cloud_on_this_machine() -> None:
    own = notify("http://127.0.0.1:8000/hook")
    assert planned(world={"is_local_cloud": True}, **own)
    with pytest.raises(PlanRefused):
        planned(**own)


def test_a_job_on_vertex_ai_needs_an_account_that_reads_it() -> None:
    with pytest.raises(PlanRefused) as refusal:
        planned(**notify())
    assert refusal.value.field == "notify.webhook"
    assert needs_of(planned(identity=ACCOUNT, **notify())).secrets == (SECRET,)


@pytest.mark.parametrize("output", Output)
def test_no_page_of_a_local_run_shows_the_url(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("local", **notify(URL))
    assert json.loads(env_of(plan.attempts[0].request)[contract.NOTIFY])["webhook"] == URL
    plan_page.show_plan(plan, spec(**notify(URL)), output)
    assert "s3cr3t" not in capsys.readouterr().out
    assert "s3cr3t" not in repr(compare_plans(planned("local"), plan))
