"""The values of a sweep: how they are written, and which points they make."""

from __future__ import annotations

import math
from typing import Any

import pytest

from launcher.errors import LaunchError, SpecError, UsageError
from launcher.spec.nodes import List, Map, Scalar, plain
from launcher.spec.overrides import apply_overrides, parse_set
from launcher.spec.sweep import MOST_POINTS, Point, parse_axes, points
from launcher.spec.yaml_loader import load

LR = "run.config.optimizer.lr"


def values(found: tuple[Point, ...]) -> list[tuple[Any, ...]]:
    return [tuple(one.value for one in point) for point in found]


def grid(*texts: str) -> list[tuple[Any, ...]]:
    return values(points(parse_axes(texts)[1], None, 0))


def drawn(count: int, *texts: str, seed: int = 0) -> list[tuple[Any, ...]]:
    return values(points(parse_axes(texts)[1], count, seed))


def test_a_grid_has_every_combination_in_order() -> None:
    assert grid("a=1,2", "b=x,y") == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1e-4, 3e-4", [1e-4, 3e-4]),
        ("a=[us-central1, us-east4],[us-west1]", [["us-central1", "us-east4"], ["us-west1"]]),
        ("a={x: 1, y: 2},{x: 3}", [{"x": 1, "y": 2}, {"x": 3}]),
        ("a='x, y',z", ["x, y", "z"]),
        ("a=true,false", [True, False]),
        ("a=1,1.0", [1, 1.0]),
    ],
)
def test_commas_in_brackets_and_quotes_separate_nothing(text: str, expected: list[Any]) -> None:
    assert grid(text) == [(one,) for one in expected]


@pytest.mark.parametrize("text", ["a=5", "a=[1, 2]", "a='1,2'", "a={b: 1, c: 2}"])
def test_a_single_value_is_no_axis(text: str) -> None:
    assert parse_axes([text]) == ([text], ())


