"""Run a rendered Vertex AI request in containers of its image, on this machine's Docker engine.

container_settings.py decides what each container gets, supervisor.py waits for replicas and stops them. This module
pulls images, creates the network and the containers, and removes them; docker_cleanup.py does so if launch is killed.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UsageError
from launcher.images.docker_engine import Engine, EngineError, docker_errors
from launcher.services.local import container_settings, docker_cleanup, supervisor
from launcher.services.local.container_settings import CREDENTIALS, HOST, LABEL, PORT, EngineHost, Mount, Settings
from launcher.services.local.docker_replica import ContainerReplica
from launcher.services.local.on_host import endpoints, local_addresses, visible_gpus
from launcher.services.local.replicas import replica_names, replicas
from launcher.services.local.request import ParsedJob
from launcher.services.local.supervisor import Ended, OnLine, Preemption, Say
from launcher.services.local.workdirs import WrittenFiles, start_name

MODIFIED, ADDED = 0, 1
"""Kinds of the engine's changes (docs.docker.com/reference/api/engine: ContainerChanges)."""
IS_FOLDER = 1 << 31
"""A bit of a path's mode, which is Go's os.FileMode."""
MAX_CHANGES = 1000
"""Changed files of a container that are checked."""


def ensure_images(job: ParsedJob, environ: Mapping[str, str], say: Say) -> None:
    """Pull the job's images that the engine does not have.

    Raises:
        UsageError: the job writes to a folder that can't be mounted in a container.
        LaunchError: no engine, or an image is not available.
    """
    container_settings.output_folders(job)
    engine = connect(environ)
    for uri in job.images:
        inspect_image(engine, uri, say)


