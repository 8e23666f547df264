"""The other process of the conformance tests: `python -m transfer.testing_process MODULE:CLASS OPTIONS`.

Reads one JSON order a line, answers in one line: `offer` grants new memory, `digest` says what it holds, `send` begins
to write without an end and does not answer.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.base import Grant, Int64, Transport
from transfer.handshake import Identity
from transfer.memory import Memory
from transfer.tls import Tls

MIB = 1 << 20


class Buffer:
    """Memory of its own, which `free` really unmaps."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        """Random bytes of `seed`, or zeros."""
        self._map = mmap.mmap(-1, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def free(self) -> None:
        self.bytes = np.zeros(0, dtype=np.uint8)
        self._map.close()


def digest(buffer: Buffer) -> str:
    return hashlib.sha256(np.asarray(buffer.bytes).data).hexdigest()


def buffer_class(transport: type[Transport]) -> type[Buffer]:
    """What a transport's tests send from and write to: its own `buffer`, for memory of another kind."""
    return getattr(transport, "buffer", Buffer)


def int64(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


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
                completion.wait()


def make_transport(kind: Any, memory: Memory, identity: Identity, options: dict[str, Any]) -> Transport:
    """A transport with options that were JSON."""
    made: Transport = kind(memory, identity, **{k: Tls(**v) if k == "tls" else v for k, v in options.items()})
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
