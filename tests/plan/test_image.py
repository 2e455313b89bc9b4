"""The image of a plan: which variant, and tags that follow their content and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from launcher import catalog
from launcher.errors import PlanRefused
from launcher.images.registry import parse
from launcher.plan.build import image, with_digest
from launcher.plan.model import Content, Image
from tests.plan.planning import CATALOG, context, planned, spec

DIGEST = "sha256:" + "a" * 64
OWN = f"us-docker.pkg.dev/p/r/i@{DIGEST}"


def made(world: dict[str, Any] | None = None, **fields: Any) -> Image:
    return image(spec(**fields), CATALOG, context(**{"base": "python:3.12", **(world or {})}))


def tags(**world: Any) -> tuple[str, str]:
    """The tags of the dependency image and of the image."""
    found = made({name: Content(digest=value) for name, value in world.items()})
    return found.dependencies.rpartition(":")[2], found.uri.rpartition(":")[2]


def test_names_and_variant_come_from_the_machine() -> None:
    h100 = made()
    assert h100.uri.startswith("us-docker.pkg.dev/my-project/launch/train:")
    assert h100.dependencies.startswith("us-docker.pkg.dev/my-project/launch/dependencies:")
    assert (h100.platform, h100.wheel, h100.min_driver, h100.base) == ("linux/amd64", "cu126", "525", "python:3.12")
    gb200 = made(machine={"type": "gb200", "gpus": 4})
    assert (gb200.platform, gb200.wheel, gb200.min_driver) == ("linux/arm64", "cu130", "580")
    assert gb200.dependencies != h100.dependencies


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("us-docker.pkg.dev/example.com:my-project/launch", "us-docker.pkg.dev/example.com/my-project/launch"),
        ("us-docker.pkg.dev/example.com/my-project/launch", "us-docker.pkg.dev/example.com/my-project/launch"),
    ],
)
def test_repositories_as_people_write_them(written: str, used: str) -> None:
    found = made(image={"repository": written})
    assert parse(found.uri).name == f"{used}/train"
    assert parse(found.dependencies).name == f"{used}/dependencies"


@pytest.mark.parametrize("part", ["recipe", "requirements", "torch"])
def test_what_changes_the_dependencies_changes_both(part: str) -> None:
    before, after = tags(), tags(**{part: "new"})
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("part", ["trainer", "code"])
def test_an_edit_changes_the_image_alone(part: str) -> None:
    before, after = tags(), tags(**{part: "new"})
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_parts_are_not_mixed_up() -> None:
    names = ("recipe", "requirements", "torch", "trainer", "code")
    assert len({tags(**{name: "same"}) for name in names}) == len(names)


def test_the_base_counts() -> None:
    own = made(image={"base": f"localhost:5000/base@{DIGEST}"})
    assert own.base == f"localhost:5000/base@{DIGEST}"
    assert own.dependencies != made().dependencies


def test_a_custom_image_is_used_unchanged() -> None:
    found = made(image={"uri": OWN})
    assert (found.uri, found.pinned, found.dependencies, found.base) == (OWN, True, "", "")


@pytest.mark.parametrize(
    ("gpu", "count", "wheel", "words"),
    [
        ("v100", 2, "cu130", ["cu130 does not run on NVIDIA", "Use cu126"]),
        ("b200", 8, "cu126", ["cu126 does not run on NVIDIA B200", "Use cu130"]),
    ],
)
def test_a_variant_that_can_not_work_is_refused(gpu: str, count: int, wheel: str, words: list[str]) -> None:
    with pytest.raises(PlanRefused) as refused:
        made(machine={"type": gpu, "gpus": count}, image={"wheel": wheel})
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("own", [{"repository": "localhost:5000/a"}, {"uri": f"127.0.0.1:5000/a@{DIGEST}"}])
def test_an_image_on_this_machine_is_for_this_machine(own: dict[str, str]) -> None:
    with pytest.raises(PlanRefused, match="is on this machine"):
        planned(image=own)
    assert planned("local", image=own).image == image(spec(image=own), CATALOG, context("local"))


def test_a_gpu_is_not_paid_for_to_be_idle() -> None:
    with pytest.raises(PlanRefused, match="cpu has no CUDA, so the NVIDIA H100"):
        planned(image={"wheel": "cpu"})
    with pytest.raises(PlanRefused, match=r"torch-2\.13\.0\+cpu-cp312\.whl has no CUDA, so the NVIDIA H100"):
        planned(image={"torch": "wheels/torch-2.13.0+cpu-cp312.whl"})
    assert planned("local", image={"wheel": "cpu"}).image == image(
        spec(image={"wheel": "cpu"}), CATALOG, context("local")
    )


def test_a_newer_variant_than_needed_is_taken() -> None:
    found = made(image={"wheel": "cu130"})
    assert (found.wheel, found.min_driver) == ("cu130", "580")
    here = image(spec(image={"wheel": "cpu"}), CATALOG, context("local"))
    assert (here.wheel, here.min_driver) == ("cpu", None)


def test_each_gpu_runs_its_own_variant_and_no_older() -> None:
    known = catalog.load()
    for gpu in known.gpus.values():
        assert known.runs(gpu.wheel, gpu)
        assert known.runs("cu126", gpu) == (gpu.wheel == "cu126")
    assert {name for name, gpu in known.gpus.items() if not known.runs("cu130", gpu)} == {"v100", "p100", "p4"}


@pytest.mark.parametrize("target", ["vertex", "vm"])
def test_the_digest_takes_the_tags_place_everywhere(target: str) -> None:
    before = planned(target, provisioning=["spot"])
    assert before.image
    reference = f"{before.image.uri.rpartition(':')[0]}@{DIGEST}"
    after = with_digest(before, reference)
    assert after.image
    assert (after.image.uri, after.image.pinned) == (reference, True)
    for one in after.attempts:
        assert before.image.uri not in str(one.request)
        assert reference in str(one.request)
    assert with_digest(after, reference) == after
    assert str(before.attempts[0].request).replace(before.image.uri, reference) == str(after.attempts[0].request)
