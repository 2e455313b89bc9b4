"""A host that is reached by SSH as a service: launch_train.host starts and supervises the jobs there, or queues them in
its Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final
from zlib import crc32

from launch_train.common import contract
from launch_train.common.errors import TrainError
from launch_train.common.secrets import SecretReader, secret_versions
from launcher.errors import LaunchError, UnreachableError
from launcher.jobs.job import RUN_LABEL, SLURM_LABEL, Failure, Job
from launcher.plan.model import Attempt
from launcher.remote.agent import Agent, HostRefused, trainer_digest
from launcher.remote.connection import CommandFailed, Connection
from launcher.services.base import GoneError, Listing
from launcher.services.hosts.arrival import OF_HOST
from launcher.services.hosts.nodes import job_nodes, stop_and_remove, whole_job
from launcher.services.local.replicas import ImageDefaults, replicas
from launcher.services.local.request import parse_request
from launcher.services.request import service

SECRET_SECONDS: Final = 20.0
UNAVAILABLE: Final = 14
"""google.rpc.Code: the machine failed, not the job."""
INVALID: Final = 3
"""google.rpc.Code: the job failed."""
PORT: Final = 29400
"""Of the control store, which only several nodes use; Slurm's batch script sets another."""
FIRST_PORT, PORTS = 20000, 12000
"""Ports of the control store on several hosts, by the job; below the ports of outgoing connections."""


class OnHost:
    """The jobs on one host. Their names are on/HOSTNAME/ID: ssh may know the host by several names."""

    outlives_client = True
    poll_seconds: float | None = 2.0
    stop_seconds = 90.0
    """The processes get 30 s to save (launch_train.host.job)."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._agent = Agent(connection)
        self.stuck_fix = f"See what it does: ssh {connection.host.ssh_text} ps -ef --forest"

    @property
    def project(self) -> str:
        """Return the host's name."""
        return self.connection.host.name

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """Start the job of one attempt, exactly once: a repeated request id starts nothing. On several hosts the first
        one is the last to start, since its record is the job.

        Raises:
            UnreachableError: it is unknown whether it was started.
            LaunchError: a host refuses it, with the reason, or a secret can't be read here; nothing was started.
        """
        nodes = job_nodes(self._agent, body, request_id)
        requests = [start_of(body, request_id, node.rank) for node in nodes]
        secrets = read_secrets_here(requests[0]["env"], os.environ)
        answer: dict[str, Any] = {}
        for node, request in zip(reversed(nodes), reversed(requests), strict=True):
            try:
                answer = node.agent.call("start", {**request, "secrets": secrets}, seconds=120.0)
            except CommandFailed as error:
                raise UnreachableError(f"starting the job was interrupted: {error.problem}", error.hint) from error
            except HostRefused:
                stop_and_remove(nodes[node.rank + 1 :])
                raise
        return self._job(answer["job"])

    def get(self, name: str) -> Job:
        """Return a job's state. Raises GoneError; UnreachableError."""
        jobs = self._agent.call("jobs", {"ids": [name.rpartition("/")[2]]})
        if not jobs:
            raise GoneError(f"{name} does not exist")
        return self._job(jobs[0])

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """Return the host's jobs that match a filter of labels, newest first."""
        name, _, value = filter_.removeprefix("labels.").partition("=" if "=" in filter_ else ":")
        value = value.strip('"')
        jobs = [self._job(job) for job in self._agent.call("jobs", {"ids": None})]
        matching = [job for job in jobs if name in job.labels and value in ("*", job.labels[name])]
        return Listing(tuple(sorted(matching, key=lambda job: (-job.created, job.name))), {})

    def request_ids(self, name: str) -> frozenset[str]:
        """Return the id of the request that started a job, which is the job's own."""
        return frozenset({name.rpartition("/")[2]})

    def cancel(self, name: str) -> None:
        """Begin to cancel a job. Raises GoneError."""
        job_id = name.rpartition("/")[2]
        if not self._agent.call("cancel", {"id": job_id}):
            raise GoneError(f"{name} does not exist")
        for job in self._agent.call("jobs", {"ids": [job_id]}):
            for node in job_nodes(self._agent, job["request"], job_id)[1:]:
                node.agent.call("cancel", {"id": node.id})

    def release(self, job: Job) -> None:
        """Do nothing: an ended job has no processes."""

    def forget(self, job: Job) -> None:
        """Remove the host's record of an ended job, and what it left beside the run folder."""
        for node in job_nodes(self._agent, job.request, job.id):
            node.agent.call("remove", {"id": node.id})

    def _job(self, data: Mapping[str, Any]) -> Job:
        if data["request"].get("peers"):
            data = whole_job(data, job_nodes(self._agent, data["request"], data["id"]))
        state, error = state_on_host(data, data.get("host", self.project))
        end = data["end"] or {}
        return Job(
            name=f"on/{data['machine']}/{data['id']}",
            region=", ".join([self.project, *(peer["host"] for peer in data["request"].get("peers", ()))]),
            state=state,
            created=data["created"],
            started=data.get("started", data["created"]),
            ended=None if data["running"] else end.get("time", data["seen"]),
            error=error,
            labels={str(name): str(value) for name, value in data["labels"].items()}
            | ({SLURM_LABEL: str(number)} if (number := data.get("number")) else {}),
            request=data["request"],
            reason=queue_reason(data.get("reason", "")),
        )


