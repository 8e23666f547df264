"""Engines that use one name for one request after the other, as one does that computes all KV again.

They keep to what the protocol asks of them: a side names the next request when its own earlier one is over; the decode
instance only when the prefill instance has named that earlier one, or, where its own record of that one is gone and its
end was not acknowledged, when the prefill instance's record is gone too; and the prefill instance, where its record of
that one is gone, only when it is over at the decode instance too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulated.network import LAYERS, TOKENS, Rank, World
from simulated.sides import name_of

_RETRY_S = 0.05
_GIVE_UP_S = 600.0


@dataclass(frozen=True)
class Attempt:
    """How long each side waits, when it may, before it names the request, and when ranks cancel it after that."""

    open_s: float = 0.0
    announce_s: float = 0.0
    grant_s: float = 0.1
    step_s: float = 0.05
    cancels: tuple[tuple[str, float], ...] = ()


class Engines:
    """See the module. The requests are "t/1", "t/2" and so on, all named "t".

    With `heedless` a side names the next request when its own earlier one is over, whatever the other does.
    """

    def __init__(self, world: World, attempts: Sequence[Attempt], *, heedless: bool = False) -> None:
        self.world, self.attempts, self._heedless = world, attempts, heedless
        self._lives = {name: rank.peer for name, rank in world.ranks.items()}
        """A request that began in one life of a rank does not in another."""
        for name in world.ranks:
            self._later(name, 0, 1.0)

    @property
    def requests(self) -> list[str]:
        return [f"t/{number}" for number in range(1, len(self.attempts) + 1)]

    def _later(self, name: str, number: int, at_s: float) -> None:
        if number < len(self.attempts) and at_s < _GIVE_UP_S:
            self.world.at(at_s, lambda: self._try(name, number))

    def _try(self, name: str, number: int) -> None:
        if not self._may(self.world.ranks[name], number):
            self._later(name, number, self.world.now_s + _RETRY_S)
            return
        attempt = self.attempts[number]
        wait_s = attempt.open_s if name[0] == "P" else attempt.announce_s
        self.world.call(self.world.now_s + wait_s, name, self._begin, number)

    def _may(self, rank: Rank, number: int) -> bool:
        if not number:
            return True
        earlier = self.requests[number - 1]
        if earlier not in rank.released:
            return False
        if self._heedless:
            return True
        ranks = self.world.ranks
        if rank.name[0] == "D":
            own = rank.side.records[earlier]
            is_known = own.number in rank.side._transfers or all(own.is_known_by(peer) for peer in own.sessions)
            others = [ranks[name] for name in self.world.producers]
            return all(
                earlier in other.opened
                and (is_known or other.side.records[earlier] not in other.side._transfers.values())
                for other in others
            )
        return name_of(earlier) in rank.side._transfers or all(
            earlier in ranks[name].released for name in self.world.consumers
        )

    def _begin(self, rank: Rank, number: int) -> None:
        if rank.peer != self._lives[rank.name]:
            return
        if not self._may(rank, number):  # it has forgotten the earlier one meanwhile
            self._later(rank.name, number, self.world.now_s + _RETRY_S)
            return
        world, now_s, request, attempt = self.world, self.world.now_s, self.requests[number], self.attempts[number]
        if rank.name[0] == "D":
            world._announce(rank, request, int(rank.name[1:]), False)
            world.call(now_s + attempt.grant_s, rank.name, world._grant, request, 0)
        else:
            world._open(rank, request)
            if request not in rank.side.held:  # refused: nothing more of this name from this instance
                return
            for layer in range(LAYERS):
                at_s = now_s + (layer + 1) * attempt.step_s
                world.call(at_s, rank.name, world._compute, request, 0, layer, TOKENS)
            world.call(now_s + LAYERS * attempt.step_s, rank.name, world._finish, request, 0)
        for name, after_s in attempt.cancels:
            if name == rank.name:
                world.cancel(name, request, now_s + after_s)
        self._later(rank.name, number + 1, now_s + _RETRY_S)
