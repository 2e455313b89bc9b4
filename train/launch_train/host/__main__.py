"""What launch runs on a machine that it reaches by SSH: `python -m launch_train.host ROOT OPERATION`.

The request is JSON on stdin, the answer JSON on stdout, after MARK.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from launch_train.host import cleaning, environment, job, machine
from launch_train.host.folder_server import MARK, serve


def main(argv: list[str]) -> None:
    """Carry out one operation."""
    root, operation = Path(argv[0]).expanduser(), argv[1]
    if operation == "serve":
        serve(Path(argv[2]), sys.stdin.buffer, sys.stdout.buffer)
        return
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read() or b"{}")
    answer: Any = None
    match operation:
        case "start" | "environment":
            try:
                if operation == "environment":
                    answer = {"python": environment.make_environment(root, request)}
                else:
                    job.start_job(root, request)
                    answer = {"job": job.describe_jobs(root, [request["id"]])[0]}
            except job.RefusedError as error:
                answer = {"refused": str(error), "fix": error.fix}
        case "jobs":
            answer = job.describe_jobs(root, request.get("ids"))
        case "cancel":
            answer = job.cancel_job(root, request["id"])
        case "remove":
            job.remove_job(root, request["id"])
        case "clean":
            answer = cleaning.remove_unneeded(root, request["trainer"], dry_run=request["dry_run"])
        case "describe":
            answer = machine.describe_machine(root)
            answer["environments"] = environment.complete_environments(root)
            answer["pythons"] = environment.probe_pythons(request.get("pythons", ()), request.get("probe", []))
    sys.stdout.buffer.write(MARK + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
