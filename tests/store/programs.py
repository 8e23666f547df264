"""Programs of other processes that end by themselves, forked by a process that has imported what all of them need."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

NEEDED = ("mooncake_connector.errors", "store_client.testing")


def run_program(text: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """As `python -c TEXT ARGUMENTS...` with this process's environment; what it prints is kept."""
    end, printed = os.pipe()
    with open(end) as output:
        server = _server()
        socket.send_fds(server, [b"!"], [printed, 2])
        os.close(printed)
        order = {"text": text, "arguments": ["-c", *arguments], "environ": dict(os.environ)}
        server.sendall(json.dumps(order).encode() + b"\n")
        said = output.read()
    status = os.waitstatus_to_exitcode(int(server.recv(20)))
    return subprocess.CompletedProcess(arguments, status, said)


@functools.cache
def _server() -> socket.socket:
    here, there = socket.socketpair()
    command = [sys.executable, __file__, str(there.fileno())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
    there.close()
    atexit.register(process.wait)
    atexit.register(here.close)  # before that: it ends the server
    return here


def serve(orders: socket.socket) -> dict[str, Any]:
    """Fork one process for each order; returns in these, with the order."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
        if not message:
            sys.exit()
        order: dict[str, Any] = json.loads(orders.makefile("rb", buffering=0).readline())
        child = os.fork()
        if child == 0:
            orders.close()
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        orders.sendall(f"{os.waitpid(child, 0)[1]}".encode())


if __name__ == "__main__":
    del sys.path[0]  # the folder of the tests
    for module in NEEDED:
        importlib.import_module(module)
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = order["arguments"]
    exec(compile(order["text"], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
