"""What is made from a device, and when the library ends it: over a stand-in for the library itself."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from transfer.testing.fixtures import DEADLINE_S
from transfer.transports.rdma import abi, queue_pair, verbs
from transfer.transports.rdma.abi import Access
from transfer.transports.rdma.queue_pair import QueuePair
from transfer.transports.vectors import address_of

CREATES = {
    "ibv_open_device": "context", "ibv_alloc_pd": "domain", "ibv_reg_mr": "registered", "ibv_create_cq": "queue",
    "ibv_create_comp_channel": "channel", "ibv_create_qp": "pair",
}  # fmt: skip
ENDS = {
    "ibv_close_device": "context", "ibv_dealloc_pd": "domain", "ibv_dereg_mr": "registered", "ibv_destroy_cq": "queue",
    "ibv_destroy_comp_channel": "channel", "ibv_destroy_qp": "pair",
}  # fmt: skip


class Library:
    """Gives memory for what is asked for, and notes the order in which it ends."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.failing: dict[str, int] = {}
        """What does not end, with the number of the error."""
        self.asked = 0
        """How often for the text of a status."""
        self.statuses: list[int] = []
        """Of the completions to come."""
        self._kept = [np.zeros(512, np.uint8) for _ in range(32)]
        self._free = (address_of(memory) for memory in self._kept)
        self.alloc_mw = abi.ALLOC_MW(lambda domain, kind: next(self._free))
        self.dealloc_mw = abi.DEALLOC_MW(lambda address: self._end("window"))
        self.poll_cq = abi.POLL_CQ(self._poll)
        self.has_windows = True
        for name in CREATES:
            setattr(self, name, self._create)
        for name, kind in ENDS.items():
            setattr(self, name, lambda address, kind=kind: self._end(kind))

    def _create(self, *_: Any) -> int:
        at = next(self._free)
        for name in ("alloc_mw", "dealloc_mw", "poll_cq"):
            if name == "poll_cq" or self.has_windows:
                address = ctypes.cast(getattr(self, name), ctypes.c_void_p).value
                offset = abi.CONTEXT.fields[f"ops.{name}"][1]  # type: ignore[index]
                ctypes.c_uint64.from_address(at + offset).value = address or 0
        return at

    def _end(self, kind: str) -> int:
        if kind not in self.failing:
            self.ended.append(kind)
        return self.failing.get(kind, 0)

    def _poll(self, queue: int, most: int, at: int) -> int:
        found, self.statuses = self.statuses[:most], self.statuses[most:]
        for number, status in enumerate(found):
            abi.set_member(abi.WC, "status", at + number * abi.WC.itemsize, status)
        return len(found)

    def ibv_query_device(self, context: int, at: int) -> int:
        abi.set_member(abi.DEVICE_ATTR, "device_cap_flags", at, abi.HAS_WINDOWS_2B)
        return 0

    def ibv_wc_status_str(self, status: int) -> bytes:
        self.asked += 1
        return b"status %d" % status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(verbs, "library", lambda: made)
    monkeypatch.setattr(queue_pair, "library", lambda: made)
    yield made


def test_what_others_were_made_from_ends_after_them_whenever_it_is_closed(library: Library) -> None:
    """As where a transport is closed while another thread connects to a peer."""
    context = verbs.Context(1)
    domain, channel = context.domain(), context.channel()
    queue = context.queue(4, channel)
    pair = QueuePair(context, domain, queue, 1, 1)
    window, registered = domain.window(), domain.register(1, 1, Access.LOCAL_WRITE)
    for one in (context, domain, channel, queue):
        one.close()
        one.close()
        with pytest.raises(OSError, match="is closed"):
            _ = one.address
    assert library.ended == []
    with pytest.raises(OSError, match="is closed"):
        QueuePair(context, domain, queue, 1, 1)
    pair.close()
    assert library.ended == ["pair", "queue", "channel"]
    window.close()
    registered.close()
    assert library.ended == ["pair", "queue", "channel", "window", "registered", "domain", "context"]


def test_what_was_not_made_keeps_nothing(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    context = verbs.Context(1)
    monkeypatch.setattr(library, "ibv_alloc_pd", lambda context: 0)
    with pytest.raises(OSError, match="ibv_alloc_pd failed"):
        context.domain()
    context.close()
    assert library.ended == ["context"]


def test_what_does_not_end_is_still_there(library: Library) -> None:
    context = verbs.Context(1)
    domain = context.domain()
    registered = domain.register(1, 1, Access.LOCAL_WRITE)
    library.failing["registered"] = 16
    with pytest.raises(OSError, match="a Registered cannot be closed"):
        registered.close()
    assert not registered.is_closed
    library.failing.clear()
    for one in (context, domain, registered):
        one.close()
    assert library.ended == ["registered", "domain", "context"]


def test_of_two_that_end_with_a_third_one_that_does_not_holds_up_no_other(library: Library) -> None:
    context = verbs.Context(1)
    domain, queue = context.domain(), context.queue(4)
    pair = QueuePair(context, domain, queue, 1, 1)
    domain.close()
    queue.close()
    library.failing["domain"] = library.failing["queue"] = 16
    with pytest.raises(OSError, match="cannot be closed"):
        pair.close()
    assert not domain.is_closed and not queue.is_closed and library.ended == ["pair"]


def test_two_threads_that_close_it_end_it_once(library: Library) -> None:
    context = verbs.Context(1)
    is_ending, may_end = threading.Event(), threading.Event()

    def slowly(address: int) -> int:
        library.ended.append("context")
        if not is_ending.is_set():
            is_ending.set()
            may_end.wait(DEADLINE_S)
        return 0

    context._end = slowly
    first = threading.Thread(target=context.close)
    first.start()
    assert is_ending.wait(DEADLINE_S)
    context.close()
    may_end.set()
    first.join()
    assert library.ended == ["context"]


def test_a_queue_that_is_closed_again_leaves_the_one_with_its_address(library: Library) -> None:
    context = verbs.Context(1)
    channel = context.channel()
    queue = context.queue(4, channel)
    address = queue.address
    queue.close()
    channel.queues[address] = other = context.queue(4)
    queue.close()
    assert channel.queues[address] is other


def test_a_completion_says_what_failed_and_one_that_succeeded_asks_the_library_nothing(library: Library) -> None:
    queue = verbs.Context(1).queue(4)
    library.statuses = [0, 0, 5, 0, 0]
    found = list(itertools.chain.from_iterable(queue.poll(32) for _ in range(3)))
    assert [(one.is_success, one.status_str) for one in found] == [
        (True, ""), (True, ""), (False, "status 5"), (True, ""), (True, ""),
    ]  # fmt: skip
    assert library.asked == 1


@pytest.mark.parametrize("has_windows", [True, False])
def test_a_driver_without_the_calls_for_windows_has_none(library: Library, has_windows: bool) -> None:
    """Calling what is not there ends the process."""
    library.has_windows = has_windows
    assert verbs.Context(1).limits().has_windows == has_windows
