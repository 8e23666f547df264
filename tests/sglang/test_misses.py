"""Tokens of prompts that SGLang asks for: those that came are hits, the others are counted by reason, and add up."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from causes import forget_causes
from controllers import WAIT_S, Rank
from faults import Faults, never
from host_pools import PAGES, axes, mha, model, slots
from instances import keys, server
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins import load_plugins

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.misses import Miss
from mooncake_connector.request_record import RequestRecord
from sglang_backend import BACKEND
from sglang_backend.request_lines import _agrees_on_question
from store_client.testing import namespace

NAMES = keys(PAGES)
TOKENS = 16
"""A page of the host pools here."""


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"mooncake_connector_{name}_total", labels) or 0.0


def counts() -> dict[str, float]:
    figures = {name: value(name) for name in ("queried_tokens", "hit_tokens")}
    return figures | {miss.value: value("miss_tokens", reason=miss.value) for miss in Miss}


@pytest.fixture
def added() -> Callable[[], dict[str, float]]:
    """What was counted since the test began, without `queried_tokens`, which it must add up to."""
    before = counts()

    def since() -> dict[str, float]:
        found = {name: now - before[name] for name, now in counts().items() if now != before[name]}
        assert found.pop("queried_tokens", 0) == sum(found.values())
        return found

    return since


@pytest.fixture
def storage(attach) -> Any:
    host_pool = mha("page_first")
    axes(host_pool)[:] = model(1)
    storage = attach(host_pool, load_deadline_s=40.0, save_deadline_s=40.0)
    assert storage.batch_set_v1(NAMES, slots(list(range(PAGES)))) == [True] * PAGES
    return storage


def prefetch(storage: Any, names: list[str]) -> int:
    """What SGLang does for a prompt: look up, and load what was found."""
    found = storage.batch_exists(names)
    if found:
        storage.batch_get_v1(names[:found], slots(list(range(found))))
    return int(found)


def test_pages_that_came_are_hits_and_those_behind_them_were_never_stored(storage: Any, added: Any) -> None:
    assert prefetch(storage, [*NAMES, *keys(2, "other")]) == PAGES
    assert added() == {"hit_tokens": PAGES * TOKENS, "never_stored": 2 * TOKENS}


def test_pages_that_were_found_and_not_asked_for_are_neither(storage: Any, added: Any) -> None:
    assert storage.batch_exists(NAMES) == PAGES
    assert added() == {}


def test_pages_that_go_before_they_are_loaded(storage: Any, added: Any) -> None:
    found = storage.batch_exists(NAMES)
    assert found == PAGES
    storage._kv.view.own.remove([bytes.fromhex(NAMES[1])])
    storage.batch_get_v1(NAMES, slots(list(range(PAGES))))
    assert added() == {"hit_tokens": TOKENS, "load_failed": (PAGES - 1) * TOKENS}


def test_a_hit_that_is_too_short(attach: Any, storage: Any, added: Any) -> None:
    other = attach(mha("page_first"), min_hit_tokens=(PAGES + 1) * TOKENS)
    assert prefetch(other, [*NAMES, *keys(1, "other")]) == 0
    assert added() == {"below_min_hit": PAGES * TOKENS, "never_stored": TOKENS}
    assert next(iter(other.missed.take())) is Miss.BELOW_MIN_HIT, "of the first page, not of the last one"


def test_metrics_that_fail_cost_no_page(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("injected")

    monkeypatch.setattr("sglang_backend.metrics._metrics", broken)
    assert prefetch(storage, [*NAMES, *keys(1, "other")]) == PAGES
    assert storage.batch_set_v1(keys(1, "other"), slots([0])) == [True]


def test_an_answer_that_does_not_come(faults: Faults, attach: Any, added: Any) -> None:
    storage = attach(mha("page_first"))
    faults.answer = never
    assert prefetch(storage, NAMES) == 0
    assert added() == {"late": PAGES * TOKENS}


def test_a_pool_that_fails_and_is_left_alone_then(faults: Faults, attach: Any, added: Any) -> None:
    storage = attach(mha("page_first"))
    faults.raise_in = {"lookup"}
    assert prefetch(storage, NAMES) == 0
    assert added() == {"unavailable": PAGES * TOKENS}
    faults.raise_in = set()
    storage._movers.loads._paused_until_s = float("inf")
    assert prefetch(storage, NAMES) == 0
    assert added() == {"unavailable": PAGES * TOKENS, "stalled": PAGES * TOKENS}


def test_pages_that_were_cleared_or_evicted(storage: Any, added: Any) -> None:
    view = storage._kv.view
    view.clear()
    assert prefetch(storage, NAMES) == 0
    assert added() == {"cleared": PAGES * TOKENS}
    before = value("evicted_requests")
    assert storage.batch_set_v1(NAMES, slots(list(range(PAGES)))) == [True] * PAGES
    crowd = storage._store.store.space(namespace("crowd"), view.shard)
    others = [bytes.fromhex(name) for name in keys(40, "crowd")]
    crowd.write(others, lambda i, page: page.fill(i), nbytes=2 << 20, parents=[None] * 40, deadline_s=60.0)
    assert prefetch(storage, NAMES) == 0
    assert added() == {"cleared": PAGES * TOKENS, "evicted": PAGES * TOKENS}
    assert value("evicted_requests") == before + 1
    assert value("evicted_reuse_seconds") >= value("evicted_unused_seconds")


def test_a_pool_that_cannot_be_opened(attach: Any, tmp_path: Path, added: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    storage = attach(mha("page_first"), pool=tmp_path)
    assert prefetch(storage, NAMES) == 0
    assert added() == {"unavailable": PAGES * TOKENS}


# The line of a request

PROMPT = [token * 7 % 257 for token in range(5 * 64 + 10)]
WHOLE = PROMPT[:320]
"""Without the page that is not full, which SGLang does not ask for."""


@pytest.fixture
def rank(pool: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Rank]]:
    load_plugins()
    forget_causes()
    caplog.set_level("INFO", logger="mooncake_connector")
    ranks: list[Rank] = []

    def start(*, tp: tuple[int, int] = (0, 1), hosts: int = 1, **extra: Any) -> Rank:
        more = {"nnodes": hosts, "dist_init_addr": "127.0.0.1:1"} if hosts > 1 else {}
        with server("qwen3", tp_size=tp[1], **more):
            device = MHATokenToKVPool(64, 64, torch.bfloat16, 4 // tp[1], 64, 8, "cpu", False)
            host_pool = mha("page_first", layers=(0, 8), heads=4 // tp[1], dim=64, page_tokens=64)
            ranks.append(Rank(device, host_pool, pool, name=BACKEND, tp_rank=tp[0], **extra))
        return ranks[-1]

    yield start
    for one in ranks:
        one.detach()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    said = [record.getMessage() for record in caplog.records]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said if line.startswith("request id=")]


def test_a_miss_and_a_hit_have_a_line(rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> None:
    one = rank(log_requests=True)
    assert one.load(PROMPT)[0] == 0
    one.save(PROMPT[:192], one.host_pool.alloc(192))
    assert one.load(PROMPT)[0] == 192
    missed, hit = lines(caplog)
    assert (missed["id"], missed["prompt_tokens"], missed["hit_tokens"]) == ("request", "320", "0")
    assert (missed["computed_tokens"], missed["miss"]) == ("320", "never_stored")
    assert (hit["hit_tokens"], hit["computed_tokens"], hit["miss"]) == ("192", "128", "never_stored")
    assert float(hit["load_ms"]) > 0 and float(hit["lookup_ms"]) > 0


def kept(one: Rank) -> list[RequestRecord]:
    """What is left in the pool of each request; of those of one id of the last alone."""
    records = map(RequestRecord.decode, one.controller.storage_backend._store.store.noted_requests())
    return [record for record in records if record is not None]


def test_a_miss_and_a_hit_are_left_in_the_pool(rank: Callable[..., Rank]) -> None:
    one = rank(log_requests=True)
    assert one.load(WHOLE)[0] == 0
    (missed,) = kept(one)
    assert (missed.id, missed.page_tokens, missed.prompt_tokens, missed.miss) == ("request", 64, 320, "never_stored")
    assert [run[:3] for run in map(msgspec.to_builtins, missed.runs)] == [[0, 4, "unknown"]]
    assert missed.missed == {"never_stored": 320} and not missed.has_salt
    one.save(PROMPT[:192], one.host_pool.alloc(192))
    assert one.load(WHOLE)[0] == 192
    (hit,) = kept(one)
    assert (hit.hit_tokens, hit.computed_tokens, hit.missed) == (192, 128, {"never_stored": 128})
    assert [run[:3] for run in map(msgspec.to_builtins, hit.runs)] == [[0, 2, "stored"], [3, 4, "unknown"]]
    assert hit.namespace == missed.namespace == one.controller.storage_backend._namespace.digest.hex()


def test_pages_behind_those_of_sglangs_own_and_a_salt(rank: Callable[..., Rank]) -> None:
    one = rank(log_requests=True)
    prompt = RadixKey(array("q", WHOLE), cache_salt="a")
    one.controller.prefetch(CacheRequestHandle("salted", 0), prompt, None, ["00" * 32] * 2, None)
    one.controller.prefetch_hit_queue.get(timeout=WAIT_S)
    (record,) = kept(one)
    assert (record.local_tokens, record.has_salt) == (128, True)
    assert [run[:2] for run in map(msgspec.to_builtins, record.runs)] == [[2, 6]]


def test_a_hit_that_is_shorter_than_sglang_wants_says_so(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    one = rank(log_requests=True)
    one.save(PROMPT[:192], one.host_pool.alloc(192))
    one.controller.prefetch_threshold = 256
    one.controller.prefetch(CacheRequestHandle("request", 0), WHOLE, None, [], None)
    one.controller.prefetch_hit_queue.get(timeout=WAIT_S)
    (record,) = kept(one)
    assert record.missed == {"below_min_hit": 192, "never_stored": 128}
    assert [line["miss"] for line in lines(caplog)] == ["below_min_hit"]


def test_reasons_of_other_threads_are_not_those_of_a_prompt(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """A load of another prompt, or a question of the scheduler, may fail meanwhile."""
    one = rank(log_requests=True)
    backend = one.controller.storage_backend
    look_up = backend.batch_exists

    def interrupted(*args: Any) -> int:
        found = look_up(*args)
        with ThreadPoolExecutor(1) as other:
            other.submit(backend._missed, Miss.LOAD_FAILED, 1).result()
        return int(found)

    backend.batch_exists = interrupted
    assert one.load(WHOLE)[0] == 0
    assert [line["miss"] for line in lines(caplog)] == ["never_stored"]


def test_a_pool_that_cannot_say_what_it_knows_costs_the_record_alone(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise OSError("injected")

    one = rank(log_requests=True)
    one.save(PROMPT[:192], one.host_pool.alloc(192))
    monkeypatch.setattr("store_client.kept.runs_of", broken)
    assert one.load(WHOLE)[0] == 192
    assert len(lines(caplog)) == 1 and kept(one) == []


def test_what_a_scheduler_asks_again_and_again_counts_once_and_has_no_line(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any
) -> None:
    """That of a decode instance, in no request's name, while a request waits for room."""
    one = rank(log_requests=True)
    one.controller.storage_backend.metrics._enabled = True
    for prompt in (WHOLE, WHOLE, [*WHOLE[:64], *WHOLE]):
        operation = PrefetchOperation(CacheRequestHandle("__storage_hit_query__", 0), prompt, None, None)
        assert one.controller._storage_hit_query(operation)[1] == 0
    assert added() == {"never_stored": (5 + 6) * 64}
    assert lines(caplog) == []


