"""Build the dependency image with Cloud Build, for users without a Docker engine.

The context is stored in the project's bucket, once for each content. One build is submitted and followed, with its log
from that bucket, and it pushes the image. A build is tagged with its image, so a build that another launch has started
is followed instead of started twice.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import mmap
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, NamedTuple

from msgspec.structs import replace

from launch_train.common.loopback import is_loopback, is_plain_loopback
from launch_train.common.storage import OutputError, open_storage
from launch_train.common.storage.bucket import Objects, checksum
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UnreachableError, UsageError
from launcher.gcp.api import Api, Service, open_client
from launcher.gcp.default_bucket import NAME_IT, check_default_bucket
from launcher.images.append import BASE_LABEL
from launcher.images.archives import DOCKERFILE, build_context
from launcher.images.reference import artifact_repository, parse
from launcher.images.source_files import Source
from launcher.plan.model import Image
from launcher.text import size_text

SERVICE = Service("cloudbuild", "Cloud Build", "roles/cloudbuild.builds.editor")
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBUILD"
DOCKER = "gcr.io/cloud-builders/docker"
"""Cloud Build's own Docker step (https://cloud.google.com/build/docs/cloud-builders)."""
PLATFORM = "linux/amd64"
"""The platform of Cloud Build's machines."""
STAGE = "dependencies"
LOCATION = "global"
TIMEOUT_SECONDS = 7200
"""The build downloads, compresses and pushes several gigabytes of PyTorch and CUDA."""
POLL_SECONDS = 3.0
LANDING_SECONDS = 20.0
"""Time in which a build whose create request got no response must appear."""
TRIES = 3
ACTIVE = ("PENDING", "QUEUED", "WORKING")
SOURCES = "source"
LOGS = "logs/cloud-build"
CHUNK = 1 << 20
LEVEL = 6
"""gzip's default level. On source code, level 9 takes a third longer and saves one percent."""
STORE_TRIES = 5
WITH_DOCKER: Final = "To build with a Docker engine on this machine instead: --builder docker"
LAST_LINES = 25
READ_SECONDS = 20.0
"""Timeout of one read of the log, which is optional."""

OnLine = Callable[[str], None]


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
    check_buildable(image, environ)
    api = Api(SERVICE, project, client(environ), clock)
    bucket = bucket or check_default_bucket(project, environ, clock, way_out=f"{NAME_IT}\n{WITH_DOCKER}")
    # The stage copies no code, so an edit of the code needs no new upload.
    with build_context(replace(source, trainer=(), code=(), digest="")) as context:
        content = send_source(context, bucket, on_line)
    scope = BuildScope(f"projects/{project}/locations/{LOCATION}", tag_of(image))
    running: RunningBuild | None = None
    try:
        running = submit_build(api, scope, build_request(image, bucket, content))
        on_line(f"Cloud Build {running.id}{'' if running.ours else ' (of another launch)'}: {running.log_url}")
        log = Log(bucket, running.id, on_line)
        ended = follow_build(api, scope, running, log.follow, on_line)
    except KeyboardInterrupt:
        cancel_build(api, scope, running, on_line)
        raise
    return pushed_digest(ended, image.dependencies, log.last)


def check_buildable(image: Image, environ: Mapping[str, str]) -> None:
    """Check that Cloud Build can build and push an image. Raises UsageError."""
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


def build_request(image: Image, bucket: str, content: Sent) -> dict[str, Any]:
    """Return the Build as JSON (https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds). Pure.

    `bucket` is gs://NAME. `content` is the object with the context, pinned to its generation.
    """
    docker = ["build", f"--file={DOCKERFILE}", f"--target={STAGE}", f"--tag={image.dependencies}"]
    docker += [f"--label={BASE_LABEL}={image.base}"] if "@" in image.base else []
    docker += [f"--build-arg={name}={value}" for name, value in image.build_arguments.items() if value]
    return {
        "source": {
            "storageSource": {
                "bucket": bucket.removeprefix("gs://"),
                "object": content.name,
                "generation": content.generation,
            }
        },
        # $$ is Cloud Build's escape, which substitutes $NAME:
        # https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values#escape
        "steps": [{"id": STAGE, "name": DOCKER, "args": [word.replace("$", "$$") for word in (*docker, ".")]}],
        "images": [image.dependencies],
        "timeout": f"{TIMEOUT_SECONDS}s",
        "tags": ["launch", tag_of(image)],
        "logsBucket": f"{bucket}/{LOGS}",
        # In a bucket, the log can be followed without the Logging API and its delay.
        "options": {"logging": "GCS_ONLY"},
    }


# --- Submit, follow, cancel -----------------------------------------------------------------------------------------


