"""Values that several tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from faults import Faults
from harness import PATIENCE_S, Engine

from vllm_plugin.blocks import KVBlocks

Start = Callable[..., Engine]

PROMPT = list(range(1, 101))
"""Six full pages of 16 tokens and 4 tokens more."""

RUNNERS = [
    pytest.param({}, id="v1"),
    pytest.param({"v2_runner": True}, id="v2"),
    pytest.param({"async_scheduling": True}, id="v1-async"),
    pytest.param({"v2_runner": True, "async_scheduling": True, "lazy": True}, id="v2-async-lazy"),
    pytest.param({"v2_runner": True, "async_scheduling": True}, id="v2-async"),
]
"""Any two of their settings are in one of the first four; the last one is run in the long form."""
every_runner = pytest.mark.parametrize("runner", RUNNERS)
"""What `start` and `pair` take for granted in the tests that are marked so."""
steady_runners = pytest.mark.parametrize("runner", [RUNNERS[0], RUNNERS[3]])


FIRST_RUNNER = {"v2_runner": False, "async_scheduling": False, "lazy": False}


def warm_pool(start: Start, *prompts: list[int], max_tokens: int = 3, **settings: object) -> None:
    """Fill the pool with the pages of some prompts, by an engine that is gone afterwards."""
    engine = start(**FIRST_RUNNER | settings)
    engine.check_all(prompts or [PROMPT], max_tokens)
    engine.shut_down()


def warmed(start: Start, **settings: object) -> Engine:
    """An engine over a pool that has the pages of PROMPT."""
    warm_pool(start)
    return start(**settings)


def begin_load(engine: Engine, faults: Faults, max_tokens: int = 3) -> str:
    """A request whose load was planned and submitted; its thread stands in the pool until it is released."""
    faults.hold_reads()
    name = engine.add(PROMPT, max_tokens)
    engine.run(until=faults.reading.is_set)
    return name


def begin_save(engine: Engine, faults: Faults, max_tokens: int = 100) -> str:
    """The same for a save."""
    faults.hold_writes()
    name = engine.add(PROMPT, max_tokens)
    engine.run(until=faults.writing.is_set)
    return name


class Interruption:
    """Copies of pages for the pool stop halfway while `event` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        self.event.set()
        self.times = 0
        save_page = KVBlocks.save_page

        def save_in_halves(blocks: KVBlocks, block_ids: Any, first_token: int, page: Any) -> None:
            save_page(blocks, block_ids, first_token, page)
            if not self.event.is_set():
                self.times += 1
                first_half = page[: len(page) // 2].copy()
                assert self.event.wait(PATIENCE_S)
                save_page(blocks, block_ids, first_token, page)
                page[: len(page) // 2] = first_half

        monkeypatch.setattr(KVBlocks, "save_page", save_in_halves)
