"""Build the dependency image with Cloud Build, for users without a Docker engine.

The context is uploaded to the project's bucket. One build is submitted and followed, and it pushes the image. A build
is tagged with its image, so a build that another launch has started is followed instead of started twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from launch_train.common.loopback import is_loopback, is_plain_loopback
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UsageError
from launcher.gcp.api import Api, Service, UnreachableError, open_client
from launcher.gcp.default_bucket import NAME_IT, check_default_bucket
from launcher.images.cloud_build_bucket import LOGS, WITH_DOCKER, Log, Sent, send
from launcher.images.source_files import Source
from launcher.plan.model import Image

SERVICE = Service("cloudbuild", "Cloud Build", "roles/cloudbuild.builds.editor")
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBUILD"
DOCKER = "gcr.io/cloud-builders/docker"
"""Cloud Build's own Docker step (https://cloud.google.com/build/docs/cloud-builders)."""
PLATFORM = "linux/amd64"
"""The platform of Cloud Build's machines."""
STAGE = "dependencies"
POLL_SECONDS = 3.0
LANDING_SECONDS = 20.0
"""Time in which a build whose create request got no response must appear."""
TRIES = 3
ACTIVE = ("PENDING", "QUEUED", "WORKING")

OnLine = Callable[[str], None]


class Options(Struct, frozen=True, kw_only=True):
    """Options of a build. Empty: Google's default."""

    location: str = "global"
    machine_type: str = ""
    """For example E2_HIGHCPU_8."""
    service_account: str = ""
    """The email of the account that it runs as."""
    timeout_seconds: int = 7200
    """The build downloads, compresses and pushes several gigabytes of PyTorch and CUDA."""


class RunningBuild(NamedTuple):
    """A running build. `ours`: this launch started it."""

    id: str
    log_url: str
    ours: bool


class BuildScope(NamedTuple):
    """The parent resource of builds, and the tag of this image's builds."""

    parent: str
    tag: str

    def build(self, build_id: str) -> str:
        """Return a build's resource name."""
        return f"{self.parent}/builds/{build_id}"


def build(
    source: Source,
    image: Image,
    *,
    project: str,
    environ: Mapping[str, str],
    bucket: str = "",
    on_line: OnLine = lambda _line: None,
    options: Options = Options(),  # noqa: B008 - it is frozen
    clock: Clock = REAL,
) -> str:
    """Build and push the dependency image, and return its digest. The build's log goes to `on_line`.

    `bucket` receives the source (gs://NAME; empty: the project's default bucket). Ctrl-C cancels the build, unless
    another launch started it.

    Raises:
        UsageError: the image is for another platform than Cloud Build's, or for a registry that it can't push to.
        NotAuthorised: no credentials, a missing permission, or the bucket belongs to another project.
        LaunchError: the build failed (with its last lines), or the bucket or the API can't be used.
    """
    from launcher.images.build_context import build_context

    check_image(image, environ)
    api = Api(SERVICE, project, client(environ), clock)
    bucket = bucket or check_default_bucket(project, environ, clock, way_out=f"{NAME_IT}\n{WITH_DOCKER}")
    # The stage copies no code, so an edit of the code needs no new upload.
    with build_context(replace(source, trainer=(), code=(), digest="")) as context:
        content = send(context, bucket, on_line)
    scope = BuildScope(f"projects/{project}/locations/{options.location}", tag_of(image))
    running: RunningBuild | None = None
    try:
        running = submit(api, scope, build_request(image, project, bucket, content, options))
        on_line(f"Cloud Build {running.id}{'' if running.ours else ' (of another launch)'}: {running.log_url}")
        log = Log(bucket, running.id, on_line)
        ended = follow(api, scope, running, log.follow, on_line)
    except KeyboardInterrupt:
        cancel(api, scope, running, on_line)
        raise
    return digest_of(ended, image.dependencies, log.last)


