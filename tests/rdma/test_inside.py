"""The `rdma` transport over real queue pairs; runs where there is a card, as inside of the emulated machine."""

from __future__ import annotations

from typing import Any

import pytest

from transfer.testing.conformance import TransportConformance
from transfer.transports.rdma.transport import RdmaTransport

pytestmark = pytest.mark.inside
EMULATED: dict[str, Any] = {"lost_after_s": 10.0}
"""An emulated card may be late to acknowledge."""


class TestRdma(TransportConformance):
    transport = RdmaTransport

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return EMULATED
