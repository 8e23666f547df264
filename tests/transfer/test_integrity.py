"""Checksums of pages in real memory: both sides agree on what was copied, and on nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from simulated.ranks import SPAN, Model, make_rank

from mooncake_connector.kv.geometry import Shard
from transfer.integrity import page_checksums, wrong_pages
from transfer.plan.layout import Section
from transfer.plan.pairing import Pairing

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
    landed = pairing.destination_pages(range(2), 0, TOKENS, destination.table, PAGE)
    assert len(sent) == 3
    assert wrong_pages(landed, sent) == [0, 1, 2]
    copy(*sides)
    assert wrong_pages(landed, sent) == []


def test_one_changed_byte_makes_its_page_wrong_and_no_other(sides):
    source, destination, pairing = sides
    copy(*sides)
    sent = page_checksums(pairing.source_pages(range(2), 0, TOKENS, source.table, PAGE))
    landed = pairing.destination_pages(range(2), 0, TOKENS, destination.table, PAGE)
    for page in range(3):
        for run in range(landed.bounds[page], landed.bounds[page + 1]):
            for place in (landed.addresses[run], landed.addresses[run] + landed.nbytes[run] - 1):
                offset = int(place) - destination.memory.ctypes.data
                destination.memory[offset] ^= 1
                assert wrong_pages(landed, sent) == [page]
                destination.memory[offset] ^= 1


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_checksums_proves_nothing(sides, count):
    source, destination, pairing = sides
    copy(*sides)
    sent = page_checksums(pairing.source_pages(range(2), 0, TOKENS, source.table, PAGE))
    landed = pairing.destination_pages(range(2), 0, TOKENS, destination.table, PAGE)
    assert wrong_pages(landed, (sent * 2)[:count]) == [0, 1, 2]


def test_checksums_for_no_page_at_all_are_wrong(sides):
    _, destination, pairing = sides
    empty = pairing.destination_pages(range(2), 0, 0, destination.table, PAGE)
    assert wrong_pages(empty, []) == [] and wrong_pages(empty, [1]) != []
