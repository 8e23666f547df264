"""Certificates for the row of `bench transfer` that says what TLS costs."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path

from transfer.transports.tls import Tls

NAME = "tcp with TLS"
_MAKE = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=bench \
  -keyout key.pem -out own.pem
"""


def make_certificate(folder: Path) -> dict[str, str]:
    """Arguments of `Tls` for a certificate that signs itself. Raises OSError, CalledProcessError without openssl."""
    subprocess.run(["sh", "-c", _MAKE], cwd=folder, check=True, capture_output=True)
    own, key = str(folder / "own.pem"), str(folder / "key.pem")
    return asdict(Tls(certificate=own, key=key, authority=own))
