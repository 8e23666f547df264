"""The aux rows of requests where KV is on a device: SGLang keeps them in host memory, and a node has one kind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


class AuxRows:
    """The rows of SGLang's aux buffers on the device, each copied when it is sent or has arrived.

    Args:
        addresses, sizes, item_sizes: of the buffers, in host memory; a request has one item of each.
        stream: for the copies, which the scheduler waits for: its own may stand behind the step under way.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        item_sizes: Sequence[int],
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._stream = stream
        self._host = [
            torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8).view(-1, item_nbytes)
            for address, nbytes, item_nbytes in zip(addresses, sizes, item_sizes, strict=True)
        ]
        self._device = [torch.zeros_like(rows, device=device) for rows in self._host]
        self.addresses = [rows.data_ptr() for rows in self._device]

    def take(self, row: int) -> None:
        """SGLang has filled this row: it may be sent."""
        with torch.cuda.stream(self._stream):
            for host, device in zip(self._host, self._device, strict=True):
                device[row].copy_(host[row])

    def give(self, row: int) -> None:
        """This row has arrived: SGLang reads it."""
        with torch.cuda.stream(self._stream):
            for host, device in zip(self._host, self._device, strict=True):
                host[row].copy_(device[row])
