"""`make golden`: record again what the tests compare with. Look at the diff before you commit it."""

from __future__ import annotations

import json

from launcher.spec.schema import json_schema
from tests import features, fields, mutants, recipes, what_ran
from tests.command import SPECS
from tests.golden import terraform
from tests.golden.cases import FOLDER, cases, recorded


def main() -> None:
    """Write the schema, the tables in the documentation, the Terraform module, golden files and recipes' outputs."""
    (SPECS / "schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n")
    fields.PAGE.write_text(fields.renewed(fields.PAGE.read_text()))
    features.PAGE.write_text(features.renewed(features.PAGE.read_text()))
    mutants.PAGE.write_text(mutants.renewed(mutants.PAGE.read_text()))
    what_ran.renew()
    terraform.PAGE.write_text(terraform.rendered())
    for case in cases():
        (FOLDER / case.file).write_text(recorded(case))
    for page in recipes.pages():
        page.write_text(recipes.renewed(page.read_text()))


if __name__ == "__main__":
    main()
