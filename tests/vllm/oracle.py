"""A model without weights whose KV can be checked: the KV of a token is a hash of that token and all before it.

A slot of the KV cache is one 64-bit number: K is its lower half (two 16-bit elements), V the upper. A runner that is
about to attend to a slot compares it with what that prefix must have there, so a page of another prefix, layer, head
or position is noticed wherever it came from. The sampled token is a function of the last hash, so texts differ as
soon as prompts do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VOCAB = 512
HEAD_SIZE = 2
SLOT_ELEMENTS = 2 * HEAD_SIZE
SLOT_NBYTES = 8
INDEXER = range(1000, 1001)
"""Stands for the indexer of a layer where `slots` wants heads."""
_MASK = (1 << 64) - 1

Slots = npt.NDArray[np.uint64]


def _mix(value: int) -> int:
    """splitmix64: the finaliser of a well-known random generator."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: Slots) -> Slots:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def chain(tokens: Sequence[int], hashes: Sequence[int] = (), seed: int = 0) -> list[int]:
    """One hash a token; `hashes` of the first tokens are taken as known. `seed` stands for the weights."""
    known = list(hashes)
    for token in tokens[len(known) :]:
        known.append(_mix((known[-1] if known else seed) ^ (token + 1)))
    return known


def slots(hashes: Sequence[int], layers: Sequence[int], heads: range) -> Slots:
    """What the KV cache must hold for some tokens: `[token, layer, head]`."""
    places = np.array([[layer * 1024 + head + 1 for head in heads] for layer in layers], dtype=np.uint64)
    return _mix_all(np.array(hashes, dtype=np.uint64)[:, None, None] ^ (places * np.uint64(0xD1342543DE82EF95)))


def canonical_page(
    hashes: Sequence[int], layers: Sequence[int], heads: range, *, mla: bool = False
) -> npt.NDArray[np.uint8]:
    """The canonical page of these tokens: K `[layer][token][head][dim]`, then V of the same form; MLA has no V."""
    numbers = slots(hashes, layers, heads).transpose(1, 0, 2)
    if mla:
        return np.ascontiguousarray(numbers).view(np.uint8).ravel()
    halves = np.ascontiguousarray(numbers).view(np.uint32).reshape(*numbers.shape, 2)
    return np.concatenate([np.ascontiguousarray(halves[..., part]).view(np.uint8).ravel() for part in (0, 1)])


def sample(last_hash: int) -> int:
    """The token that follows."""
    return _mix(last_hash ^ 0x5EED) % VOCAB


def generate(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What the model answers."""
    tokens = list(prompt)
    hashes = chain(tokens, seed=seed)
    for _ in range(num_tokens):
        tokens.append(sample(hashes[-1]))
        hashes = chain(tokens, hashes, seed)
    return tokens[len(prompt) :]
