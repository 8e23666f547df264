"""The comparison of prefill and decode without vLLM: its rows, and what it sends to a server."""

import http.server
import json
import threading

import pytest

from bench.peers.pd import ALONE, CONCURRENT, SEQUENTIAL, PDScale, better, pd_rows
from bench.peers.pd_client import Instance
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.processes import free_ports

OURS = {ALONE: [1.0, 9.0, 1.2], SEQUENTIAL: [1.3, 1.4, 1.5], CONCURRENT: [1.25, 1.25, 9.0]}


def test_what_is_added_is_held_against_what_the_peer_adds():
    rows = pd_rows(OURS, {ALONE: [2.0], SEQUENTIAL: [2.2]}, PDScale())
    assert [round(row.value) for row in rows] == [200, 50, 1400, 1250]
    assert [round(row.peer) for row in rows[:2]] == [200, 200]
    assert [row.ok for row in rows] == [True, True, None, None]
    rows = pd_rows(OURS, {ALONE: [2.0], SEQUENTIAL: [2.09]}, PDScale())
    assert [row.ok for row in rows[:2]] == [False, False]


def test_the_peer_is_its_better_setting():
    slow, quick = {ALONE: [1.0], SEQUENTIAL: [9.0]}, {ALONE: [5.0], SEQUENTIAL: [5.1]}
    assert better([slow, quick]) == better([quick, slow]) == quick
    assert better([slow]) == slow and better([]) == {}


def test_without_the_peer_nothing_is_judged():
    rows = pd_rows(OURS, {}, PDScale())
    assert [(round(row.value), row.peer, row.ok) for row in rows[:2]] == [(200, None, None), (50, None, None)]
    assert [round(row.limit) for row in rows[2:]] == [1200, 1200]


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does, and keeps what it was asked."""

    asked: list[dict] = []  # noqa: RUF012
    status = 200

    def do_GET(self):
        lines = [
            'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 700.0',
            'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 9.0',
        ]
        self._answer("\n".join(lines).encode() if self.path == "/metrics" else b"")

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(json.dumps({"choices": [{"token_ids": [7, 8]}], "kv_transfer_params": {"from": "P"}}).encode())

    def _answer(self, content: bytes):
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def instance(monkeypatch):
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(Server, "status", 200)
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Instance(server.server_port, transfer_port=0)
        server.shutdown()
        thread.join()


def test_both_parts_of_a_request(instance):
    assert instance.is_healthy() and instance.tokens_from_connector() == 700
    assert instance.prefill([1, 2], {"transfer_id": "x"}) == {"from": "P"}
    assert instance.ask([1, 2], 5, {"from": "P"}) == [7, 8]
    assert instance.ask([1, 2], 5) == [7, 8]
    first, second, third = Server.asked
    hand_over = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
    assert (first["max_tokens"], first["kv_transfer_params"]) == (1, hand_over)
    assert (second["max_tokens"], second["kv_transfer_params"]) == (5, {"from": "P"})
    assert "kv_transfer_params" not in third


def test_a_server_that_fails_is_an_error(instance, monkeypatch):
    monkeypatch.setattr(Server, "status", 500)
    assert not instance.is_healthy()
    with pytest.raises(BenchError, match="answered 500"):
        instance.ask([1], 1)
    with pytest.raises(BenchError, match="did not answer"):
        Instance(free_ports(1)[0], 0).ask([1], 1)
