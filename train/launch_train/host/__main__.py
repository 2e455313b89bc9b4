"""What launch runs on a machine that it reaches by SSH: `python -m launch_train.host ROOT OPERATION`.

The request is JSON on stdin, the answer JSON on stdout, after MARK.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch_train.host import cleaning, container, environment, job, machine, peers, slurm
from launch_train.host.errors import RefusedError
from launch_train.host.folder_server import MARK, NO_SLURM, serve


def main(argv: list[str]) -> None:
    """Carry out one operation."""
    root, operation = Path(argv[0]).expanduser(), argv[1]
    if operation == "serve":
        serve(Path(argv[2]), sys.stdin.buffer, sys.stdout.buffer)
        return
    if operation == "batch":
        sys.exit(slurm.run_batch(root, argv[2]))
    if operation == "node":
        slurm.run_node(root, argv[2])
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read() or b"{}")
    try:
        answer = answer_to(operation, request, root)
    except RefusedError as error:
        answer = {"refused": str(error), "fix": error.fix}
    except (slurm.SlurmError, subprocess.TimeoutExpired) as error:
        print(f"Slurm does not answer: {error}", file=sys.stderr)
        sys.exit(NO_SLURM)
    sys.stdout.buffer.write(MARK + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def answer_to(operation: str, request: dict[str, Any], root: Path) -> Any:
    """Carry out an operation and return its answer. Raises RefusedError, SlurmError, TimeoutExpired."""
    answer: Any = None
    match operation:
        case "start":
            (slurm.submit_job if "script" in request else job.start_job)(root, request)
            answer = {"job": slurm.add_states(root, job.describe_jobs(root, [request["id"]]))[0]}
        case "test":
            answer = {"text": slurm.test_job(request["script"])}
        case "jobs":
            answer = slurm.add_states(root, job.describe_jobs(root, request.get("ids")))
        case "open_meeting" | "join_meeting":
            answer = (peers.open_meeting if operation == "open_meeting" else peers.join_meeting)(request)
        case "stop":
            answer = job.mark_job(root, request["id"], "stop")
        case "cancel":
            answer = job.mark_job(root, request["id"], "cancel")
            slurm.cancel_job(root, request["id"])
        case "remove":
            if not any(each["running"] for each in slurm.add_states(root, job.describe_jobs(root, [request["id"]]))):
                job.remove_job(root, request["id"])
        case "clean":
            answer = cleaning.remove_unneeded(root, request["trainer"], dry_run=request["dry_run"])
        case "container":
            srun_help = slurm.slurm("srun", "--help", check=False) if request["slurm"] else ""
            answer = container.provide_container(root, request, srun_help)
        case "environment":
            answer = {"python": environment.make_environment(root, request)}
        case "describe":
            answer = machine.describe_machine(root)
            answer["environments"] = environment.complete_environments(root)
            answer["slurm_problem"] = slurm.problem_of_slurm() if request.get("slurm") else ""
            answer["pythons"] = environment.probe_pythons(request.get("pythons", ()), request.get("probe", []))
    return answer


if __name__ == "__main__":
    main(sys.argv[1:])