def test_a_prompt_that_is_looked_up_again_while_it_waits_counts_once_and_has_one_line(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any
) -> None:
    """SGLang asks again every few steps for what was missing, up to eight times, unless the prompt is the first."""
    one = rank(log_requests=True)
    one.controller.storage_backend.metrics._enabled = True
    other = [token + 1 for token in WHOLE]
    for name, attempt, prompt in [("a", 0, WHOLE), ("b", 0, WHOLE), ("a", 0, WHOLE), ("b", 0, WHOLE), ("a", 1, WHOLE),
                                  ("b", 0, other)]:  # fmt: skip
        one.controller.prefetch(CacheRequestHandle(name, attempt), prompt, None, [], None)
        one.controller.prefetch_hit_queue.get(timeout=WAIT_S)
    assert added() == {"never_stored": 4 * 320}, "a retracted request begins anew; so does another one of that name"
    assert [line["id"] for line in lines(caplog)] == ["a", "b", "a", "b"]
    stats = one.controller.storage_backend._store.store.stats()
    assert stats.missed_tokens == 4 * 320


def test_what_is_found_when_it_is_looked_up_again_has_a_line(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any
) -> None:
    one = rank(log_requests=True)
    one.controller.storage_backend.metrics._enabled = True
    assert one.load(WHOLE)[0] == 0
    one.save(PROMPT[:192], one.host_pool.alloc(192))
    assert one.load(WHOLE)[0] == 192
    assert added() == {"never_stored": 320, "hit_tokens": 192}
    assert [line["hit_tokens"] for line in lines(caplog)] == ["0", "192"]
    assert [record.hit_tokens for record in kept(one)] == [192]


