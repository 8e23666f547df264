"""An engine's publisher of KV events, played by the test: vLLM's and SGLang's frames over ZMQ, with replay."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, size: int = 16, **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None, **fields,
    }  # fmt: skip


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **fields}


CLEARED = {"type": "AllBlocksCleared"}


def packed(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([time.time(), list(events), 0])


class Publisher:
    """`port` 0: any that is free; the replay endpoint is another one. Batches before `kept` are not replayed."""

    def __init__(self, port: int = 0, *, kept: int = 0) -> None:
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set(zmq.LINGER, 0)
        self._out.bind(f"tcp://127.0.0.1:{port}")
        self.port = int(self._out.get(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"))
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._batches: list[bytes] = []
        self._kept = kept
        self._closed = False
        self._thread = threading.Thread(target=self._replay, daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> dict[str, str]:
        return {
            "endpoint": f"tcp://127.0.0.1:{self.port}", "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
        }  # fmt: skip

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = packed(*events)
        self._batches.append(payload)
        if not lost:
            number = len(self._batches) - 1
            self._out.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def keep_from_here(self) -> None:
        """What was published so far is replayed to nobody."""
        self._kept = len(self._batches)

    def _replay(self) -> None:
        while not self._closed:
            if not self._router.poll(20):
                continue
            client, _, first = self._router.recv_multipart()
            for number, payload in enumerate(list(self._batches)):
                if number >= max(self._kept, int.from_bytes(first, "big")):
                    self._router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
            self._router.send_multipart([client, b"", b"", END, b""])

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self._router.close(0)
        self._out.close(0)
        self._context.term()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
