"""Instances come and go: what is left of those that went, and what those that cannot be reached cost the others."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack

import pytest
from simulated.nodes import Instances
from simulated.sides import introduction
from simulated.strangers import dial, greet
from simulated.waiting import wait_for

import transfer.driver
import transfer.fetching
from mooncake_connector.kv.geometry import Shard
from transfer.control.handshake import Identity
from transfer.driver import RANK_PURPOSE
from transfer.protocol.messages import encode
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions
from transfer.transports.base import Unavailable

P_TABLE, D_TABLE = [7, 2, 9, 4, 1, 0], [3, 0, 5, 1, 2, 6]
QUICK = Timing(lease_s=0.5, heartbeat_s=0.1, retry_s=0.1)


@pytest.fixture
def start():
    made = []

    def instance(table: list[int], tp_size: int = 1, timing: Timing | None = None) -> Instances:
        made.append(Instances(tp_size, table, options=NodeOptions(page_tokens=16, timing=timing or Timing())))
        if table is P_TABLE:
            made[-1].fill()
        return made[-1]

    yield instance
    for instances in made:
        instances.close()


def hand_over(prefill: Instances, decode: Instances, name: str) -> None:
    prefill.open(name)
    prefill.finish(name)
    decode.announce(name, prefill.where, computed=True)
    decode.grant(name)
    assert {ended.ending for ended in decode.fetched()} == {Ending.DONE}
    assert {ended.ending for ended in prefill.sent()} == {Ending.DONE}


def test_nothing_is_left_of_decode_instances_that_went(start):
    prefill = start(P_TABLE, timing=QUICK)
    serving = prefill.ranks[0].node._serving
    for number in range(3):
        decode = start(D_TABLE)
        hand_over(prefill, decode, f"t{number}")
        decode.close()
    wait_for(lambda: not serving._visitors and not serving.producer._transfers)


@pytest.mark.parametrize("under_way", [False, True])
def test_nothing_is_left_of_prefill_instances_that_went(start, under_way):
    decode = start(D_TABLE, timing=QUICK)
    fetching = decode.ranks[0].node._fetching
    for number in range(3):
        prefill = start(P_TABLE)
        hand_over(prefill, decode, f"t{number}")
        if under_way:
            decode.announce("cut off", prefill.where, computed=False)
            decode.grant("cut off")
            wait_for(lambda: fetching._memory._grants)
        prefill.close()
        if under_way:
            assert {ended.ending for ended in decode.fetched()} == {Ending.FAILED}
    wait_for(lambda: not fetching._remotes and not fetching.consumer._transfers)


def test_a_connection_that_is_still_being_made_again_does_not_disturb_those_that_came_later(start, monkeypatch):
    prefill, decode = start(P_TABLE, tp_size=2, timing=QUICK), start(D_TABLE, timing=QUICK)
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


def test_a_batch_may_take_longer_than_the_lease_while_both_sides_are_heard(start):
    prefill, decode = start(P_TABLE, timing=QUICK), start(D_TABLE, timing=QUICK)
    decode.announce("t", prefill.where, computed=False)
    decode.grant("t")
    grants = decode.ranks[0].node._fetching._memory._grants
    wait_for(lambda: grants)
    (granted,) = grants.values()
    with granted.lock:  # as a slow network would
        prefill.open("t")
        prefill.finish("t")
        time.sleep(3 * QUICK.lease_s)
    assert {ended.ending for ended in decode.fetched()} == {Ending.DONE}
    assert {ended.ending for ended in prefill.sent()} == {Ending.DONE}


def test_decode_instances_that_cannot_be_reached_do_not_hold_up_the_others(start, monkeypatch):
    prefill, decode = start(P_TABLE), start(D_TABLE)
    node, rank = prefill.ranks[0].node, decode.ranks[0]
    connect, go_on = node._transports.connect, threading.Event()

    def slow(endpoints, **kwargs):
        if "nowhere" in endpoints:
            assert go_on.wait(60)
            raise Unavailable("nobody is there")
        return connect(endpoints, **kwargs)

    monkeypatch.setattr(node._transports, "connect", slow)
    said = introduction(layout=rank.layout, parts=[Shard(0, 4, 0, 4)], endpoints={"nowhere": b""})
    with ExitStack() as stack:
        stack.callback(go_on.set)
        for _ in range(100):
            connection = stack.enter_context(dial(node.card.port))
            greet(connection, RANK_PURPOSE, Identity())
            connection.sendall(len(encode(said)).to_bytes(4, "little") + encode(said))
        wait_for(lambda: len(node._serving._visitors) == 100)
        hand_over(prefill, decode, "t")
