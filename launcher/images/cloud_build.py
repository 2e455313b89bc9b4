"""The dependency image by Cloud Build, for people without a Docker engine.

The context goes to the project's bucket, one build is submitted and followed, and the image is in the registry when it
ends. A build is tagged with the image that it makes, so what runs already is followed rather than started twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

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
"""Of Cloud Build's machines."""
STAGE = "dependencies"
POLL_SECONDS = 3.0
LANDING_SECONDS = 20.0
"""How long a build may take to show up whose answer was lost."""
TRIES = 3
ACTIVE = ("PENDING", "QUEUED", "WORKING")

OnLine = Callable[[str], None]


class Options(Struct, frozen=True, kw_only=True):
    """How a build runs. Empty means Google's default."""

    location: str = "global"
    machine_type: str = ""
    """Such as E2_HIGHCPU_8."""
    service_account: str = ""
    """As which it runs, by e-mail address."""
    timeout_seconds: int = 7200
    """PyTorch with CUDA is some gigabytes, to download, to compress and to push."""


class Begun(NamedTuple):
    """A build that runs; `ours`: this launch started it."""

    id: str
    log_url: str
    ours: bool


class Place(NamedTuple):
    """Where builds are asked for, and by which tag those of this image are found."""

    parent: str
    tag: str

    def build(self, build_id: str) -> str:
        """A build's resource name."""
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
    """The dependency image's digest, once it is built and in the registry; the build's log goes to `on_line`.

    Its source goes to `bucket` (gs://NAME; empty: the project's own).

    Ctrl-C cancels the build, unless another launch started it.

    Raises:
        UsageError: the image isn't for Cloud Build's machines, or for a registry that they can't push to.
        NotAuthorised: no credentials, a permission is missing, or the bucket isn't the project's.
        LaunchError: the build failed (its last lines are told), or the bucket or the API can't be used.
    """
    from launcher.images.build_context import build_context

    check_image(image, environ)
    api = Api(SERVICE, project, client(environ), clock)
    bucket = bucket or check_default_bucket(project, environ, clock, way_out=f"{NAME_IT}\n{WITH_DOCKER}")
    with build_context(dependencies_only(source)) as context:
        content = send(context, bucket, on_line)
    place = Place(f"projects/{project}/locations/{options.location}", tag_of(image))
    begun: Begun | None = None
    try:
        begun = submit(api, place, build_request(image, project, bucket, content, options))
        on_line(f"Cloud Build {begun.id}{'' if begun.ours else ', which another launch started'}: {begun.log_url}")
        log = Log(bucket, begun.id, on_line)
        ended = follow(api, place, begun, log.follow, on_line)
    except KeyboardInterrupt:
        give_up(api, place, begun, on_line)
        raise
    return digest_of(ended, image.dependencies, log.last)


def check_image(image: Image, environ: Mapping[str, str]) -> None:
    """Whether Cloud Build can make an image and push it. Raises UsageError."""
    from launcher.images.registry.reference import parse, place

    name = parse(image.dependencies)
    here = is_loopback(name.host) and is_plain_loopback(environ.get(ENDPOINT, ""))  # both are a test's
    if place(name.host, name.repository) is None and not here:
        raise UsageError(
            f"Cloud Build has no credentials for {name.host}: it pushes to Artifact Registry",
            "Leave image.repository out, or name one like us-docker.pkg.dev/my-project/launch; or --builder docker",
        )
    if image.platform != PLATFORM:
        raise UsageError(
            f"the image is for {image.platform}, and Cloud Build's machines are {PLATFORM}",
            f"Build it with a Docker engine of {image.platform}: --builder docker",
        )


def client(environ: Mapping[str, str]) -> Any:
    """Google's client. Raises LaunchError."""
    try:
        from google.cloud.devtools import cloudbuild_v1
    except ImportError as error:
        raise LaunchError("Cloud Build needs google-cloud-build", 'pip install "gcp-launch[gcp]"') from error
    return open_client(cloudbuild_v1.CloudBuildClient, SERVICE, environ)


def dependencies_only(source: Source) -> Source:
    """What the stage copies: an edit of the code needs no new archive, and the code doesn't travel."""
    return source._replace(trainer=(), code=(), digest="")


def tag_of(image: Image) -> str:
    """The tag of all builds of this image, whose name holds the digest of its content."""
    return f"launch-{hashlib.sha256(image.dependencies.encode()).hexdigest()[:16]}"


def build_request(image: Image, project: str, bucket: str, content: Sent, options: Options) -> dict[str, Any]:
    """The Build (https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds) as JSON. Pure.

    `bucket` is gs://NAME, `content` the object with the context: of that generation, and no later one.
    """
    from launcher.images.build_context import DOCKERFILE

    arguments = {"BASE": image.base, "WHEEL": image.wheel}
    docker = ["build", f"--file={DOCKERFILE}", f"--target={STAGE}", f"--tag={image.dependencies}"]
    docker += [f"--build-arg={name}={value}" for name, value in arguments.items() if value]
    request: dict[str, Any] = {
        "source": {
            "storageSource": {
                "bucket": bucket.removeprefix("gs://"),
                "object": content.name,
                "generation": content.generation,
            }
        },
        "steps": [{"id": STAGE, "name": DOCKER, "args": [literal(one) for one in (*docker, ".")]}],
        "images": [image.dependencies],
        "timeout": f"{options.timeout_seconds}s",
        "tags": ["launch", tag_of(image)],
        "logsBucket": f"{bucket}/{LOGS}",
        # In a bucket it can be followed by whoever can read the bucket, without the Logging API and its delay.
        "options": {"logging": "GCS_ONLY"},
    }
    if options.machine_type:
        request["options"]["machineType"] = options.machine_type
    if options.service_account:
        request["serviceAccount"] = f"projects/{project}/serviceAccounts/{options.service_account}"
    return request


