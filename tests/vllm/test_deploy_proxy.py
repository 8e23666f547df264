"""The built-in router between stand-ins for engines: what each is sent, who is asked instead, and who is left alone.

It is here because httpx and uvicorn come with an engine; no engine is started.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from ipaddress import ip_address
from itertools import chain

import pytest
import yaml
from proxied import BODY, CONCURRENT, LIMIT_S, PARAMS, SGLANG, VLLM, every_way, free_port, wait_until

from mooncake_connector.deploy.bodies import address_of
from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.deploy.render import kubernetes


def test_one_after_the_other_decode_gets_what_prefill_answered(proxied):
    proxy = proxied(*VLLM)
    body = {**BODY, "stream": False, "n": 3, "best_of": 4}
    status, answer = proxy.ask(body, Authorization="Bearer x")
    assert status == 200 and answer["by"].startswith("d")
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    assert prefill == {
        "model": "m", "prompt": "a b", "max_tokens": 1, "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    assert decode == {**body, "kv_transfer_params": PARAMS}
    for one in (*proxy.prefills, *proxy.decodes):
        for headers in one.headers:
            assert headers["authorization"] == "Bearer x" and headers["x-request-id"]
    assert proxy.ask({**BODY, "prompt": ["a", "b"]})[0] == 200
    assert len(proxy.sent(proxy.prefills)) == 1  # its answer is for one prompt
    assert [one for one in proxy.sent(proxy.decodes) if "kv_transfer_params" not in one] == [
        {**BODY, "prompt": ["a", "b"]}
    ]
    assert proxy.ask({**BODY, "prompt": ["a"]})[0] == 200 and len(proxy.sent(proxy.prefills)) == 2


def test_both_at_once_know_each_other_by_name_and_port(proxied):
    proxy = proxied(*CONCURRENT)
    for one in (*proxy.prefills, *proxy.decodes):
        one.waits.clear()
    proxy.ask_at_both()  # prefill has not answered
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    name = prefill["kv_transfer_params"]["transfer_id"]
    assert prefill["max_tokens"] == 1 and decode["max_tokens"] == 7
    port = 1 if proxy.prefills[0].bodies else 2
    assert decode["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name,
        "remote_host": "192.0.2.7", "remote_port": port,
    }  # fmt: skip
    wait_until(lambda: sum(one.left for one in proxy.prefills) == 1, "prefill to be left, whom nobody wants")


def test_a_router_of_pods_starts_before_they_have_addresses(tmp_path):
    file, port = tmp_path / "d.yaml", free_port()
    file.write_text(f"engine: vllm\nmodel: /m\nrouter: {{order: concurrent, port: {port}}}\n")
    text = kubernetes.render(read_deployment(file, for_containers=True), file, "1.2.3")
    deployment = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "python3" and "http://llm-decode-0.llm-decode:8200" in command
    with subprocess.Popen([sys.executable, *command[1:]], stdin=subprocess.DEVNULL) as router:
        try:
            wait_until(lambda: status_of(port, "GET", "/health") == 503, "the router")
            assert status_of(port, "POST", "/v1/completions", json.dumps(BODY).encode()) == 503
        finally:
            router.terminate()


def status_of(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """0 where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def test_instances_are_told_addresses_and_no_names():
    assert asyncio.run(address_of("192.0.2.7")) == "192.0.2.7" and asyncio.run(address_of("::1")) == "::1"
    assert ip_address(asyncio.run(address_of("localhost"))).is_loopback
    assert asyncio.run(address_of("no..name")) == "no..name"


def test_sglang_meets_in_one_room(proxied):
    proxy = proxied(*SGLANG)
    for one in proxy.decodes:
        one.waits.clear()
    proxy.ask_at_both()
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    assert prefill == decode and BODY.items() <= decode.items()
    assert decode["bootstrap_host"] == "127.0.0.1" and 0 <= decode["bootstrap_room"] < 1 << 63
    assert decode["bootstrap_port"] == (1 if proxy.prefills[0].bodies else 2)


def test_sglang_meets_in_another_room_where_decode_is_replaced(proxied):
    proxy = proxied(*SGLANG)
    proxy.decodes[0].status = 503
    assert [proxy.ask()[1]["by"] for _ in range(2)] == ["d1", "d1"]
    rooms = [body["bootstrap_room"] for body in proxy.sent(proxy.decodes)]
    assert len(set(rooms)) == len(rooms) == 3  # KV that was handed over is not handed over again


