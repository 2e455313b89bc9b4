"""The JSON Schema and the starter spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.spec.models import JobSpec
from launcher.spec.schema import json_schema
from launcher.spec.shapes import fields
from launcher.spec.starter import STARTER
from launcher.spec.wording import every_path
from tests import fields as documented
from tests.spec.helpers import spec


def properties(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json_schema()["$defs"][name]["properties"]
    return found


def test_the_file_is_the_models_schema() -> None:
    path = Path(__file__).parents[2] / "job_specs" / "schema.json"
    assert json.loads(path.read_text()) == json_schema(), "renew it: launch schema > job_specs/schema.json"


def test_its_head() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$ref"] == "#/$defs/JobSpec"
    assert schema["title"]


def test_it_has_every_field_and_no_other() -> None:
    for model, definition in json_schema()["$defs"].items():
        assert definition["additionalProperties"] is False, model
    assert list(properties("JobSpec")) == list(fields(JobSpec))
    assert sum(len(one["properties"]) for one in json_schema()["$defs"].values()) == len(every_path(JobSpec))


def test_it_is_as_lenient_as_the_reader() -> None:
    written = {"type": ["string", "number", "boolean"]}
    assert properties("JobSpec")["env"]["additionalProperties"] == written
    assert properties("Run")["args"]["items"] == written
    assert properties("Run")["command"]["anyOf"][0]["items"] == written
    for name in ("provisioning", "regions", "zones"):
        many, *_, one = properties("JobSpec")[name]["anyOf"]
        assert one == many["items"]


def test_optional_fields_are_described_where_editors_look() -> None:
    assert properties("Machine")["gpus"]["description"] == "GPUs per node; default: all of the machine type's"


def test_every_field_is_described() -> None:
    assert [path for path, _, meaning in documented.fields() if not meaning] == []


def test_the_starter_spec_can_be_read_and_is_explained() -> None:
    text = STARTER
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert spec(text).name == "my-first-run"
    assert all(len(line) <= 120 for line in text.splitlines())


def test_what_the_starter_spec_has_commented_out_can_be_read_too() -> None:
    text = (
        STARTER.replace("# secrets:", "secrets:").replace("#   HF_TOKEN", "  HF_TOKEN").replace("# output:", "output:")
    )
    job = spec(text)
    assert (list(job.secrets), job.output) == (["HF_TOKEN"], "gs://my-bucket/runs")
