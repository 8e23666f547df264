"""NIXL, for clusters that have it deployed: UCX, which takes what reaches a peer and is configured by its variables.

What is offered is read by peers through an agent of its own: UCX without a card may read in a thread of the process
that has the memory, and looks no more whether it is registered. Only an agent that is gone reads nothing for sure. That
thread is started by the first transfer that is sent; who reads asks for progress itself.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from transfer.transports.base import Numbers, Region, TransferError, Unavailable
from transfer.transports.libraries.reader import Patience, Reader
from transfer.transports.libraries.transport import LibraryTransport

MAX_PIECES = 4096
"""Of one of its requests."""
NUM_AGENTS = 2
"""That read: one serves nobody else while it moves bytes, so both of a peer's threads would wait for it."""
_SPIN_S, _MAX_PAUSE_S = 0.0002, 0.00005
"""UCX moves bytes when it is asked how far it is."""
_LOOK_US = 5000
"""How often the thread of who is read from looks for what UCX did not wake it for."""


class NixlTransport(LibraryTransport):
    """See the module."""

    name = "nixl"

    def _load(self, hosts: Sequence[str]) -> Reader:
        return NixlReader()


class NixlReader(Reader):
    """Agents that read, and one at a time that is read from."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        self._api = _library()
        self._lock = threading.Lock()
        self._offered: dict[Region, bool] = {}
        """Whether the server knows it."""
        self._server: _Server | None = None
        self._origin = b""
        self._met: Counter[str] = Counter()
        self._locks = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # the default has none
        options = self._api.nixl_agent_config(False, backends=["UCX"], sync_mode=self._locks)
        self._agents = [_call("start", self._api.nixl_agent, _name("reads"), options) for _ in range(NUM_AGENTS)]
        """Empty once closed."""
        self._num_reads = [0] * NUM_AGENTS
        """Of each agent, at present."""

    def offer(self, region: Region) -> None:
        with self._lock:
            self._offered[region] = False
            self._origin = b""
            try:
                if self._server is not None:
                    self._register_offered(self._server)
            except BaseException:
                del self._offered[region]
                raise

    def withdraw(self, region: Region) -> None:
        with self._lock:
            self._offered.pop(region, None)
            self._server, self._origin = None, b""
            self._offered = dict.fromkeys(self._offered, False)

    def origin(self) -> bytes:
        with self._lock:
            if not self._origin:
                self._open_agents()
                if self._server is None:
                    self._server = _call("start", _Server, self._api, self._locks)
                self._register_offered(self._server)
                self._origin = _call("describe its memory", self._server.description)
            return self._origin

    def stage(self, address: int, nbytes: int) -> None:
        with ExitStack() as undo:  # memory that only some know goes away, and its addresses may be other memory's next
            for agent in self._open_agents():
                known = _call(f"register {nbytes} bytes", agent.register_memory, [(address, nbytes, 0, "")], "DRAM")
                undo.callback(_call, "forget memory", agent.deregister_memory, known)
            undo.pop_all()

    def meet(self, origin: bytes) -> str:
        with self._lock, ExitStack() as undo:
            for agent in self._open_agents():
                said = _call("take a peer's description", agent.add_remote_agent, origin)
                name: str = said.decode() if isinstance(said, bytes) else said
                if not self._met[name]:  # else others read from there
                    undo.callback(_call, "forget a peer", agent.remove_remote_agent, name)
            undo.pop_all()
            self._met[name] += 1
            return name

    def part(self, name: str) -> None:
        with self._lock:
            self._met[name] -= 1
            if self._met[name] <= 0:
                del self._met[name]
                for agent in self._agents:
                    _call("forget a peer", agent.remove_remote_agent, name)

    def read(self, name: str, remote: Numbers, local: Numbers, nbytes: Numbers) -> None:
        with self._least_busy() as agent:
            patience = Patience("NIXL", spin_s=_SPIN_S, max_pause_s=_MAX_PAUSE_S)
            for start in range(0, len(nbytes), MAX_PIECES):
                part = slice(start, start + MAX_PIECES)
                here, there = (
                    agent.get_xfer_descs(np.column_stack([column[part], nbytes[part], [0] * len(nbytes[part])]), "DRAM")
                    for column in (local, remote)
                )
                request = _call("begin to read", agent.initialize_xfer, "READ", here, there, name)
                state = _call("read", agent.transfer, request)
                while state == "PROC":
                    patience.wait()
                    state = _call("read", agent.check_xfer_state, request)
                if state != "DONE":
                    raise TransferError(f"NIXL could not read: the request ended with {state}")
                _call("end a read", agent.release_xfer_handle, request)

    def close(self) -> None:
        with self._lock:
            self._agents, self._server = [], None
            self._offered.clear()

    def _open_agents(self) -> list[Any]:
        if not (agents := self._agents):
            raise TransferError("NIXL's agents are closed")
        return agents

    @contextmanager
    def _least_busy(self) -> Iterator[Any]:
        with self._lock:
            number = self._num_reads.index(min(self._num_reads))
            agent = self._open_agents()[number]
            self._num_reads[number] += 1
        try:
            yield agent
        finally:
            with self._lock:
                self._num_reads[number] -= 1

    def _register_offered(self, server: _Server) -> None:
        for region, is_known in self._offered.items():
            if not is_known:
                _call(f"register {region.nbytes} bytes", server.register, region)
                self._offered[region] = True


class _Server:
    """An agent that is read from, with a thread that sleeps until there is something for it.

    It is made of what `nixl_agent` wraps, since of that one the thread never sleeps: beside it a machine of few cores
    has one less for the copy out of staging. What a card does, or the kernel for a peer of this host, needs no thread.
    """

    def __init__(self, api: Any, locks: Any) -> None:
        self._bindings = import_module(api.nixl_agent.__module__.rpartition(".")[0] + "._bindings")
        config = self._bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay, config.syncMode = True, _LOOK_US, locks.value
        self._agent = self._bindings.nixlAgent(_name("serves"), config)
        self._backend = self._agent.createBackend("UCX", {})

    def register(self, region: Region) -> None:
        descriptors = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(region.address, region.nbytes, 0, "")])
        self._agent.registerMem(descriptors, [self._backend])

    def description(self) -> bytes:
        described: bytes = self._agent.getLocalMD()
        return described


def _name(what: str) -> str:
    return f"mooncake-connector-{what}-{secrets.token_hex(8)}"


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