def test_sglang_has_a_room_and_a_name_for_each_of_several_prompts(proxied):
    proxy = proxied(*SGLANG)
    for one in proxy.decodes:
        one.waits.clear()
    headers = {"Authorization": "Bearer x"}
    connection = proxy.open("POST", "/v1/completions", {**BODY, "prompt": ["a", "b"]}, **headers)
    wait_until(lambda: len(proxy.sent(proxy.decodes)) == 1, "the request at decode")
    (decode,) = proxy.sent(proxy.decodes)
    assert len(set(decode["bootstrap_room"])) == 2 and decode["bootstrap_host"] == ["127.0.0.1"] * 2
    assert len(set(decode["rid"])) == 2
    connection.close()
    for one, other in (proxy.prefills, proxy.decodes):
        aborted = one.aborted, other.aborted
        wait_until(lambda all_of=aborted: sorted(chain(*all_of)) == sorted(decode["rid"]), "an abort of each")
    assert {key for one in (*proxy.prefills, *proxy.decodes) for key in one.abort_keys} == {"Bearer x"}


@every_way
def test_a_stream_is_passed_on_as_it_comes(proxied, way):
    proxy = proxied(*way)
    for one in proxy.decodes:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/chat/completions", {**BODY, "stream": True})
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "text/event-stream"
    assert response.readline().startswith(b"data: d")  # before the engine goes on
    for one in proxy.decodes:
        one.waits.set()
    assert response.read() == b"\ndata: [DONE]\n\n"
    connection.close()


@every_way
def test_a_client_that_leaves_takes_its_request_from_both(proxied, way):
    proxy = proxied(*way)
    engines = [*proxy.prefills, *proxy.decodes]
    waiting = proxy.decodes if way is VLLM else engines
    for one in waiting:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    asked = 1 if way is VLLM else 2
    wait_until(lambda: len(proxy.sent(waiting)) == asked, "the request at the engines")
    connection.close()
    wait_until(lambda: sum(one.left for one in waiting) == asked, "the engines to be left")
    if way is SGLANG:
        (rid,) = {body["rid"] for body in proxy.sent(proxy.decodes)}
        wait_until(lambda: sum(rid in one.aborted for one in proxy.decodes) == 1, "an abort at decode")
        assert sum(rid in one.aborted for one in proxy.prefills) == 1


