"""Senders and receivers as SGLang's schedulers drive them, on real nodes and SGLang's own bootstrap server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pd_instances import Decode, Pair, Prefill, check, running
from sglang.srt.disaggregation.base.conn import KVPoll
from simulated.waiting import wait_for

P_PAGES, D_PAGES = [3, 7, 1, 9], [5, 2, 8, 11]


@pytest.fixture(scope="module")
def settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, running(patch, transfer_lease_s=20):
        yield


@pytest.fixture(scope="module")
def pair(settings: None) -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


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


@pytest.mark.parametrize("chunks", [(), (1, 2, 1), (4, 0)])
def test_handed_over(pair, chunks):
    hand_over(pair, *chunks)


@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix(pair, prefix):
    hand_over(pair, 2, 2, prefix=prefix)


# Endings


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


@pytest.fixture
def tidy(pair: Pair) -> Iterator[Pair]:
    """After the test nothing of its requests is in any table, and the instances serve on."""
    hand_over(pair)
    before = tables(pair)
    yield pair
    hand_over(pair)

    def forgotten() -> bool:
        for manager in (*pair.prefill.managers, *pair.decode.managers):
            manager.collect()
        return tables(pair) == before

    wait_for(forgotten)


@pytest.mark.parametrize("moment", Case.MOMENTS)
def test_aborted_at_decode(tidy, moment):
    case = Case(tidy, moment)
    case.decode.abort()
    assert case.decode.until() == KVPoll.Failed
    case.reuse()
    (error,) = case.decode.failed()
    assert "borted" in error.failure_reason and not error.is_from_another_rank
    case.decode.clear()
    if moment in ("made", "admitted"):  # prefill has not heard of it: SGLang's router tells it
        case.prefill.abort()
    ended = case.finish("prefill")
    assert ended == (KVPoll.Success if moment == "arrived" else KVPoll.Failed)
    case.prefill.clear() if ended == KVPoll.Success else case.prefill.failed()
    case.check_reused()


@pytest.mark.parametrize("moment", Case.MOMENTS)
def test_aborted_at_prefill(tidy, moment):
    case = Case(tidy, moment)
    case.prefill.abort()
    assert case.prefill.poll() == KVPoll.Failed
    for rank in tidy.prefill.ranks:  # the pages are another request's at once
        rank.fill(5)
    if moment != "made":  # SGLang does not ask for the reason of one that is computing
        assert "Aborted by AbortReq." in case.prefill.failed()[0].failure_reason
    ended = case.finish("decode")
    assert ended == (KVPoll.Success if moment == "arrived" else KVPoll.Failed) or moment == "computed"
    assert not any(bool((each == 5).any()) for rank in tidy.decode.ranks for each in rank.kv)
    if ended == KVPoll.Success:
        case.decode.clear()
        return
    case.reuse()
    case.decode.failed()
    case.decode.clear()
    case.check_reused()


@pytest.mark.parametrize("moment", Case.MOMENTS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_given_up_though_healthy(tidy, side, moment):
    """As where another rank failed, or with SGLANG_TEST_DISAGG_FAILURE_PROB."""
    case = Case(tidy, moment)
    (error,) = getattr(case, side).failed()
    assert error.is_from_another_rank
    case.reuse()
    getattr(case, side).clear()
    if side == "decode":
        if moment in ("made", "admitted"):
            case.prefill.abort()
        ended = case.finish("prefill")
        case.prefill.clear() if ended == KVPoll.Success else case.prefill.failed()
        case.check_reused()
    else:
        ended = case.finish("decode")
        case.decode.clear() if ended == KVPoll.Success else case.decode.failed()


def test_a_room_is_used_again_after_each_end(tidy):
    case = Case(tidy, "allocated")
    case.decode.abort()
    assert case.decode.until() == case.finish("prefill") == KVPoll.Failed
    case.decode.failed(), case.prefill.failed()
    again = Case(tidy, room=case.room)
    assert again.end() in ((KVPoll.Success, KVPoll.Success), (KVPoll.Failed, KVPoll.Failed))


@pytest.mark.parametrize("moment", Case.MOMENTS)
def test_the_same_room_twice_at_once_fails_the_second_alone(tidy, moment):
    first = Case(tidy, moment)
    prefill = Prefill(tidy.prefill, tidy.address, first.room, P_PAGES)
    decode = Decode(tidy.decode, tidy.address, first.room, [0, 4, 6, 10], aux=3)
    decode.parties[0].init(0)
    for second in (prefill, decode):
        assert second.poll() == KVPoll.Failed
        assert f"bootstrap_room {first.room} is in use" in second.failed()[0].failure_reason
        second.abort()
        second.clear()
    assert first.end() == (KVPoll.Success, KVPoll.Success)
    check(first.prefill, first.decode)
