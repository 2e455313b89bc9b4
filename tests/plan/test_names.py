"""Labels and default names."""

from __future__ import annotations

from launcher.plan import names
from tests.plan.planning import context, spec


def test_labels_find_the_run_again() -> None:
    labels = names.labels(spec(labels={"team": "a"}), context(), "job-1")
    assert labels["launch-run"] == "job-1"
    assert labels["team"] == "a"
    assert labels["launch-version"] == "0-1-0"  # label values take no dots


def test_domain_scoped_project() -> None:
    assert names.default_repository("example.com:p") == "us-docker.pkg.dev/example.com/p/launch"
    assert names.default_service_account("example.com:p") == "launch@p.example.com.iam.gserviceaccount.com"
    assert names.default_output("example.com:p") == "gs://example-com-p-launch/runs"
