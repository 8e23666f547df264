"""Senders and receivers as SGLang's schedulers drive them, on real nodes and SGLang's own bootstrap server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from long_form import LONG
from pd_cases import P_PAGES, Case, hand_over
from pd_instances import Decode, Pair, Prefill, check
from prometheus_client import REGISTRY
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
from simulated.waiting import wait_for

from sglang_backend.metrics import TransferMetrics
from sglang_backend.pd.requests import MooncakeConnectorKVReceiver
from transfer.control.directory import Address
from transfer.transports import cma


@pytest.mark.parametrize("chunks", [(), (1, 2, 1), (4, 0)])
def test_handed_over(pair, chunks):
    hand_over(pair, *chunks)


@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix(pair, prefix):
    hand_over(pair, 2, 2, prefix=prefix)


@pytest.mark.parametrize("moment", Case.MOMENTS)
def test_aborted_at_decode(tidy, moment):
    case = Case(tidy, moment)
    case.decode.abort()
    assert case.decode.until() == KVPoll.Failed
    case.reuse()
    (error,) = case.decode.failed()
    assert "borted" in error.failure_reason and not error.is_from_another_rank
    case.decode.clear()
    if moment in ("made", "admitted"):  # prefill has not heard of it: SGLang's router tells it
        case.prefill.abort()
    ended = case.finish("prefill")
    assert ended == (KVPoll.Success if moment == "arrived" else KVPoll.Failed)
    case.prefill.clear() if ended == KVPoll.Success else case.prefill.failed()
    case.check_reused()


@pytest.mark.parametrize("moment", Case.MOMENTS)
def test_aborted_at_prefill(tidy, moment):
    case = Case(tidy, moment)
    case.prefill.abort()
    assert case.prefill.poll() == KVPoll.Failed
    for rank in tidy.prefill.ranks:  # the pages are another request's at once
        rank.fill(5)
    if moment != "made":  # SGLang does not ask for the reason of one that is computing
        assert "Aborted by AbortReq." in case.prefill.failed()[0].failure_reason
    ended = case.finish("decode")
    assert ended == (KVPoll.Success if moment == "arrived" else KVPoll.Failed) or moment == "computed"
    if ended == KVPoll.Success:  # else what was under way may have landed in pages that are nobody's
        assert not any(bool((each == 5).any()) for rank in tidy.decode.ranks for each in rank.kv)
        case.decode.clear()
        return
    case.reuse()
    case.decode.failed()
    case.decode.clear()
    case.check_reused()


@pytest.mark.parametrize("moment", Case.MOMENTS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_given_up_though_healthy(tidy, side, moment):
    """As where another rank failed, or with SGLANG_TEST_DISAGG_FAILURE_PROB."""
    case = Case(tidy, moment)
    (error,) = getattr(case, side).failed()
    assert error.is_from_another_rank
    case.reuse()
    getattr(case, side).clear()
    if side == "decode":
        if moment in ("made", "admitted"):
            case.prefill.abort()
        ended = case.finish("prefill")
        case.prefill.clear() if ended == KVPoll.Success else case.prefill.failed()
        case.check_reused()
    else:
        ended = case.finish("decode")
        case.decode.clear() if ended == KVPoll.Success else case.decode.failed()


def test_aborted_at_decode_while_it_asks_where_prefill_is(tidy, monkeypatch):
    asked, may_answer = MooncakeConnectorKVReceiver._find, threading.Event()

    def find(receiver: MooncakeConnectorKVReceiver, prefill_dp_rank: int) -> Address:
        assert may_answer.wait(120)
        return asked(receiver, prefill_dp_rank)

    monkeypatch.setattr(MooncakeConnectorKVReceiver, "_find", find)
    case = Case(tidy, "admitted")
    case.prefill.compute()
    case.decode.bootstrap(tidy.address)
    case.decode.abort()
    assert case.decode.until() == KVPoll.Failed
    case.decode.failed()
    may_answer.set()
    assert case.prefill.until() == KVPoll.Failed
    assert "Aborted" in case.prefill.failed()[0].failure_reason


@pytest.mark.parametrize("moment", [*Case.MOMENTS[2:], None])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_is_used_again_after_each_end(tidy, side, moment):
    """As after `pause_generation` of the decode instance in mode `retract`: its requests are computed again."""
    case = Case(tidy, moment or "made")
    if moment:
        getattr(case, side).abort()
    case.end()
    for _ in range(2):
        again = Case(tidy, room=case.room)
        assert again.end() == (KVPoll.Success, KVPoll.Success)
        check(again.prefill, again.decode)


def test_a_room_is_used_again_where_the_prefill_instance_was_not_asked_since(tidy):
    """As where both instances are paused, and the decode instance is the first to go on."""
    case = Case(tidy)
    case.go_on("prefill")
    assert case.finish("decode") == KVPoll.Success
    case.decode.clear()
    wait_for(lambda: not any(manager.node._reports.empty() for manager in tidy.prefill.managers))
    again = Case(tidy, room=case.room)
    assert case.prefill.poll() == KVPoll.Success
    case.prefill.clear()
    assert again.end() == (KVPoll.Success, KVPoll.Success)
    check(again.prefill, again.decode)


@pytest.mark.parametrize("moment", Case.MOMENTS[:-2])
def test_the_same_room_twice_at_once_fails_the_second_alone(tidy, moment):
    first = Case(tidy, moment)
    prefill = Prefill(tidy.prefill, tidy.address, first.room, P_PAGES)
    decode = Decode(tidy.decode, tidy.address, first.room, [0, 4, 6, 10], aux=3)
    decode.parties[0].init(0)
    for second in (prefill, decode):
        assert second.poll() == KVPoll.Failed
        assert f"bootstrap_room {first.room} is in use" in second.failed()[0].failure_reason
        second.abort()
        second.clear()
    assert first.end() == (KVPoll.Success, KVPoll.Success)
    check(first.prefill, first.decode)


def test_nothing_grows_over_many_requests_of_all_endings(tidy):
    for number in range(1000 if LONG else 100):
        case = Case(tidy, Case.MOMENTS[number % len(Case.MOMENTS)])
        ending = ("abort decode", "abort prefill", "fail decode", "fail prefill", "end")[number % 5]
        first, _, side = ending.partition(" ")
        if first == "abort":
            getattr(case, side).abort()
        elif first == "fail":
            getattr(case, side).failed()
        else:
            assert case.end() == (KVPoll.Success, KVPoll.Success)
            continue
        for request in (case.decode, case.prefill):  # the router tells both
            request.abort()
            request.until()
            request.failed()
            request.clear()


class HeldCopy:
    """The first copy into the decode instance's pages is under way, and stays so until `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._ended = threading.Event(), threading.Event()
        read_process = cma.read_process

        def held(*args: object) -> int:
            self.begun.set()
            assert self._ended.wait(120)
            return read_process(*args)

        monkeypatch.setattr(cma, "read_process", held)

    def end(self) -> None:
        self._ended.set()


