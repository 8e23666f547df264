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
from store_client.agent.index.parts import Parts, Prompt, names_of_blocks, names_of_pages
from store_client.agent.index.requests import Refused, decode_query
from store_client.agent.index.text import num_tokens, read_tokens

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


def asked(tokens, known: Parts) -> Prompt:
    body = json.dumps({"model": "m", "block_size": 16, "token_ids": [int(token) for token in tokens]})
    return decode_query(body.encode(), known)[1]


def read(tokens, known: Parts):
    prompt = asked(tokens, known)
    found = prompt.tokens(0, prompt.num_parts)
    assert prompt.num_tokens == len(found)
    return found


def named(names, prompt: Prompt, each: int = 1_000) -> list:
    for to in range(each, prompt.num_parts + each, each):
        names.extend(min(to, prompt.num_parts))
    return names.made


def pages(tokens, known: Parts, root: bytes = b"", size: int = 64) -> list[bytes]:
    prompt = asked(tokens, known)
    return named(names_of_pages(prompt, known, size, root), prompt)


@pytest.mark.parametrize("each", [1, 2, 1_000])
@pytest.mark.parametrize("end", [9_000, 8_192, 4_095, 1_024, 15, 0])
@pytest.mark.parametrize("most_nbytes", [0, 1 << 20])
def test_names_are_those_of_the_whole_prompt_the_first_time_and_the_next(end, most_nbytes, each):
    known, tokens = Parts(most_nbytes), TOKENS[:end]
    for _ in range(2):
        for prompt in (asked(tokens, known), Prompt(tokens)):
            for size in (1, 64, 5_000):
                for root in (ROOT, b""):
                    names = names_of_pages(prompt, known, size, root)
                    assert named(names, prompt, each) == page_keys(tokens, size, root=root)
                names = names_of_blocks(prompt, known, size)
                assert named(names, prompt, each) == seq_hashes(tokens, size)
        assert (read(tokens, known) == tokens).all()


def test_a_turn_more_costs_that_turn_and_less_than_a_part_before_it(made):
    known = Parts()
    assert pages(TOKENS[:8_192], known) and sum(made) == 8_192
    made.clear()
    pages(TOKENS, known)
    assert sum(made) < len(TOKENS) - 8_192 + 2_500


def test_what_differs_at_its_beginning_has_no_part_in_common(made):
    known, other = Parts(), TOKENS.copy()
    other[0] += 1
    pages(TOKENS, known)
    made.clear()
    assert pages(other, known) == page_keys(other, 64)
    assert sum(made) == len(TOKENS)
    assert pages(TOKENS, known, ROOT) == page_keys(TOKENS, 64, root=ROOT), "nor what has another salt"


def test_the_bytes_that_are_kept_are_bounded_and_what_was_not_wanted_longest_goes(made):
    prompts = [np.roll(TOKENS, at) for at in range(4)]
    known = Parts(100_000)
    for tokens in prompts:
        pages(tokens, known)
        pages(prompts[0], known)
        assert known.nbytes <= 100_000
    made.clear()
    pages(prompts[0], known)
    assert sum(made) < 2_500, "it was wanted all the time"
    made.clear()
    pages(prompts[1], known)
    assert sum(made) == len(TOKENS)


def test_no_part_is_read_before_somebody_wants_to_know_it():
    known = Parts()
    prompt = asked(TOKENS, known)
    assert (prompt.num_tokens, prompt.num_known, prompt.num_parts > 3) == (9_000, 0, True)
    assert (prompt.tokens(100, 1) == TOKENS[100 : prompt.ends[0]]).all() and prompt.ends[0] < 3_000
    assert asked(TOKENS, known).num_known == 1
    prompt.tokens(0, 3)
    assert asked(TOKENS, known).num_known == 3


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


def plain(text: str) -> list[int] | None:
    view = memoryview(text.encode())
    if (count := num_tokens(view)) is None:
        return None
    tokens, stops = read_tokens(view)
    assert [len(tokens)] == stops == [count], text
    return tokens.tolist()


@pytest.mark.parametrize("between", [",", ", "])
@pytest.mark.parametrize("digits", range(1, 9))
def test_tokens_of_all_lengths_are_read_at_once(digits, between):
    draw = np.random.default_rng(digits)
    for count in (1, 2, 7, 8, 9, 500):
        tokens = [*draw.integers(0, 10**digits, count - 1).tolist(), 10**digits - 1]
        assert plain(between.join(map(str, tokens))) == tokens
        assert plain(" " + between.join(map(str, tokens[::-1]))) == tokens[::-1]


def test_what_is_read_at_once_is_what_is_there_and_else_nothing_is():
    draw, num_read = random.Random(5), 0
    for _ in range(20_000):
        text = "".join(draw.choices("0123456789, -x", (6,) * 10 + (9, 5, 1, 1), k=draw.randint(0, 14)))
        tokens = plain(text)
        if tokens is not None:
            num_read += 1
            assert tokens == [int(one) for one in text.split(",")], text
        written = [re.fullmatch(f" ?[0-9]{{1,8}}({between}[0-9]{{1,8}})*", text) for between in (",", ", ")]
        assert (tokens is not None) == any(written), text
    assert num_read > 1_000


@pytest.mark.parametrize("part", [3, 7, 8])
def test_a_list_is_read_right_that_goes_on_with_other_spaces(part):
    given = np.tile(TOKENS, 8)
    text = json.dumps({"model": "m", "block_size": 16, "token_ids": given.tolist()}).encode()
    start = text.index(b"[") + 1
    cut = parts._cuts(text, start, len(text) - 2)[part]
    prompt = decode_query(text[:cut] + text[cut:].replace(b", ", b","), Parts())[1]
    for to in (1, 5, 9, prompt.num_parts):  # as questions go on
        prompt.tokens(0, to)
    assert np.array_equal(prompt.tokens(0, prompt.num_parts), given)


def test_a_part_that_is_kept_keeps_no_other_one_in_memory():
    known = Parts()
    read(TOKENS, known)
    arrays = [kept for kept in known._kept.values() if isinstance(kept, np.ndarray)]
    assert len(arrays) > 2 and all(kept.base is None for kept in arrays)


def test_tokens_of_nine_digits_and_more_are_read_too():
    tokens = [1, 123_456_789, (1 << 32) - 1, *map(int, TOKENS)]
    assert read(tokens, Parts()).tolist() == tokens


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a_prompt_of_which_the_first_parts_are_known_is_read_to_its_end(known):
    parts_, tokens = Parts(), np.tile(TOKENS, 2)
    read(tokens[: known * 2_400], parts_)
    assert asked(tokens, parts_).num_known == known
    assert (read(tokens, parts_) == tokens).all()
    assert (read(tokens, parts_) == tokens).all()


@pytest.mark.parametrize("tokens", ["1 2,,3", "5 6 7,,,8", ",1", "1,"])
def test_what_is_no_list_is_refused(tokens):
    with pytest.raises(Refused):
        decode_query(f'{{"model":"m","block_size":16,"token_ids":[{tokens}]}}'.encode(), Parts())
