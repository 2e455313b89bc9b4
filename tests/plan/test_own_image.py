"""A finished image: with the node appended, without it, or as it is."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import PlanRefused, SpecError
from launcher.plan.build import image
from launcher.plan.model import Content
from launcher.spec.reader import read_text
from tests.plan.planning import CATALOG, context, planned, spec

URI = f"us-docker.pkg.dev/p/r/theirs@sha256:{'a' * 64}"


def container(**fields: Any) -> dict[str, Any]:
    body = planned(**fields).attempts[0].request
    found: dict[str, Any] = body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    return found


def test_by_default_an_existing_image_is_used_as_it_is() -> None:
    found = container(image={"uri": URI})
    assert (found["imageUri"], found["command"]) == (URI, ["python", "-m", "launch_train.node"])


def test_with_the_node_appended_it_gets_a_tag_of_its_own() -> None:
    found = image(spec(image={"uri": URI}, run={"script": "a.py", "node": "append"}), CATALOG, context())
    assert (found.base, found.pinned, found.appends_node, found.wheel) == (URI, False, True, "base")
    assert found.dependencies.startswith("us-docker.pkg.dev/my-project/launch/dependencies:")
    other = image(
        spec(image={"uri": URI}, run={"script": "a.py", "node": "append"}), CATALOG, context(locks=Content(digest="x"))
    )
    assert other.dependencies != found.dependencies


@pytest.mark.parametrize(("run", "command"), [({}, []), ({"command": ["/app/go", "1"]}, ["/app/go", "1"])])
def test_without_the_node_the_images_own_entrypoint_runs(run: dict[str, Any], command: list[str]) -> None:
    found = container(image={"uri": URI}, run={**run, "node": "none", "args": ["--epochs", "3"]}, env={"A": "b"})
    assert (found["imageUri"], found["command"], found["args"]) == (URI, command, ["--epochs", "3"])
    names = {one["name"] for one in found["env"]}
    assert {"A", "LAUNCH_RUN", "LAUNCH_RUN_FOLDER"} == names


def test_a_vm_needs_the_node() -> None:
    with pytest.raises(PlanRefused, match=r"run\.node"):
        planned("vm", image={"uri": URI}, run={"node": "none"})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run: {script: a.py, node: append}\n", "job.yaml:3: run.node"),
        (f"image: {{uri: {URI}}}\nrun: {{node: append}}\n", "job.yaml:4: run.node"),
        (f"image: {{uri: {URI}}}\nrun: {{node: none, script: a.py}}\n", "job.yaml:4: run.script"),
        (f"image: {{uri: {URI}}}\nrun: {{node: none, hang_after: 60}}\n", "job.yaml:4: run.hang_after"),
        (
            f"image: {{uri: {URI}}}\nrun: {{node: none, resume_glob: a, resume_args: [b]}}\n",
            "job.yaml:4: run.resume_args",
        ),
        (f"image: {{uri: {URI}, code: .}}\nrun: {{script: a.py}}\n", "job.yaml:3: image.code"),
    ],
)
def test_what_does_not_go_together_is_refused_at_its_line(text: str, place: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_text(f"name: x\nmachine: {{type: l4}}\n{text}".encode(), "job.yaml")
    assert place in str(refused.value)


def test_code_goes_on_top_of_an_image_with_the_node() -> None:
    text = f"name: x\nmachine: {{type: l4}}\nimage: {{uri: {URI}, code: .}}\nrun: {{script: a.py, node: append}}\n"
    assert read_text(text.encode(), "job.yaml").image.code == "."


def test_a_base_from_a_dockerfile_follows_its_content() -> None:
    def made(content: str) -> Any:
        fields = {"dockerfile": "Own.Dockerfile"}
        return image(spec(image=fields), CATALOG, context(base="python:3.12", own_base=Content(digest=content)))

    found, other = made("a"), made("b")
    assert (found.builds_base, found.wheel) == (True, "cu126")
    assert found.base.startswith("us-docker.pkg.dev/my-project/launch/base:")
    assert found.base != other.base
    assert found.dependencies != other.dependencies
    assert planned(image={"dockerfile": "D"}).run != planned().run
