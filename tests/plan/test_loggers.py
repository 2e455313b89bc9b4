from __future__ import annotations

from typing import Any

import pytest

from launch_train.common import contract
from launcher.errors import PlanRefused
from launcher.plan.model import Packages
from tests.plan.planning import env_of, planned, request

TENSORBOARD = "projects/my-project/locations/us-central1/tensorboards/1"
ACCOUNT = {"service_account": "trainer@my-project.iam.gserviceaccount.com"}
KEY = {"WANDB_API_KEY": "projects/my-project/secrets/wandb/versions/latest"}
BOARD: dict[str, Any] = {"vertex": {"tensorboard": TENSORBOARD}, "identity": ACCOUNT}
URI = f"us-docker.pkg.dev/p/r/theirs@sha256:{'a' * 64}"


def trainer(*names: str) -> dict[str, Any]:
    return {"module": "launch_train", "config": {"loggers": [*names]}}


def script(*names: str) -> dict[str, Any]:
    return {"script": "a.py", "loggers": [*names]}


def having(*packages: str) -> dict[str, Any]:
    return {"packages": Packages(loggers=packages)}


def refused(*args: Any, **fields: Any) -> PlanRefused:
    with pytest.raises(PlanRefused) as refusal:
        planned(*args, **fields)
    return refusal.value


def warned(*args: Any, **fields: Any) -> list[str]:
    return [line.partition(":")[0] for line in planned(*args, **fields).warnings if "loggers" in line]


@pytest.mark.parametrize("run", [trainer, script])
@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_logger_needs_its_package_in_the_image(run: Any, name: str, package: str) -> None:
    found = refused(run=run(name))
    assert (found.field, found.hint.rpartition(" ")[2]) == (
        "run.config.loggers" if run is trainer else "run.loggers",
        package,
    )
    assert planned(run=run(name), world=having(package))
    assert planned("local", run=run(name))  # this machine's Python says so itself


def test_either_of_mlflows_packages_will_do() -> None:
    assert planned(run=script("mlflow"), world=having("mlflow"))


@pytest.mark.parametrize("image", [{"uri": URI}, {"base": "example.com/base:1", "torch": "base"}])
def test_an_image_of_the_users_own_may_have_it(image: dict[str, Any]) -> None:
    assert planned(run=script("wandb"), image=image)


def test_a_scripts_loggers_travel_in_the_environment_and_are_no_part_of_the_run_id() -> None:
    assert env_of(request(run=script("tensorboard", "wandb"), world=having("wandb")))[contract.LOGGERS] == (
        "tensorboard,wandb"
    )
    assert env_of(request(run=script()))[contract.LOGGERS] == ""
    assert contract.LOGGERS not in env_of(request(run={"script": "a.py"}))
    ids = {planned(run={"script": "a.py"}).run, planned(run=script()).run}
    assert len(ids) == 1


def test_vertex_is_the_jobs_tensorboard_instance() -> None:
    assert refused(run=script("vertex")).field == "run.loggers"
    assert refused("vm", run=script("vertex"), **BOARD).field == "run.loggers"
    body = request(run=script("vertex"), **BOARD)
    assert body["jobSpec"]["tensorboard"] == TENSORBOARD
    assert refused(run=script(), **BOARD).field == "vertex.tensorboard"
    assert planned(run=script("tensorboard"), **BOARD)
    assert planned(run={"script": "a.py"}, **BOARD)  # by default there are events


def test_what_a_logger_needs_to_reach_its_server_is_said() -> None:
    both = having("wandb", "mlflow")
    assert warned(run=script("wandb", "mlflow"), world=both) == ["run.loggers", "run.loggers"]
    told = {"secrets": KEY, "identity": ACCOUNT, "env": {"MLFLOW_TRACKING_URI": "https://mlflow.example.com"}}
    assert warned(run=script("wandb", "mlflow"), world=both, **told) == []
    assert warned(run=script("wandb"), world=both, env={"WANDB_MODE": "offline"}) == []
    assert warned("local", run=script("wandb", "vertex")) == ["run.loggers"]