def rehearse(
    job: ParsedJob,
    *,
    job_id: str,
    environ: Mapping[str, str],
    on_line: OnLine,
    on_left: Callable[[WrittenFiles], None],
    say: Say,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run the job's replicas once, each as a container of its imageUri, and return how they ended.

    `environ` is this process's environment, of which the endpoints are passed on. `on_left` is called if the replicas
    wrote files into their working directories, which are lost with the containers.

    Raises LaunchError: no engine; or an image is not available, is for another platform, or lacks the command.
    """
    engine = connect(environ)
    api, rendered = engine.api, render(job, job_id, environ, engine, say)
    started: dict[str, ContainerReplica] = {}
    created: dict[str, str] = {}

    def start_replica(settings: Settings) -> ContainerReplica:
        name = start_name(settings.name, created)
        created[name] = create(api, settings, name)
        started[settings.name] = start(api, settings, created[name], on_line)
        return started[settings.name]

    def report_written_files() -> None:
        files = {f"{name}/{path}": size for name, id_ in created.items() for path, size in written_files(api, id_)}
        if files:
            on_left(WrittenFiles(None, files))

    resources = job_resources(api, job_id, rendered[0].network, environ, report_written_files)
    ended = supervisor.run(
        [partial(start_replica, settings) for settings in rendered],
        resources=resources,
        say=say,
        disable_retries=job.disable_retries,
        preemption=preemption,
        clock=clock,
    )
    for settings in rendered:
        if ended.codes[settings.name] and started[settings.name].is_wrong_platform:
            raise wrong_platform_error(settings)
    return ended


def connect(environ: Mapping[str, str]) -> Engine:
    """Return the engine. Raises EngineError: there is none, or it is on another machine, which lacks our files."""
    engine = Engine.connect(environ)
    if not container_settings.is_here(engine.api.base_url):
        raise EngineError(
            f"the Docker engine is on another machine ({engine.api.base_url}), and `launch local` runs on this one",
            "Name an engine of this machine: DOCKER_HOST, or `docker context use default`.",
        )
    return engine


# --- Container settings ---------------------------------------------------------------------------------------------


def render(job: ParsedJob, job_id: str, environ: Mapping[str, str], engine: Engine, say: Say) -> list[Settings]:
    """Return the settings of each replica's container. Pulls missing images and creates the output folders."""
    host_endpoints = endpoints_with_credentials(environ)
    mounts = make_mounts(job, host_endpoints)
    with docker_errors("can't query the Docker engine"):
        info = engine.api.info()
    machine = EngineHost(memory=info["MemTotal"], user=user_of(info), gpus=gpus_of(job, info, environ, say))
    user = machine.user if mounts else ""
    images = {uri: container_settings.image(inspect_image(engine, uri, say), user) for uri in job.images}
    for uri, image in images.items():
        if not container_settings.is_native(image.platform, info["Architecture"]):
            say(f"{uri} is for {image.platform}, but this machine is {info['Architecture']}; an emulator is needed")
    known_endpoints = (*host_endpoints.values(), *container_settings.endpoint_values(job))
    network = container_settings.network(job_id, known_endpoints)
    addresses = local_addresses(job) if network == HOST else [f"{name}:{PORT}" for name in replica_names(job.pools)]
    planned = replicas(job, addresses=addresses, job_id=job_id, image_defaults=lambda uri: images[uri].defaults)
    return container_settings.settings(
        planned, images, job_id=job_id, network=network, machine=machine, endpoints=host_endpoints, mounts=mounts
    )


def endpoints_with_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with endpoints and credentials, with absolute paths. Includes the default credentials
    (`gcloud auth application-default login`), whose usual path does not exist in the container."""
    folder = Path(environ.get("CLOUDSDK_CONFIG") or Path(environ.get("HOME", "/"), ".config", "gcloud"))
    default_file = folder / "application_default_credentials.json"
    variables = {CREDENTIALS[0]: str(default_file)} if default_file.is_file() else {}
    variables |= endpoints(environ)
    return {
        name: str(Path(value).absolute()) if name in CREDENTIALS and value else value
        for name, value in variables.items()
    }


def make_mounts(job: ParsedJob, host_endpoints: Mapping[str, str]) -> tuple[Mount, ...]:
    """Create the job's output folders on this machine, and return them and the credential files as mounts. Raises
    UsageError."""
    folders = container_settings.output_folders(job)
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"can't create the job's folder {folder}: {error.strerror}"
            raise UsageError(problem, "Choose another folder: --output DIR") from error
    values = (host_endpoints[name] for name in CREDENTIALS if name in host_endpoints)
    files = {value for value in values if Path(value).is_file()}
    return (*(Mount(file, True) for file in folders), *(Mount(file, False) for file in sorted(files)))


def user_of(info: Mapping[str, Any]) -> str:
    """Return the `uid:gid` in a container that writes files as our user. A rootless engine maps its root to us."""
    rootless = "name=rootless" in (info.get("SecurityOptions") or ())
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


def gpus_of(job: ParsedJob, info: Mapping[str, Any], environ: Mapping[str, str], say: Say) -> tuple[str, ...]:
    """Return this machine's GPUs if the job needs any and the engine supports them."""
    visible = visible_gpus(environ) if any(pool.machine_spec.accelerator_count for pool in job.pools) else ()
    if visible and "nvidia" not in (info.get("Runtimes") or ()):
        say("the Docker engine does not support GPUs (no NVIDIA Container Toolkit); running on CPU")
        return ()
    return visible


def inspect_image(engine: Engine, uri: str, say: Say) -> Mapping[str, Any]:
    """Return the engine's description of an image; pull the image if needed. Raises LaunchError: not available."""
    if not uri:
        raise LaunchError("the request has no imageUri", "With --docker each pool's containerSpec needs one.")
    if not engine.has(uri):
        say(f"pulling {uri}")
        engine.pull(uri)
    with docker_errors(f"can't inspect the image {uri}"):
        description: Mapping[str, Any] = engine.api.inspect_image(uri)
    return description


# --- Containers and network -----------------------------------------------------------------------------------------


@contextmanager
def job_resources(
    api: Any, job: str, network: str, environ: Mapping[str, str], before_removal: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Create the job's network, if it has one; at the end remove it and all containers of the job.

    `before_removal` is called before the containers are removed.
    """
    cleanup = start_cleanup_process(job, environ)
    try:
        with docker_errors("can't create the job's network"):
            if network != HOST:
                api.create_network(network, driver="bridge", labels={LABEL: job})
        try:
            yield
        finally:
            with suppress(EngineError):  # if the engine is gone, the removal reports it
                before_removal()
    except BaseException:
        with suppress(EngineError):  # the first error is reported; the cleanup process tries again
            remove_resources(api, job, cleanup)
        raise
    remove_resources(api, job, cleanup)


def written_files(api: Any, container: str) -> Iterator[tuple[str, int]]:
    """Yield name and size of the files that were created or changed below a stopped container's working directory."""
    with docker_errors("can't read which files a container wrote"):
        top = (api.inspect_container(container)["Config"].get("WorkingDir") or "/").rstrip("/")
        changes = (
            [change["Path"] for change in api.diff(container) or () if change["Kind"] in (MODIFIED, ADDED)]
            if top
            else []
        )
        for path in changes[:MAX_CHANGES]:
            if path.startswith(f"{top}/") and "/__pycache__" not in path:
                url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
                answer = api.head(url, params={"path": path}).headers.get("X-Docker-Container-Path-Stat", "")
                status = json.loads(base64.b64decode(answer) or b"{}")
                if not status.get("mode", IS_FOLDER) & IS_FOLDER:
                    yield path.removeprefix(f"{top}/"), int(status["size"])


def remove_resources(api: Any, job: str, cleanup: subprocess.Popen[bytes]) -> None:
    """Remove the job's containers and network, and end the cleanup process. After an error or Ctrl-C, that process
    removes them.

    Raises EngineError: the engine is gone, or does not remove them.
    """
    by_hand = f"docker rm -f $(docker ps -aq --filter label={LABEL}={job}); docker network rm launch-{job}"
    with docker_errors(f"can't remove the containers of job {job}"):
        if not docker_cleanup.clear(api, job):
            raise EngineError(f"the Docker engine does not remove the containers of job {job}", by_hand)
    cleanup.communicate(b"done")


def start_cleanup_process(job: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that removes the job's containers if launch is killed. A byte on its stdin tells it not to."""
    package = str(Path(docker_cleanup.__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", docker_cleanup.__name__, job],
        cwd="/",
        env={**environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def create(api: Any, settings: Settings, name: str) -> str:
    """Create a container without starting it; return its id. `name`: of the replica's start."""
    if not settings.argv:
        raise LaunchError(
            f"{settings.name}: neither the request nor the image has a command", "Give the containerSpec a command."
        )
    own_network = settings.network != HOST
    with docker_errors(f"can't create the container of {settings.name}"):
        created = api.create_container(
            settings.image,
            name=f"launch-{settings.job}-{name}",  # unique in the engine: several jobs may run at the same time
            hostname=settings.name if own_network else None,
            entrypoint=list(settings.argv),
            environment=settings.env,
            user=settings.user or None,
            labels={LABEL: settings.job},
            healthcheck={"test": ["NONE"]},  # Kubernetes ignores the image's
            use_config_proxy=False,  # only the request and the endpoints set the environment
            host_config=host_config(api, settings),
            networking_config=api.create_networking_config(
                {settings.network: api.create_endpoint_config(aliases=[settings.name])} if own_network else {}
            ),
        )
    return str(created["Id"])


def host_config(api: Any, settings: Settings) -> Any:
    """Return memory, network, mounts and GPUs of a container. The engine keeps no log: launch reads the output."""
    from docker.types import DeviceRequest, LogConfig
    from docker.types import Mount as Bound

    return api.create_host_config(
        network_mode=settings.network,
        group_add=[settings.group] if settings.group else None,
        shm_size=settings.shm,
        mounts=[Bound(path, path, type="bind", read_only=not writable) for path, writable in settings.mounts],
        device_requests=[DeviceRequest(device_ids=list(settings.gpus), capabilities=[["gpu"]])]
        if settings.gpus
        else None,
        log_config=LogConfig(type="none"),
        init=False,  # PID 1 is launch_train.node, which acts as init
    )


def start(api: Any, settings: Settings, container: str, on_line: OnLine) -> ContainerReplica:
    """Start a created container and read its output from the first line on. Raises LaunchError."""
    from docker.errors import APIError

    with docker_errors(f"can't start {settings.name}"):
        output = api.attach(container, stdout=True, stderr=True, stream=True, demux=True)
        try:
            api.start(container)
        except APIError as error:
            output.close()
            raise start_error(settings, str(error.explanation)) from error
        return ContainerReplica(settings.name, api, container, output, on_line)


def start_error(settings: Settings, message: str) -> LaunchError:
    """Return the error for a container that the engine did not start, from the engine's message."""
    program = settings.argv[0]
    if "exec format error" in message:
        return wrong_platform_error(settings)
    if "device driver" in message or "nvidia" in message:
        return LaunchError(f"can't give GPUs to {settings.name}: {message}", "To run on CPU: set CUDA_VISIBLE_DEVICES=")
    reasons = {
        "executable file not found": "no such command",
        "no such file": "no such file",
        "permission": "not executable",
    }
    reason = next((text for sign, text in reasons.items() if sign in message and "exec: " in message), "")
    if not reason:
        return LaunchError(f"can't start {settings.name}: {message}")
    return LaunchError(
        f"can't start {settings.name}: {program}: {reason} in the image",
        "Name a program of the image in the request's command, or leave it out to run the image's own.",
    )


def wrong_platform_error(settings: Settings) -> LaunchError:
    """Return the error for an image or program of another platform."""
    return LaunchError(
        f"can't start {settings.name}: exec format error: its image is for {settings.platform}, "
        "or its command is not a program",
        "Build it for this machine, or let the engine emulate the other one (binfmt, qemu-user-static).",
    )
