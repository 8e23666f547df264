"""RDMA verbs by way of the system's libibverbs: devices, registered memory, queue pairs and their completions.

The library is loaded when a card is asked for, so that a process without one never has it. What fails raises OSError.
Closing a thing twice does nothing. What it was made from may be closed before it: a transport is closed while threads
of its peers still end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mooncake_connector.sizes import human_nbytes
from transfer.transports.base import Unavailable
from transfer.transports.rdma import abi
from transfer.transports.rdma.abi import Access
from transfer.transports.vectors import address_of

INSTALL_LIBRARY = "apt-get install libibverbs1 ibverbs-providers (or rdma-core)"
NO_LIMIT = "no limit"


@cache
def library() -> ctypes.CDLL:
    """Raises Unavailable with what is missing and how to get it."""
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unavailable("RDMA is used on 64-bit little-endian machines only")
    try:
        return abi.loaded()
    except OSError as error:
        raise Unavailable(f"libibverbs cannot be loaded ({error}): {INSTALL_LIBRARY}") from error


def in_use() -> str:
    """What speaks to the cards, where `library` gives it."""
    library()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libibverbs.so" in line:
            return f"libibverbs ({os.path.realpath(line.split(maxsplit=5)[5])})"
    return "libibverbs"


def locked_limit() -> str:
    """Of this process's memory, which must all be locked to be registered."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else f"at most {human_nbytes(soft)}"


def open_device(name: str) -> Context:
    """Raises Unavailable."""
    with _devices() as devices:
        if name not in devices:
            known = ", ".join(devices) or "none"
            raise Unavailable(
                f"the kernel has {name}, and libibverbs knows {known}: its driver is missing ({INSTALL_LIBRARY}), or "
                "in a container /dev/infiniband (docker run --device=/dev/infiniband)"
            )
        try:
            return Context(devices[name])
        except OSError as error:
            raise Unavailable(
                f"{name} cannot be opened: {error.strerror or error}; who may use /dev/infiniband?"
            ) from error


@contextlib.contextmanager
def _devices() -> Iterator[dict[str, int]]:
    """By name, as the library has them. Raises Unavailable."""
    count = ctypes.c_int()
    ctypes.set_errno(0)
    found = library().ibv_get_device_list(ctypes.byref(count))
    if not found:
        if ctypes.get_errno() != errno.ENOSYS:  # it has found no support in the kernel
            raise Unavailable(f"libibverbs cannot list its devices: {os.strerror(ctypes.get_errno())}")
        yield {}
        return
    try:
        yield {library().ibv_get_device_name(found[i]).decode(): found[i] for i in range(count.value)}
    finally:
        library().ibv_free_device_list(found)


class Limits(NamedTuple):
    """Of a device: windows of type 2B; requests and completions of a queue; ranges of a request, and of one that reads;
    reads on the wire that a queue pair serves, and that it asks for.

    A device may leave the second of either pair at 0, which says nothing.
    """

    has_windows: bool
    max_qp_wr: int
    max_cqe: int
    max_sge: int
    max_sge_rd: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int


class Port(NamedTuple):
    active_mtu: int
    """The verbs' code for it."""
    lid: int
    max_msg_sz: int


class Completion(NamedTuple):
    wr_id: int
    is_success: bool
    status_str: str


