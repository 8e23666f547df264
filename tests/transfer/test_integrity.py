"""Checksums of pages in real memory: both sides agree on what was copied, and on nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from simulated.ranks import SPAN, Model, make_rank
from simulated.sides import landed

from mooncake_connector.kv.geometry import Shard
from transfer.fetching import _check
from transfer.integrity import page_checksums
from transfer.plan.layout import Section, Table
from transfer.plan.pairing import Pairing
from transfer.transports.passing import Passed

MODEL = Model(layers=2, heads=4, k_dim=3, v_dim=3, itemsize=2)
TOKENS, PAGE = 22, 8
PART = Shard(0, 2, 2, 4)


class Side:
    """A rank in real memory, filled with noise."""

    def __init__(self, seed: int, heads: range, block_tokens: int, order: str, table: list[int]) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, SPAN, dtype=np.uint8)
        self.table = table
        rank = make_rank(MODEL, range(2), heads, block_tokens, 12, order, 0, 0)
        addresses = tuple(address + self.memory.ctypes.data for address in rank.blocks.layer_addresses)
        self.rank: Section = replace(rank, blocks=replace(rank.blocks, layer_addresses=addresses))


@pytest.fixture
def sides() -> tuple[Side, Side, Pairing]:
    source = Side(1, range(4), 4, "LBHN", [5, 1, 9, 0, 3, 8])
    destination = Side(2, range(2, 4), 8, "BLNH", [2, 7, 4])
    return source, destination, Pairing(source.rank, destination.rank, PART)


def copy(source: Side, destination: Side, pairing: Pairing) -> None:
    copies = pairing.copies(range(2), 0, TOKENS, source.table, destination.table)
    for start, target, nbytes in zip(copies.source, copies.destination, copies.nbytes, strict=True):
        ctypes.memmove(int(target), int(start), int(nbytes))


def test_what_was_copied_has_the_checksums_of_its_source_and_before_that_it_has_not(sides):
    source, destination, pairing = sides
    sent = page_checksums(pairing.source_pages(range(2), 0, TOKENS, source.table, PAGE))
    arrived = pairing.destination_pages(range(2), 0, TOKENS, destination.table, PAGE)
    assert len(sent) == 3
    assert all(one != other for one, other in zip(sent, page_checksums(arrived), strict=True))
    copy(*sides)
    assert page_checksums(arrived) == sent


def test_one_changed_byte_makes_its_page_wrong_and_no_other(sides):
    source, destination, pairing = sides
    copy(*sides)
    sent = page_checksums(pairing.source_pages(range(2), 0, TOKENS, source.table, PAGE))
    arrived = pairing.destination_pages(range(2), 0, TOKENS, destination.table, PAGE)
    for page in range(3):
        for run in range(arrived.bounds[page], arrived.bounds[page + 1]):
            for place in (arrived.addresses[run], arrived.addresses[run] + arrived.nbytes[run] - 1):
                offset = int(place) - destination.memory.ctypes.data
                destination.memory[offset] ^= 1
                wrong = [one != other for one, other in zip(sent, page_checksums(arrived), strict=True)]
                assert wrong == [number == page for number in range(3)]
                destination.memory[offset] ^= 1


@pytest.mark.parametrize("count", [0, 2, 3, 4])
def test_another_number_of_checksums_proves_nothing(sides, count):
    source, destination, pairing = sides
    copy(*sides)
    sent = page_checksums(pairing.source_pages(range(2), 0, TOKENS, source.table, PAGE))
    batch = landed(num_layers=2, stop_token=TOKENS, checksums=(sent * 2)[:count])
    origin = SimpleNamespace(pairings={0: (0, pairing)}, card=SimpleNamespace(instance=b"p" * 16))
    right, nbytes = _check(origin, batch, [Table(0, TOKENS, destination.table)], PAGE, None, Passed())
    assert right is (count == 3) and nbytes > 0
