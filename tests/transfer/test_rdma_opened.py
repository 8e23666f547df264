"""Which ports a process opens, what their cards are told, and what is said of them, with a stand-in for the cards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from simulated.cuda_driver import LIBRARY
from simulated.verbs import Fabric

from mooncake_connector.cli.doctor_rdma import rdma_checks
from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import MIB, Buffer
from transfer.transports.base import Region, TransferError
from transfer.transports.memory import Memory
from transfer.transports.rdma.pair import ack_timeout
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.rdma.verbs import in_use, locked_limit

FAST = 400e6


@pytest.fixture(autouse=True)
def without_devices() -> None:
    """What tests before have left in the stand-in for the driver: its addresses may be the host's now."""
    LIBRARY.__init__()  # type: ignore[misc]


def test_named_ports_alone_are_used_and_those_that_are_not_there_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = Fabric(monkeypatch, [FAST] * 4)
    fabric.cards["card3"].is_up = False
    named = ["card2", "card9", "card0:1", "card3"]
    with RdmaTransport(Memory(), settings=RdmaSettings(ports=named)) as made:
        assert [rail.card.rail.name for rail in made._rails.all] == ["card2:1", "card0:1"]
    assert "rdma_ports names card9, card3: no such port is up" in caplog.text
    (check,) = [check for check in rdma_checks(["10.77.0.1"], RdmaSettings(ports=named)) if check.name == "rdma"]
    assert check.status == "warning" and "without card9, card3" in check.detail
    fabric.close()


def test_memory_that_one_card_does_not_take_is_known_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(monkeypatch, [FAST] * 3)
    with RdmaTransport(Memory()) as made:
        cards = [rail.card for rail in made._rails.all]
        refusing, buffer = cards[1], Buffer(MIB)

        def refuse(*_: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patched:
            patched.setattr(refusing._domain, "register", refuse)
            with pytest.raises(TransferError, match="card1 cannot register it"):
                made.register(Region(buffer.address, MIB))
        assert [list(card._registered) for card in cards] == [[card.cells.region] for card in cards]
    fabric.close()


def test_what_it_goes_over_is_in_the_log_once_and_in_the_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = Fabric(monkeypatch, [FAST, FAST])
    with caplog.at_level(logging.INFO):
        transports = [RdmaTransport(Memory()) for _ in range(2)]
    ports = [
        f"card{number} port 1 (RoCE v2, 10.77.{number}.1), entry 3 of its GID table, MTU 4096, requests of 512.0 KiB "
        "with 4 ranges, 64 at a time, 16 of them on the wire, by memory windows"
        for number in (0, 1)
    ]
    beside = f"{in_use()}; locked memory: {locked_limit()}"
    for made in transports:
        assert made.take_counts() == {"rail_opened": {f"{port}; {beside}": 1 for port in ports}}
        assert not made.take_counts()
        made.close()
    (line,) = [message for message in caplog.messages if "rdma: goes over" in message]
    assert all(port in line for port in ports) and line.endswith(f"; {beside}") and beside.startswith("libibverbs")
    fabric.close()


def test_what_is_configured_is_set_at_the_queue_pairs_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(monkeypatch, [FAST])
    wanted = RdmaSettings(traffic_class=104, service_level=3, pkey_index=2, retries=4, lost_after_s=2.0)
    with RdmaTransport(Memory(), settings=wanted) as sender, RdmaTransport(Memory(), settings=wanted) as receiver:
        sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        answering, reading = sorted((found.set for found in fabric.queues.values()), key=len)
        for told in (answering, reading):
            expected = {"traffic_class": 104, "sl": 3, "pkey_index": 2, "sgid_index": 3}
            assert {name: told[name] for name in expected} == expected
        assert (reading["retry_cnt"], reading["timeout"]) == (4, ack_timeout(2.0, 4))
    fabric.close()
