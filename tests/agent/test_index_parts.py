"""Of a prompt that begins as one before it did, the index makes anew what is new."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from mooncake_connector.kv.keys import page_keys, root_digest
from store_client.agent.index import parts
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.parts import Parts
from store_client.agent.index.requests import Refused, _plain_tokens, decode_query

TOKENS = np.random.default_rng(4).integers(0, 150_000, 9_000).astype(np.uint32)
ROOT = root_digest(None, "salt")


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """Tokens that each call had to hash."""
    made = []

    def counted(tokens, *given, **named):
        made.append(len(tokens))
        return page_keys(tokens, *given, **named)

    monkeypatch.setattr(parts, "page_keys", counted)
    return made


def read(tokens, known: Parts, **others):
    body = json.dumps({"model": "m", "block_size": 16, "token_ids": [int(token) for token in tokens], **others})
    return decode_query(body.encode(), known)[1]


@pytest.mark.parametrize("end", [9_000, 8_192, 4_095, 1_024, 15, 0])
@pytest.mark.parametrize("most", [0, 4096])
def test_names_are_those_of_the_whole_prompt_the_first_time_and_the_next(end, most):
    known, tokens = Parts(most), TOKENS[:end]
    for _ in range(2):
        assert known.page_keys(tokens, 64, ROOT) == page_keys(tokens, 64, root=ROOT)
        assert known.page_keys(tokens, 64, b"") == page_keys(tokens, 64)
        assert known.seq_hashes(tokens, 16) == seq_hashes(tokens, 16)
        assert known.seq_hashes(tokens, 64) == seq_hashes(tokens, 64)
        assert (read(tokens, known) == tokens).all()


def test_a_turn_more_costs_that_turn(made):
    known = Parts()
    known.page_keys(TOKENS[:8_192], 64, b"")
    assert sum(made) == 8_192
    made.clear()
    known.page_keys(TOKENS, 64, b"")
    assert sum(made) == len(TOKENS) - 8_192


def test_what_differs_at_its_beginning_has_no_part_in_common(made):
    known, other = Parts(), TOKENS.copy()
    other[0] += 1
    known.page_keys(TOKENS, 64, b"")
    made.clear()
    assert known.page_keys(other, 64, b"") == page_keys(other, 64)
    assert sum(made) == len(TOKENS)
    assert known.page_keys(TOKENS, 64, ROOT) == page_keys(TOKENS, 64, root=ROOT), "nor what has another salt"


def test_so_many_parts_are_kept_and_those_that_were_not_wanted_longest_go(made):
    known = Parts(most=2)
    known.page_keys(TOKENS[:8_192], 64, b"")
    known.page_keys(TOKENS[:4_096], 64, b"")
    known.page_keys(TOKENS[:8_192], 64, ROOT)
    made.clear()
    known.page_keys(TOKENS[:8_192], 64, ROOT)
    assert sum(made) == 0
    known.page_keys(TOKENS[:4_096], 64, b"")
    assert sum(made) == 4_096


@pytest.mark.parametrize("at", [0, 5_000, 8_999])
def test_a_token_that_cannot_be_is_named_by_its_place_wherever_it_is(at):
    known, tokens = Parts(), [int(token) for token in TOKENS]
    for wrong in (1 << 32, -1):
        tokens[at] = wrong
        with pytest.raises(Refused, match=rf"token_ids\[{at}\] is {wrong}:"):
            read(tokens, known)


@pytest.mark.parametrize("wrong", ["7 7", "", "x", "[7]", "7.5"])
def test_a_list_that_is_none_is_refused_though_its_other_parts_are_known(wrong):
    known = Parts()
    read(TOKENS, known)
    texts = [str(token) for token in TOKENS]
    texts[4_000] = wrong
    tokens = ", ".join(texts)
    body = f'{{"model": "m", "block_size": 16, "token_ids": [{tokens}]}}'
    with pytest.raises(Refused):
        decode_query(body.encode(), known)


@pytest.mark.parametrize("between", [",", ", "])
@pytest.mark.parametrize("digits", range(1, 9))
def test_tokens_of_all_lengths_are_read_at_once(digits, between):
    draw = np.random.default_rng(digits)
    for count in (1, 2, 7, 8, 9, 500):
        tokens = [*draw.integers(0, 10**digits, count - 1).tolist(), 10**digits - 1]
        assert _plain_tokens(memoryview(between.join(map(str, tokens)).encode())).tolist() == tokens
        assert _plain_tokens(memoryview((" " + between.join(map(str, tokens[::-1]))).encode())).tolist() == tokens[::-1]


def test_what_is_read_at_once_is_what_is_there_and_else_nothing_is():
    draw, num_read = random.Random(5), 0
    for _ in range(20_000):
        text = "".join(draw.choices("0123456789, -x", (6,) * 10 + (9, 5, 1, 1), k=draw.randint(0, 14)))
        if (tokens := _plain_tokens(memoryview(text.encode()))) is not None:
            num_read += 1
            assert all(re.fullmatch(" ?[0-9]{1,8}", one) for one in text.split(",")), text
            assert tokens.tolist() == [int(one) for one in text.split(",")], text
    assert num_read > 1_000


def test_tokens_of_nine_digits_and_more_are_read_too():
    tokens = [1, 123_456_789, (1 << 32) - 1, *map(int, TOKENS)]
    assert read(tokens, Parts()).tolist() == tokens


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a_prompt_of_which_the_first_parts_are_known_is_read_to_its_end(known):
    parts_, tokens = Parts(), np.tile(TOKENS, 2)
    read(tokens[: known * 2_400], parts_)
    assert (read(tokens, parts_) == tokens).all()
    assert (read(tokens, parts_) == tokens).all()


@pytest.mark.parametrize("tokens", ["1 2,,3", "5 6 7,,,8", ",1", "1,"])
def test_what_is_no_list_is_refused(tokens):
    with pytest.raises(Refused):
        decode_query(f'{{"model":"m","block_size":16,"token_ids":[{tokens}]}}'.encode(), Parts())
