"""Instances that die and bytes that change on their way: decode goes on, with what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import every_runner
from pd import PROMPT, MakePair, decode_params, figures, granted, node_of, run_all
from prometheus_client import CollectorRegistry
from test_surface import prometheus, sample

import transfer.fetching

NUM_TOKENS = len(PROMPT)


@every_runner
@pytest.mark.parametrize("computed", [0, 32])
def test_a_prefill_instance_that_dies_under_a_transfer(pair: MakePair, computed: int) -> None:
    """Its processes are gone, so its listeners refuse: nobody waits for a lease."""
    both = pair({"max_num_batched_tokens": 32}, granularity="layer")
    name = both.add_computed(computed)
    both.prefill.shut_down()
    run_all(both.decode)
    both.decode.check_answer(name)
    assert both.decode.computed(name) == NUM_TOKENS + 2
    assert figures(both.decode)["failures"] == {"fetch_failed": 1}
    both.decode.check_at_rest()


@every_runner
def test_a_decode_instance_that_dies_is_given_up_after_the_lease(pair: MakePair) -> None:
    both = pair(transfer_lease_s=1)
    both.handed_over(PROMPT)
    both.decode.add([1, *PROMPT], 1, params=decode_params(both.prefill, "x"))
    run_all(both.decode, until=lambda: granted(both.prefill))
    both.decode.shut_down()
    both.prefill.finish()
    both.prefill.wait_until_forgotten()


@every_runner
@pytest.mark.parametrize("times", [1, 2])
def test_a_page_spoilt_between_its_arrival_and_the_check(
    pair: MakePair, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: it is sent again. Twice: it is computed."""
    both = pair()
    check: Callable[..., Any] = transfer.fetching._check
    spoilt = []

    def spoil(origin: Any, landed: Any, tables: Any, *rest: Any) -> Any:
        if len(spoilt) < times:
            spoilt.append(landed.attempt)
            both.decode.workers[0].memory[1, tables[0].block_ids[2], 0, 5] ^= np.uint64(1)
        return check(origin, landed, tables, *rest)

    monkeypatch.setattr(transfer.fetching, "_check", spoil)
    name = both.ask(PROMPT)
    assert spoilt == list(range(times))
    assert both.decode.computed(name) == (1 if times == 1 else NUM_TOKENS) + 2
    assert figures(both.decode).get("failures", {}) == ({} if times == 1 else {"fetch_failed": 1})
    both.check_at_rest()


def test_closing_an_instance_that_has_visitors_is_quiet(pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    both = pair()
    both.ask(PROMPT)
    assert node_of(both.decode)._fetching._links
    both.prefill.shut_down()
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelname == "ERROR"]


# Figures


def test_figures_of_both_sides(pair: MakePair) -> None:
    both = pair()
    both.ask(PROMPT)
    nbytes = NUM_TOKENS + (-NUM_TOKENS % 16)
    nbytes *= 2 * 2 * 8
    sent, fetched = figures(both.prefill), figures(both.decode)
    assert (sent["sends"], sent["send_bytes"], sent["transports"]) == (1, nbytes, {"cma": nbytes})
    assert (fetched["fetches"], fetched["fetch_bytes"], fetched["fetched_tokens"]) == (1, nbytes, NUM_TOKENS)
    assert sent["send_seconds"] > 0 and fetched["fetch_seconds"] > 0
    assert "fetches" not in sent and "sends" not in fetched


def test_figures_reach_prometheus(pair: MakePair) -> None:
    both, registry = pair(), CollectorRegistry()
    both.ask(PROMPT)
    both.decode.add([1, *PROMPT], 1, params=decode_params(both.prefill, "x") | {"remote_engine_id": "gone"})
    both.run()
    metrics = prometheus(both.decode, registry)
    for index, engine in enumerate(both.both):
        metrics.observe(figures(engine), index)
    assert sample(registry, "fetched_tokens", "1") == NUM_TOKENS
    assert sample(registry, "sends", "0") == 1
    assert sample(registry, "transport_bytes", "0", transport="cma") == 96 * 2 * 2 * 8
    assert sample(registry, "failures", "1", cause="fetch_failed") == 1


def test_the_handshake_has_all_ranks_in_order(pair: MakePair) -> None:
    both = pair({"tp_size": 2, "pp_size": 2})
    cards = both.prefill.pd._cards
    shards = [card.layout.sections[0].shard for card in cards]
    assert [(shard.layer_start, shard.head_start) for shard in shards] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({card.port for card in cards}) == len({card.instance for card in cards}) == 4


def test_a_rank_without_a_node_turns_transfers_off(pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    both = pair()
    both.prefill.pd._directory = None
    both.prefill.pd.set_ranks({})
    name = both.prefill.add(PROMPT, 1, params={"do_remote_decode": True})
    run_all(both.prefill)
    assert both.prefill.answers[name] is None
    assert "KV transfers are off: 0 of 1 ranks could set them up" in caplog.text
    both.prefill.check_at_rest()
