"""What launch would send for each job spec, held against what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fields
from tests.command import SPECS, launch
from tests.golden.cases import FOLDER, Case, cases, recorded


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.file)
def test_dry_run_is_as_recorded(case: Case) -> None:
    assert recorded(case) == (FOLDER / case.file).read_text(), "if the change is meant: make golden"


def test_every_recording_belongs_to_a_case() -> None:
    """A recording that no command makes any more would never be compared."""
    expected = {case.file for case in cases()}
    assert {path.name for path in FOLDER.iterdir() if path.suffix in {".txt", ".json", ".yaml"}} == expected


@pytest.mark.parametrize("case", [case for case in cases() if case.file.endswith(".txt")], ids=lambda case: case.file)
def test_pages_fit_80_columns(case: Case) -> None:
    assert max(map(len, recorded(case).splitlines())) <= 80


def test_the_longest_names_fit_80_columns_too(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(
        f"name: {'n' * 41}\nmachine: {{type: h100, gpus: 8, nodes: 1000}}\nregions: any\n"
        f"output: gs://{'b' * 60}/{'p' * 60}\n"
        'run: {command: [bash, -c, "one\\ntwo \\e[31mred"], args: [' + ", ".join(["--argument"] * 20) + "]}\n"
        "provisioning: [spot, flex-start, standard]\n"
    )
    for command in ("vertex", "local"):
        page = launch(command, spec, "--dry-run", env={"CLOUDSDK_CORE_PROJECT": "p" * 30}).out
        assert "n" * 41 in page
        assert max(map(len, page.splitlines())) <= 80
        assert "\x1b" not in page
        assert "one\\ntwo" in page


@pytest.mark.parametrize("case", cases()[:6], ids=lambda case: case.file)
def test_dry_runs_are_the_same_bytes_every_time(case: Case) -> None:
    assert launch(*case.argv).out == launch(*case.argv).out


@pytest.mark.parametrize("case", [case for case in cases() if case.file.endswith(".json")], ids=lambda case: case.file)
def test_requests_parse_strictly_into_googles_types(case: Case) -> None:
    from launcher.testing.googlecloud.compute.service import parse_instance
    from launcher.testing.googlecloud.vertex.jobs import parse_custom_job

    plan: dict[str, Any] = json.loads(recorded(case))
    for attempt in plan["attempts"]:
        if plan["target"] == "vm":
            parse_instance(attempt["request"])
        else:
            parse_custom_job(attempt["request"])


def test_schema_is_recorded() -> None:
    assert launch("schema").out == (SPECS / "schema.json").read_text()


def test_the_table_of_fields_is_as_the_schema_has_it() -> None:
    text = fields.PAGE.read_text()
    assert fields.renewed(text) == text
    assert "| `machine.gpus` |" in text
