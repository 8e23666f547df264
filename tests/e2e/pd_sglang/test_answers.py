"""What two SGLang instances answer together, behind routers of SGLang's makers, is what one answers alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.pages import wait_for
from e2e.pd_sglang.conftest import CHUNK_TOKENS, Asked, Pair
from e2e.pd_sglang.instances import Both, Instance, Router
from e2e.said import lines
from e2e.sglang_server import PAGE_TOKENS


@pytest.mark.parametrize("name", ["short", "pages", "several", "chunks"])
def test_two_instances_answer_as_one(router: Router, asked: Asked, name: str) -> None:
    """Below a page, whole pages, a page that is not full, several chunks of prefill; streamed and not."""
    question = asked[name]
    assert router.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
    assert router.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer


def test_a_prompt_that_prefill_has_cached_is_handed_over_whole(router: Router, asked: Asked) -> None:
    question = asked["several"]
    first, again = (router.ask(question.prompt, max_tokens=len(question.answer)) for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, len(question.prompt) // PAGE_TOKENS * PAGE_TOKENS)
    assert first.token_ids == again.token_ids == question.answer


def test_each_side_has_a_line_of_what_was_handed_over(pair: Pair, asked: Asked) -> None:
    question, tokens = asked["several"], str(len(asked["several"].prompt))
    with ThreadPoolExecutor(2) as threads:
        both = Both(threads, pair.prefill, pair.decode, question.prompt, len(question.answer))
        assert both.answer() == question.answer

    def said(instance: Instance) -> list[dict[str, str]]:
        return [line for line in lines(instance) if line["id"] == both.rid]

    wait_for(lambda: said(pair.prefill) and said(pair.decode), "a line on each side")
    (computed,), (fetched,) = said(pair.prefill), said(pair.decode)
    names = ("prompt_tokens", "fetched_tokens", "computed_tokens", "transport", "miss")
    assert [computed[name] for name in names] == [tokens, "0", tokens, "tcp", "-"]
    assert [fetched[name] for name in names] == [tokens, tokens, "0", "-", "elsewhere"]
    assert float(computed["transfer_ms"]) > 0 and float(fetched["transfer_ms"]) > 0


def test_a_chat_is_answered_as_by_one(router: Router, asked: Asked) -> None:
    answer, logprobs = router.chat(asked.chat.said, max_tokens=len(asked.chat.logprobs))
    assert answer == asked.chat.answer
    assert logprobs == pytest.approx(asked.chat.logprobs, abs=1e-3)


def test_parallel_samples_and_batches(router: Router, asked: Asked) -> None:
    question, other = asked["several"], asked["short"]
    samples = router.post(router.body(question.prompt, len(question.answer), n=2))
    assert [tuple(sample["output_ids"]) for sample in samples] == [question.answer] * 2
    body = router.body((), len(question.answer)) | {"input_ids": [question.prompt, other.prompt]}
    assert [tuple(one["output_ids"]) for one in router.post(body)] == [question.answer, other.answer]


def test_several_requests_at_once(router: Router, asked: Asked) -> None:
    crowd = asked.crowd * 2
    with ThreadPoolExecutor(len(crowd)) as threads:
        answers = list(threads.map(lambda one: router.ask_whole(one.prompt, max_tokens=len(one.answer)), crowd))
    assert answers == [question.answer for question in crowd]


def test_the_answer_depends_on_the_bytes_that_travel(pair: Pair, asked: Asked) -> None:
    """The negative control: what is sent is wrong, and so are its checksums."""
    question = asked["chunks"]
    assert len(question.prompt) > 2 * CHUNK_TOKENS
    router = pair.router("sglang-router")
    pair.prefill.fault("falsify")
    answer = router.ask_whole(question.prompt, max_tokens=len(question.answer))
    assert pair.prefill.saw("falsify")
    assert answer != question.answer


def test_wrong_bytes_are_never_read(pair: Pair, asked: Asked) -> None:
    """A batch that arrives with a wrong byte is sent once more; when that is wrong as well, the request fails."""
    router, question = pair.router("sglang-router"), asked["several"]
    pair.decode.fault("corrupt-once")
    assert router.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
    assert pair.decode.saw("corrupt")
    pair.decode.fault("corrupt")
    with pytest.raises(AssertionError, match="wrong bytes"):
        router.ask_whole(question.prompt, max_tokens=len(question.answer))
    pair.decode.heal()
    assert router.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
