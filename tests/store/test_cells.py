"""The hash table of names: keys looked up one after the other are found as those that are looked up together."""

from __future__ import annotations

import numpy as np
import pytest

from store_client.embedded.names import CELLS, Cells, hash_key, hash_keys, join_keys, num_buckets
from store_client.testing import chain

_SPACE = 0xFEDCBA9876543210
_PAGES = 300


@pytest.fixture
def cells() -> Cells:
    """With every key of the chain but each hundredth."""
    keys = [key for number, key in enumerate(chain("a", _PAGES)) if number % 100 != 99]
    words = np.zeros(num_buckets(len(keys)) * CELLS, dtype="<u8")
    cells, hashes = Cells(words), hash_keys(join_keys(keys), _SPACE)
    planned = cells.plan(hashes)
    words[planned] = Cells.values(hashes, np.arange(len(keys), dtype=np.uint32))
    assert (planned >= 0).all() and np.count_nonzero(words) == len(keys)
    return cells


def test_leading_keys_are_those_before_the_first_that_is_absent(cells):
    keys = chain("a", _PAGES)
    for first in range(0, _PAGES, 7):
        there = cells.present(hash_keys(join_keys(keys[first:]), _SPACE))
        assert cells.leading(keys[first:], _SPACE) == int(np.append(there, False).argmin())
    assert cells.leading(keys[:99], _SPACE) == cells.leading(keys, _SPACE) == 99
    assert cells.leading(keys[:10], _SPACE + 1) == cells.leading([], _SPACE) == 0


def test_one_key_and_many_have_the_same_hash():
    keys = chain("a", _PAGES)
    assert [hash_key(key, _SPACE) for key in keys] == hash_keys(join_keys(keys), _SPACE).tolist()
