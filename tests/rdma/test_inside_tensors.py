"""The connector's own PD workers hand over KV in tensors of torch by rdma, to as many or other TP ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rdma.machine import TORCH
from rdma.workers import HEADS, NAMES, Instance, stand_in_for_vllm

import transfer.fetching

pytestmark = pytest.mark.inside
P_TABLE, D_TABLE = [4, 0, 3], [1, 5, 2]


@pytest.fixture(scope="module")
def torch() -> Any:
    if TORCH not in os.environ:
        pytest.skip("NOT TESTED: there is no torch (`make vllm`)")
    stand_in_for_vllm()
    sys.path.append(os.environ[TORCH])
    import torch

    return torch


@pytest.fixture
def pair(torch: Any) -> Iterator[Callable[[int], tuple[Instance, Instance]]]:
    made: list[Instance] = []

    def instances(decode_tp: int) -> tuple[Instance, Instance]:
        made.extend(Instance(size, table, ["rdma"]) for size, table in ((1, P_TABLE), (decode_tp, D_TABLE)))
        return made[0], made[1]

    yield instances
    for one in made:
        one.close()


@pytest.mark.parametrize("decode_tp", [1, 2])
def test_tensors_are_handed_over_by_rdma_and_nothing_else(
    torch: Any, pair: Callable[[int], tuple[Instance, Instance]], decode_tp: int
) -> None:
    p, d = pair(decode_tp)
    d.fetch("r", p)
    p.prefill("r")
    for ended in d.ended(lambda ended: "r" in ended.arrived):
        assert not ended.failed_blocks
    p.ended(lambda ended: "r" in ended.sent)
    for layer in NAMES:
        assert torch.equal(d.tokens(layer), p.tokens(layer)) and p.tokens(layer).count_nonzero() > 0
        for tensors in d.ranks:
            others = tensors[layer][[block for block in range(len(tensors[layer])) if block not in D_TABLE]]
            assert not others.any()
    assert p.carried_by() == {"rdma"}


def test_a_wrong_byte_of_a_tensor_is_refused(
    torch: Any, pair: Callable[[int], tuple[Instance, Instance]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second time, when it was sent once more."""
    p, d = pair(2)
    check, first_head = transfer.fetching._check, HEADS // 2
    sent = p.ranks[0][NAMES[0]][P_TABLE[0], first_head].view(torch.uint8)
    arrived = d.ranks[1][NAMES[0]][D_TABLE[0], 0].view(torch.uint8)

    def spoil(*arguments: Any) -> tuple[bool, int]:
        arrived[0, 0] = sent[0, 0] ^ 1
        return check(*arguments)

    monkeypatch.setattr(transfer.fetching, "_check", spoil)
    d.fetch("r", p)
    p.prefill("r")
    _, wrong = d.ended(lambda ended: "r" in ended.arrived)
    assert wrong.failed_blocks == set(D_TABLE), "of the rank that has it"