class Handle:
    """To what the library made. That lives as long as what was made from it: if it is closed before, its end waits."""

    _lock = threading.Lock()
    """Of all: held while what is alive is counted, never during a call of the library."""

    def __init__(self, make: Callable[[], int], end: Callable[[int], int], *sources: Handle) -> None:
        """`make` returns its address, made from these sources; `end` is what the library ends it by. Raises OSError."""
        self._end, self._sources = end, sources
        self._users, self._is_closed = 0, False
        with self._lock:
            for source in sources:
                source.address  # noqa: B018 - raises
            for source in sources:
                source._users += 1
        try:
            self._address = make()
        except BaseException:
            self._let_go()
            raise

    @property
    def address(self) -> int:
        """Raises OSError once it is closed, where the library would crash."""
        if self._is_closed:
            raise OSError(errno.EBADF, f"a {type(self).__name__} is closed")
        return self._address

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Raises OSError where the library does not end it; it is still there then."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            is_used = bool(self._users)
        if not is_used:
            self._finish()

    def _finish(self) -> None:
        try:
            check(self._end(self._address), f"a {type(self).__name__} cannot be closed")
        except OSError:
            self._is_closed = False
            raise
        self._let_go()

    def _let_go(self) -> None:
        ended = []
        with self._lock:
            for source in self._sources:
                source._users -= 1
                if source._is_closed and not source._users:
                    ended.append(source)
        with contextlib.ExitStack() as stack:
            for source in ended:
                stack.callback(source._finish)


class Context(Handle):
    """An opened device."""

    def __init__(self, device: int) -> None:
        super().__init__(lambda: made("ibv_open_device", device), library().ibv_close_device)
        self.alloc_mw = abi.ALLOC_MW(self._operation("alloc_mw"))
        self.dealloc_mw = abi.DEALLOC_MW(self._operation("dealloc_mw"))
        self.poll_cq = abi.POLL_CQ(self._operation("poll_cq"))
        self.req_notify_cq = abi.REQ_NOTIFY_CQ(self._operation("req_notify_cq"))
        self.post_send = abi.POST_SEND(self._operation("post_send"))

    def _operation(self, name: str) -> int:
        return abi.member(abi.CONTEXT, f"ops.{name}", self.address)

    def limits(self) -> Limits:
        """Raises OSError."""
        found = np.zeros(1, abi.DEVICE_ATTR)
        check(library().ibv_query_device(self.address, address_of(found)), "its limits cannot be read")
        is_capable = bool(int(found["device_cap_flags"][0]) & abi.HAS_WINDOWS_2B)
        has_windows = is_capable and bool(self.alloc_mw) and bool(self.dealloc_mw)  # an old driver may lack them
        return Limits(has_windows, *(int(found[name][0]) for name in Limits._fields[1:]))

    def port(self, number: int) -> Port:
        """Raises OSError."""
        found = np.zeros(4, abi.PORT_ATTR)  # with room for what later versions may have at its end
        check(library().ibv_query_port(self.address, number, address_of(found)), f"port {number} cannot be read")
        return Port(*(int(found[name][0]) for name in Port._fields))

    def domain(self) -> Domain:
        """Raises OSError."""
        return Domain(self)

    def channel(self) -> Channel:
        """Raises OSError."""
        return Channel(self)

    def queue(self, size: int, channel: Channel | None = None) -> Queue:
        """Of completions. Raises OSError."""
        return Queue(self, size, channel)


class Channel(Handle):
    """Tells which of its queues have something."""

    def __init__(self, context: Context) -> None:
        create = partial(made, "ibv_create_comp_channel", context.address)
        super().__init__(create, library().ibv_destroy_comp_channel, context)
        self.fd = abi.member(abi.COMP_CHANNEL, "fd", self.address)
        self.queues: dict[int, Queue] = {}

    def take(self) -> Queue | None:
        """The next queue that has something; None for one that is closed.

        Raises OSError: BlockingIOError where there is none and `fd` does not block.
        """
        queue, of = ctypes.c_void_p(), ctypes.c_void_p()
        if library().ibv_get_cq_event(self.address, ctypes.byref(queue), ctypes.byref(of)):
            raise _error(ctypes.get_errno(), "an event cannot be read")
        library().ibv_ack_cq_events(queue, 1)
        return self.queues.get(queue.value or 0)