class TransferQueue(DecodeTransferQueue):
    """SGLang's own, with the decode request of a case, of which another rank says that it failed."""

    enable_staging, enable_deferred_kv_release, deferred_kv_release_timeout = False, True, 600.0
    gloo_group, tp_rank = None, 0

    def __init__(self, case: Case) -> None:
        self.scheduler = SimpleNamespace(
            enable_decode_hicache=False,
            output_streamer=SimpleNamespace(stream_output=lambda *args: None),
            metrics_reporter=SimpleNamespace(enable_metrics=False),
        )
        self.metadata_buffers = case.pair.decode.ranks[0].aux
        self.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda row: None)
        req = SimpleNamespace(rid="r", bootstrap_room=case.room, return_logprob=False)
        self.queue = [DecodeRequest(req, case.decode.parties[0], metadata_buffer_index=case.decode.aux)]
        self._deferred_releases: list[Any] = []
        self.released = False

    def _poll_with_metadata_gate(self) -> list[int]:
        return [KVPoll.Failed]

    def _clean_hicache_prefetch_resources(self, request: DecodeRequest) -> None:
        pass

    def _release_request(self, request: DecodeRequest) -> None:
        self.released = True


class TestACopyUnderWay:
    @pytest.fixture
    def case(self, tidy: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
        case = Case(tidy, "allocated")
        self.copy = HeldCopy(monkeypatch)
        case.go_on("prefill")
        assert self.copy.begun.wait(120)
        yield case
        self.copy.end()
        monkeypatch.undo()
        assert case.prefill.until() == KVPoll.Failed
        case.prefill.failed()
        case.check_reused()

    def test_an_abort_is_told_when_nothing_writes_any_more(self, case):
        case.decode.abort()
        assert {case.decode.poll() for _ in range(50)} == {KVPoll.Transferring}
        self.copy.end()
        assert case.decode.until() == KVPoll.Failed
        case.reuse()
        case.decode.failed()

    def test_after_a_failure_of_another_rank_sglang_goes_on_and_holds_the_pages(self, case, monkeypatch):
        """With its own queue: it neither waits, nor gives the pages to others, before nothing writes to them."""
        monkeypatch.setattr("sglang.srt.disaggregation.decode.all_reduce_flags", lambda flags, **_: flags)
        queue = TransferQueue(case)
        assert queue.pop_transferred() == [] == queue.queue
        for _ in range(50):
            queue.resolve_deferred_releases()
        assert not queue.released and queue.has_pending_deferred_releases()
        self.copy.end()
        wait_for(lambda: queue.resolve_deferred_releases() or queue.released)
        case.reuse()

    def test_a_failure_of_another_rank_is_waited_for_where_sglang_may_not_hold_pages(self, case, monkeypatch):
        monkeypatch.setattr(case.pair.decode.managers[0], "enable_deferred_decode_kv_release", False)
        given_up = threading.Thread(target=case.decode.failed)
        given_up.start()
        wait_for(lambda: case.decode.parties[0].conclude_state == KVPoll.Failed)
        given_up.join(0.2)
        assert given_up.is_alive()
        self.copy.end()
        given_up.join(120)
        case.reuse()


def test_a_hand_over_is_counted_on_both_sides(tidy, monkeypatch):
    for manager in (*tidy.prefill.managers, *tidy.decode.managers):
        monkeypatch.setattr(manager, "metrics", TransferMetrics(enabled=True))

    def counted(what: str) -> list[float]:
        names = [(f"mooncake_connector_{what}_total", {"operation": operation}) for operation in ("send", "fetch")]
        return [REGISTRY.get_sample_value(*name) or 0.0 for name in names]

    before = counted("transfers"), counted("transfer_bytes")
    hand_over(tidy)
    sent, fetched = (after - value for after, value in zip(counted("transfer_bytes"), before[1], strict=True))
    assert counted("transfers") == [value + 1 for value in before[0]] and sent == fetched > 0


def test_nothing_is_written_after_success(tidy):
    case = Case(tidy, "allocated")
    case.go_on("prefill")
    assert case.decode.until() == KVPoll.Success
    case.reuse()
    case.decode.clear()
    assert case.prefill.until() == KVPoll.Success
    case.prefill.clear()
    case.check_reused()
