"""The other process of `bench transfer`: grants memory to our transports, and is the far end of the bare ones.

Argument: one JSON object with memory_nbytes, and tls, where certificates could be made. Prints one JSON object with
everything that the measuring process needs, and leaves when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from typing import Any

import numpy as np

from mooncake_connector.cli.bench.transfer_tls import NAME as TLS
from transfer.control.handshake import Identity
from transfer.transports.memory import Memory
from transfer.transports.registry import HOST_NAMES, make_transports
from transfer.transports.tls import Tls
from transfer.transports.vectors import Vector, read_process

FETCH = struct.Struct("<iqq")
"""What the far end of the bare process_vm round trip is told: PID, address, bytes."""


def main(order: dict[str, Any]) -> None:
    data = np.ones(order["memory_nbytes"], dtype=np.uint8)
    memory = Memory()
    memory.register(data.ctypes.data, data.nbytes)
    grant = memory.grant(np.array([data.ctypes.data]), np.array([data.nbytes]))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, data), daemon=True).start()
    tls = Tls(**order["tls"]) if order["tls"] else None
    with (
        make_transports(HOST_NAMES, memory, Identity()) as transports,
        make_transports(["tcp"] if tls else [], memory, Identity(), tls=tls) as secured,
    ):
        endpoints = {name: endpoint.hex() for name, endpoint in transports.listen().items()}
        if tls:
            endpoints[TLS] = secured.listen()["tcp"].hex()
        port = listener.getsockname()[1]
        found = {"pid": os.getpid(), "port": port, "key": grant.key.hex(), "address": data.ctypes.data}
        print(json.dumps({**found, "nbytes": data.nbytes, "endpoints": endpoints}), flush=True)
        sys.stdin.read()


def _serve(listener: socket.socket, data: np.ndarray[Any, Any]) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = connection.recv(1)
        target = _take if kind == b"t" else _fetch
        threading.Thread(target=target, args=(connection, data), daemon=True).start()


def _take(connection: socket.socket, data: np.ndarray[Any, Any]) -> None:
    """Bare TCP: 8 bytes of length, the bytes, and one byte back."""
    view = data.data
    while header := connection.recv(8, socket.MSG_WAITALL):
        nbytes, at = int.from_bytes(header, "little"), 0
        while at < nbytes:
            at += connection.recv_into(view[at:nbytes])
        connection.sendall(b"k")


def _fetch(connection: socket.socket, data: np.ndarray[Any, Any]) -> None:
    """Bare process_vm: told where, fetches it, and one byte back."""
    while message := connection.recv(FETCH.size, socket.MSG_WAITALL):
        pid, address, nbytes = FETCH.unpack(message)
        size = np.array([nbytes])
        read_process(pid, Vector.of(np.array([address]), size), Vector.of(np.array([data.ctypes.data]), size))
        connection.sendall(b"k")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
