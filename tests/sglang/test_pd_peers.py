"""Several ranks, and peers that are not there, are not themselves, do not fit, do not answer, or go away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pd_instances
import pytest
from pd_cases import D_PAGES, P_PAGES, Case, hand_over, tidied
from pd_instances import DECODE, PREFILL, Decode, Instance, Pair, Prefill, free_port, start_bootstrap
from sglang.srt.disaggregation.base.conn import KVPoll
from simulated.waiting import wait_for

from sglang_backend.pd.requests import MooncakeConnectorKVReceiver

pytestmark = pytest.mark.usefixtures("pd_settings")


def why(request: Prefill | Decode) -> str:
    """It fails; the reason that SGLang's log and the client get."""
    assert request.until() == KVPoll.Failed
    return request.failed()[0].failure_reason


class TestSeveralRanks:
    SHAPES: ClassVar[dict[str, tuple[int, int, int]]] = {
        "1 to 2": (1, 2, 1), "2 to 1": (2, 1, 1), "2 to 2": (2, 2, 1), "4 to 2": (4, 2, 1),
        "2 stages to 1": (1, 1, 2), "2 stages to 2": (1, 2, 2), "2 stages of 2 to 1": (2, 1, 2),
    }  # fmt: skip
    """TP of prefill and of decode, PP of prefill."""

    @pytest.fixture(scope="class", params=SHAPES)
    def ranks(self, request: pytest.FixtureRequest) -> Iterator[Pair]:
        prefill_tp, decode_tp, prefill_pp = self.SHAPES[request.param]
        made = Pair(prefill_tp, decode_tp, prefill_pp=prefill_pp)
        yield made
        made.close()

    @pytest.mark.parametrize("prefix", [0, 2])
    def test_heads_go_where_they_belong(self, ranks, prefix):
        with tidied(ranks):
            hand_over(ranks, 1, 3, prefix=prefix)

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @pytest.mark.parametrize("moment", ["found", "allocated", "computed"])
    def test_one_rank_fails_and_all_end(self, ranks, side, moment):
        with tidied(ranks):
            case = Case(ranks, moment)
            getattr(case, side).parties[0].abort()
            assert getattr(case, side).until() == KVPoll.Failed
            getattr(case, side).failed()
            case.reuse()
            other = "decode" if side == "prefill" else "prefill"
            if case.finish(other) == KVPoll.Failed:
                getattr(case, other).failed()
            getattr(case, other).clear()
            if side == "decode":
                case.check_reused()


class TestPipelinesThatAreRefused:
    def test_on_a_decode_instance(self):
        with pytest.raises(ValueError, match=r"--pp-size above 1 on a decode instance.*unset it"):
            Instance(DECODE, pp=2)

    @pytest.mark.parametrize("described", [{"state_types": ["swa"]}, {"num_draft_entries": 2}], ids=str)
    def test_with_memory_of_which_nothing_says_what_layer_it_is_of(self, monkeypatch, described):
        monkeypatch.setattr(pd_instances, "kv_args", lambda *_: SimpleNamespace(
            **{"state_types": [], "num_draft_entries": 0, **described}
        ))  # fmt: skip
        with pytest.raises(ValueError, match="with state beside its KV, or with a draft model"):
            Instance(PREFILL, pp=2)