def literal(text: str) -> str:
    """Text in which Cloud Build substitutes nothing
    (https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values#escape)."""
    return text.replace("$", "$$")


# --- Submitted, followed, cancelled ---------------------------------------------------------------------------------


def submit(api: Api, place: Place, request: Mapping[str, Any]) -> Begun:
    """Start the build, or take up one of the same image that runs. Raises LaunchError."""
    there = builds(api, place)
    if running := [one for one in there if one.status.name in ACTIVE]:
        return begun(running[-1], ours=False)
    return start(api, place, request, {one.id for one in there})


def start(api: Api, place: Place, request: Mapping[str, Any], known: set[str], tries: int = TRIES) -> Begun:
    """Start it. When the answer is lost, the build may run all the same: it is looked for before another is started."""
    from google.cloud.devtools import cloudbuild_v1

    message = cloudbuild_v1.Build.from_json(json.dumps(request))
    try:
        operation = api.once("create_build", parent=place.parent, build=message)
    except UnreachableError:
        if found := landed(api, place, known):
            return begun(found, ours=True)
        if tries == 1:
            raise
        return start(api, place, request, known, tries - 1)
    return begun(operation.metadata.build, ours=True)


def landed(api: Api, place: Place, known: set[str]) -> Any:
    """A build of this image that wasn't there before; None if none shows up in time. Raises LaunchError."""
    until = api.clock.now() + LANDING_SECONDS
    while True:
        if new := [one for one in builds(api, place) if one.id not in known]:
            return new[-1]
        if api.clock.now() > until:
            return None
        api.clock.sleep(POLL_SECONDS)


def builds(api: Api, place: Place) -> Sequence[Any]:
    """The builds of this image, the newest first: a page of them. Raises LaunchError."""
    found: Sequence[Any] = api.ask("list_builds", parent=place.parent, filter=f'tags="{place.tag}"').builds
    return found


def begun(message: Any, *, ours: bool) -> Begun:
    """What is remembered of a Build."""
    return Begun(message.id, message.log_url, ours)


def follow(api: Api, place: Place, running: Begun, log: Callable[..., None], on_line: OnLine) -> Any:
    """Wait for the end, passing on states and the log; the answer is the Build as it ended. Raises LaunchError."""
    state = ""
    while True:
        try:
            shown = api.ask("get_build", name=place.build(running.id))
        except LaunchError as error:
            again = "Type the command again: it goes on following the same build."
            hint = again if isinstance(error, UnreachableError) else f"{error.hint}\n{again}".lstrip()
            raise type(error)(f"{error.problem}; Cloud Build {running.id} goes on", hint) from error
        ended = shown.status.name not in ACTIVE
        if ended:
            log(ended=True)
        if shown.status.name != state:
            state = shown.status.name
            on_line(f"Cloud Build {running.id}: {state.lower()}")
        if ended:
            return shown
        log()
        api.clock.sleep(POLL_SECONDS)


def give_up(api: Api, place: Place, running: Begun | None, on_line: OnLine) -> None:
    """After Ctrl-C: cancel what this launch has started, and say what became of it."""
    where = f"--project={api.project} --region={place.parent.rpartition('/')[2]}"
    if running is None:
        on_line(f"if a build was started, it goes on: gcloud builds list --filter=tags={place.tag} {where}")
    elif not running.ours:
        on_line(f"Cloud Build {running.id} goes on, for another launch started it")
    else:
        try:
            api.ask("cancel_build", name=place.build(running.id))
        except LaunchError as error:
            on_line(f"{error.problem}; cancel it yourself: gcloud builds cancel {running.id} {where}")
        else:
            on_line(f"Cloud Build {running.id} is cancelled")


# --- How it ended ---------------------------------------------------------------------------------------------------


def digest_of(ended: Any, reference: str, last: Sequence[str]) -> str:
    """The digest under which a build has pushed its image. Raises LaunchError: it failed, and how."""
    if ended.status.name != "SUCCESS":
        raise failure(ended, last)
    digests = [str(one.digest) for one in ended.results.images if one.name == reference]
    if not digests:
        raise LaunchError(f"Cloud Build {ended.id} succeeded, and says nothing of {reference}", f"See {ended.log_url}")
    return digests[0]


def failure(ended: Any, last: Sequence[str]) -> LaunchError:
    """What went wrong: the step, Cloud Build's own words, and the end of the log."""
    step = next((one for one in ended.steps if one.status.name == ended.status.name), None)
    where = f" in step {step.id or step.name}" if step else ""
    why = ended.failure_info.detail or ended.status_detail
    problem = f"Cloud Build {ended.id} ended as {ended.status.name}{where}{f': {why}' if why else ''}"
    return LaunchError("\n    ".join((problem, *last)), hint_of(ended, last))


def hint_of(ended: Any, last: Sequence[str]) -> str:
    """The permission that the build's account lacks if it is that, and where the whole log is."""
    see = f"The whole log: {ended.log_url}"
    if not any("artifactregistry.repositories.uploadArtifacts" in line for line in last):
        return see
    account = ended.service_account.rpartition("/")[2] or "THE-BUILD'S-SERVICE-ACCOUNT"
    member = f"--member=serviceAccount:{account} --role=roles/artifactregistry.writer"
    return f"gcloud projects add-iam-policy-binding {ended.project_id} {member}\n{see}"
