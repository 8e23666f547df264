"""A prompt as a router sees it, and the history of what was sent where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_connector.deploy.history import History
from mooncake_connector.deploy.prompts import CHUNK_NBYTES, CHUNK_TOKENS, chunks_of, text_of, tokens_in

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)
)


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": one} for at, one in enumerate(contents)], **more}


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    pairs = zip(chunks_of(text_of(one)), chunks_of(text_of(other)), strict=False)
    return sum(left == right for left, right in pairs)


def test_what_a_conversation_adds_leaves_the_chunks_before_it():
    first = chat("x" * 3000)
    longer = chat("x" * 3000, "y" * 3000, "z")
    assert shared(first, longer) == len(text_of(first)) // CHUNK_NBYTES == 5
    assert shared(first, chat("x" * 2000 + "!" + "x" * 999)) == 3
    assert shared(first, chat("x" * 3000, tools=[{"name": "t"}])) == 0  # it stands before everything


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_prompts_that_begin_alike_share_chunks(kind):
    one = "".join(map(chr, range(32, 126))) * 43 if kind == "text" else list(range(1000))
    other = one[:3000] + "b" * 4000 if kind == "text" else one[:750] + [7] * 500
    chunks = shared({"prompt": one}, {"prompt": other})
    assert chunks == 3000 // CHUNK_NBYTES
    assert shared({"prompt": one}, {"prompt": other[1:]}) == 0


def test_token_ids_are_counted_and_text_is_estimated():
    assert tokens_in(text_of({"prompt": [5] * 777})) == 777
    assert tokens_in(text_of({"prompt": "x" * 400})) == 100
    assert CHUNK_TOKENS * 4 == CHUNK_NBYTES


def test_an_image_counts_as_what_it_is_and_not_by_its_size():
    def asked(data: str) -> dict[str, Any]:
        return chat([{"type": "text", "text": "t" * 600}, {"type": "image_url", "image_url": {"url": data}}], "x" * 600)

    assert tokens_in(text_of(asked("data:" + "A" * 10**6))) < 1000
    assert shared(asked("data:A"), asked("data:A")) == 2 and shared(asked("data:A"), asked("data:B")) == 1


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "tools"]), JSON))
def test_whatever_a_client_sends_is_some_text(body):
    body = json.loads(json.dumps(body))
    assert chunks_of(text_of(body)) == chunks_of(text_of(body)) and tokens_in(text_of(body)) >= 0


def test_halves_of_a_pair_and_depths_are_no_faults():
    assert text_of({"prompt": "\ud800"}) and text_of(chat("\ud800", tools=["\ud800"]))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert text_of({"prompt": deep}) == b"" == text_of({"messages": [{"content": [deep]}]})


def test_the_history_of_an_instance_is_its_own():
    history = History(100)
    assert history.matched("a", [1, 2]) == 0 and history.matched("a", []) == 0
    history.note("a", [1, 2, 3])
    assert history.matched("a", [1, 2, 9]) == 2 and history.matched("b", [1, 2, 3]) == 0
    history.note("b", [])
    assert history.matched("b", [1]) == 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=8)), max_size=40), st.integers(1, 12)
)
def test_the_history_is_bounded_and_never_has_a_chunk_without_those_before(sent, most):
    """Chunks are named by their whole beginnings, so whatever is left of a prompt is its beginning."""
    history, seen = History(most), {"a": set(), "b": set()}
    for url, prompt in sent:
        chunks = [hash(tuple(prompt[: end + 1])) for end in range(len(prompt))]
        history.note(url, chunks)
        seen[url] |= set(chunks)
        assert history.matched(url, chunks) == min(len(chunks), most)
        for one in "ab":
            known = history.matched(one, chunks)
            assert known <= most and set(chunks[:known]) <= seen[one]
        assert all(len(of) <= most for of in history._of.values())


def test_the_longest_unused_prompt_is_forgotten_first_and_its_end_before_its_beginning():
    history = History(6)
    history.note("a", [1, 2, 3])
    history.note("a", [11, 12, 13])
    history.note("a", [1, 2, 3])
    history.note("a", [21, 22])
    assert history.matched("a", [1, 2, 3]) == 3 and history.matched("a", [11, 12, 13]) == 1
