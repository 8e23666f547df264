"""Instances and proxies that die, instances that stop: each request is answered or fails, and others serve on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from long_form import LONG

from e2e.client import ServerError
from e2e.pages import wait_for
from e2e.pd.conftest import LEASE_S, ORDERS, Trio
from e2e.pd.half_way import LIMIT_S, Tokens, half_way, hands_over
from e2e.questions import Question

STOP_S = LEASE_S + 4.0


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS if LONG else ["concurrent"])
def test_the_prefill_instance_is_killed(trio: Trio, asked: dict[str, Question], order: str) -> None:
    """In mid-transfer and before: the decode instance computes; when it is back on its ports, it is found again."""
    prefill, decode = trio.pair("tcp" if order == "concurrent" else "cma")
    proxy, others = trio.proxy([prefill], [decode], order=order), trio.proxy([trio.third(prefill, decode)], [decode])
    question, small = asked["layer"], asked["full"]
    with half_way(proxy, prefill, question) as asking:
        prefill.kill()
        assert asking.result(LIMIT_S) == question.answer
    assert proxy.ask_whole(small.prompt, max_tokens=len(small.answer)) == small.answer
    prefill.heal()
    prefill.start()
    assert others.ask_whole(small.prompt, max_tokens=len(small.answer)) == small.answer
    prefill.wait_until_ready()
    hands_over(proxy, decode, small)
    for instance in trio.instances:
        instance.holds_no_block()


def test_the_decode_instance_is_killed(trio: Trio, asked: dict[str, Question]) -> None:
    """In mid-transfer: its request fails, and the prefill instance gets its blocks back."""
    prefill, decode = trio.pair("shm")
    proxy, others = trio.proxy([prefill], [decode]), trio.proxy([prefill], [trio.third(prefill, decode)])
    question, small = asked["layer"], asked["full"]
    with half_way(proxy, prefill, question) as asking:
        decode.kill()
        with pytest.raises((ServerError, OSError)):
            asking.result(LIMIT_S)
    prefill.heal()
    decode.start()
    prefill.holds_no_block()
    assert others.ask_whole(small.prompt, max_tokens=len(small.answer)) == small.answer
    decode.wait_until_ready()
    hands_over(proxy, decode, small)


@pytest.mark.parametrize("order", ORDERS)
def test_the_proxy_is_killed(trio: Trio, asked: dict[str, Question], order: str) -> None:
    prefill, decode = trio.pair("tcp")
    proxy = trio.proxy([prefill], [decode], order=order)
    question = asked["layer"]
    with half_way(proxy, prefill, question) as asking:
        proxy.kill()
        with pytest.raises((ServerError, OSError)):
            asking.result(LIMIT_S)
    prefill.heal()
    prefill.holds_no_block()
    decode.holds_no_block()
    proxy.start()
    proxy.wait_until_ready()
    hands_over(proxy, decode, question)


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_an_instance_is_stopped_for_a_while(trio: Trio, asked: dict[str, Question], stopped: str) -> None:
    """For longer than the lease: what it had under way is given up, what it says later changes nothing."""
    prefill, decode = trio.pair("cma")
    proxy, others = trio.proxy([prefill], [decode]), trio.proxy([trio.third(prefill, decode)], [decode])
    one = prefill if stopped == "prefill" else decode
    question, small = asked["layer"], asked["full"]
    with half_way(proxy, prefill, question) as asking:
        one.pause()
        try:
            resume_at = time.monotonic() + STOP_S
            if one is prefill:
                assert asking.result(LIMIT_S) == question.answer
                assert others.ask_whole(small.prompt, max_tokens=len(small.answer)) == small.answer
            time.sleep(max(0.0, resume_at - time.monotonic()))
        finally:
            one.resume()
            prefill.heal()
        assert asking.result(LIMIT_S) == question.answer
    hands_over(proxy, decode, small)
    prefill.holds_no_block()
    decode.holds_no_block()


def test_a_prefill_instance_that_is_away_does_not_slow_the_others(trio: Trio, asked: dict[str, Question]) -> None:
    """Requests that name it are computed; those of another prefill instance are handed over meanwhile."""
    decode = trio.instances[0]
    small, other = asked["full"], asked["crowd 2"]
    params: dict[str, object] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "nobody-has-this",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
    }
    fetched = decode.figure("fetched_tokens")

    def ask_nobody(_: int) -> Tokens:
        body = decode.body(small.prompt, len(small.answer), kv_transfer_params=params)
        return tuple(decode.post(body)["choices"][0]["token_ids"])

    proxy = trio.proxy([trio.instances[2]], [decode])
    ask: Callable[[int], Tokens] = lambda _: proxy.ask_whole(other.prompt, max_tokens=len(other.answer))  # noqa: E731
    with ThreadPoolExecutor(6) as threads:
        lost, served = list(threads.map(ask_nobody, range(3))), list(threads.map(ask, range(3)))
    assert lost == [small.answer] * 3 and served == [other.answer] * 3
    wait_for(lambda: decode.figure("fetched_tokens") > fetched, "a transfer in the metrics")
