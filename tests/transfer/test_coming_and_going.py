"""Instances come and go: what is left of those that went, and what those that cannot be reached cost the others."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack

import pytest
from simulated.fuzz import framed
from simulated.nodes import Instances, endings
from simulated.raw_peer import dial, greet
from simulated.sides import introduction
from simulated.waiting import wait_for

import transfer.driver
import transfer.fetching
from transfer.control.handshake import Identity
from transfer.driver import RANK_PURPOSE
from transfer.protocol.messages import encode
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions
from transfer.transports.base import Unavailable

pytestmark = pytest.mark.slow

QUICK = NodeOptions(page_tokens=16, timing=Timing(lease_s=3.0, heartbeat_s=0.2, retry_s=0.2))


def hand_over(prefill: Instances, decode: Instances, name: str) -> None:
    prefill.prefill(name)
    decode.fetch(name, prefill.where, computed=True)
    assert endings(decode.fetched()) == endings(prefill.sent()) == {Ending.DONE}


def test_nothing_is_left_of_decode_instances_that_went(make):
    start_prefill, start_decode = make
    prefill = start_prefill(options=QUICK)
    serving = prefill.ranks[0].node._serving
    for number in range(3):
        decode = start_decode()
        hand_over(prefill, decode, f"t{number}")
        decode.close()
    wait_for(lambda: not serving._visitors and not serving.producer._transfers)


@pytest.mark.parametrize("under_way", [False, True])
def test_nothing_is_left_of_prefill_instances_that_went(make, under_way):
    start_prefill, start_decode = make
    decode = start_decode(options=QUICK)
    fetching = decode.ranks[0].node._fetching
    for number in range(3):
        prefill = start_prefill()
        hand_over(prefill, decode, f"t{number}")
        if under_way:
            decode.fetch("cut off", prefill.where, computed=False)
            wait_for(lambda: fetching._memory._grants)
        prefill.close()
        if under_way:
            assert endings(decode.fetched()) == {Ending.FAILED}
    wait_for(lambda: not fetching._remotes and not fetching.consumer._transfers)


def test_a_connection_that_is_still_being_made_again_does_not_disturb_those_that_came_later(make, monkeypatch):
    prefill, decode = (start(tp, options=QUICK) for start, tp in zip(make, (2, 1), strict=True))
    fetching, post = decode.ranks[0].node._fetching, decode.ranks[0].node._thread.post
    connect = transfer.fetching.connect
    waiting, go_on = [], threading.Event()

    async def late(*args, **kwargs):
        if waiting:
            return await connect(*args, **kwargs)
        waiting.append(asyncio.current_task())
        while not go_on.is_set():
            await asyncio.sleep(0.001)
        raise Unavailable("not yet")

    decode.announce("first", prefill.where, computed=False)
    wait_for(lambda: len(fetching._links) == 2)
    broken, idle = fetching._links.values()
    monkeypatch.setattr(transfer.fetching, "connect", late)
    post(broken.close)
    wait_for(lambda: waiting)
    decode.drop("first")
    decode.fetched()
    wait_for(lambda: not fetching.consumer._transfers)  # until then the rank without a connection is owed its end
    post(idle.close)
    wait_for(lambda: not fetching._remotes)
    decode.announce("second", prefill.where, computed=False)
    wait_for(lambda: len(fetching._links) == 2)
    links = dict(fetching._links)
    go_on.set()
    wait_for(waiting[0].done)
    assert fetching._links == links and all(link.alive for link in links.values())


def test_a_batch_may_take_longer_than_the_lease_while_both_sides_are_heard(make):
    prefill, decode = (start(options=QUICK) for start in make)
    decode.fetch("t", prefill.where, computed=False)
    grants = decode.ranks[0].node._fetching._memory._grants
    wait_for(lambda: grants)
    (granted,) = grants.values()
    with granted.lock:  # as a slow network would
        prefill.prefill("t")
        time.sleep(2 * QUICK.timing.lease_s)
    assert endings(decode.fetched()) == endings(prefill.sent()) == {Ending.DONE}


def test_decode_instances_that_cannot_be_reached_do_not_hold_up_the_others(make, monkeypatch):
    prefill, decode = (start() for start in make)
    node, rank = prefill.ranks[0].node, decode.ranks[0]
    connect, go_on = node._transports.connect, threading.Event()

    def slow(endpoints, **kwargs):
        if "nowhere" in endpoints:
            assert go_on.wait(60)
            raise Unavailable("nobody is there")
        return connect(endpoints, **kwargs)

    monkeypatch.setattr(node._transports, "connect", slow)
    said = introduction(rank.layout, endpoints={"nowhere": b""})
    with ExitStack() as stack:
        stack.callback(go_on.set)
        for _ in range(100):
            connection = stack.enter_context(dial(node.card.port))
            greet(connection, RANK_PURPOSE, Identity())
            connection.sendall(framed(encode(said)))
        wait_for(lambda: len(node._serving._visitors) == 100)
        hand_over(prefill, decode, "t")
