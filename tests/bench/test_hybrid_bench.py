"""The benchmark of hybrid models without vLLM: its rows, and when an answer counts as one from the pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.peers import hybrid
from bench.peers.hybrid import HIT, NEW, NEW_ALONE, OWN_HIT, QUICK, Scale, from_pool, measure, rows
from bench.streaming_server import StreamingServer
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.client import Server, parse_url


def test_rows_are_medians_beside_vllm_alone() -> None:
    found = {NEW: [1.2, 9.0, 1.1], NEW_ALONE: [1.0, 1.0, 5.0], HIT: [0.2, 0.1, 0.3], OWN_HIT: [0.1]}
    new, hit = rows({"gemma3": found}, Scale())
    assert (round(new.value), round(new.limit), round(hit.value), round(hit.limit)) == (1200, 1000, 200, 100)
    assert "1,792 of them from the pool" in hit.figure


@pytest.mark.parametrize("scale", [QUICK, Scale()])
def test_a_hit_ends_at_the_last_block_of_every_model(scale: Scale) -> None:
    for block in (128, 256):
        assert (scale.prompt_tokens - 1) // block * block == scale.hit_tokens


class Stored:
    """A server whose pool has what it was asked the third time for, and not before; it counts what it loads."""

    def __init__(self, stand_in: StreamingServer, *, loaded: int) -> None:
        self.server, self.asked = parse_url(stand_in.url, None), 0
        self._behaviour, self._loaded = stand_in.behaviour, loaded
        self._count(0)

    def ask(self, server: Server, prompt: list[int]) -> float:
        self.asked += 1
        if self.asked >= 3:
            self._count(self._loaded)
        return float(self.asked)

    def _count(self, tokens: int) -> None:
        self._behaviour.metrics = f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {tokens}\n'


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamingServer]:
    monkeypatch.setattr(hybrid, "_PAUSE_S", 0.0)
    monkeypatch.setattr(hybrid, "_REST_S", 0.01)
    with StreamingServer() as server:
        yield server


def test_what_the_pool_does_not_have_yet_is_asked_again(
    stand_in: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(stand_in, loaded=QUICK.hit_tokens)
    monkeypatch.setattr(hybrid, "ask", stored.ask)
    assert from_pool(stored.server, [1], QUICK) == 3.0


def test_a_hit_of_a_part_does_not_count(stand_in: StreamingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(stand_in, loaded=QUICK.hit_tokens // 2)
    monkeypatch.setattr(hybrid, "ask", stored.ask)
    monkeypatch.setattr(hybrid, "_SAVED_S", 0.0)
    with pytest.raises(BenchError, match="0 tokens came from the pool instead of 256"):
        from_pool(stored.server, [1], QUICK)
    monkeypatch.setattr(stored, "asked", 2)
    with pytest.raises(BenchError, match="128 tokens"):
        from_pool(stored.server, [1], QUICK)


def test_the_first_round_does_not_count(stand_in: StreamingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a prompt asked in two rounds; the stand-in streams its answers."""
    monkeypatch.setattr(hybrid, "from_pool", lambda server, prompt, scale: 7.0)
    server = parse_url(stand_in.url, None)
    seconds = measure(server, server, 1000, QUICK, "gemma3", lambda line: None)
    assert {way: len(of) for way, of in seconds.items()} == {NEW: 1, NEW_ALONE: 1, HIT: 1, OWN_HIT: 1}
    prompts = [tuple(body["prompt"]) for body in stand_in.behaviour.asked]
    assert len(prompts) == 6 and len(set(prompts)) == 2


def test_the_servers_take_turns_in_who_is_asked_first_while_neither_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hybrid, "rest", lambda server: asked.append(f"{server} at rest"))
    monkeypatch.setattr(hybrid, "ask", lambda server, prompt: asked.append(server) or 1.0)
    monkeypatch.setattr(hybrid, "from_pool", lambda server, prompt, scale: asked.append(server) or 1.0)
    measure("alone", "ours", 1000, QUICK, "gemma3", lambda line: None)  # type: ignore[arg-type]
    with_pool, without = ["ours at rest", "ours", "ours"], ["ours at rest", "alone", "alone"]
    assert asked == [*with_pool, *without, *without, *with_pool]


def test_a_server_that_does_not_answer_is_an_error(stand_in: StreamingServer) -> None:
    server = parse_url(stand_in.url, None)
    stand_in.behaviour.status = 500
    with pytest.raises(BenchError, match="reset_prefix_cache answered 500"):
        from_pool(server, [1], QUICK)
    with pytest.raises(BenchError, match="did not answer"):
        measure(server, server, 1000, QUICK, "gemma3", lambda line: None)


def test_vllm_alone_is_asked_when_the_other_server_stores_nothing_any_more(
    stand_in: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 20

    def ended(server: Server) -> float:
        nonlocal left
        left = max(0, left - 1)
        return float(left)

    monkeypatch.setattr(hybrid, "_REST_S", 0.05)
    monkeypatch.setattr(hybrid, "ended_saves", ended)
    hybrid.rest(parse_url(stand_in.url, None))
    assert left == 0
    monkeypatch.setattr(hybrid, "_SAVED_S", 0.0)
    left = 20
    with pytest.raises(BenchError, match="stores without end"):
        hybrid.rest(parse_url(stand_in.url, None))


def test_saves_are_counted_over_all_engines_of_a_server(stand_in: StreamingServer) -> None:
    stand_in.behaviour.metrics = "".join(f'{hybrid._SAVES}{{engine="{at}"}} {at + 2}\n' for at in range(2))
    assert hybrid.ended_saves(parse_url(stand_in.url, None)) == 5