def state_on_host(data: Mapping[str, Any], host: str) -> tuple[str, Failure | None]:
    """Return the state of a job as launch_train.host describes it, and its error."""
    end = data["end"]
    if data["running"]:
        waiting = "PENDING" if data.get("reason") else "RUNNING"
        return ("CANCELLING" if data["cancelled"] else waiting), None
    stopped = ("cancelled" if data["cancelled"] else "killed") if end is None else str(end["stopped"])
    if data.get("slurm") == "CANCELLED" and (end is None or end["code"]):  # by scancel
        stopped = "cancelled"
    if stopped in ("cancelled", "expired"):
        return stopped.upper(), None
    if not stopped and not end["code"]:
        return "SUCCEEDED", None
    return "FAILED", failure_on_host(data, host, stopped)


def failure_on_host(data: Mapping[str, Any], host: str, stopped: str) -> Failure:
    """Return the error of a job that failed. `stopped`: why launch_train.host stopped it; empty: it did not."""
    end, slurm = data["end"], data.get("slurm", "")
    if not stopped and (problem := end.get("problem")):
        return Failure(code=INVALID, message=f"{host}: srun could not start the nodes: {problem}")
    if not stopped:
        code = 128 - end["code"] if end["code"] < 0 else end["code"]  # of a signal, as a container reports it
        replica = f"workerpool1-{rank - 1}" if (rank := data.get("rank", 0)) else "workerpool0-0"
        message = f"The replica {replica} exited with a non-zero status of {code}."
        return Failure(code=INVALID, message=message)
    if end is None and slurm == "FAILED" and not data.get("started"):
        needs = f"the home folder of the login node and {data['request']['python']}"
        return Failure(
            code=INVALID, message=f"{host}: the batch script could not start; the compute nodes need {needs}"
        )
    if end is None and slurm == "OUT_OF_MEMORY":
        return Failure(code=INVALID, message=f"{host}: the job used more memory than Slurm gave it")
    if slurm:
        return Failure(code=UNAVAILABLE, message=f"{host}: Slurm stopped the job ({slurm})")
    why = "was shut down" if stopped == "interrupted" else "restarted, or the job's supervisor was killed"
    return Failure(code=UNAVAILABLE, message=f"{host} {why}")


REASONS: Final = {
    "Priority": "other jobs come first",
    "Resources": "no nodes are free",
    "Dependency": "another job of this run is still in the queue",
    "BeginTime": "it was queued again after a preemption; Slurm waits two minutes",
    "PartitionTimeLimit": "it asks for more time than the partition allows: --set slurm.hours=H",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "JobHeldUser": "it is held: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it",
    "launch failed requeued held": "a compute node could not start it: scontrol release JOB",
    "ReqNodeNotAvail": "its nodes are down, drained or reserved",
}
"""Why a job waits (squeue(1), JOB REASON CODES)."""


def queue_reason(reason: str) -> str:
    """Return in words why Slurm lets a job wait; empty if it has not decided yet."""
    name = reason.partition(",")[0]
    if "Limit" in name and name not in REASONS:
        return f"a limit of your account or its QOS is reached ({reason})"
    return f"{REASONS[name]} ({reason})" if name in REASONS else reason.removeprefix("None")


def read_secrets_here(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a job's secrets (variable, or notify.webhook -> value): those that `environ` has, this
    shell's; the others from Secret Manager, with the user's credentials. A host has neither.

    Raises LaunchError: one can't be read.
    """
    versions = dict(secret_versions(env))
    webhook = json.loads(env.get(contract.NOTIFY) or "{}").get("webhook", "")
    versions |= {"notify.webhook": webhook} if webhook.startswith("projects/") else {}
    values = {name: environ[name] for name in versions if environ.get(name)}
    others = {name: version for name, version in versions.items() if name not in values}
    try:
        values |= SecretReader({**environ, contract.SECRETS: json.dumps(others)}, SECRET_SECONDS).read()
    except (TrainError, OSError) as error:
        fix = f"Or set it in this shell: export {next(iter(others))}=VALUE"
        raise LaunchError(str(error), fix) from None  # no error has a value
    return values


def start_of(body: Mapping[str, Any], request_id: str, rank: int = 0) -> dict[str, Any]:
    """Return what launch_train.host needs to start one node of a request's job. Pure."""
    job, peers = parse_request(body["job"]), body.get("peers", ())
    peer = peers[max(rank - 1, 0)] if peers else {}
    defaults = ImageDefaults(env={"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"})
    addresses = [f"127.0.0.1:{PORT}"] * sum(pool.replica_count for pool in job.pools)  # Slurm sets them later
    if peers:
        port = FIRST_PORT + crc32(request_id.encode()) % PORTS
        addresses = [f"{address}:{port}" for address in (peer["first"], *(other["address"] for other in peers))]
    node = replicas(job, addresses=addresses, job_id=request_id, image_defaults=lambda _image: defaults)[rank]
    cluster = json.loads(node.env[contract.CLUSTER_SPEC]) | {"environment": "host"}  # no rehearsal of another machine
    return {
        **({"rank": rank, "address": peer["address"] if rank else peer["first"]} if peers else {}),
        **({"script": body["script"]} if "script" in body else {}),
        "id": f"{request_id}-{rank}" if rank else request_id,
        "run": body["labels"].get(RUN_LABEL, node.env.get(contract.RUN, "")),
        "labels": {} if rank else body["labels"],  # the first node's record is found by them
        "request": body,
        "folder": job.run_folder or "",
        "argv": node.argv,
        "env": {**node.env, contract.CLUSTER_SPEC: json.dumps(cluster)},
        "gpus": node.gpus,
        "hours": service(body).limit(body) / 3600,
        "code": body["code"],
        **{name: value for name, value in (peer if rank else body).items() if name in OF_HOST},
        "trainer": trainer_digest(),
    }
