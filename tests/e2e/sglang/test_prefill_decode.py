"""PD on one pool: prefill reads and fills it while it hands over, decode offloads to it and restores from it.

The decode instance does both at once: what it generates is offloaded, and of a prompt whose beginning is in the pool
only the rest is handed over. vLLM shares the pool: what it computed is handed over, and it goes on with what both sides
stored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.process import free_port, running
from e2e.questions import Question
from e2e.said import LOGS_REQUESTS, lines, why
from e2e.server import ONE_CORE, Server
from e2e.sglang.conftest import StartSGLang, full
from e2e.sglang_server import SGLangAnswer, SGLangServer

GENERATED = 2 * PAGE_TOKENS + 10
DECODE = ("--disaggregation-decode-enable-radix-cache", "--disaggregation-decode-enable-offload-kvcache")


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode instance with a pool."""

    prefill: SGLangServer
    decode: SGLangServer
    vllm: Server
    bootstrap_port: int
    pages: Pages

    def ask(self, prompt: tuple[int, ...], max_tokens: int, **more: str) -> tuple[SGLangAnswer, SGLangAnswer]:
        """What prefill and decode answer, with nothing in the caches of their own."""
        for server in (self.prefill, self.decode):
            server.flush()
        fields = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.SystemRandom().getrandbits(62),
            **more,
        }
        with ThreadPoolExecutor(1) as thread:
            prefilled = thread.submit(self.prefill.ask, prompt, max_tokens=max_tokens, **fields)
            answer = self.decode.ask(prompt, max_tokens=max_tokens, **fields)
            return prefilled.result(), answer


@pytest.fixture(scope="module")
def pair(start: StartSGLang, pool: Path, questions: dict[str, Question], qwen3: Path, logs: Path) -> Iterator[Pair]:
    """The pool has one prompt, which vLLM has computed."""
    pages = Pages(pool, qwen3)
    vllm = Server(qwen3, log=logs / "sglang-pd-vllm.log", pool=pool, args=["--max-model-len", "2048"], env=ONE_CORE)
    with running(vllm):
        vllm.ask(questions["number 3"].prompt, max_tokens=1)
        pages.wait_for(questions["number 3"].prompt)
        port = free_port()
        backend = ("--disaggregation-transfer-backend", "mooncake_connector")
        common = (*backend, "--disaggregation-bootstrap-port", str(port))
        prefill, decode = (
            start(
                args=["--skip-server-warmup", "--disaggregation-mode", mode, *common, *args],
                env={"OMP_NUM_THREADS": "1", **LOGS_REQUESTS},
            )
            for mode, args in (("prefill", ()), ("decode", DECODE))
        )
        yield Pair(prefill, decode, vllm, port, pages)


def test_prefill_fills_the_pool_and_reads_it(pair: Pair, questions: dict[str, Question]) -> None:
    question = questions["number 0"]
    first, answer = pair.ask(question.prompt, len(question.answer))
    assert first.from_storage == 0 and answer.token_ids == question.answer
    pair.pages.wait_for(question.prompt)
    again, answer = pair.ask(question.prompt, len(question.answer))
    assert again.from_storage == full(question) and answer.token_ids == question.answer
    wait_for(lambda: pair.prefill.metric("sglang:backuped_tokens_total") >= full(question), "pages that prefill stored")


def test_decode_restores_what_is_in_the_pool(pair: Pair, pool: Path, questions: dict[str, Question]) -> None:
    question = questions["number 1"]
    pair.ask(question.prompt, 1)
    pair.pages.wait_for(question.prompt)
    before = pair.decode.metric("sglang:prefetched_tokens_total")
    _, answer = pair.ask(question.prompt, len(question.answer), rid="restored")
    assert answer.token_ids == question.answer
    restored = lambda: pair.decode.metric("sglang:prefetched_tokens_total") - before  # noqa: E731
    wait_for(lambda: restored() >= full(question), "pages that decode restored")

    def said(server: SGLangServer) -> list[dict[str, str]]:
        return [line for line in lines(server) if line["id"] == "restored"]

    wait_for(lambda: said(pair.prefill) and said(pair.decode), "one line of both load and transfer on each side")
    (computed,), (fetched,) = said(pair.prefill), said(pair.decode)
    tokens, hit = len(question.prompt), full(question)
    names = [f"{name}_tokens" for name in ("prompt", "local", "hit", "fetched", "computed")]
    assert [int(computed[name]) for name in names] == [tokens, 0, hit, 0, tokens - hit]
    assert [int(fetched[name]) for name in names] == [tokens, 0, hit, tokens - hit, 0]
    assert all(float(line["transfer_ms"]) > 0 < float(line["load_ms"]) for line in (computed, fetched))
    wait_for(lambda: len(why(pool, "--request", "restored") or ()) == 2, "what both leave in the pool", every_s=0.5)
    assert {each["fetched_tokens"] for each in why(pool, "--request", "restored")} == {0, tokens - hit}


def test_decode_offloads_what_it_generates_for_the_next_turn(pair: Pair, questions: dict[str, Question]) -> None:
    question = questions["number 2"]
    _, answer = pair.ask(question.prompt, GENERATED)
    assert answer.token_ids[: len(question.answer)] == question.answer
    turn = (*question.prompt, *answer.token_ids[:-1])  # the KV of the last token is computed with the next one
    pair.pages.wait_for(turn)
    computed, _ = pair.ask((*turn, *question.prompt[:PAGE_TOKENS]), 1)
    assert computed.from_storage == len(turn) // PAGE_TOKENS * PAGE_TOKENS > full(question)


def test_what_vllm_computed_is_handed_over(pair: Pair, questions: dict[str, Question]) -> None:
    question = questions["number 3"]
    computed, answer = pair.ask(question.prompt, len(question.answer))
    assert computed.from_storage == full(question) and answer.token_ids == question.answer


def test_vllm_goes_on_with_what_prefill_stored_and_decode_generated(pair: Pair, questions: dict[str, Question]) -> None:
    question = questions["falsified"]
    _, answer = pair.ask(question.prompt, GENERATED)
    turn = (*question.prompt, *answer.token_ids[:-1])
    pair.pages.wait_for(turn)
    for prompt, expected in ((question.prompt, question.answer), (turn, answer.token_ids[-1:])):
        pair.vllm.reset_prefix_cache()
        went_on = pair.vllm.ask(prompt, max_tokens=len(expected))
        assert went_on.cached_tokens == len(prompt) // PAGE_TOKENS * PAGE_TOKENS
        assert went_on.token_ids == tuple(expected)
