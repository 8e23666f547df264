"""What two instances answer together is what one answers alone, and it comes from what travelled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import pytest
from long_form import LONG

from e2e.pages import wait_for
from e2e.pd.chat import as_text
from e2e.pd.conftest import GRANULARITIES, ORDERS, TRANSPORTS, Trio
from e2e.pd.instances import Instance
from e2e.questions import Question

NUM_LAYERS = 8
TOKEN_NBYTES = 16384  # of KV, all layers, in float32
BLOCK_TOKENS = 128


class Counted:
    """How much two instances have handed over since this was made."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self._prefill, self._decode = prefill, decode
        self._before = self._now()

    def fetched(self) -> int:
        """Prompt tokens that did not have to be computed by the decode instance."""
        return self._now()[0] - self._before[0]

    def wait_until_sent(self, num_blocks: int, transport: str) -> None:
        """By this transport: exactly so many blocks of KV, and nothing by another."""
        expected = {**dict.fromkeys(TRANSPORTS, 0), transport: num_blocks * BLOCK_TOKENS * TOKEN_NBYTES}

        def sent() -> dict[str, int]:
            _, *before = self._before
            _, *now = self._now()
            return {name: new - old for name, old, new in zip(TRANSPORTS, before, now, strict=True)}

        with suppress(AssertionError):  # the next line says it better
            wait_for(lambda: sent() == expected, "the transfer in the metrics")
        assert sent() == expected

    def _now(self) -> list[int]:
        sent = (self._prefill.figure("transport_bytes", transport=name) for name in TRANSPORTS)
        return [int(self._decode.figure("fetched_tokens")), *map(int, sent)]


