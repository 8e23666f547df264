"""Storms over each transport, whose streams or queue pairs are broken, and which in every third one are closed.

One short round for each; with MOONCAKE_CONNECTOR_STRESS_S=600 they go on for ten minutes together.
"""

import socket
import time
from contextlib import suppress

import pytest
from simulated.cuda_driver import LIBRARY
from simulated.fuzz import STRESS_S
from simulated.storm import BATCHES, Storm, breaking_rails
from simulated.verbs import Fabric

from transfer.transports import channel
from transfer.transports.cma import CmaTransport
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport

HOSTS = ("127.0.0.1", "127.0.0.2")
MAKE = {"cma": CmaTransport, "shm": ShmTransport, "tcp": lambda memory: TcpTransport(memory, hosts=HOSTS, streams=2)}


@pytest.mark.parametrize(("kind", "is_late"), [*((kind, False) for kind in MAKE), ("tcp", True)])
def test_every_batch_of_a_storm_has_its_outcome_and_ok_means_that_the_bytes_are_there(kind, is_late, monkeypatch):
    if is_late:  # as beside a busy Python thread
        monkeypatch.setattr(channel, "_LATE_S", -1.0)
        monkeypatch.setattr(channel, "_MANY_NBYTES", 1)
    until, seed = time.monotonic() + STRESS_S / len(MAKE), 0
    while seed < 3 or time.monotonic() < until:
        is_closed = seed % 3 == 2

        def strike(rng, peer, sender, receiver, is_closed=is_closed):
            """Break all streams but one, and in every third storm everything."""
            for stream in list(peer._streams.values())[1:]:
                time.sleep(rng.random() * 0.03)
                with suppress(OSError):
                    stream.channel.socket.shutdown(socket.SHUT_RDWR)
            if is_closed:
                time.sleep(rng.random() * 0.05)
                rng.choice([peer, sender, receiver]).close()

        storm = Storm(MAKE[kind], MAKE[kind], seed, strike)
        assert (storm.wrong, storm.still_sending) == ([], 0), f"seed {seed}"
        assert storm.num_ok > BATCHES or is_closed, f"seed {seed}: a storm in which little arrives shows little"
        seed += 1


@pytest.mark.parametrize("seed", range(6))
def test_the_same_over_rails_that_break(seed, monkeypatch):
    """With a stand-in for the cards."""
    is_closed = seed % 3 == 2
    LIBRARY.__init__()  # what tests before have left in it may be the host's addresses now
    fabric = Fabric(monkeypatch, [400e6, 400e6])

    def make(memory):
        made = RdmaTransport(memory, settings=RdmaSettings(lost_after_s=0.5))
        memory.follow(made)
        return made

    storm = Storm(make, make, seed, breaking_rails(is_closed, 0.2))
    fabric.close()
    assert (storm.wrong, storm.still_sending) == ([], 0)
    assert storm.num_ok > BATCHES or is_closed, "a storm in which little arrives shows little"
