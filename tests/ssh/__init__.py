"""A VM's SSH on loopback: OpenSSH's own server as an ordinary process, and a relay that plays Google's tunnel (IAP)."""

from tests.ssh.relay import Relay
from tests.ssh.server import SshServer

__all__ = ["Relay", "SshServer"]