def test_a_client_that_leaves_during_prefill_is_not_decoded_for(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    wait_until(lambda: len(proxy.sent(proxy.prefills)) == 1, "the request at prefill")
    connection.close()
    wait_until(lambda: sum(one.left for one in proxy.prefills) == 1, "prefill to be left")
    assert proxy.ask.__self__ is proxy and proxy.sent(proxy.decodes) == []


@every_way
def test_who_has_died_is_replaced(proxied, way):
    proxy = proxied(*way)
    proxy.prefills[0].die()
    proxy.decodes[1].die()
    answers = [proxy.ask() for _ in range(6)]
    assert [(status, answer["by"]) for status, answer in answers] == [(200, "d0")] * 6
    if way is VLLM:  # in the others nobody waits for a prefill whose decode has answered
        assert len(proxy.prefills[1].bodies) == 6


@pytest.mark.parametrize("way", [VLLM, CONCURRENT], ids=("sequential", "concurrent"))
def test_without_prefill_vllm_decodes_plainly(proxied, way):
    proxy = proxied(*way)
    for one in proxy.prefills:
        one.die()
    wait_until(
        lambda: proxy.ask()[0] == 200 and "kv_transfer_params" not in proxy.sent(proxy.decodes)[-1], "a plain one"
    )
    assert proxy.is_well()


def test_without_prefill_sglang_cannot_answer(proxied):
    proxy = proxied(*SGLANG)
    for one in proxy.decodes:
        one.waits.clear()  # as they do without a prefill
    for one in proxy.prefills:
        one.die()
    status, answer = proxy.ask()
    assert status == 503 and "no prefill instance answers" in answer["error"]["message"]
    wait_until(lambda: proxy.get("/health")[0] == 503, "the proxy to say so")


@every_way
def test_without_decode_nothing_is_answered(proxied, way):
    proxy = proxied(*way)
    for one in proxy.decodes:
        one.die()
    status, answer = proxy.ask()
    assert status == 503 and "no decode instance answers" in answer["error"]["message"]
    wait_until(lambda: proxy.get("/health")[0] == 503, "the proxy to say so")


def test_a_prefill_that_stops_to_be_healthy_is_not_waited_for(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    wait_until(lambda: len(proxy.sent(proxy.prefills)) == 1, "the request at prefill")
    for one in proxy.prefills:
        one.healthy = False
    assert connection.getresponse().status == 200
    connection.close()
    assert "kv_transfer_params" not in proxy.sent(proxy.decodes)[0]


@every_way
def test_who_is_not_well_for_a_moment_keeps_its_requests(proxied, way):
    proxy = proxied(*way)
    engines = [*proxy.prefills, *proxy.decodes]
    for one in proxy.decodes:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    wait_until(lambda: len(proxy.sent(proxy.decodes)) == 1, "the request at decode")
    for one in engines:
        one.ill_looks = 2
    looks = [one.looks for one in engines]
    wait_until(lambda: all(one.looks > before + 5 for one, before in zip(engines, looks, strict=True)), "looks")
    for one in proxy.decodes:
        one.waits.set()
    assert connection.getresponse().status == 200 and len(proxy.sent(proxy.decodes)) == 1
    connection.close()


@every_way
def test_an_answer_that_is_silent_is_cut_off_and_its_instance_left(proxied, way):
    proxy = proxied(*way, "--silence-deadline-s", "0.5")
    for one in proxy.decodes:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", {**BODY, "stream": True})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: d")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    wait_until(lambda: sum(one.left for one in proxy.decodes) == 1, "decode to be left")
    assert len(proxy.sent(proxy.decodes)) == 1
    if way is SGLANG:
        wait_until(lambda: sum(len(one.aborted) for one in proxy.decodes) == 1, "an abort at decode")
    for one in proxy.decodes:
        one.waits.set()
    assert proxy.ask()[0] == 200


@every_way
def test_an_answer_whose_instance_dies_is_cut_off(proxied, way):
    """Nobody may take it for a whole one, and nobody else is asked: the client has a part of it."""
    proxy = proxied(*way)
    for one in proxy.decodes:
        one.waits.clear()
        one.breaks = True
    connection = proxy.open("POST", "/v1/completions", {**BODY, "stream": True})
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        connection.getresponse().read()
    connection.close()
    assert len(proxy.sent(proxy.decodes)) == 1


def test_what_prefill_refuses_the_client_is_told(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.status = 400
    assert proxy.ask()[0] == 400 and proxy.sent(proxy.decodes) == []


def test_what_prefill_fails_at_decode_does(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.status = 500
    assert proxy.ask()[0] == 200 and len(proxy.sent(proxy.prefills)) == 2
    assert proxy.sent(proxy.decodes) == [BODY]


def test_an_error_of_decode_is_passed_on(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.decodes:
        one.status = 500
    assert proxy.ask()[0] == 500 and len(proxy.sent(proxy.decodes)) == 1


def test_requests_go_round(proxied):
    proxy = proxied(*VLLM)
    for _ in range(6):
        assert proxy.ask()[0] == 200
        assert proxy.get("/v1/models")[0] == 200  # takes nobody's turn
    assert [len(one.bodies) for one in (*proxy.prefills, *proxy.decodes)] == [3, 3, 3, 3]


def test_the_least_loaded_is_chosen(proxied):
    proxy = proxied(*VLLM, "--policy", "least-loaded")
    proxy.decodes[0].waits.clear()
    held = []
    while not proxy.decodes[0].bodies:
        held.append(proxy.open("POST", "/v1/completions", BODY))
        number = len(held)
        wait_until(lambda number=number: len(proxy.sent(proxy.decodes)) == number, "the request at decode")
    others = len(proxy.decodes[1].bodies)
    for _ in range(4):
        assert proxy.ask()[1]["by"] == "d1"
    assert len(proxy.decodes[0].bodies) == 1 and len(proxy.decodes[1].bodies) == others + 4
    proxy.decodes[0].waits.set()
    for connection in held:
        assert connection.getresponse().status == 200
        connection.close()


def test_models_are_those_of_decode_and_the_rest_is_refused(proxied):
    proxy = proxied(*VLLM)
    status, data = proxy.get("/v1/models")
    assert status == 200 and json.loads(data)["data"][0]["id"] in ("d0", "d1")
    assert proxy.get("/v1/nothing")[0] == 404
    assert proxy.ask(b"{")[0] == 400 and proxy.ask(b"[]")[0] == 400
    assert proxy.sent(proxy.prefills) == []


def test_what_a_client_may_write_arrives(proxied):
    """In JSON and in headers; but not whom to ask for KV."""
    proxy = proxied(*VLLM)
    body = b'{"prompt": "\\ud800", "x": NaN, "kv_transfer_params": {"remote_host": "x"}}'
    assert proxy.ask(body, Authorization="\xe9")[0] == 200
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    assert prefill["prompt"] == decode["prompt"] == "\ud800" and decode["x"] != decode["x"]
    assert decode["kv_transfer_params"] == PARAMS and "remote_host" not in prefill["kv_transfer_params"]
    (headers,) = (one.headers[0] for one in proxy.decodes if one.headers)
    assert headers["authorization"] == "\xe9" and headers["accept-encoding"] == "identity"
    assert [proxy.ask(Authorization="Bearer ")[0] for _ in range(8)] == [200] * 8


def test_more_requests_than_files_are_usually_allowed(proxied):
    few = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (40, r.getrlimit(r.RLIMIT_NOFILE)[1])); "
    proxy = proxied(*VLLM, before=few)
    for one in proxy.decodes:
        one.waits.clear()
    held = [proxy.open("POST", "/v1/completions", BODY) for _ in range(30)]
    wait_until(lambda: len(proxy.sent(proxy.decodes)) == 30, "all requests at decode")
    for one in proxy.decodes:
        one.waits.set()
    assert {connection.getresponse().status for connection in held} == {200}
    for connection in held:
        connection.close()
