"""Two hosts with a pool each, and a network between them: PD and the pools together, and what networks do to both."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.pd.conftest import ORDERS, Hosts
from e2e.pd.half_way import LIMIT_S, half_way, hands_over
from e2e.questions import Question
from e2e.said import explained_in_words, line, lines, top, why_in_words

NAMES = ("stored", "known to decode", "known to prefill", "cut", *ORDERS)
NUM_TOKENS = 300
BLOCK_TOKENS = 128
BLOCK_NBYTES = 16384 * BLOCK_TOKENS  # of KV, all layers, in float32
NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_TOKENS)


@pytest.fixture
def questions(asked: dict[str, Question]) -> dict[str, Question]:
    """One for each test: the pools keep what is in them."""
    return {name: asked[f"host {number}"] for number, name in enumerate(NAMES)}


def sent_blocks(hosts: Hosts) -> float:
    return hosts.prefill.figure("send_bytes") / BLOCK_NBYTES


def answers(hosts: Hosts, question: Question, order: str = "sequential") -> None:
    proxy = hosts.proxy([hosts.prefill], [hosts.decode], order=order)
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer


def test_what_travels_is_stored_and_what_is_stored_does_not_travel(
    hosts: Hosts, questions: dict[str, Question], pools: tuple[Path, Path]
) -> None:
    question, before = questions["stored"], sent_blocks(hosts)
    answers(hosts, question)
    wait_for(lambda: sent_blocks(hosts) == before + NUM_BLOCKS, "the whole prompt sent, in the metrics")
    for pool in pools:
        Pages(pool, hosts.decode.model).wait_for(question.prompt)

    hosts.forget()
    answers(hosts, question)
    expected = before + NUM_BLOCKS + 1  # the last block has tokens that fill no page
    wait_for(lambda: sent_blocks(hosts) == expected, "only the last block sent, in the metrics")
    assert hosts.prefill.figure("transport_bytes", transport="tcp") == hosts.prefill.figure("send_bytes")
    for instance in hosts.instances:
        assert instance.figure("hit_tokens") >= NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS, instance.log.stem


def test_what_travelled_is_in_the_lines_of_both_sides_in_why_and_in_top(
    hosts: Hosts, questions: dict[str, Question], pools: tuple[Path, Path]
) -> None:
    """Of prompts that begin with other tokens each: what is in a pool does not travel."""
    proxy = hosts.proxy([hosts.prefill], [hosts.decode])
    numbers = itertools.count()

    def ask() -> None:
        proxy.ask_whole((next(numbers) % 256, *questions["stored"].prompt[:0:-1]), max_tokens=1)

    def sent() -> list[dict[str, str]]:
        """Both sides call the request the same, but for vLLM's own ending."""
        return [one for one in lines(hosts.prefill) if one["id"].rpartition("-")[0] == said["id"].rpartition("-")[0]]

    said = line(hosts.decode, ask)
    names = ("fetched_tokens", "hit_tokens", "computed_tokens", "transport", "miss")
    assert [said[name] for name in names] == [str(NUM_TOKENS), "0", "0", "-", "elsewhere"]
    assert float(said["transfer_ms"]) > 0
    explained_in_words(hosts.decode, pools[1], said)
    assert f" {NUM_TOKENS} from a prefill instance," in why_in_words(pools[1], "--request", said["id"])

    wait_for(lambda: bool(sent()), "the line of the request whose KV was sent")
    (there,) = sent()
    names = ("fetched_tokens", "computed_tokens", "transport", "miss")
    assert [there[name] for name in names] == ["0", str(NUM_TOKENS), "tcp", "never_stored"]
    assert float(there["transfer_ms"]) > 0

    shown = top(hosts.prefill, pools[0], ask, "transports")
    assert {transport for each in shown for transport in each["sent_nbytes"]} == {"tcp"}


@pytest.mark.parametrize("order", ORDERS)
def test_pages_in_the_pool_of_either_side_are_read_from_there(
    hosts: Hosts, questions: dict[str, Question], pools: tuple[Path, Path], order: str
) -> None:
    """The page in the pool is a wrong one, with the checksum of its bytes: the answer shows who has read it."""
    name, instance, pool = {
        "sequential": ("known to decode", hosts.decode, pools[1]),
        "concurrent": ("known to prefill", hosts.prefill, pools[0]),
    }[order]
    question, pages = questions[name], Pages(pool, hosts.decode.model)
    answer = instance.ask_whole(question.prompt, max_tokens=len(question.answer))
    assert answer == question.answer
    pages.wait_for(question.prompt)
    hosts.forget()
    answers(hosts, question, order)

    hosts.forget()
    pages.falsify(question.prompt, page=NUM_TOKENS // PAGE_TOKENS // 2)
    proxy = hosts.proxy([hosts.prefill], [hosts.decode], order=order)
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) != question.answer


def test_a_cut_in_mid_transfer(hosts: Hosts, questions: dict[str, Question]) -> None:
    """Nothing comes through any more and nobody says so: the prompt is computed. With the link, transfers come back."""
    question = questions["cut"]
    proxy = hosts.proxy([hosts.prefill], [hosts.decode])
    with half_way(proxy, hosts.prefill, question) as asking:
        hosts.link.set(cut=[hosts.prefill.transfer_host])
        hosts.prefill.heal()
        assert asking.result(LIMIT_S) == question.answer
    hosts.prefill.holds_no_block()
    hosts.decode.holds_no_block()
    hosts.link.set()
    hands_over(proxy, hosts.decode, questions["stored"])


@pytest.mark.parametrize("order", ORDERS)
def test_a_link_that_loses_and_delays_packets(hosts: Hosts, questions: dict[str, Question], order: str) -> None:
    before = hosts.decode.figure("fetched_tokens")
    hosts.link.set(lose=0.02, delay_ms=10)
    answers(hosts, questions[order], order)
    wait_for(lambda: hosts.decode.figure("fetched_tokens") == before + NUM_TOKENS, "the whole prompt fetched")
    hosts.prefill.holds_no_block()