def num_blocks(question: Question) -> int:
    return -(-len(question.prompt) // BLOCK_TOKENS)


WAYS = list(product(TRANSPORTS, GRANULARITIES, ORDERS))
PAIRS = [(*way, ORDERS[number % 2]) for number, way in enumerate(product(TRANSPORTS, GRANULARITIES))]
"""Each transport with each granularity, and each order with either."""


@pytest.mark.long
@pytest.mark.parametrize(("transport", "granularity", "order"), WAYS if LONG else PAIRS)
def test_two_instances_answer_as_one(
    trio: Trio, asked: dict[str, Question], transport: str, granularity: str, order: str
) -> None:
    """Streamed and not; prefill takes the longer prompts in chunks of 256, 512 or 4,096 tokens."""
    prefill, decode = trio.pair(transport)
    proxy = trio.proxy([prefill], [decode], order=order)
    question = asked[granularity]
    counted = Counted(prefill, decode)
    assert proxy.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
    wait_for(lambda: counted.fetched() >= len(question.prompt) - 1, "the prompt's KV fetched, in the metrics")
    trio.forget()
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
    counted.wait_until_sent(2 * num_blocks(question), transport)


@pytest.mark.parametrize("order", ORDERS)
def test_chats_are_answered_as_by_one(trio: Trio, asked: dict[str, Question], order: str) -> None:
    """Streamed and not."""
    prefill, decode = trio.pair("cma")
    proxy, question = trio.proxy([prefill], [decode], order=order), asked["chat"]
    counted, text, most = Counted(prefill, decode), as_text(question.prompt), len(question.answer)
    streamed = proxy.chat(text, max_tokens=most)
    wait_for(lambda: counted.fetched() > len(text), "the chat's KV fetched, in the metrics")
    trio.forget()
    whole = proxy.chat_whole(text, max_tokens=most)
    wait_for(lambda: counted.fetched() > 2 * len(text), "the chat's KV fetched again, in the metrics")
    assert streamed.token_ids == question.answer
    assert (streamed.token_ids, streamed.text) == whole


def test_layers_travel_while_the_next_ones_are_computed(trio: Trio, asked: dict[str, Question]) -> None:
    """Tried again where prefill was over before the decode instance asked, as on a busy machine."""
    whole = [(0, NUM_LAYERS, 0, len(asked["full"].prompt))]
    expected: dict[str, Callable[[list[tuple[int, ...]]], bool]] = {
        "full": lambda batches: batches == whole,
        "chunk": lambda batches: len(batches) == 2 and {batch[:2] for batch in batches} == {(0, NUM_LAYERS)},
        "layer": lambda batches: max(batch[1] for batch in batches) < NUM_LAYERS,
    }
    prefill, decode = trio.pair("tcp")
    proxy = trio.proxy([prefill], [decode], order="concurrent")
    for granularity in GRANULARITIES:
        seen = []
        while not seen or not expected[granularity](seen[-1]):
            assert len(seen) < 5, (granularity, seen)
            trio.forget()
            proxy.ask_whole(asked[granularity].prompt, max_tokens=2)
            seen.append(prefill.batches())


def test_a_prompt_below_one_block(trio: Trio, asked: dict[str, Question]) -> None:
    prefill, decode = trio.pair("cma")
    question = asked["below a block"]
    counted = Counted(prefill, decode)
    proxy = trio.proxy([prefill], [decode])
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
    wait_for(lambda: counted.fetched() >= len(question.prompt) - 1, "the prompt's KV fetched, in the metrics")


@pytest.mark.parametrize("order", ORDERS)
def test_only_what_the_decode_instance_lacks_travels(trio: Trio, asked: dict[str, Question], order: str) -> None:
    prefill, decode = trio.pair("cma")
    known, question = asked["shared"], asked["shared/more"]
    decode.ask_whole(known.prompt, max_tokens=1)
    counted = Counted(prefill, decode)
    proxy = trio.proxy([prefill], [decode], order=order)
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
    counted.wait_until_sent(num_blocks(question) - len(known.prompt) // BLOCK_TOKENS, "cma")


def test_the_answer_depends_on_the_bytes_that_travel(trio: Trio, asked: dict[str, Question]) -> None:
    """The negative control: what is sent is wrong, and so are its checksums."""
    prefill, decode = trio.pair("cma")
    question = asked["chunk"]
    prefill.fault("falsify")
    answer = trio.proxy([prefill], [decode]).ask_whole(question.prompt, max_tokens=len(question.answer))
    assert prefill.saw("falsify")
    assert answer != question.answer


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_wrong_bytes_are_never_read(trio: Trio, asked: dict[str, Question], granularity: str) -> None:
    """A batch that arrives with a wrong byte is sent once more; when that is wrong as well, the prompt is computed."""
    prefill, decode = trio.pair("shm")
    proxy = trio.proxy([prefill], [decode])
    question = asked[granularity]
    for kind, fails in (("corrupt-once", 0), ("corrupt", 1)):
        before = decode.figure("failures", cause="fetch_failed")
        decode.fault(kind)
        assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
        assert decode.saw("corrupt")
        wait_for(lambda: decode.figure("failures", cause="fetch_failed") == before + fails, f"{fails} in the metrics")  # noqa: B023
        trio.forget()


def test_stale_and_senseless_parameters_are_prefilled_here(trio: Trio, asked: dict[str, Question]) -> None:
    """What a prefill instance answered cannot be used at another address, nor twice, be it for another prompt."""
    prefill, decode = trio.pair("cma")
    question, other = asked["full"], asked["crowd 1"]
    hand_over = {"do_remote_decode": True, "do_remote_prefill": False}

    def handed_over() -> dict[str, object]:
        return prefill.post(prefill.body(question.prompt, 1, kv_transfer_params=hand_over))["kv_transfer_params"]

    def decoded(asked: Question, params: dict[str, object]) -> tuple[int, ...]:
        body = decode.body(asked.prompt, len(asked.answer), kv_transfer_params=params)
        decode.reset_prefix_cache()
        return tuple(decode.post(body)["choices"][0]["token_ids"])

    params, fetched = handed_over(), decode.figure("fetched_tokens")
    assert decoded(question, {**params, "remote_port": 9}) == question.answer
    for nonsense in (7, "", [], {}, "no address"):
        assert decoded(question, {**params, "remote_host": nonsense}) == question.answer
    assert decode.figure("fetched_tokens") == fetched
    params = handed_over()  # the lease of the first may be over by now
    assert decoded(question, params) == question.answer
    wait_for(lambda: decode.figure("fetched_tokens") > fetched, "the first use of the parameters in the metrics")
    fetched = decode.figure("fetched_tokens")
    assert decoded(question, params) == question.answer
    params = handed_over()
    assert decoded(other, params) == other.answer
    assert decoded(question, params) == question.answer
    assert decode.figure("fetched_tokens") == fetched
    prefill.holds_no_block()


@pytest.mark.parametrize(("prefills", "decodes"), [((0, 1), (2,)), ((0,), (1, 2))], ids=["2P1D", "1P2D"])
@pytest.mark.parametrize("order", ORDERS)
def test_several_instances_share_the_work(
    trio: Trio, asked: dict[str, Question], order: str, prefills: tuple[int, ...], decodes: tuple[int, ...]
) -> None:
    here, there = [trio.instances[i] for i in prefills], [trio.instances[i] for i in decodes]
    proxy = trio.proxy(here, there, order=order)
    before = [*(one.figure("sends") for one in here), *(one.figure("fetches") for one in there)]
    failures = sum(one.figure("failures") for one in (*here, *there))
    crowd = [question for name, question in asked.items() if name.startswith("crowd")]
    with ThreadPoolExecutor(len(crowd)) as threads:
        answers = list(threads.map(lambda one: proxy.ask_whole(one.prompt, max_tokens=len(one.answer)), crowd))
    assert answers == [question.answer for question in crowd]

    def shares() -> list[float]:
        now = [*(one.figure("sends") for one in here), *(one.figure("fetches") for one in there)]
        return [new - old for old, new in zip(before, now, strict=True)]

    expected = [*[len(crowd) / len(here)] * len(here), *[len(crowd) / len(there)] * len(there)]
    wait_for(lambda: shares() == expected, "every transfer, shared evenly, in the metrics")
    assert sum(one.figure("failures") for one in (*here, *there)) == failures
