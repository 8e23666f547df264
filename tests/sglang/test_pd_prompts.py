"""Requests of one bootstrap room: what the prompt of each is, and that none gets the KV of another's."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pd_cases import D_PAGES, P_PAGES, fill
from pd_instances import DECODE, Decode, Instance, Pair, Prefill, check
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams

import sglang_backend
from mooncake_connector.checks import Verdict
from sglang_backend import doctor
from sglang_backend.pd import prompts
from sglang_backend.targets import in_force, misfits


def request(tokens: list[int], **fields: Any) -> Req:
    made = Req("r", "", array("q", tokens), SamplingParams(), **fields)
    made.bootstrap_host, made.bootstrap_port, made.bootstrap_room = "h", 1, 7
    return made


def retracted(prompt: list[int], generated: list[int]) -> Req:
    """As `pause_generation` leaves it: without the last token, which decode computes again itself."""
    made = request(prompt)
    made.output_ids = array("q", generated[:-1])
    made.pd_rebootstrap_in_progress = True
    return made


class TestTheDigest:
    def test_it_is_of_the_tokens_whatever_holds_them(self):
        found = prompts.digest(request([1, 2, 3]))
        as_list = SimpleNamespace(**vars(request([1, 2, 3])))
        as_list.origin_input_ids = [1, 2, 3]
        assert len(found) == 32 and found == prompts.digest(as_list)
        others = [[1, 2], [1, 2, 4], [2, 1, 3], [1, 2, 3, 3], []]
        assert found not in [prompts.digest(request(other)) for other in others]

    def test_what_was_generated_before_a_retraction_is_computed_by_prefill_as_well(self):
        again = retracted([1, 2], [3, 4])
        payload = again.build_rebootstrap_payload()
        assert (
            prompts.digest(again) == prompts.digest(request(payload["input_ids"])) == prompts.digest(request([1, 2, 3]))
        )

    def test_what_was_generated_otherwise_is_not(self):
        """Prefill has the first token in it, if the batch was quick."""
        made = request([1, 2])
        made.output_ids = array("q", [3])
        assert prompts.digest(made) == prompts.digest(request([1, 2]))

    @pytest.mark.parametrize("field", ["input_embeds", "positional_embed_overrides", "multimodal_inputs"])
    def test_there_is_none_where_tokens_are_not_all(self, field):
        made = request([1, 2])
        setattr(made, field, [[0.5]])
        assert prompts.digest(made) == b""

    def test_adapters_and_salts_are_not_in_it(self):
        """An adapter's id is drawn by each instance; the request of a retraction does not name it at all."""
        assert prompts.digest(request([1, 2], lora_id="a", extra_key="e", cache_salt="s")) == prompts.digest(
            request([1, 2])
        )

    def test_a_request_of_another_shape_has_none(self):
        assert prompts.digest(SimpleNamespace()) == b""


