"""Rehearse a rendered Vertex request in containers of its image, on this machine's Docker engine.

What a container is given is decided in settings.py, how replicas are waited for and stopped in running.py. Here are
the effects: images looked at, a network and containers made, and all of it taken away again, whatever ends launch
(sweep.py).
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UsageError
from launcher.images.docker_events import EngineError
from launcher.rehearsal import container_settings, docker_cleanup, supervisor
from launcher.rehearsal.container_settings import CREDENTIALS, HOST, LABEL, PORT, Machine, Mount, Settings
from launcher.rehearsal.docker_replica import Contained, docker_errors
from launcher.rehearsal.on_host import endpoints, here, visible_gpus
from launcher.rehearsal.replicas import named, replicas
from launcher.rehearsal.request import Job
from launcher.rehearsal.supervisor import Ended, OnLine, Preemption
from launcher.rehearsal.workdirs import Left

if TYPE_CHECKING:
    from launcher.images.docker_engine import Engine

MODIFIED, ADDED = 0, 1
"""Kinds of the engine's changes (docs.docker.com/reference/api/engine: ContainerChanges)."""
IS_FOLDER = 1 << 31
"""Of a path's mode, which is Go's os.FileMode."""
MOST_LOOKED_AT = 1000
"""Files of a container."""

Say = Callable[[str], None]
"""Called with a line of launch's own."""


def ready(job: Job, environ: Mapping[str, str], say: Say) -> None:
    """See to it that the job's images are in the engine.

    Raises:
        UsageError: a folder that the job writes to can't be had in a container.
        LaunchError: there is no engine, or an image is neither there nor to be had.
    """
    container_settings.folders(job)
    engine = connect(environ)
    for uri in job.images:
        inspected(engine, uri, say)


