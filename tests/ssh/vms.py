"""Machines for tests of SSH, and the way into the loopback server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.jobs.vm import VmInstance
from launcher.ssh import keys
from launcher.ssh.command import SshTarget
from tests.ssh.server import SshServer, make_key

NUMBER = "5000000000000000001"


def machine(**changes: Any) -> VmInstance:
    """A VM to work on that runs, without an external IP."""
    known: dict[str, Any] = {
        "id": NUMBER,
        "name": "dev",
        "project": "my-project",
        "zone": "us-central1-a",
        "status": "RUNNING",
        "machine_type": "g2-standard-24",
        "provisioning": "standard",
        "created": 0.0,
        "started": 10.0,
        "internal_ip": "10.128.0.2",
        "request": {
            "networkInterfaces": [{"network": "https://www.googleapis.com/compute/v1/projects/p/global/networks/big"}],
            "serviceAccounts": [{"email": "vm@my-project.iam.gserviceaccount.com"}],
        },
        **changes,
    }
    return VmInstance(**known)


def target_of(server: SshServer, folder: Path, **changes: Any) -> SshTarget:
    """The way to the server, with a key that it takes."""
    key = folder / "key"
    if not key.exists():
        make_key(key)
        server.let_in(key.with_name("key.pub"))
    known_hosts = keys.known_hosts(folder, f"compute.{NUMBER}")
    known_hosts.parent.mkdir(exist_ok=True)
    known: dict[str, Any] = {
        "alias": f"compute.{NUMBER}",
        "host": "127.0.0.1",
        "port": server.port,
        "user": server.user,
        "key": key,
        "known_hosts": known_hosts,
        **changes,
    }
    return SshTarget(**known)