@pytest.mark.parametrize(
    ("text", "expected"), [("lr", "expected SETTING=VALUE"), ("lr=", "is missing"), ('a="', "quote")]
)
def test_a_text_that_is_no_setting(text: str, expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        parse_axes([text])


def test_random_points_are_the_same_each_time_and_more_of_them_begin_with_the_same() -> None:
    texts = (f"{LR}=log(1e-5,1e-2)", "b=uniform(0,0.5)", "c=int(1,3)", "d=x,y")
    first = drawn(20, *texts)
    assert drawn(20, *texts) == first
    assert drawn(30, *texts)[:20] == first
    assert drawn(20, *texts, seed=1) != first
    assert {type(value) for value in first[0]} == {float, int, str}
    assert {point[2] for point in first} == {1, 2, 3}
    assert {point[3] for point in first} == {"x", "y"}
    assert all(1e-5 <= point[0] <= 1e-2 and 0 <= point[1] <= 0.5 for point in first)
    decades = {math.floor(math.log10(point[0])) for point in first}
    assert decades == {-5, -4, -3}, "evenly over the decades"


def test_fewer_points_than_asked_for_if_the_values_allow_no_more() -> None:
    assert sorted(drawn(20, "a=int(1,3)")) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("texts", "count", "words"),
    [
        ([], None, "nothing to sweep"),
        (["a=5"], None, "nothing to sweep"),
        (["a=1,2", "a=3,4"], None, "twice"),
        (["a=1,2", "a=3"], None, "twice"),
        (["a=1,2,1"], None, "twice"),
        (["a=0.0001,1e-4"], None, "twice"),
        (["a=1,,2"], None, "missing"),
        (["a=1,"], None, "missing"),
        (["a=log(1,2)"], None, "--random"),
        (["a=log(0,2)"], 2, "above 0"),
        (["a=log(2,1)"], 2, "below"),
        (["a=int(0.5,2)"], 2, "whole"),
        (["a=uniform(1)"], 2, "two numbers"),
        (["a=uniform(0,nan)"], 2, "below"),
    ],
)
def test_what_is_refused(texts: list[str], count: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        points(parse_axes(texts)[1], count, 0)


def test_too_many_points_are_refused_before_they_are_made() -> None:
    axis = ",".join(map(str, range(50)))
    with pytest.raises(LaunchError, match="125,000") as caught:
        grid(f"a={axis}", f"b={axis}", f"c={axis}")
    assert "--random" in caught.value.hint
    with pytest.raises(UsageError):
        drawn(MOST_POINTS + 1, "a=uniform(0,1)")


@pytest.mark.parametrize(
    ("arguments", "setting", "expected"),
    [
        ("[--lr, 0.1, data]", "lr=1e-3", ["--lr", "1e-3", "data"]),
        ("[--lr=0.1, data]", "lr=1e-3", ["--lr=1e-3", "data"]),
        ("[optimizer.lr=0.1, +seed=1]", "optimizer.lr=1e-3", ["optimizer.lr=1e-3", "+seed=1"]),
        ("[--batch_size, 8]", "batch-size=16", ["--batch_size", "16"]),
        ("[--shift, -0.5, --amp]", "shift=-1", ["--shift", "-1", "--amp"]),
        ("[--lr, 1, --lr, 2]", "lr=3", ["--lr", "1", "--lr", "3"]),
        ("[lr, --lr, 2]", "lr=3", ["lr", "--lr", "3"]),
        ("[data]", "lr=1e-3", ["data", "--lr=1e-3"]),
        ("[data=x]", "lr=1e-3", ["data=x", "lr=1e-3"]),
        ("[data=x]", "debug=false", ["data=x", "debug=false"]),
        ("[--amp, --, --lr, 1]", "lr=2", ["--amp", "--lr=2", "--", "--lr", "1"]),
        ("[--amp, --lr, 1]", "amp=false", ["--lr", "1"]),
        ("[--amp, --lr, 1]", "amp=true", ["--amp", "--lr", "1"]),
        ("[--lr, 1]", "amp=true", ["--lr", "1", "--amp"]),
        ("[--amp, data]", "amp=false", ["data"]),
        ("[--amp, False]", "amp=true", ["--amp", "true"]),
        ("[]", "lr=1e-3", ["--lr=1e-3"]),
        ("null", "lr=1e-3", ["--lr=1e-3"]),
    ],
)
def test_one_argument_of_a_script_is_set_in_the_form_that_it_has(
    arguments: str, setting: str, expected: list[str]
) -> None:
    spec = load(f"run: {{script: train.py, args: {arguments}}}".encode(), lambda line: f"job.yaml:{line}").root
    root, problems = apply_overrides(spec, [parse_set(f"run.args.{setting}")])
    assert not problems
    assert isinstance(root, Map)
    run = root.entries["run"]
    assert isinstance(run, Map)
    arguments_node = run.entries["args"]
    assert isinstance(arguments_node, List)
    assert [item.text for item in arguments_node.items if isinstance(item, Scalar)] == expected


def test_an_argument_has_a_single_value_and_is_set_in_a_list() -> None:
    spec = load(b"run: {script: train.py, args: [--lr, 1]}", lambda line: f"job.yaml:{line}").root
    _, [problem] = apply_overrides(spec, [parse_set("run.args.lr=[1, 2]")])
    assert "expected a single value" in problem.what
    several = load(b"run: {script: train.py, args: [--lr, 1, 2, 3, --amp]}", lambda line: f"job.yaml:{line}").root
    _, [problem] = apply_overrides(several, [parse_set("run.args.lr=4")])
    assert "--lr has several values (job.yaml:1)" in problem.what
    text = load(b"run: {script: train.py, args: --lr}", lambda line: f"job.yaml:{line}").root
    _, [problem] = apply_overrides(text, [parse_set("run.args.lr=1")])
    assert "run.args is not a list (job.yaml:1)" in problem.what
    without = load(b"run: {script: train.py}", lambda line: f"job.yaml:{line}").root
    root, problems = apply_overrides(without, [parse_set("run.args.lr=1"), parse_set("run.args.lr=2")])
    assert not problems
    assert plain(root)["run"]["args"] == ["--lr=2"]