def rehearse(
    job: Job,
    *,
    job_id: str,
    environ: Mapping[str, str],
    on_line: OnLine,
    on_left: Callable[[Left], None],
    say: Say,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Start the job's replicas once, each as a container of its imageUri, and say how they ended.

    `environ` is this process's environment, of which the endpoints are passed on. `on_left` is called if they wrote
    files into their working directories, which are lost with the containers.

    Raises:
        LaunchError: there is no engine, or an image isn't there, isn't for this machine, or has no such command.
    """
    engine = connect(environ)
    api, rendered = engine.api, render(job, job_id, environ, engine, say)
    started: list[Contained] = []
    created: dict[str, str] = {}

    def start_all() -> Iterator[Contained]:
        created.update((one.name, create(api, one)) for one in rendered)
        for one in rendered:
            started.append(start(api, one, created[one.name], on_line))
            yield started[-1]

    def look() -> None:
        if found := {f"{name}/{path}": size for name, made in created.items() for path, size in written(api, made)}:
            on_left(Left(None, found))

    made_for = cleared(api, job_id, rendered[0].network, environ, look)
    ended = supervisor.run(start_all(), cleared=made_for, preemption=preemption, clock=clock)
    for one, replica in zip(rendered, started, strict=True):
        if ended.codes[one.name] and replica.is_foreign:
            raise foreign(one)
    return ended


def connect(environ: Mapping[str, str]) -> Engine:
    """The engine. Raises EngineError: there is none, or one on another machine, whose files aren't ours."""
    from launcher.images.docker_engine import Engine

    engine = Engine.connect(environ)
    if not container_settings.is_here(engine.api.base_url):
        raise EngineError(
            f"the Docker engine is on another machine ({engine.api.base_url}), and `launch local` runs on this one",
            "Name an engine of this machine: DOCKER_HOST, or `docker context use default`.",
        )
    return engine


# --- What each container is given -----------------------------------------------------------------------------------


def render(job: Job, job_id: str, environ: Mapping[str, str], engine: Engine, say: Say) -> list[Settings]:
    """The container of each replica. Missing images are pulled, and the folders that are written to are made."""
    given = from_outside(environ)
    mounts = mounted(job, given)
    with docker_errors("the Docker engine doesn't say what it is"):
        info = engine.api.info()
    machine = Machine(memory=info["MemTotal"], user=user_of(info), gpus=gpus_of(job, info, environ, say))
    user = machine.user if mounts else ""
    images = {uri: container_settings.image(inspected(engine, uri, say), user) for uri in job.images}
    for uri, one in images.items():
        if not container_settings.is_native(one.platform, info["Architecture"]):
            say(f"{uri} is for {one.platform}, and this machine is {info['Architecture']}: it needs an emulator here")
    network = container_settings.network(job_id, (*given.values(), *container_settings.places(job)))
    addresses = here(job) if network == HOST else [f"{name}:{PORT}" for name in named(job.pools)]
    found = replicas(job, addresses=addresses, job_id=job_id, own=lambda uri: images[uri].own)
    return container_settings.settings(
        found, images, job_id=job_id, network=network, machine=machine, endpoints=given, mounts=mounts
    )


def from_outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The endpoints and who asks. A file is named by its whole path, also the one that gcloud writes for all programs
    (`gcloud auth application-default login`), which they would look for in a home that isn't in the container."""
    folder = Path(environ.get("CLOUDSDK_CONFIG") or Path(environ.get("HOME", "/"), ".config", "gcloud"))
    usual = folder / "application_default_credentials.json"
    given = {CREDENTIALS[0]: str(usual)} if usual.is_file() else {}
    given |= endpoints(environ)
    return {
        name: str(Path(value).absolute()) if name in CREDENTIALS and value else value for name, value in given.items()
    }


def mounted(job: Job, given: Mapping[str, str]) -> tuple[Mount, ...]:
    """The job's folders on this machine, which are made, and the files with credentials. Raises UsageError."""
    written = container_settings.folders(job)
    for one in written:
        try:
            Path(one).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the job's folder {one} can't be made: {error.strerror}"
            raise UsageError(problem, "--output DIR moves it.") from error
    files = {given[name] for name in CREDENTIALS if name in given and Path(given[name]).is_file()}
    return (*(Mount(one, True) for one in written), *(Mount(one, False) for one in sorted(files)))


def user_of(info: Mapping[str, Any]) -> str:
    """Who in a container is us, as `uid:gid`: an engine without root (`info` tells) maps its root to us."""
    rootless = "name=rootless" in (info.get("SecurityOptions") or ())
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


def gpus_of(job: Job, info: Mapping[str, Any], environ: Mapping[str, str], say: Say) -> tuple[str, ...]:
    """This machine's GPUs, if the job wants any and the engine can hand them on."""
    visible = visible_gpus(environ) if any(pool.machine_spec.accelerator_count for pool in job.pools) else ()
    if visible and "nvidia" not in (info.get("Runtimes") or ()):
        say("the Docker engine can't hand on GPUs (NVIDIA's container toolkit isn't set up); the containers use CPUs")
        return ()
    return visible


def inspected(engine: Engine, uri: str, say: Say) -> Mapping[str, Any]:
    """An image by the engine's own words, pulled when it isn't there. Raises LaunchError: nor is it in its registry."""
    if not uri:
        raise LaunchError("the request has no imageUri", "With --docker each pool's containerSpec needs one.")
    if not engine.has(uri):
        say(f"pulling {uri}")
        engine.pull(uri)
    with docker_errors(f"the image {uri} can't be looked at"):
        found: Mapping[str, Any] = engine.api.inspect_image(uri)
    return found


# --- What is made, and taken away -----------------------------------------------------------------------------------


@contextmanager
def cleared(
    api: Any, job: str, network: str, environ: Mapping[str, str], look: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """The job's own network, if it has one; inside, containers may be made. Nothing of the job is left at the end.

    `look` is called before the containers are removed.
    """
    watcher = watch(job, environ)
    try:
        with docker_errors("the job's network can't be made"):
            if network != HOST:
                api.create_network(network, driver="bridge", labels={LABEL: job})
        try:
            yield
        finally:
            with suppress(EngineError):  # of an engine that has gone, others say so
                look()
    except BaseException:
        with suppress(EngineError):  # the watcher goes on with it, and what went wrong before is what is told
            clear(api, job, watcher)
        raise
    clear(api, job, watcher)


def written(api: Any, container: str) -> Iterator[tuple[str, int]]:
    """Yield name and size of the files that were created or changed below a stopped container's working directory."""
    with docker_errors("what a container has written can't be read"):
        top = (api.inspect_container(container)["Config"].get("WorkingDir") or "/").rstrip("/")
        changes = [one["Path"] for one in api.diff(container) or () if one["Kind"] in (MODIFIED, ADDED)] if top else []
        for path in changes[:MOST_LOOKED_AT]:
            if path.startswith(f"{top}/") and "/__pycache__" not in path:
                place = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
                answer = api.head(place, params={"path": path}).headers.get("X-Docker-Container-Path-Stat", "")
                status = json.loads(base64.b64decode(answer) or b"{}")
                if not status.get("mode", IS_FOLDER) & IS_FOLDER:
                    yield path.removeprefix(f"{top}/"), int(status["size"])


def clear(api: Any, job: str, watcher: subprocess.Popen[bytes]) -> None:
    """Remove what the job has left, and tell the watcher; on an error or a Ctrl-C in between, that one has it to do.

    Raises:
        EngineError: the engine is gone, or doesn't remove it.
    """
    by_hand = f"docker rm -f $(docker ps -aq --filter label={LABEL}={job}); docker network rm launch-{job}"
    with docker_errors(f"what the job {job} left can't be removed"):
        if not docker_cleanup.clear(api, job):
            raise EngineError(f"the Docker engine doesn't remove what the job {job} left", by_hand)
    watcher.communicate(b"done")


def watch(job: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that clears up after a killed launch. It is told when there is nothing to clear up."""
    package = str(Path(docker_cleanup.__file__).resolve().parents[2])
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


def create(api: Any, one: Settings) -> str:
    """Make a container, which is not started; its id."""
    if not one.argv:
        raise LaunchError(
            f"{one.name}: neither the request nor the image says what to run", "Give the containerSpec a command."
        )
    own_network = one.network != HOST
    with docker_errors(f"{one.name}'s container can't be made"):
        made = api.create_container(
            one.image,
            name=one.title,
            hostname=one.name if own_network else None,
            entrypoint=list(one.argv),
            environment=one.env,
            user=one.user or None,
            labels={LABEL: one.job},
            healthcheck={"test": ["NONE"]},  # Kubernetes has its own
            use_config_proxy=False,  # nothing but the request and the endpoints sets the environment
            host_config=host_config(api, one),
            networking_config=api.create_networking_config(
                {one.network: api.create_endpoint_config(aliases=[one.name])} if own_network else {}
            ),
        )
    return str(made["Id"])


def host_config(api: Any, one: Settings) -> Any:
    """Memory, network, mounts and GPUs. Its output is ours alone: no log of it grows on the disk."""
    from docker.types import DeviceRequest, LogConfig
    from docker.types import Mount as Bound

    return api.create_host_config(
        network_mode=one.network,
        group_add=[one.group] if one.group else None,
        shm_size=one.shm,
        mounts=[Bound(path, path, type="bind", read_only=not writable) for path, writable in one.mounts],
        device_requests=[DeviceRequest(device_ids=list(one.gpus), capabilities=[["gpu"]])] if one.gpus else None,
        log_config=LogConfig(type="none"),
        init=False,  # PID 1 is launch_train.node, which takes the place of an init
    )


def start(api: Any, one: Settings, made: str, on_line: OnLine) -> Contained:
    """Start a container that was made, and listen from its first line on. Raises LaunchError."""
    from docker.errors import APIError

    with docker_errors(f"{one.name} can't be started"):
        output = api.attach(made, stdout=True, stderr=True, stream=True, demux=True)
        try:
            api.start(made)
        except APIError as error:
            output.close()
            raise refused(one, str(error.explanation)) from error
        return Contained(one.name, api, made, output, on_line)


def refused(one: Settings, said: str) -> LaunchError:
    """Why the engine didn't start a container, as far as its words tell."""
    program = one.argv[0]
    if "exec format error" in said:
        return foreign(one)
    if "device driver" in said or "nvidia" in said:
        return LaunchError(
            f"{one.name} can't be given GPUs: {said}", "With CUDA_VISIBLE_DEVICES= (empty) it runs on CPUs."
        )
    words = {"executable file not found": "no such command", "no such file": "no such file", "permission": "no program"}
    why = next((word for sign, word in words.items() if sign in said and "exec: " in said), "")
    if not why:
        return LaunchError(f"{one.name} can't be started: {said}")
    return LaunchError(
        f"{one.name} can't be started: {program}: {why} in the image",
        "The request's command must be a program of the image; without a command the image's own is run.",
    )


def foreign(one: Settings) -> LaunchError:
    """The image is for machines of another kind."""
    return LaunchError(
        f"{one.name} can't be started: exec format error: its image is for {one.platform}, or its program is none",
        "Build it for this machine, or let the engine emulate the other one (binfmt, qemu-user-static).",
    )
