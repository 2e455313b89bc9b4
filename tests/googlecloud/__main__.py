"""The loopback cloud by itself, until Ctrl-C: `python -m tests.googlecloud --port 0 [--record FILE] [--latency 0.1]`.

It prints the environment that brings gcloud and Google's clients to it, ready for a shell's `eval`.
"""

from __future__ import annotations

import argparse
import shlex
import signal
from pathlib import Path

from tests.googlecloud.server import GoogleCloud


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m tests.googlecloud", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--record", type=Path, help="append each request to this file, a line of JSON each")
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS", help="wait before each answer")
    parser.add_argument("--project", default="my-project")
    parser.add_argument(
        "--bucket", action="append", default=[], metavar="NAME", help="a bucket that exists (repeatable)"
    )
    options = parser.parse_args()
    buckets = tuple(options.bucket) or ("my-bucket",)
    with GoogleCloud(
        port=options.port, project=options.project, buckets=buckets, record=options.record, latency=options.latency
    ) as cloud:
        for name, value in cloud.environ().items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"# listening on {cloud.url}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    # Blocked before any thread starts, so that sigwait alone takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