def check_image(image: Image, environ: Mapping[str, str]) -> None:
    """Check that Cloud Build can build and push an image. Raises UsageError."""
    from launcher.images.reference import artifact_repository, parse

    name = parse(image.dependencies)
    here = is_loopback(name.host) and is_plain_loopback(environ.get(ENDPOINT, ""))  # both are loopback only in tests
    if artifact_repository(name.host, name.repository) is None and not here:
        raise UsageError(
            f"Cloud Build can't push to {name.host}, only to Artifact Registry",
            "Remove image.repository, use one like us-docker.pkg.dev/my-project/launch, or --builder docker",
        )
    if image.build_secrets or image.builds_base:
        field = "image.build_secrets" if image.build_secrets else "image.dockerfile"
        raise UsageError(
            f"{field}: launch can't build this with Cloud Build",
            "Build with a Docker engine: --builder docker",
        )
    if image.platform != PLATFORM:
        raise UsageError(
            f"the image is for {image.platform}, but Cloud Build's machines are {PLATFORM}",
            f"Build it with a Docker engine for {image.platform}: --builder docker",
        )


def client(environ: Mapping[str, str]) -> Any:
    """Return Google's client. Raises LaunchError."""
    try:
        from google.cloud.devtools import cloudbuild_v1
    except ImportError as error:
        raise LaunchError("Cloud Build needs google-cloud-build", 'pip install "gcp-launch[gcp]"') from error
    return open_client(cloudbuild_v1.CloudBuildClient, SERVICE, environ)


def tag_of(image: Image) -> str:
    """Return the tag of all builds of this image, whose name contains a digest of its content."""
    return f"launch-{hashlib.sha256(image.dependencies.encode()).hexdigest()[:16]}"


def build_request(image: Image, project: str, bucket: str, content: Sent, options: Options) -> dict[str, Any]:
    """Return the Build as JSON (https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds). Pure.

    `bucket` is gs://NAME. `content` is the object with the context, pinned to its generation.
    """
    from launcher.images.append import BASE_LABEL
    from launcher.images.build_context import DOCKERFILE

    docker = ["build", f"--file={DOCKERFILE}", f"--target={STAGE}", f"--tag={image.dependencies}"]
    docker += [f"--label={BASE_LABEL}={image.base}"] if "@" in image.base else []
    docker += [f"--build-arg={name}={value}" for name, value in image.build_arguments.items() if value]
    request: dict[str, Any] = {
        "source": {
            "storageSource": {
                "bucket": bucket.removeprefix("gs://"),
                "object": content.name,
                "generation": content.generation,
            }
        },
        "steps": [{"id": STAGE, "name": DOCKER, "args": [literal(word) for word in (*docker, ".")]}],
        "images": [image.dependencies],
        "timeout": f"{options.timeout_seconds}s",
        "tags": ["launch", tag_of(image)],
        "logsBucket": f"{bucket}/{LOGS}",
        # In a bucket, the log can be followed without the Logging API and its delay.
        "options": {"logging": "GCS_ONLY"},
    }
    if options.machine_type:
        request["options"]["machineType"] = options.machine_type
    if options.service_account:
        request["serviceAccount"] = f"projects/{project}/serviceAccounts/{options.service_account}"
    return request


def literal(text: str) -> str:
    """Escape text so that Cloud Build substitutes nothing in it.

    https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values#escape
    """
    return text.replace("$", "$$")


# --- Submit, follow, cancel -----------------------------------------------------------------------------------------


def submit(api: Api, scope: BuildScope, request: Mapping[str, Any]) -> RunningBuild:
    """Start the build, or return a running one of the same image. Raises LaunchError."""
    existing = list_builds(api, scope)
    if active := [build for build in existing if build.status.name in ACTIVE]:
        return running_build(active[-1], ours=False)
    return start(api, scope, request, {build.id for build in existing})


def start(api: Api, scope: BuildScope, request: Mapping[str, Any], known: set[str], tries: int = TRIES) -> RunningBuild:
    """Start the build. After a lost response, look for it before starting another one.

    `known` are the ids of builds that existed before.
    """
    from google.cloud.devtools import cloudbuild_v1

    message = cloudbuild_v1.Build.from_json(json.dumps(request))
    try:
        operation = api.once("create_build", parent=scope.parent, build=message)
    except UnreachableError:
        if build := find_new_build(api, scope, known):
            return running_build(build, ours=True)
        if tries == 1:
            raise
        return start(api, scope, request, known, tries - 1)
    return running_build(operation.metadata.build, ours=True)