class TestTheBootstrapServer:
    def test_nobody_listens(self, pair):
        address = f"127.0.0.1:{free_port()}"
        decode = Decode(pair.decode, address, pair.room(), D_PAGES)
        assert not pair.decode.managers[0].try_ensure_parallel_info(address)
        assert decode.poll() == KVPoll.Bootstrapping
        decode.abort()  # as SGLang does after some attempts
        assert address in why(decode)

    def test_it_hangs_and_others_are_served(self, pair):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            hung = [Decode(pair.decode, address, pair.room(), D_PAGES) for _ in range(20)]
            for decode in hung:
                assert not pair.decode.managers[0].try_ensure_parallel_info(address)
                decode.parties[0].init(0)
            hand_over(pair)
            assert {decode.poll() for decode in hung} <= {KVPoll.Bootstrapping, KVPoll.Failed}
        assert all("does not say where its ranks are" in why(decode) for decode in hung)

    def test_it_says_a_byte_now_and_then(self, pair, monkeypatch):
        monkeypatch.setattr("sglang_backend.pd.requests._ANSWERED_WITHIN_S", -1.0)
        monkeypatch.setattr(pair.decode.managers[0].asking, "ask", lambda address, what, find: Future())
        decode = Decode(pair.decode, pair.address, pair.room(), D_PAGES)
        decode.parties[0].init(0)
        assert "did not answer" in why(decode)

    def test_servers_that_never_answer_are_so_many_and_cost_the_scheduler_one_wait(self, pair, monkeypatch):
        hand_over(pair)
        manager, waits = pair.decode.managers[0], []
        monkeypatch.setattr(manager, "_patient_from_s", 0.0)
        monkeypatch.setattr(
            "sglang_backend.pd.manager.wait", lambda asked, limit_s: waits.append(asked) or wait(asked, 0)
        )
        is_over = threading.Event()
        monkeypatch.setattr(type(manager), "_find_info", lambda self, address: is_over.wait(60) and None)
        try:
            assert not any(manager.try_ensure_parallel_info(f"127.0.0.3:{port}") for port in range(1, 65))
            assert len(waits) == 1
            refused = manager.asking.ask("127.0.0.3:65", "65", lambda: None)
            assert "64 others have not answered" in str(refused.exception(0))
            hand_over(pair)  # its bootstrap server has answered before
        finally:
            is_over.set()

    def test_a_host_says_a_byte_now_and_then_to_many_and_others_are_served(self, pair):
        with socket.create_server(("127.0.0.2", 0)) as slow:
            address = f"127.0.0.2:{slow.getsockname()[1]}"
            is_over = threading.Event()

            def trickle() -> None:
                taken = []
                while not is_over.wait(0.2):
                    slow.setblocking(False)
                    with suppress(BlockingIOError):
                        taken.append(slow.accept()[0])
                    for each in taken:
                        with suppress(OSError):
                            each.sendall(b"HTTP/1.1 200 OK" if each is taken[-1] else b"x")

            trickling = threading.Thread(target=trickle)
            trickling.start()
            held = [Decode(pair.decode, address, pair.room(), D_PAGES) for _ in range(20)]
            for rank, decode in enumerate(held):
                decode.parties[0].init(rank)
            hand_over(pair)
            assert {decode.poll() for decode in held} == {KVPoll.Bootstrapping}
            for decode in held:
                decode.abort()
                assert "Aborted" in why(decode)
            is_over.set()
            trickling.join()

    @pytest.mark.parametrize(
        "row",
        [None, [], {}, {"rank_ip": "127.0.0.1"}, {"rank_port": 1}, {"rank_ip": "127.0.0.1", "rank_port": "many"},
         {"rank_ip": None, "rank_port": None}, "nonsense"],
        ids=str,
    )  # fmt: skip
    def test_it_answers_with_nonsense(self, pair, monkeypatch, row):
        assert pair.address in self.fails_with(pair, monkeypatch, row)

    @pytest.mark.parametrize("port", [-1, 0, 1 << 16, 1 << 40])
    @pytest.mark.parametrize("host", ["127.0.0.1", "", "nobody.invalid", "192.0.2.1"])
    def test_it_names_a_place_that_is_none_of_ours(self, pair, monkeypatch, host, port):
        assert self.fails_with(pair, monkeypatch, {"rank_ip": host, "rank_port": port})

    def test_it_names_a_port_where_nobody_listens(self, pair, monkeypatch):
        assert self.fails_with(pair, monkeypatch, {"rank_ip": "127.0.0.1", "rank_port": free_port()})

    def test_it_names_a_port_where_another_program_answers(self, pair, monkeypatch):
        with socket.create_server(("127.0.0.1", 0)) as other:
            row = {"rank_ip": "127.0.0.1", "rank_port": other.getsockname()[1]}
            assert self.fails_with(pair, monkeypatch, row)

    def test_it_names_an_instance_of_another_model(self, pair, monkeypatch):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_MODEL_ID", "another")
        other = Instance(DECODE)
        host, port = other.managers[0].home
        assert self.fails_with(pair, monkeypatch, {"rank_ip": host, "rank_port": port})
        other.close()

    def fails_with(self, pair: Pair, monkeypatch: pytest.MonkeyPatch, row: Any) -> str:
        with tidied(pair), monkeypatch.context() as patch:
            patch.setattr(MooncakeConnectorKVReceiver, "_get_bootstrap_info_from_server", lambda *_: row)
            decode = Decode(pair.decode, pair.address, pair.room(), D_PAGES)
            decode.bootstrap(pair.address)
            return why(decode)

    def test_a_prefill_instance_that_does_not_fit_fails_its_requests_with_both_values(self, pair):
        other = Pair.__new__(Pair)
        other.port = free_port()
        other.bootstrap = start_bootstrap(other.port)
        other.prefill = Instance(PREFILL, 1, other.port, page=8)
        other.address = f"127.0.0.1:{other.port}"
        decode = Decode(pair.decode, other.address, pair.room(), D_PAGES)
        wait_for(lambda: pair.decode.managers[0].try_ensure_parallel_info(other.address) or decode.poll() == 0)
        reason = why(decode)
        assert "page_size=8" in reason and "page_size=4" in reason
        hand_over(pair)
        other.prefill.close()
        other.bootstrap.close()


class TestWhoNeverComes:
    def test_decode(self, monkeypatch):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_LEASE_S", "1")
        pair = Pair()
        prefill = Prefill(pair.prefill, pair.address, 1, P_PAGES)
        prefill.run(2, 2)
        assert "no consumer asked for it for 1 s" in why(prefill)
        pair.close()

    def test_prefill(self, monkeypatch):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_DEADLINE_S", "5")
        pair = Pair()
        decode = Decode(pair.decode, pair.address, 1, D_PAGES)
        decode.run(pair.address)
        assert "nothing arrived for 5 s" in why(decode)
        pair.close()


@pytest.mark.parametrize("moment", ["found", "computing", "allocated"])
def test_a_prefill_instance_goes_away_and_another_one_takes_its_place(moment):
    pair = Pair()
    case = Case(pair, moment)
    pair.prefill.close()
    assert why(case.decode)
    case.reuse()
    case.prefill.abort()
    case.check_reused()
    pair.prefill = Instance(PREFILL, 1, pair.port)
    hand_over(pair)
    pair.close()


def test_a_decode_instance_goes_away_and_another_one_takes_its_place():
    pair = Pair()
    case = Case(pair, "allocated")
    pair.decode.close()
    case.go_on("prefill")
    assert why(case.prefill)
    pair.decode = Instance(DECODE)
    hand_over(pair)
    pair.close()
