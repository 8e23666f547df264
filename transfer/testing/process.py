"""The other process of the conformance tests: `Process` is the tests' end of it, and runs this module as the other.

`python -m transfer.testing.process MODULE:CLASS OPTIONS` reads one JSON order a line, answers in one line: `offer`
grants new memory, `digest` says what it holds, `send` begins to write without an end and does not answer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from transfer.control.handshake import Identity
from transfer.testing.memory import Buffer, buffer_class, digest, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Grant, Transport
from transfer.transports.memory import Memory
from transfer.transports.tls import Tls


class Process:
    """Another process with a transport of the same class."""

    def __init__(self, transport: type[Transport], options: dict[str, Any] | None = None) -> None:
        name = f"{transport.__module__}:{transport.__qualname__}"
        command = [sys.executable, "-m", __name__, name, json.dumps(options or {})]
        # Not from here: `-m` would find a source tree before what is installed.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")

    def ask(self, **order: Any) -> Any:
        """Have it do something, and wait for the answer."""
        self.tell(**order)
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the other process died"
        return json.loads(line)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def offer(self, nbytes: int) -> tuple[bytes, Grant]:
        """Its endpoint, and a grant of `nbytes` new bytes."""
        answer = self.ask(do="offer", nbytes=nbytes)
        grant = Grant(bytes.fromhex(answer["key"]), int64(answer["address"]), int64(nbytes))
        return bytes.fromhex(answer["endpoint"]), grant

    def digest(self, grant: Grant) -> str:
        """Of what the granted memory holds now."""
        answer: str = self.ask(do="digest", key=grant.key.hex())["digest"]
        return answer

    def stop(self) -> None:
        """Stop it, and wait until it is stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()


class _Other:
    def __init__(self, transport: Transport, memory: Memory) -> None:
        self._transport, self._memory = transport, memory
        self._buffers: dict[str, Buffer] = {}

    def offer(self, nbytes: int) -> dict[str, Any]:
        buffer = buffer_class(type(self._transport))(nbytes)
        self._memory.register(buffer.address, nbytes)
        grant = self._memory.grant(int64(buffer.address), int64(nbytes))
        self._buffers[grant.key.hex()] = buffer
        return {"endpoint": self._transport.listen().hex(), "key": grant.key.hex(), "address": buffer.address}

    def digest(self, key: str) -> dict[str, Any]:
        return {"digest": digest(self._buffers[key])}

    def send(self, endpoint: str, key: str, address: int, nbytes: int) -> None:
        source = buffer_class(type(self._transport))(nbytes)
        source.bytes[:] = 1
        self._memory.register(source.address, nbytes)
        peer = self._transport.connect(bytes.fromhex(endpoint), deadline_s=30)
        grant = Grant(bytes.fromhex(key), int64(address), int64(nbytes))
        everywhere = int64(source.address), grant.addresses, grant.nbytes
        while peer.alive:
            for completion in [peer.write(grant, *everywhere, deadline_s=30) for _ in range(4)]:
                outcome_of(completion)


def make_transport(kind: Any, memory: Memory, identity: Identity, options: dict[str, Any]) -> Transport:
    """A transport with options that were JSON."""
    made: Transport = kind(memory, identity, **{k: Tls(**v) if k == "tls" else v for k, v in options.items()})
    if made.capabilities.needs_registration:
        memory.follow(made)
    return made


def main(name: str, options: str) -> None:
    module, _, attribute = name.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    memory = Memory()
    other = _Other(make_transport(kind, memory, Identity(), json.loads(options)), memory)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(other, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
