"""NIXL, for clusters that have it deployed: UCX, which takes what reaches a peer and is configured by its variables.

What is offered is read by peers through an agent of its own: UCX without a card reads in a thread of the process that
has the memory, and looks no more whether it is registered. Only an agent that is gone reads nothing for sure. That
thread never rests, so it is started by the first transfer that is sent; who reads asks for progress itself.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from transfer.transports.base import Numbers, Region, TransferError, Unavailable
from transfer.transports.libraries.reader import READ_S, Reader
from transfer.transports.libraries.transport import LibraryTransport

MAX_PIECES = 4096
"""Of one of its requests."""
_SPIN_S, _PAUSE_S = 0.0002, 0.00005
"""How long a thread asks for the end of a read without a pause, and then how often."""


class NixlTransport(LibraryTransport):
    """See the module."""

    name = "nixl"

    def _load(self, hosts: Sequence[str]) -> Reader:
        return NixlReader()


class NixlReader(Reader):
    """One agent that reads, and one at a time that is read from."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        self._api = _library()
        self._lock = threading.Lock()
        self._offered: dict[Region, Any] = {}
        self._server: Any = None
        self._origin = b""
        self._met: Counter[str] = Counter()
        self._is_closed = False
        self._agent: Any = self._new_agent("reads", has_thread=False)

    def offer(self, region: Region) -> None:
        with self._lock:
            self._offered[region] = None
            self._origin = b""
            try:
                if self._server is not None:
                    self._register_offered()
            except BaseException:
                del self._offered[region]
                raise

    def withdraw(self, region: Region) -> None:
        with self._lock:
            self._offered.pop(region, None)
            self._server, self._origin = None, b""
            self._offered = dict.fromkeys(self._offered)

    def origin(self) -> bytes:
        with self._lock:
            if not self._origin:
                if self._is_closed:
                    raise TransferError("NIXL's agent is closed")
                if self._server is None:
                    self._server = self._new_agent("serves", has_thread=True)
                self._register_offered()
                self._origin = self._call("describe its memory", self._server.get_agent_metadata)
            return self._origin

    def stage(self, address: int, nbytes: int) -> None:
        self._register(self._reading(), address, nbytes)

    def meet(self, origin: bytes) -> str:
        with self._lock:
            name = self._call("take a peer's description", self._reading().add_remote_agent, origin)
            name = name.decode() if isinstance(name, bytes) else name
            self._met[name] += 1
            return name

    def part(self, name: str) -> None:
        with self._lock:
            self._met[name] -= 1
            if self._met[name] <= 0 and not self._is_closed:
                del self._met[name]
                self._call("forget a peer", self._agent.remove_remote_agent, name)

    def read(self, name: str, remote: Numbers, local: Numbers, nbytes: Numbers) -> None:
        until = time.monotonic() + READ_S
        agent = self._reading()
        for start in range(0, len(nbytes), MAX_PIECES):
            part = slice(start, start + MAX_PIECES)
            here, there = (
                agent.get_xfer_descs(np.column_stack([column[part], nbytes[part], [0] * len(nbytes[part])]), "DRAM")
                for column in (local, remote)
            )
            request = self._call("begin to read", agent.initialize_xfer, "READ", here, there, name)
            self._finish(agent, request, until)
            self._call("end a read", agent.release_xfer_handle, request)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._agent = self._server = None
            self._offered.clear()

    def _finish(self, agent: Any, request: Any, until: float) -> None:
        state = self._call("read", agent.transfer, request)
        spin_until = time.monotonic() + _SPIN_S
        while state == "PROC":
            now = time.monotonic()
            if now > until:
                raise TransferError(f"NIXL has not read an order within {READ_S:g} s")
            time.sleep(0 if now < spin_until else _PAUSE_S)
            state = self._call("read", agent.check_xfer_state, request)
        if state != "DONE":
            raise TransferError(f"NIXL could not read: the request ended with {state}")

    def _register_offered(self) -> None:
        for region, descriptors in self._offered.items():
            if descriptors is None:
                self._offered[region] = self._register(self._server, region.address, region.nbytes)

    def _register(self, agent: Any, address: int, nbytes: int) -> Any:
        return self._call(f"register {nbytes} bytes", agent.register_memory, [(address, nbytes, 0, "")], "DRAM")

    def _reading(self) -> Any:
        if (agent := self._agent) is None:
            raise TransferError("NIXL's agent is closed")
        return agent

    def _new_agent(self, what: str, *, has_thread: bool) -> Any:
        name = f"mooncake-connector-{what}-{secrets.token_hex(8)}"
        locks = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # the default has none
        options = self._api.nixl_agent_config(has_thread, backends=["UCX"], sync_mode=locks)
        return self._call("start", self._api.nixl_agent, name, options)

    @staticmethod
    def _call(what: str, call: Any, *arguments: Any) -> Any:
        """Raises TransferError for whatever the library raises, which has no class of its own for it."""
        try:
            return call(*arguments)
        except Exception as error:
            raise TransferError(f"NIXL could not {what}: {type(error).__name__}: {error}") from error


def _library() -> Any:
    """Raises Unavailable where it is missing or cannot be loaded."""
    for setting, value in (("NIXL_LOG_LEVEL", "WARN"), ("UCX_LOG_FILE", "stderr")):
        os.environ.setdefault(setting, value)  # else both write to the engine's standard output
    try:
        return import_module("nixl._api")
    except (ImportError, OSError) as error:
        needed = "pip install 'mooncake-connector[nixl]', or its wheel that fits this machine"
        raise Unavailable(f"NIXL cannot be loaded ({error}): {needed}") from None
