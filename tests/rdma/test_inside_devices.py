"""KV on devices by rdma: cards fill and read page-locked stages, over real queue pairs and a stand-in for the driver.

In `TestStages` the processor cannot touch what the stand-in calls a device's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rdma.test_inside import EMULATED
from rdma.test_inside_nodes import instances_of, options
from simulated.cuda_driver import LIBRARY, DeviceRdma
from simulated.nodes import Instances, endings
from simulated.pair import D_TABLE, P_TABLE
from simulated.waiting import wait_for

import transfer.integrity
import transfer.session
from transfer.plan.granularity import Granularity
from transfer.protocol.orders import Ending
from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Transport
from transfer.transports.cuda.driver import Driver
from transfer.transports.memory import Memory

pytestmark = pytest.mark.inside
NBYTES = 24 * MIB


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, without a past."""
    LIBRARY.__init__()  # type: ignore[misc]
    monkeypatch.setattr(transfer.session, "system_driver", lambda: Driver(LIBRARY))
    yield LIBRARY
    assert not LIBRARY.contexts and not LIBRARY.locked and not LIBRARY._queues, "all is given back"


class TestStages(TransportFixtures):
    transport = DeviceRdma

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return EMULATED

    def test_a_grant_revoked_in_mid_transfer_is_written_by_no_card_and_no_device(
        self, memory: Memory, there: Memory, sender: Transport, peer: Any
    ) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=1)
        write = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        wait_for(lambda: target.bytes[::4096].any())
        there.revoke(grant)
        target.bytes[:] = 7
        assert not outcome_of(write).ok, "it was revoked in mid-transfer"
        wait_for(lambda: not peer._inner._encoder.paths.is_busy)
        assert (target.bytes == 7).all()
        again = there.grant(grant.addresses, grant.nbytes)
        self.send(peer, again, source, NBYTES)
        assert np.array_equal(target.bytes, source.bytes)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Instances]]:
    monkeypatch.setattr(transfer.integrity, "ctypes", None)  # the processor cannot read a device's memory
    with instances_of() as make:
        yield make


def ask(p: Instances, d: Instances, name: str) -> None:
    p.open(name)
    d.fetch(name, p.where, computed=False)


@pytest.mark.parametrize(("sources", "targets"), [(1, 2), (2, 1)])
def test_kv_is_handed_over_from_devices_to_devices(
    make: Callable[..., Instances], library: Any, sources: int, targets: int
) -> None:
    p = make(sources, P_TABLE, options=options(Granularity.LAYER), device=0)
    d = make(targets, D_TABLE, block_tokens=12, order="BLHN", options=options(Granularity.LAYER), device=0)
    p.fill()
    ask(p, d, "t")
    p.compute("t")
    p.finish("t")
    assert endings(d.fetched()) == {Ending.DONE}
    d.check()
    assert {ended.transport for ended in p.sent()} - {""} == {"rdma"}
    assert library.calls["cuMemcpyAsync"] > 0


def test_a_request_that_decode_gives_up_in_mid_transfer_is_written_no_more_and_the_next_one_arrives(
    make: Callable[..., Instances],
) -> None:
    p = make(1, P_TABLE, options=options(Granularity.LAYER), device=0)
    d = make(1, D_TABLE, block_tokens=12, order="BLHN", options=options(Granularity.LAYER), device=0)
    p.fill()
    ask(p, d, "given up")
    p.compute("given up", stops=[20])
    wait_for(lambda: d.ranks[0].bytes.any())
    d.drop("given up")
    assert endings(d.fetched()) == {Ending.CANCELLED}
    d.ranks[0].bytes[:] = 7
    p.compute("given up")
    p.finish("given up")
    p.sent()
    assert (d.ranks[0].bytes == 7).all()
    d.ranks[0].bytes[:] = 0
    ask(p, d, "next")
    p.compute("next")
    p.finish("next")
    assert endings(d.fetched()) == {Ending.DONE}
    d.check()