class TestTheHooks:
    @pytest.fixture(autouse=True)
    def _plugins(self) -> None:
        load_plugins()

    def test_they_fit_and_are_in_force(self):
        assert misfits(prompts.TARGETS) == [] and in_force(prompts.TARGETS)

    def test_sglangs_queues_have_the_request_at_hand_while_they_make_a_sender_or_receiver(self, monkeypatch):
        seen: list[bytes] = []

        def made(*args: object, **more: object) -> SimpleNamespace:
            seen.append(prompts.current())
            return SimpleNamespace()

        for where in (PrefillBootstrapQueue.create_sender, DecodePreallocQueue._create_receiver_and_enqueue):
            sglangs = where.__wrapped__.__globals__ if hasattr(where, "__wrapped__") else where.__globals__
            monkeypatch.setitem(sglangs, "get_kv_class", lambda backend, kind: made)
        prefill = SimpleNamespace(
            _check_if_req_exceed_kv_capacity=lambda req: False, _process_req=lambda req: None, bootstrap_port=1,
            kv_manager=None, transfer_backend=None,
        )  # fmt: skip
        asked = request([1, 2, 3])
        assert PrefillBootstrapQueue.create_sender(prefill, asked, 1)
        decode = SimpleNamespace(transfer_backend=None, kv_manager=None, queue=[])
        DecodePreallocQueue._create_receiver_and_enqueue(decode, asked, is_rebootstrap=True)
        assert seen == [prompts.digest(asked)] * 2 and decode.queue[0].is_rebootstrap
        assert prompts.current() == b""

    def test_nothing_is_at_hand_after_a_failure(self):
        def fail(queue: object, req: Req) -> None:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError):
            prompts.telling(fail, None, request([1]))
        assert prompts.current() == b""

    @pytest.mark.parametrize("index", range(len(prompts.TARGETS)))
    def test_without_one_of_them_nothing_is_compared_and_that_is_said(self, monkeypatch, caplog, index):
        target = prompts.TARGETS[index]
        gone = replace(target, path=target.path + "_of_old")
        monkeypatch.setattr(prompts, "TARGETS", (*prompts.TARGETS[:index], gone, *prompts.TARGETS[index + 1 :]))
        monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
        sglang_backend.register()
        (record,) = caplog.records
        assert gone.path in record.getMessage() and "do not compare prompts" in record.getMessage()
        assert not any(target.path in HookRegistry._hooks for target in prompts.TARGETS)
        (found,) = [check for check in doctor.run() if check.name == "PD prompts"]
        assert found.status is Verdict.WARNING and gone.path in found.detail


def of(tokens: list[int], make: Any, *args: Any) -> Any:
    """What SGLang makes for a request of these tokens."""
    return prompts.telling(lambda queue, req: make(*args), None, request(tokens))


def sides(pair: Pair, prefill: list[int], decode: list[int]) -> tuple[Prefill, Decode]:
    fill(pair)
    room = pair.room()
    prefilled = of(prefill, Prefill, pair.prefill, pair.address, room, P_PAGES)
    return prefilled, of(decode, Decode, pair.decode, pair.address, room, D_PAGES)


def test_requests_of_one_prompt_are_handed_over(tidy):
    prefill, decode = sides(tidy, [1, 2], [1, 2])
    prefill.run()
    decode.run(tidy.address)
    assert decode.until() == KVPoll.Success
    check(prefill, decode)
    decode.clear()
    assert prefill.until() == KVPoll.Success
    prefill.clear()


@pytest.mark.parametrize("asked_first", [False, True])
def test_a_request_of_another_prompt_ends_with_an_error_that_says_why(tidy, asked_first):
    room = tidy.room()
    fill(tidy)
    decode = of([1, 3], Decode, tidy.decode, tidy.address, room, D_PAGES)
    if asked_first:
        decode.run(tidy.address)
    prefill = of([1, 2], Prefill, tidy.prefill, tidy.address, room, P_PAGES)
    prefill.run()
    if not asked_first:
        decode.bootstrap(tidy.address)
    assert decode.until() == KVPoll.Failed
    assert all(bool((each == -7).all()) for rank in tidy.decode.ranks for each in rank.kv)
    assert "another prompt" in decode.failed()[0].failure_reason
    decode.clear()
    assert prefill.poll() == KVPoll.Transferring  # it is another decode instance's, or the router aborts it
    prefill.abort()
    prefill.failed()


def test_the_right_one_gets_its_kv_though_a_request_of_its_room_asked_first_elsewhere(tidy):
    other = Instance(DECODE)
    try:
        prefill, decode = sides(tidy, [1, 2], [1, 2])
        wrong = of([1, 3], Decode, other, tidy.address, decode.room, D_PAGES)
        wrong.bootstrap(tidy.address)  # and is refused, before it has pages or after
        prefill.run()
        assert wrong.until() == KVPoll.Failed
        decode.run(tidy.address)
        assert decode.until() == KVPoll.Success
        check(prefill, decode)
        decode.clear()
        assert prefill.until() == KVPoll.Success
        prefill.clear()
    finally:
        other.close()