def find_new_build(api: Api, scope: BuildScope, known: set[str]) -> Any:
    """Wait for a build of this image that is not in `known`; return None if none appears. Raises LaunchError."""
    until = api.clock.now() + LANDING_SECONDS
    while True:
        if new := [build for build in list_builds(api, scope) if build.id not in known]:
            return new[-1]
        if api.clock.now() > until:
            return None
        api.clock.sleep(POLL_SECONDS)


def list_builds(api: Api, scope: BuildScope) -> Sequence[Any]:
    """Return the first page of this image's builds, newest first. Raises LaunchError."""
    builds: Sequence[Any] = api.ask("list_builds", parent=scope.parent, filter=f'tags="{scope.tag}"').builds
    return builds


def running_build(message: Any, *, ours: bool) -> RunningBuild:
    """Convert a Build message."""
    return RunningBuild(message.id, message.log_url, ours)


def follow(api: Api, scope: BuildScope, running: RunningBuild, log: Callable[..., None], on_line: OnLine) -> Any:
    """Report states and the log until the build's end, and return the ended Build. Raises LaunchError."""
    state = ""
    while True:
        try:
            current = api.ask("get_build", name=scope.build(running.id))
        except LaunchError as error:
            again = "Repeat the command: it continues to follow the same build."
            hint = again if isinstance(error, UnreachableError) else f"{error.hint}\n{again}".lstrip()
            raise type(error)(f"{error.problem}; Cloud Build {running.id} is still running", hint) from error
        ended = current.status.name not in ACTIVE
        if ended:
            log(ended=True)
        if current.status.name != state:
            state = current.status.name
            on_line(f"Cloud Build {running.id}: {state.lower()}")
        if ended:
            return current
        log()
        api.clock.sleep(POLL_SECONDS)


def cancel(api: Api, scope: BuildScope, running: RunningBuild | None, on_line: OnLine) -> None:
    """Cancel the build after Ctrl-C if this launch started it, and report the outcome."""
    where = f"--project={api.project} --region={scope.parent.rpartition('/')[2]}"
    if running is None:
        on_line(f"if a build was started, it is still running: gcloud builds list --filter=tags={scope.tag} {where}")
    elif not running.ours:
        on_line(f"Cloud Build {running.id} continues; another launch started it")
    else:
        try:
            api.ask("cancel_build", name=scope.build(running.id))
        except LaunchError as error:
            on_line(f"{error.problem}; to cancel it: gcloud builds cancel {running.id} {where}")
        else:
            on_line(f"cancelled Cloud Build {running.id}")


# --- Result ---------------------------------------------------------------------------------------------------------


def digest_of(ended: Any, reference: str, last: Sequence[str]) -> str:
    """Return the digest of the image that a build pushed. Raises LaunchError: the build failed."""
    if ended.status.name != "SUCCESS":
        raise failure(ended, last)
    digests = [str(image.digest) for image in ended.results.images if image.name == reference]
    if not digests:
        raise LaunchError(f"Cloud Build {ended.id} succeeded without the image {reference}", f"See {ended.log_url}")
    return digests[0]


def failure(ended: Any, last: Sequence[str]) -> LaunchError:
    """Return the error of a failed build: the step, Cloud Build's message, the end of the log, and where all of it is,
    with the command that grants a missing permission if that is the cause."""
    step = next((each for each in ended.steps if each.status.name == ended.status.name), None)
    where = f" in step {step.id or step.name}" if step else ""
    reason = ended.failure_info.detail or ended.status_detail
    problem = f"Cloud Build {ended.id} ended as {ended.status.name}{where}{f': {reason}' if reason else ''}"
    hint = f"Full log: {ended.log_url}"
    if any("artifactregistry.repositories.uploadArtifacts" in line for line in last):
        account = ended.service_account.rpartition("/")[2] or "THE-BUILD'S-SERVICE-ACCOUNT"
        member = f"--member=serviceAccount:{account} --role=roles/artifactregistry.writer"
        hint = f"gcloud projects add-iam-policy-binding {ended.project_id} {member}\n{hint}"
    return LaunchError("\n    ".join((problem, *last)), hint)
