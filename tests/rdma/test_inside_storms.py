"""Storms over real queue pairs that break meanwhile, and over a rail whose link is set down and up."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from rdma.test_inside_rails import set_link, until
from simulated.storm import BATCHES, Storm, breaking_rails

from transfer.testing.fixtures import TransportFixtures
from transfer.transports.rdma.transport import RdmaTransport

pytestmark = pytest.mark.inside


class TestStorms(TransportFixtures):
    transport = RdmaTransport

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"lost_after_s": 5.0}

    @pytest.mark.parametrize(("seed", "is_closed"), [(0, False), (1, True)])
    def test_every_batch_of_a_storm_has_its_outcome_and_ok_means_that_the_bytes_are_there(
        self, seed: int, is_closed: bool
    ) -> None:
        storm = Storm(self.make, self.make, seed, breaking_rails(is_closed, 2.0))
        assert (storm.wrong, storm.still_sending) == ([], 0)
        assert storm.num_ok > BATCHES or is_closed, "a storm in which little arrives shows little"

    def test_so_it_is_where_a_rail_is_set_down_and_up_meanwhile(self) -> None:
        counts: dict[str, Mapping[str, int]] = {}

        def set_down_and_up(_: random.Random, peer: Any, sender: Any, *__: Any) -> None:
            path = peer._encoder.paths.all[1]
            try:
                until(lambda: path.is_in and path.in_flight_nbytes)
                set_link(1, "down")
                until(lambda: not path.is_in)
            finally:
                set_link(1, "up")
            until(lambda: path.is_in)
            counts.update(sender.take_counts())

        storm = Storm(self.make, self.make, 2, set_down_and_up)
        assert (storm.wrong, storm.still_sending) == ([], 0)
        assert storm.num_ok > BATCHES
        assert {"rxe1:1"} == counts["rail_failures"].keys() == counts["rail_recoveries"].keys()
