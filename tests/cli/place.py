"""A person's home folder and a VM to reach, for the commands that go there by SSH."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cli.vms import Vms
from tests.command import Ran, launch
from tests.ssh import SshServer
from tests.ssh.server import make_key


class Place:
    """A person's home folder, and a VM named dev whose address is this machine's."""

    def __init__(self, vms: Vms, server: SshServer, folder: Path) -> None:
        self.vms, self.server = vms, server
        self.home = folder / "user's home"
        (self.home / ".ssh").mkdir(parents=True)
        self.key = make_key(self.home / ".ssh" / "google_compute_engine")
        server.let_in(self.key.with_name("google_compute_engine.pub"))
        self.env = {**vms.env, "HOME": str(self.home), "XDG_CONFIG_HOME": "", "PATH": os.environ["PATH"]}
        self.machine = vms.make()
        self.address("127.0.0.1")

    def address(self, external_ip: str) -> None:
        """Give the VM an external IP, or none."""
        interface = self.vms.cloud.compute.vm("dev").body["networkInterfaces"][0]
        interface["accessConfigs"] = [{"natIP": external_ip}] if external_ip else []

    def launch(self, *argv: str, code: int = 0) -> Ran:
        """A command of launch's for somebody who is called as this process's user is on the VM."""
        ran = launch(*argv, env=self.env, cwd=self.vms.folder)
        assert ran.code == code, ran.shown
        return ran

    def ssh(self, *argv: str, code: int = 0) -> Ran:
        return self.launch("ssh", "dev", *self.there, *argv, code=code)

    @property
    def there(self) -> tuple[str, ...]:
        """Where OpenSSH's server differs from a VM's."""
        return ("--user", self.server.user, "--port", str(self.server.port))

    @property
    def settings(self) -> Path:
        return self.home / ".config" / "launch"
