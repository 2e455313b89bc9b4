"""Run the loopback cloud on its own until Ctrl-C.

    python -m launcher.testing.googlecloud --port 0 [--record FILE] [--latency 0.1]

It prints the environment that leads gcloud and Google's clients to it, for a shell to read. LAUNCH_REPOSITORY is an
image.repository on loopback that has the dependencies of each image, so launch builds nothing (not with --docker).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import threading
from pathlib import Path

from launcher.testing.googlecloud.compute.capacity import is_zone
from launcher.testing.googlecloud.compute.service import Pace
from launcher.testing.googlecloud.server import GoogleCloud
from launcher.testing.googlecloud.vertex.jobs import stockout
from launcher.testing.googlecloud.vertex.processes import Runner
from launcher.testing.registry import OciRegistry, put_image


def main() -> None:
    """Serve until a signal arrives."""
    options = parsed()
    done = threading.Event()
    # Handled instead of blocked: a job's processes would inherit the mask and could not be stopped.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    with (
        GoogleCloud(
            port=options.port,
            project=options.project,
            buckets=tuple(options.bucket) or ("my-bucket",),
            record=options.record,
            latency=options.latency,
            runner=Runner(options.code, options.docker) if options.run else None,
        ) as cloud,
        OciRegistry() as registry,
    ):
        if not options.docker:  # its image is not run
            registry.store.absent = lambda name, tag: name.endswith("/dependencies") and put_image(registry, name, tag)
        cloud.compute.pace = Pace().times(options.pace)
        for place in options.stockout:
            cloud.compute.capacity.out(place if is_zone(place) else f"{place}-*")
        cloud.jobs.play = lambda region, message: stockout(region) if region in options.stockout else None
        for name, value in {**cloud.environ(), "LAUNCH_REPOSITORY": f"{registry.host}/launch"}.items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"# listening on {cloud.url}", flush=True)
        done.wait()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launcher.testing.googlecloud", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, default=0, help="0: any free one")
    add("--record", type=Path, help="append each request to this file, a line of JSON each")
    add("--latency", type=float, default=0.0, metavar="SECONDS", help="wait before each answer")
    add("--project", default="my-project")
    add("--bucket", action="append", default=[], metavar="NAME", help="a bucket that exists (repeatable)")
    add("--stockout", action="append", default=[], metavar="PLACE", help="no machines in a region or zone (repeatable)")
    add("--pace", type=float, default=1.0, metavar="FACTOR", help="how long VMs take, of their usual time")
    add("--run", action="store_true", help="run the jobs that are submitted, with `launch local`")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--code", type=Path, metavar="DIR", help="with --run: the folder with the user's code")
    how.add_argument("--docker", action="store_true", help="with --run: in containers of their images")
    options = parser.parse_args()
    if (options.code or options.docker) and not options.run:
        parser.error("--code and --docker go with --run")
    return options


if __name__ == "__main__":
    main()
