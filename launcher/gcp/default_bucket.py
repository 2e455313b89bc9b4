"""Check who owns the default bucket gs://PROJECT-launch.

Bucket names are global, and this one is easy to guess. Whoever creates it first could read everything that runs write
there, and change everything that runs and Cloud Build read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from launch_train.common.storage import GcsFolder, OutputError
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.gcp.api import Api, RestClient, Service, open_session, status_of
from launcher.gcp.storage import explain_error, without_command
from launcher.plan.names import default_output

PROJECTS: Final = Service("cloudresourcemanager", "Cloud Resource Manager", "roles/browser")
BUCKET_READER: Final = "roles/storage.legacyBucketReader"
"""The smallest role with storage.buckets.get that can be granted on one bucket."""
NAME_IT: Final = "Name a bucket that you trust: output: gs://BUCKET/runs (or --output gs://BUCKET/runs)."


def check_default_bucket(
    project: str, environ: Mapping[str, str], clock: Clock = REAL, *, region: str = "REGION", way_out: str = NAME_IT
) -> str:
    """Return gs://PROJECT-launch after verifying that the project owns it. `way_out` is the hint if it does not.

    Raises:
        NotAuthorised: another project owns it, or one of the two project numbers can't be read.
        UsageError: the bucket doesn't exist.
    """
    bucket = default_output(project).rpartition("/")[0]
    owner, number = bucket_owner(bucket, project, region, way_out), ""
    try:
        number = project_number(project, environ, clock)
    except LaunchError as error:
        problem = f"can't verify that {bucket} belongs to project {project}: {error.problem}"
        raise NotAuthorised(problem, f"{error.hint}\n{way_out}".strip()) from error
    if not number or owner != number:
        problem = f"{bucket} belongs to project {owner or 'unknown'}, not to {project} ({number}), so it is not used"
        raise NotAuthorised(problem, way_out)
    return bucket


def bucket_owner(bucket: str, project: str, region: str, way_out: str) -> str:
    """Return the number of the project that owns a bucket. Raises NotAuthorised, UsageError."""
    try:
        return GcsFolder(bucket).project_number()
    except OutputError as error:
        explained = explain_error(error, {"PROJECT": project, "REGION": region})
        if status_of(error) == 404:
            raise UsageError(explained.problem, f"{explained.hint}\n{way_out}") from error
        grant = f"gcloud storage buckets add-iam-policy-binding {bucket} --member=user:YOU --role={BUCKET_READER}"
        hint = f"{grant}\n{way_out}" if status_of(error) == 403 else f"{explained.hint}\n{way_out}".strip()
        raise NotAuthorised(f"can't read which project owns {bucket}: {without_command(error)}", hint) from error


def project_number(project: str, environ: Mapping[str, str], clock: Clock = REAL) -> str:
    """Return a project's number. Raises LaunchError."""
    api = Api(PROJECTS, project, RestClient(PROJECTS, *open_session(PROJECTS, environ)), clock)
    return str(api.ask("send", path=f"/v1/projects/{quote(project, safe='')}").get("projectNumber", ""))
