"""The engine outlives its pool: deleted, locked by a stopped process, full, corrupt. Requests are recomputed."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from pathlib import Path

import oracle
import pytest
from cases import PROMPT, Start, steady_runners, warm_pool
from harness import Engine
from lock_holder import stopped_holder

OTHER = list(range(200, 300))


def warnings(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """Our warnings, by text."""
    return Counter(
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("mooncake_connector") and record.levelno >= logging.WARNING
    )


def spoil_pages(pool: Path) -> int:
    """Flip a bit in every 64 bytes of the arena that are in use: no page keeps its checksum. How many flipped."""
    flipped = 0
    for arena in pool.rglob("arena"):
        content = bytearray(arena.read_bytes())
        for at in range(0, len(content), 64):
            if any(content[at : at + 64]):
                content[at] ^= 1
                flipped += 1
        with arena.open("r+b") as file:
            file.write(content)
    return flipped


@steady_runners
def test_checksum_errors_on_every_page(start: Start, pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[*PROMPT[:size], *range(300, 340)] for size in range(16, 97, 16)]
    warm_pool(start, *prompts)
    engine = start(prefix_caching=False)
    assert spoil_pages(pool) > 0
    caplog.clear()
    for number, prompt in enumerate(prompts):
        name = f"again{number}"
        assert engine.ask(prompt, 5, name=name) == oracle.generate(prompt, 5)
        assert engine.reasons[name] == "length"
    engine.check_at_rest()
    assert warnings(caplog), "nobody was told"
    assert max(warnings(caplog).values()) == 1


@steady_runners
def test_the_pool_is_deleted_under_a_running_engine(start: Start, pool: Path) -> None:
    engine = start(prefix_caching=False)
    engine.ask(PROMPT)
    shutil.rmtree(pool)
    for number in range(4):
        prompt = [*PROMPT, *OTHER[: number * 20]]
        assert engine.ask(prompt, 20) == oracle.generate(prompt, 20)
    engine.check_at_rest()


@steady_runners
def test_the_pool_is_full_of_one_request_and_smaller_than_the_next(start: Start) -> None:
    """1 MiB of pages of 512 bytes: old pages leave, and what does not fit is not stored."""
    engine = start(extra={"capacity": "1MiB"}, num_blocks=128)
    for number in range(6):
        prompt = [(token * 7 + number * 13) % oracle.VOCAB for token in range(1000)]
        assert engine.ask(prompt, 3) == oracle.generate(prompt, 3)
    engine.check_at_rest()


def test_the_pool_folder_cannot_be_made(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says why, however many requests there are; tried again from time to time."""
    (tmp_path / "file").write_text("in the way")
    engine = start(extra={"pool": str(tmp_path / "file" / "pool")})
    engine.check_all([PROMPT, OTHER], 5)
    said = warnings(caplog)
    assert len(said) == 1
    assert str(tmp_path / "file") in next(iter(said))


@steady_runners
def test_the_lock_is_held_by_a_stopped_process(
    start: Start, pool: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads take no lock, so they go on. Saves are dropped after a short wait."""
    engine = start(prefix_caching=False, num_blocks=32)
    engine.ask(PROMPT)
    monkeypatch.setattr("store_client.jobs._LOCK_WAIT_S", 0.05)
    with stopped_holder(pool):
        caplog.clear()
        engine.check(PROMPT, computed=4 + 2)
        engine.check_all([OTHER, PROMPT], 60)
        assert not any(engine.pages(OTHER))
        assert max(warnings(caplog).values()) == 1


def test_after_a_stuck_lock_saves_pause_and_then_go_on(start: Start, faults, monkeypatch) -> None:
    """Each would wait in vain; the next ones are dropped at once for a while."""
    monkeypatch.setattr("store_client.jobs._LOCK_WAIT_S", 0.0)
    engine = start()
    faults.refuse_writes = True
    engine.ask(PROMPT)
    faults.refuse_writes = False
    written = faults.calls["write"]
    engine.ask(OTHER)
    assert faults.calls["write"] == written
    engine.workers[0].connector._worker.prefix._saver._mover._paused_until_s = time.monotonic()
    engine.ask([*OTHER, *PROMPT], 20)
    assert any(engine.pages([*OTHER, *PROMPT]))


def test_a_store_that_closes_under_the_engine(start: Start) -> None:
    engine: Engine = start(prefix_caching=False)
    engine.ask(PROMPT)
    for side in (engine.prefix, engine.workers[0].prefix):
        side._store.store.close()
    engine.check([*PROMPT, *OTHER], 20)