def test_prompts_that_may_be_looked_up_again_are_not_remembered_for_ever(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_backend.request_lines._MOST_ASKED", 2)
    one = rank()
    for number in range(5):
        one.controller.prefetch(CacheRequestHandle(f"{number}", 0), WHOLE, None, [], None)
        one.controller.prefetch_hit_queue.get(timeout=WAIT_S)
    names = [CacheRequestHandle(f"{number}", 0) for number in (3, 4)]
    assert list(one.controller.storage_backend.asked_by) == [hash(name) for name in names], "and not their long names"


def of_two(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, found_pages: int, **options: Any) -> Rank:
    """The first of two ranks, both of which have stored 192 tokens; the other one finds so many pages of them."""
    one, other = (rank(tp=(number, 2), log_requests=True, **options) for number in range(2))
    one.controller.storage_backend.metrics._enabled = True
    for each in (one, other):
        assert each.save(PROMPT[:192], each.host_pool.alloc(192))[0] == 192

    def least(packed: torch.Tensor, *ignored: Any) -> None:
        packed.view(-1)[0].clamp_(max=found_pages * 64)

    monkeypatch.setattr(one.controller, "_all_reduce", least)
    return one


def lose(one: Rank, page: int, heads: tuple[int, int]) -> None:
    """The part of a page that has these heads."""
    backend, names = one.controller.storage_backend, get_storage_hash_str(PROMPT[:192], None, page_size=64)
    space = backend._store.store.space(backend._namespace, Shard(0, 8, *heads))
    space.remove([bytes.fromhex(names[page])])


def test_pages_of_which_another_rank_lacks_its_part_are_missed_for_what_became_of_that(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = of_two(rank, monkeypatch, found_pages=1)
    lose(one, 1, heads=(2, 4))
    assert one.load(WHOLE)[0] == 64
    assert added() == {"hit_tokens": 64, "cleared": 128, "never_stored": 128}
    (line,) = lines(caplog)
    assert (line["hit_tokens"], line["computed_tokens"], line["miss"]) == ("64", "256", "cleared")
    assert [record.missed for record in kept(one)] == [{"cleared": 128, "never_stored": 128}]


@pytest.mark.parametrize("hosts", [1, 2])
def test_pages_that_another_rank_did_not_find_though_they_are_there(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    """Or of which nothing can be seen here, since that rank is on another host: nothing is loaded then."""
    one = of_two(rank, monkeypatch, found_pages=0, hosts=hosts)
    if hosts == 2:
        lose(one, 0, heads=(2, 4))
    for _ in range(2):  # the second time it waits, and asks again
        one.controller.prefetch(CacheRequestHandle("request", 0), WHOLE[:192], None, [], None)
        assert one.controller.prefetch_hit_queue.get(timeout=WAIT_S).storage_hit_count == 0
    assert added() == {"ranks_disagree": 192}
    (line,) = lines(caplog)
    assert (line["hit_tokens"], line["miss"]) == ("0", "ranks_disagree")


def test_a_request_that_is_aborted_while_the_ranks_agree_misses_nothing(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have heard of it, and look up nothing. Nor has it a line, which could not say why it has no hit."""
    one = of_two(rank, monkeypatch, found_pages=0)
    operation = PrefetchOperation(CacheRequestHandle("request", 0), WHOLE[:192], None, [])
    _, found = one.controller._storage_hit_query(operation)
    operation.mark_terminate()
    assert (found, one.controller._sync_prefetch_hit_query(operation, found)) == (192, 0)
    assert added() == {} and lines(caplog) == []


def test_what_a_scheduler_asks_of_all_ranks_is_missed_where_one_lacks_it(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, added: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decode instance, which asks again and again; with a rank that has all nothing is missed."""
    one = of_two(rank, monkeypatch, found_pages=1)
    lose(one, 1, heads=(2, 4))
    least = 64

    def ask(cache: Any, prompt: list[int]) -> int:
        operation = PrefetchOperation(CacheRequestHandle("__storage_hit_query__", 0), prompt, None, None)
        return min(one.controller._storage_hit_query(operation)[1], least)

    cache = SimpleNamespace(cache_controller=one.controller)
    for _ in range(2):
        assert _agrees_on_question(ask, cache, WHOLE) == 64
    assert added() == {"cleared": 128, "never_stored": 128} and lines(caplog) == []
    least = 192
    assert _agrees_on_question(ask, cache, WHOLE[:192]) == 192
    assert _agrees_on_question(lambda cache: 0, cache) == 0, "nothing was asked"
    assert _agrees_on_question(lambda cache: 0, SimpleNamespace(cache_controller=None)) == 0
    assert added() == {"cleared": 128, "never_stored": 128} and "failed" not in caplog.text


def test_a_pipeline_that_loads_nothing_has_one_line_and_no_fault(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang goes through its load there also after a miss."""
    one = rank(log_requests=True)
    operation = PrefetchOperation(CacheRequestHandle("request", 0), WHOLE, None, [])
    operation.hash_value, found = one.controller._storage_hit_query(operation)
    operation.storage_hit_count = one.controller._sync_prefetch_hit_query(operation, found)
    operation.mark_terminate()
    one.controller._page_transfer(operation)
    assert len(lines(caplog)) == 1 and "failed" not in caplog.text


def test_by_default_there_is_none(rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> None:
    one = rank()
    assert one.load(PROMPT)[0] == 0
    assert lines(caplog) == [] and kept(one) == []