class Queue(Handle):
    """Of completions. For one thread at a time."""

    def __init__(self, context: Context, size: int, channel: Channel | None) -> None:
        of = channel.address if channel is not None else None
        create = partial(made, "ibv_create_cq", context.address, size, None, of, 0)
        super().__init__(create, library().ibv_destroy_cq, context, *([] if channel is None else [channel]))
        self._poll, self._notify, self._channel = context.poll_cq, context.req_notify_cq, channel
        self._found = np.zeros(0, abi.WC)
        if channel is not None:
            channel.queues[self.address] = self

    def notify(self) -> None:
        """Have its channel told of the next completion. Raises OSError."""
        check(self._notify(self.address, 0), "completions cannot be waited for")

    def poll(self, most: int) -> list[Completion]:
        """Raises OSError."""
        if len(self._found) < most:
            self._found = np.zeros(most, abi.WC)
        count = self._poll(self.address, most, address_of(self._found))
        if count < 0:
            raise OSError(errno.EIO, "a queue of completions cannot be read")
        return [
            Completion(wr_id, not status, library().ibv_wc_status_str(status).decode() if status else "")
            for wr_id, status, *_ in self._found[:count].tolist()
        ]

    def close(self) -> None:
        if self._channel is not None and not self.is_closed:  # its address may be another one's then
            self._channel.queues.pop(self._address, None)
        super().close()


class Domain(Handle):
    """What a device's memory regions, windows and queue pairs belong to."""

    def __init__(self, context: Context) -> None:
        super().__init__(partial(made, "ibv_alloc_pd", context.address), library().ibv_dealloc_pd, context)
        self._context = context

    def register(self, address: int, nbytes: int, access: Access) -> Registered:
        """Raises OSError."""
        return Registered(self, "ibv_reg_mr", address, nbytes, access)

    def register_dma_buf(self, offset: int, nbytes: int, address: int, descriptor: int, access: Access) -> Registered:
        """What the dma-buf has at `offset`, by these addresses. Raises OSError."""
        if not hasattr(library(), "ibv_reg_dmabuf_mr"):
            raise OSError(errno.ENOSYS, "libibverbs is older than that of rdma-core 34")
        return Registered(self, "ibv_reg_dmabuf_mr", offset, nbytes, address, descriptor, access)

    def window(self) -> Window:
        """Raises OSError."""
        return Window(self._context, self)


class Registered(Handle):
    """Memory that a device knows. It cannot be closed while a window is bound to it."""

    def __init__(self, domain: Domain, function: str, *arguments: int) -> None:
        super().__init__(partial(made, function, domain.address, *arguments), library().ibv_dereg_mr, domain)
        self.lkey, self.rkey = (abi.member(abi.MR, name, self.address) for name in ("lkey", "rkey"))


class Window(Handle):
    """Over registered memory once it is bound, with a key of its own, for one queue pair."""

    def __init__(self, context: Context, domain: Domain) -> None:
        def create() -> int:
            address = context.alloc_mw(domain.address, abi.WINDOW_TYPE_2)
            if not address:
                raise _error(ctypes.get_errno(), "the device gives no memory window")
            return int(address)

        super().__init__(create, context.dealloc_mw, domain)
        self.key = abi.member(abi.MW, "rkey", self.address)

    def next_key(self) -> int:
        """By which it can be bound next: its number, and an 8-bit part that is ours and changes each time."""
        return (self.key & ~0xFF) | ((self.key + 1) & 0xFF)

    def bound(self, key: int) -> None:
        """The request that binds it by this key was posted."""
        abi.set_member(abi.MW, "rkey", self.address, key)
        self.key = key


def made(function: str, *arguments: Any) -> int:
    """The address of what it made. Raises OSError."""
    address = getattr(library(), function)(*arguments)
    if not address:
        raise _error(ctypes.get_errno(), f"{function} failed")
    return int(address)


def check(status: int, what: str) -> None:
    """Raise OSError for what a function of the library returned, if that is an error."""
    if status:
        raise _error(status if status > 0 else ctypes.get_errno() or -status, what)


def _error(number: int, what: str) -> OSError:
    return OSError(number, f"{what}: {os.strerror(number)}" if number else what)
