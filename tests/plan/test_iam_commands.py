"""The gcloud commands that make a small account, as a shell reads them."""

from __future__ import annotations

import shlex

from launcher.plan import iam_commands


def commands(text: str) -> list[list[str]]:
    """The commands of a text, each in its words."""
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]


def test_the_account_of_a_vm_to_work_on() -> None:
    create, logs, images, bucket = commands(iam_commands.account("p", "gs://b/x/y", deletes=None))
    assert create == ["gcloud", "iam", "service-accounts", "create", "launch", "--project=p"]
    assert "--member=serviceAccount:launch@p.iam.gserviceaccount.com" in logs
    assert "--role=roles/logging.logWriter" in logs
    assert "--role=roles/artifactregistry.reader" in images
    assert bucket[:5] == ["gcloud", "storage", "buckets", "add-iam-policy-binding", "gs://b"]
    assert "--role=roles/storage.objectUser" in bucket


def test_one_that_trains_may_delete_itself_and_nothing_else() -> None:
    *_, grant = commands(iam_commands.account("p", None, deletes="job-"))
    assert grant[3] == "p"
    assert "--role=roles/compute.instanceAdmin.v1" in grant
    (condition,) = [word for word in grant if word.startswith("--condition=")]
    assert condition == (
        "--condition=title=launch-deletes-its-vms,"
        'expression=resource.type == "compute.googleapis.com/Instance" && '
        'resource.name.extract("/instances/{name}").startsWith("job-")'
    )


def test_what_a_spec_names_is_quoted() -> None:
    email = "$(id);'x'@p.iam.gserviceaccount.com"
    (words,) = commands(iam_commands.self_delete("p", email, "job-"))
    assert f"--member=serviceAccount:{email}" in words