def submit_build(api: Api, scope: BuildScope, request: Mapping[str, Any]) -> RunningBuild:
    """Start the build, or return a running one of the same image. After a lost response, look for the build before
    starting another one. Raises LaunchError."""
    from google.cloud.devtools import cloudbuild_v1

    existing = list_builds(api, scope)
    if active := [build for build in existing if build.status.name in ACTIVE]:
        return RunningBuild(active[-1].id, active[-1].log_url, ours=False)
    known, message = {build.id for build in existing}, cloudbuild_v1.Build.from_json(json.dumps(request))
    for tries_left in reversed(range(TRIES)):
        try:
            started = api.once("create_build", parent=scope.parent, build=message).metadata.build
        except UnreachableError:
            started = find_new_build(api, scope, known)
            if started is None and not tries_left:
                raise
        if started is not None:
            break
    return RunningBuild(started.id, started.log_url, ours=True)


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


def follow_build(api: Api, scope: BuildScope, running: RunningBuild, log: Callable[..., None], on_line: OnLine) -> Any:
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


def cancel_build(api: Api, scope: BuildScope, running: RunningBuild | None, on_line: OnLine) -> None:
    """Cancel the build after Ctrl-C if this launch started it, and report the outcome."""
    where = f"--project={api.project} --region={LOCATION}"
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


def pushed_digest(ended: Any, reference: str, last: Sequence[str]) -> str:
    """Return the digest of the image that a build pushed. Raises LaunchError: the build failed."""
    if ended.status.name != "SUCCESS":
        raise failed_build(ended, last)
    digests = [str(image.digest) for image in ended.results.images if image.name == reference]
    if not digests:
        raise LaunchError(f"Cloud Build {ended.id} succeeded without the image {reference}", f"See {ended.log_url}")
    return digests[0]


def failed_build(ended: Any, last: Sequence[str]) -> LaunchError:
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


# --- The bucket: source and log ---------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """The object with the source, and its generation. Every later object under the same name has another generation."""

    name: str
    generation: str


def send_source(context: IO[bytes], bucket: str, on_line: Callable[[str], None]) -> Sent:
    """Store a tar, compressed, in the bucket (gs://NAME), under the digest of its content.

    An existing object with the same bytes is reused. An object with other bytes is replaced, because others may be able
    to write to the bucket.

    Raises LaunchError: the bucket, or the folder for temporary files, can't be used.
    """
    digest = hashlib.sha256()
    while chunk := context.read(CHUNK):
        digest.update(chunk)
    context.seek(0)
    name = f"{SOURCES}/{digest.hexdigest()}.tgz"
    try:
        with packed(context) as data:
            return Sent(name, stored(Objects(bucket), name, data, on_line))
    except OutputError as error:
        raise LaunchError(f"the source can't be sent to Cloud Build: {error}", WITH_DOCKER) from error
    except OSError as error:
        where = tempfile.gettempdir()
        raise LaunchError(
            f"the source can't be packed in {where}: {error.strerror}", "Set TMPDIR to a folder with enough space."
        ) from error


@contextmanager
def packed(context: IO[bytes]) -> Iterator[memoryview]:
    """Yield the compressed tar as a mapped file. It may contain a PyTorch wheel, which is too large for memory."""
    with tempfile.TemporaryFile() as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=file, mtime=0) as zipped:
            shutil.copyfileobj(context, zipped, CHUNK)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data


def stored(folder: Objects, name: str, data: memoryview, on_line: Callable[[str], None]) -> str:
    """Return the generation of the object with `data`. Upload it unless it exists."""
    # Unlike a CRC32C, an MD5 can't easily be forged for given bytes.
    md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    sums = (len(data), checksum(data), md5)
    for _ in range(STORE_TRIES):
        there = next((entry for entry in folder.objects(name) if entry.name == name), None)
        if there and (there.size, there.crc32c, there.md5) == sums:
            on_line(f"{folder.url}/{name} exists already")
            return there.version
        on_line(f"sending {size_text(len(data))} to {folder.url}/{name}")
        with suppress(FileExistsError):  # another launch stored it first
            return folder.swap(name, data, there.version if there else "")
    raise OutputError(f"{folder.url}/{name} was changed by another writer {STORE_TRIES} times in a row")


class Log:
    """A build's log, which Cloud Build appends to one object.

    Each poll reads the whole object: the log of our builds has some hundred kilobytes. A read error is reported once,
    and the build is still followed.
    """

    def __init__(self, bucket: str, build: str, on_line: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._bucket = bucket
        self._name = f"{LOGS}/log-{build}.txt"
        self._on_line = on_line
        self._passed = 0
        self._silent = False

    def follow(self, *, ended: bool = False) -> None:
        """Report the new lines. An incomplete last line waits for the next poll, unless the build has `ended`."""
        data = self._read()
        end = len(data) if ended else data.rfind(b"\n") + 1
        for line in data[self._passed : end].decode(errors="replace").splitlines():
            self.last.append(line)
            self._on_line(line)
        self._passed = max(self._passed, end)

    def _read(self) -> bytes:
        if self._silent:
            return b""
        try:
            return open_storage(self._bucket).within(READ_SECONDS).read(self._name)
        except FileNotFoundError:  # the build has written no log yet
            return b""
        except OutputError as error:
            self._silent = True
            self._on_line(f"the build's log can't be read: {error}")
            return b""
