"""Models with several KV-cache groups over a folder that answers late, never or wrongly: what they say stays right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bad_folder import MOODS, BadFolder
from cases import steady_runners
from hosts import Host, client, report
from pd import figures
from simulated.waiting import wait_for
from test_hybrid_tiers import PROMPT, every_mix, other, share, tail


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadFolder]:
    bad = BadFolder(monkeypatch)
    yield bad
    bad.release()


@pytest.mark.parametrize("mood", MOODS)
@every_mix
def test_a_folder_that_fails_or_lies_costs_no_answer(
    host: Host, folder: BadFolder, mix: str, mood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(host, mix)
    monkeypatch.setattr("store_client.jobs._HEARING_S", 0.5)
    engine = other(host, mix)
    folder.mood = lambda: mood
    prompt = [*PROMPT, *tail(50)]  # of which the folder has a part
    engine.check(prompt, 20)
    assert folder.struck[mood] > 0
    counted = figures(engine)
    assert sum(counted["miss_tokens"].values()) + counted.get("hit_tokens", 0) == counted["queried_tokens"]
    if mood in ("gives_others", "mixes_seals"):
        assert report(engine)["corrupt_pages"] > 0 and "hit_tokens" not in counted
    folder.mood = lambda: ""
    engine.check(prompt, 20)


@pytest.mark.parametrize("call", ["contains", "read"])
@steady_runners
def test_a_folder_that_never_answers_is_not_waited_for(
    host: Host, folder: BadFolder, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what it has, and not for what it promised."""
    share(host, "window and state")
    engine = other(host, "window and state", extra={"state_budget": 1024, "lookup_wait_s": 1.0, "load_deadline_s": 1.0})
    folder.held = {call}
    engine.check(PROMPT, 20, computed=100 + 19)
    assert folder.waiting.is_set()
    assert "late" in figures(engine)["miss_tokens"], figures(engine)
    folder.release()
    engine.check([*PROMPT, *tail(9)], 20)


@steady_runners
def test_an_agent_that_is_lost_while_it_fetches_costs_no_answer(
    host: Host, folder: BadFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(host, "window and state")
    engine = other(host, "window and state")
    folder.held = {"read"}
    name = engine.add(PROMPT, 20)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: any(load.awaits for load in loads.pending))
    monkeypatch.setattr("store_client.jobs._HEARING_S", 0.5)
    client(engine)._ears.hang_up()
    engine.finish(name, computed=100 + 19)
    folder.release()
    wait_for(lambda: client(engine).ready)
    engine.check([*PROMPT, *tail(9)], 20)


def test_two_requests_for_the_same_pages_share_what_comes_or_does_not(host: Host, folder: BadFolder) -> None:
    share(host, "window and state")
    engine = other(host, "window and state")
    folder.held = {"read"}
    names = [engine.add([*PROMPT, *tail(20)], 5) for _ in range(2)]
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: len({load.plan.req_id for load in loads.pending}) == 2)
    folder.release()
    engine.finish(*names)
    assert figures(engine)["hit_tokens"] == 2 * 96
    assert report(engine)["fetched_pages"] == 6 + 2 + 1, "of full attention, a window, a state; each once"
