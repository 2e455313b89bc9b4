"""Google's relay for TCP over WebSockets (IAP), as gcloud's own client speaks to it: version 4 of its protocol.

Frames (gcloud's googlecloudsdk/api_lib/compute/iap_tunnel_websocket_utils.py), all numbers big-endian: a tag of 16
bits, then for CONNECT_SUCCESS_SID and DATA a length of 32 bits and so many bytes, for ACK the number of bytes that
have arrived so far, in 64 bits.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

SUBPROTOCOL = Subprotocol("relay.tunnel.cloudproxy.app")
CONNECT_SUCCESS_SID, DATA, ACK = 0x0001, 0x0004, 0x0007
SESSION = b"a session of the test"
LARGEST = 16384
"""Bytes of a DATA frame."""


class Refusal(NamedTuple):
    """A close code with its words."""

    code: int
    words: str


NOT_FOUND = Refusal(4047, "Failed to lookup instance")
NO_BACKEND = Refusal(4003, "failed to connect to backend")
NOT_AUTHORIZED = Refusal(4033, "not authorized")


class Relay:
    """The relay, from `with` to its end. `backends` are the ports of this machine that play a VM's port, by the VM's
    (name, port). With `refusal` everybody is refused. `asked` are the connects: what their URL says. gcloud's client
    knows TLS alone: `authority` is the file with the certificate that it must trust (core/custom_ca_certs_file)."""

    def __init__(self, folder: Path) -> None:
        self.backends: dict[tuple[str, int], int] = {}
        self.refusal: Refusal | None = None
        self.asked: list[dict[str, str]] = []
        self.authority = folder / "relay.pem"
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.write_bytes(certificate())
        tls.load_cert_chain(self.authority)
        self._server = serve(
            self._serve,
            "127.0.0.1",
            0,
            ssl=tls,
            subprotocols=[SUBPROTOCOL],
            max_size=None,
            compression=None,
            open_timeout=60,
            ping_interval=None,
        )
        self._thread = threading.Thread(target=self._server.serve_forever, name="relay")

    @property
    def url(self) -> str:
        """For gcloud's --iap-tunnel-url-override."""
        return f"wss://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()

    def _serve(self, client: ServerConnection) -> None:
        assert client.request is not None
        url = urlsplit(client.request.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append(asked)
        try:
            found = self._backend(url.path, asked)
            if isinstance(found, Refusal):
                client.close(*found)
                return
            with socket.create_connection(("127.0.0.1", found)) as backend:
                client.send(struct.pack(">HI", CONNECT_SUCCESS_SID, len(SESSION)) + SESSION)
                passed_on(client, backend)
        except ConnectionClosed:  # gcloud has gone already
            return
        except OSError:  # nobody listens there
            client.close(*NO_BACKEND)

    def _backend(self, path: str, asked: dict[str, str]) -> int | Refusal:
        if self.refusal:
            return self.refusal
        if path != "/v4/connect" or asked.get("interface") != "nic0":
            return Refusal(4000, f"the loopback relay knows no {path} with {asked}")
        names = {name for name, _ in self.backends}
        if asked["instance"] not in names:
            return NOT_FOUND
        return self.backends.get((asked["instance"], int(asked["port"])), NO_BACKEND)


def passed_on(client: ServerConnection, backend: socket.socket) -> None:
    """Both ways, until one side has had enough."""
    back = threading.Thread(target=answers, args=(client, backend), name="relay-back")
    back.start()
    arrived = 0
    try:
        for frame in client:
            assert isinstance(frame, bytes)
            if struct.unpack(">H", frame[:2])[0] == DATA:
                (length,) = struct.unpack(">I", frame[2:6])
                backend.sendall(frame[6 : 6 + length])
                arrived += length
                client.send(struct.pack(">HQ", ACK, arrived))
    except (ConnectionClosed, OSError):
        pass
    finally:
        shut(backend)
        back.join()


def answers(client: ServerConnection, backend: socket.socket) -> None:
    """What the VM says; then the connection is closed."""
    try:
        while said := backend.recv(LARGEST):
            client.send(struct.pack(">HI", DATA, len(said)) + said)
        client.close(1000)
    except (ConnectionClosed, OSError):
        return


def shut(one: socket.socket) -> None:
    """End a connection that may have ended."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def certificate() -> bytes:
    """A key, and a certificate for 127.0.0.1 that it signs itself, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback relay")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    own = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return own + made.public_bytes(serialization.Encoding.PEM)
