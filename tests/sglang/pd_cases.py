"""Requests of a pair of instances: one that goes well, and one that is brought to any moment of its life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pd_instances import Decode, Pair, Prefill, check
from sglang.srt.disaggregation.base.conn import KVPoll
from simulated.waiting import wait_for

P_PAGES, D_PAGES = [3, 7, 1, 9], [5, 2, 8, 11]


def fill(pair: Pair) -> None:
    for rank in pair.prefill.ranks:
        for each in rank.kv:
            each.copy_(torch.randn(each.shape))
    for rank in pair.decode.ranks:
        rank.fill(-7)


def hand_over(pair: Pair, *chunks: int, prefix: int = 0, room: int | None = None) -> None:
    fill(pair)
    room = room or pair.room()
    prefill = Prefill(pair.prefill, pair.address, room, P_PAGES)
    decode = Decode(pair.decode, pair.address, room, D_PAGES, prefix=prefix)
    prefill.run(*chunks)
    decode.run(pair.address)
    assert decode.until() == KVPoll.Success, decode.failed()
    check(prefill, decode)
    decode.clear()
    assert prefill.until() == KVPoll.Success, prefill.failed()
    prefill.clear()


def tables(pair: Pair) -> dict[str, int]:
    """Sizes of everything that the managers keep by room, transfer or address."""
    sizes = {}
    for side in (pair.prefill, pair.decode):
        for number, manager in enumerate(side.managers):
            for name, value in vars(manager).items():
                if isinstance(value, dict | set | list):
                    inner = value.values() if isinstance(value, dict) else ()
                    nested = sum(len(each) for each in inner if isinstance(each, dict | set | list))
                    sizes[f"{side.mode.value} {number} {name}"] = len(value) + nested
    return sizes


class Case:
    """One request on both sides, brought to a moment of its life, and from there to its end."""

    MOMENTS = ("made", "admitted", "found", "computing", "allocated", "computed", "arrived")

    def __init__(self, pair: Pair, moment: str = "made", room: int | None = None) -> None:
        fill(pair)
        self.pair, self.room = pair, room or pair.room()
        self.prefill = Prefill(pair.prefill, pair.address, self.room, P_PAGES)
        self.decode = Decode(pair.decode, pair.address, self.room, D_PAGES)
        self._left = {
            "prefill": [self.prefill.admit, lambda: self.prefill.compute(1), self.prefill.compute],
            "decode": [self._find, self._allocate],
        }
        sides = ("prefill", "decode", "prefill", "decode", "prefill")
        for side in sides[: self.MOMENTS.index(moment)]:
            self._left[side].pop(0)()
        if moment == "arrived":
            wait_for(lambda: all(receiver._transfer.is_over for receiver in self.decode.parties))

    def _find(self) -> None:
        self.decode.bootstrap(self.pair.address)
        self.decode.until(KVPoll.WaitingForInput)

    def _allocate(self) -> None:
        if self.decode.until(KVPoll.WaitingForInput) == KVPoll.WaitingForInput:
            self.decode.allocate()

    def go_on(self, side: str) -> None:
        """All that is left, as long as SGLang is not told that it failed."""
        for step in self._left[side]:
            if getattr(self, side).poll() == KVPoll.Failed:
                break
            step()

    def finish(self, side: str) -> int:
        """What becomes of a side that goes on."""
        self.go_on(side)
        return getattr(self, side).until()

    def end(self) -> tuple[int, int]:
        """Both go on, to their ends."""
        self.go_on("prefill")
        self.go_on("decode")
        ended = self.decode.until(), self.prefill.until()
        for state, request in zip(ended, (self.decode, self.prefill), strict=True):
            request.clear() if state == KVPoll.Success else request.failed()
        return ended

    def reuse(self) -> None:
        """The scheduler gives the decode request's pages to others."""
        for rank in self.pair.decode.ranks:
            rank.fill(11)

    def check_reused(self) -> None:
        for rank in self.pair.decode.ranks:
            assert all(bool((each == 11).all()) for each in rank.kv)


@contextmanager
def tidied(pair: Pair) -> Iterator[Pair]:
    """What is done inside leaves nothing of its requests in any table, and the instances serve on."""
    hand_over(pair)
    before = tables(pair)
    yield pair
    hand_over(pair)

    def forgotten() -> bool:
        for manager in (*pair.prefill.managers, *pair.decode.managers):
            manager.collect()
        return tables(pair) == before

    wait_for(forgotten)
