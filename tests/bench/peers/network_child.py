"""One of the two processes at the ends of the links of `network`.

Argument: one JSON object with role ("hold", "send"), hosts, secret, nbytes, lost_after_s. Orders come as lines of JSON,
each is answered by one. It leaves when its standard input is closed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

from transfer.control.handshake import Identity
from transfer.plan.granularity import Batch, Divider, Granularity
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Completion, Grant, Outcome
from transfer.transports.memory import Memory
from transfer.transports.sender import SendingPeer
from transfer.transports.tcp import TcpTransport

_DEADLINE_S = 60.0
_PIECE_NBYTES = 32 << 10
_BLOCK_TOKENS = 16


class _End:
    """What both roles have: memory and a transport."""

    def __init__(self, order: dict[str, Any]) -> None:
        sends = order["role"] == "send"
        data = np.random.default_rng(1).bytes(order["nbytes"]) if sends else bytes(order["nbytes"])
        self.data = np.frombuffer(bytearray(data), dtype=np.uint8)
        self.address: int = self.data.ctypes.data
        self.memory = Memory()
        self.memory.register(self.address, self.data.nbytes)
        identity = Identity(bytes.fromhex(order["secret"]))
        self.transport = TcpTransport(self.memory, identity, hosts=order["hosts"], lost_after_s=order["lost_after_s"])

    def digest(self) -> dict[str, Any]:
        return {"digest": hashlib.sha256(self.data.data).hexdigest()}


class Holder(_End):
    """Grants all of its memory."""

    def offer(self) -> dict[str, Any]:
        grant = self.memory.grant(np.array([self.address]), np.array([self.data.nbytes]))
        return {"endpoint": self.transport.listen().hex(), "key": grant.key.hex(), "address": self.address}

    def clear(self) -> dict[str, Any]:
        self.data[:] = 0
        return {}


class Sender(_End):
    """Writes into the holder's memory."""

    def connect(self, endpoint: str, key: str, address: int) -> dict[str, Any]:
        self._peer = self.transport.connect(bytes.fromhex(endpoint), deadline_s=_DEADLINE_S)
        assert isinstance(self._peer, SendingPeer)
        self._there = address
        self._grant = Grant(bytes.fromhex(key), np.array([address]), np.array([self.data.nbytes]))
        return {"paths": self._peer.paths}

    def write(self) -> dict[str, Any]:
        """Everything; how long it took."""
        start = time.perf_counter()
        outcome = outcome_of(self._send(0, self.data.nbytes))
        return {"seconds": time.perf_counter() - start, "outcome": str(outcome), "paths": self._peer.paths}

    def layers(
        self, granularity: str, num_layers: int, layer_nbytes: int, layer_s: float, passes: int
    ) -> dict[str, Any]:
        """Compute (sleep) all layers in so many passes, sending what may travel; seconds from the last layer to the
        last byte."""
        tokens = passes * 64 * _BLOCK_TOKENS
        divider = Divider(Granularity(granularity), range(num_layers), range(tokens), _BLOCK_TOKENS)
        landed: list[float] = []
        completions: list[Completion] = []
        failures: list[str] = []

        def arrived(outcome: Outcome) -> None:
            landed.append(time.perf_counter())
            if not outcome.ok:
                failures.append(str(outcome))

        at = time.perf_counter()
        for number in range(passes):
            for layer in range(num_layers):
                at += layer_s / passes
                time.sleep(max(0.0, at - time.perf_counter()))
                for batch in divider.computed(layer, (number + 1) * tokens // passes):
                    for start, stop in _runs(batch, tokens, layer_nbytes):
                        completions.append(self._send(start, stop))
                        completions[-1].add_done_callback(arrived)
        for completion in completions:
            outcome_of(completion)
        assert divider.complete
        return {"seconds": max(landed) - at, "outcome": failures[0] if failures else "ok"}

    def _send(self, start: int, stop: int) -> Completion:
        offsets = np.arange(start, stop, _PIECE_NBYTES)
        sizes = np.minimum(_PIECE_NBYTES, stop - offsets)
        return self._peer.write(
            self._grant, self.address + offsets, self._there + offsets, sizes, deadline_s=_DEADLINE_S
        )


def _runs(batch: Batch, tokens: int, layer_nbytes: int) -> list[tuple[int, int]]:
    """Where the KV of a batch lies, one run for each layer."""
    first, stop = batch.first_token * layer_nbytes // tokens, batch.stop_token * layer_nbytes // tokens
    return [(layer * layer_nbytes + first, layer * layer_nbytes + stop) for layer in batch.layers]


def main(order: dict[str, Any]) -> None:
    end = Holder(order) if order["role"] == "hold" else Sender(order)
    with end.transport:
        for line in sys.stdin:
            call = json.loads(line)
            print(json.dumps(getattr(end, call.pop("do"))(**call)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
