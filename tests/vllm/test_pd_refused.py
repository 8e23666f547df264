"""A request that decode's API server refuses: vLLM says so by one without the prompt, which ends at once."""

from __future__ import annotations

import oracle
import pytest
from cases import Start, every_runner
from pd import PD_ONLY, PROMPT, MakePair
from simulated.raw_peer import deaf
from test_pd_decode import check_prefilled_here

import transfer.fetching


@every_runner
def test_a_request_that_decode_refuses_releases_prefill(pair: MakePair) -> None:
    both = pair({"tp_size": 2})
    answer = both.handed_over(PROMPT)
    both.decode.abort(both.decode.add([0], 1, params=answer))
    both.finish()
    assert not both.failures()
    check_prefilled_here(both.decode, PROMPT, answer)


@every_runner
@pytest.mark.parametrize("differs", ["prompt", "weights"])
def test_a_request_whose_kv_has_another_name_releases_prefill(pair: MakePair, differs: str) -> None:
    both = pair({"tp_size": 2})
    if differs == "weights":
        both.prefill.change_weights()
        both.decode.change_weights()
    answer = both.handed_over(PROMPT)
    prompt = PROMPT if differs == "weights" else [1, *PROMPT]
    both.finish(both.decode.add(prompt, 3, params=answer), computed=len(prompt) + 2)
    assert not both.failures()


@every_runner
def test_a_request_that_is_refused_takes_nothing_from_one_of_the_same_answer(pair: MakePair) -> None:
    both = pair()
    answer = both.handed_over(PROMPT)
    name = both.decode.add(PROMPT, 3, params=answer)
    both.decode.step()
    both.decode.abort(both.decode.add([0], 1, params=answer))
    both.finish(name, computed=1 + 2)


@every_runner
def test_several_prompts_of_one_answer_leave_the_first_its_transfer(pair: MakePair) -> None:
    """A router may hand a request with several prompts on with what prefill answered: with the first one's answer."""
    both = pair()
    answer = both.handed_over(PROMPT)
    first = both.decode.add(PROMPT, 3, params=answer)
    second = both.decode.add([1, *PROMPT], 3, params=answer)
    both.finish(first, computed=1 + 2)
    both.decode.check_answer(second, len(PROMPT) + 1 + 2)


@every_runner
def test_a_request_that_is_refused_twice_keeps_nobody_waiting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such requests have the client's own id; the prefill instance does not answer."""
    monkeypatch.setattr(transfer.fetching, "_CONNECT_S", 0.3)
    engine = start(extra=PD_ONLY)
    with deaf() as (host, port):
        params = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
        for other in ("first", "second"):
            engine.abort(engine.add([0], 1, params=params | {"transfer_id": "refused"}, name="chat"))
            engine.add(PROMPT, 3, params=params | {"transfer_id": other}, name=other)
            engine.step()
        engine.run()
    assert engine.texts["first"] == engine.texts["second"] == oracle.generate(PROMPT, 3)
    engine.check_at_rest()
