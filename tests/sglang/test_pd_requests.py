"""Senders and receivers as SGLang's schedulers drive them, on real nodes and SGLang's own bootstrap server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pd_instances import Decode, Pair, Prefill, check, running
from sglang.srt.disaggregation.base.conn import KVPoll

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
    assert decode.until(KVPoll.Success, KVPoll.Failed) == KVPoll.Success, decode.failed()
    check(prefill, decode)
    decode.clear()
    assert prefill.until(KVPoll.Success, KVPoll.Failed) == KVPoll.Success, prefill.failed()
    prefill.clear()


@pytest.mark.parametrize("chunks", [(), (1, 2, 1), (4, 0)])
def test_handed_over(pair, chunks):
    hand_over(pair, *chunks)


@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix(pair, prefix):
    hand_over(pair, 2, 2, prefix=prefix)
