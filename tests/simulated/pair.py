"""Two instances of one rank each, of which one prefills and the other decodes, and hand-overs between them."""

from __future__ import annotations

from simulated.nodes import Instances

from transfer.control.directory import PURPOSE
from transfer.driver import RANK_PURPOSE
from transfer.protocol.orders import Ending
from transfer.session import NodeOptions

P_TABLE, D_TABLE = [7, 2, 9, 4, 1, 0], [3, 0, 5, 1, 2, 6]


class Pair:
    """A prefill and a decode instance; `options` and the rest are as `Instances` takes them.

    `ports` are those that the prefill instance listens at for control, by what they are for.
    """

    def __init__(self, options: NodeOptions | None = None, **more: object) -> None:
        options = options or NodeOptions(page_tokens=16)
        self.prefill, self.decode = (Instances(1, table, options=options, **more) for table in (P_TABLE, D_TABLE))
        self.prefill.fill()
        self.ports = {PURPOSE: self.prefill.directory.port, RANK_PURPOSE: self.prefill.ranks[0].node.card.port}
        self._served = 0

    def begin(self, name: str) -> None:
        """A request that the decode instance waits for."""
        self.decode.ranks[0].bytes[:] = 0
        self.prefill.open(name)
        self.decode.fetch(name, self.prefill.where, computed=False)

    def end(self, name: str, *, computed: bool = False) -> None:
        """It is computed, and arrives."""
        if not computed:
            self.prefill.compute(name)
        self.prefill.finish(name)
        (ended,) = self.decode.fetched()
        assert (ended.name, ended.ending) == (name, Ending.DONE), ended
        self.decode.check()
        (sent,) = self.prefill.sent()
        assert (sent.name, sent.ending) == (name, Ending.DONE), sent

    def serves(self) -> None:
        """One more request's KV arrives."""
        self._served += 1
        self.begin(f"served {self._served}")
        self.end(f"served {self._served}")

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
