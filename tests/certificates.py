"""Certificates of an authority made for one test run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transfer.transports.memory import Memory
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

CAN_MAKE = shutil.which("openssl") is not None
COMMANDS = """
set -e
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=authority \
  -keyout authority.key -out authority.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=peer -keyout peer.key -out peer.csr
openssl x509 -req -in peer.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 -out peer.pem
"""


def make_certificate(folder: Path) -> dict[str, str]:
    """A new authority in `folder`, and a peer it has signed: paths of the peer's files by role, as `Tls` names them."""
    subprocess.run(["sh", "-c", COMMANDS], cwd=folder, check=True, capture_output=True)
    files = {"certificate": "peer.pem", "key": "peer.key", "authority": "authority.pem"}
    return {role: str(folder / file) for role, file in files.items()}


@contextmanager
def tls_process(files: dict[str, str]) -> Iterator[None]:
    """The process that does TLS is there meanwhile, whoever closes his transports."""
    with TcpTransport(Memory(), tls=Tls(**files)) as user:
        user.listen()
        yield
