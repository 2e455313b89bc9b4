"""docs/recipes/vm.md's commands that need a VM that boots: `python -m tests.e2e.vmrecipe` records them again (as root).

They stand in blocks that start with ```sh-session. The cloud is the loopback one; the startup script of its VMs really
runs, SSH goes through gcloud's own tunnel and a relay to an OpenSSH server.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launcher.ssh.command import TUNNEL_URL
from launcher.testing.googlecloud import GoogleCloud, Pace
from tests.command import ROOT, WORLD
from tests.e2e.recipe import IMAGE, cache, printed, record, steps
from tests.registry import OciRegistry, put_image
from tests.ssh import Relay, SshServer
from tests.ssh.server import make_key
from tests.startup.park import Park

PAGE = ROOT / "docs" / "recipes" / "vm.md"
BLOCK = re.compile(r"(?<=```sh-session\n)\$ launch .*?(?=```)", re.DOTALL)
SPEC = re.compile(r"```yaml\n(# my_job\.yaml\n.*?)```", re.DOTALL)
GPUS = "".join(f"echo 'GPU {n}: NVIDIA L4 (UUID: GPU-{n}{n}{n}{n}{n}{n}{n}{n})'\n" for n in (0, 1))
ME = "me@example.com"


def outputs(text: str, folder: Path) -> tuple[list[str], GoogleCloud]:
    """Run the page's commands in `folder`, one after the other."""
    with world(text, folder) as (cloud, env, image):
        return [printed(line, env, folder).replace(image, IMAGE) for line, _ in steps(text, BLOCK)], cloud


@contextmanager
def world(text: str, folder: Path) -> Iterator[tuple[GoogleCloud, Mapping[str, str], str]]:
    """The page's spec in `folder`, and a cloud whose VMs boot and let us in."""
    with ExitStack() as stack:
        cloud = stack.enter_context(GoogleCloud())
        cloud.let_in("a token")  # gcloud's client can't do without one
        cloud.compute.zones.open_out("us-central1")
        cloud.compute.pace = Pace(staging=0.5, running=1, delete=0.5, stop=1)
        server = stack.enter_context(SshServer(folder / "server"))
        relay = stack.enter_context(Relay(folder))
        registry = stack.enter_context(OciRegistry())
        stack.enter_context(Park(cloud, folder / "vms"))
        server.program("nvidia-smi", GPUS)
        relay.backends["dev", 22] = server.port
        image = f"{registry.host}/p/train"
        (spec,) = SPEC.findall(text)
        (folder / "my_job.yaml").write_text(spec + f"image: {{uri: '{image}@{put_image(registry, 'p/train')}'}}\n")
        env = {
            **WORLD,
            **cloud.environ(),
            "HOME": str(at_home(folder, server, cloud)),
            "XDG_CONFIG_HOME": "",
            TUNNEL_URL: relay.url,
            "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": str(relay.authority),
            "PATH": f"{os.environ['PATH']}:{Path(shutil.which('gcloud') or '/').parent}",
            "DOCKER_CONFIG": "/nonexistent",
            "XDG_CACHE_HOME": cache(),
            "COLUMNS": "80",
            "TZ": "UTC",
        }
        yield cloud, env, image


def at_home(folder: Path, server: SshServer, cloud: GoogleCloud) -> Path:
    """A person's home folder, with a key that the server takes; OS Login calls them as this process's user."""
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    server.let_in(make_key(home / ".ssh" / "google_compute_engine").with_name("google_compute_engine.pub"))
    cloud.oslogin.names[ME] = getpass.getuser()
    return home


if __name__ == "__main__":
    record(PAGE, outputs, BLOCK)
