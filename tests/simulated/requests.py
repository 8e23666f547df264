"""How a request comes to ranks of a simulated world."""

from __future__ import annotations

from simulated.network import LAYERS, TOKENS, World

from transfer.protocol.orders import Ending

ALL = range(LAYERS)
NONE = range(0)
ONE_TO_ONE = [{0: ALL}]
TOPOLOGIES = {
    "1P1D": ONE_TO_ONE,
    "pipeline to one": [{0: range(2), 1: range(2, 4)}],
    "one to two": [{0: ALL}, {0: ALL}],
    "two to two": [{0: range(2), 1: range(2, 4)}, {0: range(2), 1: range(2, 4)}],
    "an idle source": [{0: ALL, 1: NONE}],
    "idle for one": [{0: ALL, 2: NONE}, {1: ALL}],
}
ORDERS = ("sequential", "grant first", "grant meanwhile")


def begin(world: World, order: str, transfer: str = "t", at_s: float = 1.0) -> float:
    """Both sides of one request; returns when the consumer granted."""
    if order == "grant first":
        world.fetch(transfer, at_s, at_s + 0.1, computed=False)
        world.open(transfer, at_s + 0.5, chunks=(10, TOKENS))
        return at_s + 0.1
    through_s = world.open(transfer, at_s, chunks=(10, TOKENS))
    if order == "grant meanwhile":
        world.fetch(transfer, at_s + 0.1, at_s + 0.3, computed=False)
        return at_s + 0.3
    world.fetch(transfer, through_s + 1.0, through_s + 3.0, computed=True)
    return through_s + 3.0


def everywhere(world: World, ending: Ending) -> dict[str, Ending]:
    return dict.fromkeys(world.ranks, ending)
