"""Storms over real queue pairs that break meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
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
